"""Sequences of boxes, one for each rank or piece, that are not listed: a box is computed when it is asked for, and
those that intersect another box are found by arithmetic, or by bisection, without going through all of them.

How they are printed is part of the format of files: see :func:`hpcdist.files.h5.summary`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from math import prod
from operator import index
from typing import overload

import numpy as np

from hpcdist import layout
from hpcdist.files.raw import Ints
from hpcdist.layout import Box

__all__ = ["BoxSequence", "Chosen", "Copies", "Corners", "CutShards", "Grid", "Listed", "Shards", "summed"]


class BoxSequence(Sequence[Box], ABC):
    """Boxes of one tensor, of the shape `shape`."""

    shape: tuple[int, ...]

    @abstractmethod
    def box(self, i: int) -> Box:
        """The i-th box, for 0 <= i < len()."""

    @abstractmethod
    def _find(self, box: Box) -> Ints:
        """As intersecting(), of a box of the tensor that has elements."""

    def intersecting(self, box: Box) -> Ints:
        """The numbers, ascending, of the boxes that have an element in common with `box`."""
        common = box.intersect(layout.whole(self.shape))
        return self._find(common) if common.size() else np.empty(0, np.int64)

    @overload
    def __getitem__(self, i: int) -> Box: ...
    @overload
    def __getitem__(self, i: slice) -> list[Box]: ...
    def __getitem__(self, i: int | slice) -> Box | list[Box]:
        if isinstance(i, slice):
            return [self.box(at) for at in range(*i.indices(len(self)))]
        at = index(i)
        at += len(self) if at < 0 else 0
        if not 0 <= at < len(self):
            raise IndexError(f"{i} of {len(self)} boxes")
        return self.box(at)

    def __iter__(self) -> Iterator[Box]:
        return (self.box(i) for i in range(len(self)))


class Copies(BoxSequence):
    """The whole tensor, once for each of `size` ranks."""

    def __init__(self, shape: Sequence[int], size: int) -> None:
        self.shape, self._size = tuple(shape), size

    def __len__(self) -> int:
        return self._size

    def box(self, i: int) -> Box:
        return layout.whole(self.shape)

    def _find(self, box: Box) -> Ints:
        return np.arange(self._size)


class Shards(BoxSequence):
    """A tensor that is cut along `dim`: the i-th box is ``displs[i]`` to ``displs[i + 1]``."""

    def __init__(self, shape: Sequence[int], dim: int, displs: Ints) -> None:
        self.shape, self.dim, self.displs = tuple(shape), dim, displs

    def __len__(self) -> int:
        return len(self.displs) - 1

    def __repr__(self) -> str:
        return f"Shards({self.shape}, {self.dim}, {self.displs.tolist()})"

    def box(self, i: int) -> Box:
        start, end = int(self.displs[i]), int(self.displs[i + 1])
        return layout.whole(self.shape).narrow(self.dim, start, end)

    def _find(self, box: Box) -> Ints:
        first = box.offset[self.dim]
        low = np.searchsorted(self.displs, first, "right") - 1
        high = np.searchsorted(self.displs, first + box.shape[self.dim], "left")
        return low + np.flatnonzero(np.diff(self.displs[low : high + 1]))


class Grid(BoxSequence):
    """The boxes of ``layout.boxes(layout.whole(shape), limit)``; with a `cell`, of ``layout.grid_boxes``."""

    def __init__(self, shape: Sequence[int], limit: int, cell: Sequence[int] | None = None) -> None:
        self.shape, self._cell = tuple(shape), tuple(cell or (1,) * len(shape))
        cells = self._cells = tuple(-(-n // c) for n, c in zip(self.shape, self._cell, strict=True))
        most = max(1, limit // prod(self._cell))
        dim = 0
        while dim < len(cells) - 1 and prod(cells[dim + 1 :]) > most:
            dim += 1
        self._dim, self._step = dim, max(1, most // max(1, prod(cells[dim + 1 :])))
        self._per_lead = -(-cells[dim] // self._step) if cells else 1
        self._len = prod(cells[:dim]) * self._per_lead if prod(cells) else 0

    def __len__(self) -> int:
        return self._len

    def __repr__(self) -> str:
        return f"Grid({self.shape}, {self._cell}, {self._dim}, {self._step})"

    def box(self, i: int) -> Box:
        if not self.shape:
            return Box((), ())
        dim, cells = self._dim, self._cells
        lead, at = divmod(i, self._per_lead)
        offset, shape = [0] * len(cells), [*(1,) * dim, *cells[dim:]]
        offset[dim] = at * self._step
        shape[dim] = min(self._step, cells[dim] - offset[dim])
        for before in reversed(range(dim)):
            lead, offset[before] = divmod(lead, cells[before])
        starts = tuple(o * c for o, c in zip(offset, self._cell, strict=True))
        ends = zip(offset, shape, self._cell, self.shape, starts, strict=True)
        return Box(starts, tuple(min((o + n) * c, extent) - start for o, n, c, extent, start in ends))

    def _find(self, box: Box) -> Ints:
        rows = np.zeros(1, np.int64)
        for dim in range(min(self._dim + 1, len(self.shape))):
            first = box.offset[dim] // self._cell[dim]
            last = (box.offset[dim] + box.shape[dim] - 1) // self._cell[dim]
            extent = self._cells[dim]
            if dim == self._dim:
                first, last, extent = first // self._step, last // self._step, self._per_lead
            rows = (rows[:, None] * extent + np.arange(first, last + 1)).ravel()
        return rows


class CutShards(BoxSequence):
    """Shards cut along their dim, each on its own, into boxes of `step` indices; before `dim`, extents are 1.

    Attributes:
        bounds: shard i has the boxes ``bounds[i]`` to ``bounds[i + 1]``.
    """

    def __init__(self, shards: Shards, step: int) -> None:
        self.shape, self._shards, self._step = shards.shape, shards, step
        self.bounds = summed(-(-np.diff(shards.displs) // step))

    def __len__(self) -> int:
        return int(self.bounds[-1])

    def __repr__(self) -> str:
        return f"CutShards({self._shards!r}, {self._step})"

    def box(self, i: int) -> Box:
        displs, shard = self._shards.displs, int(np.searchsorted(self.bounds, i, "right")) - 1
        start = int(displs[shard]) + (i - int(self.bounds[shard])) * self._step
        end = min(start + self._step, int(displs[shard + 1]))
        return layout.whole(self.shape).narrow(self._shards.dim, start, end)

    def _find(self, box: Box) -> Ints:
        first = box.offset[self._shards.dim]
        return np.arange(self._at(first), self._at(first + box.shape[self._shards.dim] - 1) + 1)

    def _at(self, place: int) -> int:
        """The number of the box that holds an index along dim."""
        displs = self._shards.displs
        shard = np.searchsorted(displs, place, "right") - 1
        return int(self.bounds[shard] + (place - displs[shard]) // self._step)


class Corners:
    """The offsets and the shapes of boxes: a row for each box."""

    def __init__(self, offsets: Ints, shapes: Ints) -> None:
        self.offsets, self.shapes = offsets, shapes

    @cached_property
    def sizes(self) -> Ints:
        """The number of elements of each box."""
        found: Ints = self.shapes.prod(axis=1)
        return found

    @cached_property
    def cover(self) -> Box:
        """The least box that holds all of them; an empty one if they are empty."""
        filled = self.sizes > 0
        if not filled.any():
            return Box((0,) * self.shapes.shape[1], (0,) * self.shapes.shape[1])
        low = self.offsets[filled].min(axis=0)
        return Box(tuple(low.tolist()), tuple(((self.offsets + self.shapes)[filled].max(axis=0) - low).tolist()))


class Listed(BoxSequence):
    """Boxes in any order; they may overlap."""

    def __init__(self, corners: Corners, shape: Sequence[int]) -> None:
        self.corners, self.shape = corners, tuple(shape)

    def __len__(self) -> int:
        return len(self.corners.offsets)

    def box(self, i: int) -> Box:
        return Box(tuple(self.corners.offsets[i].tolist()), tuple(self.corners.shapes[i].tolist()))

    def _find(self, box: Box) -> Ints:
        low, high = 0, len(self)
        if self._runs is not None:
            last = [o + n - 1 for o, n in zip(box.offset, box.shape, strict=True)]
            low = max(0, int(np.searchsorted(self._runs, self._place(box.offset), "right")) - 1)
            high = int(np.searchsorted(self._runs, self._place(last), "right"))
        offsets, shapes = self.corners.offsets[low:high], self.corners.shapes[low:high]
        common = np.full(len(offsets), True)
        for dim, (first, extent) in enumerate(zip(*box, strict=True)):
            least = np.minimum(offsets[:, dim] + shapes[:, dim], first + extent)
            common &= least > np.maximum(offsets[:, dim], first)
        return low + np.flatnonzero(common)

    def run_lengths(self) -> tuple[Ints, Ints]:
        """For each box, the elements of a run of the tensor's memory, and the number of runs: see layout.runs()."""
        lengths, counts = np.ones((2, len(self)), np.int64)
        running = np.full(len(self), True)  # while the box has all of the later dims
        for dim in reversed(range(len(self.shape))):
            extents = self.corners.shapes[:, dim]
            lengths *= np.where(running, extents, 1)
            counts *= np.where(running, 1, extents)
            running &= extents == self.shape[dim]
        return lengths, counts

    def _place(self, at: Sequence[int]) -> int:
        return sum(o * stride for o, stride in zip(at, self._strides, strict=True))

    @cached_property
    def _strides(self) -> list[int]:
        return [prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]

    @cached_property
    def _runs(self) -> Ints | None:
        """The start of each in the tensor's memory, if they are runs of it in ascending order."""
        sizes = self.corners.sizes
        if prod(self.shape) > np.iinfo(np.int64).max or not sizes.all() or (self.run_lengths()[1] > 1).any():
            return None
        starts = np.zeros(len(self), np.int64)
        for dim, stride in enumerate(self._strides):
            starts += self.corners.offsets[:, dim] * stride
        return starts if (starts[:-1] + sizes[:-1] <= starts[1:]).all() else None


class Chosen(BoxSequence):
    """Some of the boxes of another sequence: those with the numbers `rows`, which ascend."""

    def __init__(self, boxes: BoxSequence, rows: Ints) -> None:
        self.shape, self._boxes, self._rows = boxes.shape, boxes, rows

    def __len__(self) -> int:
        return len(self._rows)

    def box(self, i: int) -> Box:
        return self._boxes.box(int(self._rows[i]))

    def _find(self, box: Box) -> Ints:
        return np.flatnonzero(np.isin(self._rows, self._boxes.intersecting(box), assume_unique=True))


def summed(counts: Sequence[int] | Ints) -> Ints:
    """The start of each of consecutive parts, and the end of the last."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])
