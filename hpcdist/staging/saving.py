"""Writing a staging file, from the layout to the rename: what save(), piecewise writing and the commands share."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from hpcdist import activity, layout
from hpcdist.comm.team import Team
from hpcdist.control import objects
from hpcdist.errors import FileError, RankError, reason
from hpcdist.files import h5
from hpcdist.files.commit import Commit, check_target, sync
from hpcdist.files.h5 import Dataset, Layout
from hpcdist.files.raw import Ints, Raw, memory, write_at
from hpcdist.layout import Box
from hpcdist.staging import contents, journal, writers
from hpcdist.staging.journal import Journal
from hpcdist.staging.pages import Edges, Owner, Pages
from hpcdist.staging.reader import checksum_of

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
        owner: the ranks that write the pieces of dataset i with these elements, counted in C order.

    Attributes:
        problem: what has gone wrong on this rank so far.
        done: (dataset, piece) -> checksum of what another run has left complete.

    Raises:
        RankError: on every rank, if the file cannot be made. The target is as it was.
    """

    def __init__(
        self, team: Team, verb: str, path: str, datasets: Sequence[Dataset], owner: Owner, options: Options
    ) -> None:
        self.team = team
        self.verb = verb
        self.datasets = datasets
        self.problem: str | None = None
        self.done: dict[tuple[int, int], int] = {}
        self._target = Path(path)
        self._edges = Edges(Path(os.path.realpath(path)).parent, options.window)
        self._commit: Commit | None = None
        self._written: dict[tuple[int, int], int] = {}  # (dataset, piece) -> checksum of those of this rank
        compressed = any(d.chunks for d in datasets)  # HDF5 changes its own index of them all the time
        self._options = replace(options, resume=options.resume and not compressed)
        self.layout, self._left, self._notes = objects.broadcast(team.comm, verb, self._lay_out)
        places = [(0, 0) if at is None else (at, d.nbytes()) for d, at in zip(datasets, self.layout.data, strict=True)]
        sizes = [d.dtype.itemsize for d in datasets]
        self._pages = Pages(self.layout.page, places, lambda i, at: owner(i, at // sizes[i]))
        self._settled = False
        self._journal: Journal | None = None
        self._writers: list[writers.Writer] = []
        try:
            objects.all_gather(team.comm, verb, lambda: h5.look(self.layout))
            objects.all_gather(team.comm, verb, self._open_writer)
        except BaseException:
            self._give_up()
            raise

    def _open_writer(self) -> None:
        name = writers.fit_for_path(self._options.writer, self.layout.path)
        self._options = replace(self._options, writer=name)
        self._writers.append(writers.opened(name, self.team.comm, self.datasets, self.layout, self._options.hints))

    def _close_writer(self) -> None:
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        while self._writers:
            self._writers.pop().close()

    def _lay_out(self) -> tuple[Layout, dict[tuple[int, int], int], tuple[str, int]]:
        """On rank 0: the file that is to be, or what was left of it; the checksums of what is complete in it; and the
        journal with its length, if there is to be one."""
        nbytes = sum(d.nbytes() for d in self.datasets if d.chunks is None)
        check_target(self._target, 0)
        plan = h5.summary(self.datasets, self._options.attrs, self._options.source)
        commit = self._commit = Commit(self._target, self._options.resume)
        try:
            check_target(self._target, nbytes - commit.part.stat().st_blocks * 512)
            if commit.resumed and _left(commit.part) == plan:
                commit.journal.touch()
                notes = str(commit.journal), commit.journal.stat().st_size
                return h5.find_layout(commit.part), journal.read(commit.journal), notes
            align = h5.alignment_of(commit.part.parent, self._options.align)
            made = h5.create(commit.part, self.datasets, plan, self._options.attrs, align)
            sync(commit.part, forget=True)  # before another rank opens it, and writes there
            if self._options.resume:
                commit.journal.write_bytes(b"")
            return made, {}, (str(commit.journal) if self._options.resume else "", 0)
        except BaseException as error:
            self._give_up()
            if isinstance(error, Exception) and not isinstance(error, FileError):  # HDF5 has many ways to say so
                raise FileError(f"{self._target}: cannot be written: {reason(error)}") from error
            raise

    def prove(self, rows: Sequence[Sequence[int]]) -> None:
        """Find what is complete already, by reading it. Collective.

        Args:
            rows: of each dataset, the pieces that this rank is to write.
        """
        team, (path, end), page = self.team, self._notes, self.layout.page
        if not path:
            return
        try:
            found = objects.all_gather(team.comm, self.verb, lambda: [*self._proven(rows)])
            self.done = {(i, row): self._left[i, row] for rank in found for i, row in rank}
            counts = objects.all_gather_object(team.comm, sum(map(len, rows)))
            at = sum((journal.nbytes(n, page) for n in counts[: team.rank]), -(-end // page) * page)
            objects.all_gather(team.comm, self.verb, lambda: self._open_journal(Path(path), at))
        except RankError:
            self.abandon()
            raise

    def _proven(self, rows: Sequence[Sequence[int]]) -> Iterator[tuple[int, int]]:
        """Those of this rank's pieces that the file holds as they were noted."""
        with open(self.layout.path, "rb", buffering=0) as file:
            for i, (dataset, mine) in enumerate(zip(self.datasets, rows, strict=True)):
                for row in mine if self.layout.data[i] is not None else ():
                    noted = self._left.get((i, row))
                    if noted is not None and _holds(file.fileno(), self.raw(i), dataset.pieces[row], noted):
                        self._written[i, row] = noted
                        yield i, row

    def raw(self, i: int) -> Raw:
        """Where a dataset lies in the file."""
        return Raw(self.layout.path, self.layout.data[i] or 0, self.datasets[i].shape, self.datasets[i].dtype)

    def put(self, i: int, row: int, piece: Tensor) -> None:
        """Write a piece, contiguous host memory, and its checksum. On this rank alone; a failure is kept.

        One that is there already is not written again, if these are the data that are there.
        """
        if self.problem is None:
            try:
                data, digest = memory(piece), h5.digest()
                if not self._has(i, row, data):
                    at, rank = self.raw(i).place(self.datasets[i].pieces[row]), self.team.rank
                    self._pages.write(rank, at, data, self._writers[0].write, self._edges, digest)
                    self.record(i, row, digest.intdigest())
            except Exception as error:
                self.fail(error)
        self._report(piece.nbytes)

    def write_runs(self, i: int, starts: Ints, nbytes: int, data: memoryview) -> None:
        """Write runs of a dataset that begin at these elements; they follow each other in `data`. On this rank alone.

        Raises:
            OSError: it cannot be written.
        """
        places = starts * self.datasets[i].dtype.itemsize + (self.layout.data[i] or 0)
        if 0 < nbytes < self._pages.size:
            self._pages.keep(places, nbytes, data, self._edges)
            return
        for k, place in enumerate(places.tolist()):
            part = data[k * nbytes : (k + 1) * nbytes]
            self._pages.write(self.team.rank, place, part, self._writers[0].write, self._edges)

    def _has(self, i: int, row: int, data: memoryview) -> bool:
        if (i, row) not in self.done:
            return False
        digest = h5.digest()
        digest.update(data)
        if int(digest.intdigest()) == self.done[i, row]:
            return True
        del self._written[i, row]
        return False

    def put_filtered(self, i: int, row: int | None, piece: Tensor | None) -> None:
        """Write a piece of a compressed dataset, or take part while others do. Collective; a failure is kept."""
        if self.problem is not None:
            row = piece = None
        box = None if row is None else self.datasets[i].pieces[row]
        data = None if piece is None else memory(piece)
        try:
            self._writers[0].write_filtered(i, box, data)
            if row is not None and data is not None:
                digest = h5.digest()
                digest.update(data)
                self.record(i, row, digest.intdigest())
        except Exception as error:
            self.fail(error)
        self._report(0 if piece is None else piece.nbytes)

    def record(self, i: int, row: int, checksum: int) -> None:
        """Note that a piece is complete, and what its checksum is."""
        self._written[i, row] = checksum
        if self._journal is not None:
            self._journal.note(i, row, checksum)

    def fail(self, error: Exception) -> None:
        """Keep the first thing that went wrong on this rank."""
        if self.problem is None:
            self.problem = f"{self._target}: writing failed: {reason(error)}"

    def _report(self, nbytes: int) -> None:
        activity.touch()
        try:
            if self._options.progress is not None:
                self._options.progress(nbytes)
        except Exception as error:  # the caller's own; the ranks are to end this call together
            self.fail(error)

    def settle(self) -> None:
        """Bring what belongs to other ranks there, and all of it to the disk. Collective; a failure is kept."""
        if self._settled:
            return
        self._settled = True
        problem = self._edges.settle(self.team, self._writers[0].write)
        if problem is not None:
            self.fail(problem)
        try:
            sync(Path(self.layout.path))  # each rank as soon as it is done: the disk works while others still write
        except OSError as error:
            self.fail(error)

    def finish(self) -> None:
        """Put the file in place under its name, complete and on the disk. Collective.

        Raises:
            RankError: on every rank, if anything failed on any. The target is as it was.
        """
        comm, path = self.team.comm, Path(self.layout.path)
        self.settle()
        try:
            objects.all_gather(comm, self.verb, self._raise_problem)
            objects.all_gather(comm, self.verb, self._close_writer)
            objects.all_gather(comm, self.verb, lambda: sync(path))
            written = self._gathered()
            objects.broadcast(comm, self.verb, lambda: self._complete(written))
        except RankError:
            self.abandon()
            raise

    def _gathered(self) -> list[Ints]:
        """On rank 0, for each rank: dataset, piece and bits of the checksum of what it has written. Collective."""
        from mpi4py import MPI

        comm = self.team.comm
        mine = np.array([(*of, checksum) for of, checksum in self._written.items()], np.uint64).astype(np.int64)
        counts = [3 * n for n in objects.all_gather_object(comm, len(self._written))]
        all_ = np.empty(sum(counts) if comm.rank == 0 else 0, np.int64)
        comm.Gatherv(
            [mine, MPI.INT64_T], [all_, counts, layout.displs(counts), MPI.INT64_T] if comm.rank == 0 else None
        )
        return [part.reshape(-1, 3) for part in np.split(all_, layout.displs(counts)[1:])] if comm.rank == 0 else []

    def _open_journal(self, path: Path, start: int) -> None:
        self._journal = Journal(path, start)

    def _raise_problem(self) -> None:
        if self.problem is not None:
            raise FileError(self.problem)

    def _complete(self, written: Sequence[Ints]) -> None:
        """On rank 0: the tables of pieces, the mark, and the name."""
        assert self._commit is not None
        tables = h5.filled(self.datasets, written)
        fd = os.open(self.layout.path, os.O_WRONLY | os.O_NOFOLLOW)
        try:
            write_at(fd, self.layout.table, memoryview(tables))
            write_at(fd, self.layout.state, memoryview(h5.COMPLETE))
        finally:
            os.close(fd)
        self._commit.finish()
        self._commit = None

    def abandon(self) -> None:
        """Close the file and give up: the target is as it was. Collective."""
        try:
            objects.all_gather(self.team.comm, self.verb, self._close_writer)
        finally:
            self._give_up()

    def drop(self) -> None:
        """Give up on this rank alone, where the others cannot be told. What MPI-IO has open stays open."""
        if self.team.size == 1 or writers.active(self._options.writer)[0] == "posix":
            self._close_writer()
        self._give_up()

    def _give_up(self) -> None:
        self._edges.close()
        if self._commit is not None:
            self._commit.discard(keep=self._options.resume)
            self._commit = None


def _left(part: Path) -> dict[str, Any] | None:
    """The plan of a file that was left, or None, with a warning, if there is nothing to go on with."""
    try:
        return contents.describe(str(part), incomplete=True).plan
    except Exception as error:  # whatever HDF5 makes of a file that was torn
        warnings.warn(
            f"what another run has left cannot be gone on with, and is written anew: {reason(error)}", stacklevel=2
        )
        return None


def _holds(fd: int, where: Raw, box: Box, noted: int) -> bool:
    """Whether a piece in the file has the checksum that was noted when it was written."""
    try:
        return checksum_of(fd, where, box) == noted
    except (OSError, EOFError):  # it cannot be read: it is written again
        return False
