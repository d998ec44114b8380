"""What the property test draws: descriptions, alike on every rank, of which each rank makes the real thing."""

import itertools
import random
from collections import OrderedDict
from dataclasses import dataclass
from math import prod
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from cases import DTYPES, SINGLES, STRIDES, mapped, rows, strides_for, whole_of

import hpcdist as hd
from hpcdist.tensors.storage import BARE


class Draw(random.Random):
    """Of one example: called with values, it chooses one of them."""

    def __call__(self, *values):
        return self.choice(values)


_LONG = 3000  # rows: enough that a tensor of them is not sent in one small message


# --- the primitives: choices, shapes, partitions, memory -------------------------------------------------------------


def _one_in(draw, number):
    """True in one of so many."""
    return draw.randrange(number) == 0


def _shape(draw, ndim):
    """A few rows along each dim, or few elements beside one that is long."""
    is_long = ndim > 0 and _one_in(draw, 16)
    shape = [min(1 if is_long else 5, draw(1, 2, 3, 4, 5, 2, 3, 0)) for _ in range(ndim)]
    if is_long:
        shape[draw.randint(0, ndim - 1)] = _LONG
    return shape


def _extents(draw, shape, dim, parts):
    """The rows of each part along `dim`: long ones if the shape is long there."""
    scale = _LONG if shape and shape[dim] == _LONG else 1
    return tuple(scale * draw(1, 0, 2, 3, 5) for _ in range(parts))


def _counts(draw, extent, parts):
    """Any counts, zeros among them, that add up to `extent`."""
    ends = [0, *sorted(draw.randint(0, extent) for _ in range(parts - 1)), extent]
    return tuple(end - start for start, end in itertools.pairwise(ends))


def _strides(dtype, scalar, keeping=False):
    """Names in STRIDES, of all or of those that leave the values as they are. A 0-d tensor has no last dim."""
    names = [name for name in strides_for(dtype) if not (scalar and name in ("stepped", "expanded"))]
    return [None, *(names[: names.index("offset") + 1])] if keeping else names


def _outs(draw, size, dtype, scalar=False):
    """For each rank how its `out` lies in memory, or None; mostly none at all."""
    given = _one_in(draw, 2)
    return tuple(draw(*_strides(dtype, scalar, True)) if given else None for _ in range(size))


def _way(draw):
    """How a call is made. Planned ones are done twice; tiny: few bytes are enough to go another way."""
    route = "hdf5" if _one_in(draw, 16) else draw("auto", "mpi", "gloo")
    return {"route": route, "async_op": _one_in(draw, 4), "planned": _one_in(draw, 2), "tiny": _one_in(draw, 2)}


# --- tensors and layouts ---------------------------------------------------------------------------------------------


def transfers(draw, size):
    """gather, concat or split of a tensor of `shape`, whose entry at `dim` is the sum of `extents`; of 0-d shards if it
    is empty. `strides` are by rank those of the shards, of the whole for split; `counts` is what split is told."""
    verb = draw("gather", "concat", "split")
    ndim = draw.randint(int(verb == "split"), 4)
    shape, dim = _shape(draw, ndim), draw.randint(-max(ndim, 1), max(ndim, 1) - 1)
    extents = _extents(draw, shape, dim, size) if ndim else (1,) * size
    counts = draw("counts", None, "block", "chunk")
    if verb == "split" and counts != "counts":
        extents = tuple(len(part) for part in rows(counts, sum(extents), size))
    if ndim:
        shape[dim] = sum(extents)
    case = SimpleNamespace(verb=verb, shape=tuple(shape), dim=dim, extents=extents, **_way(draw))
    case.counts = extents if counts == "counts" else counts
    case.dtype, case.root = draw(*DTYPES), draw(*range(size), *([None] if verb == "split" else []))
    case.strides = [draw(*_strides(case.dtype, not ndim)) for _ in range(size)]
    case.outs = _outs(draw, size, case.dtype)
    return case


def _cut(shape, grid, dims, rules):
    """The part of each rank: cut along one dimension of the grid after the other."""
    found = []
    for at in np.ndindex(*grid):
        index = [np.arange(extent) for extent in shape]
        for place, parts, dim, rule in zip(at, grid, dims, rules, strict=True):
            if dim is not None:
                index[dim] = index[dim][rows(rule, len(index[dim]), parts)[place]]
        found.append(tuple(slice(int(i[0]), int(i[-1]) + 1) if len(i) else slice(0, 0) for i in index))
    return found


