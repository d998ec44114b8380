"""Read boxes of arrays in open files, on one rank; of files that hpcdist has written, with checksums."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcdist import activity, layout, limits
from hpcdist.errors import FileError, coded
from hpcdist.files import h5, raw
from hpcdist.files.raw import memory
from hpcdist.layout import Box
from hpcdist.staging.catalog import Stored
from hpcdist.staging.host import incoming
from hpcdist.staging.links import external_data, hard_path
from hpcdist.staging.pieces import PIECE
from hpcdist.tensors import pool
from hpcdist.tensors.storage import bits

__all__ = ["DatasetReader", "Part", "Reader", "checksum_of", "read_box"]

_CHUNK = 2**26  # bytes of a chunk that HDF5 may always hold beside the window
_PART = 2**23  # bytes of a piece of many runs that are checked at a time


@dataclass(frozen=True)
class Reader:
    """An array in an open file of any format.

    Attributes:
        name: name of the array in the file; "" in a format that holds one array without a name.
        shape, dtype: of the array.
        read: fills a tensor with a box of it, in host memory of at most so many bytes: read(box, out, window).
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[Box, Tensor, int], None]

    def whole(self) -> Tensor:
        """Read all of it, as a CPU tensor of native byte order."""
        x = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        self.read(layout.whole(self.shape), x, limits.WINDOW)
        return x


class Part(NamedTuple):
    """A box that is read at a time.

    Attributes:
        row: piece that it is, whose checksum is compared.
        checks: pieces that are read and compared first.
    """

    box: Box
    row: int | None = None
    checks: tuple[int, ...] = ()


