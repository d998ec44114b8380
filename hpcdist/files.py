"""Arrays in files, as the commands name them: .npy, .npz, .pt, .safetensors and .h5, chosen by the suffix."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from hpcdist import layout
from hpcdist.arrays import Opened
from hpcdist.commit import check_target
from hpcdist.errors import FileError, InputError, reason
from hpcdist.formats import FORMATS, of_raw
from hpcdist.raw import Raw
from hpcdist.regular import check_regular

__all__ = ["OUTPUTS", "Source", "check_output", "describe", "expand", "load", "opened", "opened_bytes", "path_of"]

OUTPUTS = (".npy", ".pt", ".safetensors", ".h5")
_NAMED = re.compile(r"(?P<path>.*\.(?:npz|pt|safetensors|h5)):(?P<name>.+)", re.DOTALL)
_WINDOW = 2**26  # bytes


@dataclass(frozen=True)
class Source:
    """One array in one file, as its header describes it.

    Attributes:
        spec: what the user calls it: the path, and behind a colon the array's name where the file may hold several.
        shape, dtype: of the array.
    """

    spec: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def extent(self, dim: int) -> int:
        """Its length along `dim`; a 0-d array counts as one row."""
        return self.shape[dim] if self.shape else 1


def expand(inputs: Sequence[str]) -> list[str]:
    """The files that the given names and patterns stand for, sorted; a name behind a colon goes with each file.

    Raises:
        InputError: a pattern that matches nothing, or a file that is named twice.
    """
    specs: list[str] = []
    for given in inputs:
        path, name = _split(given)
        paths = [path] if os.path.lexists(path) else glob.glob(path, recursive=True)
        if not paths:
            raise InputError(f"{path}: no such file" + (", and no file matches" if glob.has_magic(path) else ""))
        specs += [p if name is None else f"{p}:{name}" for p in paths]
    specs.sort()
    for one, other in pairwise(specs):
        if one == other:
            raise InputError(f"{one}: named twice")
    return specs


def describe(spec: str) -> Source:
    """Read what an array is, without its data where the format allows that.

    Raises:
        InputError: no such file or array, not readable, not of its format, or of a dtype torch does not have.
    """
    with opened(spec) as array:
        return Source(spec, array.shape, array.dtype)


def load(spec: str) -> Tensor:
    """Read an array as a CPU tensor, of native byte order. Raises as :func:`describe` does."""
    with opened(spec) as array:
        x = torch.empty(array.shape, dtype=array.dtype, device="cpu")
        array.read(layout.whole(array.shape), x, _WINDOW)
        return x


@contextmanager
def opened(spec: str) -> Iterator[Opened]:
    """An array in an open file; every failure, also to read a part of it, is an InputError."""
    path, name = _split(spec)
    kind = FORMATS.get(Path(path).suffix)
    if kind is None:
        raise InputError(f"{path}: unknown suffix {Path(path).suffix!r}; expected one of {', '.join(FORMATS)}")
    try:
        check_regular(path)
        with kind.opened(path, name) as array:
            yield array
    except InputError:
        raise
    except FileError as error:
        raise InputError(str(error)) from error
    except Exception as error:  # each library has its own way to say that a file is damaged
        raise InputError(f"{path}: cannot be read: {reason(error)}") from error


def opened_bytes(path: str) -> AbstractContextManager[Opened]:
    """A file of any kind as an array of its bytes."""
    return of_raw(Raw(path, 0, (os.path.getsize(path),), torch.uint8))


def check_output(path: str, dtype: torch.dtype, nbytes: int, inputs: Sequence[str] = ()) -> None:
    """Find before any data move what would keep a tensor from being written to `path`.

    `inputs` are files that must survive; `path` must be none of them.

    Raises:
        InputError: unknown suffix, no such folder, not writable, no space for `nbytes`, or a format without `dtype`.
    """
    target = Path(path)
    if target.suffix not in OUTPUTS:
        raise InputError(f"{path}: unknown suffix {target.suffix!r}; expected one of {', '.join(OUTPUTS)}")
    if dtype not in FORMATS[target.suffix].dtypes:
        others = [suffix for suffix in OUTPUTS if dtype in FORMATS[suffix].dtypes]
        raise InputError(f"{path}: a {target.suffix} file cannot hold {dtype}; use one of {', '.join(others)}")
    for spec in inputs:
        if target.exists() and os.path.samefile(target, path_of(spec)):
            raise InputError(f"{path}: is also an input, which it would replace")
    try:
        check_target(target, nbytes)
    except FileError as error:
        raise InputError(str(error)) from error


def path_of(spec: str) -> str:
    """The file in which an array is."""
    return _split(spec)[0]


def _split(spec: str) -> tuple[str, str | None]:
    match = _NAMED.fullmatch(spec)
    return (spec, None) if match is None or os.path.exists(spec) else (match["path"], match["name"])