def layouts(draw, shape, size, source):
    """(a layout of a tensor of `shape`, the part of each rank). As a source, it need not name its counts."""
    ndim, kind = len(shape), draw("Split", "Block", "Block", "Replicate", "Boxes", "Boxes")
    if kind == "Boxes":
        boxes = [[(at := draw.randint(0, n), draw.randint(0, n - at)) for n in shape] for _ in range(size)]
        if _one_in(draw, 2):
            boxes[draw.randint(0, size - 1)] = [(0, n) for n in shape]
        parts = [tuple(slice(at, at + n) for at, n in box) for box in boxes]
        return hd.Boxes([tuple(zip(*box, strict=True)) or ((), ()) for box in boxes]), parts
    if kind == "Replicate":
        return hd.Replicate(), _cut(shape, (size,), (None,), (None,))
    grids = (grid for n in (1, 2, 3) for grid in itertools.product(range(1, size + 1), repeat=n) if prod(grid) == size)
    grid = draw(*grids) if kind == "Block" or not ndim else (size,)
    blank = [not ndim or (kind == "Block" and _one_in(draw, 4)) for _ in grid]
    dims = tuple(None if none else draw.randint(-ndim, ndim - 1) for none in blank)
    cut = [None if dim is None else dim % ndim for dim in dims]
    told = draw(None, "block", "chunk", "each", "each")
    rules = (told,) * len(grid)
    if told == "each" or (told is None and source and len(set(cut)) == len(cut)):
        # The parts of a dim that is cut again differ, and no counts fit all of them.
        rules = tuple(
            draw(None, "block", "chunk")
            if dim is None or dim in cut[:axis] or (told == "each" and _one_in(draw, 2))
            else _counts(draw, shape[dim], grid[axis])
            for axis, dim in enumerate(cut)
        )
        told = rules if told == "each" else None
    parts = _cut(shape, grid, cut, rules)
    if kind == "Split" and ndim:
        return hd.Split(dims[0], told[0] if isinstance(told, tuple) else told), parts
    return hd.Block(grid, dims, told), parts


def redistributions(draw, size):
    """Of a tensor of `shape` and `strides`; `views` by rank, how its part lies in memory, if not as in the whole."""
    source, src = layouts(draw, _shape(draw, draw(0, 1, 2, 3, 4, 1, 2, 3)), size, source=True)
    shape = tuple(max(part[dim].stop for part in src) for dim in range(len(src[0])))
    dest, dst = layouts(draw, shape, size, source=False)
    case = SimpleNamespace(shape=shape, source=source, src=src, dest=dest, dst=dst, **_way(draw))
    case.dtype = draw(*DTYPES)
    case.strides = draw(*_strides(case.dtype, not shape))
    case.views = [draw(*_strides(case.dtype, not shape, True)) for _ in range(size)]
    case.outs = _outs(draw, size, case.dtype, not shape)
    return case


# --- structures ------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    x: Any
    y: Any


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

        def __post_init__(self):
            self.x = (self.x,)


class Leaf(SimpleNamespace):
    """A tensor in a structure, or a numpy array."""


KEYS = ("a", "", "é\n", 0, -7, 2**70, True, None, 2.5, ("a", 1), (None, (2.5, "x")), "[0]", ".a", 3j)
_NO_ARRAY = (torch.bfloat16, torch.complex32, *BARE)
_NUMPY = tuple(d for d in DTYPES if d not in _NO_ARRAY and not str(d).startswith("torch.float8"))
_ARRAYS = {
    "array": lambda x: x,
    "fortran": lambda x: x.copy(order="F"),
    "reversed": lambda x: x[::-1] if x.ndim else x,
    "read-only": lambda x: np.broadcast_to(x, x.shape),
    "big-endian": lambda x: x.astype(x.dtype.newbyteorder(">")),
}


def _make(value):
    if not isinstance(value, Leaf):
        return value
    x = whole_of((*value.shape,), value.dtype, value.salt)
    return STRIDES[value.way](x) if value.way in STRIDES else _ARRAYS[value.way](x.numpy())


