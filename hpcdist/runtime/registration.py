"""hpcdist as a backend of torch.distributed: ``init_process_group("mpi")``, alone, under mpirun and srun.

Registered on import, and found by torch 2.14 and later by the entry point. Until 2.13 torch keeps the name "mpi" for
its own: there the name is "mpi4py". Nothing of MPI is imported before a group is made.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hpcdist.comm.groups import freeing
from hpcdist.errors import LaunchError

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcdist.backend.communicator import Communicator

__all__ = ["NAME", "NAMES", "Host", "register"]

NAMES = ("mpi", "mpi4py") if torch.__version__ >= (2, 14) else ("mpi4py",)  # type: ignore[operator]
NAME = NAMES[0]
torch_rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")  # whose name is also a function's
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Host:
    """What the groups of a job need of it.

    Attributes:
        comm: communicator of all ranks, in torch's order; None while there is no world.
        node_of: for each rank of it, the number of its node.
        begin: makes a world for a program that has called torch alone, given the deadline.
        open_store: makes torch's store for all ranks of the job: (store, rank, world_size).
        environ: returns the environment.
    """

    comm: MPI.Intracomm | None = None
    node_of: tuple[int, ...] = ()
    begin: Callable[[timedelta], None]
    open_store: Callable[[timedelta], tuple[Any, int, int]]
    environ: Callable[[], Any]


host = Host()


def register() -> None:
    """Register the backend with torch.distributed; a second call does nothing."""
    for name in NAMES:
        if name.upper() not in dist.Backend._plugins:
            dist.Backend.register_backend(name, _create, extended_api=True, devices=["cpu", "cuda"])
    handlers = torch_rendezvous._rendezvous_handlers
    if handlers["env"] is torch_rendezvous._env_rendezvous_handler:
        handlers["env"] = _rendezvous


def _rendezvous(url: str, timeout: timedelta = torch_rendezvous.default_pg_timeout, **options: Any) -> Iterator[Any]:
    """torch's rendezvous by the environment; for this backend by MPI, if the environment has none of its variables."""
    given = "rank=" in url or "world_size=" in url or any(host.environ().get(name) for name in _VARIABLES)
    if given or not _is_ours(_asked_backend()):
        yield from torch_rendezvous._env_rendezvous_handler(url, timeout=timeout, **options)
    else:
        yield host.open_store(timeout)
        raise RuntimeError("Unable to perform re-rendezvous using MPI")


def _is_ours(backend: object) -> bool:
    return isinstance(backend, str) and any(part.split(":")[-1] in NAMES for part in backend.lower().split(","))


def _asked_backend() -> object:
    """Return the backend that init_process_group() was called with: torch tells it to no rendezvous."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "init_process_group" and "backend" in frame.f_locals:
            return frame.f_locals["backend"]
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _create(options: Any, backend_options: Any = None) -> Any:
    """Make a process group. Collective over its ranks.

    Args:
        options: torch's: store, group_rank, group_size, timeout, group_id, global_ranks_in_group.
    """
    from hpcdist.backend import process_group

    ranks = list(options.global_ranks_in_group)
    if not ranks and not dist.is_initialized() and host.comm is None:
        host.begin(options.timeout)
    team = _communicator(ranks, options)
    return process_group.create(team, NAME, options)


def _communicator(ranks: list[int], options: Any) -> Communicator:
    from mpi4py import MPI

    from hpcdist.backend.communicator import Communicator

    whole = host.comm
    assert whole is not None
    if not ranks:
        if (options.group_rank, options.group_size) != (whole.rank, whole.size):
            raise LaunchError(
                f"torch was told that this is rank {options.group_rank} of {options.group_size}, and MPI says rank "
                f"{whole.rank} of {whole.size}: leave out rank, world_size and the variables RANK and WORLD_SIZE, or "
                "start as many processes with mpirun or srun"
            )
        return Communicator(whole.Dup(), range(whole.size), host.node_of)
    with freeing(whole.Get_group()) as all_, freeing(all_.Incl(ranks)) as part:
        tag = sum(options.group_id.encode()) % 2**15  # separates the groups that several threads make at once
        comm = MPI.Intracomm.Create_group(whole, part, tag)
    return Communicator(comm, ranks, [host.node_of[rank] for rank in ranks])
