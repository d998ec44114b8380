"""What each file format is to us: how its arrays are read a box at a time, and how a new file is laid out.

Of most formats an array is plain bytes at an offset (:class:`hpcdist.raw.Raw`), and each format's own library says
where. A file that is laid out has its full size and its headers, and only the bytes of the array are missing.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from hpcdist.buffers import DTYPES
from hpcdist.errors import InputError
from hpcdist.layout import Box
from hpcdist.raw import Raw, bits, read_at
from hpcdist.regular import open_regular
from hpcdist.staging.contents import describe, read_box
from hpcdist.staging.format import NUMPY, stored_dtype

__all__ = ["FORMATS", "Opened", "of_raw"]

_SAFETENSORS = set(DTYPES) - {torch.complex128, torch.complex32}


@dataclass(frozen=True)
class Opened:
    """An array in an open file.

    Attributes:
        shape, dtype: of the array.
        read: fills a CPU tensor with a box of it, in host memory of at most so many bytes: read(box, out, window).
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[Box, Tensor, int], None]


@dataclass(frozen=True)
class Format:
    """A file format: how to open an array in a file, the dtypes it can hold, and how to lay out a new file for one.

    `lay_out` makes the file of an array "data" and says where its bytes go; None if the format is read only.
    """

    opened: Callable[[str, str | None], Any]
    dtypes: set[torch.dtype]
    lay_out: Callable[[Path, tuple[int, ...], torch.dtype], Raw] | None


def _shown(names: Sequence[str]) -> str:
    """The first of some names."""
    return ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")


def _pick(path: str, name: str | None, names: Sequence[str]) -> str:
    """The array that is meant: the one that is named, or the only one."""
    if name is not None:
        if name not in names:
            raise InputError(f"{path}: holds no array {name!r}; it has: {_shown(names)}")
        return name
    if len(names) != 1:
        raise InputError(f"{path}: holds {len(names)} arrays; name one as {path}:NAME; it has: {_shown(names)}")
    return names[0]


@contextmanager
def of_raw(where: Raw) -> Iterator[Opened]:
    """An array that lies in a file as plain bytes."""
    fd = open_regular(where.path)
    try:
        yield Opened(where.shape, where.dtype, partial(where.read, partial(read_at, fd)))
    finally:
        os.close(fd)


def _npy_header(path: str, file: IO[bytes]) -> Raw:
    """Where the array of an .npy file, or of a member of an .npz file, lies behind its header."""
    magic = np.lib.format.read_magic(file)
    header = np.lib.format.read_array_header_1_0 if magic == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = header(file)
    if dtype.hasobject:
        raise InputError(f"{path}: cannot be read: it holds Python objects")
    try:
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
        members = [n.removesuffix(".npy") for n in archive.namelist()]
        with archive.open(_pick(path, name, members) + ".npy") as file:
            where = _npy_header(path, file)
            yield Opened(where.shape, where.dtype, partial(where.read, partial(_from_stream, file)))


def _from_stream(file: IO[bytes], offset: int, into: memoryview) -> None:
    """Fill memory from a file that may have to be decompressed up to there."""
    file.seek(offset)
    done = 0
    while done < len(into):
        got = file.readinto(into[done : done + 2**20])  # type: ignore[attr-defined]
        if not got:
            raise EOFError("it ends in the middle of its data")
        done += got


@contextmanager
def _read_pt(path: str, name: str | None) -> Iterator[Opened]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with open(path, "rb") as file:
        zipped = file.read(2) == b"PK"  # torch's older format can only be read whole
    with FakeTensorMode():
        described = _tensor_of(path, name, torch.load(path, weights_only=True, map_location="cpu")) if zipped else None
    offset = None if described is None else getattr(described.untyped_storage(), "_checkpoint_offset", None)
    if described is not None and offset is not None and described.is_contiguous():
        start = offset + described.storage_offset() * described.itemsize
        with of_raw(Raw(path, start, tuple(described.shape), described.dtype)) as opened:
            yield opened
        return
    x = _tensor_of(path, name, torch.load(path, weights_only=True, map_location="cpu", mmap=zipped))

    def read(box: Box, out: Tensor, window: int) -> None:
        bits(out).copy_(bits(x[box.slices()]))

    yield Opened(tuple(x.shape), x.dtype, read)


def _tensor_of(path: str, name: str | None, held: Any) -> Tensor:
    if isinstance(held, Tensor) and name is None:
        return held.detach()
    if not isinstance(held, dict):
        raise InputError(f"{path}: holds {type(held).__name__}, expected a tensor" + (" dict" if name else ""))
    tensors = {str(key): value for key, value in held.items() if isinstance(value, Tensor)}
    return tensors[_pick(path, name, list(tensors))].detach()


@contextmanager
def _read_safetensors(path: str, name: str | None) -> Iterator[Opened]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:  # checks the whole header
        key = _pick(path, name, sorted(file.keys()))
        part = file.get_slice(key)
        shape = tuple(part.get_shape())
        dtype = (part[:0] if shape else file.get_tensor(key)).dtype  # as torch's; the format has names of its own
    start, header = _safetensors_header(path)
    with of_raw(Raw(path, start + header[key]["data_offsets"][0], shape, dtype)) as opened:
        yield opened


def _safetensors_header(path: str) -> tuple[int, dict[str, Any]]:
    """Where the data begin, and the header: 8 bytes of its length, and JSON."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return 8 + size, json.loads(file.read(size))


@contextmanager
def _read_h5(path: str, name: str | None) -> Iterator[Opened]:
    key = name and name.strip("/")
    datasets = describe(path, name=key).datasets
    stored = datasets[_pick(path, key, list(datasets))]
    if stored.raw is not None:
        with of_raw(stored.raw) as opened:
            yield opened
    else:
        yield Opened(stored.shape, stored.dtype, partial(read_box, path, stored.name))


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
        torch.save(torch.empty(shape, dtype=dtype), path)
    with FakeTensorMode():
        offset = torch.load(path, weights_only=True).untyped_storage()._checkpoint_offset
    return Raw(str(path), offset or 0, shape, dtype)


def _lay_out_safetensors(path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Raw:
    from safetensors.torch import save

    # The library cannot write a header without the data: that of a small tensor, with the shape changed.
    small = save({"data": torch.empty(1, dtype=dtype)})
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
    ".pt": Format(_read_pt, set(DTYPES), _lay_out_pt),
    ".safetensors": Format(_read_safetensors, _SAFETENSORS, _lay_out_safetensors),
    ".h5": Format(_read_h5, set(DTYPES), None),  # written by hpcdist.staging
}
