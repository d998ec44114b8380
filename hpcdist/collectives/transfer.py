"""One redistribution, planned: which box goes where, and how it lies in memory on both sides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from hpcdist import layout, limits
from hpcdist.comm.team import Team
from hpcdist.control import objects
from hpcdist.errors import RankError
from hpcdist.layout import Box, Layout
from hpcdist.routes.base import Alltoall, Message, Route
from hpcdist.tensors.blocks import Blocks
from hpcdist.tensors.storage import copyable, summed_in

__all__ = ["Side", "Transfer", "Views", "make_transfer"]

Shape = tuple[int, ...]
AT_ONCE = 2**20  # bytes: if no rank has more, all messages are one call of MPI


@runtime_checkable
class Views(Protocol):
    """A route that takes elements from and to any places of host memory: see routes/mpi.py."""

    def views_of(self, x: Tensor, views: Sequence[Tensor | None]) -> Any: ...

    def alltoallw(self, team: Team, send: Tensor, sends: Any, recv: Tensor, recvs: Any) -> None: ...

    def exchange_views(
        self, team: Team, sends: list[Message], recvs: list[Message], meanwhile: Callable[[], None]
    ) -> None: ...


class Side(Blocks):
    """What one rank exchanges with all others in its own tensor: the messages it sends, or those it receives.

    Attributes:
        own: the boxes of the rank's message to itself, which is not among the others.
    """

    def __init__(self, held: Box, parts: Sequence[tuple[int, Box]], rank: int, size: int, dtype: torch.dtype) -> None:
        boxes: list[list[Box]] = [[] for _ in range(size)]
        for peer, box in parts:
            boxes[peer].append(box.relative_to(held.offset))
        self.own, boxes[rank] = boxes[rank], []
        super().__init__(held.shape, boxes, dtype)
        self._datatypes: Any = None

    def views(self, x: Tensor) -> list[Message]:
        """(rank, the part of `x`), each of at most limits.PIECE bytes."""
        return [
            (rank, x[piece.slices()])
            for rank, boxes in enumerate(self.boxes)
            for box in boxes
            for piece in layout.boxes(box, limits.PIECE // x.itemsize)
        ]

    def datatypes(self, x: Tensor, route: Views, rank: int) -> Any:
        """What `route` takes for one box a rank, its own too, of a contiguous tensor; made once."""
        if self._datatypes is None:
            boxes = [*self.boxes[:rank], self.own, *self.boxes[rank + 1 :]]
            self._datatypes = route.views_of(x, [x[of_one[0].slices()] if of_one else None for of_one in boxes])
        return self._datatypes


class Transfer:
    """A tensor from layout to layout, as one rank takes part in it: which box goes where, over which route.

    Over MPI and in host memory, MPI takes the elements from where they are and puts them where they belong, by
    datatypes: of all ways measured the fastest, and without memory for messages (benchmarks/redistribute.py). Over the
    other routes messages that are not one run of memory are packed.

    Attributes:
        route: over which the data move.
        shape: of the whole tensor.
        boxes, box: what each rank has of it in the new layout; of this rank.
        source, dest: the messages this rank sends from its part, and those it receives into the new one.
        sizes: bytes of host memory that each rank's new part takes.
        longest, total: see :class:`hpcdist.routes.base.Alltoall`; of both directions.
        single: no rank sends or receives more than one box with another.
        views: the route takes elements from and to any places of memory, as :class:`Views` says.
    """

    def __init__(
        self, route: Route, shape: Shape, boxes: Sequence[Box], rank: int, source: Side, dest: Side, facts: Facts
    ) -> None:
        self.route = route
        self.shape, self.boxes, self.box = shape, boxes, boxes[rank]
        self.source, self.dest = source, dest
        self.longest = max(fact.longest for fact in facts)
        self.total = max(fact.total for fact in facts)
        self.single = all(fact.single for fact in facts)
        self.views = isinstance(route, Views) and all(fact.on_host for fact in facts)
        self.sizes = [box.size() * fact.itemsize * fact.on_host for box, fact in zip(boxes, facts, strict=True)]

    def run(self, team: Team, x: Tensor, y: Tensor) -> None:
        """Fill `y`, this rank's new part, from `x`, the part that it has; any strides. Collective."""
        views: Any = self.route
        x, y = copyable(x), copyable(y)
        if self.views and self.longest:
            if self.single and self.total <= AT_ONCE:
                self._at_once(team, views, x, y)
            else:
                sends, recvs = self.source.views(x), self.dest.views(y)
                views.exchange_views(team, sends, recvs, lambda: self._copy_own(x, y))
            return
        self._copy_own(x, y)
        if self.longest:
            buffer = self.dest.buffer(y)
            self._send(team, self.source, x, self.dest, buffer, y)
            self.dest.unpack(buffer, y)

    def _at_once(self, team: Team, route: Views, x: Tensor, y: Tensor) -> None:
        """In one call: what is small is copied sooner than many are made."""
        x = x.contiguous()
        buffer = y if y.is_contiguous() else torch.empty_like(y, memory_format=torch.contiguous_format)
        route.alltoallw(
            team, x, self.source.datatypes(x, route, team.rank), buffer, self.dest.datatypes(buffer, route, team.rank)
        )
        if buffer is not y:
            y.copy_(buffer)

    def _copy_own(self, x: Tensor, y: Tensor) -> None:
        for box, into in zip(self.source.own, self.dest.own, strict=True):
            y[into.slices()].copy_(x[box.slices()])

    def back(self, team: Team, grad: Tensor) -> Tensor:
        """The transpose: of the gradient of `y`, on every rank, that of `x`. Collective.

        What several ranks have received of one element is added up.
        """
        x = grad.new_zeros(self.source.shape, dtype=summed_in(grad.dtype))
        for box, into in zip(self.source.own, self.dest.own, strict=True):
            x[box.slices()].add_(grad[into.slices()].to(x.dtype))
        if self.longest:
            messages = torch.empty(self.source.nbytes // grad.itemsize, dtype=grad.dtype, device=x.device)
            self._send(team, self.dest, grad, self.source, messages, x)
            self.source.add(messages, x)
        return x.to(grad.dtype)

    def _send(self, team: Team, source: Side, x: Tensor, dest: Side, into: Tensor, y: Tensor) -> None:
        out = source.pack(x)
        counts = source.counts, source.displs_in(out, x), dest.counts, dest.displs_in(into, y)
        self.route.alltoallv(team, out, into, Alltoall(*counts, self.longest, self.total))


class Fact(NamedTuple):
    """What the other ranks have to know of one: the longest message, the most bytes in all, whether it has at most one
    box with each, whether its data are in host memory, the bytes of an element, and how many elements of its new part
    no rank holds."""

    longest: int
    total: int
    single: bool
    on_host: bool
    itemsize: int
    missing: int


Facts = Sequence[Fact]


def make_transfer(
    verb: str, team: Team, route: Route, src: Layout, dst: Layout, shapes: Sequence[Shape], x: Tensor
) -> Transfer:
    """Find what this rank sends and receives. Collective; two small Allgathers.

    Args:
        shapes: of the parts of all ranks.
        x: this rank's part.

    Raises:
        RankError: on every rank: the parts are none of a tensor in `src`, or it cannot be laid out as `dst`.
    """
    name = "src"
    try:
        shape, source = src.held(shapes)
        name = "dst"
        dest = dst.boxes(shape, team.size)
    except ValueError as wrong:  # on all ranks alike
        raise RankError(verb, dict.fromkeys(range(team.size), f"{name}: {wrong}")) from None
    moves = layout.overlaps(source, dest, team.rank)
    sides = (
        Side(source[team.rank], moves.sends, team.rank, team.size, x.dtype),
        Side(dest[team.rank], moves.recvs, team.rank, team.size, x.dtype),
    )
    mine = Fact(
        longest=max(max(side.counts) for side in sides),
        total=max(max(side.nbytes, x.itemsize * layout.whole(side.shape).size()) for side in sides),
        single=all(len(boxes) <= 1 for side in sides for boxes in (*side.boxes, side.own)),
        on_host=not x.is_cuda,
        itemsize=x.itemsize,
        missing=moves.missing,
    )
    facts = objects.all_gather_object(team.comm, mine)
    text = "src: no rank holds {} of the {} elements of its new part"
    missing = {rank: fact.missing for rank, fact in enumerate(facts) if fact.missing}
    objects.raise_problems(verb, {rank: text.format(n, dest[rank].size()) for rank, n in missing.items()})
    return Transfer(route, shape, dest, team.rank, *sides, facts)
