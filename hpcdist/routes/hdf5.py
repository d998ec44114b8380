"""The route hdf5: one file in the staging folder, to which ranks write what they send, and read what they receive.

For ranks that share a file system and little else. Rank 0 creates the file for one call, accessible to its user only;
one dataset holds the messages one after the other.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hpcdist import layout
from hpcdist.control import objects
from hpcdist.errors import FileError, reason
from hpcdist.files import h5, raw
from hpcdist.files.commit import check_folder, lock, sweep
from hpcdist.files.h5 import Dataset, FileMap
from hpcdist.files.raw import page_size
from hpcdist.process import abort
from hpcdist.routes.base import Ints, Message, Method
from hpcdist.routes.exchange import Exchange
from hpcdist.tensors.storage import as_bytes

if TYPE_CHECKING:
    from hpcdist.comm.team import Team

__all__ = ["HDF5_ROUTE", "Stage", "fetch"]

VERB = "route hdf5"
PREFIX = "hpcdist-stage-"


class _Hdf5(Exchange):
    name = "hdf5"

    def method(self, team: Team, operation: str, nbytes: int) -> Method:
        return Method("a file in the staging folder")

    def missing(self, team: Team) -> str | None:
        return None

    def carries(self, team: Team, cuda: bool) -> bool:
        return not cuda

    def gatherv(self, team: Team, send: Tensor, recv: Tensor | None, counts: Ints, displs: Ints, root: int) -> None:
        with _staged(team, counts) as file:
            file.write([(file.starts[team.rank], as_bytes(send))])
            file.read([] if recv is None else _parts(file, as_bytes(recv), counts, displs))

    def scatterv(self, team: Team, send: Tensor | None, recv: Tensor, counts: Ints, displs: Ints, root: int) -> None:
        with _staged(team, counts) as file:
            file.write([] if send is None else _parts(file, as_bytes(send), counts, displs))
            file.read([(file.starts[team.rank], as_bytes(recv)[: counts[team.rank]])])

    def allgatherv(self, team: Team, send: Tensor, recv: Tensor, counts: Ints, displs: Ints) -> None:
        with _staged(team, counts) as file:
            file.write([(file.starts[team.rank], as_bytes(send))])
            file.read(_parts(file, as_bytes(recv), counts, displs))

    def exchange(self, team: Team, sends: list[Message], recvs: list[Message], longest: int) -> None:
        # In the file: the messages of rank 0, then those of rank 1, ...
        table: list[list[tuple[int, int]]] = objects.all_gather_object(
            team.comm, [(dest, block.numel()) for dest, block in sends]
        )
        messages = [(source, dest, nbytes) for source, row in enumerate(table) for dest, nbytes in row]
        if messages:
            with _staged(team, [nbytes for _, _, nbytes in messages]) as file:
                starts = {(source, dest): start for (source, dest, _), start in zip(messages, file.starts, strict=True)}
                file.write([(starts[team.rank, dest], block) for dest, block in sends])
                file.read([(starts[source, team.rank], block) for source, block in recvs])


def _parts(file: _File, x: Tensor, counts: Ints, displs: Ints) -> list[tuple[int, Tensor]]:
    """Return (offset in the file, each rank's part of `x`)."""
    return [(at, x[d : d + n]) for at, d, n in zip(file.starts, displs, counts, strict=True)]


class _File:
    """The file of one call.

    Attributes:
        starts: offset of each message, on a page of its own, since two ranks must not write to the same page.
        fd: descriptor of the file if all ranks share the page cache of one system. The file then has no name, and
            vanishes with the last process that has it open. Otherwise None: the file is opened by name for each step,
            and written data are synced to the disk, so that other ranks see them.
    """

    def __init__(self, team: Team, place: FileMap, starts: list[int]) -> None:
        self.starts = starts
        self.fd: int | None = None
        self._team = team
        self._place = place

    def find(self) -> None:
        """Find the file on this rank, and verify that it is the right one. Collective."""
        seen = objects.all_gather(self._team.comm, VERB, self._open)
        if self._team.settings.nodes > 1 or len(set(seen)) > 1:
            self.close()

    def _open(self) -> tuple[int, int]:
        h5.check_visible(self._place)
        self.fd = os.open(self._place.path, os.O_RDWR | os.O_CLOEXEC)
        found = os.fstat(self.fd)
        return found.st_dev, found.st_ino

    def close(self) -> None:
        """Close the file, if it is open."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None

    def write(self, messages: list[tuple[int, Tensor]]) -> None:
        """Write (offset, bytes) on every rank. Collective."""
        objects.all_gather(
            self._team.comm, VERB, lambda: _each(self._place, messages, os.O_WRONLY, raw.write_at, self.fd)
        )

    def read(self, messages: list[tuple[int, Tensor]]) -> None:
        """Read the messages on every rank from their offsets. Collective."""
        objects.all_gather(
            self._team.comm, VERB, lambda: _each(self._place, messages, os.O_RDONLY, raw.read_at, self.fd)
        )


def _each(
    place: FileMap,
    messages: list[tuple[int, Tensor]],
    flags: int,
    step: Callable[[int, int, memoryview], None],
    opened: int | None = None,
) -> None:
    fd = os.open(place.path, flags | os.O_CLOEXEC) if opened is None else opened
    try:
        for offset, message in messages:
            step(fd, (place.data[0] or 0) + offset, raw.memory(message))
        if opened is None and flags == os.O_WRONLY:
            os.fsync(fd)
    finally:
        if opened is None:
            os.close(fd)


def fetch(ticket: list[Any], messages: list[tuple[int, Tensor]]) -> None:
    """Read (offset, bytes) from the file of a :class:`Stage` on another rank.

    Raises:
        FileError: if this rank does not see the file; OSError, EOFError: if it cannot be read.
    """
    path, token, token_at, start = ticket
    if not (Path(path).name.startswith(PREFIX) or re.fullmatch(r"/proc/\d+/fd/\d+", path)):
        raise FileError("HD403", f"{path}: not a staging file")
    place = FileMap(path, [start], 1, bytes.fromhex(token), token_at)
    h5.check_visible(place)
    _each(place, messages, os.O_RDONLY, raw.read_at)


@contextmanager
def _staged(team: Team, lengths: Ints) -> Iterator[_File]:
    """Create a temporary file for messages of these lengths that every rank sees. Collective.

    Raises:
        RankError: on every rank, if it cannot be created, or a rank does not see it. Nothing has been written.
    """
    held: list[Stage] = []
    file = None

    def make() -> tuple[FileMap, list[int]]:
        page = page_size(Path(team.settings.staging)) if os.path.isdir(team.settings.staging) else 1
        padded = [-(-n // page) * page for n in lengths]
        held.append(Stage(team.settings.staging, sum(padded)))
        return held[0].place, layout.displs(padded)

    try:
        place, starts = objects.broadcast(team.comm, VERB, make)
        abort.temp_files.add(place.path)
        file = _File(team, place, starts)
        file.find()
        if file.fd is not None:
            for stage in held:
                stage.unname()
        yield file
    finally:
        for stage in held:
            stage.remove()
        if file is not None:
            abort.temp_files.discard(place.path)
            file.close()


class Stage:
    """A new file in the staging folder, on the rank that creates it.

    Raises:
        FileError: if the folder is missing, not writable or full.
    """

    def __init__(self, folder: str, nbytes: int) -> None:
        try:
            check_folder(Path(folder), nbytes, "the staging folder")
        except FileError as error:
            raise FileError(
                "HD417", f"{error} ({folder}; set another by HPCDIST_STAGING or init(staging=...))"
            ) from error
        sweep(Path(folder), PREFIX)
        self._fd, self.path = tempfile.mkstemp(prefix=PREFIX, suffix=".h5", dir=folder)
        abort.temp_files.add(self.path)
        try:
            lock(self._fd)  # keeps other processes from sweeping the file
            dataset = Dataset("messages", (nbytes,), torch.uint8, [])
            plan, align = h5.summary([dataset], {}, ""), page_size(Path(folder))
            self.place = h5.create(Path(self.path), [dataset], plan, {}, align)
        except BaseException as error:
            self.remove()
            if isinstance(error, OSError):
                raise FileError("HD417", f"{folder}: a staging file cannot be created: {reason(error)}") from error
            raise

    def ticket(self, one_node: bool) -> list[Any]:
        """Return what another rank needs to find and identify the file.

        On one node, the file has no name from here on, and vanishes with this process.
        """
        path = self.place.path
        if one_node:
            self.unname()
            path = f"/proc/{os.getpid()}/fd/{self._fd}"
        else:
            os.fsync(self._fd)
        return [path, self.place.token.hex(), self.place.token_at, self.place.data[0] or 0]

    def write(self, messages: list[tuple[int, Tensor]]) -> None:
        """Write (offset, bytes) on this rank."""
        _each(self.place, messages, os.O_WRONLY, raw.write_at, self._fd)

    def unname(self) -> None:
        """Unlink the file: no rank needs its name any more."""
        Path(self.path).unlink(missing_ok=True)
        abort.temp_files.discard(self.path)

    def remove(self) -> None:
        self.unname()
        os.close(self._fd)


HDF5_ROUTE = _Hdf5()
