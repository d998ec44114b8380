"""Write files on many ranks at once: one process lays them out, all write, and only complete files appear.

The calls use :class:`FileWriter`. Entering it is collective, and put() is for this rank alone. Leaving it gives the
file its name on all ranks or on none. It consists of a :class:`Target` on rank 0 and a :class:`RankWriter` on each;
torch.distributed.checkpoint, which has a coordinator and no team, uses these two.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from hpcdist.comm.team import Team
from hpcdist.control import objects
from hpcdist.errors import FileError, HpcdistError, RankError, coded, reason
from hpcdist.formats import plain, safetensors
from hpcdist.formats.contents import Dataset, FileMap, row_checksums, row_dtype
from hpcdist.formats.hdf5 import add_table, table_of
from hpcdist.formats.known import format_of
from hpcdist.formats.paths import Commit, check_target, sync, write_errors
from hpcdist.formats.plain import memory
from hpcdist.layout import Box
from hpcdist.layout.box import Ints, run_starts, runs, summed
from hpcdist.staging import drivers
from hpcdist.staging.drivers import MpioFile, PartFile
from hpcdist.staging.pieces import Progress, report

WINDOW = 2**28  # bytes per rank, of what is not the caller's tensors
_COMPARED = 2**22  # bytes of a piece that are compared at a time


@dataclass(frozen=True)
class SaveOptions:
    """How a file is written.

    Attributes:
        writer: "auto", "mpio" or "posix".
        window: bytes of host memory that each rank may use for data in transit.
        resume: whether to continue the unfinished file of a job that died in the same save.
        attrs: attributes of the file itself.
        limit: bytes of data of a .safetensors file; with more, there are several files and an index.
        progress: called on each rank with the number of bytes just done.
    """

    writer: str = "auto"
    window: int = WINDOW
    resume: bool = False
    attrs: Mapping[str, Any] = field(default_factory=dict)
    limit: int | None = None
    progress: Progress = None


class Target:
    """A file from its layout to its name, on rank 0 or DCP's coordinator; the other ranks write to its part."""

    def __init__(self, path: str, datasets: Sequence[Dataset], options: SaveOptions) -> None:
        self.path, self.datasets = path, datasets
        self.format = format_of(path)
        self._options = options
        self._commit: Commit | None = None

    def lay_out(self) -> FileMap:
        """Lay out the file, or its unfinished part to resume."""
        with write_errors(self.path), ExitStack() as stack:
            stack.callback(self.discard)
            commit = self._commit = Commit(self.path, self._options.resume)
            there = 0 if commit.left is None else os.fstat(commit.left).st_blocks * 512
            check_target(self.path, sum(d.nbytes() for d in self.datasets) - there)
            made = self.format.create(commit.part, self.datasets, self._options.attrs)
            if commit.left is not None:
                places = zip(made.data, self.datasets, strict=True)
                made = replace(made, resumed=commit.adopt((at, at + d.nbytes()) for at, d in places))
            sync(commit.part, forget=True)  # before another rank opens it, and writes there
            stack.pop_all()
        return made

    def complete(
        self,
        written: Iterable[tuple[int, int]],
        checkpoint: bytes | None = None,
        edges: Iterable[tuple[int, bytes]] = (),
    ) -> None:
        """Write what describes the data, and give the file its name.

        Args:
            written: what :meth:`RankWriter.write_table` has returned on each rank.
            checkpoint: values of the file besides tensors.
            edges: position and bytes of data that no rank has written.
        """
        commit, (count, checksum) = self._commit, map(sum, zip((0, 0), *written, strict=True))
        assert commit is not None
        with write_errors(self.path):
            with commit.part.open("r+b") as file:
                for place, data in edges:
                    plain.write_at(file.fileno(), place, memoryview(data))
            if self.format.checksums and count != sum(d.count for d in self.datasets):
                raise FileError("HD419", f"{self.path}: the ranks have not written all that was planned")
            self.format.complete(commit.part, self.datasets, checksum % 2**64, checkpoint)
            commit.finish()
            self._commit = None

    def add_table(self) -> int:
        """Lay out the table, where the pieces were not known before."""
        assert self._commit is not None
        with write_errors(self.path):
            return add_table(self._commit.part, self.datasets[-1])

    def discard(self) -> None:
        """Discard the save; the target is unchanged. The unfinished file stays if it may be resumed."""
        if self._commit is not None:
            self._commit.discard(keep=self._options.resume)
            self._commit = None


