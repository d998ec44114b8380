"""Arrays in files, as the commands name them: .npy, .npz, .pt, .safetensors and .h5, chosen by the suffix."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from hpcdist import layout, limits
from hpcdist.commands import libraries
from hpcdist.commands.arrays import Opened
from hpcdist.commands.formats import FORMATS, of_raw
from hpcdist.errors import FileError, InputError, reason
from hpcdist.files.commit import check_target
from hpcdist.files.raw import Raw
from hpcdist.files.regular import check_regular
from hpcdist.tensors.storage import DTYPES

__all__ = [
    *("OUTPUTS", "Source", "check_once", "check_output", "describe"),
    *("expand", "load", "opened", "opened_bytes", "opened_by_library", "path_of"),
]

OUTPUTS = (".npy", ".pt", ".safetensors", ".h5")
_NAMED = re.compile(r"\.(?:npz|pt|safetensors|h5)(?P<colon>:)(?=.)", re.DOTALL)


@dataclass(frozen=True)
class Source:
    """One array in one file, as its header describes it.

    Attributes:
        spec: what the user calls it: the path, and behind a colon the array's name where the file may hold several.
        shape, dtype: of the array.
        name: of the array in the file, given or not.
    """

    spec: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    name: str = field(default="", compare=False)

    def extent(self, dim: int) -> int:
        """Its length along `dim`; a 0-d array counts as one row."""
        return self.shape[dim] if self.shape else 1


def expand(inputs: Sequence[str]) -> list[str]:
    """The files that the given names and patterns stand for; a name behind a colon goes with each file.

    In the order given; the files that a pattern matches in natural order, s2 before s10.

    Raises:
        InputError: a pattern that matches nothing.
    """
    specs: list[str] = []
    for given in inputs:
        path, name = _split(given)
        paths = [path] if os.path.lexists(path) else sorted(glob.glob(path, recursive=True), key=_natural)
        if not paths:
            raise InputError(f"{path}: no such file" + (", and no file matches" if glob.has_magic(path) else ""))
        specs += [p if name is None else f"{p}:{name}" for p in paths]
    return specs


def _natural(path: str) -> list[tuple[int, str]]:
    """A key that sorts the numbers within names as numbers."""
    return [(int(part) if i % 2 else -1, part) for i, part in enumerate(re.split("([0-9]+)", path))]


def check_once(sources: Sequence[Source]) -> None:
    """Find an array that is named twice, by whatever paths: of one file, which may have several names.

    Raises:
        InputError: there is one, or a file is gone.
    """
    seen: dict[tuple[int, int, str], str] = {}
    for source in sources:
        path = path_of(source.spec)
        try:
            found = os.stat(path)
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {reason(error)}") from error
        other = seen.setdefault((found.st_dev, found.st_ino, source.name), source.spec)
        if other is not source.spec:
            raise InputError(f"{source.spec}: named twice" + (f", also as {other}" if other != source.spec else ""))


def describe(spec: str) -> Source:
    """Read what an array is, without its data where the format allows that.

    Raises:
        InputError: no such file or array, not readable, not of its format, or of a dtype torch does not have.
    """
    with opened(spec) as array:
        return Source(spec, array.shape, array.dtype, array.name)


def load(spec: str, by_library: bool = False) -> Tensor:
    """Read an array as a CPU tensor, of native byte order. Raises as :func:`describe` does."""
    with opened_by_library(spec) if by_library else opened(spec) as array:
        x = torch.empty(array.shape, dtype=array.dtype, device="cpu")
        array.read(layout.whole(array.shape), x, limits.WINDOW)
        return x


@contextmanager
def opened(spec: str) -> Iterator[Opened]:
    """An array in an open file; every failure, also to read a part of it, is an InputError."""
    with _opened(spec, lambda path, name: FORMATS[Path(path).suffix].opened(path, name)) as array:
        if array.dtype not in DTYPES:
            raise InputError(f"{spec}: holds {array.dtype}, which cannot be moved")
        yield array


def opened_by_library(spec: str) -> AbstractContextManager[Opened]:
    """An array in an open file, read by its format's own library: to compare with what :func:`opened` reads."""
    return _opened(spec, libraries.opened)


@contextmanager
def _opened(spec: str, how: Callable[[str, str | None], AbstractContextManager[Opened]]) -> Iterator[Opened]:
    path, name = _split(spec)
    if Path(path).suffix not in FORMATS:
        raise InputError(f"{path}: unknown suffix {Path(path).suffix!r}; expected one of {', '.join(FORMATS)}")
    try:
        check_regular(path)
        with how(path, name) as array:
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
        if os.path.exists(path) and os.path.samefile(path, path_of(spec)):
            raise InputError(f"{path}: is also an input, which it would replace")
    try:
        check_target(target, nbytes)
    except FileError as error:
        raise InputError(str(error)) from error


def path_of(spec: str) -> str:
    """The file in which an array is."""
    return _split(spec)[0]


def _split(spec: str) -> tuple[str, str | None]:
    """The path and the name: a file of the whole text comes first, then the longest path that there is."""
    colons = [match.start("colon") for match in _NAMED.finditer(spec)][::-1]
    if not colons or os.path.lexists(spec):
        return spec, None
    at = next((i for i in colons if os.path.lexists(spec[:i])), colons[0])
    return spec[:at], spec[at + 1 :]
