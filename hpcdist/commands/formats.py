"""The file formats of the commands: how arrays are read a box at a time, and how a new file is laid out.

In most formats an array is plain bytes at an offset (:class:`hpcdist.files.raw.Raw`), which the format's own library
finds. A file that is laid out has its full size and its headers; only the bytes of the array are missing.
"""

from __future__ import annotations

import io
import os
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from hpcdist.commands import checkpoints
from hpcdist.commands.checkpoints import pick
from hpcdist.errors import InputError
from hpcdist.files import safetensors
from hpcdist.files.h5 import NUMPY, Dataset, stored_dtype
from hpcdist.files.raw import Raw, read_at, read_from
from hpcdist.files.regular import open_regular, utf8_path
from hpcdist.staging.catalog import Stored, describe
from hpcdist.staging.reader import DatasetReader, Reader
from hpcdist.tensors.storage import BARE, DTYPES

__all__ = ["FORMATS", "names_folder", "open_raw", "stored_in"]

_NPY_HEADER = 2**16  # bytes; numpy itself takes 10,000
_PT = {d for d in DTYPES if d not in BARE or not re.fullmatch(r"torch\.u?int\d", str(d))}  # torch.load has no others


@dataclass(frozen=True)
class Format:
    """A file format of arrays.

    Attributes:
        open_array: opens an array of a file, given its path, and its name or None.
        dtypes: dtypes that the format can hold.
        lay_out: lays out a file with one dataset, in a list, and returns the position of its bytes, in a list; None for
            a format that is only read, or written by :mod:`hpcdist.staging`.
    """

    open_array: Callable[[str, str | None], Any]
    dtypes: set[torch.dtype]
    lay_out: Callable[[Path, Sequence[Dataset]], list[int]] | None


@contextmanager
def open_raw(where: Raw, name: str = "") -> Iterator[Reader]:
    """Open an array that is plain bytes in a file."""
    with open_regular(where.path) as fd:
        yield Reader(name, where.shape, where.dtype, partial(where.read, partial(read_at, fd)))


def _npy_header(path: str, file: IO[bytes]) -> Raw:
    """The position of the array of an .npy file, or of a member of an .npz file, after its header."""
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise InputError("HD402", f"{path}: cannot be read: version {version} of the format is not known")
    length = file.read(2 if version == (1, 0) else 4)
    size = int.from_bytes(length, "little")
    if size > _NPY_HEADER:  # numpy would read it all before it looks at the length
        raise InputError(
            "HD402", f"{path}: cannot be read: its header has {size:,} bytes, {_NPY_HEADER:,} at most are expected"
        )
    header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it was written by Python 2
        shape, fortran, dtype = header(io.BytesIO(length + file.read(size)))
    if any(not 0 <= extent < 2**63 for extent in shape):
        raise InputError("HD402", f"{path}: cannot be read: shape {shape}")
    if dtype.hasobject:
        raise InputError("HD402", f"{path}: cannot be read: it holds Python objects")
    try:
        if dtype.subdtype is not None:  # numpy would make more dims of it
            raise TypeError("an array of arrays")
        kind = torch.from_numpy(np.empty(0, dtype.newbyteorder("="))).dtype
    except TypeError:
        raise InputError("HD503", f"{path}: holds dtype {dtype}, which torch does not have") from None
    swapped = dtype.newbyteorder("=") != dtype
    return Raw(path, file.tell(), shape, kind, swapped, bool(fortran))


@contextmanager
def _open_npy(path: str, name: str | None) -> Iterator[Reader]:
    with open(path, "rb") as file:
        where = _npy_header(path, file)
    if where.offset + where.nbytes() > os.path.getsize(path):
        raise InputError("HD404", f"{path}: cannot be read: it ends in the middle of its data")
    with open_raw(where) as array:
        yield array


@contextmanager
def _open_npz(path: str, name: str | None) -> Iterator[Reader]:
    with zipfile.ZipFile(path) as archive:
        members = [n.removesuffix(".npy") for n in dict.fromkeys(archive.namelist()) if n.endswith(".npy")]
        key = pick(path, name, members)
        with archive.open(f"{key}.npy") as file:
            where = _npy_header(path, file)
            if where.offset + where.nbytes() > archive.getinfo(f"{key}.npy").file_size:
                raise InputError("HD404", f"{path}: cannot be read: {key} ends in the middle of its data")
            yield Reader(key, where.shape, where.dtype, partial(where.read, partial(read_from, file)))


@contextmanager
def _open_safetensors(path: str, name: str | None) -> Iterator[Reader]:
    from safetensors import safe_open

    with utf8_path(path) as known, safe_open(known, framework="pt") as file:  # checks the whole header
        key = pick(path, name, sorted(file.keys()))
        part = file.get_slice(key)
        shape = tuple(part.get_shape())
        dtype = (part[:0] if shape else file.get_tensor(key)).dtype  # as torch's; the format has names of its own
    start, header = safetensors.header_of(path)
    with open_raw(Raw(path, start + header[key]["data_offsets"][0], shape, dtype), key) as array:
        yield array


@contextmanager
def _open_h5(path: str, name: str | None) -> Iterator[Reader]:
    stored = stored_in(path, name)
    with open_regular(path) as fd:
        # Every piece of which something is read is compared with its checksum, once.
        yield Reader(stored.place, stored.shape, stored.dtype, DatasetReader(path, fd, stored, verify=True).read)


def stored_in(path: str, name: str | None) -> Stored:
    """Find the dataset of an .h5 file that `name` refers to.

    Raises:
        InputError, FileError: there is no such dataset, or more than one, or its data are in other files.
    """
    key = name and name.strip("/")
    catalog = describe(path, name=key)
    found = pick(path, key, [*catalog.datasets, *catalog.external])
    if found in catalog.external:
        catalog.require(found)
    return catalog.datasets[found]


def _lay_out_npy(path: Path, datasets: Sequence[Dataset]) -> list[int]:
    (array,) = datasets
    descr = np.lib.format.dtype_to_descr(stored_dtype(array.dtype))
    with path.open("r+b") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": array.shape})
        start = file.tell()
        file.truncate(start + array.nbytes())
    return [start]


def _lay_out_pt(path: Path, datasets: Sequence[Dataset]) -> list[int]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    (array,) = datasets
    with FakeTensorMode(), torch.serialization.skip_data(materialize_fake_tensors=True):  # all but the data
        torch.save(torch.empty(array.shape, dtype=array.dtype, device="cpu"), path)
    with FakeTensorMode():
        return [torch.load(path, weights_only=True, map_location="cpu").untyped_storage()._checkpoint_offset or 0]


FORMATS = {
    ".npy": Format(_open_npy, NUMPY, _lay_out_npy),
    ".npz": Format(_open_npz, set(), None),
    ".pt": Format(checkpoints.open_array, _PT, _lay_out_pt),
    ".safetensors": Format(_open_safetensors, safetensors.KINDS, safetensors.lay_out),
    ".h5": Format(_open_h5, set(DTYPES), None),
}


def names_folder(output: str) -> bool:
    """Whether an output is a folder, which has the parts of a checkpoint."""
    return output.endswith("/") or os.path.isdir(output)