class RankWriter:
    """The pieces that one rank writes into files that are laid out already. Nothing here needs another rank.

    Args:
        where: for each dataset its file, and the first bytes there of its data and of its table.
        rank: the number of this rank in the tables.

    Attributes:
        datasets: what is written; pieces are numbered by dataset, and within it by row.
        problem: the first error on this rank.
        kept: number of pieces that were in the file already.
        written: (dataset, row) -> box and checksum of each piece that is in the file.
    """

    def __init__(
        self,
        files: Sequence[PartFile],
        datasets: Sequence[Dataset],
        where: Sequence[tuple[PartFile, int, int]],
        options: SaveOptions,
        rank: int,
    ) -> None:
        self.files, self.datasets, self._where, self._options, self._rank = files, datasets, where, options, rank
        self.problem: str | None = None
        self.kept = 0
        self.written: dict[tuple[int, int], tuple[Box, int]] = {}

    def close(self) -> None:
        """Close the files, and free the kept bytes."""
        for file in self.files:
            file.close()
            file.edges.close()

    def put(self, i: int, row: int, box: Box, piece: Tensor) -> None:
        """Write a piece from contiguous host memory; keep a failure. Pieces of an earlier run are not written again."""
        if self.problem is None:
            try:
                digest = plain.digest() if self._where[i][0].checksums else None
                self.kept += self.write(i, box, memory(piece), digest)
                if digest is not None:
                    self.written[i, row] = box, digest.intdigest()
            except Exception as error:
                self.fail(error)
        try:
            report(self._options.progress, piece.nbytes)
        except ValueError as error:  # the caller's own; the ranks must end this call together
            self.problem = self.problem or str(error)

    def write(self, i: int, box: Box, data: memoryview, digest: Any = None) -> bool:
        """Write a box of a dataset, and update the checksum with it.

        Returns:
            Whether all pages that it fills were there already, left by another run.

        Raises:
            OSError: it cannot be written.
        """
        file, first, _ = self._where[i]
        size = self.datasets[i].dtype.itemsize
        nbytes = runs(box, self.datasets[i].shape)[0] * size
        return self._write(file, run_starts(box, self.datasets[i].shape) * size + first, nbytes, data, digest)

    def write_table(self) -> tuple[int, int]:
        """Write this rank's rows of the tables.

        Returns:
            The number of rows, and the sum of their checksums.
        """
        count, checksum = 0, 0

        def ndim(key: tuple[int, int]) -> int:
            return len(self.datasets[key[0]].shape)

        for n, of in groupby(sorted(self.written, key=lambda key: (ndim(key), key)), key=ndim):
            keys = list(of)
            boxes, digests = zip(*(self.written[key] for key in keys), strict=True)
            table, size = np.zeros(len(keys), row_dtype(n)), row_dtype(n).itemsize
            corners = np.array(boxes, np.int64).reshape(len(keys), 2, n) if n else np.array([[[0], [1]]] * len(keys))
            table["offset"], table["shape"], table["xxh3_64"] = corners[:, 0], corners[:, 1], digests
            table["rank"] = self._rank
            sums = row_checksums(table)
            table["check"] = sums.astype(np.uint32)
            count, checksum = count + len(keys), checksum + int(sums.sum())
            places = np.array([self._where[i][2] + row * size for i, row in keys])
            starts = np.flatnonzero(np.diff(places, prepend=-1) != size)
            lengths = np.diff(starts, append=len(keys))
            for length in np.unique(lengths).tolist():  # of runs of the file: many at once
                begun = starts[lengths == length]
                rows = table[(begun[:, None] + np.arange(length)).ravel()]
                self._write(self.files[0], places[begun], length * size, memoryview(rows.tobytes()))
        return count, checksum

    def _write(self, file: PartFile, places: Ints, nbytes: int, data: memoryview, digest: Any = None) -> bool:
        """Write runs of `nbytes` each: see write()."""
        cuts = file.edges.cut(places, nbytes)
        if (cuts[:, 1] == cuts[:, 2]).all():  # many runs at once
            file.edges.add(cuts, data)
            if digest is not None:
                digest.update(data)
            return False
        update = (lambda part: None) if digest is None else digest.update
        left = file.map.resumed
        for k, cut in enumerate(cuts):
            run, (place, begin, end, _) = data[k * nbytes : (k + 1) * nbytes], cut.tolist()
            head, body, tail = run[: begin - place], run[begin - place : end - place], run[end - place :]
            if head or tail:
                file.edges.add(cut, head, tail)
            update(head)
            left = left and holds(file.fd, begin, body)
            if left:
                update(body)
            else:
                file.write(begin, body, digest)
            update(tail)
        return left

    def fail(self, error: Exception) -> None:
        """Keep the first error on this rank."""
        if self.problem is None:
            text = coded("HD410", f"{self.files[0].name}: writing failed: {reason(error)}")
            self.problem = str(error) if isinstance(error, HpcdistError) else text


