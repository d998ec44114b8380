"""The layouts: which box of a tensor each rank holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from operator import index
from typing import Protocol

from hpcdist.layout.box import Box, whole
from hpcdist.layout.partition import PARTITIONS, counts_of, displs

__all__ = ["Block", "Boxes", "Layout", "Replicate", "Split"]

Shape = tuple[int, ...]
Counts = str | tuple[int, ...] | None


class Layout(Protocol):
    """Which box of a tensor each rank holds. Layouts are values: equal if they are made of equal arguments."""

    def boxes(self, shape: Sequence[int], parts: int) -> list[Box]:
        """The box of each of `parts` ranks in a tensor of `shape`.

        Raises:
            ValueError: such a tensor cannot be laid out like this on so many ranks.
        """

    def held(self, shapes: Sequence[Shape]) -> tuple[Shape, list[Box]]:
        """The shape of the whole tensor and the box of each rank, from the shapes of their parts.

        Raises:
            ValueError: parts of these shapes are no tensor in this layout.
        """


@dataclass(frozen=True)
class Block:
    """A grid of ranks, of which each dimension cuts a dimension of the tensor.

    Args:
        grid: the number of ranks along each dimension of the grid; their product is the number of ranks.
        dims: for each dimension of the grid the dimension of the tensor that it cuts, which may be negative; None for
            one along which the ranks hold copies. One that is named twice is cut again: each part by itself.
        counts: how it is cut: the name of a rule ("block" or "chunk"), or for each dimension of the grid a rule,
            counts, or None for the block rule. None in place of all is the block rule too; as the source of a transfer
            it is what the ranks hold.
        order: "row" if the rank counts along the last dimension of the grid first (as in C), "column" if along the
            first (as in Fortran).

    Example: the tiles of a 4 x 6 tensor on 4 ranks::

        >>> [box.slices() for box in Block((2, 2), (0, 1)).boxes((4, 6), 4)]
        [(slice(0, 2), slice(0, 3)), (slice(0, 2), slice(3, 6)), (slice(2, 4), slice(0, 3)), (slice(2, 4), slice(3, 6))]
    """

    grid: tuple[int, ...]
    dims: tuple[int | None, ...]
    counts: str | tuple[Counts, ...] | None = None
    order: str = "row"

    def __post_init__(self) -> None:
        _set(self, "grid", tuple(index(n) for n in self.grid))
        _set(self, "dims", tuple(None if dim is None else index(dim) for dim in self.dims))
        if len(self.grid) != len(self.dims):
            raise ValueError(
                f"dims has {len(self.dims)} entries, expected one for each of the {len(self.grid)} of grid"
            )
        if min(self.grid, default=1) < 1:
            raise ValueError(f"grid is {self.grid}, expected ranks along each dimension")
        if self.order not in ("row", "column"):
            raise ValueError(f"order is {self.order!r}, expected 'row' or 'column'")
        if self.counts is not None and not isinstance(self.counts, str):
            _set(self, "counts", tuple(map(_counts, self.counts)))
            if len(self.counts) != len(self.grid):
                raise ValueError(f"counts has {len(self.counts)} entries, expected one for each of grid {self.grid}")
        else:
            _set(self, "counts", _counts(self.counts))

    def boxes(self, shape: Sequence[int], parts: int) -> list[Box]:
        self._check(parts)
        dims = self._dims(len(shape))
        return [self._box(at, dims, shape) for at in self._places()]

    def _box(self, at: Sequence[int], dims: Sequence[int | None], shape: Sequence[int]) -> Box:
        """The box of the rank at a place of the grid: cut dimension after dimension."""
        box = whole(shape)
        for n, dim, place, rule in zip(self.grid, dims, at, self._rules(), strict=True):
            if dim is not None:
                starts, counts = _cut(rule, box.shape[dim], n)
                start = box.offset[dim] + starts[place]
                box = box.narrow(dim, start, start + counts[place])
        return box

    def held(self, shapes: Sequence[Shape]) -> tuple[Shape, list[Box]]:
        self._check(len(shapes))
        dims, ndim = self._dims(len(shapes[0])), len(shapes[0])
        shape = list(shapes[0])
        offsets, usual = [[0] * ndim for _ in shapes], [list(shapes[0]) for _ in shapes]
        for dim in {dim for dim in dims if dim is not None}:
            # Along dim the parts lie one behind the other in the order of these places; those in one place are of one
            # extent, that of the first of them.
            places = [tuple(i for i, d in zip(at, dims, strict=True) if d == dim) for at in self._places()]
            extents = {place: held[dim] for place, held in reversed(list(zip(places, shapes, strict=True)))}
            ordered = sorted(extents)
            starts = dict(zip(ordered, displs([extents[place] for place in ordered]), strict=True))
            shape[dim] = sum(extents.values())
            for rank, place in enumerate(places):
                offsets[rank][dim], usual[rank][dim] = starts[place], extents[place]
        if self.counts is None:
            expected = [Box(tuple(at), tuple(of)) for at, of in zip(offsets, usual, strict=True)]
        else:
            expected = self.boxes(shape, len(shapes))
        _compare(shapes, expected)
        return tuple(shape), expected

    def _check(self, parts: int) -> None:
        if prod(self.grid) != parts:
            raise ValueError(f"the grid {self.grid} is one of {prod(self.grid)} ranks, and there are {parts}")

    def _dims(self, ndim: int) -> list[int | None]:
        for dim in self.dims:
            if dim is not None and not -ndim <= dim < ndim:
                raise ValueError(f"dim {dim} is to be cut, of a tensor that has {ndim} dims")
        return [None if dim is None else dim % ndim for dim in self.dims]

    def _rules(self) -> Sequence[Counts]:
        if self.counts is None or isinstance(self.counts, str):
            return [self.counts] * len(self.grid)
        return self.counts

    def _places(self) -> Iterator[tuple[int, ...]]:
        """The place in the grid of each rank."""
        for rank in range(prod(self.grid)):
            at = []
            for n in self.grid if self.order == "column" else reversed(self.grid):
                rank, place = divmod(rank, n)
                at.append(place)
            yield tuple(at) if self.order == "column" else tuple(reversed(at))


@dataclass(frozen=True)
class _Line:
    """A layout of any number of ranks in a line."""

    def grid(self, parts: int) -> Block:
        raise NotImplementedError

    def boxes(self, shape: Sequence[int], parts: int) -> list[Box]:
        return self.grid(parts).boxes(shape, parts)

    def held(self, shapes: Sequence[Shape]) -> tuple[Shape, list[Box]]:
        return self.grid(len(shapes)).held(shapes)


@dataclass(frozen=True)
class Split(_Line):
    """Consecutive rows along one dimension: rank 0 the first ones.

    Args:
        dim: the dimension that is cut; may be negative.
        counts: rows of each rank, or the name of a rule: "block" or "chunk". None is the block rule; as the source of
            a transfer it is what the ranks hold, whatever that is.

    Example, on 3 ranks::

        >>> [box.slices() for box in Split(0, counts=(1, 0, 4)).boxes((5, 2), 3)]
        [(slice(0, 1), slice(0, 2)), (slice(1, 1), slice(0, 2)), (slice(1, 5), slice(0, 2))]
    """

    dim: int
    counts: Counts = None

    def __post_init__(self) -> None:
        _set(self, "dim", index(self.dim))
        _set(self, "counts", _counts(self.counts))

    def grid(self, parts: int) -> Block:
        return Block((parts,), (self.dim,), None if self.counts is None else (self.counts,))


@dataclass(frozen=True)
class Replicate(_Line):
    """Every rank holds the whole tensor."""

    def grid(self, parts: int) -> Block:
        return Block((parts,), (None,))


@dataclass(frozen=True)
class Boxes:
    """One box for each rank, in any arrangement: they may leave gaps and overlap.

    Args:
        of: for each rank a :class:`Box`, or (offset, shape), each with an entry for each dimension of the tensor.

    Example: a small tensor of 4 numbers, of which rank 0 holds the middle and rank 1 all::

        >>> Boxes([((1,), (2,)), ((0,), (4,))])
        Boxes(of=(Box(offset=(1,), shape=(2,)), Box(offset=(0,), shape=(4,))))
    """

    of: tuple[Box, ...] = field()

    def __init__(self, of: Iterable[Box | tuple[Sequence[int], Sequence[int]]]) -> None:
        _set(self, "of", tuple(Box(tuple(map(index, offset)), tuple(map(index, shape))) for offset, shape in of))

    def boxes(self, shape: Sequence[int], parts: int) -> list[Box]:
        if len(self.of) != parts:
            raise ValueError(f"there are {len(self.of)} boxes, and {parts} ranks")
        for rank, box in enumerate(self.of):
            if not box.is_in(shape):
                raise ValueError(f"the box of rank {rank}, {_show(box)}, is not in a tensor of shape {tuple(shape)}")
        return list(self.of)

    def held(self, shapes: Sequence[Shape]) -> tuple[Shape, list[Box]]:
        if len({len(box.shape) for box in self.of} | {len(shapes[0])}) > 1:
            raise ValueError(f"the boxes are not all of {len(shapes[0])} dims, as the tensor is")
        ends = [[o + n for o, n in zip(box.offset, box.shape, strict=True)] for box in self.of]
        shape = tuple(map(max, zip(*ends, strict=True)))
        expected = self.boxes(shape, len(shapes))
        _compare(shapes, expected)
        return shape, expected


def _set(value: object, name: str, content: object) -> None:
    object.__setattr__(value, name, content)  # the way of a frozen dataclass


def _counts(counts: str | Iterable[int] | None) -> Counts:
    if counts is None or isinstance(counts, str):
        if counts is not None and counts not in PARTITIONS:
            raise ValueError(f"counts names no rule: expected one of {sorted(PARTITIONS)}, got {counts!r}")
        return counts
    return tuple(index(count) for count in counts)


@lru_cache(maxsize=256)
def _cut(rule: Counts, extent: int, parts: int) -> tuple[list[int], list[int]]:
    """Where each of the parts starts, and how long it is."""
    counts = counts_of(rule, extent, parts)
    return displs(counts), counts


def _compare(shapes: Sequence[Shape], expected: Sequence[Box]) -> None:
    for rank, (held, want) in enumerate(zip(shapes, expected, strict=True)):
        if tuple(held) != want.shape:
            raise ValueError(f"rank {rank} holds a part of shape {tuple(held)}, where the layout has {want.shape}")


def _show(box: Box) -> str:
    return f"{box.shape} from {box.offset} on"
