"""Values, shapes, strides and the oracle: plain indexing of one whole tensor that every rank builds for itself.

Every value encodes its index in the whole, so that no two places can be confused, and comparisons are of bits.
"""

import copy
import dataclasses
import struct
from math import isnan, nan, prod

import h5py
import numpy as np
import pytest
import torch
from torch import Tensor

from hpcdist import layout
from hpcdist.commands import inputs
from hpcdist.errors import HpcdistError
from hpcdist.formats import hdf5
from hpcdist.tensors.storage import BARE, DTYPES as DTYPES, copyable

_BYTES_AS_INT = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = 0x1E3779B97F4A7C15  # multiplication by an odd number is a bijection of the integers modulo a power of 2


def whole_of(shape, dtype, salt=0):
    """A contiguous tensor in which place i has its own bits: a pattern of (i, salt), seen as `dtype`.

    In dtypes of one byte the pattern has the period 251 (a prime), in bool it is a bit of a hash of i.
    """
    words = max(1, dtype.itemsize // 8)  # a complex128 is two words
    index = torch.arange(prod(shape) * words, dtype=torch.int64) + 1_000_003 * salt
    if dtype == torch.bool:
        values = (index * _ODD >> 40 & 1).bool()
    elif dtype.itemsize == 1:
        values = ((index * 37 + 11) % 251).to(torch.uint8).view(dtype)
    else:
        size = min(8, dtype.itemsize)
        mixed = (index + 1) * _ODD
        values = (mixed if size == 8 else (mixed & 2 ** (8 * size) - 1)).to(_BYTES_AS_INT[size]).view(dtype)
    return values.view(shape)


def copy_of(x):
    """As clone(), for every dtype."""
    return _as_bits(Tensor.clone)(x)


def _as_bits(step):
    """The step, done on the bits of a dtype that torch cannot copy."""
    return lambda x: step(copyable(x)).view(x.dtype) if x.dtype in BARE else step(x)


def same_bits(x, y):
    """Whether dtype, shape and every bit are the same: NaNs and negative zeros too."""
    if x.dtype != y.dtype or x.shape != y.shape:
        return False
    return torch.equal(_bits(x), _bits(y))


def _bits(x):
    copy = copyable(x.detach().resolve_conj().resolve_neg()).clone(memory_format=torch.contiguous_format)
    return copy.view(-1).view(torch.uint8)  # of a copy: a contiguous tensor of one element may have any stride


def shown(value):
    text = " ".join(repr(value).split())
    return text if len(text) < 400 else f"{text[:300]} ... {text[-100:]}"


SINGLES = (
    *(None, True, False, 0, -7, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**200, -(2**64)),
    *(0.0, -0.0, 1.5, nan, float("inf"), 5e-324, 1 + 2j, complex(-0.0, nan), complex(float("-inf"), 0.1)),
    *("", "text", "日本 é \U0001f600", '"\\\n\0[', "\ud800", "long " * 100),
    *(b"", b"\0\xff", b"bytes" * 50, bytearray(b"array"), bytes(range(256)) * 300),
    *(np.float64(1.5), np.float32(nan), np.int8(-3), np.bool_(True), np.uint64(2**64 - 1), np.complex64(2j)),
    *(np.float16(0.1), np.float64(-0.0)),
)


def differs(got, want, where="result"):
    """How a structure is not the one that is wanted: in types, bits and the order of keys."""
    if type(got) is not type(want):
        return f"{where} is {shown(got)}, expected {shown(want)}"
    pairs = []
    if isinstance(want, Tensor):
        same = same_bits(got, want) and got.is_contiguous() and not got.is_conj() and not got.is_neg()
    elif isinstance(want, (np.ndarray, np.generic)):
        same = (got.dtype, got.shape, got.tobytes()) == (want.dtype, want.shape, want.tobytes())
    elif isinstance(want, (list, tuple)):
        same = len(got) == len(want)
        pairs = [(f"{where}[{i}]", *both) for i, both in enumerate(zip(got, want, strict=False))]
    elif isinstance(want, dict):
        same = list(map(repr, got)) == list(map(repr, want))
        pairs = [(f"{where}[{key!r}]", got.get(key), value) for key, value in want.items()]
    elif dataclasses.is_dataclass(want):
        same = True
        pairs = [(f"{where}.{name}", getattr(got, name, None), value) for name, value in fields(want)]
    elif isinstance(want, complex):
        same = True
        pairs = [(f"{where}.real", got.real, want.real), (f"{where}.imag", got.imag, want.imag)]
    elif isinstance(want, float):
        same = (isnan(got) and isnan(want)) or struct.pack("d", got) == struct.pack("d", want)
    else:
        same = got == want
    if not same:
        return f"{where} is {shown(got)}, expected {shown(want)}"
    return next((found for pair in pairs if (found := differs(pair[1], pair[2], pair[0]))), None)


def fields(value):
    return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]


def parts_of(value):
    """What a container other than a list consists of; None if it is no container."""
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, dict):
        return list(value.values())
    return [item for _, item in fields(value)] if dataclasses.is_dataclass(value) else None


