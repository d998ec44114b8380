"""The format of a staging file: ordinary HDF5 datasets, and a small group that records what has been written.

    /NAME              each tensor: one contiguous dataset without fill, so that its bytes lie at a known place
      @torch_dtype     of a dtype that HDF5 does not have: its name; the dataset holds the raw bits
    /_hpcdist          attribute version: 4
      state            uint8[8]: zeros; once the file is complete, the checksum of plan, pieces and checkpoint
      token            uint8[16]: by which the ranks of one save recognise the file
      plan             uint8[n]: the tensors, against which readers hold what HDF5 says, and a save that resumes its own
      pieces           uint8[n]: a table for each tensor, one after the other, of its pieces: offset, shape, checksum,
                       rank, and whether it is written
      checkpoint       uint8[n]: what a checkpoint holds besides tensors, as JSON; only in those that
                       torch.distributed.checkpoint has written, see hpcdist.staging.dcp

HDF5's own structures are those of version 1.10, which have checksums; nothing is in its global heap, which has none.

All of it is laid out before the first data are written, and from then on only the contents of datasets change: a job
that dies leaves a file that HDF5 can still read. Ranks write data, and rank 0 the rest.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpcdist import activity
from hpcdist.errors import FileError, reason
from hpcdist.files.attributes import fixed_length
from hpcdist.files.commit import patiently
from hpcdist.files.raw import Ints, page_size
from hpcdist.layout import Box
from hpcdist.tensors.storage import BARE, DTYPES

__all__ = [
    *("ALIGNMENT", "CHECKPOINT", "DTYPE_ATTRIBUTE", "GROUP", "INCOMPLETE", "NUMPY", "VERSION", "Dataset", "FileMap"),
    *("Table", "add_checkpoint", "check_visible", "checksum", "create", "digest", "find_map"),
    *("opened", "plan_text", "record_dtype", "records", "seal", "stored_dtype", "summary", "tables"),
]

GROUP = "_hpcdist"
DTYPE_ATTRIBUTE = "torch_dtype"
CHECKPOINT = "checkpoint"
INCOMPLETE = bytes(8)  # the state of a file that is being written
VERSION = 4
_NEW = {"libver": "v110", "locking": False}  # the oldest format of HDF5's structures in which they have checksums
NUMPY = {d for d in DTYPES if not d.is_floating_point or d in (torch.float64, torch.float32, torch.float16)}
NUMPY -= {torch.complex32, *BARE}
_RAW_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32}  # itemsize -> what the raw bits are stored as
_ELEMENT = 16  # bytes: of the largest dtype
ALIGNMENT = 2**20  # bytes: datasets of this size and more begin at a multiple of it, or of the file system's block

Table = np.ndarray[Any, np.dtype[np.void]]


def digest() -> Any:
    """A new checksum of a piece: XXH3, 64 bits."""
    import xxhash

    return xxhash.xxh3_64()


def checksum(data: memoryview) -> int:
    """The checksum of a piece in memory."""
    import xxhash

    return int(xxhash.xxh3_64_intdigest(data))


def seal(*parts: bytes) -> bytes:
    """The state of a complete file with this plan, these tables of pieces, and what it holds besides tensors."""
    made = digest()
    for part in parts:
        made.update(part)
    return int(made.intdigest()).to_bytes(8, "little")


def plan_text(plan: Mapping[str, Any]) -> bytes:
    """A plan as it is stored."""
    return json.dumps(plan).encode()


def stored_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """The dtype in which a tensor is stored: numpy's own, or raw bits."""
    if dtype in NUMPY:
        return torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
    return np.dtype(_RAW_BITS[dtype.itemsize])


@cache
def record_dtype(ndim: int) -> np.dtype[np.void]:
    """A row of the table of pieces of a tensor; a 0-d tensor counts as 1-d."""
    n = (max(1, ndim),)
    return np.dtype(
        [("offset", "<i8", n), ("shape", "<i8", n), ("xxh3_64", "<u8"), ("rank", "<i4"), ("written", "<i4")]
    )


def records(boxes: Sequence[Box], ndim: int) -> Table:
    """An empty table for these pieces."""
    table = np.zeros(len(boxes), record_dtype(ndim))
    if boxes and ndim:
        corners = np.array(list(boxes), np.int64)
        table["offset"], table["shape"] = corners[:, 0], corners[:, 1]
    else:
        table["shape"] = 1
    return table


