"""The interface of all routes: the same operations on messages.

A message is the memory of a contiguous tensor of any shape and dtype. Counts and displacements are in bytes and in rank
order, and already agreed on by all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from hpcdist import layout
from hpcdist.comm.tuning import ALGORITHMS, Rule
from hpcdist.layout import Box
from hpcdist.tensors.storage import as_bytes

if TYPE_CHECKING:
    from hpcdist.comm.team import Team

Ints = Sequence[int]
Message = tuple[int, Tensor]  # (a rank of the team, the bytes to send to it or to receive from it)
Step = Callable[[], object]
"""What is called while messages travel, or to wait for one."""


def nothing() -> None:
    """Do nothing."""


class Alltoall(NamedTuple):
    """Counts and displacements of one rank in an alltoallv, in bytes.

    Attributes:
        longest: size of the longest message of all ranks.
        total: maximum size of the `send` or `recv` of any rank.
        boxes: boxes of `recv` into which the message of each rank goes, at most one for each, if receives_boxes(); then
            `rdispls` has no meaning.
    """

    sendcounts: Ints
    sdispls: Ints
    recvcounts: Ints
    rdispls: Ints
    longest: int
    total: int
    boxes: Sequence[Sequence[Box]] | None = None


class Vector(NamedTuple):
    """Counts and displacements of all ranks in another operation, in bytes.

    Attributes:
        root: its root, if it has one.
        segment: bytes of a piece, where the rule of the call has them.
    """

    counts: Ints
    displs: Ints
    root: int = 0
    segment: int = 0

    @classmethod
    def packed(cls, counts: Ints, root: int = 0) -> Vector:
        """Return messages that follow each other without gaps."""
        return cls(counts, layout.displs(counts), root)

    @property
    def longest(self) -> int:
        return max(self.counts)

    @property
    def total(self) -> int:
        return sum(self.counts)


class Method(NamedTuple):
    """How data move, and the reasons, for hpcdist.plan(). The same on all ranks.

    Attributes:
        shared: whether the result is memory that the ranks of a node share.
    """

    name: str
    reason: str = ""
    shared: bool = False


class Route:
    """A communication library that moves messages between the ranks of a team.

    A route that only implements `start` carries out all operations by it: directly from and into place. One with rows
    in tuning.ALGORITHMS has a method for each of them, such as `allgatherv_ring`.

    Attributes:
        name: name of the route as the caller passes it.
        table: what its operations are called in tuning.ALGORITHMS, before their own name.
    """

    name: str
    table = "sends by "

    def missing(self, team: Team) -> str | None:
        """Return why this route is unavailable in this job, and how to get it; else None. The same on all ranks."""
        return None

    def carries(self, team: Team, gpu: bool) -> bool:
        """Return whether it accesses GPU memory (`gpu`), or host memory, directly. Collective over the team."""
        return not gpu

    def method(self, team: Team, operation: str, nbytes: int, largest: int = 0) -> Method:
        """Return how it carries out an operation below on messages of `nbytes` in all. Collective over the team."""
        rule, key = self.rule(team, operation, nbytes, largest), self.table + operation
        if key not in ALGORITHMS:
            return Method("sends and receives")
        return Method(ALGORITHMS[key][rule.algorithm], team.rules.reason(key, rule, nbytes, largest))

    def rule(self, team: Team, operation: str, total: int, largest: int) -> Rule:
        """Choose the algorithm for messages of `total` bytes, of which the largest has `largest`."""
        key = self.table + operation
        if key not in ALGORITHMS:
            return Rule(0, 0, "sends")
        return team.rules.choose(key, total, largest, lambda name: self.usable(team, name, total, largest))

    def usable(self, team: Team, algorithm: str, total: int, largest: int) -> bool:
        """Return whether an algorithm can carry these messages. The same on all ranks; sends always can."""
        return True

    def prepare(self, team: Team, operation: str, what: Vector | Alltoall) -> Callable[..., None]:
        """Choose the algorithm of an operation, and return the function of `send` and `recv` that carries it out.

        - gatherv: `send` of rank i (counts[i] bytes) to ``recv[displs[i]:]`` of the root.
        - scatterv: ``send[displs[i]:]`` of the root (counts[i] bytes) to `recv` of rank i.
        - allgatherv: `send` of rank i (counts[i] bytes), which may lie there already, to ``recv[displs[i]:]`` of all.
        - alltoallv: ``send[sdispls[j]:]`` of rank i (sendcounts[j] bytes) to ``recv[rdispls[i]:]`` of rank j. Another
          argument, `meanwhile`, is what this rank copies itself, while the messages travel where it can.

        What only the root has is None elsewhere.
        """
        rule = self.rule(team, operation, what.total, what.longest)
        if isinstance(what, Vector):
            what = what._replace(segment=rule.segment)
        return partial(getattr(self, f"{operation}_{rule.algorithm}"), team, what)

    def exchange(
        self,
        team: Team,
        sends: Iterable[Message],
        recvs: Iterable[Message],
        longest: int,
        meanwhile: Step = nothing,
    ) -> None:
        """Send and receive separate messages concurrently, directly from and into their memory, and wait for them.

        A pair of ranks exchanges at most one message in each direction. The message of a rank to itself is copied
        while the others travel; so is what `meanwhile` copies. `longest` is the size of the longest message of all
        ranks.
        """
        sends, recvs = list(sends), list(recvs)
        own, place = (dict(of).get(team.rank) for of in (sends, recvs))
        waits = self.start(team, others(team, sends), others(team, recvs), longest)
        if own is not None and place is not None and place.data_ptr() != own.data_ptr():
            place.copy_(own)
        meanwhile()
        for wait in waits:
            wait()

    def start(self, team: Team, sends: list[Message], recvs: list[Message], longest: int) -> Sequence[Step]:
        """Start to exchange messages with other ranks, none of them empty; return what waits for them."""
        raise NotImplementedError

    def allgather(self, team: Team, send: Tensor, blocks: Sequence[Tensor]) -> bool:
        """Gather rank i's `send`, flat bytes, into ``blocks[i]`` of every rank, if that is faster than exchange().

        Returns:
            Whether it has; the same on all ranks.
        """
        return False

    def receives_boxes(self, team: Team, total: int, largest: int) -> bool:
        """Return whether alltoallv() can receive into boxes of a contiguous tensor. The same on all ranks."""
        return False

    def gatherv_sends(self, team: Team, what: Vector, send: Tensor, recv: Tensor | None) -> None:
        blocks = [] if recv is None else cut(recv, what.counts, what.displs)
        self.exchange(team, [(what.root, as_bytes(send))], enumerate(blocks), what.longest)

    def scatterv_sends(self, team: Team, what: Vector, send: Tensor | None, recv: Tensor) -> None:
        blocks = [] if send is None else cut(send, what.counts, what.displs)
        self.exchange(team, enumerate(blocks), [(what.root, as_bytes(recv))], what.longest)

    def allgatherv_sends(self, team: Team, what: Vector, send: Tensor, recv: Tensor) -> None:
        blocks = cut(recv, what.counts, what.displs)
        self.exchange(team, enumerate([as_bytes(send)] * team.size), enumerate(blocks), what.longest)

    def alltoallv_sends(
        self, team: Team, what: Alltoall, send: Tensor, recv: Tensor, meanwhile: Step = nothing
    ) -> None:
        sends, recvs = cut(send, what.sendcounts, what.sdispls), cut(recv, what.recvcounts, what.rdispls)
        self.exchange(team, enumerate(sends), enumerate(recvs), what.longest, meanwhile)


def cut(messages: Tensor, counts: Ints, displs: Ints) -> list[Tensor]:
    """Return the messages of all ranks as flat bytes."""
    messages = as_bytes(messages)
    return [messages.narrow(0, start, count) for start, count in zip(displs, counts, strict=True)]


def others(team: Team, messages: Iterable[Message]) -> list[Message]:
    """Return the messages of other ranks, starting after this one, so that not all ranks start with the same one.

    Empty ones are not sent: both sides know the counts.
    """
    found = [(rank, block) for rank, block in messages if rank != team.rank and block.numel()]
    return sorted(found, key=lambda message: (message[0] - team.rank) % team.size)
