"""The accelerator of this process: its kind, GPUs, streams, events, pinned memory and collective library.

No other file names a kind of accelerator. torch calls GPUs of NVIDIA and AMD "cuda" (and RCCL "nccl"), and those of
Intel "xpu". Route `nccl` is the accelerator's own library, whatever its name.
"""

from __future__ import annotations

import ctypes
import os
import socket
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpcdist.control import objects
from hpcdist.errors import LaunchError, refusal
from hpcdist.tensors import pool

if TYPE_CHECKING:
    from mpi4py import MPI


def kind() -> tuple[str, str]:
    """Return the device type of the GPUs for which this torch was built, and its name of their collective library.

    Of a torch for no such GPUs, none are found.
    """
    libraries = {"cuda": "nccl", "xpu": "xccl"}
    built_for = torch.accelerator.current_accelerator()
    device_type = built_for.type if built_for is not None and built_for.type in libraries else "cuda"
    return device_type, libraries[device_type]


KIND, LIBRARY = kind()


class MemoryKind(IntEnum):
    """The memory in which a rank has its data in a call, as a number in the header of the call.

    Attributes:
        CPU, GPU: host memory, GPU memory.
        FOLLOWS: memory of a receiver that passes no tensor: on its GPU if the root's tensor is on one.
        FOLLOWS_CPU: the same for a receiver without a GPU: host memory, wherever the root's tensor is.
    """

    CPU = 1
    GPU = 2
    FOLLOWS = 3
    FOLLOWS_CPU = 4


def holds(x: Tensor) -> bool:
    """Return whether a tensor is in GPU memory."""
    return x.device.type == KIND


def event(device: torch.device) -> torch.Event:
    """Record the work that this thread's current stream of a GPU has so far: another stream or thread waits for it."""
    return torch.accelerator.current_stream(device).record_event()


def idle(device: torch.device) -> bool:
    """Return whether this thread's current stream of a GPU has done its work."""
    return torch.accelerator.current_stream(device).query()


def synchronize(device: torch.device) -> None:
    """Wait for the work that this thread's current stream of a GPU has so far."""
    torch.accelerator.current_stream(device).synchronize()


def host_buffer(nbytes: int, pinned: bool) -> Tensor:
    """Allocate host memory for data in transit: pinned if a GPU copies from or to it, else from the pool."""
    if pinned:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True, device="cpu")
    return pool.empty([nbytes], torch.uint8, "cpu", fixed=True)


def count() -> int:
    """Return the number of GPUs that this process sees."""
    number: int = torch.get_device_module(KIND).device_count()
    return number


def properties(index: int) -> Any:
    """Return torch's properties of a GPU of this process."""
    return torch.get_device_module(KIND).get_device_properties(index)


def choose(
    comm: MPI.Intracomm, local_rank: int, asked: torch.device | str | None, backend: str | None, may_share: bool
) -> tuple[torch.device, bool]:
    """Return this rank's device, and whether each rank has a GPU of its own that LIBRARY can use. Collective.

    Args:
        asked: argument of init() on this rank; by default one GPU per rank by local rank, or the CPU without GPUs.
        backend: torch's backend, the same on all ranks.
        may_share: whether LIBRARY accepts several ranks on one GPU.

    Raises:
        RankError: on every rank, for a device that one of them does not have.
        LaunchError: on every rank, if ranks that share a GPU or have none are told to use LIBRARY.
    """
    devices = objects.run_on_all(comm, "init", lambda: _chosen(local_rank, asked))
    gpus = [gpu for _, gpu in devices]
    usable = dist.is_backend_available(LIBRARY)
    wanted = LIBRARY in backend if backend else usable
    own_gpus = None not in gpus and usable
    if wanted and backend and not own_gpus:
        where = [rank for rank, gpu in enumerate(gpus) if gpu is None]
        text = f"needs a GPU for every rank and a torch with {LIBRARY.upper()}; none on ranks {where}"
        raise LaunchError("HD110", f"backend {backend!r} {text}")
    problem = shared_gpu(gpus)
    if problem and not may_share:
        if wanted:
            raise LaunchError("HD110", problem)
        own_gpus = False
    device = devices[comm.rank][0]
    if device.type == KIND:
        torch.accelerator.set_device_index(device)
    return device, own_gpus


def _chosen(local_rank: int, asked: torch.device | str | None) -> tuple[torch.device, str | None]:
    """Return the device of this rank, and which GPU that is, if any."""
    gpus = count()
    device = of_rank(local_rank) if asked is None else torch.device(asked)
    if device.type == "cpu":
        return device, None
    if device.type != KIND:
        raise refusal(ValueError, "HD110", f"device is {device}, expected cpu or {KIND}")
    if device.index is None and gpus:
        device = of_rank(local_rank)
    if device.index is None or device.index >= gpus:
        raise refusal(ValueError, "HD110", f"device is {device}, but this process sees {gpus} GPUs")
    return device, identity(device.index)


def of_rank(local_rank: int) -> torch.device:
    """Return the GPU of a rank, by its number on its node; the CPU without GPUs."""
    gpus = count()
    return torch.device(KIND, local_rank % gpus) if gpus else torch.device("cpu")


def identity(index: int) -> str:
    """Return what tells a GPU of this process from all others of the job: host, PCI address and UUID.

    UUIDs alone do not where a driver leaves them blank (seen on ROCm), nor addresses where one GPU is cut (MIG).
    """
    known = address(torch.device(KIND, index))
    return f"{socket.gethostname()}, {f'PCI {known}, ' if known else ''}UUID {properties(index).uuid}"


def address(device: torch.device) -> str:
    """Return the address of a GPU on PCI, such as "0000:3b:00"; "" if unknown, or not a GPU."""
    gpu: Any = properties(device.index) if device.type == KIND else None
    if not hasattr(gpu, "pci_bus_id"):  # torch does not tell it of Intel's GPUs
        return ""
    return f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}"


def shared_gpu(gpus: list[str | None]) -> str | None:
    """Describe the problem and its fixes if two ranks have the same GPU; None otherwise."""
    first: dict[str, int] = {}
    for rank, gpu in enumerate(gpus):
        if gpu is not None and first.setdefault(gpu, rank) != rank:
            return (
                f"ranks {first[gpu]} and {rank} share one GPU ({gpu}), which {LIBRARY.upper()} refuses. Start at most "
                "one rank per GPU (mpirun --map-by ppr:GPUS:node, #SBATCH --ntasks-per-node=GPUS), check "
                f"CUDA_VISIBLE_DEVICES, or let ranks share it without {LIBRARY.upper()}: "
                "hpcdist.init(backend='gloo'), or stay off it: device='cpu'"
            )
    return None


def library_version() -> str:
    """Return the version of the collective library in this process."""
    if LIBRARY != "nccl":  # torch does not tell it of others
        return f"of torch {torch.__version__}"
    try:
        library = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:  # it is part of torch's own library, with which it was compiled
        compiled: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        return ".".join(map(str, compiled))
    code = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(code))
    return f"{code.value // 10000}.{code.value // 100 % 100}.{code.value % 100}"
