"""Read boxes of the tensors of files, on one rank, and compare the checksums of hpcdist's files."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from hpcdist import layout
from hpcdist.errors import FileError
from hpcdist.formats import plain, torch_files
from hpcdist.formats.contents import Contents, FileParts, Slices, Stored, Table, boxes_of
from hpcdist.formats.known import format_of
from hpcdist.formats.paths import file_errors, open_regular
from hpcdist.formats.plain import Raw, memory
from hpcdist.layout import Box
from hpcdist.layout.box import Listed
from hpcdist.staging.pieces import Progress, incoming, piece_limit, report
from hpcdist.tensors import accelerator
from hpcdist.tensors.storage import bits

_PART = 2**21  # bytes that are read at a time to be checked
_MOST_OPEN = 32
NAPS = (3.2, 1.6, 0.8, 0.4, 0.2, 0.1, 0)  # seconds between attempts, the last one first


class OpenFiles:
    """The files of a description, each opened on this rank when it is first read; the latest ones are open."""

    def __init__(self, contents: Contents) -> None:
        self.contents = contents
        self._open: dict[str, int] = {}

    def fd(self, path: str) -> int:
        """The descriptor of a file; a FileError if it is not the one that was described."""
        if path not in self._open:
            if len(self._open) >= _MOST_OPEN:
                os.close(self._open.pop(next(iter(self._open))))
            fd, at = open_regular(path), self.contents.files[path]
            self._open[path] = fd
            if not at.is_of(fd):
                plain.forget(fd)  # the cache may be out of date
                if not at.is_of(fd):
                    os.close(self._open.pop(path))
                    text = f"{path}: is another file here than on rank 0: replaced while it was read, or not shared"
                    raise FileError("HD413", text)
        return self._open[path]

    def close(self) -> None:
        """Close all of them. They are opened again if they are read."""
        while self._open:
            os.close(self._open.popitem()[1])

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_files(
    find: Callable[[], Contents], on_all: Callable[[Callable[[], bool]], Sequence[bool]] = lambda sees: [sees()]
) -> OpenFiles:
    """Open all files of a description. A file may be replaced meanwhile, and caches of names may be some seconds out of
    date: it is described and opened again then.

    Args:
        find: describes them.
        on_all: runs a step on every rank that opens them, and returns all results; by default, on this rank alone.
    """
    naps = list(NAPS)
    while True:
        files = OpenFiles(find())

        def sees(files: OpenFiles = files) -> bool:
            try:
                for file in files.contents.files:
                    files.fd(file)
            except FileError:
                if not naps:
                    raise
                return False
            return True

        with ExitStack() as stack:
            stack.push(files)
            if all(on_all(sees)):
                stack.pop_all()
                return files
        time.sleep(naps.pop())


@dataclass(eq=False)
class TensorReader:
    """A tensor of a file.

    Attributes:
        window: bytes of host memory that may be used besides what is read into.
        verify: True: every piece of which something is read is checked, and read whole for that if need be; None: those
            that are read whole anyway; False: none.
        progress: called with the number of bytes that have just been read.
    """

    files: OpenFiles
    stored: Stored
    window: int
    verify: bool | None = None
    progress: Progress = None
    _checked: set[int] = field(default_factory=set, init=False)
    _rows: tuple[int, Table, Listed] = field(init=False)  # the number of the first, the rows, and their boxes
    _library: tuple[int, Slices] | None = field(default=None, init=False)  # for this descriptor
    _part: tuple[int, Raw | Tensor] | None = field(default=None, init=False)  # the last part of a tensor in parts

    def __post_init__(self) -> None:
        raw = self.stored.raw
        self.path, self.place = (self.files.contents.path, 0) if raw is None else (raw.path, raw.offset)
        if self._whole:
            self._rows = 0, self.stored.table, self.stored.boxes

    @property
    def _whole(self) -> bool:
        """Whether the whole table has been read, or there is none; else rows are read with what they describe."""
        return self.stored.pieces is None or "table" in vars(self.stored)

    def _box(self, row: int) -> Box:
        first, _, boxes = self._rows
        return boxes[row - first]

    @property
    def fd(self) -> int:
        return self.files.fd(self.path)

    def read(self, want: Box, out: Tensor) -> None:
        """Read a box into `out`, a tensor of its shape on any device and of any dtype.

        Raises:
            FileError: it cannot be read, a checksum is wrong, or the file ends early.
        """
        lazy = out.is_conj() or out.is_neg()  # its memory holds other values than it shows
        if out.dtype != self.stored.dtype or not (out.is_cpu or accelerator.holds(out)) or lazy:
            for part in layout.boxes(want, max(1, self.window // 2 // self.stored.dtype.itemsize)):
                x = torch.empty(part.shape, dtype=self.stored.dtype, device="cpu")
                self.read(part, x)
                out[part.slices(want.offset)].copy_(x)
            return
        parts = self._parts(want, piece_limit(self.window // 2, out.itemsize))
        local = [box.relative_to(want.offset) for box, _ in parts]
        for (box, row), target in zip(parts, incoming(out, local), strict=True):
            self.fill(box, row, target)

    def ahead(self, box: Box) -> None:
        """Let the system begin to read a box, which is one run of the file."""
        if (raw := self.stored.raw) is not None:
            start, itemsize = int(layout.run_starts(box, raw.shape)[0]), raw.dtype.itemsize
            os.posix_fadvise(self.fd, raw.offset + start * itemsize, box.size() * itemsize, os.POSIX_FADV_WILLNEED)

    def _parts(self, want: Box, limit: int) -> list[tuple[Box, int | None]]:
        """Return the parts in which a box is read, of at most `limit` elements; and the piece that each is in, if that
        is checked."""
        rows = list[int]()
        if self.verify is not False:
            if not self._whole:
                assert self.stored.pieces is not None
                with self._errors():
                    first, table = self.stored.pieces.within(self.fd, want)
                self._rows = first, table, boxes_of(table, self.stored.shape)
            rows = (self._rows[0] + self._rows[2].intersecting(want)).tolist()
        common = [(row, piece := self._box(row), piece.intersect(want)) for row in rows]
        if not rows or (not self.verify and all(box != piece for _, piece, box in common)):
            return [(box, None) for box in layout.boxes(want, limit)]
        return [
            (cut, row if self.verify or box == piece else None)
            for row, piece, box in common
            for cut in layout.boxes(box, limit)
        ]

    def fill(self, box: Box, row: int | None, target: Tensor) -> None:
        """Read a box into contiguous host memory; the piece `row`, which holds it, is checked."""
        if row is not None and self._box(row) == box:
            self._prove(row, partial(self._read_piece, box, target))
        else:
            if row is not None:
                self.check(row)
            with self._errors():
                self._read(box, target)
        report(self.progress, target.nbytes)

    def check(self, row: int) -> None:
        """Read a piece and compare its checksum, unless that was done before; a FileError if it is damaged."""
        if row not in self._checked:
            self._prove(row, partial(self._checksum, self._box(row)))
            self._checked.add(row)

    def _checksum(self, box: Box) -> int:
        limit, digest = max(1, _PART // self.stored.dtype.itemsize), plain.digest()
        buffer = torch.empty(min(limit, box.size()), dtype=self.stored.dtype, device="cpu")
        for part in layout.boxes(box, limit):
            x = buffer[: part.size()].view(part.shape)
            self._read(part, x)
            digest.update(memory(x))
        return int(digest.intdigest())

    def _read(self, box: Box, out: Tensor) -> None:
        """Read a box into a CPU tensor, without checks."""
        if self.stored.raw is not None:
            self.stored.raw.read(self.fd, box, out, self.window)
        elif self.stored.parts is not None:
            self._read_parts(self.stored.parts, box, out)
        else:
            limit = max(1, self.window // (2 * out.itemsize))  # the library has a copy of its own
            for part in layout.boxes(box, limit):
                bits(out)[part.slices(box.offset)].copy_(bits(self.by_library(part)))

    def by_library(self, box: Box) -> Tensor:
        """Read a box by the format's library, of the file that is open, even if another one has its name by now."""
        fd, path = self.fd, f"/proc/self/fd/{self.fd}"
        try:
            if self._library is None or self._library[0] != fd:
                self._library = fd, format_of(self.path).by_library(path, self.stored)
            return self._library[1](box)
        except FileError as error:
            raise FileError(str(error).replace(path, self.path)) from error

    def _read_parts(self, parts: FileParts, box: Box, out: Tensor) -> None:
        for row in parts.boxes.intersecting(box).tolist():
            part, (k, start, nbytes) = parts.boxes[row], parts.places[row].tolist()
            common, path = part.intersect(box), parts.files[k]
            target, inner = out[common.slices(box.offset)], common.relative_to(part.offset)
            fd = self.files.fd(path)
            if self._part is None or self._part[0] != row:
                what = f"{path}: {self.stored.name}"
                self._part = row, torch_files.part_of(what, fd, start, nbytes, part, self.stored.dtype)
            _, where = self._part
            if isinstance(where, Tensor):
                bits(target).copy_(bits(where[inner.slices()]))
            else:
                where.read(fd, inner, target, self.window)

    def _read_piece(self, box: Box, target: Tensor) -> int:
        """Read a piece into contiguous host memory; its checksum."""
        where = self.stored.raw
        if where is None or where.cover(box) != box:
            self._read(box, target)
            return int(plain.digest(memory(target)).intdigest())
        digest = plain.digest()
        where.read_runs(self.fd, box, target, digest)
        return int(digest.intdigest())

    def _prove(self, row: int, read: Callable[[], int]) -> None:
        """Compare the checksum of the data that `read` returns; retry once, because the cache may be out of date."""
        entry, box = self._rows[1][row - self._rows[0]], self._box(row)
        with self._errors():
            if read() == int(entry["xxh3_64"]):
                return
            plain.forget(self.fd)
            if read() == int(entry["xxh3_64"]):
                return
        where = ", ".join(f"{o}:{o + n}" for o, n in zip(box.offset, box.shape, strict=True))
        what = f"piece {row} is damaged: elements [{where}], written by rank {entry['rank']}"
        raise FileError("HD404", f"{self.path}: {self.stored.name}: {what}")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Let each error of the system and of a library name the file and the tensor."""
        what = f"{self.path}: {self.stored.name}".rstrip(": ")
        with file_errors(what):
            try:
                yield
            except EOFError as error:
                raise FileError("HD404", f"{what}: truncated: {error}") from error
