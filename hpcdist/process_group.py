"""torch.distributed's own process group of all ranks."""

from __future__ import annotations

from collections.abc import MutableMapping
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from hpcdist import rendezvous

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["start"]


def start(
    comm: MPI.Intracomm,
    meeting: rendezvous.Meeting,
    own_gpus: bool,
    backend: str | None,
    timeout: timedelta,
    environ: MutableMapping[str, str],
) -> tuple[dist.ProcessGroup, bool]:
    """Start torch.distributed, or take it as it runs. Collective over `comm`.

    Args:
        environ: the environment, to which the interfaces for gloo and NCCL are added where the user names none.

    Returns:
        The group of all ranks, and whether it was started here.
    """
    started = not dist.is_initialized()
    if started:
        interface = rendezvous.interface(meeting)
        if interface is not None:  # else gloo takes what the host's name stands for, on Debian 127.0.1.1
            environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            if meeting.host == "127.0.0.1":  # or NCCL's own rendezvous would listen on another one
                environ.setdefault("NCCL_SOCKET_IFNAME", interface)
        dist.init_process_group(
            backend or ("cpu:gloo,cuda:nccl" if own_gpus else "gloo"),
            store=rendezvous.open_store(comm, meeting, timeout),
            rank=comm.rank,
            world_size=comm.size,
            timeout=timeout,
        )
    elif meeting.listener is not None:
        meeting.listener.close()
    group = dist.group.WORLD
    assert group is not None
    return group, started
