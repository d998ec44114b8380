"""The GPUs: which ones torch sees, which rank gets which, and whether they reach each other's memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpcdist.comm import devices
from hpcdist.comm.devices import nccl_version
from hpcdist.doctor.findings import Facts
from hpcdist.doctor.topics import Ranks, Verdict, agree, by_node, each, error_of, judging, some, topic
from hpcdist.errors import reason
from hpcdist.runtime.cli import ranks_text

__all__ = ["gather", "judge"]


def gather() -> Facts:
    """Collect the versions of torch and NCCL, and the GPUs visible to this process."""
    gpu: dict[str, Any] = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "gloo": dist.is_gloo_available(),
        "nccl": nccl_version() if dist.is_nccl_available() else None,
        "in_node": len(list(Path("/dev").glob("nvidia[0-9]*"))),
        "gpus": [],
        "peers": [],
    }
    try:
        count = torch.cuda.device_count()
        properties = [torch.cuda.get_device_properties(i) for i in range(count)]
        gpu["gpus"] = [{"name": p.name, "uuid": str(p.uuid), "bytes": p.total_memory} for p in properties]
        gpu["peers"] = [[i == j or torch.cuda.can_device_access_peer(i, j) for j in range(count)] for i in range(count)]
    except (RuntimeError, AssertionError) as error:  # such as a driver that is too old, or a GPU in exclusive mode
        gpu["error"] = reason(error)
    return {"gpu": gpu}


@topic("torch", "gpu")
def _torch(ranks: Ranks) -> Verdict:
    text = each(ranks, lambda facts: f"torch {facts['gpu']['torch']}")
    if not agree(ranks, lambda facts: facts["gpu"]["torch"]):
        return "broken", text, "the same environment on all nodes"
    if not all(facts["gpu"]["gloo"] for facts in ranks):
        fix = "pip install torch from PyPI or pytorch.org: their builds have gloo"
        return "broken", f"{text}, built without gloo, which hpcdist.init() needs", fix
    return "ok", text


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
    uuids = [None if gpu is None else str(gpu["uuid"]) for gpu in mine]
    problem = devices.shared_gpu(uuids)
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
    shown = [f"rank {f['rank']}: {g['name']} {g['uuid']}" for f, g in zip(ranks, mine, strict=True) if g]
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


judge = judging(_torch, _nccl_library, _gpus, _peers)
