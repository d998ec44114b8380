"""What the property test draws: descriptions, small and alike on every rank, of which each rank makes the real thing.

A description has a short repr, by which the ranks compare what they have drawn. Only choices from short lists are
drawn: Hypothesis mixes constants that it finds in the sources into longer ranges, and a seed would be worth nothing.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from math import nan, prod
from typing import Any, NamedTuple

import numpy as np
import torch
from cases import DTYPES, STRIDES, strides_for, whole_of
from hypothesis import strategies as st
from hypothesis.internal.conjecture.providers import AVAILABLE_PROVIDERS, HypothesisProvider
from torch import Tensor

import hpcdist as hd
from hpcdist.tensors.storage import BARE

__all__ = [
    *("BACKEND", "Afresh"),
    *("Boxed", "Cut", "Drawn", "Frozen", "Leaf", "Outer", "Pair", "Redistribution", "Ring", "Structured", "Transfer"),
    *("cuts", "made", "memory", "redistributions", "rings", "rows", "structures", "transfers"),
]


class Afresh(HypothesisProvider):
    """Hypothesis's own way to draw, but each example afresh: with its own, five of six vary the one before a little."""


BACKEND = "afresh"
AVAILABLE_PROVIDERS[BACKEND] = Afresh

Draw = Callable[[Any], Any]
Slices = tuple[slice, ...]
Rule = str | tuple[int, ...] | None

_MOST = 5  # rows along any dim
_LONG = 3000  # but for a few: rows: enough that a tensor of them is not sent in one small message


_BIT = st.booleans()


@lru_cache(maxsize=None, typed=True)  # 0 is not False
def _among(*values: Any) -> Any:
    return st.sampled_from(values)


@cache
def _upto(most: int, least: int = 0) -> Any:
    return st.integers(least, most)


def _one_in(draw: Draw, number: int) -> bool:
    """True in one of so many, a power of 2. Bit by bit, or there were many ways to draw the same."""
    return all(draw(_BIT) for _ in range(number.bit_length() - 1))


def _counts(draw: Draw, extent: int, parts: int) -> tuple[int, ...]:
    """Any counts, zeros among them, that add up to `extent`."""
    ends = [0, *sorted(draw(_upto(extent)) for _ in range(parts - 1)), extent]
    return tuple(end - start for start, end in itertools.pairwise(ends))


def _ragged(draw: Draw, parts: int) -> tuple[tuple[int, ...], int]:
    """(extents, the most that the other extents may be): few of them are long."""
    extents = tuple(draw(_among(1, 0, 2, 3, 5)) for _ in range(parts))
    return (tuple(_LONG * extent for extent in extents), 1) if _one_in(draw, 16) else (extents, _MOST)


def _long(draw: Draw, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:1], _LONG) if _one_in(draw, 16) else shape


def _shape(draw: Draw, ndim: int, most: int = _MOST) -> tuple[int, ...]:
    return tuple(min(most, draw(_among(1, 2, 3, 4, _MOST, 2, 3, 0))) for _ in range(ndim))


def _route(draw: Draw, *routes: str) -> str:
    return "hdf5" if _one_in(draw, 16) else str(draw(_among(*routes)))


# --- tensors ---------------------------------------------------------------------------------------------------------


KEEPING = ("contiguous", "transposed", "stepped", "offset")  # those of STRIDES that leave the values as they are


@cache
def _strides(dtype: torch.dtype, scalar: bool) -> Any:
    """A 0-d tensor has no last dim."""
    return st.sampled_from([name for name in strides_for(dtype) if not (scalar and name in ("stepped", "expanded"))])


def memory(shape: Sequence[int], dtype: torch.dtype, name: str) -> tuple[Tensor, Tensor]:
    """(memory with something in it, a tensor of `shape` that is in it, in one of the ways of KEEPING)."""
    if name == "transposed":
        base = whole_of((*reversed(shape),), dtype, salt=5)
        return base, base.permute(*reversed(range(len(shape))))
    if name == "stepped":
        base = whole_of((*shape[:-1], 3 * shape[-1]), dtype, salt=5)
        return base, base[..., 1::3]
    base = whole_of((prod(shape) + 8,), dtype, salt=5)
    start = 5 if name == "offset" else 0
    return base, base[start : start + prod(shape)].view(tuple(shape))


