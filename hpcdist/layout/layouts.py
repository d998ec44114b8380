"""Layouts: which rows, and which box of a tensor, each rank holds."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate, pairwise, product
from math import prod
from operator import index
from typing import Protocol

from hpcdist.errors import refusal
from hpcdist.layout.box import Box, Shape, whole

_wrong = partial(refusal, ValueError, "HD213")

Counts = str | tuple[int, ...] | None


def block(extent: int, parts: int) -> list[int]:
    """Partition `extent` rows evenly: the first ``extent % parts`` ranks hold one extra row.

    Example::

        >>> block(10, 4)
        [3, 3, 2, 2]
    """
    quotient, rest = divmod(extent, parts)
    return [quotient + (rank < rest) for rank in range(parts)]


def chunk(extent: int, parts: int) -> list[int]:
    """Partition `extent` rows by the ceiling rule of ``torch.chunk`` and DTensor: the last ranks may hold none.

    Example::

        >>> chunk(10, 4)
        [3, 3, 3, 1]
    """
    size = -(-extent // parts)
    return [max(0, min(size, extent - rank * size)) for rank in range(parts)]


def balance(weights: Sequence[float], parts: int) -> list[int]:
    """Partition rows of unequal weight into consecutive parts of similar weight; return their counts, in order.

    Each cut is at the row start nearest to the ideal cut, off by at most half the largest weight. Therefore no part
    weighs more than the ideal part plus the largest weight, or than the heaviest part of the best partition plus the
    largest weight.

    Args:
        weights: the weight of each row, a number >= 0, such as the length of a sequence.
        parts: the number of ranks.

    Raises:
        ValueError: if a weight is negative or not a number, or `parts` is not positive.

    Example::

        >>> balance([8, 1, 1, 1, 1, 4], 2)
        [1, 5]
    """
    # NumPy integers would overflow.
    weights = [weight.item() if hasattr(weight, "item") else weight for weight in weights]
    if parts < 1:
        raise _wrong(f"parts is {parts}, expected at least 1")
    if not all(0 <= weight < float("inf") for weight in weights):
        raise _wrong("weights must be numbers >= 0")
    starts = list(accumulate(weights, initial=0))  # the start of each row, and the end of the last
    total, cuts = starts[-1], [0]
    if total == 0:
        return block(len(weights), parts)
    for part in range(1, parts):
        # Scaled by `parts`, to compare integers exactly.
        at = bisect_left(starts, part * total, key=lambda start: start * parts)
        if at > 0 and part * total - starts[at - 1] * parts < starts[at] * parts - part * total:
            at -= 1
        cuts.append(at)
    return [end - start for start, end in pairwise([*cuts, len(weights)])]


PARTITIONS = {"block": block, "chunk": chunk}


def _checked(counts: str | Iterable[int] | None) -> Counts:
    if isinstance(counts, str) and counts not in PARTITIONS:
        raise _wrong(f"counts is not a known rule: expected one of {sorted(PARTITIONS)}, got {counts!r}")
    return counts if counts is None or isinstance(counts, str) else tuple(map(index, counts))


def counts_of(counts: str | Sequence[int] | None, extent: int, parts: int) -> list[int]:
    """Turn a rule's name, explicit counts, or None (the block rule) into `parts` counts that add up to `extent`.

    Raises:
        ValueError: if the name is unknown, or the counts are not `parts` integers >= 0 that add up to `extent`.
    """
    counts = _checked(counts)
    if counts is None or isinstance(counts, str):
        return PARTITIONS[counts or "block"](extent, parts)
    values = list(counts)
    if len(values) != parts:
        raise _wrong(f"counts has {len(values)} entries, expected one for each of {parts} ranks")
    if min(values) < 0:
        raise _wrong(f"counts has a negative entry: {values}")
    if sum(values) != extent:
        raise _wrong(f"counts add up to {sum(values)}, expected {extent}, the extent along dim")
    return values


def displs(counts: Sequence[int]) -> list[int]:
    """Return the start of each rank's part in the whole.

    Example::

        >>> displs([3, 0, 2])
        [0, 3, 3]
    """
    return list(accumulate(counts, initial=0))[:-1]


def pieces(extent: int, limit: int) -> list[tuple[int, int]]:
    """Cut `extent` into (start, length) pieces of at most `limit`; an extent of 0 has no pieces.

    Example::

        >>> pieces(5, 2)
        [(0, 2), (2, 2), (4, 1)]
    """
    return [(start, min(limit, extent - start)) for start in range(0, extent, limit)]


def block_range(extent: int, parts: int, rank: int) -> range:
    """Return the range of a rank in `extent` items that `parts` ranks share by the block rule.

    Example::

        >>> block_range(5, 3, 1)
        range(2, 4)
    """
    quotient, rest = divmod(extent, parts)
    start = rank * quotient + min(rank, rest)
    return range(start, start + quotient + (rank < rest))


class Layout(Protocol):
    """The box of a tensor that each rank holds. Layouts are values: equal if their arguments are equal."""

    def boxes(self, shape: Sequence[int], parts: int) -> list[Box]:
        """Return the box of each of `parts` ranks in a tensor of `shape`.

        Raises:
            ValueError: if such a tensor cannot have this layout on that many ranks.
        """

    def held(self, shapes: Sequence[Shape]) -> tuple[Shape, list[Box]]:
        """Infer the shape of the whole tensor and the box of each rank from the shapes of all parts.

        Raises:
            ValueError: if parts of these shapes do not form a tensor in this layout.
        """


@dataclass(frozen=True)
class Block:
    """A grid of ranks; each dimension of the grid cuts one dimension of the tensor.

    Args:
        grid: the number of ranks along each dimension of the grid; their product is the number of ranks, which are
            numbered along the last dimension first.
        dims: for each dimension of the grid, the dimension of the tensor that it cuts (may be negative), or None if
            the ranks along it hold copies. If a dimension is named twice, each part is cut again.
        counts: how to cut: the name of a rule ("block" or "chunk"), or one entry for each dimension of the grid: a
            rule, counts, or None for the block rule. A single None also means the block rule; for the source of a
            transfer, it means what the ranks hold.

    Example: the tiles of a 4 x 6 tensor on 4 ranks::

        >>> [(box.offset, box.shape) for box in Block((2, 2), (0, 1)).boxes((4, 6), 4)]
        [((0, 0), (2, 3)), ((0, 3), (2, 3)), ((2, 0), (2, 3)), ((2, 3), (2, 3))]
    """

    grid: tuple[int, ...]
    dims: tuple[int | None, ...]
    counts: str | tuple[Counts, ...] | None = None

    def __post_init__(self) -> None:
        _set(self, "grid", tuple(index(n) for n in self.grid))
        _set(self, "dims", tuple(None if dim is None else index(dim) for dim in self.dims))
        if len(self.grid) != len(self.dims):
            raise _wrong(f"dims has {len(self.dims)} entries, expected one for each of the {len(self.grid)} of grid")
        if min(self.grid, default=1) < 1:
            raise _wrong(f"grid is {self.grid}, expected at least one rank along each dimension")
        if self.counts is None or isinstance(self.counts, str):
            _checked(self.counts)
            return
        _set(self, "counts", tuple(map(_checked, self.counts)))
        if len(self.counts) != len(self.grid):
            raise _wrong(f"counts has {len(self.counts)} entries, expected one for each of grid {self.grid}")

    def boxes(self, shape: Sequence[int], parts: int) -> list[Box]:
        self._check(parts)
        dims = self._dims(len(shape))
        return [self._box(coords, dims, shape) for coords in self._coords()]

    def _box(self, coords: Sequence[int], dims: Sequence[int | None], shape: Sequence[int]) -> Box:
        """Return the box of the rank at these grid coordinates, cut one dimension after the other."""
        box = whole(shape)
        for n, dim, i, rule in zip(self.grid, dims, coords, self._rules(), strict=True):
            if dim is not None:
                starts, counts = _cut(rule, box.shape[dim], n)
                start = box.offset[dim] + starts[i]
                box = box.narrow(dim, start, start + counts[i])
        return box

    def held(self, shapes: Sequence[Shape]) -> tuple[Shape, list[Box]]:
        self._check(len(shapes))
        dims, ndim = self._dims(len(shapes[0])), len(shapes[0])
        shape = list(shapes[0])
        offsets, part_shapes = [[0] * ndim for _ in shapes], [list(shapes[0]) for _ in shapes]
        for dim in {dim for dim in dims if dim is not None}:
            # Along dim the parts follow each other in the order of their coordinates in the grid dimensions that cut
            # it. Parts with the same coordinates must have the extent of the first of them.
            keys = [tuple(i for i, d in zip(coords, dims, strict=True) if d == dim) for coords in self._coords()]
            extents = {key: held[dim] for key, held in reversed(list(zip(keys, shapes, strict=True)))}
            ordered = sorted(extents)
            starts = dict(zip(ordered, displs([extents[key] for key in ordered]), strict=True))
            shape[dim] = sum(extents.values())
            for rank, key in enumerate(keys):
                offsets[rank][dim], part_shapes[rank][dim] = starts[key], extents[key]
        if self.counts is None:
            expected = [Box(tuple(at), tuple(of)) for at, of in zip(offsets, part_shapes, strict=True)]
        else:
            expected = self.boxes(shape, len(shapes))
        _compare(shapes, expected)
        return tuple(shape), expected

    def _check(self, parts: int) -> None:
        if prod(self.grid) != parts:
            raise _wrong(f"the grid {self.grid} has {prod(self.grid)} ranks, but there are {parts}")

    def _dims(self, ndim: int) -> list[int | None]:
        for dim in self.dims:
            if dim is not None and not -ndim <= dim < ndim:
                raise _wrong(f"dim {dim} cannot be cut: the tensor has {ndim} dims")
        return [None if dim is None else dim % ndim for dim in self.dims]

    def _rules(self) -> Sequence[Counts]:
        if self.counts is None or isinstance(self.counts, str):
            return [self.counts] * len(self.grid)
        return self.counts

    def _coords(self) -> Iterator[tuple[int, ...]]:
        """Iterate over the grid coordinates of all ranks, which are numbered along the last dimension first."""
        return product(*map(range, self.grid))


@dataclass(frozen=True)
class _Line:
    """A layout on a one-dimensional grid of any number of ranks."""

    def grid(self, parts: int) -> Block:
        raise NotImplementedError

    def boxes(self, shape: Sequence[int], parts: int) -> list[Box]:
        return self.grid(parts).boxes(shape, parts)

    def held(self, shapes: Sequence[Shape]) -> tuple[Shape, list[Box]]:
        return self.grid(len(shapes)).held(shapes)


@dataclass(frozen=True)
class Split(_Line):
    """Consecutive rows along one dimension, in rank order.

    Args:
        dim: the dimension to cut; may be negative.
        counts: rows of each rank, or the name of a rule: "block" or "chunk". None means the block rule; for the source
            of a transfer, it means whatever the ranks hold.

    Example, on 3 ranks::

        >>> [(box.offset, box.shape) for box in Split(0, counts=(1, 0, 4)).boxes((5, 2), 3)]
        [((0, 0), (1, 2)), ((1, 0), (0, 2)), ((1, 0), (4, 2))]
    """

    dim: int
    counts: Counts = None

    def __post_init__(self) -> None:
        _set(self, "dim", index(self.dim))
        _set(self, "counts", _checked(self.counts))

    def grid(self, parts: int) -> Block:
        return Block((parts,), (self.dim,), None if self.counts is None else (self.counts,))


@dataclass(frozen=True)
class Replicate(_Line):
    """Every rank holds the whole tensor."""

    def grid(self, parts: int) -> Block:
        return Block((parts,), (None,))


@dataclass(frozen=True)
class Boxes:
    """One box for each rank, in any arrangement: the boxes may overlap and leave gaps.

    Args:
        of: for each rank a :class:`Box`, or (offset, shape), with an entry for each dimension of the tensor.

    Example: a tensor of 4 numbers; rank 0 holds the two in the middle, rank 1 all::

        >>> Boxes([((1,), (2,)), ((0,), (4,))])
        Boxes(of=(Box(offset=(1,), shape=(2,)), Box(offset=(0,), shape=(4,))))
    """

    of: tuple[Box, ...]

    def __init__(self, of: Iterable[Box | tuple[Sequence[int], Sequence[int]]]) -> None:
        _set(self, "of", tuple(Box(tuple(map(index, offset)), tuple(map(index, shape))) for offset, shape in of))

    def boxes(self, shape: Sequence[int], parts: int) -> list[Box]:
        if len(self.of) != parts:
            raise _wrong(f"there are {len(self.of)} boxes, but {parts} ranks")
        for rank, box in enumerate(self.of):
            if not box.is_in(shape):
                at = f"{box.shape} at offset {box.offset}"
                raise _wrong(f"the box of rank {rank}, {at}, is not within a tensor of shape {tuple(shape)}")
        return list(self.of)

    def held(self, shapes: Sequence[Shape]) -> tuple[Shape, list[Box]]:
        if len({len(box.shape) for box in self.of} | {len(shapes[0])}) > 1:
            raise _wrong(f"the boxes do not all have {len(shapes[0])} dims, as the tensor does")
        ends = [[o + n for o, n in zip(box.offset, box.shape, strict=True)] for box in self.of]
        shape = tuple(map(max, zip(*ends, strict=True)))
        expected = self.boxes(shape, len(shapes))
        _compare(shapes, expected)
        return shape, expected


def _set(value: object, name: str, content: object) -> None:
    object.__setattr__(value, name, content)  # frozen dataclasses do so


@lru_cache(maxsize=256)
def _cut(rule: Counts, extent: int, parts: int) -> tuple[list[int], list[int]]:
    """Return the starts and the lengths of the parts."""
    counts = counts_of(rule, extent, parts)
    return displs(counts), counts


def _compare(shapes: Sequence[Shape], expected: Sequence[Box]) -> None:
    for rank, (held, want) in enumerate(zip(shapes, expected, strict=True)):
        if tuple(held) != want.shape:
            raise _wrong(f"rank {rank} holds a part of shape {tuple(held)}, expected {want.shape} in this layout")
