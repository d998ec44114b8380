"""List what a file holds: a staging file, another tool's HDF5 file, or a .safetensors file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpcdist.errors import FileError, coded, listed, reason
from hpcdist.files import h5, safetensors
from hpcdist.files.h5 import DTYPE_ATTRIBUTE, GROUP, INCOMPLETE, NUMPY, VERSION, Table, record_dtype, stored_dtype
from hpcdist.files.raw import Raw
from hpcdist.files.regular import check_regular
from hpcdist.staging import journal
from hpcdist.staging.boxes import Corners, Listed
from hpcdist.staging.links import dataset_names, external_data, hard_path
from hpcdist.tensors.storage import DTYPES

__all__ = ["Catalog", "Stored", "describe"]

_PARTS = {"state", "token", "plan", "pieces"}  # of our group; a group without them is another tool's
_CHANGED = f"it is damaged, or another program has changed it and left /{GROUP}"


@dataclass(frozen=True)
class Stored:
    """A dataset in a file.

    Attributes:
        name, shape, dtype: of the tensor.
        raw: position of its bytes, if they are one run without filters; None if only HDF5 can read them.
        pieces: the table of its pieces, if hpcdist wrote it.
        filters: name of its compression.
        place: its path in the file, which differs from `name` if that is a link.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    raw: Raw | None
    pieces: Table | None
    filters: str
    place: str = ""

    @cached_property
    def boxes(self) -> Listed:
        """The boxes of its pieces."""
        n = len(self.shape)
        if self.pieces is None:
            none = np.empty((0, n), np.int64)
            return Listed(Corners(none, none), self.shape)
        return Listed(Corners(self.pieces["offset"][:, :n], self.pieces["shape"][:, :n]), self.shape)

    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Catalog:
    """What a staging file, or a file of another tool, holds.

    Attributes:
        path: of the file.
        datasets: by name, in the order of the file.
        plan: what the save that made the file writes; None for a foreign file.
        complete: whether all of it has been written.
        identity: size and inode of the file.
        token: of a file of hpcdist: position and bytes of its token.
        external: by name, why a dataset is not read: its data are not in this file.
        checkpoint: what a checkpoint of torch's holds besides tensors, as JSON; None for any other file.
        text: of a .safetensors file, by name.
    """

    path: str
    datasets: dict[str, Stored]
    plan: dict[str, Any] | None
    complete: bool
    identity: tuple[int, int] = (0, 0)
    token: tuple[int, bytes] | None = None
    external: dict[str, str] = field(default_factory=dict)
    checkpoint: bytes | None = None
    text: Mapping[str, str] = field(default_factory=dict)

    def require(self, name: str = "") -> None:
        """Raise a FileError if a dataset, or one in the group `name`, has its data in other files."""
        for key, why in self.external.items():
            if not name or key == name or key.startswith(f"{name}/"):
                raise FileError("HD415", f"{self.path}: {key} {why}")

    def is_in(self, fd: int) -> bool:
        """Check that this describes the open file, which may have been replaced, or be another one on this node."""
        stat = os.fstat(fd)
        if self.token is not None:
            return os.pread(fd, len(self.token[1]), self.token[0]) == self.token[1]
        return (stat.st_size, stat.st_ino) == self.identity


def describe(path: str, incomplete: bool = False, name: str | None = None) -> Catalog:
    """Read what a file holds, without the data; also what `name` links to, if it is given.

    Raises:
        FileError: no such file, not of its format, damaged, truncated, a `name` that leads into another file, or a save
            of hpcdist that is not complete, unless `incomplete` is true.
    """
    before = check_regular(path)
    if path.endswith(safetensors.SUFFIX):
        found, text = safetensors.tensors_in(path)
        plain = {key: Stored(key, raw.shape, raw.dtype, raw, None, "", key) for key, raw in found.items()}
        return Catalog(path, plain, None, complete=True, identity=(before.st_size, before.st_ino), text=text)
    try:
        # A file that is being written is locked, perhaps by the very process that resumes it.
        with h5.opened(path, locking=False if incomplete else "best-effort") as file:
            catalog = replace(_catalog(path, file, name), identity=(before.st_size, before.st_ino))
    except FileError:
        raise
    except OSError as error:
        raise FileError(_why(path, error)) from error
    except Exception as error:  # whatever h5py makes of a file that is damaged
        raise FileError("HD402", f"{path}: cannot be read: {reason(error)}") from error
    if not os.path.samestat(before, os.stat(path)):
        return describe(path, incomplete, name)  # replaced meanwhile: which of the two was read is unknown
    if not (catalog.complete or incomplete):
        raise FileError("HD405", f"{path}: incomplete: the job that wrote it ended before it was done")
    size = os.path.getsize(path)
    for stored in catalog.datasets.values():
        if stored.raw is not None and stored.raw.offset + stored.nbytes() > size:
            raise FileError("HD404", f"{path}: truncated: {stored.name} ends after the end of the file")
    return catalog


