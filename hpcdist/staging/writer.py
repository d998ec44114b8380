"""Write files on many ranks at once: laid out by one process, written by all, complete or not there at all.

:class:`FileWriter` is what the calls use: entering it is collective, put() is this rank's alone, and leaving it gives
the file its name on all ranks or on none. It consists of a :class:`Target` on rank 0 and a :class:`RankWriter` on each;
torch.distributed.checkpoint, which has a coordinator and no team, uses these two.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from hpcdist import activity
from hpcdist.comm.team import Team
from hpcdist.control import objects
from hpcdist.errors import FileError, HpcdistError, RankError, coded, reason
from hpcdist.formats import plain, safetensors
from hpcdist.formats.atomic import Commit, check_target, patiently, sync
from hpcdist.formats.contents import Dataset, FileMap
from hpcdist.formats.hdf5 import table_of
from hpcdist.formats.plain import Raw, memory
from hpcdist.formats.table import format_of
from hpcdist.layout import Box
from hpcdist.layout.box_sequences import Ints, run_starts
from hpcdist.staging import drivers
from hpcdist.staging.pages import Edges, Owner, Pages
from hpcdist.staging.reader import checksum_of

__all__ = ["WINDOW", "FileWriter", "Laid", "PartFile", "RankWriter", "SaveOptions", "Target"]

WINDOW = 2**28  # bytes per rank, of what is not the caller's tensors

Noted = dict[tuple[int, int], int]
"""(number of a dataset, number of its piece) -> checksum."""


@dataclass(frozen=True)
class SaveOptions:
    """How a file is written.

    Attributes:
        writer: "auto", "mpio" or "posix".
        window: bytes of host memory that each rank may use for data in transit.
        resume: whether to continue what a job that died left of the same save.
        attrs: attributes of the file itself.
        limit: bytes of data of a .safetensors file; with more, there are several files and an index.
        source: origin of the data, for a resumed save that does not compare them again.
        progress: called on each rank with the number of bytes just done.
    """

    writer: str = "auto"
    window: int = WINDOW
    resume: bool = False
    attrs: Mapping[str, Any] = field(default_factory=dict)
    limit: int | None = None
    source: str = ""
    progress: Callable[[int], None] | None = None


@dataclass(frozen=True)
class Laid:
    """A file that is laid out, as all ranks need to know it.

    Attributes:
        map: where each dataset is.
        left: what another run has noted as complete.
        journal: how the names of the ranks' journals begin; "" if there are to be none.
    """

    map: FileMap
    left: Noted = field(default_factory=dict)
    journal: str = ""


class Target:
    """A file from its layout to its name, on rank 0 or DCP's coordinator; the other ranks write to its part."""

    def __init__(self, path: str, datasets: Sequence[Dataset], options: SaveOptions) -> None:
        self.path, self.datasets = path, datasets
        self.format = format_of(path)
        self._options = options
        self._resume = options.resume and not any(d.chunks for d in datasets)  # HDF5 moves chunks as it writes them
        self._commit: Commit | None = None

    def lay_out(self) -> Laid:
        """Lay out the file, or take over what was left of it."""
        options, datasets = self._options, self.datasets
        commit = self._commit = Commit(self.path, self._resume)
        try:
            nbytes = sum(d.nbytes() for d in datasets if d.chunks is None)
            check_target(self.path, nbytes - commit.part.stat().st_blocks * 512)
            key = summary(datasets, options) if self._resume else ""
            first = commit.part.with_suffix(".0.journal")  # rank r's is that of the number r + 1
            if commit.resumed and (places := _places(first, key)) is not None:
                left = {at: checksum for path in commit.journals() for at, checksum in _noted(path)}
                return Laid(FileMap.of(commit.part, places), left, str(commit.part.with_suffix("")))
            for path in (first, *commit.journals()):  # of another save
                path.unlink(missing_ok=True)
            os.truncate(commit.part, 0)
            made = self.format.create(commit.part, datasets, options.attrs)
            sync(commit.part, forget=True)  # before another rank opens it, and writes there
            if not self._resume:
                return Laid(made)
            first.write_text(json.dumps([key, made.data]))
            return Laid(made, {}, str(commit.part.with_suffix("")))
        except BaseException as error:
            self.discard()
            if isinstance(error, Exception) and not isinstance(error, FileError):  # each library has errors of its own
                raise FileError("HD410", f"{self.path}: cannot be written: {reason(error)}") from error
            raise

    def complete(self, written: Sequence[Ints], checkpoint: bytes | None = None) -> None:
        """Write the tables of pieces, and give the file its name.

        Args:
            written: for each rank the rows (dataset, piece, bits of the checksum) of what it has written.
            checkpoint: what the file holds besides tensors.
        """
        assert self._commit is not None
        tables = []
        if self.format.checksums:
            rows = np.concatenate([np.empty((0, 3), np.int64), *written])
            ranks = np.repeat(np.arange(len(written)), [len(of) for of in written])
            order = np.argsort(rows[:, 0], kind="stable")
            bounds = np.searchsorted(rows[order, 0], np.arange(len(self.datasets) + 1))
            for i, dataset in enumerate(self.datasets):
                of = order[bounds[i] : bounds[i + 1]]
                if len(np.unique(rows[of, 1])) != len(dataset.pieces or ()):
                    raise FileError("HD423", f"{self.path}: the ranks have not written all that was planned")
                tables.append(table_of(dataset, rows[of, 1], rows[of, 2].view(np.uint64), ranks[of]))
        self.format.complete(self._commit.part, self.datasets, tables, checkpoint)
        self._commit.finish()
        self._commit = None

    def discard(self) -> None:
        """Give up: the target is as it was. What was written stays, if it may be resumed."""
        if self._commit is not None:
            self._commit.discard(keep=self._resume)
            self._commit = None


