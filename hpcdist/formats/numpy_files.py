"""The formats of numpy: .npy, one array; .npz, an archive of arrays by name, which numpy reads whole."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from hpcdist.errors import FileError
from hpcdist.formats.contents import Contents, Dataset, FileMap, Format, Slices, Stored, identity
from hpcdist.formats.hdf5 import NUMPY, stored_dtype
from hpcdist.formats.paths import file_errors
from hpcdist.formats.plain import Raw
from hpcdist.layout import Box
from hpcdist.process import machine

_HEADER = 2**16  # bytes; numpy itself takes 10,000


class _Npy(Format):
    dtypes = NUMPY

    def describe(self, path: str) -> Contents:
        at = identity(path)
        with _reading(path), open(path, "rb") as file:
            _check_header(path, file)
            array = np.lib.format.open_memmap(path, mode="r")
        dtype, plain = _dtype_of(path, array), array.dtype.isnative and array.flags.c_contiguous
        raw = Raw(path, array.offset, array.shape, dtype) if plain else None
        return Contents(path, ".npy file", {"": Stored("", array.shape, dtype, raw)}, {path: at})

    def by_library(self, path: str, stored: Stored) -> Slices:
        def read(box: Box) -> Tensor:  # opened for each box, since what is mapped stays in memory
            with _reading(path):
                return _tensor(np.lib.format.open_memmap(path, mode="r")[box.slices()])

        return read

    def create(self, path: Path, datasets: Sequence[Dataset], attrs: Mapping[str, Any]) -> FileMap:
        (array,) = datasets
        descr = np.lib.format.dtype_to_descr(stored_dtype(array.dtype))
        with path.open("r+b") as file:
            np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": array.shape})
            start = file.tell()
            file.truncate(start + array.nbytes())
        return FileMap.of(path, [start])


class _Npz(Format):
    def describe(self, path: str) -> Contents:
        """As :meth:`Format.describe`; numpy reads an array to tell its shape."""
        at, tensors = identity(path), {}
        with _reading(path), np.load(path, allow_pickle=False) as held:
            names = [name for name in held.files if f"{name}.npy" in held.zip.namelist()]
        for name in names:
            array = _array(path, name)
            tensors[name] = Stored(name, array.shape, _dtype_of(path, array))
        return Contents(path, ".npz file", tensors, {path: at})

    def by_library(self, path: str, stored: Stored) -> Slices:
        array = _array(path, stored.name)
        return lambda box: _tensor(array[box.slices()])


NPY, NPZ = _Npy(), _Npz()


@contextmanager
def _reading(path: str) -> Iterator[None]:
    """Make a FileError of every error of numpy."""
    with file_errors(path), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it was written by Python 2
        yield


def _array(path: str, name: str) -> Any:
    """Read an array of an archive; a FileError if memory cannot hold it, which a few bytes may unpack to."""
    with _reading(path), np.load(path, allow_pickle=False) as held:
        machine.require(path, held.zip.getinfo(f"{name}.npy").file_size)
        with held.zip.open(f"{name}.npy") as file:
            _check_header(path, file)
        return held[name]


def _check_header(path: str, file: IO[bytes]) -> None:
    """Raise a FileError for a header of forged length, which numpy would read before it looks at the length."""
    start = file.read(12)
    size = int.from_bytes(start[8:10] if start[6:7] == b"\1" else start[8:], "little")
    if start.startswith(b"\x93NUMPY") and size > _HEADER:
        what = f"its header has {size:,} bytes, more than the expected {_HEADER:,}"
        raise FileError("HD402", f"{path}: cannot be read: {what}")


def _tensor(some: Any) -> Tensor:
    return torch.from_numpy(np.array(some, some.dtype.newbyteorder("="), order="C"))


def _dtype_of(path: str, array: Any) -> torch.dtype:
    try:
        return torch.from_numpy(np.empty(0, array.dtype.newbyteorder("="))).dtype
    except TypeError:
        raise FileError("HD511", f"{path}: holds dtype {array.dtype}, which torch does not have") from None
