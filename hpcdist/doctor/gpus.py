"""The GPUs: which ones torch sees, which rank gets which, and whether they reach each other's memory."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpcdist.comm import devices
from hpcdist.comm.devices import nccl_version
from hpcdist.doctor.cores import members, show_cores
from hpcdist.doctor.findings import Facts
from hpcdist.doctor.topics import Ranks, Section, Verdict, agree, by_node, each, error_of, some, topic
from hpcdist.errors import reason
from hpcdist.runtime.cli import ranks_text

__all__ = ["gather", "judge"]

_PCI = Path("/sys/bus/pci/devices")


def gather() -> Facts:
    """Collect the versions of torch and NCCL, and the GPUs visible to this process."""
    gpu: dict[str, Any] = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "gloo": dist.is_gloo_available(),
        "nccl": nccl_version() if dist.is_nccl_available() else None,
        "in_node": len(_device_files()),
        "gpus": [],
        "peers": [],
    }
    try:
        count = torch.cuda.device_count()
        properties = [torch.cuda.get_device_properties(i) for i in range(count)]
        gpu["gpus"] = [
            {"name": p.name, "id": devices.identity(i), "bytes": p.total_memory, **_affinity(p)}
            for i, p in enumerate(properties)
        ]
        gpu["peers"] = [[i == j or torch.cuda.can_device_access_peer(i, j) for j in range(count)] for i in range(count)]
    except (RuntimeError, AssertionError) as error:  # such as a driver that is too old, or a GPU in exclusive mode
        gpu["error"] = reason(error)
    if 0 < len(gpu["gpus"]) < gpu["in_node"]:
        gpu["openable"] = sum(map(_openable, _device_files()))
    return {"gpu": gpu}


def _device_files() -> list[Path]:
    return list(Path("/dev").glob("nvidia[0-9]*"))


def _openable(path: Path) -> bool:
    """Whether this process may use a GPU: a control group may forbid it, which CUDA_VISIBLE_DEVICES does not."""
    try:
        os.close(os.open(path, os.O_RDWR))
    except OSError:
        return False
    return True


def _affinity(properties: Any) -> dict[str, Any]:
    """Return the NUMA domain of a GPU, and the CPUs that are near it; nothing if the system does not know them."""
    domain, bus, device = (getattr(properties, f"pci_{name}_id", None) for name in ("domain", "bus", "device"))
    if domain is None or bus is None or device is None:
        return {}
    folder = _PCI / f"{domain:04x}:{bus:02x}:{device:02x}.0"
    with suppress(OSError, ValueError):
        numa = int((folder / "numa_node").read_text())
        return {"numa": numa, "near": (folder / "local_cpulist").read_text().strip()} if numa >= 0 else {}
    return {}


@topic("NCCL", "gpu")
def _nccl_library(ranks: Ranks) -> Verdict:
    text = each(ranks, lambda facts: f"NCCL {facts['gpu']['nccl']}" if facts["gpu"]["nccl"] else "torch without NCCL")
    if not any(facts["gpu"]["gpus"] or facts["gpu"]["in_node"] for facts in ranks):
        return "ok", f"{text}, and no GPU that needs it"
    if not all(facts["gpu"]["nccl"] for facts in ranks):
        fix = "pip install a torch built for CUDA: https://pytorch.org/get-started/locally"
        return "warning", f"{text}: GPU memory does not travel through NCCL", fix
    if not agree(ranks, lambda facts: facts["gpu"]["nccl"]):
        return "broken", text, "the same environment on all nodes; look for an LD_PRELOAD of NCCL"
    return "ok", text


def _mine(facts: Facts) -> dict[str, Any] | None:
    """Return the GPU that hpcdist.init() assigns to a rank."""
    gpus = facts["gpu"]["gpus"]
    return gpus[facts.get("local_rank", 0) % len(gpus)] if gpus else None


@topic("GPUs", "gpu")
def _gpus(ranks: Ranks) -> Verdict:
    failed = error_of(ranks, "gpu")
    if failed is not None:
        fix = "nvidia-smi on that node: a driver that is too old for this torch, or a GPU that another job holds"
        return "broken", f"{ranks_text(failed[1])}: {failed[0]}", fix
    mine = [_mine(facts) for facts in ranks]
    without = [facts for facts, gpu in zip(ranks, mine, strict=True) if gpu is None]
    if len(without) == len(ranks):
        return _unseen(ranks)
    problem = devices.shared_gpu([None if gpu is None else str(gpu["id"]) for gpu in mine])
    if problem and any(facts["gpu"]["nccl"] for facts in ranks):
        visible = {facts["environ"].get("CUDA_VISIBLE_DEVICES") for facts in ranks}
        if len(visible) == 1 and None not in visible:
            problem = f"{problem}. CUDA_VISIBLE_DEVICES={visible.pop()} on all ranks"
        fix = "one rank a GPU: mpirun --map-by ppr:GPUS:node, srun --ntasks-per-node=GPUS --gpus-per-node=GPUS"
        return "broken", problem, f"{fix}; unset CUDA_VISIBLE_DEVICES if you set it by hand"
    if without:
        text = f"none on {ranks_text(facts['rank'] for facts in without)}, which work on the CPU"
        fix = "srun --gpus-per-node=N for all nodes; nvidia-smi on that node; look at CUDA_VISIBLE_DEVICES"
        return "warning", text, fix
    shown = [f"rank {f['rank']}: {g['name']}, {g['id']}" for f, g in zip(ranks, mine, strict=True) if g]
    return "ok", some(shown, 16, "ranks")


def _unseen(ranks: Ranks) -> Verdict:
    """Judge ranks that see no GPU: there is none, or something hides it."""
    hidden = next((facts for facts in ranks if facts["gpu"]["in_node"]), None)
    if hidden is None:
        return "ok", "none: all ranks work on the CPU"
    text = f"{hidden['host']} has {hidden['gpu']['in_node']}, but torch sees none"
    if hidden["gpu"]["cuda"] is None:
        return "warning", f"{text}: it was built for the CPU", "pip install a torch built for CUDA"
    return "warning", text, "look at CUDA_VISIBLE_DEVICES, and whether nvidia-smi runs there"


@topic("peer access", "gpu")
def _peers(ranks: Ranks) -> Verdict:
    """Judge whether the GPUs of a node read each other's memory without the host, where a rank sees several."""
    asked = [node[0] for node in by_node(ranks) if len(node[0]["gpu"]["peers"]) > 1]
    for facts in asked:
        peers = facts["gpu"]["peers"]
        without = [(i, j) for i, row in enumerate(peers) for j, yes in enumerate(row) if not yes]
        if without:
            pairs = f"{len(without)} of {len(peers) * (len(peers) - 1)} pairs on {facts['host']}"
            text = (
                f"{pairs} have none, such as GPUs {without[0][0]} and {without[0][1]}: NCCL copies through host memory"
            )
            fix = "nvidia-smi topo -m shows what lies between them; IOMMU and PCIe ACS disable it"
            return "warning", text, fix
    return ("ok", f"between all {len(asked[0]['gpu']['peers'])} GPUs of a node") if asked else None