def summary(datasets: Sequence[Dataset], options: SaveOptions) -> str:
    """A digest of what is written, and in which pieces: a save resumes what another one with the same has left."""
    digest = sha256()
    for d in datasets:
        digest.update(repr((d.name, d.shape, d.dtype, len(d.pieces or ()), d.filters, _comparable(d.attrs))).encode())
        if d.pieces is not None:
            digest.update(d.pieces.offsets.tobytes() + d.pieces.shapes.tobytes())
    digest.update(repr((_comparable(options.attrs), options.source)).encode())
    return digest.hexdigest()


def _comparable(attrs: Mapping[str, Any]) -> list[tuple[str, object]]:
    """Attributes as text, long arrays whole: numpy leaves out the middle."""
    return [(name, (x.dtype.str, x.tolist()) if isinstance(x, np.ndarray) else x) for name, x in sorted(attrs.items())]


# A journal holds what its rank has written so far. Each record has a check, since the rank may die while it writes one.
_RECORD = np.dtype([("dataset", "<i8"), ("row", "<i8"), ("xxh3_64", "<u8"), ("check", "<u8")])
_SALT = 0x9E3779B97F4A7C15  # so that zeros are not a record


def _check(dataset: int, row: int, checksum: int) -> int:
    return (checksum ^ (dataset * 0x1_0000_0001 + row + _SALT)) & (2**64 - 1)


