"""torch.distributed's own process group of all ranks."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hpcdist.comm import rendezvous
from hpcdist.control import objects
from hpcdist.errors import refusal
from hpcdist.runtime import registration
from hpcdist.tensors import accelerator, pool
from hpcdist.watch.deadlines import deadline

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["agree_on", "default_backend", "start"]

BINDS = torch.__version__ >= "2.15.0a0"  # also of NVIDIA's containers
"""Whether torch binds every group of NCCL to a GPU: without device_id to LOCAL_RANK, else to the global rank modulo the
visible GPUs, which is another one where places are cyclic, ranks fewer than GPUs, or init(device=) says so.

Earlier ones take the GPU of the tensors, and with a bound one hang in new_group(some_ranks, backend="gloo" or "mpi"):
the other ranks split NCCL's communicator (pytorch#145376).
"""


def start(
    comm: MPI.Intracomm,
    meeting: rendezvous.Meeting,
    backend: str | None,
    timeout: timedelta,
    device: torch.device,
) -> bool:
    """Start torch.distributed, unless it runs. Collective over `comm`.

    Args:
        backend: torch's; None if torch is making the group itself.
        device: this rank's; a GPU of its own, if the backend is NCCL's.

    Returns:
        Whether it was started here.
    """
    started = backend is not None and not dist.is_initialized()
    if started:
        dist.init_process_group(
            backend,
            store=rendezvous.open_store(comm, meeting, timeout),
            rank=comm.rank,
            world_size=comm.size,
            timeout=timeout,
            device_id=device if BINDS and "nccl" in str(backend) else None,
        )
    else:
        meeting.close()
    return started


def default_backend(own_gpus: bool) -> str:
    """Return torch's backend of a job: MPI for host memory, and NCCL where every rank has a GPU of its own.

    Until torch 2.13 a backend in Python replaces the whole group, which torch treats as one without NCCL (it does not
    coalesce messages, for example): jobs on GPUs keep gloo for host memory there.
    """
    if not own_gpus:
        return registration.NAME
    return f"cpu:{registration.NAME if registration.PLUGINS else 'gloo'},{accelerator.KIND}:{accelerator.LIBRARY}"


def agree_on(
    comm: MPI.Intracomm,
    backend: object,
    bind: object,
    timeout: object,
    env_timeout: str | None,
    env_cache: str | None,
) -> timedelta:
    """Check the arguments and variables of init() on all ranks, and return the deadline. Collective over `comm`."""

    def check() -> tuple[dict[str, Any], float]:
        if backend is not None and not isinstance(backend, str):
            raise refusal(TypeError, "HD114", f"backend must be a string, got {type(backend).__name__}")
        if backend is not None:
            dist.BackendConfig(dist.Backend(backend))
        if bind not in (None, "numa"):
            raise refusal(ValueError, "HD114", f"bind is {bind!r}, expected 'numa' or None")
        pool.limit_of(env_cache, 0)
        return {"backend": backend, "bind": bind}, deadline(timeout, env_timeout)

    given = objects.run_on_all(comm, "init", check)
    odd = {rank: objects.first_difference(given[0][0], options) for rank, (options, _) in enumerate(given)}
    objects.raise_problems("init", {rank: text for rank, text in odd.items() if text is not None})
    return timedelta(seconds=given[0][1])