def _why(path: str, error: OSError) -> str:
    """What keeps HDF5 from opening a file, in a few words."""
    import h5py

    if not os.access(path, os.R_OK):
        return coded("HD402", f"{path}: cannot be read: Permission denied")
    text = reason(error)
    if "truncated" in text:
        return coded("HD404", f"{path}: truncated ({text})")
    if h5py.is_hdf5(path):
        return coded("HD402", f"{path}: cannot be read ({text})")
    return coded("HD403", f"{path}: not an HDF5 file")


def _catalog(path: str, file: Any, wanted: str | None) -> Catalog:
    import h5py
    from h5py import h5g

    names, others = dataset_names(path, file)
    own = _own(path, file, [name for name in names if name.startswith(f"{GROUP}/")])
    places = {name: name for name in names if not name.startswith(f"{GROUP}/")}
    if wanted and wanted not in places and wanted not in others:
        place = hard_path(path, file, wanted)
        if place is not None and isinstance(file[place or "/"], h5py.Dataset):
            places[wanted] = place  # a link
    group = h5py.Group(h5g.open(file.id, GROUP.encode())) if own.keys() >= _PARTS else None
    version = None if group is None else group.attrs.get("version")
    if version is None:
        stored, external = _stored(path, file, places, {}, complete=True)
        return Catalog(path, stored, None, complete=True, external=others | external)
    if version != VERSION:
        raise FileError("HD406", f"{path}: is in version {version} of the format, and this hpcdist reads {VERSION}")
    contents = {name: _content(own[name]).tobytes() for name in (*_PARTS, h5.CHECKPOINT) if name in own}
    plan_text, pieces, checkpoint = (contents.get(name, b"") for name in ("plan", "pieces", h5.CHECKPOINT))
    complete = contents["state"] != INCOMPLETE
    if complete and contents["state"] != h5.seal(plan_text, pieces, checkpoint):
        raise FileError("HD404", f"{path}: its plan, tables of pieces or values differ from their checksum: {_CHANGED}")
    plan = json.loads(plan_text)
    planned = {d["name"]: (d, table) for d, table in _tables(path, plan, pieces)}
    # A tensor with another hard link, which h5py makes of file["b"] = file["a"], is listed by one of its names alone.
    places |= {name: name for name in planned.keys() - places.keys() if hard_path(path, file, name) == name}
    lost = planned.keys() - places.keys()
    if lost:
        raise FileError("HD404", f"{path}: holds no {listed(sorted(lost))}, which its plan has: {_CHANGED}")
    stored, external = _stored(path, file, places, planned, complete)
    if not complete:
        stored = _with_journal(path, plan, stored)
    token = own["token"].get_offset(), contents["token"]
    held = checkpoint if complete and h5.CHECKPOINT in own else None
    return Catalog(path, stored, plan, complete, token=token, external=others | external, checkpoint=held)


def _own(path: str, file: Any, names: Iterable[str]) -> dict[str, Any]:
    """The datasets of our group by name, as HDF5's objects; those that have their bytes in one run of this file."""
    from h5py import h5d

    size, own = os.path.getsize(path), {}
    for name in names:
        dataset = h5d.open(file.id, name.encode())
        if _is_plain(dataset, size):
            own[name.removeprefix(f"{GROUP}/")] = dataset
    return own


def _is_plain(dataset: Any, size: int) -> bool:
    """Check that a dataset has its bytes in one run of this file of `size` bytes, as those of our own group have."""
    from h5py import h5d

    made, shape = dataset.get_create_plist(), dataset.shape
    if external_data(made) is not None or made.get_layout() == h5d.CHUNKED or shape is None:
        return False
    offset, dtype = dataset.get_offset() if prod(shape) else 0, dataset.dtype
    return offset is not None and offset + prod(shape) * dtype.itemsize <= size and dtype.kind in "uV"


def _content(dataset: Any) -> np.ndarray[Any, Any]:
    """All elements of a dataset, which is HDF5's object: h5py's own needs several times as long for a small one."""
    from h5py import h5s

    found = np.empty(dataset.shape, dataset.dtype)
    if found.size:
        dataset.read(h5s.ALL, h5s.ALL, found)
    return found


def _tables(path: str, plan: Mapping[str, Any], content: bytes) -> Iterator[tuple[dict[str, Any], Table]]:
    """Yield each tensor of the plan with the table of its pieces; a FileError if there are more or fewer pieces."""
    at = 0
    for d in plan["datasets"]:
        row = record_dtype(len(d["shape"]))
        table = np.frombuffer(content[at : at + d["pieces"] * row.itemsize], row)
        at += d["pieces"] * row.itemsize
        if len(table) != d["pieces"] or at > len(content):
            raise FileError("HD404", f"{path}: {d['name']}: its table of pieces is damaged")
        yield d, table
    if at != len(content):
        raise FileError("HD404", f"{path}: its tables of pieces are damaged")


