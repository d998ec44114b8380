"""What every route offers: the same five operations on messages.

A message is the memory of a contiguous tensor of any shape and dtype, with counts and displacements in bytes and in
rank order. The caller has made sure that all ranks agree on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from hpcdist.comm.team import Team

__all__ = ["Alltoall", "Ints", "Message", "Route"]

Ints = Sequence[int]
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
