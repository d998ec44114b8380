"""Boxes, the rectangular parts of a tensor: intersect and cut them, locate them in memory, and plan a transfer.

A sequence of boxes has one for each rank or piece. It finds those that intersect another box by arithmetic or by
bisection, and lists nothing that all ranks hold.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import numpy as np

Ints = np.ndarray[Any, np.dtype[np.int64]]
Shape = tuple[int, ...]
_FEW = 64  # boxes that are compared one by one rather than searched


class Box(NamedTuple):
    """A part of a tensor: `shape` elements starting at `offset`, in each dim. In 0-d both are empty: one element."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def size(self) -> int:
        return prod(self.shape)

    def slices(self, origin: Sequence[int] = ()) -> tuple[slice, ...]:
        """Return the index of the box in a tensor, or in a part of it that starts at `origin` of the whole."""
        start = self.relative_to(origin).offset if origin else self.offset
        return tuple(slice(o, o + n) for o, n in zip(start, self.shape, strict=True))

    def is_in(self, shape: Sequence[int]) -> bool:
        """Return whether the box lies within a tensor of that shape."""
        return len(self.offset) == len(self.shape) == len(shape) and all(
            o >= 0 and n >= 0 and o + n <= extent for o, n, extent in zip(self.offset, self.shape, shape, strict=True)
        )

    def intersect(self, other: Box) -> Box:
        """Return the intersection of two boxes, of size 0 if they are disjoint.

        Example::

            >>> Box((0, 2), (4, 4)).intersect(Box((3, 0), (4, 4)))
            Box(offset=(3, 2), shape=(1, 2))
        """
        low = tuple(map(max, self.offset, other.offset))
        ends = zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        high = [min(a + n, b + m) for a, n, b, m in ends]
        return Box(low, tuple(max(0, end - start) for start, end in zip(low, high, strict=True)))

    def without(self, other: Box) -> list[Box]:
        """Subtract `other`: return the rest as disjoint boxes.

        Example::

            >>> Box((0,), (10,)).without(Box((3,), (2,)))
            [Box(offset=(0,), shape=(3,)), Box(offset=(5,), shape=(5,))]
        """
        common = self.intersect(other)
        if not common.size():
            return [self]
        rest, left = [], self
        for dim in range(len(self.shape)):
            low, high = common.offset[dim], common.offset[dim] + common.shape[dim]
            rest += [
                left.narrow(dim, left.offset[dim], low),
                left.narrow(dim, high, left.offset[dim] + left.shape[dim]),
            ]
            left = left.narrow(dim, low, high)
        return [box for box in rest if box.size()]

    def narrow(self, dim: int, start: int, end: int) -> Box:
        """Return the same box, but from `start` to `end` along `dim`."""
        offset = (*self.offset[:dim], start, *self.offset[dim + 1 :])
        return Box(offset, (*self.shape[:dim], end - start, *self.shape[dim + 1 :]))

    def shift(self, by: Sequence[int]) -> Box:
        """Move the box by an offset: from a part that starts there to the whole."""
        return Box(tuple(o + at for o, at in zip(self.offset, by, strict=True)), self.shape)

    def relative_to(self, origin: Sequence[int]) -> Box:
        """Return the box relative to a part that starts at `origin` of the whole."""
        return Box(tuple(o - at for o, at in zip(self.offset, origin, strict=True)), self.shape)


def whole(shape: Sequence[int]) -> Box:
    """Return the box of a whole tensor."""
    return Box((0,) * len(shape), tuple(shape))


def boxes(box: Box, limit: int) -> Iterator[Box]:
    """Cut a box into boxes of at most `limit` elements (at least one), in C order.

    Each has as many rows as fit, or part of a row if not even one fits. Boxes of a whole tensor are runs of its memory.

    Example::

        >>> [b.slices() for b in boxes(whole((3, 4)), 8)]     # two rows, one row
        [(slice(0, 2), slice(0, 4)), (slice(2, 3), slice(0, 4))]
    """
    if 0 < box.size() <= limit:  # numpy takes longer for one box
        yield box
        return
    for part in grid(box.shape, limit):
        yield part.shift(box.offset)


def _strides(shape: Sequence[int]) -> list[int]:
    return [prod(shape[dim + 1 :]) for dim in range(len(shape))]


