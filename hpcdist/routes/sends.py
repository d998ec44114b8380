"""The operations of a route by sends and receives: directly from and into place, without padding, of any size."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from hpcdist.routes.base import Alltoall, Ints, Message, Method
from hpcdist.tensors.storage import as_bytes

if TYPE_CHECKING:
    from hpcdist.comm.team import Team

__all__ = ["Exchange"]


class Exchange:
    """A route that only needs to implement `exchange`."""

    def method(self, team: Team, operation: str, nbytes: int) -> Method:
        """Return how it carries out an operation. See :meth:`Route.method`."""
        return Method("sends and receives")

    def exchange(self, team: Team, sends: list[Message], recvs: list[Message], longest: int) -> None:
        """Send and receive all messages concurrently, and wait for them. See :meth:`Route.exchange`."""
        raise NotImplementedError

    def gatherv(self, team: Team, send: Tensor, recv: Tensor | None, counts: Ints, displs: Ints, root: int) -> None:
        if recv is None:
            self.exchange(team, _nonempty([(root, as_bytes(send))]), [], max(counts))
        else:
            blocks = _cut(recv, counts, displs)
            blocks[root].copy_(as_bytes(send))
            self.exchange(team, [], _others(blocks, root), max(counts))

    def scatterv(self, team: Team, send: Tensor | None, recv: Tensor, counts: Ints, displs: Ints, root: int) -> None:
        if send is None:
            self.exchange(team, [], _nonempty([(root, as_bytes(recv))]), max(counts))
        else:
            blocks = _cut(send, counts, displs)
            as_bytes(recv).copy_(blocks[root])
            self.exchange(team, _others(blocks, root), [], max(counts))

    def allgatherv(self, team: Team, send: Tensor, recv: Tensor, counts: Ints, displs: Ints) -> None:
        blocks, send = _cut(recv, counts, displs), as_bytes(send)
        if send.data_ptr() != blocks[team.rank].data_ptr():
            blocks[team.rank].copy_(send)
        sends = [(rank, send) for rank in range(team.size) if rank != team.rank]
        self.exchange(team, _nonempty(sends), _others(blocks, team.rank), max(counts))

    def alltoallv(self, team: Team, send: Tensor, recv: Tensor, what: Alltoall) -> None:
        sends, recvs = _cut(send, what.sendcounts, what.sdispls), _cut(recv, what.recvcounts, what.rdispls)
        recvs[team.rank].copy_(sends[team.rank])
        self.exchange(team, _others(sends, team.rank), _others(recvs, team.rank), what.longest)


def _cut(messages: Tensor, counts: Ints, displs: Ints) -> list[Tensor]:
    messages = as_bytes(messages)
    return [messages.narrow(0, start, count) for start, count in zip(displs, counts, strict=True)]


def _nonempty(messages: list[Message]) -> list[Message]:
    """Drop empty messages, which both sides know and do not post."""
    return [(rank, block) for rank, block in messages if block.numel()]


def _others(blocks: list[Tensor], me: int) -> list[Message]:
    """Return the messages of all ranks but `me`, starting after it, so that not all ranks start with the same one."""
    size = len(blocks)
    return _nonempty([(rank % size, blocks[rank % size]) for rank in range(me + 1, me + size)])
