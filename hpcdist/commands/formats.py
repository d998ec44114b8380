"""What each file format is to us: how its arrays are read a box at a time, and how a new file is laid out.

Of most formats an array is plain bytes at an offset (:class:`hpcdist.files.raw.Raw`), and the own library of each says
where. A file that is laid out has its full size and its headers, and only the bytes of the array are missing.
"""

from __future__ import annotations

import io
import json
import os
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from hpcdist import layout
from hpcdist.commands import checkpoints
from hpcdist.commands.arrays import Opened, pick
from hpcdist.errors import InputError
from hpcdist.files.h5 import NUMPY, stored_dtype
from hpcdist.files.raw import Raw, read_at, read_from
from hpcdist.files.regular import open_regular, utf8_path
from hpcdist.layout import Box
from hpcdist.staging.contents import Stored, describe, read_box
from hpcdist.staging.reader import Reader, opened
from hpcdist.tensors.storage import BARE, DTYPES

__all__ = ["FORMATS", "of_raw", "stored_in"]

_SAFETENSORS = set(DTYPES) - {torch.complex128, torch.complex32, *BARE}
_NPY_HEADER = 2**16  # bytes; numpy itself takes 10,000
_PT = {d for d in DTYPES if d not in BARE or not re.fullmatch(r"torch\.u?int\d", str(d))}  # torch.load has no others


@dataclass(frozen=True)
class Format:
    """A file format: how to open an array in a file, the dtypes it can hold, and how to lay out a new file for one.

    `lay_out` makes the file of an array "data" and says where its bytes go; None if the format is read only.
    """

    opened: Callable[[str, str | None], Any]
    dtypes: set[torch.dtype]
    lay_out: Callable[[Path, tuple[int, ...], torch.dtype], Raw] | None


@contextmanager
def of_raw(where: Raw, name: str = "") -> Iterator[Opened]:
    """An array that lies in a file as plain bytes."""
    fd = open_regular(where.path)
    try:
        yield Opened(name, where.shape, where.dtype, partial(where.read, partial(read_at, fd)))
    finally:
        os.close(fd)


def _npy_header(path: str, file: IO[bytes]) -> Raw:
    """Where the array of an .npy file, or of a member of an .npz file, lies behind its header."""
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise InputError(f"{path}: cannot be read: version {version} of the format is not known")
    length = file.read(2 if version == (1, 0) else 4)
    size = int.from_bytes(length, "little")
    if size > _NPY_HEADER:  # numpy would read it all before it looks at the length
        raise InputError(f"{path}: cannot be read: its header has {size:,} bytes, {_NPY_HEADER:,} at most are expected")
    header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it was written by Python 2
        shape, fortran, dtype = header(io.BytesIO(length + file.read(size)))
    if any(not 0 <= extent < 2**63 for extent in shape):
        raise InputError(f"{path}: cannot be read: shape {shape}")
    if dtype.hasobject:
        raise InputError(f"{path}: cannot be read: it holds Python objects")
    try:
        if dtype.subdtype is not None:  # numpy would make more dims of it
            raise TypeError("an array of arrays")
        kind = torch.from_numpy(np.empty(0, dtype.newbyteorder("="))).dtype
    except TypeError:
        raise InputError(f"{path}: holds dtype {dtype}, which torch does not have") from None
    swapped = dtype.newbyteorder("=") != dtype
    return Raw(path, file.tell(), shape, kind, swapped, bool(fortran))


@contextmanager
def _read_npy(path: str, name: str | None) -> Iterator[Opened]:
    with open(path, "rb") as file:
        where = _npy_header(path, file)
    if where.offset + where.nbytes() > os.path.getsize(path):
        raise InputError(f"{path}: cannot be read: it ends in the middle of its data")
    with of_raw(where) as opened:
        yield opened


@contextmanager
def _read_npz(path: str, name: str | None) -> Iterator[Opened]:
    with zipfile.ZipFile(path) as archive:
        members = [n.removesuffix(".npy") for n in dict.fromkeys(archive.namelist()) if n.endswith(".npy")]
        key = pick(path, name, members)
        with archive.open(f"{key}.npy") as file:
            where = _npy_header(path, file)
            if where.offset + where.nbytes() > archive.getinfo(f"{key}.npy").file_size:
                raise InputError(f"{path}: cannot be read: {key} ends in the middle of its data")
            yield Opened(key, where.shape, where.dtype, partial(where.read, partial(read_from, file)))


@contextmanager
def _read_pt(path: str, name: str | None) -> Iterator[Opened]:
    with checkpoints.opened(path, name) as opened:
        yield opened


