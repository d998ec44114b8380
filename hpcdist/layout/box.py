"""Boxes: parts of a tensor, what they have in common, and how to cut them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from hpcdist.layout.partition import pieces

__all__ = ["Box", "boxes", "grid_boxes", "run_boxes", "runs", "whole"]


class Box(NamedTuple):
    """A part of a tensor: `shape` elements from `offset` on, in each dim. In 0-d both are empty: one element."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def size(self) -> int:
        return prod(self.shape)

    def slices(self, origin: Sequence[int] = ()) -> tuple[slice, ...]:
        """The index of the box in a tensor; in one that itself begins at `origin` of the whole, if that is given."""
        start = self.relative_to(origin).offset if origin else self.offset
        return tuple(slice(o, o + n) for o, n in zip(start, self.shape, strict=True))

    def is_in(self, shape: Sequence[int]) -> bool:
        """Whether it is a part of a tensor of that shape."""
        return len(self.offset) == len(self.shape) == len(shape) and all(
            o >= 0 and n >= 0 and o + n <= extent for o, n, extent in zip(self.offset, self.shape, shape, strict=True)
        )

    def intersect(self, other: Box) -> Box:
        """What two boxes have in common; of size 0 if nothing.

        Example::

            >>> Box((0, 2), (4, 4)).intersect(Box((3, 0), (4, 4)))
            Box(offset=(3, 2), shape=(1, 2))
        """
        low = tuple(map(max, self.offset, other.offset))
        ends = zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        high = [min(a + n, b + m) for a, n, b, m in ends]
        return Box(low, tuple(max(0, end - start) for start, end in zip(low, high, strict=True)))

    def without(self, other: Box) -> list[Box]:
        """What is left of it if `other` is taken out: boxes without overlap.

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
        """The same box, but from `start` to `end` along `dim`."""
        offset = (*self.offset[:dim], start, *self.offset[dim + 1 :])
        return Box(offset, (*self.shape[:dim], end - start, *self.shape[dim + 1 :]))

    def shift(self, by: Sequence[int]) -> Box:
        """The same box `by` further on: what it is in a whole, if it is a box of a part that begins there."""
        return Box(tuple(o + at for o, at in zip(self.offset, by, strict=True)), self.shape)

    def relative_to(self, origin: Sequence[int]) -> Box:
        """The same box in a tensor that begins at `origin` of the whole."""
        return Box(tuple(o - at for o, at in zip(self.offset, origin, strict=True)), self.shape)


def whole(shape: Sequence[int]) -> Box:
    """All of a tensor."""
    return Box((0,) * len(shape), tuple(shape))


def boxes(box: Box, limit: int) -> Iterator[Box]:
    """Cut a box into boxes of at most `limit` elements (one at least), in C order: each has as many rows as fit, and
    where not even one does, a part of a row. Cut from a whole tensor, each is one run of its memory.

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
    """One index at a time in the dims before `dim`, and `step` of them in `dim`."""
    for lead in _indices(box.shape[:dim]):
        for start, length in pieces(box.shape[dim], step):
            at = (*lead, start, *(0,) * (len(box.shape) - dim - 1))
            yield Box(at, (*(1,) * dim, length, *box.shape[dim + 1 :])).shift(box.offset)


def _indices(shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All indices of a tensor, in C order."""
    if not shape:
        yield ()
        return
    for first in range(shape[0]):
        for rest in _indices(shape[1:]):
            yield (first, *rest)


def runs(box: Box, shape: Sequence[int]) -> tuple[int, int, Iterator[int]]:
    """Where a box of a contiguous tensor of `shape` lies: (elements of a run, number of runs, where each starts).

    Example::

        >>> length, count, starts = runs(Box((1, 2), (2, 3)), (4, 10))
        >>> length, count, list(starts)
        (3, 2, [12, 22])
    """
    dim = len(shape)
    while dim > 0 and box.shape[dim - 1] == shape[dim - 1]:
        dim -= 1
    dim = max(0, dim - 1)  # the last dim of which not all is there belongs to the run
    strides = [prod(shape[d + 1 :]) for d in range(len(shape))]
    first = sum(o * s for o, s in zip(box.offset, strides, strict=True))
    lead = box.shape[:dim]
    starts = (first + sum(i * s for i, s in zip(at, strides, strict=False)) for at in _indices(lead))
    return prod(box.shape[dim:]), prod(lead), starts


def run_boxes(shape: Sequence[int], start: int, end: int) -> Iterator[Box]:
    """The elements `start` to `end` of a tensor, counted in C order, as boxes in that order, each of them one run.

    Example::

        >>> [b.slices() for b in run_boxes((3, 4), 2, 9)]     # the end of a row, a row, the beginning of one
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


def grid_boxes(shape: Sequence[int], cell: Sequence[int], limit: int) -> Iterator[Box]:
    """Cut a whole tensor into boxes of whole cells of a grid, each of at most `limit` elements (one cell at least)."""
    grid = [-(-extent // size) for extent, size in zip(shape, cell, strict=True)]
    for part in boxes(whole(grid), max(1, limit // prod(cell))):
        offset = tuple(o * c for o, c in zip(part.offset, cell, strict=True))
        ends = zip(part.offset, part.shape, cell, shape, strict=True)
        yield Box(offset, tuple(min((o + n) * c, s) - o * c for o, n, c, s in ends))
