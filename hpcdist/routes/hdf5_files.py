"""The route hdf5: one file in the staging folder. Ranks write their messages to it, and read those for them.

For ranks that share only a file system. Rank 0 creates the file for one call, accessible to its user only;
one dataset holds the messages one after the other.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hpcdist import layout
from hpcdist.control import objects
from hpcdist.errors import FileError, reason
from hpcdist.formats import plain
from hpcdist.formats.contents import Dataset
from hpcdist.formats.hdf5 import HDF5
from hpcdist.formats.paths import check_folder, check_shared, lock, sweep
from hpcdist.formats.plain import page_size
from hpcdist.process import abort
from hpcdist.routes.route import Ints, Message, Method, Route, Step, Vector, cut
from hpcdist.tensors.storage import as_bytes

if TYPE_CHECKING:
    from hpcdist.comm.team import Team

VERB = "route hdf5"
PREFIX = "hpcdist-stage-"


class _Hdf5(Route):
    name = "hdf5"

    def method(self, team: Team, operation: str, nbytes: int, largest: int = 0) -> Method:
        return Method("a file in the staging folder")

    def allgatherv_sends(self, team: Team, what: Vector, send: Tensor, recv: Tensor) -> None:
        with _staged(team, what.counts) as file:
            file.each(plain.write_at, [(file.starts[team.rank], as_bytes(send))])
            file.each(plain.read_at, list(zip(file.starts, cut(recv, what.counts, what.displs), strict=True)))

    def start(self, team: Team, sends: list[Message], recvs: list[Message], longest: int) -> Sequence[Step]:
        # In the file: the messages of rank 0, then those of rank 1, ...
        table: list[list[tuple[int, int]]] = objects.all_gather_object(
            team.comm, [(dest, block.numel()) for dest, block in sends]
        )
        messages = [(source, dest, nbytes) for source, row in enumerate(table) for dest, nbytes in row]
        if messages:
            with _staged(team, [nbytes for _, _, nbytes in messages]) as file:
                starts = {(source, dest): start for (source, dest, _), start in zip(messages, file.starts, strict=True)}
                file.each(plain.write_at, [(starts[team.rank, dest], block) for dest, block in sends])
                file.each(plain.read_at, [(starts[source, team.rank], block) for source, block in recvs])
        return ()


class StagingPlace(NamedTuple):
    """A file for messages.

    Attributes:
        token_at, token: offset of a token, and the token: caches of names may be some seconds out of date.
        starts: offset of each message, on a page of its own, since two ranks must not write to the same page.
    """

    path: str
    token_at: int
    token: bytes
    starts: list[int]


def check_visible(place: StagingPlace) -> None:
    """Check that this rank sees the file that another one has made, and may write to it.

    Raises:
        FileError: if it does not, because the folder is another one on this node.
    """

    def unseen() -> str | None:
        try:
            with open(place.path, "rb") as file:
                seen = os.pread(file.fileno(), len(place.token), place.token_at)
                return None if seen == place.token else "another file by that name on this rank"
        except FileNotFoundError:
            return "not seen by this rank"
        except OSError as error:
            return f"cannot be read by this rank ({reason(error)})"

    check_shared(place.path, unseen)


class _File:
    """The file of one call.

    Attributes:
        starts: those of its place.
        fd: descriptor of the file if all ranks share the page cache of one system. The file then has no name, and
            vanishes with the last process that has it open. Otherwise None: the file is opened by name for each step,
            and written data are synced to the disk, so that other ranks see them.
    """

    def __init__(self, team: Team, place: StagingPlace) -> None:
        self.fd: int | None = None
        self.starts, self._team, self._place = place.starts, team, place

    def find(self) -> None:
        """Find the file on this rank, and verify that it is the right one. Collective."""
        seen = objects.run_on_all(self._team.comm, VERB, self._open)
        if self._team.settings.nodes > 1 or len(set(seen)) > 1:
            self.close()

    def _open(self) -> tuple[int, int]:
        check_visible(self._place)
        self.fd = os.open(self._place.path, os.O_RDWR | os.O_CLOEXEC)
        found = os.fstat(self.fd)
        return found.st_dev, found.st_ino

    def close(self) -> None:
        """Close the file, if it is open."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None

    def each(self, step: Callable[[int, int, memoryview], None], messages: list[tuple[int, Tensor]]) -> None:
        """Write (offset, bytes) on every rank, or read into them, by `step`. Collective."""

        def run() -> None:
            fd = os.open(self._place.path, os.O_RDWR | os.O_CLOEXEC) if self.fd is None else self.fd
            try:
                for offset, message in messages:
                    step(fd, offset, plain.memory(message))
                if self.fd is None and step is plain.write_at:
                    os.fsync(fd)
            finally:
                if self.fd is None:
                    os.close(fd)

        objects.run_on_all(self._team.comm, VERB, run)


@contextmanager
def _staged(team: Team, lengths: Ints) -> Iterator[_File]:
    """Create a temporary file for messages of these lengths that every rank sees. Collective.

    Raises:
        RankError: on every rank, if it cannot be created, or a rank does not see it. Nothing has been written.
    """
    with ExitStack() as cleanup:
        place = objects.run_on_root(team.comm, VERB, lambda: _create(team.settings.staging, lengths, cleanup))
        abort.temp_files.add(place.path)
        cleanup.callback(abort.temp_files.discard, place.path)
        file = _File(team, place)
        cleanup.callback(file.close)
        file.find()
        if file.fd is not None and team.rank == 0:
            _unname(place.path)
        yield file


def _create(folder: str, lengths: Ints, cleanup: ExitStack) -> StagingPlace:
    """Create a file in the staging folder for messages of these lengths, until `cleanup` ends.

    Raises:
        FileError: if the folder is missing, not writable or full.
    """
    try:
        check_folder(Path(folder), sum(lengths), "the staging folder")
    except FileError as error:
        raise FileError("HD410", f"{error} ({folder}; set another by HPCDIST_STAGING or init(staging=...))") from error
    sweep(Path(folder), PREFIX)
    try:
        fd, path = tempfile.mkstemp(prefix=PREFIX, suffix=".h5", dir=folder)
        cleanup.callback(os.close, fd)
        cleanup.callback(_unname, path)
        abort.temp_files.add(path)
        lock(fd)  # keeps other processes from sweeping the file
        page = page_size(Path(folder))
        padded = [-(-n // page) * page for n in lengths]
        dataset = Dataset("messages", (sum(padded) + 2 * page,), torch.uint8)
        first = -(-HDF5.create(Path(path), [dataset], {}).data[0] // page) * page
        place = StagingPlace(path, first, os.urandom(16), [first + page + start for start in layout.displs(padded)])
        with open(path, "r+b") as file:  # a client of a shared file system sends what it has when it closes
            file.seek(first)
            file.write(place.token)
        return place
    except OSError as error:
        raise FileError("HD410", f"{folder}: a staging file cannot be created: {reason(error)}") from error


def _unname(path: str) -> None:
    """Unlink the file: no rank needs its name any more."""
    Path(path).unlink(missing_ok=True)
    abort.temp_files.discard(path)


HDF5_ROUTE = _Hdf5()