@dataclass(frozen=True)
class DatasetReader:
    """A dataset in an open HDF5 file.

    Attributes:
        path, fd: of the file.
        stored: the dataset.
        verify: True: every piece of which something is read is checked, and read whole for that if need be; None:
            those that are read whole anyway; False: none.
        progress: called with the number of bytes that have just been read.
    """

    path: str
    fd: int
    stored: Stored
    verify: bool | None = None
    progress: Callable[[int], None] | None = None
    _checked: set[int] = field(default_factory=set, init=False, repr=False)
    _begun: dict[int, Any] = field(default_factory=dict, init=False, repr=False)  # the checksums of pieces half read

    def read(self, want: Box, out: Tensor, window: int) -> None:
        """Read a box into `out`, a tensor of its shape on any device.

        Raises:
            FileError: a checksum is wrong, or the file ends early; OSError: it cannot be read.
        """
        limit = max(1, min(PIECE, window // 2) // out.itemsize)
        parts = self.parts(want, limit)
        local = [part.box.relative_to(want.offset) for part in parts]
        for part, target in zip(parts, incoming(out, local), strict=True):
            for row in part.checks:
                self.check(row, window)
            self.fill(part.box, part.row, target, window)

    def parts(self, want: Box, limit: int, follow: bool = False) -> list[Part]:
        """Return what a box is read in: parts of at most `limit` elements; with `follow`, larger pieces where follow()
        can read them."""
        stored, found = self.stored, []
        rows: list[int] = []
        if self.verify is not False and stored.pieces is not None:
            rows = stored.boxes.intersecting(want).tolist()
        if not rows or not self._in_pieces(want, rows):
            boxes = list(layout.boxes(want, limit))
            return [Part(box, checks=tuple(rows) if self.verify and not i else ()) for i, box in enumerate(boxes)]
        for row in rows:
            piece = stored.boxes[row]
            box = piece.intersect(want)
            if box == piece and (box.size() <= limit or (follow and self.follows(row))):
                found.append(Part(box, row))
                continue
            checks: tuple[int, ...] = (row,) if self.verify or box == piece else ()
            for cut in layout.boxes(box, limit):
                found.append(Part(cut, checks=checks))
                checks = ()
        return found

    def _in_pieces(self, want: Box, rows: Sequence[int]) -> bool:
        """Decide whether a box is read piece by piece: if it is one run, or whole pieces of several runs each.

        Args:
            rows: the pieces of which it has a part.
        """
        stored = self.stored
        if stored.raw is None or layout.runs(want, stored.shape)[1] == 1:
            return True
        pieces = [stored.boxes[row] for row in rows]
        whole = all(piece.intersect(want) == piece for piece in pieces)
        return whole and any(layout.runs(piece, stored.shape)[1] > 1 for piece in pieces)

    def follows(self, row: int) -> bool:
        """Return whether a piece can be read in parts, one after the other, by follow()."""
        where = self.stored.raw
        return where is not None and not where.swapped and layout.runs(self.stored.boxes[row], where.shape)[1] == 1

    def follow(self, row: int, part: Box, target: Tensor) -> bool:
        """Read the next part of a piece, which is read from its first element to its last, into contiguous host memory.

        Returns:
            Whether its checksum is right, if this is its last part; else True.
        """
        where, piece = self.stored.raw, self.stored.boxes[row]
        assert where is not None and self.stored.pieces is not None
        if part.offset == piece.offset:
            self._begun[row] = h5.digest()
        digest = self._begun[row]
        with self._truncation():
            raw.read_at(self.fd, where.place(part), memory(target), digest)
        self._note(target)
        if any(o + n < at + extent for o, n, at, extent in zip(*part, *piece, strict=True)):
            return True
        return int(self._begun.pop(row).intdigest()) == int(self.stored.pieces[row]["xxh3_64"])

    def fill(self, part: Box, row: int | None, target: Tensor, window: int) -> None:
        """Read a box into contiguous host memory; if it is the piece `row`, check it."""
        where = self.stored.raw
        if row is not None and where is not None and where.swapped:  # the checksum is of the bytes as they are stored
            self.check(row, window)
            row = None
        if row is not None:
            self._prove(row, partial(self._read_piece, part, target, window))
        elif where is None:
            read_box(self.path, self.stored.place, part, target, window, self.fd)
        else:
            with self._truncation():
                where.read(partial(raw.read_at, self.fd), part, target, window)
        self._note(target)

    def _note(self, target: Tensor) -> None:
        activity.touch()
        if self.progress is not None:
            self.progress(target.nbytes)

    def check(self, row: int, window: int) -> None:
        """Read a piece and compare its checksum, unless that was done before; a FileError if it is damaged."""
        if row in self._checked:
            return
        where, box = self.stored.raw, self.stored.boxes[row]
        if where is None:
            buffer = pool.empty(box.shape, self.stored.dtype, "cpu", fixed=True)
            self._prove(row, partial(self._read_piece, box, buffer, window))
        else:
            self._prove(row, partial(checksum_of, self.fd, where, box))
        self._checked.add(row)

    def _read_piece(self, box: Box, target: Tensor, window: int) -> int:
        """Read a piece into contiguous host memory; its checksum."""
        if self.stored.raw is None:
            read_box(self.path, self.stored.place, box, target, window, self.fd)
            return h5.checksum(memory(target))
        where = self.stored.raw
        if layout.runs(box, where.shape)[1] > 1:
            where.read(partial(raw.read_at, self.fd), box, target, window)
            return h5.checksum(memory(target))
        digest = h5.digest()
        raw.read_at(self.fd, where.place(box), memory(target), digest)
        return int(digest.intdigest())

    def _prove(self, row: int, read: Callable[[], int]) -> None:
        """Compare the checksum of what `read` reads; once more, in case the cache is out of date."""
        assert self.stored.pieces is not None
        expected = int(self.stored.pieces[row]["xxh3_64"])
        with self._truncation():
            if read() == expected:
                return
            raw.forget(self.fd)
            if read() != expected:
                raise FileError(self.damage(row))

    def damage(self, row: int) -> str:
        """Describe a piece that is not as it was written."""
        assert self.stored.pieces is not None
        box, rank = self.stored.boxes[row], self.stored.pieces[row]["rank"]
        where = ", ".join(f"{o}:{o + n}" for o, n in zip(box.offset, box.shape, strict=True))
        text = f"{self.path}: {self.stored.name}: piece {row} is damaged: elements [{where}], written by rank {rank}"
        return coded("HD404", text)

    @contextmanager
    def _truncation(self) -> Iterator[None]:
        try:
            yield
        except EOFError as error:
            raise FileError("HD404", f"{self.path}: {self.stored.name}: truncated: {error}") from error


def checksum_of(fd: int, where: raw.Raw, box: Box) -> int:
    """The checksum of a piece in a file.

    Raises:
        OSError, EOFError: it cannot be read.
    """
    digest = h5.digest()
    if layout.runs(box, where.shape)[1] > 1:
        stored = replace(where, swapped=False)  # the checksum is of the bytes as they are stored
        for part in layout.boxes(box, _PART // where.dtype.itemsize):
            x = torch.empty(part.shape, dtype=where.dtype, device="cpu")
            stored.read(partial(raw.read_at, fd), part, x, 2 * _PART)
            digest.update(memory(x))
        return int(digest.intdigest())
    buffer = memoryview(bytearray(raw.BLOCK))
    start, left = where.place(box), box.size() * where.dtype.itemsize
    while left:
        block = buffer[: min(left, raw.BLOCK)]
        raw.read_at(fd, start, block, digest)
        start, left = start + len(block), left - len(block)
    return int(digest.intdigest())


def read_box(path: str, place: str, box: Box, out: Tensor, window: int, fd: int | None = None) -> None:
    """Read a box of a dataset that only HDF5 can read (chunked, compressed, never written) into a CPU tensor; of the
    file that is open as `fd`, even if another one has its name by now."""
    stored = h5.stored_dtype(out.dtype)
    held = nullcontext(path) if fd is None else os.fdopen(os.dup(fd), "rb", 0)
    with held as source, h5.opened(source) as file:
        dataset = None if hard_path(path, file, place) != place else file[place]
        if dataset is None or external_data(dataset.id.get_create_plist()) is not None:
            raise FileError("HD407", f"{path}: has changed while it was read")
        chunk = prod(dataset.chunks or ()) * dataset.dtype.itemsize
        if chunk > max(_CHUNK, window, box.size() * out.dtype.itemsize):
            raise FileError(
                "HD416",
                f"{path}: {place}: is stored in chunks of {chunk:,} bytes, which HDF5 reads whole: more than window",
            )
        for part in layout.boxes(box, max(1, window // (2 * out.dtype.itemsize))):  # HDF5 has a copy of its own
            array = np.asarray(dataset[part.slices()]).astype(stored, copy=False)
            target = bits(out)[part.slices(box.offset)]
            target.copy_(bits(torch.from_numpy(np.ascontiguousarray(array)).view(out.dtype)).view_as(target))
