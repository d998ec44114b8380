"""Writing a staging file, from the layout to the rename: what save(), piecewise writing and the commands share."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from hpcdist import agree
from hpcdist.commit import Commit, check_target, sync
from hpcdist.errors import FileError, RankError, reason
from hpcdist.layout import Box
from hpcdist.raw import Raw, memory
from hpcdist.staging import contents, format, writers
from hpcdist.staging.format import Dataset, Layout
from hpcdist.staging.reader import checksum_of
from hpcdist.team import Team
from hpcdist.watch import record as watch

__all__ = ["WINDOW", "Options", "Saving"]

WINDOW = 2**28  # bytes a rank, of what is not the caller's tensors


@dataclass(frozen=True)
class Options:
    """How a file is written.

    Attributes:
        writer: "auto", "mpio" or "posix".
        window: bytes of host memory a rank for what is on its way.
        align: of datasets in the file, in bytes; None for the file system's own, 1 MiB at least.
        hints: for MPI-IO.
        resume: go on with what a job that died left of the same save.
        attrs: HDF5 attributes of the file itself.
        source: what the data come from, for a resumed save that does not look at them again.
        progress: called on each rank with the bytes that it has just done.
    """

    writer: str = "auto"
    window: int = WINDOW
    align: int | None = None
    hints: Mapping[str, str] = field(default_factory=dict)
    resume: bool = False
    attrs: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    progress: Callable[[int], None] | None = None


class Saving:
    """A file that the ranks of a team write together. Making one is collective, and so are finish() and abandon().

    A write that fails is kept until finish(), where every rank hears of it: ranks that exchange data go on doing so.

    Args:
        verb: the call on whose behalf it is, for messages.
        datasets: what is written, the same on all ranks.

    Attributes:
        problem: what has gone wrong on this rank so far.
        done: for each dataset, the pieces that another run has left complete.

    Raises:
        RankError: on every rank, if the file cannot be made. The target is as it was.
    """

    def __init__(self, team: Team, verb: str, path: str, datasets: Sequence[Dataset], options: Options) -> None:
        self.team = team
        self.verb = verb
        self.datasets = datasets
        self.problem: str | None = None
        self.done: list[set[int]] = [set() for _ in datasets]
        self._target = Path(path)
        self._commit: Commit | None = None
        self._tables = [format.records(d.pieces, len(d.shape)) for d in datasets]
        compressed = any(d.chunks for d in datasets)  # HDF5 changes its own index of them all the time
        self._options = replace(options, resume=options.resume and not compressed)
        self.layout, self._resumed = agree.on_root(team.comm, verb, self._lay_out)
        self._writers: list[writers.Writer] = []
        try:
            agree.on_all(team.comm, verb, lambda: format.look(self.layout))
            agree.on_all(team.comm, verb, self._open_writer)
        except BaseException:
            self._give_up()
            raise

    def _open_writer(self) -> None:
        name = writers.fit_for_path(self._options.writer, self.layout.path)
        self._options = replace(self._options, writer=name)
        self._writers.append(writers.opened(name, self.team.comm, self.datasets, self.layout, self._options.hints))

    def _close_writer(self) -> None:
        while self._writers:
            self._writers.pop().close()

    def _lay_out(self) -> tuple[Layout, bool]:
        """On rank 0: the file that is to be, or what was left of it, and which of the two."""
        nbytes = sum(d.nbytes() for d in self.datasets if d.chunks is None)
        check_target(self._target, 0)
        plan = format.summary(self.datasets, self._options.attrs, self._options.source)
        commit = self._commit = Commit(self._target, self._options.resume)
        try:
            check_target(self._target, nbytes - commit.part.stat().st_blocks * 512)
            resumed = commit.resumed and _left(commit.part) == plan
            if not resumed:
                align = format.alignment_of(commit.part.parent, self._options.align)
                return format.create(commit.part, self.datasets, plan, self._options.attrs, align), False
            return format.find_layout(commit.part), True
        except BaseException as error:
            self._give_up()
            if isinstance(error, Exception) and not isinstance(error, FileError):  # HDF5 has many ways to say so
                raise FileError(f"{self._target}: cannot be written: {reason(error)}") from error
            raise

    def prove(self, owners: Sequence[Sequence[int]]) -> None:
        """Find the pieces that are complete already, by reading them: each rank those that it owns. Collective."""
        if not self._resumed:
            return
        comm = self.team.comm
        try:
            self._tables = agree.on_root(comm, self.verb, self._left_tables)
            proven = agree.on_all(comm, self.verb, lambda: [self._proven(i, o) for i, o in enumerate(owners)])
        except RankError:
            self.abandon()
            raise
        for rank in proven:
            for i, found in enumerate(rank):
                self.done[i].update(found)

    def _proven(self, i: int, owners: Sequence[int]) -> list[int]:
        """The pieces of one dataset that this rank owns and finds complete."""
        dataset, table, start = self.datasets[i], self._tables[i], self.layout.data[i]
        if start is None:
            return []  # there is nothing in it
        where = Raw(self.layout.path, start, dataset.shape, dataset.dtype)
        rows = [row for row, owner in enumerate(owners) if owner == self.team.rank and table[row]["written"]]
        with open(self.layout.path, "rb") as file:
            return [row for row in rows if _holds(file.fileno(), where, dataset.pieces[row], table[row])]

    def _left_tables(self) -> list[format.Table]:
        stored = contents.describe(self.layout.path, incomplete=True).datasets
        tables = [stored[d.name].pieces for d in self.datasets]
        if any(table is None for table in tables):
            raise FileError(f"{self.layout.path}: a table of pieces is missing")
        return [table for table in tables if table is not None]

    def put(self, i: int, row: int, piece: Tensor) -> None:
        """Write a piece, contiguous host memory, and its checksum. On this rank alone; a failure is kept.

        One that is there already is not written again, if these are the data that are there.
        """
        if self.problem is None and not self._has(i, row, piece):
            try:
                digest = format.digest()
                self._writers[0].write(i, self.datasets[i].pieces[row], memory(piece), digest)
                self.record(i, row, digest.intdigest())
            except Exception as error:
                self.fail(error)
        self._report(piece.nbytes)

    def _has(self, i: int, row: int, piece: Tensor) -> bool:
        if row not in self.done[i]:
            return False
        digest = format.digest()
        digest.update(memory(piece))
        return int(digest.intdigest()) == int(self._tables[i][row]["xxh3_64"])

    def put_filtered(self, i: int, row: int | None, piece: Tensor | None) -> None:
        """Write a piece of a compressed dataset, or take part while others do. Collective; a failure is kept."""
        if self.problem is not None:
            row = piece = None
        box = None if row is None else self.datasets[i].pieces[row]
        data = None if piece is None else memory(piece)
        try:
            self._writers[0].write_filtered(i, box, data)
            if row is not None and data is not None:
                digest = format.digest()
                digest.update(data)
                self.record(i, row, digest.intdigest())
        except Exception as error:
            self.fail(error)
        self._report(0 if piece is None else piece.nbytes)

    def record(self, i: int, row: int, checksum: int) -> None:
        """Note that a piece is complete."""
        record = self._tables[i][row]
        record["xxh3_64"], record["rank"], record["written"] = checksum, self.team.rank, 1
        self._writers[0].record(i, row, record)

    def fail(self, error: Exception) -> None:
        """Keep the first thing that went wrong on this rank."""
        if self.problem is None:
            self.problem = f"{self._target}: writing failed: {reason(error)}"

    def _report(self, nbytes: int) -> None:
        watch.touch()
        try:
            if self._options.progress is not None:
                self._options.progress(nbytes)
        except Exception as error:  # the caller's own; the ranks are to end this call together
            self.fail(error)

    def finish(self) -> None:
        """Put the file in place under its name, complete and on the disk. Collective.

        Raises:
            RankError: on every rank, if anything failed on any. The target is as it was.
        """
        comm = self.team.comm
        try:
            sync(Path(self.layout.path))  # each rank as soon as it is done: the disk works while others still write
        except OSError as error:
            self.fail(error)
        try:
            agree.on_all(comm, self.verb, self._raise_problem)
            agree.on_all(comm, self.verb, self._close_writer)
            agree.on_all(comm, self.verb, lambda: sync(Path(self.layout.path)))
            agree.on_root(comm, self.verb, self._complete)
        except RankError:
            self.abandon()
            raise

    def _raise_problem(self) -> None:
        if self.problem is not None:
            raise FileError(self.problem)

    def _complete(self) -> None:
        assert self._commit is not None
        fd = os.open(self.layout.path, os.O_WRONLY | os.O_NOFOLLOW)
        try:
            os.pwrite(fd, format.COMPLETE, self.layout.state)
        finally:
            os.close(fd)
        self._commit.finish()
        self._commit = None

    def abandon(self) -> None:
        """Close the file and give up: the target is as it was. Collective."""
        agree.on_all(self.team.comm, self.verb, self._close_writer)
        self._give_up()

    def drop(self) -> None:
        """Give up on this rank alone, where the others cannot be told. What MPI-IO has open stays open."""
        if self.team.size == 1 or writers.active(self._options.writer)[0] == "posix":
            self._close_writer()
        self._give_up()

    def _give_up(self) -> None:
        if self._commit is not None:
            self._commit.discard(keep=self._options.resume)
            self._commit = None


def _left(part: Path) -> dict[str, Any] | None:
    """The plan of a file that was left, or None if there is nothing to go on with."""
    try:
        return contents.describe(str(part), incomplete=True).plan
    except FileError:
        return None


def _holds(fd: int, where: Raw, box: Box, record: np.void) -> bool:
    """Whether a piece in the file has the checksum that was noted when it was written."""
    try:
        return checksum_of(fd, where, box) == int(record["xxh3_64"])
    except (OSError, EOFError):  # it cannot be read: it is written again
        return False
