"""torch.distributed's own process group of all ranks."""

from __future__ import annotations

from collections.abc import MutableMapping
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from hpcdist.comm import rendezvous
from hpcdist.control import objects
from hpcdist.errors import coded, refusal
from hpcdist.runtime import registration
from hpcdist.tensors import pool
from hpcdist.watch.deadlines import deadline

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["agree_on", "default_backend", "start"]


def start(
    comm: MPI.Intracomm,
    meeting: rendezvous.Meeting,
    backend: str | None,
    timeout: timedelta,
    environ: MutableMapping[str, str],
) -> tuple[dist.ProcessGroup | None, bool]:
    """Start torch.distributed, unless it runs. Collective over `comm`.

    Args:
        backend: torch's; None if torch is making the group itself.
        environ: environment, to which the interfaces for gloo and NCCL are added unless the user has set them.

    Returns:
        The group of all ranks, if there is one yet, and whether it was started here.
    """
    started = backend is not None and not dist.is_initialized()
    if not dist.is_initialized():
        interface = rendezvous.interface(meeting)
        if interface is not None:  # else gloo takes what the host's name resolves to, on Debian 127.0.1.1
            environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            if meeting.host == "127.0.0.1":  # or NCCL's own rendezvous would listen on another one
                environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    if started:
        dist.init_process_group(
            backend,
            store=rendezvous.open_store(comm, meeting, timeout),
            rank=comm.rank,
            world_size=comm.size,
            timeout=timeout,
        )
    else:
        meeting.close()
    return dist.group.WORLD, started


def default_backend(own_gpus: bool) -> str:
    """Return torch's backend of a job: MPI for host memory, and NCCL where every rank has a GPU of its own.

    Until torch 2.13 a backend in Python replaces the whole group, which torch treats as one without NCCL (it does not
    coalesce messages, for example): jobs on GPUs keep gloo for host memory there.
    """
    if not own_gpus:
        return registration.NAME
    return f"cpu:{registration.NAME if registration.PLUGINS else 'gloo'},cuda:nccl"


def agree_on(
    comm: MPI.Intracomm, backend: object, timeout: object, env_timeout: str | None, env_cache: str | None
) -> timedelta:
    """Check the arguments and variables of init() on all ranks, and return the deadline. Collective over `comm`."""

    def check() -> tuple[str | None, float]:
        if backend is not None and not isinstance(backend, str):
            raise refusal(TypeError, "HD114", f"backend must be a string, got {type(backend).__name__}")
        if backend is not None:
            dist.BackendConfig(dist.Backend(backend))
        pool.limit_of(env_cache, 0)
        return backend, deadline(timeout, env_timeout)

    given = objects.all_gather(comm, "init", check)
    names = [name for name, _ in given]
    odd = {r: f"backend is {n!r}, where rank 0 has {names[0]!r}" for r, n in enumerate(names) if n != names[0]}
    objects.raise_problems("init", {rank: coded("HD304", text) for rank, text in odd.items()})
    return timedelta(seconds=given[0][1])
