"""The pieces in which a tensor is written, and the rank that writes each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import prod

import numpy as np

from hpcdist import layout
from hpcdist.formats.contents import Dataset
from hpcdist.layout import Box
from hpcdist.layout.box import BoxSequence, Copies, Ints, Listed, Shards, cut_shards, grid, summed
from hpcdist.validation.local import ArgumentError

__all__ = [
    *("MOST_PIECES", "PIECE", "ROUND", "PiecePlan", "block_bounds", "check_pieces", "check_shape", "piece_limit"),
    *("plan_save", "shard_boxes"),
]

ROUND = 2**24  # bytes of a piece that ranks collect: its memory is soon reused
PIECE = 2**26  # bytes of a piece at most: the unit of writing, of checksums, and of resuming

_MOST_BYTES = 2**63 - 1  # of a file
_MOST_DIMS = 32  # of HDF5
MOST_PIECES = 2**20  # of a tensor: each has a row in a table


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


@dataclass(frozen=True, eq=False)
class PiecePlan:
    """How the ranks of a team write one tensor to a file, or read it; the same on every rank.

    It lists nothing for all ranks: see :mod:`hpcdist.layout.box`.

    Attributes:
        pieces: boxes that are written or read one at a time.
        bounds: rank r writes or reads the pieces ``bounds[r]`` to ``bounds[r + 1]``.
        held: box of the whole tensor that each rank holds, or wants.
        straight: whether every piece lies in its owner's box, so that no data move between ranks.
    """

    pieces: Listed
    bounds: Ints
    held: BoxSequence
    straight: bool
    _met: dict[int, tuple[Ints, Ints, Ints]] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def rounds(self) -> range:
        """The rounds in which the pieces are done: in round i, every owner has its i-th piece."""
        return range(int(np.diff(self.bounds).max()))

    def piece(self, rank: int, round_: int) -> int | None:
        """The piece of a rank in a round, if it has one."""
        row = int(self.bounds[rank]) + round_
        return row if row < self.bounds[rank + 1] else None

    def rows(self, rank: int) -> range:
        """The pieces of one rank."""
        return range(int(self.bounds[rank]), int(self.bounds[rank + 1]))

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


def shard_boxes(shape: Sequence[int], dim: int | None, extents: Sequence[int]) -> list[Box]:
    """The box of each rank's shard of a tensor that is cut along `dim`; the whole for each if `dim` is None."""
    if dim is None:
        return [layout.whole(shape)] * len(extents)
    starts = zip(layout.displs(extents), extents, strict=True)
    return [layout.whole(shape).narrow(dim, start, start + extent) for start, extent in starts]


def plan_save(x: Dataset, dim: int | None, extents: Sequence[int] | Ints, window: int, writers: int) -> PiecePlan:
    """Plan how `writers` ranks write a tensor.

    Each rank writes its own shard where that is one run of the file; otherwise the pieces of the file are divided among
    the writers, and each collects the data of its own in memory of at most `window` bytes.

    Args:
        dim: dimension along which it is cut; None if every rank holds the whole.
        extents: of the shards along `dim`; an entry, without meaning, for each rank if `dim` is None.
    """
    size, itemsize = len(extents), x.dtype.itemsize
    held = Copies(x.shape, size) if dim is None else Shards(x.shape, dim, summed(extents))
    limit = piece_limit(window, itemsize)
    joined = dim is None or prod(x.shape[:dim]) == 1 or np.count_nonzero(extents) < 2
    own = joined and dim is not None and x.chunks is None and writers == size
    straight = dim is None and x.chunks is None
    if not (own or straight):
        limit = max(1, min(limit, min(ROUND, window // size) // itemsize))
    check_pieces(x.shape, itemsize, limit)
    if isinstance(held, Shards) and own:
        pieces, bounds = _cut(held, limit)
        return PiecePlan(pieces, bounds, held, straight=True)
    whole = grid(x.shape, limit, x.chunks)
    return PiecePlan(whole, block_bounds(len(whole), size, writers), held, straight)


def _cut(shards: Shards, limit: int) -> tuple[Listed, Ints]:
    """The pieces of shards of which each is one run of the file, and which of them belong to each rank."""
    row, extent = prod(shards.shape[shards.dim + 1 :]), shards.shape[shards.dim]
    if 0 < row <= limit and prod(shards.shape[: shards.dim]) == 1:
        return cut_shards(shards, limit // row)
    whole = grid(shards.shape, limit)  # no piece is longer than an index along dim, or one rank has all
    if np.count_nonzero(np.diff(shards.displs)) < 2:
        return whole, len(whole) * np.minimum(shards.displs, 1)
    return whole, shards.displs * (len(whole) // extent)


@lru_cache(maxsize=64)
def block_bounds(pieces: int, size: int, workers: int) -> Ints:
    """Divide consecutive pieces among `workers` of `size` ranks, as layout.block_ranges() does.

    Returns:
        The first piece of each rank, and the number of all.
    """
    counts = np.zeros(size, np.int64)
    quotient, rest = divmod(pieces, workers)
    chosen = np.arange(workers)
    counts[chosen * size // workers] = quotient + (chosen < rest)
    bounds = summed(counts)
    bounds.setflags(write=False)  # all plans share it
    return bounds
