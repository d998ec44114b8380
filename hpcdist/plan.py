"""One redistribution, worked out: which box goes where, and how it lies in memory on both sides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from hpcdist import layout
from hpcdist.buffers import copyable, summed_in
from hpcdist.layout import Box
from hpcdist.routes.base import Alltoall, Message, Route
from hpcdist.team import Team

__all__ = ["Facts", "Side", "Transfer", "Views"]


PIECE = 2**30  # bytes of a message at most, where MPI takes it from its place
AT_ONCE = 2**20  # bytes: if no rank has more, all messages are one call of MPI


@runtime_checkable
class Views(Protocol):
    """A route that takes elements from and to any places of host memory: see routes/mpi.py."""

    def views_of(self, x: Tensor, views: Sequence[Tensor | None]) -> Any: ...

    def alltoallw(self, team: Team, send: Tensor, sends: Any, recv: Tensor, recvs: Any) -> None: ...

    def exchange_views(
        self, team: Team, sends: list[Message], recvs: list[Message], meanwhile: Callable[[], None]
    ) -> None: ...


class Side:
    """What one rank has to do with all others in its own tensor: the messages it sends, or those it receives.

    Attributes:
        shape: of this rank's tensor.
        boxes: of it, for each rank: what a message consists of.
        counts, displs: of the messages in bytes, packed one behind the other; those of the rank to itself are empty.
        places: where the messages lie in the tensor, if each is one run of its memory; else None.
    """

    def __init__(self, held: Box, parts: Sequence[tuple[int, Box]], rank: int, size: int, itemsize: int) -> None:
        self.shape = held.shape
        self.boxes: list[list[Box]] = [[] for _ in range(size)]
        for peer, box in parts:
            self.boxes[peer].append(box.seen_from(held.offset))
        self.own, self.boxes[rank] = self.boxes[rank], []
        self.counts = [itemsize * sum(box.size() for box in boxes) for boxes in self.boxes]
        self.displs = layout.displs(self.counts)
        self.places = self._places(itemsize)
        self._datatypes: Any = None

    def _places(self, itemsize: int) -> list[int] | None:
        places = []
        for boxes in self.boxes:
            if not boxes:
                places.append(0)
                continue
            _, count, starts = layout.runs(boxes[0], self.shape)
            if len(boxes) > 1 or count > 1:
                return None
            places.append(next(starts) * itemsize)
        return places

    @cached_property
    def nbytes(self) -> int:
        return sum(self.counts)

    def displs_in(self, messages: Tensor, x: Tensor) -> list[int]:
        """Where each message starts in `messages`, which are in `x` itself or packed."""
        return self.places if messages is x and self.places is not None else self.displs

    def room(self, x: Tensor) -> Tensor:
        """Where messages may lie so that they are in `x`: there, if that can be, else memory for them packed."""
        if self.places is not None and x.is_contiguous():
            return x
        return torch.empty(self.nbytes // x.itemsize, dtype=x.dtype, device=x.device)

    def views(self, x: Tensor) -> list[Message]:
        """(rank, the part of `x`), each of at most PIECE bytes."""
        return [
            (rank, x[piece.slices()])
            for rank, boxes in enumerate(self.boxes)
            for box in boxes
            for piece in layout.boxes(box, PIECE // x.itemsize)
        ]

    def datatypes(self, x: Tensor, way: Views, rank: int) -> Any:
        """What `way` takes for one box a rank, its own too, of a contiguous tensor; made once."""
        if self._datatypes is None:
            boxes = [*self.boxes[:rank], self.own, *self.boxes[rank + 1 :]]
            self._datatypes = way.views_of(x, [x[of_one[0].slices()] if of_one else None for of_one in boxes])
        return self._datatypes

    def pack(self, x: Tensor, messages: Tensor) -> None:
        if messages is not x:
            for part, box in self._pairs(messages):
                part.copy_(x[box.slices()])

    def unpack(self, messages: Tensor, x: Tensor) -> None:
        if messages is not x:
            for part, box in self._pairs(messages):
                x[box.slices()].copy_(part)

    def add(self, messages: Tensor, x: Tensor) -> None:
        """Add to `x`, where several messages may have a part for one place."""
        for part, box in self._pairs(messages):
            x[box.slices()].add_(part.to(x.dtype))

    def _pairs(self, messages: Tensor) -> list[tuple[Tensor, Box]]:
        """(the part of the packed messages, the box of the tensor that it is)."""
        every = [box for boxes in self.boxes for box in boxes]
        parts = torch.split(messages, [box.size() for box in every]) if every else ()
        return [(part.view(box.shape), box) for part, box in zip(parts, every, strict=True)]


@dataclass(frozen=True)
class Facts:
    """What all ranks know of a transfer.

    Attributes:
        longest, total: see :class:`hpcdist.routes.base.Alltoall`; of both directions.
        single: no rank sends or receives more than one box with another.
        views: the route takes elements from and to any places of memory, as :class:`Views` says.
    """

    longest: int
    total: int
    single: bool
    views: bool


class Transfer:
    """The transfer of one rank; together with those of the other ranks, it takes a tensor from layout to layout.

    Over MPI and in host memory, MPI takes the elements from where they are and puts them where they belong, by
    datatypes: of all ways measured the fastest, and without memory for messages (benchmarks/redistribute.py). Over the
    other routes messages that are not one run of memory are packed.

    Attributes:
        source, dest: the messages it sends from its part, and those it receives into the new one.
    """

    def __init__(self, source: Side, dest: Side, facts: Facts) -> None:
        self.source, self.dest, self.facts = source, dest, facts

    def run(self, team: Team, way: Route, x: Tensor, y: Tensor) -> None:
        """Fill `y`, this rank's new part, from `x`, the part that it has; any strides. Collective."""
        views: Any = way
        x, y = copyable(x), copyable(y)
        if self.facts.views and self.facts.longest:
            if self.facts.single and self.facts.total <= AT_ONCE:
                self._at_once(team, views, x, y)
            else:
                sends, recvs = self.source.views(x), self.dest.views(y)
                views.exchange_views(team, sends, recvs, lambda: self._copy_own(x, y))
            return
        self._copy_own(x, y)
        if self.facts.longest:
            room = self.dest.room(y)
            self._send(team, way, self.source, x, self.dest, room, y)
            self.dest.unpack(room, y)

    def _at_once(self, team: Team, way: Views, x: Tensor, y: Tensor) -> None:
        """In one call: what is small is copied sooner than many are made."""
        x = x.contiguous()
        room = y if y.is_contiguous() else torch.empty_like(y, memory_format=torch.contiguous_format)
        way.alltoallw(
            team, x, self.source.datatypes(x, way, team.rank), room, self.dest.datatypes(room, way, team.rank)
        )
        if room is not y:
            y.copy_(room)

    def _copy_own(self, x: Tensor, y: Tensor) -> None:
        for box, into in zip(self.source.own, self.dest.own, strict=True):
            y[into.slices()].copy_(x[box.slices()])

    def back(self, team: Team, way: Route, grad: Tensor) -> Tensor:
        """The transpose: of the gradient of `y`, on every rank, that of `x`. Collective.

        What several ranks have received of one element is added up.
        """
        x = grad.new_zeros(self.source.shape, dtype=summed_in(grad.dtype))
        for box, into in zip(self.source.own, self.dest.own, strict=True):
            x[box.slices()].add_(grad[into.slices()].to(x.dtype))
        if self.facts.longest:
            messages = torch.empty(self.source.nbytes // grad.itemsize, dtype=grad.dtype, device=x.device)
            self._send(team, way, self.dest, grad, self.source, messages, x)
            self.source.add(messages, x)
        return x.to(grad.dtype)

    def _send(self, team: Team, way: Route, source: Side, x: Tensor, dest: Side, into: Tensor, y: Tensor) -> None:
        out = source.room(x)
        source.pack(x, out)
        counts = source.counts, source.displs_in(out, x), dest.counts, dest.displs_in(into, y)
        way.alltoallv(team, out, into, Alltoall(*counts, self.facts.longest, self.facts.total))
