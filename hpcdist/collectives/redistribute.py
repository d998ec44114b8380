"""The operation redistribute: move a tensor from one layout to another. Also: local() and balance()."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import torch
from torch import Tensor

from hpcdist import layout as layouts
from hpcdist.collectives.kept import Movement, encode, numbers_of_all, prefix_of
from hpcdist.collectives.run import Plannable, run
from hpcdist.comm.team import Team
from hpcdist.control import objects
from hpcdist.errors import RankError, refusal
from hpcdist.layout import Box, Layout
from hpcdist.routes.route import Alltoall, Route
from hpcdist.runtime import world
from hpcdist.tensors import pool
from hpcdist.tensors.blocks import Blocks
from hpcdist.tensors.storage import copyable, overlap, sum_dtype
from hpcdist.validation import collective, local as checks
from hpcdist.validation.collective import Agreed, Call

if TYPE_CHECKING:
    from hpcdist.comm.team import GroupLike, OutOptions
    from hpcdist.runtime.background import Handle

_LAYOUTS = frozenset({layouts.Split, layouts.Block, layouts.Replicate, layouts.Boxes})  # which cannot change


# fmt: off
@overload
def redistribute(x: Tensor, src: Layout, dst: Layout, *,
                 async_op: Literal[False] = False, **options: Unpack[OutOptions]) -> Tensor: ...
@overload
def redistribute(x: Tensor, src: Layout, dst: Layout, *,
                 async_op: Literal[True], **options: Unpack[OutOptions]) -> Handle[Tensor]: ...
# fmt: on
def redistribute(
    x: Tensor,
    src: Layout,
    dst: Layout,
    *,
    group: GroupLike | None = None,
    route: str = "auto",
    out: Tensor | None = None,
    async_op: bool = False,
) -> Any:
    """Redistribute a tensor from one layout to another: from each rank's part in `src` to its part in `dst`.

    Collective over `group`. Blocks until all ranks of `group` have called it; after the timeout of
    :func:`hpcdist.init` the job ends (:class:`HangError`).

    Each rank sends to another only elements that the other needs and does not have. Nothing is padded. Contiguous parts
    are sent and received without a copy; others are copied once.

    Args:
        x: this rank's part of the tensor in `src`: any dtype and strides, on the CPU or a GPU. Dtype and number of
            dims must agree.
        src: the layout of the parts: Split, Block, Replicate or Boxes. Without counts, the parts' extents are used.
            Must agree.
        dst: the layout of the result. Without counts, the block rule. Must agree.
        group: a torch ProcessGroup, 1-d DeviceMesh or mpi4py communicator; None means all ranks. Must agree.
        route: "auto", "nccl", "gloo", "mpi" or "hdf5". Must agree.
        out: memory for the result, of its shape, dtype and device; optional on each rank.
        async_op: whether to return a :class:`Handle` at once, and continue in the background. Must agree.

    Returns:
        This rank's part in `dst`: new contiguous memory (or `out`), on x's device, of the shape
        ``dst.boxes(shape of the whole, number of ranks)[rank].shape``.

        If any rank needs a gradient, the gradient of an element flows back to the rank that sent it, as the sum over
        all ranks that received it. If several ranks hold copies, one of them gets it. Every rank must call backward.

    Raises:
        RankError: on every rank, if an argument is wrong on any rank, or the parts do not form a tensor in `src`. No
            data have moved, and the next call can succeed.
        TypeError, ValueError: on this rank, if `group` is not a group, or this rank is not in it.

    Example, on 2 ranks::

        >>> rows = torch.tensor([[0, 1, 2, 3]]) + 4 * rank       # row `rank` of a 2 x 4 tensor
        >>> hd.redistribute(rows, hd.Split(0), hd.Split(1))
        tensor([[0, 1],       # on rank 0; [[2, 3], [6, 7]] on rank 1
                [4, 5]])
    """

    return run(Redistribute(x, src, dst, route, out), world.team_of(group), async_op)


@dataclass(eq=False)
class Redistribute(Plannable):
    """Redistribute a tensor.

    Attributes:
        moves: what this rank sends and receives, after plan().
        typed: whether the route receives into boxes; None before it is chosen.
    """

    x: Any
    src: Any
    dst: Any
    route: Any
    out: Any
    sent: Tensor = field(init=False)
    moves: Moves = field(init=False)
    typed: bool | None = field(default=None, init=False)
    name = "redistribute"

    def arguments(self) -> Hashable:
        given = self.src, self.dst, self.route
        return given if _LAYOUTS.issuperset(map(type, given[:2])) else None

    def check(self, team: Team, call: Call) -> None:
        checks.check_layouts(self, call)
        checks.put_inline(call, team, encode(_shapes(call)))

    def plan(self, team: Team, call: Call, agreed: Agreed) -> None:
        x = call.x
        assert x is not None
        ndim = x.dim()
        if agreed.inline:
            rows: Sequence[Sequence[int]] = numbers_of_all(team, 1 + 2 * ndim)
        else:
            rows = objects.all_gather_object(team.comm, _shapes(call))
        shapes = tuple(tuple(row[1 : 1 + ndim]) for row in rows)
        if not self.number:
            try:
                self.moves = _moves(self.src, self.dst, shapes, team.rank, team.size, x.dtype)
            except ValueError as error:  # the same on all ranks
                raise RankError(self.name, dict.fromkeys(range(team.size), str(error))) from None
            self.moves.agree(self.name, team)
        moves = self.moves
        outs = {rank: tuple(row[1 + ndim : 1 + 2 * ndim]) for rank, row in enumerate(rows) if row[0]}
        collective.check_out(self.name, outs, [box.shape for box in moves.boxes], agreed.grad, "shape {}")
        counts = moves.source.counts, moves.source.displs, moves.dest.counts, moves.dest.displs
        self.messages = [("alltoallv", Alltoall(*counts, moves.longest, moves.total))] if moves.longest else []
        parts = Movement(moves.shape, x.dtype, moves.held, moves.boxes, moves.recvs)
        self.bind(team, call, agreed, parts, prefix_of(1 + 2 * ndim))

    def move(self, team: Team) -> Tensor:
        shard, dest, moves = self.sent, self.dest, self.moves
        if self.typed is None:
            self.typed = self.chosen(team).receives_boxes(team, moves.total, moves.longest)

        def make() -> tuple[Tensor, Tensor, Tensor, Tensor]:
            y, source = dest, shard
            if y is None:
                y = pool.empty(moves.boxes[team.rank].shape, shard.dtype, shard.device)
            elif overlap(y, shard):
                source = copyable(shard).clone()
            messages = (moves.source.pack(source), moves.buffer(y, self.typed)) if moves.longest else (source, y)
            return y, source, *messages

        y, source, messages, buffer = self.allocate(team, make)

        def copy_own() -> None:
            for box, into in zip(moves.source.own, moves.dest.own, strict=True):
                copyable(y[into.slices()]).copy_(copyable(source[box.slices()]))

        if moves.longest:
            if self.transfers is None:
                what = moves.messages(moves.source, source, messages, moves.dest, y, buffer)
                self.messages = [("alltoallv", what)]
            self.carry(team, messages, buffer, copy_own)
            moves.dest.unpack(buffer, y)
        else:
            copy_own()
            self.chosen(team)  # for the trace
        return y

    def backward(self, team: Team, grad: Tensor) -> Tensor:
        return self.moves.transpose(team, self.chosen(team), grad)


def _shapes(call: Call) -> list[int]:
    """Return whether this rank has `out`, the shape of its part, and that of `out`."""
    assert call.x is not None
    out_shape = [-1] * call.x.dim() if call.out is None else call.out.shape
    return [call.out is not None, *call.x.shape, *out_shape]


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


class Moves:
    """One rank's part in moving a tensor from one layout to another.

    Messages that are not one run of memory are packed: MPICH sends derived datatypes at a third of that speed.

    Args:
        shapes: shapes of the parts of all ranks.
        rank, size: rank of this process, and number of ranks.

    Attributes:
        shape: shape of the whole tensor.
        held, boxes: boxes of all ranks in the old layout, and in the new one.
        recvs: source and box of all that this rank receives, what it has itself included.
        missing: elements of the new part that no rank holds.
        source, dest: messages that this rank sends from its part, and those that it receives into the new one.
        longest, total: bytes of the longest message of all ranks in both directions, and of all messages of a rank: see
            Alltoall. Until agree(), those of this rank.

    Raises:
        ValueError: if the parts do not form a tensor in `src`, or it cannot have the layout `dst`; on all ranks.
    """

    def __init__(
        self, src: Layout, dst: Layout, shapes: Sequence[tuple[int, ...]], rank: int, size: int, dtype: torch.dtype
    ) -> None:
        name = "src"
        try:
            self.shape, self.held = src.held(shapes)
            name = "dst"
            self.boxes = dst.boxes(self.shape, size)
        except ValueError as wrong:
            raise refusal(ValueError, "HD213", f"{name}: {wrong}") from None
        moves = layouts.overlaps(self.held, self.boxes, rank)
        self.recvs, self.missing = moves.recvs, moves.missing
        self.source = Side(self.held[rank], moves.sends, rank, size, dtype)
        self.dest = Side(self.boxes[rank], moves.recvs, rank, size, dtype)
        sides = (self.source, self.dest)
        self.longest = max(max(side.counts) for side in sides)
        self.total = max(max(side.nbytes, dtype.itemsize * prod(side.shape)) for side in sides)

    def agree(self, verb: str, team: Team) -> None:
        """Agree on the longest message. Collective; a RankError if no rank holds a part of the result."""
        longests, totals, missing = zip(*team.comm.allgather((self.longest, self.total, self.missing)), strict=True)
        text = "src: no rank holds {} of the {} elements of its new part"
        lacking = {rank: text.format(n, self.boxes[rank].size()) for rank, n in enumerate(missing) if n}
        objects.raise_problems(verb, lacking)
        self.longest, self.total = max(longests), max(totals)

    def buffer(self, y: Tensor, typed: bool | None) -> Tensor:
        """Return memory to receive the messages for `y`: `y` itself if they can arrive in place.

        Args:
            typed: whether the route receives into boxes.
        """
        if typed and y.is_contiguous() and max(map(len, self.dest.boxes)) < 2:
            return y
        return self.dest.buffer(y)

    def transpose(self, team: Team, route: Route, grad: Tensor) -> Tensor:
        """Compute the gradient of `x` from that of `y`, summed over all ranks that received an element. Collective."""
        x = pool.empty(self.source.shape, sum_dtype(grad.dtype), grad.device).zero_()
        for box, into in zip(self.source.own, self.dest.own, strict=True):
            x[box.slices()].add_(grad[into.slices()].to(x.dtype))
        if self.longest:
            messages = pool.empty([self.source.nbytes // grad.itemsize], grad.dtype, x.device, fixed=True)
            packed = self.dest.pack(grad)
            what = self.messages(self.dest, grad, packed, self.source, x, messages)
            route.prepare(team, "alltoallv", what)(packed, messages)
            self.source.add(messages, x)
        return x.to(grad.dtype)

    def messages(self, source: Side, x: Tensor, packed: Tensor, dest: Side, y: Tensor, buffer: Tensor) -> Alltoall:
        """Return the messages from `packed`, which is `x` itself or its packed messages, to `buffer`, as for `y`."""
        counts = source.counts, source.displs_in(packed, x), dest.counts, dest.displs_in(buffer, y)
        boxes = dest.boxes if buffer is y and dest.in_place is None else None
        return Alltoall(*counts, self.longest, self.total, boxes)


_moves = lru_cache(maxsize=64)(Moves)


def balance(weights: Sequence[float], parts: int | None = None, *, group: GroupLike | None = None) -> list[int]:
    """Balance rows of unequal weight: return a count of rows for each rank so that all have about the same weight.

    The counts are for consecutive rows, as Split and split take them. No rank gets more than the heaviest part of the
    best partition plus the largest weight: see :func:`hpcdist.layout.balance`.

    Args:
        weights: the weight of each row, a number >= 0; the same on all ranks.
        parts: the number of parts; None means the number of ranks in `group`.

    Raises:
        ValueError: if a weight is negative or not a number.

    Example, on 2 ranks, for sequences of these lengths::

        >>> hd.balance([8, 1, 1, 1, 1, 4])
        [1, 5]
    """
    return layouts.balance(weights, world.context().group_of(group).size if parts is None else parts)


def local(x: Tensor, layout: Layout, *, group: GroupLike | None = None) -> Tensor:
    """Return this rank's part of a tensor that every rank holds: a view, without communication.

    Args:
        x: the whole tensor.
        layout: the layout of the ranks' parts.
        group: the group of ranks; None means all ranks.

    Raises:
        ValueError: on this rank, if a tensor of this shape cannot have this layout.

    Example, on rank 1 of 2::

        >>> hd.local(torch.arange(8).view(2, 4), hd.Split(1))
        tensor([[2, 3],
                [6, 7]])
    """
    ranks = world.context().group_of(group)
    return x[layout.boxes(x.shape, ranks.size)[ranks.rank].slices()]
