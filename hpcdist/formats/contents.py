"""The contents of a file of any format: tensors, and the places of their bytes."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcdist.errors import FileError, listed
from hpcdist.formats.paths import check_regular, file_errors, shown
from hpcdist.formats.plain import Raw, digest, page_size, read_at
from hpcdist.layout import Box
from hpcdist.layout.box import Ints, Listed, Shape, span, whole
from hpcdist.tensors.storage import DTYPES

UNREADABLE = "cannot be read"  # the first words on what is left out because it is damaged, or its library too old
Table = np.ndarray[Any, np.dtype[np.void]]
_FEW = 64  # rows that are read together rather than searched
_NEAR = 4  # rows before and after those that are guessed
Slices = Callable[[Box], Tensor]
"""Returns a box of an array as its format's own library reads it: a CPU tensor."""


@cache
def row_dtype(ndim: int) -> np.dtype[np.void]:
    """A row of the table of pieces of a tensor; a 0-d tensor counts as 1-d."""
    n = (max(1, ndim),)
    return np.dtype([("offset", "<i8", n), ("shape", "<i8", n), ("xxh3_64", "<u8"), ("rank", "<i4"), ("check", "<u4")])


def row_checksums(table: Table) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """The checksum of each row of a table, whose field "check" has the lower half of it."""
    content, size = memoryview(table.tobytes()), table.dtype.itemsize
    ends = range(size, len(content) + 1, size)
    return np.array([digest(content[end - size : end - 4]).intdigest() for end in ends], np.uint64)


def boxes_of(table: Table, shape: Shape) -> Listed:
    """The boxes in the rows of a table."""
    return Listed(table["offset"][:, : len(shape)], table["shape"][:, : len(shape)], shape)


