"""What a file holds: staging files and those of other tools; and the data that only HDF5 can read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpcdist import layout
from hpcdist.errors import FileError, reason
from hpcdist.files.h5 import COMPLETE, DTYPE_ATTRIBUTE, GROUP, NUMPY, VERSION, Table, record_dtype, stored_dtype
from hpcdist.files.raw import Raw
from hpcdist.files.regular import check_regular
from hpcdist.layout import Box
from hpcdist.staging import journal
from hpcdist.staging.boxes import Corners, Listed
from hpcdist.staging.links import elsewhere, hard_path
from hpcdist.tensors.storage import DTYPES, bits

__all__ = ["Contents", "Stored", "describe", "read_box"]

_PARTS = ("state", "token", "plan")  # of our group; one without is somebody else's
_DEEPEST = 1000
_CHUNK = 2**26  # bytes of a chunk that HDF5 may always hold beside the window


@dataclass(frozen=True)
class Stored:
    """A dataset in a file.

    Attributes:
        name, shape, dtype: of the tensor.
        raw: where its bytes lie, if they lie in one run as they are; None if only HDF5 can read them.
        pieces: the table of its pieces, if hpcdist wrote it.
        filters: what it is compressed with, in words.
        place: its path in the file, if `name` is that of a link.
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
class Contents:
    """A staging file, or a foreign HDF5 file.

    Attributes:
        path: of the file.
        datasets: by name, in the order of the file.
        elsewhere: by name, why a dataset is not read: its data are not in this file.
        plan: what was to be written; None in a foreign file.
        complete: all of it has been.
        identity: size and inode of the file.
        token: of a file of hpcdist: where its token lies, and what it is.
    """

    path: str
    datasets: dict[str, Stored]
    plan: dict[str, Any] | None
    complete: bool
    identity: tuple[int, int] = (0, 0)
    token: tuple[int, bytes] | None = None
    elsewhere: dict[str, str] = field(default_factory=dict)

    def require(self, name: str = "") -> None:
        """A FileError if what is meant, a dataset or a group of them, has its data in other files."""
        for key, why in self.elsewhere.items():
            if not name or key == name or key.startswith(f"{name}/"):
                raise FileError(f"{self.path}: {key} {why}")

    def is_in(self, fd: int) -> bool:
        """Whether this is what the open file holds: it may have been replaced since, or be another one on this node."""
        stat = os.fstat(fd)
        if self.token is not None:
            return os.pread(fd, len(self.token[1]), self.token[0]) == self.token[1]
        return (stat.st_size, stat.st_ino) == self.identity


def describe(path: str, incomplete: bool = False, name: str | None = None) -> Contents:
    """Read what a file holds, without the data; also what `name` links to, if that is given.

    Raises:
        FileError: no such file, not HDF5, damaged, truncated, a `name` that leads into another file, or a save of
            hpcdist that is not complete, unless `incomplete` ones are wanted.
    """
    import h5py

    before = check_regular(path)
    try:
        # A file that is being written is locked by its writer, which may well want to know what it holds.
        with h5py.File(path, "r", locking=False if incomplete else "best-effort") as file:
            contents = replace(_contents(path, file, name), identity=(before.st_size, before.st_ino))
    except FileError:
        raise
    except OSError as error:
        raise FileError(f"{path}: {_why(path, error)}") from error
    except Exception as error:  # whatever h5py makes of a file that is damaged
        raise FileError(f"{path}: cannot be read: {reason(error)}") from error
    if not os.path.samestat(before, os.stat(path)):
        return describe(path, incomplete, name)  # replaced meanwhile: which of the two it was is not known
    if not (contents.complete or incomplete):
        raise FileError(f"{path}: incomplete: the job that wrote it ended before it was done")
    size = os.path.getsize(path)
    for stored in contents.datasets.values():
        if stored.raw is not None and stored.raw.offset + stored.nbytes() > size:
            raise FileError(f"{path}: truncated: {stored.name} ends behind the end of the file")
    return contents


def _why(path: str, error: OSError) -> str:
    """What keeps HDF5 from opening a file, in a few words."""
    import h5py

    if not os.access(path, os.R_OK):
        return "cannot be read: Permission denied"
    text = reason(error)
    if "truncated" in text:
        return f"truncated ({text})"
    return f"cannot be read ({text})" if h5py.is_hdf5(path) else "not an HDF5 file"


