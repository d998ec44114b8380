"""Select the route of a call."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from hpcdist import activity
from hpcdist.comm.route import Route
from hpcdist.errors import RankError, coded
from hpcdist.tensors.accelerator import MemoryKind

if TYPE_CHECKING:
    from hpcdist.comm.team import Team

# name -> (module, attribute); the module is imported when the route is first selected
ROUTES = {
    "nccl": ("hpcdist.routes.c10d", "NCCL"),
    "gloo": ("hpcdist.routes.c10d", "GLOO"),
    "mpi": ("hpcdist.comm.mpi", "MPI_ROUTE"),
    "hdf5": ("hpcdist.routes.hdf5_files", "HDF5_ROUTE"),
}


@cache
def load(name: str) -> Route:
    """Import and return the route of that name."""
    module, attribute = ROUTES[name]
    route: Route = getattr(import_module(module), attribute)
    return route


def agreed(verb: str, name: str, team: Team, kinds: tuple[int, ...]) -> Route:
    """Return the route of a call, given the kind of memory of each rank's data. Collective over the team.

    A route that cannot access GPU memory is given host buffers.

    Raises:
        RankError: on every rank, if the named route cannot be used here or with these data.
    """
    key = (name, kinds)
    if key not in team.routes:
        team.routes[key] = _select(verb, name, team, [kind == MemoryKind.GPU for kind in kinds])
    route: Route = team.routes[key][0]
    activity.took(route.name)
    return route


def _select(verb: str, name: str, team: Team, gpu: list[bool]) -> tuple[Route, str]:
    """Return the route and the reason."""
    why = f"route={name!r} was passed"
    if name == "auto":
        name = "nccl" if all(gpu) and load("nccl").missing(team) is None else "mpi"
        where = "on GPUs" if all(gpu) else "of which some are in host memory" if any(gpu) else "in host memory"
        why = f"route='auto' takes {name} for data {where}"
        if all(gpu) and name != "nccl":
            why += f" if nccl is not available: {load('nccl').missing(team)}"
    route = load(name)
    missing = route.missing(team)
    if missing is not None:
        raise RankError(verb, dict.fromkeys(range(team.size), coded("HD207", missing)))
    if any(gpu) and not route.carries(team, gpu=True):
        from hpcdist.routes.staged import Staged

        return Staged(route), why
    if not all(gpu) and not route.carries(team, gpu=False):
        text = f"the tensor is on the CPU, and route {name} moves GPU memory only; use route auto"
        raise RankError(verb, {rank: coded("HD207", text) for rank, on_gpu in enumerate(gpu) if not on_gpu})
    if name == "mpi" and any(gpu):
        from hpcdist.comm.mpi import MPI_ON_GPU  # which imports MPI

        route = MPI_ON_GPU
    return route, why