def _outs(draw: Draw, size: int, ndim: int = 1) -> tuple[str | None, ...]:
    """For each rank how its `out` lies in memory, or None; mostly none at all."""
    if _one_in(draw, 2):
        names = KEEPING if ndim else ("contiguous", "offset")
        return tuple(draw(_among(None, *names)) for _ in range(size))
    return (None,) * size


@dataclass(frozen=True)
class Transfer:
    """gather, concat or split of a tensor; of 0-d shards if `shape` is empty.

    Attributes:
        shape: of the whole; the entry at `dim` is the sum of `extents`, what each rank has.
        counts: what split is told.
        strides: by rank, of the shards; of the whole for split, where the root's counts.
        told: the ranks other than the root are told the counts, too; the call is planned, and done twice.
        tiny: the limits from which something goes another way are a few bytes.
    """

    verb: str
    shape: tuple[int, ...]
    dim: int
    extents: tuple[int, ...]
    counts: Rule
    dtype: torch.dtype
    strides: tuple[str, ...]
    root: int | None
    outs: tuple[str | None, ...]
    route: str
    async_op: bool
    told: bool
    tiny: bool


@st.composite
def transfers(draw: Draw, size: int) -> Transfer:
    route, flags = _route(draw, "auto", "mpi", "gloo"), (_one_in(draw, 4), _one_in(draw, 2), _one_in(draw, 2))
    verb = draw(_among("gather", "concat", "split"))
    ndim = draw(_upto(4, 1 if verb == "split" else 0))
    (extents, most), counts = _ragged(draw, size), None
    if verb == "split":
        counts = draw(_among("counts", None, "block", "chunk"))
        if counts == "counts":
            counts = extents
        else:
            extents = tuple(len(part) for part in rows(counts, draw(_upto(2 * size + 1)), size))
    dim = draw(_upto(max(ndim, 1) - 1, -max(ndim, 1)))
    shape = list(_shape(draw, ndim, most))
    if shape:
        shape[dim] = sum(extents)
    dtype = draw(_among(*DTYPES))
    strides = tuple(draw(_strides(dtype, not ndim)) for _ in range(size))
    root = draw(_among(*range(size), *([None] if verb == "split" else [])))
    outs = _outs(draw, size)
    return Transfer(
        *(verb, tuple(shape), dim, extents if ndim else (1,) * size, counts, dtype, strides, root, outs, route),
        *flags,
    )


# --- layouts ---------------------------------------------------------------------------------------------------------


def rows(rule: Rule, extent: int, parts: int) -> list[np.ndarray]:
    """Which of `extent` rows each part has; said with numpy's and torch's own ways to cut."""
    index = np.arange(extent)
    if rule is None or rule == "block":
        return np.array_split(index, parts)
    if rule == "chunk":
        found = [part.numpy() for part in torch.from_numpy(index).chunk(parts)] if extent else []
        return found + [index[:0]] * (parts - len(found))
    return np.split(index, np.cumsum(rule)[:-1])


def _span(index: np.ndarray) -> slice:
    return slice(int(index[0]), int(index[-1]) + 1) if len(index) else slice(0, 0)


@dataclass(frozen=True)
class Cut:
    """Split, Replicate or Block; `held` has for a source that names no counts what it is: by dim, for each place."""

    kind: str
    grid: tuple[int, ...]
    dims: tuple[int | None, ...]
    rules: str | tuple[Rule, ...] | None
    held: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def layout(self) -> hd.layout.Layout:
        if self.kind == "Replicate":
            return hd.Replicate()
        if self.kind == "Split":
            (dim,) = self.dims
            assert dim is not None
            return hd.Split(dim, self.rules[0] if isinstance(self.rules, tuple) else self.rules)
        return hd.Block(self.grid, self.dims, self.rules)

    def slices(self, shape: tuple[int, ...]) -> list[Slices]:
        """The part of each rank."""
        rules = self.rules if isinstance(self.rules, tuple) else (self.rules,) * len(self.grid)
        held, found = dict(self.held), []
        for rank in range(prod(self.grid)):
            at = np.unravel_index(rank, self.grid) if self.grid else ()
            index = [np.arange(extent) for extent in shape]
            for axis, dim in enumerate(self.dims):
                if dim is not None and not held:
                    index[dim] = index[dim][rows(rules[axis], len(index[dim]), self.grid[axis])[at[axis]]]
            for dim, counts in held.items():
                axes = [axis for axis, d in enumerate(self.dims) if d is not None and d % len(shape) == dim]
                place = int(np.ravel_multi_index([at[axis] for axis in axes], [self.grid[axis] for axis in axes]))
                index[dim] = rows(counts, shape[dim], len(counts))[place]
            found.append(tuple(map(_span, index)))
        return found