def tables(datasets: Sequence[Dataset], written: Sequence[Ints] = ()) -> bytes:
    """The tables of pieces of a file, as they are stored.

    Args:
        written: for each rank the rows (dataset, piece, bits of the checksum) of what it has written.
    """
    made = [records(d.pieces, len(d.shape)) for d in datasets]
    for rank, rows in enumerate(written):
        for i in np.unique(rows[:, 0]):
            mine = rows[rows[:, 0] == i]
            found = made[i][mine[:, 1]]
            found["xxh3_64"] = mine[:, 2].view(np.uint64)
            found["rank"], found["written"] = rank, 1
            made[i][mine[:, 1]] = found
    return b"".join(table.tobytes() for table in made)


@dataclass(frozen=True)
class Dataset:
    """A tensor to be written.

    Attributes:
        name: its path in the file.
        shape, dtype: of the whole tensor.
        chunks: the shape of a chunk, if it is compressed.
        filters: h5py's arguments for the filters of the chunks.
        pieces: the boxes that are written, and checked, one at a time.
        attrs: HDF5 attributes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: Sequence[Box]
    chunks: tuple[int, ...] | None = None
    filters: Mapping[str, Any] = field(default_factory=dict)
    attrs: Mapping[str, Any] = field(default_factory=dict)

    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class FileMap:
    """Byte offsets in a file that is being written.

    Attributes:
        path: of the file.
        data: where each dataset begins; None for a compressed one.
        page: size of a page, each of which is written by one rank: see :mod:`hpcdist.staging.pages`.
        token, token_at: of a staging file, the bytes by which ranks recognise it, and where they are.
        state, table: of a staging file, where its state and its tables of pieces are.
    """

    path: str
    data: list[int | None]
    page: int
    token: bytes = b""
    token_at: int = 0
    state: int = 0
    table: int = 0


def create(
    path: Path, datasets: Sequence[Dataset], plan: Mapping[str, Any], attrs: Mapping[str, Any], align: int
) -> FileMap:
    """Lay out a file for these datasets; the data are not there yet. `attrs` are those of the file itself."""
    import h5py

    # HDF5 does not survive a write that fails: let a limit on file sizes show before it is used.
    plain = [d.nbytes() for d in datasets if d.chunks is None]
    os.truncate(path, sum(nbytes + (align if nbytes >= align else 0) for nbytes in plain))
    large = [d for d in datasets if d.chunks is None and d.nbytes() >= align]
    places: dict[str, int | None] = {}
    if large:
        with h5py.File(path, "w", alignment_threshold=align, alignment_interval=align, **_NEW) as file:
            places = {dataset.name: _create_dataset(file, dataset) for dataset in large}
    # All others begin where any dtype's elements may: a border between pages is then one between elements.
    mode = "r+" if large else "w"
    with h5py.File(path, mode, alignment_threshold=1, alignment_interval=_ELEMENT, **_NEW) as file:
        _set(file, "/", attrs)
        for dataset in datasets:
            if dataset.name not in places:
                places[dataset.name] = _create_dataset(file, dataset)
            _set(file, dataset.name, dataset.attrs)
            if dataset.dtype not in NUMPY:
                _set(file, dataset.name, {DTYPE_ATTRIBUTE: str(dataset.dtype).removeprefix("torch.").encode()})
        file.create_group(GROUP).attrs["version"] = VERSION
        parts = {"state": INCOMPLETE, "token": os.urandom(16), "plan": plan_text(plan), "pieces": tables(datasets)}
        at = {name: _create_record(file, f"{GROUP}/{name}", content) for name, content in parts.items()}
    data = [places[d.name] for d in datasets]
    page, token = page_size(path.parent), parts["token"]
    return FileMap(str(path), data, page, token, at["token"], at["state"], at["pieces"])


def _set(file: Any, name: str, attrs: Mapping[str, Any]) -> None:
    if attrs:  # h5py takes a while to open an object
        file[name].attrs.update({key: fixed_length(value) for key, value in attrs.items()})


def _create_dataset(file: Any, dataset: Dataset) -> int | None:
    """Create a dataset; return its place, None for a compressed one."""
    dtype = stored_dtype(dataset.dtype)
    if dataset.chunks is None:
        return _place(_create_plain(file, dataset.name, dataset.shape, dtype))
    file.create_dataset(dataset.name, dataset.shape, dtype, chunks=dataset.chunks, **dataset.filters)
    return None


def _create_record(file: Any, name: str, content: bytes) -> int:
    """Create a dataset of bytes, and write it; return its place."""
    from h5py import h5s

    made = _create_plain(file, name, (len(content),), np.dtype("u1"))
    if content:
        made.write(h5s.ALL, h5s.ALL, np.frombuffer(content, np.uint8))
    return _place(made) or 0


def _create_plain(file: Any, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """A contiguous dataset, as HDF5's object, whose place is known at once, and which HDF5 fills with nothing."""
    from h5py import h5d, h5p, h5s, h5t

    made = h5p.create(h5p.DATASET_CREATE)
    made.set_layout(h5d.CONTIGUOUS)
    made.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    made.set_fill_time(h5d.FILL_TIME_NEVER)
    links = h5p.create(h5p.LINK_CREATE)
    links.set_create_intermediate_group(True)
    space = h5s.create_simple(shape) if shape else h5s.create(h5s.SCALAR)
    return h5d.create(file.id, name.encode(), h5t.py_create(dtype, logical=True), space, made, links)


