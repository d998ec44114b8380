"""Sequences of boxes, one for each rank or piece, none of which is listed: a box is worked out when it is asked for,
and those that meet another box are found by arithmetic, or by bisection, without going through all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from math import prod
from operator import index
from typing import Any, overload

import numpy as np

from hpcdist import layout
from hpcdist.layout import Box

__all__ = ["BoxSequence", "Chosen", "Copies", "Corners", "CutShards", "Grid", "Integers", "Listed", "Shards", "summed"]

Integers = np.ndarray[Any, np.dtype[np.int64]]

_NONE: Integers = np.empty(0, np.int64)


class BoxSequence(Sequence[Box], ABC):
    """Boxes of one tensor."""

    @abstractmethod
    def box(self, i: int) -> Box:
        """The i-th box, for 0 <= i < len()."""

    @abstractmethod
    def intersecting(self, box: Box) -> Integers:
        """Which of the boxes have an element in common with `box`, in ascending order."""

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
        self._whole = layout.whole(shape)
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __repr__(self) -> str:
        return f"Copies({self._whole.shape}, {self._size})"

    def box(self, i: int) -> Box:
        return self._whole

    def intersecting(self, box: Box) -> Integers:
        return np.arange(self._size if box.intersect(self._whole).size() else 0)


class Shards(BoxSequence):
    """A tensor that is cut along `dim`: the i-th box is from ``displs[i]`` to ``displs[i + 1]``."""

    def __init__(self, shape: Sequence[int], dim: int, displs: Integers) -> None:
        self.shape, self.dim, self.displs = tuple(shape), dim, displs

    def __len__(self) -> int:
        return len(self.displs) - 1

    def __repr__(self) -> str:
        return f"Shards({self.shape}, {self.dim}, {self.displs.tolist()})"

    def box(self, i: int) -> Box:
        start, end = int(self.displs[i]), int(self.displs[i + 1])
        return layout.whole(self.shape).narrow(self.dim, start, end)

    def intersecting(self, box: Box) -> Integers:
        common = box.intersect(layout.whole(self.shape))
        if not common.size():
            return _NONE
        first = common.offset[self.dim]
        low = np.searchsorted(self.displs, first, "right") - 1
        high = np.searchsorted(self.displs, first + common.shape[self.dim], "left")
        return low + np.flatnonzero(np.diff(self.displs[low : high + 1]))


class Grid(BoxSequence):
    """What ``layout.boxes(layout.whole(shape), limit)`` lists; with a `cell`, what ``layout.grid_boxes`` does."""

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

    def intersecting(self, box: Box) -> Integers:
        common = box.intersect(layout.whole(self.shape))
        if not common.size():
            return _NONE
        rows = np.zeros(1, np.int64)
        for dim in range(min(self._dim + 1, len(self.shape))):
            first = common.offset[dim] // self._cell[dim]
            last = (common.offset[dim] + common.shape[dim] - 1) // self._cell[dim]
            extent = self._cells[dim]
            if dim == self._dim:
                first, last, extent = first // self._step, last // self._step, self._per_lead
            rows = (rows[:, None] * extent + np.arange(first, last + 1)).ravel()
        return rows


class CutShards(BoxSequence):
    """Shards cut along their dim, each on its own, into boxes of `step` indices; before `dim`, extents are 1.

    Attributes:
        bounds: which of the boxes are those of shard i: from ``bounds[i]`` to ``bounds[i + 1]``.
    """

    def __init__(self, shards: Shards, step: int) -> None:
        self._shards, self._step = shards, step
        self.bounds = summed(-(-np.diff(shards.displs) // step))

    def __len__(self) -> int:
        return int(self.bounds[-1])

    def __repr__(self) -> str:
        return f"CutShards({self._shards!r}, {self._step})"

    def box(self, i: int) -> Box:
        displs, shard = self._shards.displs, int(np.searchsorted(self.bounds, i, "right")) - 1
        start = int(displs[shard]) + (i - int(self.bounds[shard])) * self._step
        return layout.whole(self._shards.shape).narrow(
            self._shards.dim, start, min(start + self._step, int(displs[shard + 1]))
        )

    def intersecting(self, box: Box) -> Integers:
        common = box.intersect(layout.whole(self._shards.shape))
        if not common.size():
            return _NONE
        first = common.offset[self._shards.dim]
        return np.arange(self._at(first), self._at(first + common.shape[self._shards.dim] - 1) + 1)

    def _at(self, place: int) -> int:
        """The box that holds an index along dim."""
        displs = self._shards.displs
        shard = np.searchsorted(displs, place, "right") - 1
        return int(self.bounds[shard] + (place - displs[shard]) // self._step)


class Corners:
    """Where boxes begin, and their shapes: a row for each box."""

    def __init__(self, offsets: Integers, shapes: Integers) -> None:
        self.offsets, self.shapes = offsets, shapes

    @cached_property
    def sizes(self) -> Integers:
        """The number of elements of each box."""
        found: Integers = self.shapes.prod(axis=1)
        return found

    @cached_property
    def cover(self) -> Box:
        """The least box that holds all of them; an empty one, if they are empty."""
        filled = self.sizes > 0
        if not filled.any():
            return Box((0,) * self.shapes.shape[1], (0,) * self.shapes.shape[1])
        low = self.offsets[filled].min(axis=0)
        return Box(tuple(low.tolist()), tuple(((self.offsets + self.shapes)[filled].max(axis=0) - low).tolist()))

    @cached_property
    def least_shape(self) -> tuple[int, ...] | None:
        """The shape of the least tensor that all of them are in, the empty ones too; None if they are in none."""
        if min(self.offsets.min(initial=0), self.shapes.min(initial=0)) < 0:
            return None
        return tuple((self.offsets + self.shapes).max(axis=0, initial=0).tolist())


class Listed(BoxSequence):
    """Boxes in any order, of which some may overlap, of a tensor of the shape `whole`."""

    def __init__(self, corners: Corners, whole: Sequence[int]) -> None:
        self.corners, self._whole = corners, tuple(whole)

    def __len__(self) -> int:
        return len(self.corners.offsets)

    def __repr__(self) -> str:
        return f"Listed({self.corners.offsets.tolist()}, {self.corners.shapes.tolist()}, {self._whole})"

    def box(self, i: int) -> Box:
        return Box(tuple(self.corners.offsets[i].tolist()), tuple(self.corners.shapes[i].tolist()))

    def intersecting(self, box: Box) -> Integers:
        if not box.size():
            return _NONE
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

    def run_lengths(self) -> tuple[Integers, Integers]:
        """Of each box, the elements of a run of the tensor's memory, and the number of runs: see layout.runs()."""
        lengths, counts = np.ones((2, len(self)), np.int64)
        running = np.full(len(self), True)  # while all of what is behind this dim is there
        for dim in reversed(range(len(self._whole))):
            extents = self.corners.shapes[:, dim]
            lengths *= np.where(running, extents, 1)
            counts *= np.where(running, 1, extents)
            running &= extents == self._whole[dim]
        return lengths, counts

    def _place(self, at: Sequence[int]) -> int:
        return sum(o * stride for o, stride in zip(at, self._strides, strict=True))

    @cached_property
    def _strides(self) -> list[int]:
        return [prod(self._whole[dim + 1 :]) for dim in range(len(self._whole))]

    @cached_property
    def _runs(self) -> Integers | None:
        """Where each begins in the tensor's memory, if they are runs of it, one behind the other."""
        sizes = self.corners.sizes
        if prod(self._whole) > np.iinfo(np.int64).max or not sizes.all() or (self.run_lengths()[1] > 1).any():
            return None
        starts = np.zeros(len(self), np.int64)
        for dim, stride in enumerate(self._strides):
            starts += self.corners.offsets[:, dim] * stride
        return starts if (starts[:-1] + sizes[:-1] <= starts[1:]).all() else None


class Chosen(BoxSequence):
    """Some of the boxes of another sequence: those with the numbers `rows`, which ascend."""

    def __init__(self, boxes: BoxSequence, rows: Integers) -> None:
        self._boxes, self._rows = boxes, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return f"Chosen({self._boxes!r}, {self._rows.tolist()})"

    def box(self, i: int) -> Box:
        return self._boxes.box(int(self._rows[i]))

    def intersecting(self, box: Box) -> Integers:
        return np.flatnonzero(np.isin(self._rows, self._boxes.intersecting(box), assume_unique=True))


def summed(counts: Sequence[int] | Integers) -> Integers:
    """Where each of consecutive parts starts, and the end of the last."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])
