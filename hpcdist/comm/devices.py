"""Choose the device of each rank, and find whether every rank has a GPU to itself."""

from __future__ import annotations

import ctypes
import os
import socket
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hpcdist.control import objects
from hpcdist.errors import LaunchError, refusal

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["choose", "identity", "nccl_version", "shared_gpu"]


def choose(
    comm: MPI.Intracomm, local_rank: int, asked: torch.device | str | None, backend: str | None, may_share: bool
) -> tuple[torch.device, bool]:
    """Return this rank's device, and whether each rank has a GPU of its own that NCCL can use. Collective.

    Args:
        asked: argument of init() on this rank; by default one GPU a rank by local rank, or the CPU without GPUs.
        backend: torch's backend, the same on all ranks.
        may_share: whether NCCL accepts several ranks on one GPU.

    Raises:
        RankError: on every rank, for a device that one of them does not have.
        LaunchError: on every rank, if ranks that share a GPU or have none are told to use NCCL.
    """

    def choose() -> tuple[torch.device, str | None]:
        gpus = torch.cuda.device_count()
        device = torch.device("cuda" if gpus else "cpu") if asked is None else torch.device(asked)
        if device.type == "cpu":
            return device, None
        if device.type != "cuda":
            raise refusal(ValueError, "HD110", f"device is {device}, expected cpu or cuda")
        if device.index is None and gpus:
            device = torch.device("cuda", local_rank % gpus)
        if device.index is None or device.index >= gpus:
            raise refusal(ValueError, "HD110", f"device is {device}, but this process sees {gpus} GPUs")
        return device, identity(device.index)

    found = objects.run_on_all(comm, "init", choose)
    gpus = [gpu for _, gpu in found]
    wants_nccl = "nccl" in backend if backend else dist.is_nccl_available()
    own_gpus = None not in gpus and dist.is_nccl_available()
    if wants_nccl and backend and not own_gpus:
        where = [rank for rank, gpu in enumerate(gpus) if gpu is None]
        raise LaunchError(
            "HD110", f"backend {backend!r} needs a GPU for every rank and a torch with NCCL; none on ranks {where}"
        )
    problem = shared_gpu(gpus)
    if problem and not may_share:
        if wants_nccl:
            raise LaunchError("HD110", problem)
        own_gpus = False
    device = found[comm.rank][0]
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device, own_gpus


def identity(index: int) -> str:
    """Return what tells a GPU of this process from all others of the job.

    UUIDs alone do not where a driver leaves them blank (seen on ROCm), nor addresses where one GPU is cut (MIG).
    """
    gpu: Any = torch.cuda.get_device_properties(index)
    address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}"
    return f"{socket.gethostname()}, PCI {address}, UUID {gpu.uuid}"


def shared_gpu(gpus: list[str | None]) -> str | None:
    """Describe the problem and its fixes if two ranks have the same GPU; None otherwise."""
    first: dict[str, int] = {}
    for rank, gpu in enumerate(gpus):
        if gpu is not None and first.setdefault(gpu, rank) != rank:
            return (
                f"ranks {first[gpu]} and {rank} share one GPU ({gpu}), which NCCL refuses. Start at most one "
                "rank a GPU (mpirun --map-by ppr:GPUS:node, srun --ntasks-per-node=GPUS), check CUDA_VISIBLE_DEVICES, "
                "or let ranks share it without NCCL: hpcdist.init(backend='gloo'), or stay off it: device='cpu'"
            )
    return None


def nccl_version() -> str:
    """Return the version of the NCCL in this process: torch.cuda.nccl.version() is the one torch was compiled with."""
    try:
        library = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:  # it is part of torch's own library
        compiled: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        return ".".join(map(str, compiled))
    code = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(code))
    return f"{code.value // 10000}.{code.value // 100 % 100}.{code.value % 100}"
