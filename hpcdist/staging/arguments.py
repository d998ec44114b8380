"""The arguments of staging's calls, checked on each rank before the ranks agree on the call."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import index
from typing import Any, TypeVar

import torch
from torch import Tensor

from hpcdist import activity
from hpcdist.comm.team import Team
from hpcdist.errors import FileError, listed, refusal
from hpcdist.formats import safetensors
from hpcdist.formats.hdf5 import DTYPE_ATTRIBUTE, GROUP, check_name
from hpcdist.layout import Box
from hpcdist.process import abort, machine
from hpcdist.staging.pieces import check_pieces, check_shape, piece_limit
from hpcdist.tensors.storage import DTYPES
from hpcdist.validation import collective, local
from hpcdist.validation.collective import Call
from hpcdist.validation.local import ArgumentError

T = TypeVar("T")

SINGLE = "data"  # the name of a tensor that is saved without one
_NOT_WRITTEN = (".npy", ".npz", ".pt", ".pth", safetensors.INDEX)  # which are read as other files
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@contextmanager
def agreed(
    team: Team, verb: str, check: Callable[[], T], same: Callable[[T], Iterable[tuple[str, Any]]] = lambda _: ()
) -> Iterator[T]:
    """Run the body of a collective call once every rank has found its own arguments right. Collective.

    Args:
        check: returns this rank's arguments in the body's form, or raises their error.
        same: those of them that must agree, by name.

    Raises:
        RankError: on every rank, if `check` fails on one, or ranks have made different calls.
    """
    call, arguments = Call(verb), []
    try:
        local.refuse_tracing()
        arguments.append(check())
        call.options = tuple((name, repr(value)) for name, value in same(arguments[0]))
    except Exception as error:  # the other ranks must raise it, too
        call.problem = local.problem_of(error)
    with activity.InCall(verb, team), abort.InStep(verb, team.size):
        collective.exchange(team, call)
        yield arguments[0]


def window_bytes(value: Any) -> int:
    """The bytes of `window`, at least 1."""
    if index(value) < 1:
        raise ArgumentError("HD419", f"window is {value}, expected a number of bytes >= 1")
    return index(value)


def target_path(path: Any) -> str:
    """Return the path of an output file; an ArgumentError if its format is only read."""
    text = os.fsdecode(path)
    os.path.abspath(text)  # raises if this rank's working folder is gone, before anything is laid out
    if text.endswith(_NOT_WRITTEN):
        what = "but an HDF5 file is written: let the name end with .h5, or .safetensors"
        raise ArgumentError("HD418", f"path is {text!r}, {what}")
    return text


def hdf5_path(path: Any) -> str:
    """As :func:`target_path`, where an HDF5 file alone will do."""
    target = target_path(path)
    if target.endswith(safetensors.SUFFIX):
        raise ArgumentError("HD418", f"path is {target!r}, but an HDF5 file is written: let it end with .h5")
    return target


def shard_size(value: Any, path: str) -> int | None:
    """Return the bytes of ``max_shard_size``; None stands for one file.

    Example::

        >>> shard_size("5GB", "model.safetensors")
        5000000000
    """
    if value is None:
        return None
    if not path.endswith(safetensors.SUFFIX):
        raise ArgumentError("HD419", f"max_shard_size is for {safetensors.SUFFIX} files")
    found = re.fullmatch(r"(\d+) ?([A-Za-z]*)", str(value))
    size = int(found[1]) * _UNITS.get(found[2].upper(), 0) if found else 0
    if size < 1:
        raise ArgumentError("HD419", f"max_shard_size is {value!r}, expected a number of bytes or text such as '5GB'")
    return size


def shape_and_dtype(name: str, spec: Any, window: int) -> tuple[tuple[int, ...], torch.dtype]:
    """The shape and dtype of a tensor to be written in pieces of at most `window` bytes."""
    try:
        shape, dtype = spec
        extents = tuple(index(n) for n in shape)
    except (TypeError, ValueError):
        raise ArgumentError("HD418", f"{name!r} is {spec!r}, expected (shape, dtype)") from None
    if not isinstance(dtype, torch.dtype):
        raise ArgumentError("HD418", f"{name!r} has dtype {dtype!r}, expected a torch.dtype such as torch.float64")
    if dtype not in DTYPES:
        raise ArgumentError("HD418", f"{name!r} has dtype {dtype}, which cannot be stored")
    if min(extents, default=0) < 0 or any(isinstance(n, bool) for n in shape):
        raise ArgumentError("HD418", f"{name!r} has shape {tuple(shape)}, expected extents >= 0")
    try:
        check_shape(extents, dtype.itemsize)
        check_pieces(extents, dtype.itemsize, piece_limit(window, dtype.itemsize))
    except ArgumentError as error:
        raise ArgumentError("HD418", f"{name!r} {error}") from None
    return extents, dtype


def flatten(tensors: Any, prefix: str = "") -> dict[str, Any]:
    """The leaves of a nested dict by their path, ``{"a": {"b": x}}`` -> ``{"a/b": x}``; a single leaf is named SINGLE.

    Raises:
        ValueError, TypeError: a name that a file cannot have, or that two leaves have.
    """
    if not isinstance(tensors, Mapping):
        return {prefix or SINGLE: tensors}
    flat: dict[str, Any] = {}
    for key, value in tensors.items():
        if not isinstance(key, str):
            raise refusal(TypeError, "HD418", f"names must be strings, got {key!r}")
        name = f"{prefix}/{key}" if prefix else key
        check_name(name)
        if name.split("/")[0] == GROUP:
            raise refusal(ValueError, "HD418", f"{name!r}: names that begin with {GROUP} are hpcdist's own")
        for leaf, tensor in flatten(value, name).items():
            if leaf in flat:
                raise refusal(ValueError, "HD418", f"two tensors have the name {leaf!r}")
            flat[leaf] = tensor
    for leaf in flat:
        ends = [i for i, letter in enumerate(leaf) if letter == "/"]
        above = next((leaf[:end] for end in ends if leaf[:end] in flat), None)
        if above is not None:
            raise refusal(ValueError, "HD418", f"{above!r} cannot be a tensor and hold {leaf!r}")
    return flat


def nest(flat: Mapping[str, Any], prefix: str) -> Any:
    """The nested dict of these paths, without `prefix`; the tensor itself, if its name is `prefix`.

    Raises:
        ValueError: a tensor has the name of a group, or the path of another one.
    """
    if list(flat) == [prefix]:
        return flat[prefix]
    tree: dict[str, Any] = {}
    for name, tensor in flat.items():
        *groups, last = name.removeprefix(prefix).strip("/").split("/")
        branch: Any = tree
        for group in groups:
            branch = branch.setdefault(group, {}) if isinstance(branch, dict) else None
        if not isinstance(branch, dict) or last in branch or not last:
            what = f"{name!r} and another tensor cannot both be in one nested dict: load them one by one, by name"
            raise refusal(ValueError, "HD408", what)
        branch[last] = tensor
    return tree


def check_inside(box: Box, shape: Sequence[int], what: str = "") -> None:
    """Raise a ValueError, with `what` before it, if a box is not in a tensor of this shape."""
    if not box.is_in(shape):
        text = f"{what}box is (offset {box.offset}, shape {box.shape}), which is not in shape {tuple(shape)}"
        raise refusal(ValueError, "HD213", text)


def check_out(out: Tensor, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> None:
    """Raise a ValueError if memory does not fit the part of a tensor that is read."""
    if (out.dtype, tuple(out.shape)) != (dtype, shape):
        what = f"out has {out.dtype} of shape {tuple(out.shape)}, expected {dtype} of {shape}"
        raise refusal(ValueError, "HD208", f"{what} for {name!r}")


def check_memory(path: str, nbytes: int) -> None:
    """Raise a FileError for more than this machine's memory, of which a damaged or sparse file may tell."""
    most, _ = machine.capacity()
    if nbytes > most:
        raise FileError("HD310", f"{path}: {nbytes:,} bytes are to be read, and this machine has {most:,} of memory")