class FileWriter(RankWriter):
    """A file, or several and an index, that the ranks of a team write together, for a ``with`` block.

    Making one and leaving the block are collective. The error of a write is kept until then, and reported to every
    rank: ranks that exchange data continue. After an exception in the block, this rank gives up alone.

    Args:
        verb: the call that writes the file, for messages.
        datasets: what is written, the same on all ranks but for the attributes, of which rank 0's count.
        opens_together: whether all ranks open the files before any goes on, which may end the job and take them away.

    Raises:
        RankError: on every rank, if the file cannot be made, or anything failed on any. The target is as it was.
    """

    def __init__(
        self,
        team: Team,
        verb: str,
        path: str,
        datasets: Sequence[Dataset],
        options: SaveOptions,
        opens_together: bool = False,
    ) -> None:
        self.team, self.verb, self.path = team, verb, path
        if format_of(path).checksums:
            datasets = [*datasets, table_of(datasets)]
        self.names = safetensors.divide(path, [d.nbytes() for d in datasets], options.limit)
        self._targets = [Target(name, [datasets[i] for i in rows], options) for name, rows in self.names]  # rank 0's
        try:
            laid = objects.run_on_root(team.comm, verb, lambda: [target.lay_out() for target in self._targets])
        except BaseException:
            self._discard()
            raise
        files = list[PartFile]()
        where: dict[int, tuple[PartFile, int, int]] = {}
        for (name, rows), target, of in zip(self.names, self._targets, laid, strict=True):
            mpio = options.writer == "mpio" and drivers.takes_path(of.path)
            args = name, of, options.window
            files.append(MpioFile(*args, team.comm, target.datasets) if mpio else PartFile(*args))
            places = with_tables(of.data, target.datasets)
            where |= {i: (files[-1], *at) for i, at in zip(rows, places, strict=True)}
        super().__init__(files, datasets, [where[i] for i in range(len(datasets))], options, team.rank)
        try:
            if isinstance(files[0], MpioFile):
                objects.run_on_all(team.comm, verb, files[0].see)
            for file in files:
                if isinstance(file, MpioFile) or opens_together:
                    objects.run_on_all(team.comm, verb, file.open)
                else:
                    file.open()
        except RankError:
            self.drop()
            raise
        except Exception as error:  # reported when the block ends
            self.fail(error)

    def add_table(self, datasets: Sequence[Dataset]) -> None:
        """Lay out the table of a file whose pieces, which these have, were not known before. Collective."""
        self.datasets = self._targets[0].datasets = [*datasets, table_of(datasets)]
        place = objects.run_on_root(self.team.comm, self.verb, self._targets[0].add_table)
        places = with_tables([*(at for _, at, _ in self._where[:-1]), place], self.datasets)
        self._where = [(self.files[0], *of) for of in places]

    def commit(self) -> None:
        """Give the file its name, complete and on the disk. Collective.

        Raises:
            RankError: on every rank, if anything failed on any. The target is as it was.
        """
        written = 0, 0
        try:
            if self.problem is None:
                written = self.write_table()
        except Exception as error:
            self.fail(error)
        held = [(of, at, d) for (of, at, _), d in zip(self._where, self.datasets, strict=True)]
        for file in self.files:
            arrays = [(at, at + d.nbytes()) for of, at, d in held if of is file]
            problem = file.edges.settle(self.team, arrays, file.write)
            try:
                file.close()  # MPI-IO may write until then
                if problem is not None:
                    raise problem
                sync(Path(file.map.path))
            except Exception as error:
                self.fail(error)
        everyone: Any = self.team.comm.gather((self.problem, written))
        try:
            step = lambda: self._complete(everyone)  # noqa: E731
            objects.raise_problems(self.verb, objects.run_on_root(self.team.comm, self.verb, step))
        finally:
            self._discard()  # nothing, if it is complete

    def _complete(self, everyone: Sequence[tuple[str | None, tuple[int, int]]]) -> dict[int, str]:
        """Complete all files, on rank 0, or return a rank's error.

        Files get their names one after the other, the index last; until then, no index names old and new ones.
        """
        problems = {rank: problem for rank, (problem, _) in enumerate(everyone) if problem}
        if problems:
            return problems
        several, indexed = len(self.names) > 1, self.path.endswith(safetensors.SUFFIX)
        if several and any(os.path.lexists(name) for name, _ in self.names):
            safetensors.replace_form(safetensors.index_of(self.path))
        for target in self._targets:
            target.complete([of for _, of in everyone])
        if several:
            safetensors.write_index(self.path, self.datasets, self.names)
        if indexed:
            safetensors.replace_form(self.path if several else safetensors.index_of(self.path))
        return {}

    def drop(self) -> None:
        """Discard the files on this rank alone. Files that MPI-IO has open stay open."""
        for file in self.files:
            if self.team.size == 1 or not isinstance(file, MpioFile):
                file.close()
            file.edges.close()
        self._discard()

    def _discard(self) -> None:
        for target in self._targets:
            target.discard()

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.commit() if error is None else self.drop()


def with_tables(places: Sequence[int], datasets: Sequence[Dataset]) -> list[tuple[int, int]]:
    """Add to the place of each dataset that of its table; the last dataset is the tables."""
    sizes = summed([d.count * row_dtype(len(d.shape)).itemsize for d in datasets[:-1]]).tolist()
    return [(place, places[-1] + at) for place, at in zip(places, sizes, strict=False)]


def holds(fd: int, place: int, data: memoryview) -> bool:
    """Whether a file holds these bytes there."""
    blocks = ((at, data[at : at + _COMPARED]) for at in range(0, len(data), _COMPARED))
    return all(os.pread(fd, len(block), place + at) == block for at, block in blocks)