@dataclass(frozen=True)
class Boxed:
    """Boxes."""

    of: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]

    def layout(self) -> hd.layout.Layout:
        return hd.Boxes(self.of)

    def slices(self, shape: tuple[int, ...]) -> list[Slices]:
        return [tuple(slice(o, o + n) for o, n in zip(*box, strict=True)) for box in self.of]

    def shape(self) -> tuple[int, ...]:
        """The smallest that all boxes are in."""
        ends = [[o + n for o, n in zip(*box, strict=True)] for box in self.of]
        return tuple(map(max, zip(*ends, strict=True)))


@cache
def _grids(size: int, factors: int = 3) -> tuple[tuple[int, ...], ...]:
    """The grids of 1 to 3 dimensions of so many ranks."""
    found = [(size,)]
    if factors > 1:
        found += [(n, *rest) for n in range(1, size + 1) if size % n == 0 for rest in _grids(size // n, factors - 1)]
    return tuple(dict.fromkeys(found))


@st.composite
def cuts(draw: Draw, shape: tuple[int, ...], size: int, source: bool) -> Cut:
    """A layout by rules or counts of a tensor of `shape`."""
    ndim = len(shape)
    kind = draw(_among("Split", "Block", "Block", "Replicate")) if ndim else draw(_among("Replicate", "Block"))
    if kind == "Replicate":
        return Cut(kind, (size,), (None,), None)
    every = _among(*range(ndim), *range(-ndim, 0)) if ndim else None
    if kind == "Split":
        grid, dims = (size,), (draw(every),)
    else:
        grid = draw(_among(*_grids(size)))
        dims = tuple(None if every is None or _one_in(draw, 4) else draw(every) for _ in grid)
    rules = draw(_among(None, "block", "chunk", "each", "each"))
    cut = [None if dim is None else dim % ndim for dim in dims]
    if rules == "each":
        # The parts of a dim that is cut again differ, and no counts fit all of them.
        rules = tuple(
            draw(_among(None, "block", "chunk"))
            if dim is None or dim in cut[:axis] or (kind == "Block" and _one_in(draw, 2))
            else _counts(draw, shape[dim], grid[axis])
            for axis, dim in enumerate(cut)
        )
    held = ()
    if source and rules is None:
        places = {dim: prod(n for n, d in zip(grid, cut, strict=True) if d == dim) for dim in cut if dim is not None}
        held = tuple((dim, _counts(draw, shape[dim], parts)) for dim, parts in places.items())
    return Cut(kind, grid, dims, rules, held)


def _boxed(draw: Draw, shape: tuple[int, ...], size: int) -> Boxed:
    """Anywhere; one of them may be all there is, or they are rows with those next to them."""
    way = draw(_among("anywhere", "one has all", "halos" if shape else "one has all"))
    found = []
    dim = draw(_upto(len(shape) - 1)) if way == "halos" else 0
    parts = rows(_counts(draw, shape[dim], size), shape[dim], size) if way == "halos" else []
    for rank in range(size):
        if way == "halos":
            first, end = (_span(parts[rank]).start, _span(parts[rank]).stop)
            first, end = max(0, first - 1), min(shape[dim], end + 1)
            offset = (*(0,) * dim, first, *(0,) * (len(shape) - dim - 1))
            found.append((offset, (*shape[:dim], end - first, *shape[dim + 1 :])))
        else:
            offset = tuple(draw(_upto(extent)) for extent in shape)
            found.append((offset, tuple(draw(_upto(n - o)) for o, n in zip(offset, shape, strict=True))))
    if way == "one has all":
        found[draw(_upto(size - 1))] = ((0,) * len(shape), shape)
    return Boxed(tuple(found))


@dataclass(frozen=True)
class Redistribution:
    """Of a tensor of `shape`; `planned` once and done twice, or done at once.

    Attributes:
        strides: of the whole.
        views: by rank, how its part lies in memory; "view" as it does in the whole.
        tiny: as for Transfer.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    src: Cut | Boxed
    dst: Cut | Boxed
    strides: str
    views: tuple[str, ...]
    outs: tuple[str | None, ...]
    route: str
    planned: bool
    async_op: bool
    tiny: bool


@st.composite
def redistributions(draw: Draw, size: int) -> Redistribution:
    route, flags = _route(draw, "auto", "mpi", "gloo"), (_one_in(draw, 2), _one_in(draw, 4), _one_in(draw, 2))
    shape = () if _one_in(draw, 8) else _shape(draw, draw(_upto(4, 1)))
    shape = _long(draw, shape) if shape else shape
    src: Cut | Boxed
    if _one_in(draw, 4):
        src = _boxed(draw, shape, size)
        shape = src.shape()
    else:
        src = draw(cuts(shape, size, source=True))
    dst = _boxed(draw, shape, size) if _one_in(draw, 4) else draw(cuts(shape, size, source=False))
    dtype = draw(_among(*DTYPES))
    strides = draw(_strides(dtype, not shape))
    ways = ("view", *KEEPING) if shape else ("view", "contiguous", "offset")
    views = tuple(draw(_among(*ways)) for _ in range(size))
    return Redistribution(
        *(shape, dtype, src, dst, strides, views, _outs(draw, size, len(shape)), route),
        *flags,
    )


# --- structures ------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass(frozen=True)
class Frozen:
    x: Any
    y: Any


class Outer:
    @dataclass
    class Inner:
        """A class in a class, that must not be made a second time by its __init__."""

        x: Any
        y: Any

        def __post_init__(self) -> None:
            self.x = (self.x,)


NUMPY = tuple(
    dtype
    for dtype in DTYPES
    if dtype not in (torch.bfloat16, torch.complex32, *BARE) and not str(dtype).startswith("torch.float8")
)


@dataclass(frozen=True)
class Leaf:
    """A tensor in a structure, or a numpy array."""

    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    way: str
    salt: int

    def make(self) -> Tensor | np.ndarray:
        x = whole_of(self.shape, self.dtype, self.salt)
        if self.kind == "tensor":
            return STRIDES[self.way](x)
        array = x.numpy()
        if self.way == "fortran":
            return array.copy(order="F")
        if self.way == "reversed":
            return array[::-1] if self.shape else array
        if self.way == "big-endian":
            return array.astype(array.dtype.newbyteorder(">"))
        if self.way == "read-only":
            array.flags.writeable = False
        return array


SINGLES = (
    *(None, True, False, 0, -7, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**200, -(2**64)),
    *(0.0, -0.0, 1.5, nan, float("inf"), 5e-324, 1 + 2j, complex(-0.0, nan), complex(float("-inf"), 0.1)),
    *("", "text", "日本 é \U0001f600", '"\\\n\0[', "\ud800", "long " * 100),
    *(b"", b"\0\xff", b"bytes" * 50, bytearray(b"array"), bytes(range(256)) * 300),
    *(np.float64(1.5), np.float32(nan), np.int8(-3), np.bool_(True), np.uint64(2**64 - 1), np.complex64(2j)),
    *(np.float16(0.1), np.float64(-0.0)),
)
KEYS = ("a", "", "é\n", 0, -7, 2**70, True, None, 2.5, ("a", 1), (None, (2.5, "x")), "[0]", ".a", 3j)
_ALL = ("tuple", "dict", "OrderedDict", "Pair", "Frozen", "Inner")


def made(tree: Any) -> Any:
    """The structure of a description: with tensors and arrays in place of leaves."""
    kind: Any = type(tree)
    if kind is Leaf:
        return tree.make()
    if kind in (list, tuple):
        return kind(map(made, tree))
    if kind in (dict, OrderedDict):
        return kind((key, made(value)) for key, value in tree.items())
    if kind is Drawn:
        return _CLASSES[tree.name](*map(made, tree.parts))
    return tree


@dataclass(frozen=True)
class Drawn:
    """The description of a named tuple or dataclass."""

    name: str
    parts: tuple[Any, ...]


_CLASSES: dict[str, Callable[..., Any]] = {"Pair": Pair, "Frozen": Frozen, "Inner": Outer.Inner}


def _container(kind: str, parts: Sequence[Any], keys: Sequence[Any]) -> Any:
    if kind == "list":
        return list(parts)
    if kind == "tuple":
        return tuple(parts)
    if kind in ("dict", "OrderedDict"):
        return (dict if kind == "dict" else OrderedDict)(zip(keys, parts, strict=True))
    return Drawn(kind, tuple(parts))


def _items(draw: Draw, kind: str) -> tuple[int, tuple[Any, ...]]:
    """(how many parts, and for a dict the keys)."""
    if kind in _CLASSES:
        return 2, ()
    number = draw(_among(2, 1, 3, 4, 0))
    if kind not in ("dict", "OrderedDict"):
        return number, ()
    first, step = draw(_upto(len(KEYS) - 1)), draw(_among(1, 3, 5))  # 14 keys: these steps meet none twice
    return number, tuple(KEYS[(first + step * i) % len(KEYS)] for i in range(number))


def _leaf(draw: Draw, shape: tuple[int, ...], kind: str, dtype: torch.dtype) -> Leaf:
    if kind == "tensor":
        way = draw(_strides(dtype, not shape))
    else:
        way = draw(_among("contiguous", "fortran", "reversed", "read-only", "big-endian"))
    return Leaf(kind, shape, dtype, way, draw(_upto(99)))


def _dtype(draw: Draw, kind: str) -> torch.dtype:
    dtype: torch.dtype = draw(_among(*(DTYPES if kind == "tensor" else NUMPY)))
    return dtype


def _tree(draw: Draw, depth: int, top: bool = False) -> Any:
    """Anything; at the top something with parts."""
    alone = () if top else ("single", "tensor", "numpy", "tensor", "numpy", "tensor")
    kind = draw(_among(*alone, *(("list", *_ALL) if depth else ())))
    if kind == "single":
        return draw(_among_singles())
    if kind in ("tensor", "numpy"):
        shape = _shape(draw, draw(_among(1, 0, 2, 3)))
        return _leaf(draw, _long(draw, shape), kind, _dtype(draw, kind))
    number, keys = _items(draw, kind)
    return _container(kind, [_tree(draw, depth - 1) for _ in range(number)], keys)


@cache
def _among_singles() -> Any:
    return st.sampled_from(SINGLES)


def _ndim(draw: Draw, dim: int, least: int = 0) -> int:
    """The number of dims of a tensor that has `dim`; a 0-d one counts as 1-d."""
    fits = [ndim for ndim in (1, 2, 3, 0, 4) if ndim >= least and -max(ndim, 1) <= dim < max(ndim, 1)]
    return int(draw(_among(*fits)))


def _alike(draw: Draw, size: int, dim: int, depth: int, top: bool = False) -> list[Any]:
    """A structure for each rank, so that they can be merged."""
    kind = draw(_among("list", "single", "numpy", *(_ALL if depth else ()), *(() if top else ("tensor", "tensor"))))
    if kind == "single":
        return [draw(_among_singles()) for _ in range(size)]
    if kind == "list":
        return [[_tree(draw, 1) for _ in range(draw(_upto(3)))] for _ in range(size)]
    if kind in ("tensor", "numpy"):
        extents, most = _ragged(draw, size)
        shape, dtype = list(_shape(draw, _ndim(draw, dim), most)), _dtype(draw, kind)
        leaves = []
        for extent in extents:
            if shape:
                shape[dim] = extent
            leaves.append(_leaf(draw, tuple(shape), kind, dtype))
        return leaves
    number, keys = _items(draw, kind)
    parts = [_alike(draw, size, dim, depth - 1) for _ in range(number)]
    found = []
    for rank in range(size):
        turn = draw(_upto(max(0, number - 1))) if keys else 0  # the order of a dict's keys may differ between ranks
        own = [part[rank] for part in parts]
        found.append(_container(kind, own[turn:] + own[:turn], keys[turn:] + keys[:turn]))
    return found


def _to_cut(draw: Draw, dim: int, extent: int | None, depth: int, top: bool = False) -> Any:
    """A structure that can be split; into counts with that sum, if an extent is given."""
    kind = draw(_among("list", "single", "numpy", *(_ALL if depth else ()), *(() if top else ("tensor", "tensor"))))
    if kind == "single":
        value = draw(_among_singles())
        return 7 if top and value is None else value  # None is no structure
    if kind in ("list", "tensor", "numpy"):
        length = draw(_upto(7)) if extent is None else extent
        if kind == "list":
            return [_tree(draw, 1) for _ in range(length)]
        is_long = extent is None and _one_in(draw, 16)
        shape = list(_shape(draw, _ndim(draw, dim, least=1), 1 if is_long else _MOST))
        shape[dim] = _LONG * length if is_long else length
        return _leaf(draw, tuple(shape), kind, _dtype(draw, kind))
    number, keys = _items(draw, kind)
    return _container(kind, [_to_cut(draw, dim, extent, depth - 1) for _ in range(number)], keys)


@dataclass(frozen=True)
class Structured:
    """gather, concat or split of a structure.

    Attributes:
        trees: by rank; for split one, the root's.
        tiny: as for Transfer.
    """

    verb: str
    trees: tuple[Any, ...]
    dim: int
    counts: Rule
    root: int
    route: str
    async_op: bool
    tiny: bool


@st.composite
def structures(draw: Draw, size: int) -> Structured:
    route, flags = _route(draw, "auto", "mpi", "gloo"), (_one_in(draw, 4), _one_in(draw, 2))
    verb = draw(_among("concat", "gather", "split"))
    dim, root = draw(_among(0, -1, 1, -2)), draw(_upto(size - 1))
    counts: Rule = None
    if verb == "split":
        counts = draw(_among(None, "counts", "block", "chunk"))
        if counts == "counts":
            counts = tuple(draw(_among(1, 0, 2)) for _ in range(size))
        trees = [_to_cut(draw, dim, sum(counts) if isinstance(counts, tuple) else None, 2, top=True)]
    else:
        trees = _alike(draw, size, dim, 2, top=True)
    return Structured(verb, tuple(trees), dim, counts, root, route, *flags)


@dataclass(frozen=True)
class Ring:
    """Messages that each rank sends `shift` ranks on.

    Attributes:
        trees: of each message, by rank.
        tags: of the messages.
        order: in which they are received.
        anyone, any_tag: the receiver names no source, no tag.
        later: they are received with irecv.
        tiny: as for Transfer.
    """

    trees: tuple[tuple[Any, ...], ...]
    tags: tuple[int, ...]
    order: tuple[int, ...]
    shift: int
    anyone: bool
    any_tag: bool
    later: bool
    tiny: bool


@st.composite
def rings(draw: Draw, size: int) -> Ring:
    number, tiny = 1 if _one_in(draw, 4) else 2, _one_in(draw, 2)
    tags = tuple(draw(_among(0, 1, 7)) for _ in range(number))
    apart = len(set(tags)) == number  # what has the same tag comes in the order in which it was sent
    order = (1, 0) if number == 2 and apart and draw(_BIT) else tuple(range(number))
    any_tag = order == tuple(range(number)) and (number == 1 or not apart) and _one_in(draw, 2)
    shift = draw(_upto(size - 1))
    anyone, later = _one_in(draw, 2), _one_in(draw, 2)
    trees = tuple(
        tuple(draw(_among_singles()) if _one_in(draw, 8) else _tree(draw, 2, top=True) for _ in range(size))
        for _ in range(number)
    )
    return Ring(trees, tags, order, shift, anyone, any_tag, later, tiny)
