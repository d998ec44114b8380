"""MPI datatypes of strided tensors, which MPI sends and receives without packing."""

from __future__ import annotations

import weakref
from functools import lru_cache

from mpi4py import MPI
from torch import Tensor

__all__ = ["datatype", "message"]

# Both sides of a message have items of the same size; their meaning does not matter.
_ITEMS = {1: MPI.BYTE, 2: MPI.INT16_T, 4: MPI.INT32_T, 8: MPI.INT64_T, 16: MPI.C_DOUBLE_COMPLEX}


@lru_cache(maxsize=1024)
def datatype(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> MPI.Datatype:
    """Return the datatype of a strided tensor, relative to its first element: committed, freed when unreferenced."""
    dims = [(extent, stride) for extent, stride in zip(shape, strides, strict=True) if extent != 1]
    run = 1
    while dims and dims[-1][1] == run:
        run *= dims.pop()[0]
    found = _ITEMS[itemsize].Create_contiguous(run)
    for extent, stride in reversed(dims):
        inner, found = found, found.Create_hvector(extent, 1, stride * itemsize)
        inner.Free()
    weakref.finalize(found, _free, MPI.Datatype.fromhandle(found.handle)).atexit = False
    return found.Commit()


def _free(kind: MPI.Datatype) -> None:
    if not MPI.Is_finalized():
        kind.Free()


def message(x: Tensor) -> list[object]:
    """Return a strided tensor in host memory as an mpi4py buffer specification."""
    shape, strides = tuple(x.shape), x.stride()
    span = 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
    memory = MPI.buffer.fromaddress(x.data_ptr(), span * x.itemsize)
    return [memory, 1, datatype(shape, strides, x.itemsize)]