def _contents(path: str, file: Any, wanted: str | None) -> Contents:
    import h5py

    names, others = _names(path, file)
    own = {name for name in names if name.startswith(f"{GROUP}/") and _is_plain(path, file[name])}
    places = {name: name for name in names if not name.startswith(f"{GROUP}/")}
    place = hard_path(path, file, wanted) if wanted and wanted not in others else None
    if wanted and wanted not in places and place is not None and isinstance(file[place or "/"], h5py.Dataset):
        places[wanted] = place  # a link
    others |= {name: why for name, place in places.items() if (why := elsewhere(file[place])) is not None}
    places = {name: place for name, place in places.items() if name not in others}
    if not all(f"{GROUP}/{part}" in own for part in _PARTS) or "version" not in file[GROUP].attrs:
        return Contents(path, dict(_stored(path, file, places, {})), None, complete=True, elsewhere=others)
    group = file[GROUP]
    if group.attrs["version"] > VERSION:
        raise FileError(f"{path}: written by a newer hpcdist (version {group.attrs['version']} of the format)")
    plan = json.loads(bytes(group["plan"][()]))
    tables = {
        d["name"]: table
        for d, table in _tables(path, group, plan, own)
        if d["name"] in places
        and tuple(d["shape"]) == file[d["name"]].shape  # else somebody has changed the file since
    }
    token = group["token"]
    complete = bytes(group["state"][()]) == COMPLETE
    checked = {name: _checked(path, name, file[name].shape, table, complete) for name, table in tables.items()}
    if not complete:
        checked = _noted(path, plan, checked)
    stored = dict(_stored(path, file, places, checked))
    return Contents(path, stored, plan, complete, token=(token.id.get_offset(), bytes(token[()])), elsewhere=others)


def _names(path: str, file: Any) -> tuple[list[str], dict[str, str]]:
    """The names of all datasets, by hard links only; and those that h5py cannot open, with the reason."""
    from h5py import h5g, h5l, h5o

    names: list[str] = []
    others: dict[str, str] = {}
    root = file["/"].id
    seen = {h5o.get_info(root).addr}  # a group may hold itself
    groups = [(b"", root, iter(root))]
    while groups:  # from group to group: HDF5's own visit takes the way from the root each time
        prefix, group, links = groups[-1]
        name = next(links, None)
        if name is None:
            groups.pop()
            continue
        if group.links.get_info(name).type != h5l.TYPE_HARD:
            continue
        info = h5o.get_info(group, name)
        if info.addr in seen:
            continue
        seen.add(info.addr)
        if info.type == h5o.TYPE_GROUP:
            inner = h5g.open(group, name)
            groups.append((prefix + name + b"/", inner, iter(inner)))
            if len(groups) > _DEEPEST:  # HDF5 holds the whole path of each that is open
                raise FileError(f"{path}: cannot be read: it has more than {_DEEPEST:,} groups within each other")
        elif info.type == h5o.TYPE_DATASET:
            try:
                names.append((prefix + name).decode())
            except UnicodeDecodeError:
                others[(prefix + name).decode(errors="surrogateescape")] = "has a name that is not UTF-8"
    return names, others


def _is_plain(path: str, dataset: Any) -> bool:
    """Whether a dataset has its bytes in one run of this file, as all of ours do that are not data."""
    if elsewhere(dataset) is not None or dataset.chunks is not None or dataset.shape is None:
        return False
    offset = dataset.id.get_offset() if dataset.size else 0
    nbytes = dataset.size * dataset.dtype.itemsize
    return offset is not None and offset + nbytes <= os.path.getsize(path) and dataset.dtype.kind in "uV"


def _tables(path: str, group: Any, plan: Mapping[str, Any], own: set[str]) -> Iterator[tuple[dict[str, Any], Table]]:
    """Each tensor that was planned, with the table of its pieces.

    Raises:
        FileError: there are more or fewer pieces than were planned.
    """
    planned = plan["datasets"]
    if group.attrs["version"] == 1:
        for i, d in enumerate(planned):
            if f"{GROUP}/pieces/{i}" in own:
                yield d, group[f"pieces/{i}"][()]
        return
    if f"{GROUP}/pieces" not in own:  # somebody has changed the file since
        return
    content, at = group["pieces"][()].tobytes(), 0
    for d in planned:
        row = record_dtype(len(d["shape"]))
        table = np.frombuffer(content[at : at + d["pieces"] * row.itemsize], row)
        at += d["pieces"] * row.itemsize
        if len(table) != d["pieces"] or at > len(content):
            raise FileError(f"{path}: {d['name']}: its table of pieces is damaged")
        yield d, table
    if at != len(content):
        raise FileError(f"{path}: its tables of pieces are damaged")


