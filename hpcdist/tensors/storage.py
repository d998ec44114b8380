"""Tensors as messages: dtypes, contiguity, overlap.

A message is the memory of a contiguous tensor as bytes. Bytes carry every dtype, including those that MPI and gloo do
not support, and preserve every bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from hpcdist import torch_names
from hpcdist.tensors import accelerator, pool

T = TypeVar("T")

_KNOWN = (  # a dtype's number is its position: append, never renumber
    "float64", "float32", "float16", "bfloat16",
    "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
    "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool",
    "complex128", "complex64", "complex32",
)  # fmt: skip
_BARE = (  # numbered after those, as above
    "float4_e2m1fn_x2", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2",
    "int1", "int2", "int3", "int4", "int5", "int6", "int7",
    "uint1", "uint2", "uint3", "uint4", "uint5", "uint6", "uint7",
    "bcomplex32",
)  # fmt: skip
DTYPES: dict[torch.dtype, int] = {
    getattr(torch, name): code for code, name in enumerate(_KNOWN + _BARE) if hasattr(torch, name)
}
"""Every supported dtype (whole bytes, no quantisation parameters), and its number in a header."""
BARE = frozenset(getattr(torch, name) for name in _BARE if hasattr(torch, name))
"""The supported dtypes that torch cannot even copy on some device."""
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
"""Those of which torch has no arithmetic, and numpy has."""
_KINDS = (Tensor, torch.nn.Parameter)  # other classes have state or meaning besides their memory
NAMED = hasattr(Tensor, "has_names")  # torch has names until 2.12
_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def problem(x: Tensor) -> str | None:
    """Return why a tensor cannot be sent, to be appended to its name; None if it can."""
    if torch_names.forward_level() >= 0 and forward_ad.unpack_dual(x).tangent is not None:  # type: ignore[no-untyped-call]
        return "has a forward-mode tangent, which would be lost (torch.autograd.forward_ad.unpack_dual takes it off)"
    if type(x) not in _KINDS:
        name = f"{type(x).__module__}.{type(x).__qualname__}"
        return f"is a {name}, of which only the memory would be sent: pass its tensors (of a DTensor, x.to_local())"
    if NAMED and x.has_names():  # type: ignore[attr-defined]
        return "has named dims, whose names would be lost: pass x.rename(None)"
    if x.layout is not torch.strided or x.is_quantized or x.is_nested:
        kind = " (quantized)" if x.is_quantized else " (nested)" if x.is_nested else ""
        return f"must be a dense tensor, got layout {x.layout}{kind}"
    if x.dtype not in DTYPES:
        return f"has dtype {x.dtype}, which cannot be sent"
    if not (x.is_cpu or accelerator.holds(x)):
        return f"is on device {x.device}; expected cpu or {accelerator.KIND}"
    if x.numel() and not x.data_ptr():
        return "has no memory of its own"
    if x.numel() and _reach(x) > x.untyped_storage().nbytes():  # one that is resized takes it from its tensors
        return f"needs {_reach(x):,} bytes of its storage, which has been resized to {x.untyped_storage().nbytes():,}"
    return None


def _reach(x: Tensor) -> int:
    """Return how many bytes of its storage a tensor that has elements needs, counted from the storage's first byte."""
    offset, itemsize = int(x.storage_offset()), x.itemsize
    if x.is_contiguous():
        return (offset + x.numel()) * itemsize
    last = sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
    return (offset + last + 1) * itemsize


def resolved(x: Tensor) -> Tensor:
    """Return `x` detached, with lazy conjugation and negation resolved, so that its memory holds its values."""
    if x.requires_grad:
        x = x.detach()
    if x.is_conj():
        x = x.resolve_conj()
    return x.resolve_neg() if x.is_neg() else x


def bits(x: Tensor) -> Tensor:
    """Return a view of the memory as a dtype that every operation supports."""
    return x.view(_INTS[x.itemsize])


