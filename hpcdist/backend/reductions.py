"""Reduce operations of torch, for every dtype: by MPI's own operations, or by torch's on data that MPI has moved.

MPI has no bf16, half or fp8, no average, and its MIN and MAX of NaN depend on the order of the ranks. Sums of 8 and 16
bits wrap around in torch; those of Open MPI stop at the largest number, but not for fewer than 33 elements. What MPI
does not have, torch reduces in the order of the ranks: each element once, so that all ranks get the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor
from torch.distributed import ReduceOp

from hpcdist.errors import refusal
from hpcdist.tensors.storage import UNSIGNED, sum_dtype

_Kind: Any = ReduceOp.RedOpType
_BITWISE = ("BAND", "BOR", "BXOR")
_SIZED = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_INTEGERS: dict[torch.dtype, MPI.Datatype] = {
    getattr(torch, name): getattr(MPI, f"{name.upper()}_T") for name in _SIZED
}
_FLOATS = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.complex64: MPI.C_FLOAT_COMPLEX,
    torch.complex128: MPI.C_DOUBLE_COMPLEX,
}
_OPS: dict[str, tuple[MPI.Op, Callable[..., Tensor], np.ufunc]] = {
    "SUM": (MPI.SUM, torch.add, np.add),
    "PRODUCT": (MPI.PROD, torch.mul, np.multiply),
    "MIN": (MPI.MIN, torch.minimum, np.minimum),
    "MAX": (MPI.MAX, torch.maximum, np.maximum),
    "BAND": (MPI.BAND, torch.bitwise_and, np.bitwise_and),
    "BOR": (MPI.BOR, torch.bitwise_or, np.bitwise_or),
    "BXOR": (MPI.BXOR, torch.bitwise_xor, np.bitwise_xor),
}
_OPS["AVG"] = _OPS["PREMUL_SUM"] = _OPS["SUM"]
_OF_BOOLS = {"SUM": "BOR", "MAX": "BOR", "PRODUCT": "BAND", "MIN": "BAND"}  # as NCCL has it


def _by_numpy(ufunc: np.ufunc) -> Callable[..., Any]:
    """Return numpy's operation for flat tensors, as one of torch's with `out`."""
    return lambda x, y, out: ufunc(x.numpy(), y.numpy(), out=out.numpy())


class Reduction:
    """A reduce operation on tensors of one dtype.

    Args:
        name: name of torch's operation.
        dtype: dtype of the tensors.
        factor: of PREMUL_SUM, what each rank's data are multiplied by first.

    Attributes:
        mpi: MPI's operation and datatype that have the same result on all ranks; else None.
        dtype: dtype in which to reduce.
        direct: MPI's, if there is nothing to do before and after it.

    Raises:
        ValueError: if the operation is not defined for that dtype.
    """

    def __init__(self, name: str, dtype: torch.dtype, factor: Any = None) -> None:
        if dtype == torch.bool:
            if name in ("AVG", "PREMUL_SUM"):
                raise refusal(ValueError, "HD701", f"Cannot use ReduceOp.{name} with Bool")
            name, dtype = _OF_BOOLS.get(name, name), torch.uint8
        exact = dtype in _INTEGERS
        if name in _BITWISE and not exact:
            raise refusal(ValueError, "HD701", f"Cannot use ReduceOp.{name} with non-integral dtype {dtype}")
        if name in ("MIN", "MAX") and dtype.is_complex:
            raise refusal(ValueError, "HD701", f"ReduceOp.{name} is not defined for complex dtype {dtype}")
        self.name, self.factor = name, factor
        self.dtype = sum_dtype(dtype)
        known = _INTEGERS if name in (*_BITWISE, "MIN", "MAX") else {**_INTEGERS, **_FLOATS}
        op, saturates = _OPS[name][0], exact and dtype.itemsize <= 2 and _OPS[name][0] == MPI.SUM
        self.mpi = (op, known[dtype]) if dtype in known and not saturates else None
        self.direct = None if name in ("AVG", "PREMUL_SUM") else self.mpi
        self._op = _by_numpy(_OPS[name][2]) if dtype in UNSIGNED else _OPS[name][1]

    def scaled(self, x: Tensor) -> Tensor:
        """Return this rank's contribution: with PREMUL_SUM, a copy of `x` times the factor."""
        return x if self.name != "PREMUL_SUM" else (x.to(self.dtype) * self.factor).to(x.dtype)

    def average(self, x: Tensor, size: int) -> None:
        """Divide a sum in place by the number of ranks, if it is an average."""
        if self.name == "AVG" and x.dtype in UNSIGNED:
            np.floor_divide(x.numpy(), size, out=x.numpy())
        elif self.name == "AVG":
            exact = x.dtype in _INTEGERS
            torch.div(x, size, rounding_mode="trunc" if exact else None, out=x)

    def of(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """Reduce flat tensors in their order into `out`, which may be the first of them."""
        size = len(parts)
        if out.dtype == torch.bool:
            parts, out = [part.view(torch.uint8) for part in parts], out.view(torch.uint8)
        if self.dtype == out.dtype:
            if parts[0] is not out:
                out.copy_(parts[0])
            total = out
        else:
            total = parts[0].to(self.dtype)
        for part in parts[1:]:
            self._op(total, part if part.dtype == total.dtype else part.to(total.dtype), out=total)
        self.average(total, size)
        if total is not out:
            out.copy_(total)


_known: dict[tuple[int, torch.dtype], Reduction] = {}


def reduction(op: Any, dtype: torch.dtype) -> Reduction:
    """Return torch's reduce operation for a dtype.

    Args:
        op: a ReduceOp, or one of its kinds.

    Raises:
        ValueError: if it is not defined for that dtype.
    """
    kind = op if isinstance(op, _Kind) else op.op
    key = kind.value, dtype
    found = _known.get(key)
    if found is None:
        if kind.name == "PREMUL_SUM":
            return Reduction("PREMUL_SUM", dtype, op.factor if hasattr(op, "factor") else op.__getstate__()[1])
        found = _known[key] = Reduction(kind.name, dtype)
    return found