@dataclass(frozen=True)
class PieceTable:
    """The table of the pieces of a tensor in a file: a row for each, in the order of their first elements.

    Attributes:
        path, start: the file, and the first byte of the table in it.
        count: number of rows.
        runs: whether the pieces are runs of the tensor's memory, so that they can be found by bisection.
        shape: of the tensor.
    """

    path: str
    start: int
    count: int
    runs: bool
    shape: Shape

    def read(self, fd: int, first: int, last: int) -> Table:
        """Read the rows `first` to `last`; a FileError if they are damaged."""
        row = row_dtype(len(self.shape))
        content = bytearray((last - first) * row.itemsize)
        read_at(fd, self.start + first * row.itemsize, memoryview(content))
        table = np.frombuffer(content, row)
        offsets, shapes, extents = table["offset"], table["shape"], np.array(self.shape or (1,), np.int64)
        inside = (offsets >= 0) & (shapes >= 0) & (offsets <= extents - shapes)
        if not inside.all() or (row_checksums(table).astype(np.uint32) != table["check"]).any():
            raise self._damaged()
        return table

    def within(self, fd: int, box: Box) -> tuple[int, Table]:
        """Find the rows that may have something in common with `box`, by reading few others.

        Returns:
            The number of the first, and the rows.

        Raises:
            FileError: these rows, or some between them, are damaged.
        """
        if not box.size():
            return 0, self.read(fd, 0, 0)
        low, high = span(box, self.shape)
        for first, last in self._ranges(fd, low, high):
            table = self.read(fd, first, last)
            boxes = boxes_of(table, self.shape)
            starts, ends = boxes.starts, boxes.starts + boxes.sizes
            if self.runs and last > first:
                good = bool(starts[0] <= low and high < ends[-1] and (starts[1:] == ends[:-1]).all())
            else:
                near = boxes.intersecting(box)
                corners = boxes.offsets[near], boxes.offsets[near] + boxes.shapes[near]
                begun, ended = (np.clip(of, box.offset, np.add(*box)) - box.offset for of in corners)
                good = Listed(begun, ended - begun, box.shape).tile()
            if good:
                return first, table
        raise self._damaged()

    def _ranges(self, fd: int, low: int, high: int) -> Iterator[tuple[int, int]]:
        """Rows that may describe the elements `low` to `high`: first a guess, as if all pieces were alike."""
        if not self.runs or self.count <= _FEW:
            yield 0, self.count
            return
        near = [of * self.count // prod(self.shape) for of in (low, high)]
        yield max(0, near[0] - _NEAR), min(self.count, near[1] + 1 + _NEAR)
        start = lambda row: boxes_of(self.read(fd, row, row + 1), self.shape).starts[0]  # noqa: E731
        first = max(0, bisect_right(range(self.count), low, key=start) - 1)
        yield first, bisect_right(range(self.count), high, lo=first, key=start)

    def _damaged(self) -> FileError:
        return FileError("HD404", f"{self.path}: its table of the pieces of a tensor is damaged")


@dataclass(frozen=True)
class FileParts:
    """A tensor in parts, which together are the tensor.

    Attributes:
        files: their paths.
        boxes: the box of each part.
        places: for each part the number of its file, and the first byte and the length of the archive of torch.save
            there that holds it.
    """

    files: list[str]
    boxes: Listed
    places: Ints


@dataclass(frozen=True)
class Described:
    """A tensor without its data."""

    name: str
    shape: Shape
    dtype: torch.dtype

    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Stored(Described):
    """A tensor in a file, or in several.

    Attributes:
        raw: where its bytes lie, if they are one run of a file.
        parts: where they lie, if they are in parts. With neither, only its format's library can read it.
        pieces: where the table of its pieces lies, if hpcdist wrote it.
        chunk: rows that its format's library reads together; 1 if it need not.
    """

    raw: Raw | None = None
    parts: FileParts | None = None
    pieces: PieceTable | None = None
    chunk: int = 1

    @cached_property
    def table(self) -> Table:
        """All rows of its table, empty without one. They are read once, and travel with the description then."""
        if self.pieces is None:
            return np.empty(0, row_dtype(len(self.shape)))
        with file_errors(f"{self.pieces.path}: {self.name}"), open(self.pieces.path, "rb") as file:
            return self.pieces.within(file.fileno(), whole(self.shape))[1]

    def with_table(self) -> Stored:
        """This tensor, after its table has been read."""
        _ = self.table
        return self

    @cached_property
    def boxes(self) -> Listed:
        """The boxes of its pieces; none if it has no table of them."""
        return boxes_of(self.table, self.shape)


@dataclass(frozen=True)
class Identity:
    """The identity of a file after it was described: its size, inode and time of change, or bytes that no other
    file has. It is taken before the file is described."""

    size: int
    inode: int
    changed: int = 0
    at: int = 0
    mark: bytes = b""

    def is_of(self, fd: int) -> bool:
        """Whether this is the open file, which may have been replaced, or may be another file on this node."""
        if self.mark:
            return os.pread(fd, len(self.mark), self.at) == self.mark
        return Identity.of(os.fstat(fd)) == self

    @classmethod
    def of(cls, found: os.stat_result) -> Identity:
        """That of a file with this status."""
        return cls(found.st_size, found.st_ino, found.st_mtime_ns)  # an inode may be used again


def identity(path: str) -> Identity:
    """The identity of a regular file; a FileError if there is no such file."""
    return Identity.of(check_regular(path))


@dataclass(frozen=True)
class Contents:
    """The contents of a file or a folder of files.

    Attributes:
        path: of the file or folder.
        kind: description for reports.
        tensors: by name, in the order of the files' data.
        files: the identity of each file, by path.
        external: by name, why a tensor is not read: its data are not in this file.
        left_out: data that are not read as tensors: by name, why not, or what they are.
        text: of .safetensors files, by name.
        checked: whether hpcdist wrote it, with checksums.
        checkpoint: values besides tensors of a checkpoint of torch in an .h5 file: see hpcdist.staging.dcp.
    """

    path: str
    kind: str
    tensors: dict[str, Stored]
    files: dict[str, Identity]
    external: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    text: Mapping[str, str] = field(default_factory=dict)
    checked: bool = False
    checkpoint: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, stored in list(self.tensors.items()):
            if stored.dtype not in DTYPES:
                self.left_out[name] = f"dtype {stored.dtype}, which is not supported"
                del self.tensors[name]

    @classmethod
    def of(cls, path: str, kind: str, found: Mapping[str, Stored | str], files: dict[str, Identity]) -> Contents:
        """Those of a file with these tensors, or the reason why one is left out."""
        tensors = {name: stored for name, stored in found.items() if isinstance(stored, Stored)}
        return cls(path, kind, tensors, files, left_out={k: why for k, why in found.items() if isinstance(why, str)})

    @property
    def damaged(self) -> list[str]:
        """Of what is left out, the messages on what its library cannot read."""
        return [f"{self.path}: {name}: {why}" for name, why in self.left_out.items() if why.startswith(UNREADABLE)]

    def others(self) -> str:
        """What is left out, for a message: the first names, each with the reason."""
        return listed(f"{shown(name)} ({shown(why)})" if name else why for name, why in self.left_out.items())

    def with_tables(self) -> Contents:
        """These, after the tables of all pieces have been read."""
        for stored in self.tensors.values():
            stored.with_table()
        return self

    def nbytes(self) -> int:
        return sum(stored.nbytes() for stored in self.tensors.values())

    def require(self, name: str = "") -> None:
        """Raise a FileError if a tensor, or one in the group `name`, has its data in other files."""
        for key, why in self.external.items():
            if _is_in(key, name):
                raise FileError("HD511", f"{self.path}: {key} {why}")

    def key(self, name: str) -> str:
        """The name of a tensor or a group as it is here: an exact one, or else the one without slashes at its ends."""
        return name if name in self.tensors else name.strip("/")

    def chosen(self, name: str | None) -> Contents:
        """The contents of a tensor or of a group of them; all of it for None.

        Raises:
            FileError: if the name does not exist, holds no tensor, or has its data in another file.
        """
        name = self.key(name or "")
        self.require(name)
        found = {key: stored for key, stored in self.tensors.items() if _is_in(key, name)}
        found = {name: self.tensors[name]} if name and name in self.tensors else found
        here = replace(self, tensors=found, left_out={k: why for k, why in self.left_out.items() if _is_in(k, name)})
        if not found and here.left_out:
            which = f" {name!r}" if name else ""
            raise FileError("HD408", f"{self.path}: holds no tensor{which}, but {here.others()}")
        if name and not found:
            raise FileError("HD408", f"{self.path}: holds no tensor {name!r}; it has: {listed(self.tensors)}")
        others_of = {file for stored in self.tensors.values() for file in _files_of(stored)}
        used = {file for stored in found.values() for file in _files_of(stored)} or self.files.keys()
        files = {path: at for path, at in self.files.items() if path in used or path not in others_of}
        return replace(here, files=files)


def _is_in(key: str, name: str) -> bool:
    return not name or key == name or key.startswith(f"{name}/")


def _files_of(stored: Stored) -> Iterable[str]:
    if stored.parts is not None:
        return stored.parts.files
    return [] if stored.raw is None else [stored.raw.path]


@dataclass(frozen=True)
class Dataset(Described):
    """A tensor to be written.

    Attributes:
        attrs: HDF5 attributes.
        count: number of pieces: boxes that are written, and checked, one at a time.
        runs: whether they are runs of its memory.
    """

    count: int = 0
    runs: bool = True
    attrs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class FileMap:
    """Byte offsets in a file that is being written.

    Attributes:
        path: of the file.
        data: where each dataset begins.
        page: size of a page, each of which is written by one rank: see :mod:`hpcdist.staging.writer`.
        resumed: whether it may hold data already, which another run has written.
    """

    path: str
    data: list[int]
    page: int
    resumed: bool = False

    @classmethod
    def of(cls, path: Path, data: Iterable[int]) -> FileMap:
        """The map of a file whose datasets begin at these bytes."""
        return cls(str(path), list(data), page_size(path.parent))


class Format(ABC):
    """A file format.

    Attributes:
        dtypes: those that a file can hold; empty for a format that is only read.
        checksums: whether its files have checksums of their pieces.
    """

    dtypes: frozenset[torch.dtype] = frozenset()
    checksums = False

    @abstractmethod
    def describe(self, path: str) -> Contents:
        """List the contents of a file, without the data.

        Raises:
            FileError: if the file does not exist, has another format, or is damaged, truncated or incomplete.
        """

    def by_library(self, path: str, stored: Stored) -> Slices:
        """Return a tensor as the format's own library reads it: what no other way can read, and to compare. No file
        stays open, and no more than the box is read if the library can do that.

        Args:
            path: of the file, or of a descriptor: ``/proc/self/fd/N``.
        """
        raise NotImplementedError  # a format whose tensors are in parts

    def create(self, path: Path, datasets: Sequence[Dataset], attrs: Mapping[str, Any]) -> FileMap:
        """Lay out a new file for these datasets, of its full size: only the data are missing.

        Args:
            attrs: of the file itself.
        """
        raise NotImplementedError  # a format that is only read

    def complete(  # noqa: B027  # most formats need nothing
        self, path: Path, datasets: Sequence[Dataset], checksum: int, checkpoint: bytes | None
    ) -> None:
        """Write what is known when all data and tables are there.

        Args:
            checksum: of all rows of the tables.
            checkpoint: what a checkpoint holds besides tensors.
        """
