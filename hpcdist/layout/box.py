"""Boxes, the rectangular parts of a tensor: intersect, cut, and locate them in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from hpcdist.layout.partition import pieces

__all__ = ["Box", "boxes", "run_boxes", "runs", "whole"]


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
    if box.size() == 0:
        return
    dim = 0
    while dim < len(box.shape) and prod(box.shape[dim + 1 :]) > limit:
        dim += 1
    if dim == len(box.shape):  # 0-d, or a limit below one element
        dim = max(0, dim - 1)
    if not box.shape:
        yield box
        return
    step = max(1, limit // prod(box.shape[dim + 1 :]))
    yield from _cut(box, dim, step)


def _cut(box: Box, dim: int, step: int) -> Iterator[Box]:
    """Cut at each index of the dims before `dim`, and every `step` indices along `dim`."""
    for lead in _indices(box.shape[:dim]):
        for start, length in pieces(box.shape[dim], step):
            at = (*lead, start, *(0,) * (len(box.shape) - dim - 1))
            yield Box(at, (*(1,) * dim, length, *box.shape[dim + 1 :])).shift(box.offset)


def _indices(shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Iterate over all indices of a tensor, in C order."""
    if not shape:
        yield ()
        return
    for first in range(shape[0]):
        for rest in _indices(shape[1:]):
            yield (first, *rest)


def runs(box: Box, shape: Sequence[int]) -> tuple[int, int, Iterator[int]]:
    """Locate a box in a contiguous tensor of `shape`: return (elements per run, number of runs, start of each run).

    Example::

        >>> length, count, starts = runs(Box((1, 2), (2, 3)), (4, 10))
        >>> length, count, list(starts)
        (3, 2, [12, 22])
    """
    dim = len(shape)
    while dim > 0 and box.shape[dim - 1] == shape[dim - 1]:
        dim -= 1
    dim = max(0, dim - 1)  # the innermost dim that is only partly covered belongs to the run
    strides = [prod(shape[d + 1 :]) for d in range(len(shape))]
    first = sum(o * s for o, s in zip(box.offset, strides, strict=True))
    lead = box.shape[:dim]
    starts = (first + sum(i * s for i, s in zip(at, strides, strict=False)) for at in _indices(lead))
    return prod(box.shape[dim:]), prod(lead), starts


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
