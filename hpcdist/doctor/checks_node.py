"""The checks of what a node gives its ranks: cores, limits and GPUs. The docstrings are their meanings."""

from __future__ import annotations

from typing import Any

from hpcdist.comm import devices
from hpcdist.doctor.facts import members
from hpcdist.doctor.table import NODE, RANK, Facts, Ranks, Verdict, check, grouped, known, names, some
from hpcdist.runtime.cli import plural, ranks_text, show_bytes

_BIND = "`srun --cpus-per-task=N --cpu-bind=cores`, `mpirun --bind-to core --map-by slot:PE=N`"
_LITTLE, _TOO_LITTLE = 2**30, 2**28  # bytes of memory a rank: torch alone takes about a quarter of a GiB
_LOCKED = 2**26  # bytes; with less, InfiniBand registers no buffers
_FILES, _FILES_A_RANK = 256, 4  # open files of a rank: its own and its workers', and its connections to each other rank


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


@check(
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


@check(
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


@check(
    "cores", "NUMA", "numa", per=RANK,
    fix="`srun --distribution=block:block --cpu-bind=cores`, `mpirun --map-by numa --bind-to core`",
)  # fmt: skip
def _numa(facts: Facts) -> Verdict:
    """A rank is bound to cores of several NUMA domains though they would fit into one."""
    cores, numa = facts["cores"], facts["numa"]
    if len(numa) > 1 and len(cores) < facts["cpus"] and len(cores) <= min(numa.values()):
        return "warning", f"{_show(cores)}, in {' and '.join(numa)}: half of the memory may be far away"
    return "ok", plural(max(1, len(numa)), "domain")


@check(
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


@check("cores", "threads", "threads", "physical", per=NODE, fix="`export OMP_NUM_THREADS=N`")
def _threads(ranks: Ranks) -> Verdict:
    """torch starts more threads than there are physical cores for the ranks of the node."""
    most = max(facts["threads"] for facts in ranks)
    cores, physical = (len({core for facts in ranks for core in facts[kind]}) for kind in ("cores", "physical"))
    if len(ranks) == 1 or sum(facts["threads"] for facts in ranks) <= max(physical, len(ranks)):
        return "ok", f"torch computes with {plural(most, 'thread')} a rank"
    text = f"{len(ranks)} ranks with {most} threads each on {physical} cores of {ranks[0]['host']}"
    text += f" ({cores} hardware threads)" if physical < cores else ""
    text += "" if "OMP_NUM_THREADS" in ranks[0]["environ"] else ", because OMP_NUM_THREADS is not set"
    return "warning", text, f"export OMP_NUM_THREADS={max(1, physical // len(ranks))}"


@check(
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


@check(
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


@check(
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


@check(
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


@check(
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


@check("GPUs", "AMD and Intel GPUs", "gpu.others", per=NODE, fix="`hpcdist.init(device='cpu')` works on such nodes")
def _others(ranks: Ranks) -> Verdict:
    """A node has GPUs of AMD (/dev/kfd) or Intel (/dev/dri). hpcdist was never tried on them. A torch that is built for
    ROCm shows those of AMD as its CUDA devices."""
    others = ranks[0]["gpu"]["others"]
    return ("warning", f"{', '.join(others)}: hpcdist was never tried on them") if others else ("ok", "none")


@check(
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


@check("GPUs", "GPU affinity", "gpu", "cores", per=NODE, fix="`srun --gpu-bind=closest`; `nvidia-smi topo -m` shows it")
def _near(ranks: Ranks) -> Verdict:
    """A rank runs on cores of another NUMA domain than its GPU."""
    having = [(facts, gpu) for facts in ranks if (gpu := _mine(facts)) and gpu.get("near")]
    far = [(facts, gpu) for facts, gpu in having if not set(members(gpu["near"])) & set(facts["cores"])]
    if not far:
        return "ok", "each rank may run on cores near its GPU" if having else "not known, or no GPUs"
    facts, gpu = far[0]
    text = f"{names([facts for facts, _ in far])} run far from their GPUs: rank {facts['rank']} has "
    text += f"{_show(facts['cores'])}, and its GPU is near {_show(members(gpu['near']))}"
    domains = ",".join(str(gpu["numa"]) for _, gpu in having)
    fix = f"srun --cpu-bind=map_ldom:{domains}, or --gpu-bind=closest; mpirun --map-by numa --bind-to numa; "
    return "warning", text, f"{fix}nvidia-smi topo -m shows it"
