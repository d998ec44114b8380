"""One redistribution, worked out: which box goes where, and how it lies in memory on both sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hpcdist import layout
from hpcdist.layout import Box
from hpcdist.routes import Alltoall, Route
from hpcdist.team import Team

__all__ = ["Side", "Transfer"]


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
            x[box.slices()].add_(part)

    def _pairs(self, messages: Tensor) -> list[tuple[Tensor, Box]]:
        """(the part of the packed messages, the box of the tensor that it is)."""
        every = [box for boxes in self.boxes for box in boxes]
        parts = torch.split(messages, [box.size() for box in every]) if every else ()
        return [(part.view(box.shape), box) for part, box in zip(parts, every, strict=True)]


@dataclass(frozen=True)
class Transfer:
    """The transfer of one rank; together with those of the other ranks, it takes a tensor from layout to layout.

    Attributes:
        source, dest: the messages it sends from its part, and those it receives into the new one.
        longest, total: see :class:`hpcdist.routes.Alltoall`; of both directions.
        moves: some rank sends something to another.
    """

    source: Side
    dest: Side
    longest: int
    total: int

    @property
    def moves(self) -> bool:
        return self.longest > 0

    def run(self, team: Team, way: Route, x: Tensor, y: Tensor) -> None:
        """Fill `y`, this rank's new part, from `x`, the part that it has; any strides. Collective."""
        for box, into in zip(self.source.own, self.dest.own, strict=True):
            y[into.slices()].copy_(x[box.slices()])
        if self.moves:
            room = self.dest.room(y)
            self._send(team, way, self.source, x, self.dest, room, y)
            self.dest.unpack(room, y)

    def back(self, team: Team, way: Route, grad: Tensor) -> Tensor:
        """The transpose: of the gradient of `y`, on every rank, that of `x`. Collective.

        What several ranks have received of one element is added up.
        """
        x = grad.new_zeros(self.source.shape)
        for box, into in zip(self.source.own, self.dest.own, strict=True):
            x[box.slices()].add_(grad[into.slices()])
        if self.moves:
            messages = torch.empty(self.source.nbytes // x.itemsize, dtype=x.dtype, device=x.device)
            self._send(team, way, self.dest, grad, self.source, messages, x)
            self.source.add(messages, x)
        return x

    def _send(self, team: Team, way: Route, source: Side, x: Tensor, dest: Side, into: Tensor, y: Tensor) -> None:
        out = source.room(x)
        source.pack(x, out)
        way.alltoallv(
            team,
            out,
            into,
            Alltoall(
                source.counts, source.displs_in(out, x), dest.counts, dest.displs_in(into, y), self.longest, self.total
            ),
        )
