"""A file that is written, from its layout to its name: what rank 0 does."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from hpcdist.errors import FileError, coded, reason
from hpcdist.files import h5
from hpcdist.files.commit import Commit, check_target, sync
from hpcdist.files.h5 import Dataset, FileMap
from hpcdist.files.raw import Ints, page_size, write_at
from hpcdist.staging import catalog, journal

__all__ = ["WINDOW", "SaveOptions", "Target"]

WINDOW = 2**28  # bytes a rank, of what is not the caller's tensors


@dataclass(frozen=True)
class SaveOptions:
    """How a file is written.

    Attributes:
        writer: "auto", "mpio" or "posix".
        window: bytes of host memory that each rank may use for data in transit.
        align: alignment of datasets in the file, in bytes; None for the file system's own, 1 MiB at least.
        hints: options of MPI-IO.
        resume: whether to continue what a job that died left of the same save.
        attrs: HDF5 attributes of the file itself.
        source: origin of the data, for a resumed save that does not compare them again.
        progress: called on each rank with the number of bytes just done.
        lay_out: of a format other than .h5, without checksums: writes all but the data of the datasets to a file, and
            returns the positions of the data. To `resume`, doing it again must change nothing.
    """

    writer: str = "auto"
    window: int = WINDOW
    align: int | None = None
    hints: Mapping[str, str] = field(default_factory=dict)
    resume: bool = False
    attrs: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    progress: Callable[[int], None] | None = None
    lay_out: Callable[[Path, Sequence[Dataset]], list[int]] | None = None


class Target:
    """The file of a save on rank 0; the other ranks write to its part."""

    def __init__(self, path: str, datasets: Sequence[Dataset], options: SaveOptions) -> None:
        self._resume = options.resume and not any(d.chunks for d in datasets)  # HDF5 moves chunks as it writes them
        self._path = path
        self._datasets = datasets
        self._options = options
        self._commit: Commit | None = None
        self._plan = b""  # as it is stored

    def lay_out(self) -> tuple[FileMap, dict[tuple[int, int], int], tuple[str, int]]:
        """Lay out the file, or take over what was left of it.

        Returns:
            Its map; (dataset, piece) -> checksum of what was left complete; and the path and length of the journal, ""
            if there is to be none.
        """
        options, datasets = self._options, self._datasets
        commit = self._commit = Commit(self._path, self._resume)
        try:
            nbytes = sum(d.nbytes() for d in datasets if d.chunks is None)
            check_target(self._path, nbytes - commit.part.stat().st_blocks * 512)
            plan = h5.summary(datasets, options.attrs, options.source)
            if options.lay_out is not None:
                return self._lay_out_other(options.lay_out, plan, nbytes)
            self._plan = h5.plan_text(plan)
            if commit.resumed and _plan_of(commit.part) == self._plan:
                commit.journal.touch()
                notes = str(commit.journal), commit.journal.stat().st_size
                return h5.find_map(commit.part), journal.read(commit.journal), notes
            align = options.align or max(h5.ALIGNMENT, os.stat(commit.part.parent).st_blksize)  # on Lustre, the stripe
            made = h5.create(commit.part, datasets, plan, options.attrs, align)
            sync(commit.part, forget=True)  # as above
            if self._resume:
                commit.journal.write_bytes(b"")
            return made, {}, (str(commit.journal) if self._resume else "", 0)
        except BaseException as error:
            self.discard()
            if isinstance(error, Exception) and not isinstance(error, FileError):  # each library has errors of its own
                raise FileError("HD410", f"{self._path}: cannot be written: {reason(error)}") from error
            raise

    def _lay_out_other(
        self, lay_out: Callable[[Path, Sequence[Dataset]], list[int]], plan: Mapping[str, Any], nbytes: int
    ) -> tuple[FileMap, dict[tuple[int, int], int], tuple[str, int]]:
        """As lay_out(), of another format: what is written is noted at the beginning of the journal."""
        assert self._commit is not None
        part, journal_path, page = self._commit.part, self._commit.journal, page_size(self._commit.part.parent)
        begin = sha256(h5.plan_text(plan)).digest().ljust(page, b"\0")
        left: dict[tuple[int, int], int] = {}
        if self._commit.resumed and _begins(journal_path, begin):
            left = journal.read(journal_path)
        else:
            os.truncate(part, nbytes)  # raises, if the file system has a limit on the size of files
            os.truncate(part, 0)
            if self._resume:
                journal_path.write_bytes(begin)
        starts = lay_out(part, self._datasets)
        sync(part, forget=True)  # before another rank opens it, and writes there
        notes = (str(journal_path), journal_path.stat().st_size) if self._resume else ("", 0)
        return FileMap(str(part), list(starts), page), left, notes

    def complete(self, file_map: FileMap, written: Sequence[Ints], checkpoint: bytes | None = None) -> None:
        """Write the tables of pieces and the mark, and give the file its name.

        Args:
            written: as of :func:`hpcdist.files.h5.tables`.
            checkpoint: what the file holds besides tensors.
        """
        assert self._commit is not None
        if checkpoint is not None:
            h5.add_checkpoint(self._commit.part, checkpoint)
        if self._options.lay_out is None:
            tables = h5.tables(self._datasets, written)
            fd = os.open(file_map.path, os.O_WRONLY | os.O_NOFOLLOW)
            try:
                write_at(fd, file_map.table, memoryview(tables))
                write_at(fd, file_map.state, memoryview(h5.seal(self._plan, tables, checkpoint or b"")))
            finally:
                os.close(fd)
        self._commit.finish()
        self._commit = None

    def discard(self) -> None:
        """Give up: the target is as it was. What was written stays, if it may be resumed."""
        if self._commit is not None:
            self._commit.discard(keep=self._resume)
            self._commit = None


def _begins(path: Path, content: bytes) -> bool:
    """Check that a file is there, and begins so."""
    try:
        with path.open("rb") as file:
            return file.read(len(content)) == content
    except FileNotFoundError:
        return False


def _plan_of(part: Path) -> bytes | None:
    """The plan of a file that was left, as it is stored; None, with a warning, if it cannot be resumed."""
    try:
        plan = catalog.describe(str(part), incomplete=True).plan
        return None if plan is None else h5.plan_text(plan)
    except Exception as error:  # whatever HDF5 makes of a file that was torn
        text = f"what another run has left cannot be resumed, and is written again: {reason(error)}"
        warnings.warn(coded("HD420", text), stacklevel=2)
        return None