def copyable(x: Tensor) -> Tensor:
    """Return the memory as a dtype that can be copied: a view for the dtypes in BARE, else `x` itself."""
    return bits(x) if x.dtype in BARE else x


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which to add up values of `dtype`: narrow ones would be rounded at every step."""
    if dtype.is_floating_point and dtype.itemsize <= 2:
        return torch.float32
    return torch.complex64 if dtype == torch.complex32 else dtype


def is_plain(x: Any, gpu: bool = False) -> bool:
    """Return whether `x` is an ordinary tensor in contiguous host memory, or `gpu` memory, that needs no gradient."""
    return (
        type(x) is Tensor
        and (x.is_cpu or (gpu and accelerator.holds(x)))
        and x.layout is torch.strided
        and not x.is_nested
        and x.is_contiguous()
        and x.data_ptr() != 0
        and x.untyped_storage().nbytes() >= (x.storage_offset() + x.numel()) * x.itemsize
        and not (x.requires_grad or x.is_conj() or x.is_neg())
        and torch_names.forward_level() < 0
        and not (NAMED and x.has_names())  # type: ignore[attr-defined]
    )


def row_major(x: Tensor, out: Tensor | None = None) -> Tensor:
    """Return `x` in row-major memory that can be sent while `out` is written: `x` itself, or a copy if need be."""
    if x.is_contiguous() and (out is None or not overlap(x, out)):
        return x
    # A bare clone() would keep the order of the strides, but messages are sent in the order of their memory.
    if x.nbytes < pool.LEAST:
        return copyable(x).clone(memory_format=torch.contiguous_format)
    copy = pool.empty(x.shape, x.dtype, x.device)
    copyable(copy).copy_(copyable(x))
    return copy


def as_bytes(x: Tensor) -> Tensor:
    """Return a flat uint8 view of the memory of a contiguous tensor."""
    # Not view(-1): torch considers a tensor of at most one element contiguous whatever its strides, and keeps them.
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


def written(out: Any, result: T) -> T:
    """Mark `out` as modified in place, so that a backward pass that needs its old values fails; return `result`.

    Autograd does not see what MPI and files write. Asynchronous calls must mark `out` when they begin, since autograd
    counts in-place operations in the order of the calls.
    """
    if isinstance(out, Tensor):
        torch.autograd.graph.increment_version(out)
    return result


def of_bytes(data: bytes | bytearray) -> Tensor:
    """Copy bytes into a flat uint8 tensor."""
    return (
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if data
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )


def overlap(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors may share memory, so that writing one could change the other."""
    (x_start, x_end), (y_start, y_end) = span(x), span(y)
    return max(x_start, y_start) < min(x_end, y_end)


def span(x: Tensor) -> tuple[int, int]:
    """Return the address range [start, end) of `x`."""
    start = x.data_ptr()
    if x.is_contiguous():
        return start, start + x.nbytes
    return start, start + _reach(x) - int(x.storage_offset()) * x.itemsize if x.numel() else start


def tensors_in(items: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among arguments: in nested lists, in dicts and in dataclasses."""
    tensors: list[Tensor] = []
    for item in items:
        if isinstance(item, Tensor):
            tensors.append(item)
        elif isinstance(item, (list, tuple)):
            tensors += tensors_in(item)
        elif isinstance(item, dict):
            tensors += tensors_in(item.values())
        elif hasattr(item, "__dataclass_fields__"):
            tensors += tensors_in(getattr(item, name, None) for name in item.__dataclass_fields__)
    return tensors


class Scratch:
    """Host buffers that are reused in every round: new memory costs more than a copy into it.

    Args:
        pinned: whether a GPU copies from or to them.
    """

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self.held: list[Tensor] = []
        self._next = 0

    def reset(self) -> None:
        """Make all buffers available again."""
        self._next = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Take a contiguous buffer; its contents are undefined."""
        nbytes = prod(shape) * dtype.itemsize
        if self._next == len(self.held):
            self.held.append(torch.empty(0, dtype=torch.uint8, device="cpu"))
        if self.held[self._next].numel() < nbytes:
            self.held[self._next] = accelerator.host_buffer(nbytes, self._pinned)
        self._next += 1
        return self.held[self._next - 1][:nbytes].view(dtype).view(shape)

    def on_host(self, x: Tensor) -> Tensor:
        """Return `x` in contiguous host memory: `x` itself if it is already there, else one copy."""
        if x.is_cpu and x.is_contiguous():
            return x
        block = self.take(x.shape, x.dtype)
        bits(block).copy_(bits(x) if x.is_cpu else bits(x).contiguous())
        return block
