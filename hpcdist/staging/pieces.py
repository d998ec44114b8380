"""The pieces in which a tensor is written or read: the rank that does each, and how its data reach that rank or leave
it: over MPI in host memory, and from and to GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import prod

import numpy as np
import torch
from torch import Tensor

from hpcdist import activity, layout
from hpcdist.comm.team import Team
from hpcdist.errors import reason, refusal
from hpcdist.layout import Box
from hpcdist.layout.box import BoxSequence, Copies, Ints, Listed, Shape, Shards, grid, summed
from hpcdist.process import abort
from hpcdist.tensors import accelerator
from hpcdist.tensors.storage import Scratch, as_bytes, bits
from hpcdist.validation.local import ArgumentError

ROUND = 2**24  # bytes of a piece that ranks collect: its memory is soon reused
PIECE = 2**26  # bytes of a piece at most: the unit of writing, of checksums, and of resuming

Progress = Callable[[int], None] | None
"""Called with the number of bytes that have just been read or written."""
_Views = list[tuple[int, Tensor]]  # by rank
_MOST_BYTES = 2**63 - 1  # of a file
_MOST_DIMS = 32  # of HDF5
MOST_PIECES = 2**20  # of a tensor: each has a row in a table
_HALF = 2**31


def check_shape(shape: Sequence[int], itemsize: int) -> None:
    """Raise an ArgumentError, whose text follows the tensor's name, if a tensor cannot be a dataset."""
    if len(shape) > _MOST_DIMS:
        raise ArgumentError("HD418", f"has {len(shape)} dims, and HDF5 has {_MOST_DIMS} at most")
    if max(prod(shape) * itemsize, *shape, 0) > _MOST_BYTES:
        raise ArgumentError("HD418", f"has shape {tuple(shape)}: no file has more than {_MOST_BYTES} bytes")