def with_parts(value, parts):
    """A tuple, named tuple, dict or dataclass like `value`, but of these parts."""
    if isinstance(value, tuple):
        return tuple.__new__(type(value), parts)
    if isinstance(value, dict):
        return type(value)(zip(value, parts, strict=True))
    same = copy.copy(value)
    for (name, _), item in zip(fields(value), parts, strict=True):
        object.__setattr__(same, name, item)
    return same


def mapped(step, value):
    """The structure with the results of `step` in place of what is no container."""
    if isinstance(value, list):
        return [mapped(step, item) for item in value]
    parts = parts_of(value)
    return step(value) if parts is None else with_parts(value, [mapped(step, part) for part in parts])


EXTENTS = {
    "even": lambda size: (2,) * size,
    "ragged": lambda size: tuple(2 * rank + 1 if rank % 2 else 3 * (size - rank) for rank in range(size)),
    "zero first": lambda size: (0, *range(2, size + 1)),
    "zero in the middle": lambda size: tuple(0 if rank == size // 2 else rank + 1 for rank in range(size)),
    "zero last": lambda size: (*range(2, size + 1), 0),
    "all zero": lambda size: (0,) * size,
    "all on one rank": lambda size: tuple(5 if rank == size // 2 else 0 for rank in range(size)),
    "one row fewer than ranks": lambda size: (*(1,) * (size - 1), 0),
}
"""The extents along dim by rank, for a number of ranks."""


def extents_of(case, size):
    extents = EXTENTS[case](size)
    assert len(extents) == size
    return extents


def starts(extents):
    """Where each rank's rows start."""
    return [sum(extents[:rank]) for rank in range(len(extents))]


def part(whole, dim, extents, rank):
    """The rows of `rank`, by plain indexing: a view."""
    start = starts(extents)[rank]
    index = [slice(None)] * whole.dim()
    index[dim] = slice(start, start + extents[rank])
    return whole[tuple(index)]


def rows(rule, extent, parts):
    """Which of `extent` rows each part has; said with numpy's and torch's own ways to cut."""
    index = np.arange(extent)
    if rule is None or rule == "block":
        return np.array_split(index, parts)
    if rule == "chunk":
        found = [part.numpy() for part in torch.from_numpy(index).chunk(parts)] if extent else []
        return found + [index[:0]] * (parts - len(found))
    return np.split(index, np.cumsum(rule)[:-1])


def _transposed(x):
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def _stepped(x):
    holes = whole_of((*x.shape[:-1], 3 * x.shape[-1]), x.dtype, salt=7)
    holes[..., 1::3] = x
    return holes[..., 1::3]


def _offset(x):
    longer = whole_of((x.numel() + 8,), x.dtype, salt=7)
    longer[5 : 5 + x.numel()] = x.reshape(-1)
    return longer[5 : 5 + x.numel()].view(x.shape)


def _expanded(x):
    return x[..., :1].expand(x.shape)


def _conjugated(x):
    return x.conj()


def _negated(x):
    """The imaginary part of a conjugate is negated when it is read."""
    return torch.complex(torch.zeros_like(x), x).conj().imag


STRIDES = {
    "contiguous": copy_of,
    "transposed": _as_bits(_transposed),
    "stepped": _as_bits(_stepped),
    "offset": _as_bits(_offset),
    "expanded": _expanded,
    "conjugated": _conjugated,
    "negated": _negated,
    "negated and contiguous": Tensor._neg_view,
}
"""Ways to lay a tensor out in memory; those from "expanded" on change its values too."""


def strides_for(dtype):
    """The names in STRIDES that this dtype can have."""
    for name in STRIDES:
        if name == "conjugated" and (not dtype.is_complex or dtype in BARE):
            continue
        if name.startswith("negated") and dtype not in (torch.float32, torch.float64):
            continue
        yield name


def load(spec, by_library=False, window=2**20):
    """An array of a file, as the commands read it, or to compare with it, by the format's own library."""
    source = inputs.described(spec)
    data = inputs.joined([source], 0)
    whole = layout.whole(data.shape)
    if by_library:
        return data.by_library()(whole).view(source.stored.shape)
    out = torch.empty(data.shape, dtype=data.dtype, device="cpu")
    with data.reading(window) as read:
        data.join(read, whole, out)
    return out.view(source.stored.shape)


def assert_refused(folder, messages):
    """Each of these arrays in files of a folder is refused in one line that names the file and has the text in it."""
    for name, message in messages.items():
        with pytest.raises(HpcdistError) as caught:
            load(str(folder / name))
        text = str(caught.value)
        assert text.startswith(str(folder / name).split(":")[0]), text
        assert message in text
        assert "\n" not in text


def seal(path):
    """Let the state of a file be the checksum of what it holds now, as a program would that changes it lawfully."""
    with h5py.File(path, "r+") as file:
        own = file[hdf5.GROUP]
        state = hdf5.seal({name: part[()].tobytes() for name, part in own.items()})
        own["state"][...] = np.frombuffer(state, np.uint8)


class Index:
    """An integer of another library."""

    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value
