"""What a file holds: staging files and those of other tools; and the data that only HDF5 can read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import torch

from hpcdist import layout
from hpcdist.buffers import DTYPES, bits
from hpcdist.errors import FileError, reason
from hpcdist.layout import Box
from hpcdist.raw import Raw
from hpcdist.regular import check_regular
from hpcdist.staging.boxes import Corners, Listed
from hpcdist.staging.format import COMPLETE, DTYPE_ATTRIBUTE, GROUP, NUMPY, VERSION, Table, stored_dtype
from hpcdist.staging.links import elsewhere, hard_path

__all__ = ["Contents", "Stored", "describe", "read_box"]

_PARTS = ("state", "token", "plan")  # of our group; one without is somebody else's


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

    names: list[str] = []  # of all datasets, by hard links only

    def visit(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            names.append(name)

    file.visititems(visit)
    own = {name for name in names if name.startswith(f"{GROUP}/") and elsewhere(file[name]) is None}
    places = {name: name for name in names if not name.startswith(f"{GROUP}/")}
    place = hard_path(path, file, wanted) if wanted else None
    if wanted and wanted not in places and place is not None and isinstance(file[place or "/"], h5py.Dataset):
        places[wanted] = place  # a link
    others = {name: why for name, place in places.items() if (why := elsewhere(file[place])) is not None}
    places = {name: place for name, place in places.items() if name not in others}
    if not all(f"{GROUP}/{part}" in own for part in _PARTS) or "version" not in file[GROUP].attrs:
        return Contents(path, dict(_stored(path, file, places, {})), None, complete=True, elsewhere=others)
    group = file[GROUP]
    if group.attrs["version"] > VERSION:
        raise FileError(f"{path}: written by a newer hpcdist (version {group.attrs['version']} of the format)")
    plan = json.loads(bytes(group["plan"][()]))
    tables = {
        d["name"]: file[table]
        for i, d in enumerate(plan["datasets"])
        # else somebody has changed the file since
        if d["name"] in places and tuple(d["shape"]) == file[d["name"]].shape and (table := _table_of(i)) in own
    }
    token = group["token"]
    complete = bytes(group["state"][()]) == COMPLETE
    stored = dict(_stored(path, file, places, tables))
    return Contents(path, stored, plan, complete, token=(token.id.get_offset(), bytes(token[()])), elsewhere=others)


def _table_of(i: int) -> str:
    return f"{GROUP}/pieces/{i}"


def _stored(path: str, file: Any, places: Mapping[str, str], tables: Mapping[str, Any]) -> Iterator[tuple[str, Stored]]:
    for name, place in places.items():
        dataset = file[place]
        dtype = _dtype_of(dataset)
        if dtype is None or dtype not in DTYPES or dataset.shape is None:
            continue  # strings, references, datasets without a shape: nothing that a tensor could hold
        table = tables.get(name)
        yield (
            name,
            Stored(
                name,
                tuple(dataset.shape),
                dtype,
                _raw(path, dataset, dtype),
                None if table is None else table[()],
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


def read_box(path: str, place: str, box: Box, out: torch.Tensor, window: int) -> None:
    """Read a box of a dataset that only HDF5 can read (chunked, compressed, never written) into a CPU tensor."""
    import h5py

    stored = stored_dtype(out.dtype)
    with h5py.File(path, "r", locking="best-effort") as file:
        dataset = None if hard_path(path, file, place) != place else file[place]
        if dataset is None or elsewhere(dataset) is not None:
            raise FileError(f"{path}: has changed while it was read")
        for part in layout.boxes(box, max(1, window // (2 * out.dtype.itemsize))):  # HDF5 has a copy of its own
            array = np.asarray(dataset[part.slices()]).astype(stored, copy=False)
            part_of_out = bits(out)[part.slices(box.offset)]
            part_of_out.copy_(bits(torch.from_numpy(np.ascontiguousarray(array)).view(out.dtype)).view_as(part_of_out))
