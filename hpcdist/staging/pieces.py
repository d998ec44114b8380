"""Which pieces a tensor is written in, who writes each, and how what lies elsewhere comes to them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import prod
from typing import overload

import numpy as np
from torch import Tensor

from hpcdist import layout
from hpcdist.comm.team import Team
from hpcdist.files.raw import Ints
from hpcdist.layout import Box
from hpcdist.process import abort
from hpcdist.staging.boxes import BoxSequence, Copies, CutShards, Grid, Integers, Shards, summed
from hpcdist.tensors.pinned import Scratch
from hpcdist.tensors.storage import as_bytes, bits
from hpcdist.validation.local import WrongError

__all__ = [
    "PIECE",
    "ROUND",
    "Owners",
    "Plan",
    "Round",
    "check_pieces",
    "check_shape",
    "collect",
    "deliver",
    "owners_of",
    "plan_save",
    "shard_boxes",
]

ROUND = 2**24  # bytes of a piece that ranks bring together: what they use for it is soon used again
PIECE = 2**26  # bytes of a piece at most: what is written, checked, and written again after a crash, at a time


_MOST_BYTES = 2**63 - 1  # of a file
_MOST_DIMS = 32  # of HDF5
_MOST_PIECES = 2**22  # of a tensor: each has a row in a table


def check_shape(shape: Sequence[int], itemsize: int) -> None:
    """Find what keeps a tensor from being a dataset: a WrongError, to be put after its name."""
    if len(shape) > _MOST_DIMS:
        raise WrongError(f"has {len(shape)} dims, and HDF5 has {_MOST_DIMS} at most")
    if max(prod(shape) * itemsize, *shape, 0) > _MOST_BYTES:
        raise WrongError(f"has shape {tuple(shape)}: no file has more than {_MOST_BYTES} bytes")


def check_pieces(shape: Sequence[int], itemsize: int, limit: int) -> None:
    """Find that there are too many pieces of `limit` elements, before they are listed: a WrongError, as above."""
    if prod(shape) > limit * _MOST_PIECES:
        size = prod(shape) * itemsize
        raise WrongError(
            f"has {size:,} bytes, in more than {_MOST_PIECES:,} pieces of {limit * itemsize:,}: window is too small"
        )


class Round(Mapping[int, int]):
    """One piece for every owner that has so many of them: owner -> piece.

    Attributes:
        turn: its number.
    """

    def __init__(self, bounds: Integers, turn: int) -> None:
        self._bounds, self.turn = bounds, turn

    def __getitem__(self, owner: int) -> int:
        row = int(self._bounds[owner]) + self.turn
        if row >= self._bounds[owner + 1]:
            raise KeyError(owner)
        return row

    def __iter__(self) -> Iterator[int]:
        yield from np.flatnonzero(np.diff(self._bounds) > self.turn).tolist()

    def __len__(self) -> int:
        return int((np.diff(self._bounds) > self.turn).sum())


class Owners(Sequence[int]):
    """The rank that each piece belongs to; consecutive pieces belong to one rank.

    Args:
        bounds: the pieces of rank r are those from ``bounds[r]`` to ``bounds[r + 1]``.
    """

    def __init__(self, bounds: Integers) -> None:
        self.bounds = bounds

    def __len__(self) -> int:
        return int(self.bounds[-1])

    @overload
    def __getitem__(self, row: int) -> int: ...
    @overload
    def __getitem__(self, row: slice) -> list[int]: ...
    def __getitem__(self, row: int | slice) -> int | list[int]:
        rows = np.arange(len(self))[row]
        found: int | list[int] = self.of(rows).tolist()
        return found

    def of(self, rows: Integers) -> Integers:
        """The owners of these pieces."""
        return np.searchsorted(self.bounds, rows, "right") - 1

    def __iter__(self) -> Iterator[int]:
        yield from np.repeat(np.arange(len(self.bounds) - 1), np.diff(self.bounds)).tolist()


@dataclass(frozen=True, eq=False)
class Plan:
    """How the ranks of a team bring one tensor to a file, or get it from there; the same on every rank.

    None of it is a list of what all ranks do: see :mod:`hpcdist.staging.boxes`.

    Attributes:
        pieces: the boxes that are written or read one at a time.
        owners: the rank that does it, for each piece.
        held: the box of the whole tensor that each rank holds, or wants.
        straight: every piece lies in its owner's box, so that nothing travels between ranks.
    """

    pieces: BoxSequence
    owners: Owners
    held: BoxSequence
    straight: bool
    _met: dict[int, tuple[Integers, Integers, Integers]] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def rounds(self) -> list[Round]:
        """The pieces in an order in which every owner has one at a time."""
        bounds = self.owners.bounds
        return [Round(bounds, turn) for turn in range(int(np.diff(bounds).max()))]

    def owners_at(self, shape: Sequence[int], elements: Ints) -> Ints:
        """The ranks that write elements of the tensor, counted in C order; the pieces are its runs, in that order."""
        bounds, whole = self.owners.bounds, prod(shape)

        def first(rank: int) -> int:
            row = int(bounds[rank])
            return next(layout.runs(self.pieces[row], shape)[2]) if row < len(self.pieces) else whole

        ranks = range(len(bounds) - 1)
        return np.array([bisect_right(ranks, int(element), key=first) - 1 for element in elements], np.int64)

    def rows(self, rank: int) -> range:
        """The pieces of one rank."""
        return range(int(self.owners.bounds[rank]), int(self.owners.bounds[rank + 1]))

    def met(self, rank: int, round_: Round) -> list[tuple[int, int]]:
        """(owner, piece) for the pieces of a round of which a part lies in the box of `rank`."""
        if rank not in self._met:
            rows = self.pieces.intersecting(self.held[rank])
            owners = self.owners.of(rows)
            turns = rows - self.owners.bounds[owners]
            order = np.argsort(turns, kind="stable")
            self._met[rank] = turns[order], owners[order], rows[order]
        turns, owners, rows = self._met[rank]
        low, high = np.searchsorted(turns, (round_.turn, round_.turn + 1))
        return list(zip(owners[low:high].tolist(), rows[low:high].tolist(), strict=True))


def shard_boxes(shape: Sequence[int], dim: int | None, extents: Sequence[int]) -> list[Box]:
    """Where each rank's shard lies in a tensor that is cut along `dim`; the whole for each, if `dim` is None."""
    if dim is None:
        return [layout.whole(shape)] * len(extents)
    before, behind = tuple(shape[:dim]), tuple(shape[dim + 1 :])
    return [
        Box((*(0,) * dim, start, *(0,) * len(behind)), (*before, extent, *behind))
        for start, extent in zip(layout.displs(extents), extents, strict=True)
    ]


