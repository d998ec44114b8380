"""The interface of all routes: the same five operations on messages.

A message is the memory of a contiguous tensor of any shape and dtype. Counts and displacements are in bytes and in rank
order, and already agreed on by all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

if TYPE_CHECKING:
    from hpcdist.comm.team import Team

__all__ = ["Allgather", "Alltoall", "Ints", "Message", "Method", "Route"]

Ints = Sequence[int]
Message = tuple[int, Tensor]  # (a rank of the team, the bytes to send to it or to receive from it)


class Alltoall(NamedTuple):
    """Counts and displacements of one rank in an alltoallv, in bytes.

    Attributes:
        longest: size of the longest message of all ranks.
        total: maximum size of the `send` or `recv` of any rank.
    """

    sendcounts: Ints
    sdispls: Ints
    recvcounts: Ints
    rdispls: Ints
    longest: int
    total: int


class Method(NamedTuple):
    """How data move, and the reasons, for hpcdist.plan(). The same on all ranks.

    Attributes:
        shared: whether the result is memory that the ranks of a node share.
    """

    name: str
    reason: str = ""
    shared: bool = False


class Route(Protocol):
    """A communication library that moves messages between the ranks of a team.

    Attributes:
        name: name of the route as the caller passes it.
    """

    @property
    def name(self) -> str: ...

    def missing(self, team: Team) -> str | None:
        """Return why this route is unavailable in this job, and how to get it; else None. The same on all ranks."""

    def carries(self, team: Team, gpu: bool) -> bool:
        """Return whether it accesses GPU memory (`gpu`), or host memory, directly. Collective over the team."""

    def method(self, team: Team, operation: str, nbytes: int) -> Method:
        """Return how it carries out an operation below on messages of `nbytes` in all. Collective over the team."""

    def gatherv(self, team: Team, send: Tensor, recv: Tensor | None, counts: Ints, displs: Ints, root: int) -> None:
        """Gather rank i's `send` (counts[i] bytes) into ``recv[displs[i]:]`` of the root."""

    def scatterv(self, team: Team, send: Tensor | None, recv: Tensor, counts: Ints, displs: Ints, root: int) -> None:
        """Scatter ``send[displs[i]:]`` (counts[i] bytes) of the root into `recv` of rank i."""

    def allgatherv(self, team: Team, send: Tensor, recv: Tensor, counts: Ints, displs: Ints) -> None:
        """Gather rank i's `send` (counts[i] bytes), which may lie there already, into ``recv[displs[i]:]`` of all."""

    def alltoallv(self, team: Team, send: Tensor, recv: Tensor, what: Alltoall) -> None:
        """Send rank i's ``send[sdispls[j]:]`` (sendcounts[j] bytes) into ``recv[rdispls[i]:]`` of rank j."""

    def exchange(self, team: Team, sends: list[Message], recvs: list[Message], longest: int) -> None:
        """Send and receive separate messages, directly from and into their memory.

        A pair of ranks exchanges at most one message in each direction; there are no empty messages, and none from a
        rank to itself. `longest` is the size of the longest message of all ranks.
        """


@runtime_checkable
class Allgather(Protocol):
    """A route that gathers messages into separate memory on all ranks: see routes/window.py."""

    def allgather(self, team: Team, send: Tensor, blocks: Sequence[Tensor]) -> bool:
        """Gather rank i's `send`, flat bytes, into ``blocks[i]`` of every rank.

        Returns:
            True if it did; False on all ranks if it cannot, or another way is faster.
        """