def piece_limit(nbytes: int, itemsize: int) -> int:
    """The elements of a piece, at most, where so many bytes of host memory are left for it."""
    return max(1, min(PIECE, nbytes) // itemsize)


def check_pieces(shape: Sequence[int], itemsize: int, limit: int) -> None:
    """Raise an ArgumentError, as above, if there are too many pieces of `limit` elements, before they are listed."""
    if prod(shape) > limit * MOST_PIECES:
        size = prod(shape) * itemsize
        raise ArgumentError(
            "HD419",
            f"has {size:,} bytes, in more than {MOST_PIECES:,} pieces of {limit * itemsize:,}: window is too small",
        )


def report(progress: Progress, nbytes: int) -> None:
    """Report so many bytes to the caller's `progress`; a ValueError if that fails."""
    activity.touch()
    if progress is not None:
        try:
            progress(nbytes)
        except Exception as error:
            what = f"progress raised {type(error).__name__}: {reason(error)}"
            raise refusal(ValueError, "HD309", what) from error


@dataclass(frozen=True, eq=False)
class OwnPieces:
    """The pieces of a tensor that this rank writes, all from its own memory. Nothing here is of other ranks.

    Attributes:
        pieces: boxes of the whole tensor.
        first: number of the first one among those of all ranks.
        count: number of pieces of all ranks.
        origin: where this rank's box begins.
    """

    pieces: Listed
    first: int
    count: int
    origin: Ints


@dataclass(frozen=True, eq=False)
class PiecePlan:
    """How the ranks of a team write one tensor to a file, or read it, where data move; the same on every rank.

    It lists nothing for all ranks: see :mod:`hpcdist.layout.box`.

    Attributes:
        pieces: boxes that are written or read one at a time.
        bounds: rank r writes or reads the pieces ``bounds[r]`` to ``bounds[r + 1]``.
        held: box of the whole tensor that each rank holds, or wants.
    """

    pieces: Listed
    bounds: Ints
    held: BoxSequence
    _met: dict[int, tuple[Ints, Ints, Ints]] = field(default_factory=dict, init=False, repr=False)

    @property
    def count(self) -> int:
        return len(self.pieces)

    @cached_property
    def rounds(self) -> range:
        """The rounds in which the pieces are done: in round i, every owner has its i-th piece."""
        return range(int(np.diff(self.bounds).max()))

    def piece(self, rank: int, round_: int) -> int | None:
        """The piece of a rank in a round, if it has one."""
        rows = self.rows(rank)
        return rows[round_] if round_ < len(rows) else None

    def rows(self, rank: int) -> range:
        """The pieces of one rank."""
        return range(int(self.bounds[rank]), int(self.bounds[rank + 1]))

    def traffic(self, rank: int, itemsize: int) -> tuple[int, int, int]:
        """The bytes of a rank's pieces; of its pieces in the boxes of other ranks; of its box in their pieces."""
        pieces = [self.pieces[row] for row in self.rows(rank)]
        own = sum(piece.intersect(self.held[rank]).size() for piece in pieces)
        met = [
            piece.intersect(self.held[peer]).size()
            for piece in pieces
            for peer in self.held.intersecting(piece).tolist()
        ]
        elements = sum(piece.size() for piece in pieces), sum(met) - own, self.held[rank].size() - own
        return elements[0] * itemsize, elements[1] * itemsize, elements[2] * itemsize

    def met(self, rank: int, round_: int) -> list[tuple[int, int]]:
        """(owner, piece) for the pieces of a round of which a part lies in the box of `rank`."""
        if rank not in self._met:
            rows = self.pieces.intersecting(self.held[rank])
            owners = np.searchsorted(self.bounds, rows, "right") - 1
            rounds = rows - self.bounds[owners]
            order = np.argsort(rounds, kind="stable")
            self._met[rank] = rounds[order], owners[order], rows[order]
        rounds, owners, rows = self._met[rank]
        low, high = np.searchsorted(rounds, (round_, round_ + 1))
        return list(zip(owners[low:high].tolist(), rows[low:high].tolist(), strict=True))


def plan_save(
    team: Team, shards: Sequence[tuple[Shape, torch.dtype, int | None]], window: int
) -> Iterator[tuple[Shape, OwnPieces | PiecePlan]]:
    """Plan how the ranks write tensors: yield the shape of each whole, and the plan. Collective.

    If a shard is one run of the file, its rank writes it, and needs to know only where it begins: a scan and a sum of a
    few integers for each tensor. Otherwise the pieces of the file are divided among the ranks, and each collects the
    data of its pieces in memory of at most `window` bytes. Only for such tensors do ranks get the extents of all.

    Args:
        shards: for each tensor the shape of this rank's shard, the dtype, and the dim along which it is cut; no dim if
            every rank holds the whole.

    Raises:
        ArgumentError: on every rank, from the iterator, if the next tensor cannot be a dataset.
    """
    limits = [piece_limit(window, dtype.itemsize) for _, dtype, _ in shards]
    mine, extents = np.zeros((len(shards), 3), np.int64), list[int]()
    for i, (shape, _, dim) in enumerate(shards):
        if dim is not None and prod(shape[:dim]) != 1:
            extents.append(shape[dim])
        elif dim is not None:
            count = len(grid(shape, limits[i])) if prod(shape) <= limits[i] * MOST_PIECES else 0  # refused below
            mine[i] = shape[dim] % _HALF, shape[dim] // _HALF, count  # in two parts, because the sum may be too large
    before, total, table = np.zeros_like(mine), np.empty_like(mine), np.empty((team.size, len(extents)), np.int64)
    team.comm.Exscan(mine, before)
    team.comm.Allreduce(mine, total)
    if extents:
        team.comm.Allgather(np.array(extents), table)
    columns = iter(table.T)
    for i, (shape, dtype, dim) in enumerate(shards):
        moves, whole, origin = dim is not None and prod(shape[:dim]) != 1, shape, np.zeros(len(shape), np.int64)
        along = next(columns) if moves else None
        if dim is not None:
            extent = int(total[i, 0]) + int(total[i, 1]) * _HALF if along is None else sum(along.tolist())
            whole = (*shape[:dim], extent, *shape[dim + 1 :])
        check_shape(whole, dtype.itemsize)
        if along is not None and dim is not None and np.count_nonzero(along) > 1:
            limit = max(1, min(limits[i], min(ROUND, window // team.size) // dtype.itemsize))
            check_pieces(whole, dtype.itemsize, limit)
            boxes = grid(whole, limit)
            bounds = block_bounds(len(boxes), team.size, team.size)
            yield whole, PiecePlan(boxes, bounds, Shards(whole, dim, summed(along)))
            continue
        check_pieces(whole, dtype.itemsize, limits[i])
        boxes = grid(shape, limits[i])
        rows, first, count = range(len(boxes)), int(before[i, 2]), int(total[i, 2])
        if dim is None:
            rows = layout.block_range(len(boxes), team.size, team.rank)
            first, count = rows.start, len(boxes)
        elif along is not None:  # one rank has all
            count = len(grid(whole, limits[i]))
        else:
            origin[dim] = int(before[i, 0]) + int(before[i, 1]) * _HALF
        own = slice(rows.start, rows.stop)
        yield whole, OwnPieces(Listed(boxes.offsets[own] + origin, boxes.shapes[own], whole), first, count, origin)


@lru_cache(maxsize=64)
def block_bounds(pieces: int, size: int, workers: int) -> Ints:
    """Divide consecutive pieces among `workers` of `size` ranks, by the block rule, evenly spread among the ranks.

    Returns:
        The first piece of each rank, and the number of all.
    """
    counts = np.zeros(size, np.int64)
    counts[np.arange(workers) * size // workers] = layout.block(pieces, workers)
    bounds = summed(counts)
    bounds.setflags(write=False)  # all plans share it
    return bounds


def collect(team: Team, plan: PiecePlan, x: Tensor, round_: int, scratch: Scratch) -> Tensor | None:
    """Collect the pieces of one round from the shards `x` of all ranks. Collective over the team.

    Returns:
        This rank's piece, in contiguous host memory of `scratch`; None if it has none in this round.
    """
    scratch.reset()
    row = plan.piece(team.rank, round_)
    piece = None if row is None else scratch.take(plan.pieces[row].shape, x.dtype)
    sends, recvs = _views(plan, team.rank, round_, x, piece)
    exchange(team, "staging.save", sends, recvs, scratch)
    return piece


def deliver(team: Team, plan: PiecePlan, piece: Tensor | None, out: Tensor, round_: int, scratch: Scratch) -> None:
    """Send the pieces of one round from their owners to the ranks that need them. Collective.

    `piece` is this rank's, in contiguous host memory, and `out` is the box of the whole that it wants.
    """
    if isinstance(plan.held, Copies) and _through_windows(team, plan, piece, out, round_, scratch):
        return
    recvs, sends = _views(plan, team.rank, round_, out, piece)
    exchange(team, "staging.load", sends, recvs, scratch)


def _views(plan: PiecePlan, me: int, round_: int, x: Tensor, piece: Tensor | None) -> tuple[_Views, _Views]:
    """By rank, the parts of `x`, this rank's box, that lie in the pieces of a round; and the parts of this rank's piece
    that lie in the boxes of the ranks."""
    mine, row = plan.held[me], plan.piece(me, round_)
    met = [(owner, mine.intersect(plan.pieces[met])) for owner, met in plan.met(me, round_)]
    of_x = [(owner, x[part.slices(mine.offset)]) for owner, part in met]
    if piece is None or row is None:
        return of_x, []
    box = plan.pieces[row]
    held = [(rank, box.intersect(plan.held[rank])) for rank in plan.held.intersecting(box).tolist()]
    return of_x, [(rank, piece[part.slices(box.offset)]) for rank, part in held]


def exchange(team: Team, verb: str, sends: _Views, recvs: _Views, scratch: Scratch) -> None:
    """Send parts of tensors to other ranks, and receive others in place; parts for this rank are copied. Those between
    two ranks are in the same order on both. Collective."""
    from hpcdist.routes.mpi import MPI_ROUTE

    me, copies, arriving = team.rank, list[tuple[Tensor, Tensor]](), []
    own = (block for dest, block in sends if dest == me)
    messages = [(dest, as_bytes(scratch.on_host(block))) for dest, block in sends if dest != me]
    for source, place in recvs:
        if source == me:
            block = next(own)
            copies.append((place, block if block.is_cpu else scratch.on_host(block)))
        else:
            arriving.append((source, _destination(place, scratch, copies)))
    with abort.InTransfer(verb, team.size):
        MPI_ROUTE.exchange(team, messages, arriving, ROUND)
    for place, block in copies:  # when all data have arrived
        bits(place).copy_(bits(block))


def _destination(place: Tensor, scratch: Scratch, copies: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return host memory in which data for `place` arrive; if it is not `place`, note the copy to be made."""
    if place.is_cpu and place.is_contiguous():
        return as_bytes(place)
    block = scratch.take(place.shape, place.dtype)
    copies.append((place, block))
    return as_bytes(block)


def _through_windows(
    team: Team, plan: PiecePlan, piece: Tensor | None, out: Tensor, round_: int, scratch: Scratch
) -> bool:
    """As deliver(), where all ranks want all of it: through memory that the ranks of a node share, so that each byte
    comes to a node once. False on all ranks if that does not help, or cannot be had. Collective."""
    from hpcdist.routes import node_copy  # which imports MPI
    from hpcdist.routes.mpi import MPI_ROUTE

    if not node_copy.helps(team):
        return False
    copies = list[tuple[Tensor, Tensor]]()
    nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
    rows = [plan.piece(rank, round_) for rank in range(team.size)]
    places = [nothing if row is None else out[plan.pieces[row].slices()] for row in rows]
    recvs = [_destination(place, scratch, copies) for place in places]
    mine = nothing if piece is None else as_bytes(piece)
    # Without windows, the owner of a piece would send it to each rank: of 16,384 ranks, 4 GiB for 256 KiB.
    if not (MPI_ROUTE.allgather(team, mine, recvs) or node_copy.in_rounds(team, mine, recvs)):
        return False
    for place, block in copies:
        bits(place).copy_(bits(block))
    return True


def outgoing(x: Tensor, parts: Sequence[Box]) -> Iterator[Tensor]:
    """Yield each part of `x` in contiguous host memory, valid until the next one is requested.

    Views of a CPU tensor where they are contiguous, else one copy. Of a GPU tensor, the next part is copied while the
    caller works on this one.
    """
    if x.is_cpu:
        scratch = Scratch(pinned=False)
        for part in parts:
            scratch.reset()
            yield scratch.on_host(x[part.slices()])
        return
    pinned = _pinned(x, parts)
    ready: list[torch.Event] = []
    for i in range(len(parts) + 1):
        if i < len(parts):
            bits(pinned(i)).copy_(bits(x[parts[i].slices()]).contiguous(), non_blocking=True)
            ready.append(accelerator.event(x.device))
        if i > 0:
            ready[i - 1].synchronize()
            yield pinned(i - 1)


def incoming(out: Tensor, parts: Sequence[Box]) -> Iterator[Tensor]:
    """Yield contiguous host memory for each part of `out`, which is copied there when the caller, having filled it,
    asks for the next. All copies are complete when the iterator ends.

    Views of a CPU tensor where they are contiguous, else one copy. Of a GPU tensor, a part is copied while the caller
    fills the next.
    """
    if out.is_cpu:
        scratch = Scratch(pinned=False)
        for part in parts:
            scratch.reset()
            target = out[part.slices()]
            buffer = target if target.is_contiguous() else scratch.take(part.shape, out.dtype)
            yield buffer
            if buffer is not target:
                bits(target).copy_(bits(buffer))
        return
    pinned = _pinned(out, parts)
    free: list[torch.Event] = []
    for i, part in enumerate(parts):
        if i > 1:
            free[i - 2].synchronize()
        yield pinned(i)
        bits(out[part.slices()]).copy_(bits(pinned(i)), non_blocking=True)
        free.append(accelerator.event(out.device))
    accelerator.synchronize(out.device)


def _pinned(x: Tensor, parts: Sequence[Box]) -> Callable[[int], Tensor]:
    """Two pinned buffers that the parts of a tensor use in turn: returns that of part i, in its shape."""
    size, count = max((part.size() for part in parts), default=0), min(2, len(parts))
    memory = accelerator.host_buffer(count * size * x.itemsize, pinned=True).view(x.dtype).view(count, size)
    return lambda i: memory[i % 2][: parts[i].size()].view(parts[i].shape)