@contextmanager
def opened(source: Any, locking: bool | str = "best-effort") -> Iterator[Any]:
    """An HDF5 file, by path or file object, open for reading.

    HDF5 may read a damaged one for ever, and h5py holds Python's lock meanwhile: no thread of Python's could end that.
    Other ranks see it at the deadline; for a rank without others, faulthandler's thread ends the process, and prints
    the line where it is. It has one timer: a program's own is cancelled.
    """
    import h5py

    limit = activity.lone_limit
    if limit is not None:
        faulthandler.dump_traceback_later(limit, exit=True, file=2)
    try:
        with h5py.File(source, "r", locking=locking) as file:
            yield file
    finally:
        if limit is not None:
            faulthandler.cancel_dump_traceback_later()


def add_checkpoint(path: Path, content: bytes) -> None:
    """Add what a checkpoint holds besides tensors to a file that create() has made."""
    import h5py

    with h5py.File(path, "r+", **_NEW) as file:
        file[GROUP].pop(CHECKPOINT, None)  # of a save that was killed before the file had its name
        _create_record(file, f"{GROUP}/{CHECKPOINT}", content)


def find_map(path: Path) -> FileMap:
    """The map of a file that create() has made."""
    with opened(path, locking=False) as file:
        group = file[GROUP]
        names = [d["name"] for d in json.loads(bytes(group["plan"][()]))["datasets"]]
        data = [_place(file[name].id) if file[name].chunks is None else None for name in names]
        at = {name: _place(group[name].id) or 0 for name in ("token", "state", "pieces")}
        token = bytes(group["token"][()])
    return FileMap(str(path), data, page_size(path.parent), token, at["token"], at["state"], at["pieces"])


def check_visible(file_map: FileMap) -> None:
    """Check that this rank sees the file that another one has laid out, and may write to it.

    Caches of names and attributes may be some seconds out of date: the token decides, and is read again until then.

    Raises:
        FileError: it does not: the folder is another one on this node.
    """
    path, problem = file_map.path, patiently(lambda: _unseen(file_map))
    if problem is not None:
        raise FileError("HD413", f"{path}: {problem}: the folder is not shared by all nodes")
    if not os.access(path, os.R_OK | os.W_OK):
        raise FileError("HD410", f"{path}: cannot be written by this rank")


def _unseen(file_map: FileMap) -> str | None:
    try:
        with open(file_map.path, "rb") as file:
            file.seek(file_map.token_at)
            same = file.read(len(file_map.token)) == file_map.token
            return None if same else "another file by that name on this rank"
    except FileNotFoundError:
        return "not seen by this rank"
    except OSError as error:
        return f"cannot be read by this rank ({reason(error)})"


_LONG = 256  # pieces


def summary(datasets: Sequence[Dataset], attrs: Mapping[str, Any], source: str) -> dict[str, Any]:
    """What is written, and in which pieces: a save can resume what another one with the same summary has left."""
    details = hashlib.sha256(b"([")
    for i, d in enumerate(datasets):  # one after the other, and long lists by their digest: there may be millions
        long = isinstance(d.pieces, list) and len(d.pieces) > _LONG
        pieces = hashlib.sha256(np.array(d.pieces, np.int64).tobytes()).hexdigest() if long else d.pieces
        details.update((", " * bool(i) + repr((pieces, d.filters, _comparable(d.attrs)))).encode())
    details.update(f"], {_comparable(attrs)!r}, {source!r})".encode())
    return {
        "datasets": [
            {"name": d.name, "shape": list(d.shape), "dtype": str(d.dtype), "chunks": d.chunks and list(d.chunks)}
            | {"pieces": len(d.pieces)}
            for d in datasets
        ],
        "details": details.hexdigest(),
    }


def _comparable(attrs: Mapping[str, Any]) -> list[tuple[str, object]]:
    """Attributes as text, long arrays whole: numpy leaves out the middle."""
    return [(name, (x.dtype.str, x.tolist()) if isinstance(x, np.ndarray) else x) for name, x in sorted(attrs.items())]


def _place(made: Any) -> int | None:
    """The first byte of a contiguous dataset; None if it has none."""
    place: int | None = made.get_offset()
    return place
