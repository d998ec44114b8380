"""Which pieces a tensor is written in, who writes each, and how what lies elsewhere comes to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
from torch import Tensor

from hpcdist import abort, layout
from hpcdist.buffers import as_bytes, bits
from hpcdist.checks import WrongError
from hpcdist.layout import Box
from hpcdist.pages import Ints
from hpcdist.staging.host import Scratch
from hpcdist.team import Team

__all__ = [
    "PIECE",
    "ROUND",
    "Plan",
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
_MOST_PIECES = 2**22  # of a tensor: each has a row in a table, and a Box on every rank


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


@dataclass(frozen=True)
class Plan:
    """How the ranks of a team bring one tensor to a file, or get it from there; the same on every rank.

    Attributes:
        pieces: the boxes that are written or read one at a time.
        owners: the rank that does it, for each piece.
        held: the box of the whole tensor that each rank holds, or wants.
        straight: every piece lies in its owner's box, so that nothing travels between ranks.
    """

    pieces: list[Box]
    owners: list[int]
    held: list[Box]
    straight: bool

    @cached_property
    def rounds(self) -> list[dict[int, int]]:
        """The pieces in an order in which every owner has one at a time: owner -> piece, for each round."""
        mine: dict[int, list[int]] = {}
        for row, owner in enumerate(self.owners):
            mine.setdefault(owner, []).append(row)
        longest = max(map(len, mine.values()), default=0)
        return [{owner: rows[i] for owner, rows in mine.items() if i < len(rows)} for i in range(longest)]

    def owners_at(self, elements: Ints) -> Ints:
        """The ranks that write elements, counted in C order; the pieces are the runs of the whole, in that order."""
        firsts, owners = self._by_element
        return owners[np.searchsorted(firsts, elements, "right") - 1]

    @cached_property
    def _by_element(self) -> tuple[Ints, Ints]:
        return np.array(layout.displs([box.size() for box in self.pieces])), np.array(self.owners)

    def rows(self, rank: int) -> list[int]:
        """The pieces of one rank."""
        return [row for row, owner in enumerate(self.owners) if owner == rank]


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
    extents: Sequence[int],
    window: int,
    writers: int,
    chunks: Sequence[int] | None,
) -> Plan:
    """How shards along `dim` (None: every rank has the whole) are written by `writers` ranks.

    Each rank writes its own shard where that is one run of the file; else the pieces of the file are shared out, and
    every rank gets what belongs to its own in memory of at most `window` bytes.
    """
    size = len(extents)
    held = shard_boxes(shape, dim, extents)
    limit = max(1, min(PIECE, window) // itemsize)
    filled = [rank for rank, box in enumerate(held) if box.size()]
    joined = dim is None or prod(shape[:dim]) == 1 or len(filled) < 2
    own = joined and dim is not None and chunks is None and writers == size
    straight = dim is None and chunks is None
    if not (own or straight):
        limit = max(1, min(limit, min(ROUND, window // size) // itemsize))
    check_pieces(shape, itemsize, limit)
    if own:
        cut = [(piece, rank) for rank in filled for piece in layout.boxes(held[rank], limit)]
        return Plan([piece for piece, _ in cut], [rank for _, rank in cut], held, straight=True)
    if chunks is None:
        pieces = list(layout.boxes(layout.whole(shape), limit))
    else:
        pieces = list(layout.grid_boxes(shape, chunks, limit)) if prod(shape) else []
    return Plan(pieces, owners_of(len(pieces), size, writers), held, straight)


def owners_of(pieces: int, size: int, takers: int) -> list[int]:
    """Share consecutive pieces among `takers` of `size` ranks."""
    shares = layout.shares(pieces, size, takers)
    return [rank for rank, (first, end) in enumerate(shares) for _ in range(first, end)]


def collect(team: Team, plan: Plan, x: Tensor, round_: dict[int, int], scratch: Scratch) -> Tensor | None:
    """Bring the pieces of one round together from the shards `x` of all ranks. Collective over the team.

    Returns:
        This rank's piece, in contiguous host memory of `scratch`; None if it has none in this round.
    """
    scratch.reset()
    me = team.rank
    mine = plan.held[me]
    sends: list[tuple[int, Tensor]] = []
    own: tuple[Box, Tensor] | None = None
    for owner, row in round_.items():
        part = plan.pieces[row].meet(mine)
        if part.size():
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
        places, recvs = _places(piece, box, plan.held, me, scratch)
        if own is not None:
            bits(piece)[own[0].slices(box.offset)] = bits(own[1])
    with abort.Transfer("staging.save", team.size):
        _exchange(team, sends, recvs)
    for place, block in places:
        bits(place).copy_(bits(block))
    return piece


def _exchange(team: Team, sends: list[tuple[int, Tensor]], recvs: list[tuple[int, Tensor]]) -> None:
    from hpcdist.routes.mpi import MPI_ROUTE

    MPI_ROUTE.exchange(team, sends, recvs, ROUND)


def _places(
    whole: Tensor, box: Box, others: Sequence[Box], me: int, scratch: Scratch
) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[int, Tensor]]]:
    """Where what comes from the boxes of the others goes in `whole`, which is `box`: (place, block) to be copied where
    the place is not contiguous, and (rank, bytes to receive into)."""
    places, recvs = [], []
    for source, other in enumerate(others):
        part = box.meet(other)
        if part.size() and source != me:
            place = block = whole[part.slices(box.offset)]
            if not place.is_contiguous() or place.is_cuda:
                block = scratch.take(part.shape, whole.dtype)
                places.append((place, block))
            recvs.append((source, as_bytes(block)))
    return places, recvs


def deliver(
    team: Team, plan: Plan, piece: Tensor | None, out: Tensor, round_: dict[int, int], scratch: Scratch
) -> None:
    """Send the pieces of one round, which their owners have read, to the ranks that want them. Collective.

    `piece` is this rank's, in contiguous host memory, and `out` is the box of the whole that it wants.
    """
    me = team.rank
    sends: list[tuple[int, Tensor]] = []
    if me in round_:
        assert piece is not None
        box = plan.pieces[round_[me]]
        for dest, want in enumerate(plan.held):
            part = box.meet(want)
            if part.size():
                block = piece[part.slices(box.offset)]
                if dest == me:
                    place = out[part.slices(want.offset)]
                    place.copy_(block) if place.is_cuda else bits(place).copy_(bits(block))
                else:
                    sends.append((dest, as_bytes(scratch.on_host(block))))
    sources = [layout.Box((0,) * out.dim(), (0,) * out.dim())] * team.size
    for owner, row in round_.items():
        sources[owner] = plan.pieces[row]
    places, recvs = _places(out, plan.held[me], sources, me, scratch)
    with abort.Transfer("staging.load", team.size):
        _exchange(team, sends, recvs)
    for place, block in places:
        place.copy_(block) if place.is_cuda else bits(place).copy_(bits(block))
