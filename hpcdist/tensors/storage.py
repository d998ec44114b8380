"""Tensor <-> message: dtypes, contiguity, and the place of each rank's message in the whole tensor.

A message is the memory of a contiguous tensor, taken as bytes: they carry every dtype, those that MPI and gloo do not
know too, and leave the bits as they are.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

__all__ = [
    *("BARE", "DTYPES", "as_bytes", "bits", "copyable", "of_bytes", "overlap", "plain"),
    *("problem", "row_major", "summed_in", "written"),
]

T = TypeVar("T")

_KNOWN = (  # a dtype's number is its place: append, and never renumber
    *("float64", "float32", "float16", "bfloat16"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"),
    *("complex128", "complex64", "complex32"),
)
_BARE = (  # behind those, as above
    *("float4_e2m1fn_x2", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"),
    *("int1", "int2", "int3", "int4", "int5", "int6", "int7"),
    *("uint1", "uint2", "uint3", "uint4", "uint5", "uint6", "uint7"),
    "bcomplex32",
)
DTYPES: dict[torch.dtype, int] = {
    getattr(torch, name): code for code, name in enumerate(_KNOWN + _BARE) if hasattr(torch, name)
}
"""Every dtype that travels (those of whole bytes, without quantisation parameters), and its number in a header."""
BARE = frozenset(getattr(torch, name) for name in _BARE if hasattr(torch, name))
"""Those of them that torch, on some device, does not even copy."""
_KINDS = (Tensor, torch.nn.Parameter)  # other classes have a state, or a meaning, beside their memory
_NAMED = hasattr(Tensor, "has_names")  # until torch 2.12
_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def problem(x: Tensor) -> str | None:
    """Why this tensor cannot travel, to follow its name; None if it can."""
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:  # type: ignore[no-untyped-call]
        return "has a forward-mode tangent, which would be lost (torch.autograd.forward_ad.unpack_dual takes it off)"
    if type(x) not in _KINDS:
        name = f"{type(x).__module__}.{type(x).__qualname__}"
        return f"is a {name}, of which only memory would arrive: pass its tensors (of a DTensor, x.to_local())"
    if _NAMED and x.has_names():  # type: ignore[attr-defined]
        return "has named dims, whose names would be lost: pass x.rename(None)"
    usual = x.is_cpu and x.dtype in DTYPES and x.layout is torch.strided and not x.is_nested
    if usual and (x.data_ptr() or not x.numel()):
        return None
    if x.layout is not torch.strided or x.is_quantized or x.is_nested:
        kind = " (quantized)" if x.is_quantized else " (nested)" if x.is_nested else ""
        return f"must be a dense tensor, got layout {x.layout}{kind}"
    if x.dtype not in DTYPES:
        return f"has dtype {x.dtype}, which cannot be sent"
    if not (x.is_cuda or x.is_cpu):
        return f"is on device {x.device}; expected cpu or cuda"
    if x.numel() and not x.data_ptr():
        return "has no memory of its own"
    return None


def plain(x: Tensor) -> Tensor:
    """`x` without gradient history and without a lazy conjugation or negation: its memory holds its values."""
    if x.requires_grad:
        x = x.detach()
    if x.is_conj():
        x = x.resolve_conj()
    return x.resolve_neg() if x.is_neg() else x


def bits(x: Tensor) -> Tensor:
    """The same memory as a dtype that every operation knows: a view."""
    return x.view(_INTS[x.itemsize])


def copyable(x: Tensor) -> Tensor:
    """The same memory as a dtype that can be copied: `x` itself, but for the dtypes in BARE."""
    return bits(x) if x.dtype in BARE else x


def summed_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of this one are added up: torch cannot add those of the narrowest."""
    if dtype.is_floating_point and dtype.itemsize == 1:
        return torch.float32
    return torch.complex64 if dtype == torch.complex32 else dtype


def row_major(x: Tensor, apart: Tensor | None = None) -> Tensor:
    """`x`, as a dtype that can be copied, in row-major memory that can be sent while `apart` is written.

    `x` itself where it is like that, else a copy.
    """
    if x.is_contiguous() and (apart is None or not overlap(x, apart)):
        return x
    # Not clone() alone: it keeps the order of the strides, and what is sent is the memory as it is.
    return copyable(x).clone(memory_format=torch.contiguous_format)


def as_bytes(x: Tensor) -> Tensor:
    """The memory of a contiguous tensor as a flat uint8 tensor: a view."""
    # Not view(-1): torch calls a tensor of at most one element contiguous whatever its strides, and keeps them.
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


def written(out: Any, result: T) -> T:
    """`result`, once autograd knows that `out` has other values: a backward pass that needs the old ones then fails.

    MPI and files write behind autograd's back. For an asynchronous call it is to be called when that begins, as
    torch's in-place operations count in the order in which they are called.
    """
    if isinstance(out, Tensor):
        torch.autograd.graph.increment_version(out)
    return result


def of_bytes(data: bytes | bytearray) -> Tensor:
    """A flat uint8 tensor of these bytes: a copy."""
    return (
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if data
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )


def overlap(x: Tensor, y: Tensor) -> bool:
    """Whether the two may share memory, so that writing one could change the other."""
    (x_start, x_end), (y_start, y_end) = _span(x), _span(y)
    return max(x_start, y_start) < min(x_end, y_end)


def _span(x: Tensor) -> tuple[int, int]:
    """The addresses of the first byte of `x` and of the first one behind it."""
    start = x.data_ptr()
    if x.is_contiguous():
        return start, start + x.nbytes
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return start, start + (last + 1) * x.itemsize if x.numel() else start
