"""The ways that data can take, and which one a call takes.

Every route offers the same five operations on messages: the memory of contiguous tensors of any shape and dtype, with
counts and displacements in bytes and in rank order. The caller has made sure that all ranks agree on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

from hpcdist.errors import RankError

if TYPE_CHECKING:
    from hpcdist.team import Team

__all__ = ["CPU", "CUDA", "NAMES", "ROUTES", "Alltoall", "Message", "Route", "agreed", "best", "load"]

Ints = Sequence[int]
CPU, CUDA = 1, 2  # kinds of memory
Message = tuple[int, Tensor]  # (a rank of the team, the bytes that are sent to it or received from it)


class Alltoall(NamedTuple):
    """What one rank sends to and receives from each in an alltoallv, in bytes.

    Attributes:
        longest: of the messages of all ranks.
        total: the most that the `send` or `recv` of any rank has.
    """

    sendcounts: Ints
    sdispls: Ints
    recvcounts: Ints
    rdispls: Ints
    longest: int
    total: int


class Route(Protocol):
    """One way to move messages between the ranks of a team."""

    def missing(self, team: Team) -> str | None:
        """Why this route cannot be used in this job, and how to get it; None if it can. The same on all ranks."""

    def carries(self, team: Team, cuda: bool) -> bool:
        """Whether it reads and writes GPU memory (`cuda`), or host memory, itself. Collective over the team."""

    def gatherv(self, team: Team, send: Tensor, recv: Tensor | None, counts: Ints, displs: Ints, root: int) -> None:
        """Rank i's `send` (counts[i] bytes) arrives at the root in ``recv[displs[i]:]``."""

    def scatterv(self, team: Team, send: Tensor | None, recv: Tensor, counts: Ints, displs: Ints, root: int) -> None:
        """The root's ``send[displs[i]:]`` (counts[i] bytes) arrives at rank i in `recv`."""

    def allgatherv(self, team: Team, send: Tensor, recv: Tensor, counts: Ints, displs: Ints) -> None:
        """Rank i's `send` (counts[i] bytes) arrives at every rank in ``recv[displs[i]:]``."""

    def alltoallv(self, team: Team, send: Tensor, recv: Tensor, what: Alltoall) -> None:
        """Rank i's ``send[sdispls[j]:]`` (sendcounts[j] bytes) arrives at rank j in ``recv[rdispls[i]:]``."""

    def exchange(self, team: Team, sends: list[Message], recvs: list[Message], longest: int) -> None:
        """Each message on its own, straight from and into its memory. At most one each way for two ranks, none for a
        rank and itself, none that is empty; `longest` is the number of bytes of the longest one of all ranks."""


# A route's name -> where it is made; the module is imported when the route is first selected.
ROUTES = {
    "nccl": ("hpcdist.routes.c10d", "NCCL"),
    "gloo": ("hpcdist.routes.c10d", "GLOO"),
    "mpi": ("hpcdist.routes.mpi", "MPI_ROUTE"),
    "hdf5": ("hpcdist.routes.hdf5", "HDF5_ROUTE"),
}


NAMES = ("auto", *ROUTES)  # what a caller may pass as ``route=``


@cache
def load(name: str) -> Route:
    """The route of that name, its module imported."""
    module, attribute = ROUTES[name]
    route: Route = getattr(import_module(module), attribute)
    return route


def agreed(verb: str, name: str, team: Team, kinds: tuple[int, ...]) -> Route:
    """The route of a call whose data are in memory of these kinds, by rank. Collective over the team.

    A route that does not touch the memory in which some rank has its data gets it by way of host buffers.

    Raises:
        RankError: on every rank, if the route that was named cannot be used here or with these data.
    """
    key = ("route", name, kinds)
    if key not in team.memo:
        team.memo[key] = _select(verb, name, team, [kind == CUDA for kind in kinds])
    route: Route = team.memo[key]
    return route


def best(team: Team, cuda: bool) -> str:
    """What route="auto" stands for: nccl where all data are in GPU memory (`cuda`) and the team has it, else mpi."""
    return "nccl" if cuda and load("nccl").missing(team) is None else "mpi"


def _select(verb: str, name: str, team: Team, cuda: list[bool]) -> Route:
    if name == "auto":
        name = best(team, all(cuda))
    route = load(name)
    reason = route.missing(team)
    if reason is not None:
        raise RankError(verb, dict.fromkeys(range(team.size), reason))
    if any(cuda) and not route.carries(team, cuda=True):
        from hpcdist.routes.staged import Staged

        return Staged(route)
    if not all(cuda) and not route.carries(team, cuda=False):
        here = f"the tensor is on the CPU, and route {name} moves GPU memory only; use route auto"
        raise RankError(verb, {rank: here for rank, is_cuda in enumerate(cuda) if not is_cuda})
    return route
