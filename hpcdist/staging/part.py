"""What one rank writes into a file: its pieces, their checksums, and what another run has left of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from hpcdist import activity, layout
from hpcdist.errors import coded, reason
from hpcdist.files import h5
from hpcdist.files.h5 import Dataset, FileMap
from hpcdist.files.raw import Raw, memory
from hpcdist.staging.journal import Journal
from hpcdist.staging.reader import checksum_of
from hpcdist.staging.target import SaveOptions

__all__ = ["Part"]


class Part(ABC):
    """A file that is laid out already, as this rank writes to it. Nothing here needs another rank.

    Attributes:
        datasets: what is written; pieces are numbered by dataset, and within it by row.
        map: where each dataset is in the file.
        problem: the first error on this rank.
        done: (dataset, row) -> checksum of what another run has left complete.
    """

    map: FileMap

    def __init__(self, path: str, datasets: Sequence[Dataset], options: SaveOptions) -> None:
        self.datasets = datasets
        self.problem: str | None = None
        self.done: dict[tuple[int, int], int] = {}
        self._path = path
        self._options = options
        self._left: Mapping[tuple[int, int], int] = {}  # as `done`: what is noted, and not proven yet
        self._written: dict[tuple[int, int], int] = {}  # as `done`: what this rank has written
        self._journal: Journal | None = None

    def raw(self, i: int) -> Raw:
        """The position of a dataset in the file."""
        return Raw(self.map.path, self.map.data[i] or 0, self.datasets[i].shape, self.datasets[i].dtype)

    def put(self, i: int, row: int, piece: Tensor) -> None:
        """Write a piece, contiguous host memory, and its checksum; a failure is kept.

        A piece that is there already is written again only if its data differ.
        """
        if self.problem is None:
            try:
                data = memory(piece)
                if not self._has(i, row, data):
                    digest = h5.digest() if self._options.lay_out is None or self._journal is not None else None
                    self._write_box(i, row, data, digest)
                    if digest is not None:
                        self.record(i, row, digest.intdigest())
            except Exception as error:
                self.fail(error)
        self._report(piece.nbytes)

    def _write_box(self, i: int, row: int, data: memoryview, digest: Any) -> None:
        where, box = self.raw(i), self.datasets[i].pieces[row]
        length, _, starts = layout.runs(box, where.shape)
        nbytes = length * where.dtype.itemsize
        for k, start in enumerate(starts):
            self._write(where.offset + start * where.dtype.itemsize, data[k * nbytes : (k + 1) * nbytes], digest)

    @abstractmethod
    def _write(self, place: int, data: memoryview, digest: Any = None) -> None:
        """Write bytes at a position of the file, and update the checksum with them."""

    def _has(self, i: int, row: int, data: memoryview) -> bool:
        if (i, row) not in self.done:
            return False
        if h5.checksum(data) == self.done[i, row]:
            return True
        del self._written[i, row]
        return False

    def record(self, i: int, row: int, checksum: int) -> None:
        """Note that a piece is complete, and its checksum."""
        self._written[i, row] = checksum
        if self._journal is not None:
            self._note(self._journal, i, row, checksum)

    def _note(self, journal: Journal, i: int, row: int, checksum: int) -> None:
        journal.note(i, row, checksum)

    def fail(self, error: Exception) -> None:
        """Keep the first error on this rank."""
        self.problem = self.problem or coded("HD410", f"{self._path}: writing failed: {reason(error)}")

    def _report(self, nbytes: int) -> None:
        activity.touch()
        try:
            if self._options.progress is not None:
                self._options.progress(nbytes)
        except Exception as error:  # the caller's own; the ranks must end this call together
            self.fail(error)

    def _proven(self, rows: Sequence[Sequence[int]]) -> Iterator[tuple[int, int]]:
        """Yield this rank's pieces that the file holds as they were noted.

        Args:
            rows: the pieces of each dataset that this rank has to write.
        """
        with open(self.map.path, "rb", buffering=0) as file:
            for i, mine in enumerate(rows):
                for row in mine:
                    noted = self._left.get((i, row))
                    if noted is not None and self._checksum(file.fileno(), i, row) == noted:
                        self._written[i, row] = noted
                        yield i, row

    def _checksum(self, fd: int, i: int, row: int) -> int | None:
        """The checksum of a piece in the file; None if it cannot be read, and must be written again."""
        try:
            return checksum_of(fd, self.raw(i), self.datasets[i].pieces[row])
        except (OSError, EOFError):
            return None

    def _open_journal(self, path: Path, start: int) -> None:
        self._journal = Journal(path, start)

    def _close_journal(self) -> None:
        journal, self._journal = self._journal, None
        if journal is not None:
            journal.close()