def runs(box: Box, shape: Sequence[int]) -> tuple[int, int]:
    """Return how a box lies in a contiguous tensor of `shape`: (elements per run, number of runs).

    Example::

        >>> runs(Box((1, 2), (2, 3)), (4, 10)), run_starts(Box((1, 2), (2, 3)), (4, 10)).tolist()
        ((3, 2), [12, 22])
    """
    dim = _run_dim(box, shape)
    return prod(box.shape[dim:]), prod(box.shape[:dim])


def run_start(box: Box, part: Box) -> int | None:
    """Return the element at which a box begins in a contiguous part of the tensor; None if it is more than one run.

    Example::

        >>> run_start(Box((2, 0), (1, 5)), Box((1, 0), (3, 5)))
        5
    """
    start, begun = 0, False  # once a run extends along a dim, it has all of the later ones
    for (at, n), (origin, extent) in zip(zip(*box, strict=True), zip(*part, strict=True), strict=True):
        if begun and n != extent:
            return None
        start, begun = start * extent + at - origin, begun or n > 1
    return start


def _run_dim(box: Box, shape: Sequence[int]) -> int:
    """The first dim that a run extends along."""
    dim = len(shape)
    while dim > 0 and box.shape[dim - 1] == shape[dim - 1]:
        dim -= 1
    return max(0, dim - 1)  # the innermost dim that is only partly covered belongs to the run


def span(box: Box, shape: Sequence[int]) -> tuple[int, int]:
    """Return the first and the last element of a box in a tensor's memory."""
    strides = _strides(shape)
    first = sum(o * stride for o, stride in zip(box.offset, strides, strict=True))
    return first, first + sum((n - 1) * stride for n, stride in zip(box.shape, strides, strict=True))


def run_starts(box: Box, shape: Sequence[int]) -> Ints:
    """Return the elements at which the runs of a box begin in a tensor's memory."""
    strides = _strides(shape)
    starts = np.array([sum(o * stride for o, stride in zip(box.offset, strides, strict=True))], np.int64)
    for extent, stride in zip(box.shape[: _run_dim(box, shape)], strides, strict=False):
        starts = (starts[:, None] + np.arange(extent) * stride).ravel()
    return starts


def run_boxes(shape: Sequence[int], start: int, end: int) -> Iterator[Box]:
    """Return the elements `start` to `end` of a tensor, in C order, as boxes that are one run each.

    Example::

        >>> [b.slices() for b in run_boxes((3, 4), 2, 9)]     # the end of a row, a row, the start of one
        [(slice(0, 1), slice(2, 4)), (slice(1, 2), slice(0, 4)), (slice(2, 3), slice(0, 1))]
    """
    if len(shape) < 2:
        if start < end:
            yield Box((start,), (end - start,)) if shape else Box((), ())
        return
    row = prod(shape[1:])
    while start < end:
        at, column = divmod(start, row)
        rows = 0 if column else (end - start) // row
        if rows:
            yield Box((at, *(0,) * (len(shape) - 1)), (rows, *shape[1:]))
            start += rows * row
            continue
        stop = min(end, (at + 1) * row)
        for box in run_boxes(shape[1:], column, stop - at * row):
            yield Box((at, *box.offset), (1, *box.shape))
        start = stop


class BoxSequence(ABC):
    """Boxes of one tensor, of the shape `shape`."""

    shape: Shape

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
        return self._find(common) if len(self) and common.size() else np.empty(0, np.int64)

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
        sizes: Ints = self.shapes.prod(axis=1)
        return sizes

    @cached_property
    def starts(self) -> Ints:
        """The first element of each box in the tensor's memory."""
        starts: Ints = self.offsets @ np.array(_strides(self.shape), np.int64)
        return starts

    @cached_property
    def are_runs(self) -> bool:
        """Whether they are runs of the tensor's memory, in ascending order."""
        if not self.sizes.all() or (self.run_lengths()[1] > 1).any():
            return False
        return bool((self.starts[:-1] + self.sizes[:-1] <= self.starts[1:]).all())

    def ascending(self) -> tuple[Listed, Ints]:
        """These boxes in the order of their first elements, and the place there of each."""
        order = np.argsort(self.starts, kind="stable")
        return Listed(self.offsets[order], self.shapes[order], self.shape), np.argsort(order)

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
        return disjoint([self[i] for i in filled.tolist()])

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
        if high > _FEW and self.are_runs:
            first, last = span(box, self.shape)
            low = max(0, int(np.searchsorted(self.starts, first, "right")) - 1)
            high = int(np.searchsorted(self.starts, last, "right"))
        offsets, shapes = self.offsets[low:high], self.shapes[low:high]
        common = np.full(len(offsets), True)
        for dim, (first, extent) in enumerate(zip(*box, strict=True)):
            least = np.minimum(offsets[:, dim] + shapes[:, dim], first + extent)
            common &= least > np.maximum(offsets[:, dim], first)
        return low + np.flatnonzero(common)