def _check_table(path: str, name: str, shape: tuple[int, ...], table: Table, complete: bool) -> None:
    """Raise a FileError if a table cannot be that of the pieces of a tensor."""
    offsets, shapes = table["offset"], table["shape"]
    extents = np.array(shape or (1,), np.int64)
    inside = (offsets >= 0) & (shapes >= 0) & (offsets <= extents - shapes)
    if not inside.all() or (table["written"] & ~1).any():
        raise FileError("HD404", f"{path}: {name}: its table of pieces is damaged")
    if complete and int(shapes.prod(axis=1).sum()) != prod(shape):
        raise FileError("HD404", f"{path}: {name}: its table of pieces is damaged: they are not the whole tensor")


def _with_journal(path: str, plan: Mapping[str, Any], stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """The datasets of a save that was not finished, their tables with the records of its journal."""
    noted = {name: s if s.pieces is None else replace(s, pieces=s.pieces.copy()) for name, s in stored.items()}
    names = [d["name"] for d in plan["datasets"]]
    for (i, row), checksum in journal.read(Path(path).with_suffix(".journal")).items():
        table = noted[names[i]].pieces if i < len(names) and names[i] in noted else None
        if table is not None and row < len(table):
            record = table[row]
            record["xxh3_64"], record["written"] = checksum, 1
    return noted


def _stored(
    path: str,
    file: Any,
    places: Mapping[str, str],
    planned: Mapping[str, tuple[Mapping[str, Any], Table]],
    complete: bool,
) -> tuple[dict[str, Stored], dict[str, str]]:
    """The datasets at these places, each of which is opened once; and why some of them are not read.

    Args:
        planned: by name, the tensor's entry in the plan, which it must fit, and the table of its pieces.
    """
    import h5py
    from h5py import h5d

    found, external = {}, {}
    for name, place in places.items():
        dataset = h5d.open(file.id, place.encode())
        made = dataset.get_create_plist()
        why = external_data(made)
        if why is not None:
            external[name] = why
            continue
        shape, dtype, table = dataset.shape, _dtype_of(dataset), None
        chunks = made.get_chunk() if made.get_layout() == h5d.CHUNKED else None
        if name in planned:
            entry, table = planned[name]
            _check_planned(path, entry, dataset, dtype, chunks)
            _check_table(path, name, shape, table, complete)
        if dtype in DTYPES and shape is not None:  # else strings, references: nothing that a tensor could hold
            where = _raw(path, dataset, shape, dtype, table is not None) if chunks is None else None
            filters = str(h5py.Dataset(dataset).compression or "chunked") if chunks else ""
            found[name] = Stored(name, shape, dtype, where, table, filters, place)
    return found, external


def _check_planned(
    path: str, entry: Mapping[str, Any], dataset: Any, dtype: torch.dtype | None, chunks: tuple[int, ...] | None
) -> None:
    """Raise a FileError that names how a dataset, HDF5's object of this dtype, differs from what was written."""
    shape = None if dataset.shape is None else list(dataset.shape)
    found = {"dtype": str(dtype), "shape": shape, "chunks": chunks and list(chunks)}
    if getattr(torch, entry["dtype"].removeprefix("torch."), None) not in DTYPES:
        del found["dtype"]  # one of another torch, whose integers are read
    differ = [f"{key} {value}, not {entry[key]}" for key, value in found.items() if value != entry[key]]
    if not differ and dtype is not None and dataset.get_type() != _type_of(dtype):
        differ = [f"{dtype} stored as {dataset.dtype.str}, not {_type_of(dtype).dtype.str}"]
    if differ:
        raise FileError("HD404", f"{path}: {entry['name']} has {', '.join(differ)}, which was written: {_CHANGED}")


@cache
def _type_of(dtype: torch.dtype) -> Any:
    """HDF5's type of a tensor's elements as hpcdist stores them."""
    from h5py import h5t

    return h5t.py_create(stored_dtype(dtype), logical=True)


def _dtype_of(dataset: Any) -> torch.dtype | None:
    """The dtype of a dataset, HDF5's object, as a tensor; None if torch has no such dtype."""
    import h5py
    from h5py import h5a

    kept = None
    if h5a.exists(dataset, DTYPE_ATTRIBUTE.encode()):
        kept = h5py.Dataset(dataset).attrs[DTYPE_ATTRIBUTE]
    kept = kept.decode() if isinstance(kept, bytes) else kept
    named: torch.dtype | None = getattr(torch, kept, None) if isinstance(kept, str) else None
    try:
        stored = dataset.dtype
        if stored.subdtype is not None:  # each element is an array
            return None
        if named in DTYPES and named not in NUMPY and stored == stored_dtype(named):
            return named
        return torch.from_numpy(np.empty(0, stored.newbyteorder("="))).dtype
    except TypeError:  # a type that numpy, or torch, does not have
        return None


def _raw(path: str, dataset: Any, shape: tuple[int, ...], dtype: torch.dtype, checked: bool) -> Raw | None:
    """The position of the bytes of a dataset that is not chunked, if it was checked, or if its type is numpy's."""
    from h5py import h5t

    as_numpy, offset = dataset.dtype, dataset.get_offset()
    if offset is None or not (checked or dataset.get_type() == h5t.py_create(as_numpy, logical=True)):
        return None
    return Raw(path, offset, shape, dtype, swapped=as_numpy.newbyteorder("=") != as_numpy)
