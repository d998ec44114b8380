"""Tensors as MPI takes them: contiguous host memory, and temporary contiguous copies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from hpcdist.errors import refusal
from hpcdist.tensors import accelerator, pool
from hpcdist.tensors.storage import as_bytes, copyable, problem, resolved, span

_from_address = MPI.buffer.fromaddress


class UnusableError(ValueError):
    """A tensor has no memory that MPI could use: an error of this rank's call, found before data move."""


def share_memory(tensors: Iterable[Tensor]) -> bool:
    """Whether any two tensors may share memory; that takes half a microsecond for each of them."""
    last = 0
    for start, end in sorted([span(x) for x in tensors]):
        if start < last:
            return True
        last = end
    return False


def address(x: Tensor) -> Any:
    """Return the memory of a contiguous tensor as an MPI buffer.

    Raises:
        UnusableError: if it has none: a tensor on "meta", or a DTensor.
    """
    start, nbytes = x.data_ptr(), x.nbytes
    if not start and nbytes:
        raise refusal(UnusableError, "HD202", f"the tensor {problem(x)}")
    return _from_address(start, nbytes)


def scratch(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a new tensor in host memory, from the pool if it is large."""
    return pool.empty(shape, dtype, "cpu", fixed=True)


def readable(x: Tensor) -> Tensor:
    """Return a tensor with the same elements in contiguous host memory: `x` itself, or a copy."""
    x = resolved(x)
    if accelerator.holds(x):
        return x.cpu().contiguous()
    if x.is_contiguous():
        return x
    copy = scratch(x.shape, x.dtype)
    copyable(copy).copy_(copyable(x))
    return copy


@contextmanager
def writable(x: Tensor, read: bool = True) -> Iterator[Tensor]:
    """A context with contiguous host memory for the elements of `x`, which gets them at its end.

    Args:
        read: whether they are there at the beginning.
    """
    if is_plain(x):
        yield x
        return
    copy = readable(x) if read else scratch(x.shape, x.dtype)
    yield copy
    copyable(x.detach()).copy_(copyable(copy))


def gpu_events(tensors: Iterable[Tensor]) -> list[torch.Event]:
    """Record the work submitted so far to the current streams of the tensors' GPUs.

    Another thread has other streams: it waits for these events before it touches the tensors.
    """
    devices = {x.device for x in tensors if accelerator.holds(x)}
    return [accelerator.event(device) for device in sorted(devices, key=str)]


def is_plain(x: Tensor) -> bool:
    """Whether the memory of a tensor is on the host, and holds its elements one after the other."""
    return x.is_cpu and x.is_contiguous() and not (x.is_conj() or x.is_neg())


def flat(x: Tensor) -> Tensor:
    """Return a flat view of a contiguous tensor."""
    return x.detach().as_strided((x.numel(),), (1,))


def packed(tensors: Sequence[Tensor]) -> Tensor:
    """Return the elements of tensors of one dtype, one tensor after the other."""
    whole = scratch([sum(x.numel() for x in tensors)], tensors[0].dtype)
    for part, x in zip(parts(whole, tensors), tensors, strict=True):
        copyable(part).copy_(copyable(x.detach()))
    return whole


def parts(whole: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return consecutive views of a flat tensor in the shapes of `tensors`."""
    pieces = torch.split(whole, [x.numel() for x in tensors])
    return [piece.view(x.shape) for piece, x in zip(pieces, tensors, strict=True)]


def unpack(whole: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy what packed() returns back into the tensors."""
    for part, x in zip(parts(whole, tensors), tensors, strict=True):
        copyable(x.detach()).copy_(copyable(part))


def bytes_of(x: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as flat uint8."""
    return as_bytes(x.detach())
