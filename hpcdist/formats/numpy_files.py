"""The formats of numpy: .npy, one array; .npz, an archive of arrays by name, which numpy reads whole."""

from __future__ import annotations

import io
import warnings
import zipfile
from collections.abc import Mapping, Sequence
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
        with file_errors(path), open(path, "rb") as file:
            stored, _ = _header(path, "", file)
            if stored.nbytes() > at.size - file.tell():
                raise FileError("HD404", f"{path}: cannot be read: it ends in the middle of its data")
        return Contents(path, ".npy file", {"": stored}, {path: at})

    def by_library(self, path: str, stored: Stored) -> Slices:
        def read(box: Box) -> Tensor:  # opened for each box, since what is mapped stays in memory
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it was written by Python 2
                return _tensor(np.load(path, mmap_mode="r", allow_pickle=False)[box.slices()])

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
        at, tensors = identity(path), {}
        with file_errors(path), zipfile.ZipFile(path) as archive:
            for member in dict.fromkeys(archive.namelist()):
                if member.endswith(".npy"):
                    key = member.removesuffix(".npy")
                    with archive.open(member) as file:
                        stored, begin = _header(path, key, file)
                    if begin + stored.nbytes() > archive.getinfo(member).file_size:
                        raise FileError("HD404", f"{path}: cannot be read: {key} ends in the middle of its data")
                    tensors[key] = Stored(key, stored.shape, stored.dtype)
        return Contents(path, ".npz file", tensors, {path: at})

    def by_library(self, path: str, stored: Stored) -> Slices:
        """As :meth:`Format.by_library`; a FileError if memory cannot hold the whole array, which a few bytes may
        unpack to."""
        machine.require(path, stored.nbytes())
        with (
            file_errors(f"{path}: {stored.name}"),
            np.load(path, allow_pickle=False) as held,
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # it was written by Python 2
            array = held[stored.name]
        return lambda box: _tensor(array[box.slices()])


NPY, NPZ = _Npy(), _Npz()


def _tensor(some: Any) -> Tensor:
    return torch.from_numpy(np.array(some, some.dtype.newbyteorder("="), order="C"))


def _header(path: str, name: str, file: IO[bytes]) -> tuple[Stored, int]:
    """An array as the header of an .npy file, or of a member of an .npz file, describes it; where its data begin."""
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise FileError("HD402", f"{path}: cannot be read: version {version} of the format is not known")
    length = file.read(2 if version == (1, 0) else 4)
    size = int.from_bytes(length, "little")
    if size > _HEADER:  # numpy would read it all before it looks at the length
        what = f"its header has {size:,} bytes, more than the expected {_HEADER:,}"
        raise FileError("HD402", f"{path}: cannot be read: {what}")
    header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it was written by Python 2
        shape, fortran, dtype = header(io.BytesIO(length + file.read(size)))
    if any(not 0 <= extent < 2**63 for extent in shape):
        raise FileError("HD402", f"{path}: cannot be read: shape {shape}")
    if dtype.hasobject:
        raise FileError("HD402", f"{path}: cannot be read: it holds Python objects")
    try:
        if dtype.subdtype is not None:  # numpy would make more dims of it
            raise TypeError("an array of arrays")
        kind = torch.from_numpy(np.empty(0, dtype.newbyteorder("="))).dtype
    except TypeError:
        raise FileError("HD511", f"{path}: holds dtype {dtype}, which torch does not have") from None
    plain = dtype.newbyteorder("=") == dtype and not (fortran and len(shape) > 1)
    raw = Raw(path, file.tell(), shape, kind) if plain else None
    return Stored(name, shape, kind, raw), file.tell()