def grid(shape: Sequence[int], limit: int) -> Listed:
    """Cut a tensor into boxes of at most `limit` elements, in C order, as layout.boxes() does."""
    n, dim = len(shape), 0
    while dim < n - 1 and prod(shape[dim + 1 :]) > limit:
        dim += 1
    if not n or not prod(shape):
        none = np.zeros((0 if n else 1, n), np.int64)
        return Listed(none, none, shape)
    step = max(1, limit // prod(shape[dim + 1 :]))
    counts = [*shape[:dim], -(-shape[dim] // step)]
    extents = np.array([*(1,) * dim, step, *shape[dim + 1 :]], np.int64)
    offsets = np.zeros((prod(counts), n), np.int64)
    offsets[:, : dim + 1] = np.indices(counts).reshape(dim + 1, -1).T * extents[: dim + 1]
    return Listed(offsets, np.minimum(offsets + extents, np.array(shape)) - offsets, shape)


def summed(counts: Sequence[int] | Ints) -> Ints:
    """The start of each of consecutive parts, and the end of the last."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])


class Overlaps(NamedTuple):
    """The part of one rank in a transfer. Both lists include what it already has, as a message to itself.

    Attributes:
        sends: (dest, box of the whole tensor) pairs; for each dest in the order in which it receives them.
        recvs: (source, box) pairs; together they cover its box, each element once.
        missing: number of elements of its box that no rank holds.
    """

    sends: list[tuple[int, Box]]
    recvs: list[tuple[int, Box]]
    missing: int


def overlaps(source: Sequence[Box], dest: Sequence[Box], rank: int) -> Overlaps:
    """Find what `rank` sends and receives when a tensor moves from the boxes `source` to the boxes `dest`.

    No rank receives an element twice, or one that it holds itself. Ranks that hold copies of a box share the sends.

    Example, on rank 0 of 2, from rows to columns of a 4 x 4 tensor::

        >>> rows, columns = [Box((0, 0), (2, 4)), Box((2, 0), (2, 4))], [Box((0, 0), (4, 2)), Box((0, 2), (4, 2))]
        >>> sends, recvs, _ = overlaps(rows, columns, 0)
        >>> sends[1], recvs[1]
        ((1, Box(offset=(0, 2), shape=(2, 2))), (1, Box(offset=(2, 0), shape=(2, 2))))
    """
    owners: dict[Box, list[int]] = {}
    for holder, box in enumerate(source):
        if box.size():
            owners.setdefault(box, []).append(holder)
    separate = disjoint(list(owners))

    def parts(peer: int, held: Iterable[Box]) -> Iterator[tuple[int, Box]]:
        """Iterate over (owner, what it sends to `peer`) for these boxes of owners, that of `peer` itself first."""
        rest = [dest[peer]]
        for box in sorted(held, key=lambda box: box != source[peer]):
            common = [part for part in (left.intersect(box) for left in rest) if part.size()]
            if common:
                owner = peer if box == source[peer] else owners[box][peer % len(owners[box])]
                yield from ((owner, part) for part in common)
                if not separate:
                    rest = [part for left in rest for part in left.without(box)]

    recvs = list(parts(rank, owners))
    relevant = [source[rank]] if separate else owners  # nothing then depends on the boxes of others
    sends = [(peer, box) for peer in range(len(dest)) for owner, box in parts(peer, relevant) if owner == rank]
    return Overlaps(sends, recvs, dest[rank].size() - sum(box.size() for _, box in recvs))


def disjoint(boxes: list[Box]) -> bool:
    """Return whether no two boxes overlap.

    Each box is compared with those that start before it ends, along the dim with the most distinct starts.
    """
    if len(boxes) < 2:
        return True
    distinct = [len({box.offset[dim] for box in boxes}) for dim in range(len(boxes[0].shape))]
    dim = distinct.index(max(distinct))
    ordered = sorted(boxes, key=lambda box: box.offset[dim])
    starts = [box.offset[dim] for box in ordered]
    for i, box in enumerate(ordered):
        near = ordered[i + 1 : bisect_left(starts, box.offset[dim] + box.shape[dim], i + 1)]
        if any(box.intersect(other).size() for other in near):
            return False
    return True
