"""Arguments of the calls of this package: checked on each rank, before the ranks agree on the call."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import index
from typing import Any, TypeVar

import torch

from hpcdist import activity
from hpcdist.comm.team import Team
from hpcdist.process import abort
from hpcdist.staging.pieces import PIECE, check_pieces, check_shape
from hpcdist.tensors.storage import DTYPES
from hpcdist.validation import collective, local
from hpcdist.validation.call import Call

__all__ = ["agreed", "count", "hdf5_path", "positive", "shape_and_dtype"]

T = TypeVar("T")

_NOT_WRITTEN = (".npy", ".npz", ".pt", ".pth")  # which programs would read as numpy's and torch's


@contextmanager
def agreed(team: Team, verb: str, check: Callable[[], T]) -> Iterator[T]:
    """Run the body of a collective call once every rank has found its own arguments right. Collective.

    Args:
        check: returns this rank's arguments as the body needs them, or raises what is wrong with them.

    Raises:
        RankError: on every rank, if `check` fails on one, or ranks have made different calls.
    """
    call, arguments = Call(verb), []
    try:
        local.runs()
        arguments.append(check())
    except Exception as error:  # the other ranks must learn of it
        call.problem = local.problem_of(error)
    with activity.InCall(verb, team), abort.InStep(verb, team.size):
        collective.exchange(team, call)
        yield arguments[0]


def positive(name: str, value: Any) -> int:
    """A number of bytes, at least 1."""
    if index(value) < 1:
        raise local.WrongError("HD419", f"{name} is {value}, expected a number of bytes >= 1")
    return index(value)


def count(name: str, value: Any, size: int) -> int | None:
    """A number of ranks of a team of `size`; None stays None, which stands for all of them."""
    if value is None:
        return None
    if not 1 <= index(value) <= size:
        raise local.WrongError("HD419", f"{name} is {value}, expected 1 to {size} in a group of {size} ranks")
    return index(value)


def hdf5_path(path: Any) -> str:
    """The path of a file that is written; a WrongError if its suffix is that of another format."""
    text = os.fsdecode(path)
    if text.endswith(_NOT_WRITTEN):
        raise local.WrongError(
            "HD418", f"path is {text!r}, but an HDF5 file is written: let the name end with .h5, or .safetensors"
        )
    return text


def shape_and_dtype(name: str, spec: Any, window: int) -> tuple[tuple[int, ...], torch.dtype]:
    """The shape and dtype of a tensor to be written in pieces of at most `window` bytes."""
    try:
        shape, dtype = spec
        extents = tuple(index(n) for n in shape)
    except (TypeError, ValueError):
        raise local.WrongError("HD418", f"{name!r} is {spec!r}, expected (shape, dtype)") from None
    if not isinstance(dtype, torch.dtype):
        raise local.WrongError("HD418", f"{name!r} has dtype {dtype!r}, expected a torch.dtype such as torch.float64")
    if dtype not in DTYPES:
        raise local.WrongError("HD418", f"{name!r} has dtype {dtype}, which cannot be stored")
    if min(extents, default=0) < 0 or any(isinstance(n, bool) for n in shape):
        raise local.WrongError("HD418", f"{name!r} has shape {tuple(shape)}, expected extents >= 0")
    try:
        check_shape(extents, dtype.itemsize)
        check_pieces(extents, dtype.itemsize, max(1, min(PIECE, window) // dtype.itemsize))
    except local.WrongError as error:
        raise local.WrongError("HD418", f"{name!r} {error}") from None
    return extents, dtype
