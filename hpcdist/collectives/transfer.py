"""The plan of a redistribution: which boxes move between which ranks, and where they lie in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from hpcdist import layout
from hpcdist.comm.team import Team
from hpcdist.control import objects
from hpcdist.errors import RankError, coded
from hpcdist.layout import Box, Layout, limits
from hpcdist.routes.base import Alltoall, Message, Method, Route
from hpcdist.tensors import pool
from hpcdist.tensors.blocks import Blocks
from hpcdist.tensors.storage import copyable, sum_dtype

__all__ = ["Side", "Transfer", "Views", "make_transfer"]

Shape = tuple[int, ...]
AT_ONCE = 2**20  # bytes; if no rank has more, all messages are sent by one Alltoallw


@runtime_checkable
class Views(Protocol):
    """A route that sends and receives strided views of host memory without packing: see routes/mpi.py."""

    def views_of(self, x: Tensor, views: Sequence[Tensor | None]) -> Any: ...

    def alltoallw(self, team: Team, send: Tensor, sends: Any, recv: Tensor, recvs: Any) -> None: ...

    def exchange_views(
        self, team: Team, sends: list[Message], recvs: list[Message], meanwhile: Callable[[], None]
    ) -> None: ...


class Side(Blocks):
    """One side of a transfer: the messages that a rank sends from its tensor, or those that it receives into it.

    Attributes:
        own: boxes of the rank's message to itself, which the others exclude.
    """

    def __init__(self, held: Box, parts: Sequence[tuple[int, Box]], rank: int, size: int, dtype: torch.dtype) -> None:
        boxes: list[list[Box]] = [[] for _ in range(size)]
        for peer, box in parts:
            boxes[peer].append(box.relative_to(held.offset))
        self.own, boxes[rank] = boxes[rank], []
        super().__init__(held.shape, boxes, dtype)
        self._datatypes: Any = None

    def views(self, x: Tensor) -> list[Message]:
        """Return (rank, view of `x`) for all messages, in pieces of at most limits.PIECE bytes."""
        return [
            (rank, x[piece.slices()])
            for rank, boxes in enumerate(self.boxes)
            for box in boxes
            for piece in layout.boxes(box, limits.PIECE // x.itemsize)
        ]

    def datatypes(self, x: Tensor, route: Views, rank: int) -> Any:
        """Return the datatypes of one box per rank, including its own, in a contiguous tensor; created once."""
        if self._datatypes is None:
            boxes = [*self.boxes[:rank], self.own, *self.boxes[rank + 1 :]]
            self._datatypes = route.views_of(x, [x[one[0].slices()] if one else None for one in boxes])
        return self._datatypes


class Transfer:
    """One rank's part in moving a tensor from one layout to another.

    In host memory over MPI, datatypes move the elements between their final places: the fastest of all measured
    methods, and without buffers (benchmarks/redistribute.py). Other routes pack messages that are not one run of
    memory.

    Attributes:
        route: route of the data.
        shape: shape of the whole tensor.
        boxes, box: boxes of all ranks in the new layout, and this rank's.
        source, dest: messages that this rank sends from its part, and those that it receives into the new one.
        sizes: bytes of each rank's new part.
        longest, total: see :class:`hpcdist.routes.base.Alltoall`; the maximum of both directions.
        single: whether each pair of ranks exchanges at most one box in each direction.
        views: whether the route supports :class:`Views`, and all data are in host memory.
        pieces: rank, box of its part, and box of this rank's new part, of all that this rank receives.
    """

    def __init__(
        self,
        route: Route,
        shape: Shape,
        boxes: Sequence[Box],
        rank: int,
        source: Side,
        dest: Side,
        facts: Facts,
        pieces: Sequence[tuple[int, Box, Box]],
    ) -> None:
        self.route = route
        self.shape, self.boxes, self.box = shape, boxes, boxes[rank]
        self.source, self.dest = source, dest
        self.pieces = pieces
        self.longest = max(fact.longest for fact in facts)
        self.total = max(fact.total for fact in facts)
        self.single = all(fact.single for fact in facts)
        self.views = isinstance(route, Views) and all(fact.on_host for fact in facts)
        self.sizes = [box.size() * fact.itemsize for box, fact in zip(boxes, facts, strict=True)]

    @property
    def _at_once(self) -> bool:
        return self.single and self.total <= AT_ONCE

    def method(self, team: Team) -> Method:
        """Return how run() would move the data. Collective."""
        if not self.longest:
            return Method("copies within each rank", "no rank needs data of another one")
        if not self.views:
            return self.route.method(team, "alltoallv", self.total)
        if self._at_once:
            return Method("MPI_Alltoallw with datatypes", f"no rank has more than {AT_ONCE:,} bytes")
        return Method("MPI sends and receives with datatypes", "the parts are large, or of several boxes")

    def run(self, team: Team, x: Tensor, y: Tensor) -> None:
        """Move the data from `x`, this rank's part, to `y`, its new part; any strides. Collective."""
        views: Any = self.route
        x, y = copyable(x), copyable(y)
        if self.views and self.longest:
            if self._at_once:
                self._alltoallw(team, views, x, y)
            else:
                sends, recvs = self.source.views(x), self.dest.views(y)
                views.exchange_views(team, sends, recvs, lambda: self._copy_own(x, y))
            return
        self._copy_own(x, y)
        if self.longest:
            buffer = self.dest.buffer(y)
            self._send(team, self.source, x, self.dest, buffer, y)
            self.dest.unpack(buffer, y)

    def _alltoallw(self, team: Team, route: Views, x: Tensor, y: Tensor) -> None:
        """Send all messages in one call, copying strided tensors: for small data faster than many calls."""
        x = x.contiguous()
        buffer = y if y.is_contiguous() else torch.empty_like(y, memory_format=torch.contiguous_format)
        route.alltoallw(
            team, x, self.source.datatypes(x, route, team.rank), buffer, self.dest.datatypes(buffer, route, team.rank)
        )
        if buffer is not y:
            y.copy_(buffer)

    def assemble(self, parts: Sequence[Tensor], y: Tensor) -> None:
        """Copy what belongs to this rank's new part `y` from the parts of all ranks."""
        y = copyable(y)
        for peer, box, into in self.pieces:
            y[into.slices()].copy_(copyable(parts[peer])[box.slices()])

    def _copy_own(self, x: Tensor, y: Tensor) -> None:
        for box, into in zip(self.source.own, self.dest.own, strict=True):
            y[into.slices()].copy_(x[box.slices()])

    def transpose(self, team: Team, grad: Tensor) -> Tensor:
        """Compute the gradient of `x` from that of `y`, summed over all ranks that received an element. Collective."""
        x = pool.empty(self.source.shape, sum_dtype(grad.dtype), grad.device).zero_()
        for box, into in zip(self.source.own, self.dest.own, strict=True):
            x[box.slices()].add_(grad[into.slices()].to(x.dtype))
        if self.longest:
            messages = pool.empty([self.source.nbytes // grad.itemsize], grad.dtype, x.device, fixed=True)
            self._send(team, self.dest, grad, self.source, messages, x)
            self.source.add(messages, x)
        return x.to(grad.dtype)

    def _send(self, team: Team, source: Side, x: Tensor, dest: Side, into: Tensor, y: Tensor) -> None:
        out = source.pack(x)
        counts = source.counts, source.displs_in(out, x), dest.counts, dest.displs_in(into, y)
        self.route.alltoallv(team, out, into, Alltoall(*counts, self.longest, self.total))


class Fact(NamedTuple):
    """Facts about one rank's part in a transfer, for all ranks.

    Attributes:
        longest, total, single: as in :class:`Transfer`, for this rank.
        on_host: whether its data are in host memory.
        itemsize: bytes of an element.
        missing: number of elements of its new part that no rank holds.
    """

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
    """Plan the transfer. Collective; two small Allgathers.

    Args:
        shapes: the shapes of the parts of all ranks.
        x: this rank's part.

    Raises:
        RankError: on every rank, if the parts do not form a tensor in `src`, or it cannot have the layout `dst`.
    """
    name = "src"
    try:
        shape, source = src.held(shapes)
        name = "dst"
        dest = dst.boxes(shape, team.size)
    except ValueError as wrong:  # the same on all ranks
        raise RankError(verb, dict.fromkeys(range(team.size), coded("HD213", f"{name}: {wrong}"))) from None
    moves = layout.overlaps(source, dest, team.rank)
    sides = (
        Side(source[team.rank], moves.sends, team.rank, team.size, x.dtype),
        Side(dest[team.rank], moves.recvs, team.rank, team.size, x.dtype),
    )
    mine = Fact(
        longest=max(max(side.counts) for side in sides),
        total=max(max(side.nbytes, x.itemsize * layout.whole(side.shape).size()) for side in sides),
        single=all(len(boxes) <= 1 for side in sides for boxes in (*side.boxes, side.own)),
        on_host=x.is_cpu,
        itemsize=x.itemsize,
        missing=moves.missing,
    )
    facts = objects.all_gather_object(team.comm, mine)
    text = "src: no rank holds {} of the {} elements of its new part"
    missing = {rank: fact.missing for rank, fact in enumerate(facts) if fact.missing}
    objects.raise_problems(verb, {rank: text.format(n, dest[rank].size()) for rank, n in missing.items()})
    pieces = [
        (peer, box.relative_to(source[peer].offset), box.relative_to(dest[team.rank].offset))
        for peer, box in moves.recvs
    ]
    return Transfer(route, shape, dest, team.rank, *sides, facts, pieces)
