"""Arrays in files, as the commands name them: .npy, .npz, .pt, .safetensors and .h5, chosen by the suffix."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from hpcdist.commands import libraries
from hpcdist.commands.formats import FORMATS, open_raw
from hpcdist.errors import FileError, InputError, reason
from hpcdist.files.commit import check_target
from hpcdist.files.raw import Raw
from hpcdist.files.regular import check_regular
from hpcdist.staging.reader import Reader
from hpcdist.tensors.storage import DTYPES

__all__ = [
    *("OUTPUTS", "Source", "check_once", "check_output", "describe"),
    *("expand", "load", "open_array", "open_bytes", "path_of"),
]

OUTPUTS = (".npy", ".pt", ".safetensors", ".h5")
_NAMED = re.compile(r"\.(?:npz|pt|safetensors|h5)(?P<colon>:)(?=.)", re.DOTALL)


@dataclass(frozen=True)
class Source:
    """One array in one file, as its header describes it.

    Attributes:
        spec: the user's name for it: the path, and after a colon the array's name where the file may hold several.
        shape, dtype: of the array.
        name: name of the array in the file, given or not.
    """

    spec: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    name: str = field(default="", compare=False)

    def extent(self, dim: int) -> int:
        """Its length along `dim`; a 0-d array counts as one row."""
        return self.shape[dim] if self.shape else 1


def expand(inputs: Sequence[str]) -> list[str]:
    """Expand names and patterns into files; a name after a colon is applied to each file.

    They come in the order given; the files that a pattern matches in natural order, s2 before s10.

    Raises:
        InputError: a pattern that matches nothing.
    """
    specs: list[str] = []
    for given in inputs:
        path, name = _split(given)
        paths = [path] if os.path.lexists(path) else sorted(glob.glob(path, recursive=True), key=_natural)
        if not paths:
            raise InputError(
                "HD401", f"{path}: no such file" + (", and no file matches" if glob.has_magic(path) else "")
            )
        specs += [p if name is None else f"{p}:{name}" for p in paths]
    return specs


def _natural(path: str) -> list[tuple[int, str]]:
    """A key that sorts the numbers within names as numbers."""
    return [(int(part) if i % 2 else -1, part) for i, part in enumerate(re.split("([0-9]+)", path))]


def check_once(sources: Sequence[Source]) -> None:
    """Check that no array is named twice, under whatever names the file has.

    Raises:
        InputError: one is, or a file is gone.
    """
    seen: dict[tuple[int, int, str], str] = {}
    for source in sources:
        path = path_of(source.spec)
        try:
            found = os.stat(path)
        except OSError as error:
            raise InputError("HD402", f"{path}: cannot be read: {reason(error)}") from error
        other = seen.setdefault((found.st_dev, found.st_ino, source.name), source.spec)
        if other is not source.spec:
            raise InputError(
                "HD507", f"{source.spec}: named twice" + (f", also as {other}" if other != source.spec else "")
            )


def describe(spec: str) -> Source:
    """Read the header of an array, without its data where the format allows that.

    Raises:
        InputError: no such file or array, not readable, not of its format, or of a dtype torch does not have.
    """
    with open_array(spec) as array:
        return Source(spec, array.shape, array.dtype, array.name)


def load(spec: str, by_library: bool = False) -> Tensor:
    """Read an array as a CPU tensor. Raises as :func:`describe` does."""
    with open_array(spec, by_library) as array:
        return array.whole()


@contextmanager
def open_array(spec: str, by_library: bool = False) -> Iterator[Reader]:
    """Open an array of a file; every failure, also to read a part of it, becomes an InputError.

    Args:
        by_library: whether the format's own library reads it, for a comparison with what the commands read.
    """
    path, name = _split(spec)
    if Path(path).suffix not in FORMATS:
        raise InputError("HD501", f"{path}: unknown suffix {Path(path).suffix!r}; expected one of {', '.join(FORMATS)}")
    opener = libraries.open_array if by_library else FORMATS[Path(path).suffix].open_array
    try:
        check_regular(path)
        with opener(path, name) as array:
            if array.dtype not in DTYPES:
                raise InputError("HD503", f"{spec}: holds {array.dtype}, which cannot be moved")
            yield array
    except InputError:
        raise
    except FileError as error:
        raise InputError("HD402", str(error)) from error
    except Exception as error:  # each library has errors of its own for a damaged file
        raise InputError("HD402", f"{path}: cannot be read: {reason(error)}") from error


def open_bytes(path: str) -> AbstractContextManager[Reader]:
    """Open a file of any kind as an array of its bytes."""
    return open_raw(Raw(path, 0, (os.path.getsize(path),), torch.uint8))


def check_output(path: str, dtype: torch.dtype, nbytes: int, inputs: Sequence[str] = ()) -> None:
    """Check before any data move that a tensor can be written to `path`.

    `inputs` are files that must survive; `path` must be none of them.

    Raises:
        InputError: unknown suffix, no such folder, not writable, no space for `nbytes`, or a format without `dtype`.
    """
    target = Path(path)
    if target.suffix not in OUTPUTS:
        raise InputError("HD501", f"{path}: unknown suffix {target.suffix!r}; expected one of {', '.join(OUTPUTS)}")
    if dtype not in FORMATS[target.suffix].dtypes:
        others = [suffix for suffix in OUTPUTS if dtype in FORMATS[suffix].dtypes]
        raise InputError("HD418", f"{path}: a {target.suffix} file cannot hold {dtype}; use one of {', '.join(others)}")
    for spec in inputs:
        if os.path.exists(path) and os.path.samefile(path, path_of(spec)):
            raise InputError("HD507", f"{path}: is also an input, which it would replace")
    try:
        check_target(path, nbytes)
    except FileError as error:
        raise InputError("HD402", str(error)) from error


def path_of(spec: str) -> str:
    """The path of the file that holds an array."""
    return _split(spec)[0]


def _split(spec: str) -> tuple[str, str | None]:
    """Split into path and name: a file named by the whole text comes first, then the longest path that exists."""
    colons = [match.start("colon") for match in _NAMED.finditer(spec)][::-1]
    if not colons or os.path.lexists(spec):
        return spec, None
    at = next((i for i in colons if os.path.lexists(spec[:i])), colons[0])
    return spec[:at], spec[at + 1 :]
