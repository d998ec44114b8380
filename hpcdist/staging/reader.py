"""Reading boxes of the datasets of one file into tensors, on one rank, with the checksums of what is read whole."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hpcdist import activity, layout
from hpcdist.errors import FileError
from hpcdist.files import h5, raw
from hpcdist.files.raw import memory
from hpcdist.files.regular import open_regular
from hpcdist.layout import Box
from hpcdist.staging.contents import Stored, read_box
from hpcdist.staging.host import incoming
from hpcdist.staging.pieces import PIECE

__all__ = ["Reader", "checksum_of", "damage", "opened"]


def checksum_of(fd: int, where: raw.Raw, box: Box) -> int:
    """The checksum of a piece in a file.

    Raises:
        OSError, EOFError: it cannot be read.
    """
    digest = h5.digest()
    buffer = memoryview(bytearray(raw.BLOCK))
    start, left = where.place(box), box.size() * where.dtype.itemsize
    while left:
        block = buffer[: min(left, raw.BLOCK)]
        raw.read_at(fd, start, block, digest)
        start, left = start + len(block), left - len(block)
    return int(digest.intdigest())


def damage(path: str, stored: Stored, row: int) -> str:
    """What is said of a piece whose bytes are not those that were written."""
    assert stored.pieces is not None
    box, rank = stored.boxes[row], stored.pieces[row]["rank"]
    where = ", ".join(f"{o}:{o + n}" for o, n in zip(box.offset, box.shape, strict=True))
    return f"{path}: {stored.name}: piece {row} is damaged: elements [{where}], written by rank {rank}"


@dataclass(frozen=True)
class Reader:
    """A dataset in an open file.

    Attributes:
        path, fd: of the file.
        stored: the dataset.
        window: bytes of host memory for what is on its way.
        verify: True: every piece that is touched is checked, and read whole for that if need be; None: those that are
            read whole anyway; False: none.
        progress: called with the bytes that have just been read.
    """

    path: str
    fd: int
    stored: Stored
    window: int
    verify: bool | None
    progress: Callable[[int], None] | None = None

    def read(self, want: Box, out: Tensor) -> None:
        """Read a box into `out`, a tensor of its shape on any device.

        Raises:
            FileError: a checksum is wrong, or the file ends early; OSError: it cannot be read.
        """
        where = self.stored.raw
        if where is None:
            self._by_hdf5(want, out)
            return
        _, count, _ = layout.runs(want, self.stored.shape)
        limit = max(1, min(PIECE, self.window // 2) // where.dtype.itemsize)
        rows: list[int | None]
        if count == 1 and self.verify is not False and self.stored.pieces is not None:
            rows, parts = self._pieces(want, limit)
        else:
            parts = list(layout.boxes(want, limit))
            rows = [None] * len(parts)
            if self.verify:
                self._check(want)
        local = [part.relative_to(want.offset) for part in parts]
        for row, part, target in zip(rows, parts, incoming(out, local), strict=True):
            self.fill(part, row, target)

    def fill(self, part: Box, row: int | None, target: Tensor) -> None:
        """Read a box into contiguous host memory; if it is the piece `row`, check it."""
        where = self.stored.raw
        assert where is not None
        try:
            if row is not None and where.swapped:  # the checksum is of the bytes as they are stored
                self.check(row)
            if row is None or where.swapped:
                where.read(partial(raw.read_at, self.fd), part, target, self.window)
            else:
                self._prove(row, partial(_read_whole, self.fd, where.place(part), memory(target)))
        except EOFError as error:
            raise FileError(f"{self.path}: {self.stored.name}: truncated: {error}") from error
        self._report(target.nbytes)

    def _report(self, nbytes: int) -> None:
        activity.touch()
        if self.progress is not None:
            self.progress(nbytes)

    def _pieces(self, want: Box, limit: int) -> tuple[list[int | None], list[Box]]:
        """What a run of the dataset is read in: (a piece's number where the whole piece is read, the part)."""
        found: list[tuple[int | None, Box]] = []
        for row in self.stored.boxes.intersecting(want).tolist():
            piece = self.stored.boxes[row]
            part = piece.intersect(want)
            if part == piece and part.size() <= limit:
                found.append((row, part))
                continue
            if self.verify or part == piece:
                self.check(row)
            found += [(None, cut) for cut in layout.boxes(part, limit)]
        return [row for row, _ in found], [part for _, part in found]

    def _check(self, want: Box) -> None:
        """Check every piece that a box touches."""
        for row in self.stored.boxes.intersecting(want).tolist():
            self.check(row)

    def check(self, row: int) -> None:
        """Read a piece and compare its checksum; a FileError if it is damaged."""
        where, box = self.stored.raw, self.stored.boxes[row]
        if where is None:
            buffer = torch.empty(box.shape, dtype=self.stored.dtype, device="cpu")
            read_box(self.path, self.stored.place, box, buffer, self.window, self.fd)
            digest = h5.digest()
            digest.update(memory(buffer))
            self._compare(row, digest.intdigest())
            return
        try:
            self._prove(row, partial(checksum_of, self.fd, where, box))
        except EOFError as error:
            raise FileError(f"{self.path}: {self.stored.name}: truncated: {error}") from error

    def _prove(self, row: int, read: Callable[[], int]) -> None:
        """Compare the checksum of what `read` reads; once more, if it may be the cache that is behind."""
        try:
            self._compare(row, read())
        except FileError:
            raw.forget(self.fd)
            self._compare(row, read())

    def _compare(self, row: int, checksum: int) -> None:
        assert self.stored.pieces is not None
        if checksum != int(self.stored.pieces[row]["xxh3_64"]):
            raise FileError(damage(self.path, self.stored, row))

    def _by_hdf5(self, want: Box, out: Tensor) -> None:
        limit = max(1, min(PIECE, self.window // 2) // out.itemsize)
        rows: list[int | None]
        if self.verify is not False and self.stored.pieces is not None:
            rows, parts = self._pieces(want, limit)
        else:
            parts = list(layout.boxes(want, limit))
            rows = [None] * len(parts)
        local = [part.relative_to(want.offset) for part in parts]
        for row, part, target in zip(rows, parts, incoming(out, local), strict=True):
            read_box(self.path, self.stored.place, part, target, self.window, self.fd)
            if row is not None:
                digest = h5.digest()
                digest.update(memory(target))
                self._compare(row, digest.intdigest())
            self._report(target.nbytes)


def _read_whole(fd: int, place: int, into: memoryview) -> int:
    """Read a run of the file; its checksum."""
    digest = h5.digest()
    raw.read_at(fd, place, into, digest)
    return int(digest.intdigest())


@contextmanager
def opened(path: str) -> Iterator[int]:
    """A file descriptor for reading; a FileError if there is no such regular file, or it may not be read."""
    fd = open_regular(path)
    try:
        yield fd
    finally:
        os.close(fd)