def plan_save(
    shape: Sequence[int],
    itemsize: int,
    dim: int | None,
    extents: Sequence[int] | Integers,
    window: int,
    writers: int,
    chunks: Sequence[int] | None,
) -> Plan:
    """How shards along `dim` (None: every rank has the whole) are written by `writers` ranks.

    Each rank writes its own shard where that is one run of the file; else the pieces of the file are shared out, and
    every rank gets what belongs to its own in memory of at most `window` bytes.
    """
    size = len(extents)
    held = Copies(shape, size) if dim is None else Shards(shape, dim, summed(extents))
    limit = max(1, min(PIECE, window) // itemsize)
    joined = dim is None or prod(shape[:dim]) == 1 or np.count_nonzero(extents) < 2
    own = joined and dim is not None and chunks is None and writers == size
    straight = dim is None and chunks is None
    if not (own or straight):
        limit = max(1, min(limit, min(ROUND, window // size) // itemsize))
    check_pieces(shape, itemsize, limit)
    if isinstance(held, Shards) and own:
        pieces, bounds = _cut(held, limit)
        return Plan(pieces, Owners(bounds), held, straight=True)
    whole = Grid(shape, limit, chunks)
    return Plan(whole, owners_of(len(whole), size, writers), held, straight)


def _cut(shards: Shards, limit: int) -> tuple[BoxSequence, Integers]:
    """The pieces of shards of which each is one run of the file, and which of them belong to each rank."""
    row, extent = prod(shards.shape[shards.dim + 1 :]), shards.shape[shards.dim]
    if 0 < row <= limit and prod(shards.shape[: shards.dim]) == 1:
        pieces = CutShards(shards, limit // row)
        return pieces, pieces.bounds
    whole = Grid(shards.shape, limit)  # no piece is longer than an index along dim, or one rank has all
    if np.count_nonzero(np.diff(shards.displs)) < 2:
        return whole, len(whole) * np.minimum(shards.displs, 1)
    return whole, shards.displs * (len(whole) // extent)


def owners_of(pieces: int, size: int, takers: int) -> Owners:
    """Share consecutive pieces among `takers` of `size` ranks."""
    return Owners(_shared(pieces, size, takers))


@lru_cache(maxsize=64)
def _shared(pieces: int, size: int, takers: int) -> Integers:
    """What layout.block_ranges() says, as the first piece of each rank, and the number of all."""
    counts = np.zeros(size, np.int64)
    quotient, rest = divmod(pieces, takers)
    chosen = np.arange(takers)
    counts[chosen * size // takers] = quotient + (chosen < rest)
    bounds = summed(counts)
    bounds.setflags(write=False)  # all plans have the same
    return bounds


def collect(team: Team, plan: Plan, x: Tensor, round_: Round, scratch: Scratch) -> Tensor | None:
    """Bring the pieces of one round together from the shards `x` of all ranks. Collective over the team.

    Returns:
        This rank's piece, in contiguous host memory of `scratch`; None if it has none in this round.
    """
    scratch.reset()
    me = team.rank
    mine = plan.held[me]
    sends: list[tuple[int, Tensor]] = []
    own: tuple[Box, Tensor] | None = None
    for owner, row in plan.met(me, round_):
        if owner != me and isinstance(plan.held, Copies):
            continue  # it has all of it itself
        part = plan.pieces[row].intersect(mine)
        block = scratch.on_host(x[part.slices(mine.offset)])
        if owner == me:
            own = (part, block)
        else:
            sends.append((owner, as_bytes(block)))
    piece = None
    places: list[tuple[Tensor, Tensor]] = []
    recvs: list[tuple[int, Tensor]] = []
    if me in round_:
        box = plan.pieces[round_[me]]
        piece = scratch.take(box.shape, x.dtype)
        sources = [] if isinstance(plan.held, Copies) else plan.held.intersecting(box).tolist()
        parts = [(source, plan.held[source]) for source in sources if source != me]
        places, recvs = _places(piece, box, parts, scratch)
        if own is not None:
            bits(piece)[own[0].slices(box.offset)] = bits(own[1])
    with abort.InTransfer("staging.save", team.size):
        _exchange(team, sends, recvs)
    for place, block in places:
        bits(place).copy_(bits(block))
    return piece


def _exchange(team: Team, sends: list[tuple[int, Tensor]], recvs: list[tuple[int, Tensor]]) -> None:
    from hpcdist.routes.mpi import MPI_ROUTE

    MPI_ROUTE.exchange(team, sends, recvs, ROUND)


def _places(
    whole: Tensor, box: Box, others: Sequence[tuple[int, Box]], scratch: Scratch
) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[int, Tensor]]]:
    """Where what comes from the boxes of the others, (rank, box), goes in `whole`, which is `box`: (place, block) to be
    copied where the place is not contiguous, and (rank, bytes to receive into)."""
    places, recvs = [], []
    for source, other in others:
        part = box.intersect(other)
        place = block = whole[part.slices(box.offset)]
        if not place.is_contiguous() or place.is_cuda:
            block = scratch.take(part.shape, whole.dtype)
            places.append((place, block))
        recvs.append((source, as_bytes(block)))
    return places, recvs


def deliver(team: Team, plan: Plan, piece: Tensor | None, out: Tensor, round_: Round, scratch: Scratch) -> None:
    """Send the pieces of one round, which their owners have read, to the ranks that want them. Collective.

    `piece` is this rank's, in contiguous host memory, and `out` is the box of the whole that it wants.
    """
    me = team.rank
    sends: list[tuple[int, Tensor]] = []
    if me in round_:
        assert piece is not None
        box = plan.pieces[round_[me]]
        for dest in plan.held.intersecting(box).tolist():
            want = plan.held[dest]
            part = box.intersect(want)
            block = piece[part.slices(box.offset)]
            if dest == me:
                place = out[part.slices(want.offset)]
                place.copy_(block) if place.is_cuda else bits(place).copy_(bits(block))
            else:
                sends.append((dest, as_bytes(scratch.on_host(block))))
    parts = [(owner, plan.pieces[row]) for owner, row in plan.met(me, round_) if owner != me]
    places, recvs = _places(out, plan.held[me], parts, scratch)
    with abort.InTransfer("staging.load", team.size):
        _exchange(team, sends, recvs)
    for place, block in places:
        place.copy_(block) if place.is_cuda else bits(place).copy_(bits(block))