def _checked(path: str, name: str, shape: tuple[int, ...], table: Table, complete: bool) -> Table:
    """The table of the pieces of a tensor, if it can be one.

    Raises:
        FileError: it is not one of this tensor.
    """
    if table.dtype != record_dtype(len(shape)) or table.ndim != 1:
        raise FileError(f"{path}: {name}: its table of pieces is damaged")
    offsets, shapes = table["offset"], table["shape"]
    extents = np.array(shape or (1,), np.int64)
    inside = (offsets >= 0) & (shapes >= 0) & (offsets <= extents - shapes)
    if not inside.all() or (table["written"] & ~1).any():
        raise FileError(f"{path}: {name}: its table of pieces is damaged")
    if complete and int(shapes.prod(axis=1).sum()) != prod(shape):
        raise FileError(f"{path}: {name}: its table of pieces is damaged: they are not the whole tensor")
    return table


def _noted(path: str, plan: Mapping[str, Any], tables: Mapping[str, Table]) -> dict[str, Table]:
    """The tables of a save that was not finished, with what its journal says."""
    noted = {name: table.copy() for name, table in tables.items()}
    names = [d["name"] for d in plan["datasets"]]
    for (i, row), checksum in journal.read(Path(path).with_suffix(".journal")).items():
        if i < len(names) and names[i] in noted and row < len(noted[names[i]]):
            record = noted[names[i]][row]
            record["xxh3_64"], record["written"] = checksum, 1
    return noted


def _stored(
    path: str, file: Any, places: Mapping[str, str], tables: Mapping[str, Table]
) -> Iterator[tuple[str, Stored]]:
    for name, place in places.items():
        dataset = file[place]
        dtype = _dtype_of(dataset)
        if dtype is None or dtype not in DTYPES or dataset.shape is None:
            continue  # strings, references, datasets without a shape: nothing that a tensor could hold
        yield (
            name,
            Stored(
                name,
                tuple(dataset.shape),
                dtype,
                _raw(path, dataset, dtype),
                tables.get(name),
                str(dataset.compression or ("chunked" if dataset.chunks else "")),
                place,
            ),
        )


def _dtype_of(dataset: Any) -> torch.dtype | None:
    """The dtype that a dataset has as a tensor; None if it has none."""
    kept = dataset.attrs.get(DTYPE_ATTRIBUTE)
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


def _raw(path: str, dataset: Any, dtype: torch.dtype) -> Raw | None:
    """Where the dataset's bytes lie in this file, if they can be read without HDF5, and are what numpy has."""
    import h5py

    as_numpy = dataset.id.get_type() == h5py.h5t.py_create(dataset.dtype, logical=True)
    if dataset.chunks is not None or not as_numpy:
        return None
    offset = dataset.id.get_offset()
    if offset is None:
        return None
    swapped = dataset.dtype.newbyteorder("=") != dataset.dtype
    return Raw(path, offset, tuple(dataset.shape), dtype, swapped)


def read_box(path: str, place: str, box: Box, out: torch.Tensor, window: int, fd: int | None = None) -> None:
    """Read a box of a dataset that only HDF5 can read (chunked, compressed, never written) into a CPU tensor; of the
    file that is open as `fd`, whatever has its name by now."""
    import h5py

    stored = stored_dtype(out.dtype)
    held = nullcontext(path) if fd is None else os.fdopen(os.dup(fd), "rb", 0)
    with held as source, h5py.File(source, "r", locking="best-effort") as file:
        dataset = None if hard_path(path, file, place) != place else file[place]
        if dataset is None or elsewhere(dataset) is not None:
            raise FileError(f"{path}: has changed while it was read")
        chunk = prod(dataset.chunks or ()) * dataset.dtype.itemsize
        if chunk > max(_CHUNK, window, box.size() * out.dtype.itemsize):
            raise FileError(
                f"{path}: {place}: is stored in chunks of {chunk:,} bytes, which HDF5 reads whole: more than the window"
            )
        for part in layout.boxes(box, max(1, window // (2 * out.dtype.itemsize))):  # HDF5 has a copy of its own
            array = np.asarray(dataset[part.slices()]).astype(stored, copy=False)
            part_of_out = bits(out)[part.slices(box.offset)]
            part_of_out.copy_(bits(torch.from_numpy(np.ascontiguousarray(array)).view(out.dtype)).view_as(part_of_out))