@topic("GPUs of the others", "gpu")
def _isolated(ranks: Ranks) -> Verdict:
    """Judge ranks of a node that may use one GPU each: CUDA then cannot pass GPU memory from one to the other."""
    for node in by_node(ranks):
        alone = [f for f in node if "openable" in f["gpu"] and f["gpu"]["openable"] <= len(f["gpu"]["gpus"])]
        seen = {gpu["id"] for facts in node for gpu in facts["gpu"]["gpus"]}
        if len(node) > 1 and alone and len(seen) > len(alone[0]["gpu"]["gpus"]):
            gpu, count = alone[0]["gpu"], len(node)
            text = f"{ranks_text(f['rank'] for f in alone)} on {alone[0]['host']} may use {gpu['openable']} of the "
            text += (
                f"{gpu['in_node']} GPUs of the node, as with --gpus-per-task or --gpu-bind: NCCL and a CUDA-aware MPI "
            )
            text += "copy through host memory, or fail with cuIpcOpenMemHandle"
            fix = f"srun --ntasks-per-node={count} --gpus-per-node={count} --gpu-bind=none; hpcdist.init() gives each "
            return "warning", text, f"{fix}rank the GPU of its local rank"
    return "ok", "the ranks of a node reach each other's GPUs" if any(f["gpu"]["gpus"] for f in ranks) else "no GPUs"


@topic("GPU affinity", "gpu", "cores")
def _near(ranks: Ranks) -> Verdict:
    """Judge ranks that are bound to cores far from their GPU."""
    known = [(facts, gpu) for facts in ranks if (gpu := _mine(facts)) and gpu.get("near")]
    far = [(facts, gpu) for facts, gpu in known if not set(members(gpu["near"])) & set(facts["cores"])]
    if not far:
        return "ok", "each rank may run on cores near its GPU" if known else "not known, or no GPUs"
    facts, gpu = far[0]
    text = (
        f"{ranks_text(f['rank'] for f, _ in far)} run far from their GPUs: rank {facts['rank']} on {facts['host']} has "
    )
    text += f"{show_cores(facts['cores'])}, and its GPU is near {show_cores(members(gpu['near']))}"
    node = sorted((f.get("local_rank", 0), g["numa"]) for f, g in known if f["node"] == facts["node"])
    domains = ",".join(str(numa) for _, numa in node)
    fix = f"srun --cpu-bind=map_ldom:{domains}, or --gpu-bind=closest; mpirun --map-by numa --bind-to numa; "
    return "warning", text, f"{fix}nvidia-smi topo -m shows it"


judge = Section("GPUs", _nccl_library, _gpus, _isolated, _near, _peers)
