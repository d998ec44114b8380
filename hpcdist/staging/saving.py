"""The data of a file that ranks write together: what save(), piecewise writing and the commands share."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from hpcdist import layout
from hpcdist.comm.team import Team
from hpcdist.control import objects
from hpcdist.errors import FileError, RankError, coded
from hpcdist.files import h5
from hpcdist.files.commit import sync
from hpcdist.files.h5 import Dataset
from hpcdist.files.raw import Ints, memory
from hpcdist.staging import drivers, journal
from hpcdist.staging.drivers import Driver
from hpcdist.staging.pages import Edges, Owner, Pages
from hpcdist.staging.part import Part
from hpcdist.staging.target import SaveOptions, Target

__all__ = ["Saving"]


class Saving(Part):
    """A file that the ranks of a team write together, for a ``with`` block. Making one and commit() are collective.

    The error of a write is kept until commit(), which reports it to every rank: ranks that exchange data continue.
    The end of the block does what commit() does, or, after an exception, what drop() does.

    Args:
        verb: the call that writes the file, for messages.
        datasets: what is written, the same on all ranks.
        owner: the ranks that write the pieces of dataset i with these elements, counted in C order.

    Raises:
        RankError: on every rank, if the file cannot be made. The target is as it was.
    """

    def __init__(
        self, team: Team, verb: str, path: str, datasets: Sequence[Dataset], owner: Owner, options: SaveOptions
    ) -> None:
        super().__init__(path, datasets, options)
        self.team = team
        self.verb = verb
        self._edges = Edges(Path(os.path.realpath(path)).parent, options.window)
        self._settled = False
        self._driver: Driver | None = None
        self._target = Target(path, datasets, options) if team.rank == 0 else None
        self.map, self._left, self._notes = objects.broadcast(team.comm, verb, lambda: self._on_root().lay_out())
        places = [(0, 0) if at is None else (at, d.nbytes()) for d, at in zip(datasets, self.map.data, strict=True)]
        sizes = [d.dtype.itemsize for d in datasets]
        self._pages = Pages(self.map.page, places, lambda i, at: owner(i, at // sizes[i]))
        try:
            writers = objects.all_gather(team.comm, verb, self._see)
            what = f"rank 0 by {writers[0]}: choose one with the argument writer"
            odd = {r: f"writes by {name}, {what}" for r, name in enumerate(writers) if name != writers[0]}
            objects.raise_problems(verb, {rank: coded("HD421", text) for rank, text in odd.items()})
            if writers[0] == "mpio":
                objects.all_gather(team.comm, verb, self._open)
        except BaseException:
            self.drop()
            raise

    def _on_root(self) -> Target:
        assert self._target is not None
        return self._target

    def _see(self) -> str:
        """Check that the file is here, and open it if that takes this rank alone; the writer that it is written by."""
        h5.check_visible(self.map)
        name = drivers.for_path(self._options.writer, self.map.path)
        self._options = replace(self._options, writer=name)
        if name == "posix":
            self._open()
        return name

    def _open(self) -> None:
        writer = self._options.writer
        self._driver = drivers.open_driver(writer, self.team, self.datasets, self.map, self._options.hints)

    def _close(self) -> None:
        driver, self._driver = self._driver, None
        try:
            if driver is not None:  # first: all ranks may have to close the file together
                driver.close()
        finally:
            self._close_journal()

    def prove(self, rows: Sequence[Sequence[int]]) -> None:
        """Find what is complete already, by reading it. Collective.

        Args:
            rows: the pieces of each dataset that this rank has to write.
        """
        team, (path, end), page = self.team, self._notes, self.map.page
        if not path:
            return
        try:
            found = objects.all_gather(team.comm, self.verb, lambda: ([*self._proven(rows)], sum(map(len, rows))))
            self.done = {(i, row): self._left[i, row] for proven, _ in found for i, row in proven}
            start = sum((journal.nbytes(n, page) for _, n in found[: team.rank]), -(-end // page) * page)
            objects.all_gather(team.comm, self.verb, lambda: self._open_journal(Path(path), start))
        except RankError:
            self._abandon()
            raise

    def _write(self, place: int, data: memoryview, digest: Any = None) -> None:
        assert self._driver is not None
        self._pages.write(self.team.rank, place, data, self._driver.write, self._edges, digest)

    def put_filtered(self, i: int, row: int | None, piece: Tensor | None) -> None:
        """Write a piece of a compressed dataset, or take part while others do. Collective; a failure is kept."""
        assert self._driver is not None
        if self.problem is not None:
            row = piece = None
        box = None if row is None else self.datasets[i].pieces[row]
        data = None if piece is None else memory(piece)
        try:
            self._driver.write_filtered(i, box, data)
            if row is not None and data is not None:
                self.record(i, row, h5.checksum(data))
        except Exception as error:
            self.fail(error)
        self._report(0 if piece is None else piece.nbytes)

    def write_runs(self, i: int, starts: Ints, nbytes: int, data: memoryview) -> None:
        """Write runs of a dataset that begin at these elements; they follow each other in `data`. On this rank alone.

        Raises:
            OSError: it cannot be written.
        """
        places = starts * self.datasets[i].dtype.itemsize + (self.map.data[i] or 0)
        if 0 < nbytes < self._pages.size:
            self._pages.keep(places, nbytes, data, self._edges)
            return
        for k, place in enumerate(places.tolist()):
            self._write(place, data[k * nbytes : (k + 1) * nbytes])

    def sync(self) -> None:
        """Send what belongs to other ranks there, and bring all of it to the disk. Collective; a failure is kept."""
        self._settle()
        try:
            sync(Path(self.map.path))
        except OSError as error:
            self.fail(error)

    def _settle(self) -> None:
        """Send what belongs to other ranks there. Collective; a failure is kept. Again, it does nothing."""
        if self._settled:
            return
        self._settled = True
        assert self._driver is not None
        problem = self._edges.settle(self.team, self._driver.write)
        if problem is not None:
            self.fail(problem)

    def commit(self) -> None:
        """Give the file its name, complete and on the disk. Collective.

        Raises:
            RankError: on every rank, if anything failed on any. The target is as it was.
        """
        comm = self.team.comm
        self._settle()
        try:
            counts = objects.all_gather(comm, self.verb, self._end)
            written = self._gathered(counts) if self._options.lay_out is None else []
            objects.broadcast(comm, self.verb, lambda: self._on_root().complete(self.map, written))
        except RankError:
            self._abandon()
            raise

    def _end(self) -> int:
        """Close the file, and bring this rank's part of it to the disk; the number of pieces that it has written.

        MPI-IO may write until it is closed.
        """
        self._close()
        if self.problem is not None:
            raise FileError(self.problem)
        sync(Path(self.map.path))
        return len(self._written)

    def _gathered(self, pieces: Sequence[int]) -> list[Ints]:
        """On rank 0, for each rank: dataset, piece and bits of the checksum of what it has written. Collective.

        Args:
            pieces: how many each rank has written.
        """
        from mpi4py import MPI

        comm = self.team.comm
        mine = np.array([(*of, checksum) for of, checksum in self._written.items()], np.uint64).astype(np.int64)
        counts = [3 * n for n in pieces]
        recv = np.empty(sum(counts) if comm.rank == 0 else 0, np.int64)
        comm.Gatherv(
            [mine, MPI.INT64_T], [recv, counts, layout.displs(counts), MPI.INT64_T] if comm.rank == 0 else None
        )
        return [part.reshape(-1, 3) for part in np.split(recv, layout.displs(counts)[1:])] if comm.rank == 0 else []

    def _abandon(self) -> None:
        """Close the file and give up: the target is as it was. Collective."""
        try:
            objects.all_gather(self.team.comm, self.verb, self._close)
        finally:
            self._give_up()

    def drop(self) -> None:
        """Give up on this rank alone, without the others. Files that MPI-IO has open stay open."""
        if self.team.size == 1 or self._options.writer == "posix":
            self._close()
        self._give_up()

    def _give_up(self) -> None:
        self._edges.close()
        if self._target is not None:
            self._target.discard()

    def __enter__(self) -> Saving:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.commit() if error is None else self.drop()