def made(tree):
    """The structure of a description: with tensors and arrays in place of leaves."""
    return mapped(_make, tree)


def _alike(draw, size, dim, depth, top=False, cut=None):
    """A structure for each rank, so that they can be joined; `cut`, if one is to be cut, is its extent, if given."""
    kinds = ("list",) * (depth >= 0) + ("tuple", dict, OrderedDict, Pair, Frozen, Outer.Inner) * (depth > 0)
    kind = draw("single", "numpy", *(("tensor", "tensor") * (not top)), *kinds)
    if kind == "single":
        return [draw(*SINGLES) for _ in range(size)]
    if kind in ("tensor", "numpy"):
        fits = [n for n in (1, 2, 3, 0, 4) if n >= (cut is not None) and -max(n, 1) <= dim < max(n, 1)]
        shape, dtype = _shape(draw, draw(*fits)), draw(*(DTYPES if kind == "tensor" else _NUMPY))
        ways = _strides(dtype, not shape) if kind == "tensor" else tuple(_ARRAYS)
        wholes = [list(shape) for _ in range(size)]
        for whole, extent in zip(wholes, cut or _extents(draw, shape, dim, size), strict=True):
            if shape:
                whole[dim] = extent
        return [Leaf(shape=x, dtype=dtype, way=draw(*ways), salt=draw.randint(0, 99)) for x in wholes]
    if kind == "list":
        return [[_tree(draw, depth - 1) for _ in range(n)] for n in cut or _extents(draw, [], 0, size)]
    number = draw(2, 1, 3, 4, 0) if kind in ("tuple", dict, OrderedDict) else 2
    parts = [_alike(draw, size, dim, depth - 1, cut=cut) for _ in range(number)]
    owns = [[part[rank] for part in parts] for rank in range(size)]
    if kind not in (dict, OrderedDict):
        return [tuple(own) if kind == "tuple" else kind(*own) for own in owns]
    first, step = draw.randint(0, len(KEYS) - 1), draw(1, 3, 5)  # 14 keys: these steps meet none twice
    items = [[(KEYS[(first + step * i) % len(KEYS)], part) for i, part in enumerate(own)] for own in owns]
    turns = [draw.randint(0, max(0, number - 1)) for _ in items]  # the order of a dict's keys may differ between ranks
    return [kind(item[turn:] + item[:turn]) for item, turn in zip(items, turns, strict=True)]


def _tree(draw, depth, top=False):
    """Anything."""
    return _alike(draw, 1, draw(0, -1, 1), depth, top)[0]


def structures(draw, size):
    """gather, concat or split of a structure; `trees` by rank, for split one, the root's."""
    verb, dim, counts = draw("concat", "gather", "split"), draw(0, -1, 1, -2), None
    if verb == "split":
        counts = draw(None, "counts", "block", "chunk")
        if counts == "counts":
            counts = tuple(draw(1, 0, 2) for _ in range(size))
        trees = _alike(draw, 1, dim, 2, True, (sum(counts),) if isinstance(counts, tuple) else ())
        trees = [7] if trees == [None] else trees  # None is no structure
    else:
        trees = _alike(draw, size, dim, 2, True)
    return SimpleNamespace(verb=verb, trees=trees, dim=dim, counts=counts, root=draw.randint(0, size - 1), **_way(draw))


def rings(draw, size):
    """Messages that each rank sends `shift` ranks on: of each, a tree by rank and a tag. They are received in `order`,
    by a receiver that may name no source (anyone) or no tag."""
    number = 1 if _one_in(draw, 4) else 2
    tags = tuple(draw(0, 1, 7) for _ in range(number))
    apart = len(set(tags)) == number  # what has the same tag comes in the order in which it was sent
    order = (1, 0) if number == 2 and apart and _one_in(draw, 2) else tuple(range(number))
    any_tag = order == tuple(range(number)) and (number == 1 or not apart) and _one_in(draw, 2)
    trees = [[_tree(draw, 2, top=True) for _ in range(size)] for _ in range(number)]
    known = {"trees": trees, "tags": tags, "order": order, "any_tag": any_tag}
    return SimpleNamespace(**known, shift=draw.randint(0, size - 1), anyone=_one_in(draw, 2), **_way(draw))