def check_attrs(attrs: Any, given: Mapping[str, Any]) -> None:
    """Raise an ArgumentError for attributes of unknown tensors, or with a name of our own."""
    for name, values in (attrs or {}).items():
        if name and name not in given:
            raise ArgumentError("HD419", f"attrs has {name!r}, which is not one of the tensors: {listed(given)}")
        if not isinstance(values, Mapping):
            raise ArgumentError("HD419", f"attrs of {name!r} must be a dict, got {type(values).__name__}")
        if DTYPE_ATTRIBUTE in values:
            raise ArgumentError("HD418", f"attrs of {name!r}: {DTYPE_ATTRIBUTE} is hpcdist's own")


def check_safetensors(dtypes: Mapping[str, torch.dtype], attrs: Mapping[str, Any]) -> None:
    """Raise an ArgumentError for data that a .safetensors file cannot hold.

    Args:
        dtypes: by name of the tensor.
        attrs: by name of a tensor, and "" for the file.
    """
    suffix = safetensors.SUFFIX
    for name, dtype in dtypes.items():
        if dtype not in safetensors.SAFETENSORS.dtypes:
            raise ArgumentError("HD418", f"{name!r} has dtype {dtype}, which a {suffix} file cannot hold")
    for name, values in attrs.items():
        if name and values:
            raise ArgumentError("HD419", f"attrs of {name!r}: a {suffix} file has them only for the file, with name ''")
        if any(type(part) is not str for item in values.items() for part in item):
            raise ArgumentError("HD419", f"attrs of a {suffix} file must be text, got {dict(values)}")
