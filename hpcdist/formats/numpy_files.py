"""The formats of numpy: .npy, one array; .npz, an archive of arrays by name, which numpy reads whole."""

from __future__ import annotations

import io
import os
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from hpcdist.errors import FileError
from hpcdist.formats.archives import members
from hpcdist.formats.contents import Contents, Dataset, FileMap, Format, Slices, Stored, identity
from hpcdist.formats.hdf5 import LACKING, NUMPY, stored_dtype, tensor_dtype, type_text
from hpcdist.formats.paths import file_errors
from hpcdist.formats.plain import Raw
from hpcdist.layout import Box
from hpcdist.process import machine

_HEADER = 2**16  # bytes; numpy itself takes 10,000
_MAGIC = b"\x93NUMPY"
_SUFFIX = ".npy"


class _Npy(Format):
    dtypes = NUMPY

    def describe(self, path: str) -> Contents:
        at = identity(path)
        with file_errors(path), open(path, "rb") as file:
            stored, more = _header(path, "", file, at.size)
            if more > 0:
                file.seek(-more, os.SEEK_END)
            if more and file.read(len(_MAGIC)) != _MAGIC:  # np.save() may have written another one after it
                raise FileError("HD404", f"{path}: cannot be read: {more:,} bytes follow its data")
        return Contents.of(path, ".npy file", {"": stored}, {path: at})

    def by_library(self, path: str, stored: Stored) -> Slices:
        def read(box: Box) -> Tensor:  # opened for each box, since what is mapped stays in memory
            with _quiet():
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
        at, found = identity(path), dict[str, Stored | str]()
        with file_errors(path), zipfile.ZipFile(path) as archive:
            for info, _ in members(path, archive):
                if not info.filename.endswith(_SUFFIX):
                    found.setdefault(info.filename, f"its name in the archive does not end with {_SUFFIX}")
                    continue
                key = info.filename.removesuffix(_SUFFIX)
                with file_errors(f"{path}: {key}"), archive.open(info) as file:
                    stored, more = _header(f"{path}: {key}", key, file, info.file_size)
                found[key] = (
                    stored if isinstance(stored, str) else replace(stored, raw=None, chunk=max((1, *stored.shape[:1])))
                )
                if more:
                    raise FileError("HD404", f"{path}: {key}: cannot be read: {more:,} bytes follow its data")
        return Contents.of(path, ".npz file", found, {path: at})

    def by_library(self, path: str, stored: Stored) -> Slices:
        """As :meth:`Format.by_library`; a FileError if memory cannot hold the whole array, which a few bytes may
        unpack to."""
        machine.require(path, stored.nbytes())
        with zipfile.ZipFile(path) as archive, archive.open(f"{stored.name}{_SUFFIX}") as file, _quiet():
            array = np.lib.format.read_array(file, allow_pickle=False)
        return lambda box: _tensor(array[box.slices()])


NPY, NPZ = _Npy(), _Npz()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without numpy's warning of a file that was written by Python 2."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _tensor(some: Any) -> Tensor:
    return torch.from_numpy(np.array(some, some.dtype.newbyteorder("="), order="C"))


def _header(path: str, name: str, file: IO[bytes], length: int) -> tuple[Stored | str, int]:
    """An array as the header of an .npy file, or of a member of an .npz file, describes it, or why no tensor can hold
    it; and how many bytes follow its data.

    Args:
        path: for messages. length: of the file or the member.
    """
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise FileError("HD402", f"{path}: cannot be read: version {version} of the format is not known")
    number = file.read(2 if version == (1, 0) else 4)
    size = int.from_bytes(number, "little")
    if size > _HEADER:  # numpy would read it all before it looks at the length
        what = f"its header has {size:,} bytes, more than the expected {_HEADER:,}"
        raise FileError("HD402", f"{path}: cannot be read: {what}")
    header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    with _quiet():
        shape, fortran, dtype = header(io.BytesIO(number + file.read(size)))
    if any(not 0 <= extent < 2**63 for extent in shape):
        raise FileError("HD402", f"{path}: cannot be read: shape {shape}")
    kind = tensor_dtype(dtype)
    if kind is None:
        return type_text(dtype) + LACKING, 0
    plain = dtype.newbyteorder("=") == dtype and not (fortran and len(shape) > 1)
    stored = Stored(name, shape, kind, Raw(path, file.tell(), shape, kind) if plain else None)
    more = length - file.tell() - stored.nbytes()
    if more < 0:
        raise FileError("HD404", f"{path}: cannot be read: it ends in the middle of its data")
    return stored, more