def _noted(path: Path) -> Iterator[tuple[tuple[int, int], int]]:
    """Yield the records of a journal."""
    content = path.read_bytes()
    table: Any = np.frombuffer(content[: len(content) // _RECORD.itemsize * _RECORD.itemsize], _RECORD)
    for dataset, row, checksum, check in table.tolist():
        if check == _check(dataset, row, checksum):
            yield (dataset, row), checksum


def _places(path: Path, key: str) -> list[int | None] | None:
    """Where a save that was left has laid out its datasets; None if it was another one."""
    try:
        other, places = json.loads(path.read_text())
    except (OSError, ValueError):  # its writer died before
        return None
    return places if other == key else None


class PartFile:
    """A file that is laid out, as one rank writes to it.

    Args:
        name: the name that the file will have.
        number: of this rank among those that write, from 0 on.
        pages: which rank writes which page; None if no page is shared with a process on another host.
        window: bytes of memory for what lies in pages of others.
    """

    def __init__(
        self, name: str, laid: Laid, driver: drivers.Posix | drivers.Mpio, number: int, pages: Pages | None, window: int
    ) -> None:
        self.name, self.laid, self.driver, self.number, self.pages = name, laid, driver, number, pages
        self.edges = Edges(Path(os.path.realpath(name)).parent, window)
        self.checksums = bool(laid.journal) or format_of(name).checksums
        self._journal = -1

    def see(self) -> None:
        """Check that this rank sees the file, which another one has laid out. Caches of names may be some seconds out
        of date.

        Raises:
            FileError: it does not, or it may not write there.
        """
        path = self.laid.map.path
        if patiently(lambda: None if os.path.exists(path) else "unseen") is not None:
            raise FileError("HD413", f"{path}: not seen by this rank: the folder is not shared by all nodes")
        if not os.access(path, os.R_OK | os.W_OK):
            raise FileError("HD410", f"{path}: cannot be written by this rank")

    def open(self) -> None:
        """Open the file, which this rank must see; MPI-IO's on all ranks."""
        self.see()
        self.driver.open()
        if self.laid.journal:
            name = f"{self.laid.journal}.{self.number + 1}.journal"
            self._journal = os.open(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def close(self) -> None:
        """Close the file; MPI-IO's on all ranks. Closing it again does nothing."""
        journal, self._journal = self._journal, -1
        try:
            self.driver.close()
        finally:
            if journal >= 0:
                os.close(journal)

    def write(self, place: int, data: memoryview, digest: Any = None) -> None:
        """Write a run of the file, and update the checksum with it; keep what lies in pages of others."""
        if self.pages is None:
            self.driver.write(place, data, digest)
            return
        for start, end, owner in self.pages.cut(place, place + len(data)):
            part = data[start - place : end - place]
            if owner in (None, self.number):
                self.driver.write(start, part, digest)
                continue
            self.edges.add(np.array([[start, end - start, owner]]), part)
            if digest is not None:
                digest.update(part)

    def note(self, dataset: int, row: int, checksum: int) -> None:
        """Note in the journal, if there is one, that a piece is complete."""
        if self._journal >= 0:
            record = np.array([(dataset, row, checksum, _check(dataset, row, checksum))], _RECORD)
            os.write(self._journal, record.tobytes())


class RankWriter:
    """What one rank writes into files that are laid out already. Nothing here needs another rank.

    Args:
        where: for each dataset its file, the first byte there, and its number in the file.
        first: for each dataset, the number in the file of its first piece here.

    Attributes:
        datasets: what is written; pieces are numbered by dataset, and within it by row.
        problem: the first error on this rank.
        done: what another run has left complete.
        written: what this rank has written.
    """

    def __init__(
        self,
        files: Sequence[PartFile],
        datasets: Sequence[Dataset],
        where: Sequence[tuple[PartFile, int, int]],
        options: SaveOptions,
        first: Sequence[int] | None = None,
    ) -> None:
        self.files, self.datasets, self._where, self._options = files, datasets, where, options
        self._first = first or [0] * len(datasets)
        self.problem: str | None = None
        self.done: Noted = {}
        self.written: Noted = {}

    def close(self) -> None:
        """Close the files, and free what is kept."""
        for file in self.files:
            file.close()
            file.edges.close()

    def _raw(self, i: int) -> Raw:
        """The position of a dataset in its file."""
        file, start, _ = self._where[i]
        return Raw(file.laid.map.path, start, self.datasets[i].shape, self.datasets[i].dtype)

    def _piece(self, i: int, row: int) -> Box:
        pieces = self.datasets[i].pieces
        assert pieces is not None
        return pieces[row]

    def prove(self, rows: Sequence[Sequence[int]]) -> None:
        """Find what is complete already, by reading it; a failure is kept.

        Args:
            rows: the pieces of each dataset that this rank has to write.
        """
        for i, mine in enumerate(rows):
            file, _, number = self._where[i]
            if not file.laid.left or self.problem is not None:
                continue
            try:
                with open(file.laid.map.path, "rb", buffering=0) as part:
                    for row in mine:
                        noted = file.laid.left.get((number, self._first[i] + row))
                        if noted is not None and self._checksum(part.fileno(), i, row) == noted:
                            self.done[i, row] = self.written[i, row] = noted
            except OSError as error:
                self.fail(error)

    def _checksum(self, fd: int, i: int, row: int) -> int | None:
        """The checksum of a piece in the file; None if it cannot be read, and must be written again."""
        try:
            return checksum_of(fd, self._raw(i), self._piece(i, row))
        except (OSError, EOFError):
            return None

    def put(self, i: int, row: int, piece: Tensor) -> None:
        """Write a piece, contiguous host memory, and its checksum; a failure is kept.

        A piece that is there already is written again only if its data differ.
        """
        if self.problem is None:
            try:
                data = memory(piece)
                if (i, row) not in self.done or plain.checksum(data) != self.done[i, row]:
                    digest = plain.digest() if self._where[i][0].checksums else None
                    self.write(i, self._piece(i, row), data, digest)
                    if digest is not None:
                        self.record(i, row, digest.intdigest())
            except Exception as error:
                self.fail(error)
        self.report(piece.nbytes)

    def write(self, i: int, box: Box, data: memoryview, digest: Any = None) -> None:
        """Write a box of a dataset, and update the checksum with it.

        Raises:
            OSError: it cannot be written.
        """
        file, first, _ = self._where[i]
        itemsize = self.datasets[i].dtype.itemsize
        starts, length = run_starts(box, self.datasets[i].shape)
        places, nbytes = starts * itemsize + first, length * itemsize
        if file.pages is not None and len(places) > 1 and 0 < nbytes < file.pages.size:
            file.edges.add(file.pages.divide(places, nbytes), data)
            if digest is not None:
                digest.update(data)
            return
        for k, place in enumerate(places.tolist()):
            file.write(place, data[k * nbytes : (k + 1) * nbytes], digest)

    def record(self, i: int, row: int, checksum: int) -> None:
        """Note that a piece is complete, and its checksum."""
        self.written[i, row] = checksum
        self._where[i][0].note(self._where[i][2], self._first[i] + row, checksum)

    def fail(self, error: Exception) -> None:
        """Keep the first error on this rank."""
        if self.problem is None:
            text = coded("HD410", f"{self.files[0].name}: writing failed: {reason(error)}")
            self.problem = str(error) if isinstance(error, HpcdistError) else text

    def report(self, nbytes: int) -> None:
        """Tell the caller that so many bytes are done."""
        activity.touch()
        try:
            if self._options.progress is not None:
                self._options.progress(nbytes)
        except Exception as error:  # the caller's own; the ranks must end this call together
            self.fail(error)


class FileWriter(RankWriter):
    """A file, or several and an index, that the ranks of a team write together, for a ``with`` block.

    Making one and leaving the block are collective. The error of a write is kept until then, and reported to every
    rank: ranks that exchange data continue. After an exception in the block, this rank gives up alone.

    Args:
        verb: the call that writes the file, for messages.
        datasets: what is written, the same on all ranks but for the attributes, of which rank 0's count.
        owner: the ranks that write the pieces of dataset i with these elements, counted in C order.

    Raises:
        RankError: on every rank, if the file cannot be made, or anything failed on any. The target is as it was.
    """

    def __init__(
        self, team: Team, verb: str, path: str, datasets: Sequence[Dataset], owner: Owner, options: SaveOptions
    ) -> None:
        self.team, self.verb, self.path = team, verb, path
        self.names = safetensors.divide(path, datasets, options.limit)
        self._targets: list[Target] = []
        laid = objects.broadcast(team.comm, verb, lambda: self._lay_out(datasets, options))
        files = list[PartFile]()
        where: dict[int, tuple[PartFile, int, int]] = {}
        for (name, rows), of in zip(self.names, laid, strict=True):
            held = [datasets[i] for i in rows]
            spans = zip(of.map.data, held, strict=True)
            places = [(0, 0) if start is None else (start, d.nbytes()) for start, d in spans]
            pages = Pages(of.map.page, places, _owner_of(owner, rows, datasets))
            mpio = options.writer == "mpio" and drivers.takes_path(of.map.path)
            driver = drivers.Mpio(team.comm, held, of.map) if mpio else drivers.Posix(of.map)
            files.append(PartFile(name, of, driver, team.rank, pages, options.window))
            where |= {i: (files[-1], start, n) for n, (i, (start, _)) in enumerate(zip(rows, places, strict=True))}
        super().__init__(files, datasets, [where[i] for i in range(len(datasets))], options)
        try:
            if isinstance(files[0].driver, drivers.Mpio):  # all ranks open it together, or none
                objects.all_gather(team.comm, verb, files[0].see)
                objects.all_gather(team.comm, verb, files[0].open)
            else:
                for file in files:
                    file.open()
        except RankError:
            self.drop()
            raise
        except Exception as error:  # reported when the block ends
            self.fail(error)

    def _lay_out(self, datasets: Sequence[Dataset], options: SaveOptions) -> list[Laid]:
        found = []
        try:
            for name, rows in self.names:
                target = Target(name, [datasets[i] for i in rows], options)
                found.append(target.lay_out())
                self._targets.append(target)
        except BaseException:
            self._discard()
            raise
        return found

    def put_filtered(self, i: int, row: int | None, piece: Tensor | None) -> None:
        """Write a piece of a compressed dataset, or take part while others do. Collective; a failure is kept."""
        if self.problem is not None or row is None or piece is None:
            row = piece = None
        data = None if piece is None else memory(piece)
        try:
            box = None if row is None else self._piece(i, row)
            drivers.write_filtered(self.team, self.files[0].laid.map.path, self.datasets[i], box, data)
            if row is not None and data is not None:
                self.record(i, row, plain.checksum(data))
        except Exception as error:
            self.fail(error)
        self.report(0 if piece is None else piece.nbytes)

    def commit(self, datasets: Sequence[Dataset] | None = None) -> None:
        """Give the file its name, complete and on the disk. Collective.

        Args:
            datasets: on rank 0, with the pieces in which they have been written, where these were not known before.

        Raises:
            RankError: on every rank, if anything failed on any. The target is as it was.
        """
        for file in self.files:
            problem = file.edges.settle(self.team, file.driver.write)
            try:
                file.close()  # MPI-IO may write until then
                if problem is not None:
                    raise problem
                sync(Path(file.laid.map.path))
            except Exception as error:
                self.fail(error)
        rows = np.array([(i, row, of) for (i, row), of in self.written.items()], np.uint64)
        told = b"\1" + self.problem.encode() if self.problem else b"\0" + rows.tobytes()
        everyone = objects.gather_bytes(self.team.comm, told)
        try:
            step = lambda: self._complete(everyone, datasets or self.datasets)  # noqa: E731
            objects.raise_problems(self.verb, objects.broadcast(self.team.comm, self.verb, step))
        finally:
            self._discard()  # nothing, if it is complete

    def _complete(self, everyone: Sequence[bytes], datasets: Sequence[Dataset]) -> dict[int, str]:
        """Complete all files, on rank 0; or return what keeps a rank from it.

        Files get their names one after the other, the index last; until then, no index names old and new ones.
        """
        problems = {rank: told[1:].decode() for rank, told in enumerate(everyone) if told[0]}
        if problems:
            return problems
        written = [np.frombuffer(told[1:], np.int64).reshape(-1, 3) for told in everyone]
        several, index = len(self.names) > 1, safetensors.index_of(self.path)
        if several and any(os.path.lexists(name) for name, _ in self.names):
            safetensors.replace_form(index)
        for target, (_, rows) in zip(self._targets, self.names, strict=True):
            target.datasets = [datasets[i] for i in rows]
            target.complete([of[np.isin(of[:, 0], rows)] - (min(rows, default=0), 0, 0) for of in written])
        if several:
            safetensors.write_index(self.path, self.datasets, self.names)
        if self.path.endswith(safetensors.SUFFIX):
            safetensors.replace_form(self.path if several else index)
        return {}

    def drop(self) -> None:
        """Give up on this rank alone, without the others. Files that MPI-IO has open stay open."""
        for file in self.files:
            if self.team.size == 1 or isinstance(file.driver, drivers.Posix):
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


def _owner_of(owner: Owner, rows: Sequence[int], datasets: Sequence[Dataset]) -> Owner:
    """The ranks that write bytes of the datasets of one file, counted from the dataset's first."""
    return lambda n, at: owner(rows[n], at // datasets[rows[n]].dtype.itemsize)