@contextmanager
def _read_safetensors(path: str, name: str | None) -> Iterator[Opened]:
    from safetensors import safe_open

    with utf8_path(path) as known, safe_open(known, framework="pt") as file:  # checks the whole header
        key = pick(path, name, sorted(file.keys()))
        part = file.get_slice(key)
        shape = tuple(part.get_shape())
        dtype = (part[:0] if shape else file.get_tensor(key)).dtype  # as torch's; the format has names of its own
    start, header = _safetensors_header(path)
    with of_raw(Raw(path, start + header[key]["data_offsets"][0], shape, dtype), key) as opened:
        yield opened


def _safetensors_header(path: str) -> tuple[int, dict[str, Any]]:
    """Where the data begin, and the header: 8 bytes of its length, and JSON."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return 8 + size, json.loads(file.read(size))


@contextmanager
def _read_h5(path: str, name: str | None) -> Iterator[Opened]:
    stored = stored_in(path, name)
    if stored.pieces is not None:
        with opened(path) as fd:
            yield Opened(stored.place, stored.shape, stored.dtype, _Checked(path, fd, stored).read)
    elif stored.raw is not None:
        with of_raw(stored.raw, stored.place) as array:
            yield array
    else:
        with opened(path) as fd:
            yield Opened(stored.place, stored.shape, stored.dtype, partial(read_box, path, stored.place, fd=fd))


class _Checked:
    """A tensor that hpcdist has written: every piece of which something is read is compared with its checksum, once."""

    def __init__(self, path: str, fd: int, stored: Stored) -> None:
        self._path, self._fd, self._stored = path, fd, stored
        self._checked: set[int] = set()

    def read(self, box: Box, out: Tensor, window: int) -> None:
        """Fill a CPU tensor; a FileError that names the piece if it is damaged."""
        reader = Reader(self._path, self._fd, self._stored, window, None)
        # What is read whole is compared on the way: pieces of a run, and those that only HDF5 can read.
        on_the_way = self._stored.raw is None or layout.runs(box, self._stored.shape)[1] == 1
        for row in self._stored.boxes.intersecting(box).tolist():
            piece = self._stored.boxes[row]
            if row not in self._checked and not (on_the_way and piece.intersect(box) == piece):
                reader.check(row)
            self._checked.add(row)
        reader.read(box, out)


def stored_in(path: str, name: str | None) -> Stored:
    """The dataset of an .h5 file that is meant.

    Raises:
        InputError, FileError: there is none, it is not the only one, or its data are in other files.
    """
    key = name and name.strip("/")
    contents = describe(path, name=key)
    found = pick(path, key, [*contents.datasets, *contents.elsewhere])
    if found in contents.elsewhere:
        contents.require(found)
    return contents.datasets[found]


def _lay_out_npy(path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Raw:
    header = {"descr": np.lib.format.dtype_to_descr(stored_dtype(dtype)), "fortran_order": False, "shape": shape}
    with path.open("r+b") as file:
        np.lib.format.write_array_header_1_0(file, header)
        where = Raw(str(path), file.tell(), shape, dtype)
        file.truncate(where.offset + where.nbytes())
    return where


def _lay_out_pt(path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Raw:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), torch.serialization.skip_data(materialize_fake_tensors=True):  # all but the data
        torch.save(torch.empty(shape, dtype=dtype, device="cpu"), path)
    with FakeTensorMode():
        offset = torch.load(path, weights_only=True, map_location="cpu").untyped_storage()._checkpoint_offset
    return Raw(str(path), offset or 0, shape, dtype)


def _lay_out_safetensors(path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Raw:
    from safetensors.torch import save

    # The library cannot write a header without the data: that of a small tensor, with the shape changed.
    small = save({"data": torch.empty(1, dtype=dtype, device="cpu")})
    entry = json.loads(small[8 : 8 + int.from_bytes(small[:8], "little")])["data"]
    nbytes = Raw("", 0, shape, dtype).nbytes()
    header = json.dumps({"data": entry | {"shape": shape, "data_offsets": [0, nbytes]}}).encode()
    header += b" " * (-len(header) % 8)
    with path.open("r+b") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + nbytes)
    return Raw(str(path), 8 + len(header), shape, dtype)


FORMATS = {
    ".npy": Format(_read_npy, NUMPY, _lay_out_npy),
    ".npz": Format(_read_npz, set(), None),
    ".pt": Format(_read_pt, _PT, _lay_out_pt),
    ".safetensors": Format(_read_safetensors, _SAFETENSORS, _lay_out_safetensors),
    ".h5": Format(_read_h5, set(DTYPES), None),  # written by hpcdist.staging
}
