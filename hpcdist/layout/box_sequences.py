"""Sequences of boxes, one for each rank or piece: the boxes that intersect another one are found by arithmetic or by
bisection, and what all ranks hold is not listed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from hpcdist.layout.box import Box, runs, whole
from hpcdist.layout.overlaps import disjoint

__all__ = ["BoxSequence", "Copies", "Ints", "Listed", "Shards", "cut_shards", "grid", "run_starts", "summed"]

Ints = np.ndarray[Any, np.dtype[np.int64]]


class BoxSequence(ABC):
    """Boxes of one tensor, of the shape `shape`."""

    shape: tuple[int, ...]

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, i: int) -> Box:
        """The i-th box, for 0 <= i < len()."""

    @abstractmethod
    def _find(self, box: Box) -> Ints:
        """As intersecting(), of a box of the tensor that has elements."""

    def intersecting(self, box: Box) -> Ints:
        """The numbers, ascending, of the boxes that have an element in common with `box`."""
        common = box.intersect(whole(self.shape))
        return self._find(common) if common.size() else np.empty(0, np.int64)

    def __iter__(self) -> Iterator[Box]:
        return (self[i] for i in range(len(self)))


class Copies(BoxSequence):
    """The whole tensor, once for each of `size` ranks."""

    def __init__(self, shape: Sequence[int], size: int) -> None:
        self.shape, self._size = tuple(shape), size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, i: int) -> Box:
        return whole(self.shape)

    def _find(self, box: Box) -> Ints:
        return np.arange(self._size)


class Shards(BoxSequence):
    """A tensor that is cut along `dim`: the i-th box is ``displs[i]`` to ``displs[i + 1]``."""

    def __init__(self, shape: Sequence[int], dim: int, displs: Ints) -> None:
        self.shape, self.dim, self.displs = tuple(shape), dim, displs

    def __len__(self) -> int:
        return len(self.displs) - 1

    def __getitem__(self, i: int) -> Box:
        start, end = int(self.displs[i]), int(self.displs[i + 1])
        return whole(self.shape).narrow(self.dim, start, end)

    def _find(self, box: Box) -> Ints:
        first = box.offset[self.dim]
        low = np.searchsorted(self.displs, first, "right") - 1
        high = np.searchsorted(self.displs, first + box.shape[self.dim], "left")
        return low + np.flatnonzero(np.diff(self.displs[low : high + 1]))


class Listed(BoxSequence):
    """Boxes in any order, which may overlap: a row of `offsets` and of `shapes` for each."""

    def __init__(self, offsets: Ints, shapes: Ints, shape: Sequence[int]) -> None:
        self.offsets, self.shapes, self.shape = offsets, shapes, tuple(shape)

    @classmethod
    def of(cls, boxes: Sequence[Box], shape: Sequence[int]) -> Listed:
        """These boxes."""
        corners = np.array(boxes, np.int64).reshape(len(boxes), 2, len(shape))
        return cls(corners[:, 0], corners[:, 1], shape)

    def __len__(self) -> int:
        return len(self.offsets)

    def __getitem__(self, i: int) -> Box:
        return Box(tuple(self.offsets[i].tolist()), tuple(self.shapes[i].tolist()))

    @cached_property
    def sizes(self) -> Ints:
        """The number of elements of each box."""
        found: Ints = self.shapes.prod(axis=1)
        return found

    @cached_property
    def starts(self) -> Ints:
        """The first element of each box in the tensor's memory."""
        strides = np.array([prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))], np.int64)
        found: Ints = self.offsets @ strides if self.shape else np.zeros(len(self), np.int64)
        return found

    @cached_property
    def are_runs(self) -> bool:
        """Whether they are runs of the tensor's memory, in ascending order."""
        if not self.sizes.all() or (self.run_lengths()[1] > 1).any():
            return False
        return bool((self.starts[:-1] + self.sizes[:-1] <= self.starts[1:]).all())

    @cached_property
    def cover(self) -> Box:
        """The least box that holds all of them; an empty one if they are empty."""
        filled = self.sizes > 0
        if not filled.any():
            return Box((0,) * len(self.shape), (0,) * len(self.shape))
        low = self.offsets[filled].min(axis=0)
        return Box(tuple(low.tolist()), tuple(((self.offsets + self.shapes)[filled].max(axis=0) - low).tolist()))

    def tile(self) -> bool:
        """Whether each element of the tensor is in one of them, and in no other."""
        if not self.shape:
            return len(self) == 1
        filled = np.flatnonzero(self.sizes)
        offsets, shapes = self.offsets[filled], self.shapes[filled]
        inside = (offsets >= 0) & (shapes >= 0) & (offsets <= np.array(self.shape) - shapes)
        if not inside.all() or int(self.sizes.sum()) != prod(self.shape):
            return False
        cut = np.flatnonzero((shapes != self.shape).any(axis=0))
        if len(cut) > 1:
            return disjoint([self[i] for i in filled.tolist()])
        if not len(cut):
            return True
        order = np.argsort(offsets[:, cut[0]])
        starts, extents = offsets[order, cut[0]], shapes[order, cut[0]]
        return bool((starts[:-1] + extents[:-1] <= starts[1:]).all())

    def run_lengths(self) -> tuple[Ints, Ints]:
        """For each box, the elements of a run of the tensor's memory, and the number of runs: see layout.runs()."""
        lengths, counts = np.ones((2, len(self)), np.int64)
        running = np.full(len(self), True)  # while the box has all of the later dims
        for dim in reversed(range(len(self.shape))):
            extents = self.shapes[:, dim]
            lengths *= np.where(running, extents, 1)
            counts *= np.where(running, 1, extents)
            running &= extents == self.shape[dim]
        return lengths, counts

    def _find(self, box: Box) -> Ints:
        low, high = 0, len(self)
        if self.are_runs:
            ends = Listed.of([box, Box(tuple(o + n - 1 for o, n in zip(*box, strict=True)), box.shape)], self.shape)
            first, last = ends.starts.tolist()
            low = max(0, int(np.searchsorted(self.starts, first, "right")) - 1)
            high = int(np.searchsorted(self.starts, last, "right"))
        offsets, shapes = self.offsets[low:high], self.shapes[low:high]
        common = np.full(len(offsets), True)
        for dim, (first, extent) in enumerate(zip(*box, strict=True)):
            least = np.minimum(offsets[:, dim] + shapes[:, dim], first + extent)
            common &= least > np.maximum(offsets[:, dim], first)
        return low + np.flatnonzero(common)


def grid(shape: Sequence[int], limit: int, cell: Sequence[int] | None = None) -> Listed:
    """Cut a tensor into boxes of at most `limit` elements, in C order, as layout.boxes() does; with a `cell`, into
    boxes of whole cells, of one at least."""
    n, sizes = len(shape), np.array(cell or (1,) * len(shape), np.int64)
    cells = [-(-extent // size) for extent, size in zip(shape, sizes.tolist(), strict=True)]
    most = max(1, limit // prod(sizes.tolist()))
    dim = 0
    while dim < n - 1 and prod(cells[dim + 1 :]) > most:
        dim += 1
    if not n or not prod(shape):
        none = np.zeros((0 if n else 1, n), np.int64)
        return Listed(none, none, shape)
    step = max(1, most // prod(cells[dim + 1 :]))
    counts = [*cells[:dim], -(-cells[dim] // step)]
    extents = np.array([*(1,) * dim, step, *cells[dim + 1 :]], np.int64) * sizes
    offsets = np.zeros((prod(counts), n), np.int64)
    offsets[:, : dim + 1] = np.indices(counts).reshape(dim + 1, -1).T * extents[: dim + 1]
    return Listed(offsets, np.minimum(offsets + extents, np.array(shape)) - offsets, shape)


def cut_shards(shards: Shards, step: int) -> tuple[Listed, Ints]:
    """Cut shards along their dim, each on its own, into boxes of `step` indices.

    Returns:
        The boxes, and where those of each shard begin and end: shard i has ``bounds[i]`` to ``bounds[i + 1]``.
    """
    displs, counts = shards.displs, -(-np.diff(shards.displs) // step)
    bounds, shard = summed(counts), np.repeat(np.arange(len(counts)), counts)
    starts = displs[shard] + (np.arange(len(shard)) - bounds[shard]) * step
    offsets = np.zeros((len(shard), len(shards.shape)), np.int64)
    shapes = np.tile(np.array(shards.shape, np.int64), (len(shard), 1))
    offsets[:, shards.dim] = starts
    shapes[:, shards.dim] = np.minimum(starts + step, displs[shard + 1]) - starts
    return Listed(offsets, shapes, shards.shape), bounds


def run_starts(box: Box, shape: Sequence[int]) -> tuple[Ints, int]:
    """The elements at which the runs of a box begin in a tensor's memory, and the length of a run."""
    length, count, _ = runs(box, shape)
    strides = [prod(shape[d + 1 :]) for d in range(len(shape))]
    starts = np.array([sum(o * stride for o, stride in zip(box.offset, strides, strict=True))], np.int64)
    for extent, stride in zip(box.shape, strides, strict=True):
        if len(starts) == count:
            break
        starts = (starts[:, None] + np.arange(extent) * stride).ravel()
    return (starts if length else starts[:0]), length


def summed(counts: Sequence[int] | Ints) -> Ints:
    """The start of each of consecutive parts, and the end of the last."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])
