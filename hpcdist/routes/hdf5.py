"""Through one HDF5 file in the staging folder: each rank writes what it sends, and reads what is for it.

For ranks that share a file system and little else. The file is made by rank 0, is there for one call, and belongs to
its user alone; it holds the messages one after the other in one dataset.
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

from hpcdist import abort, agree, layout, raw
from hpcdist.buffers import as_bytes
from hpcdist.commit import check_folder, lock, sweep
from hpcdist.errors import FileError, reason
from hpcdist.routes import Ints, Message
from hpcdist.routes.exchange import Exchange
from hpcdist.staging import format
from hpcdist.staging.format import Dataset, Layout

if TYPE_CHECKING:
    from hpcdist.team import Team

__all__ = ["HDF5_ROUTE", "Stage", "fetch"]

VERB = "route hdf5"
PREFIX = "hpcdist-stage-"


class _Hdf5(Exchange):
    def missing(self, team: Team) -> str | None:
        return None

    def carries(self, team: Team, cuda: bool) -> bool:
        return not cuda

    def gatherv(self, team: Team, send: Tensor, recv: Tensor | None, counts: Ints, displs: Ints, root: int) -> None:
        with _staged(team, displs[-1] + counts[-1]) as file:
            file.write([(displs[team.rank], as_bytes(send))])
            file.read([] if recv is None else [(0, as_bytes(recv)[: file.nbytes])])

    def scatterv(self, team: Team, send: Tensor | None, recv: Tensor, counts: Ints, displs: Ints, root: int) -> None:
        with _staged(team, displs[-1] + counts[-1]) as file:
            file.write([] if send is None else [(0, as_bytes(send)[: file.nbytes])])
            file.read([(displs[team.rank], as_bytes(recv)[: counts[team.rank]])])

    def allgatherv(self, team: Team, send: Tensor, recv: Tensor, counts: Ints, displs: Ints) -> None:
        with _staged(team, displs[-1] + counts[-1]) as file:
            file.write([(displs[team.rank], as_bytes(send))])
            file.read([(0, as_bytes(recv)[: file.nbytes])])

    def exchange(self, team: Team, sends: list[Message], recvs: list[Message], longest: int) -> None:
        # In the file: the messages of rank 0, one behind the other, those of rank 1, ...
        table: list[list[tuple[int, int]]] = agree.allgather(
            team.comm, [(dest, block.numel()) for dest, block in sends]
        )
        messages = [(source, dest, nbytes) for source, row in enumerate(table) for dest, nbytes in row]
        starts = layout.displs([nbytes for _, _, nbytes in messages])
        places = {(source, dest): start for (source, dest, _), start in zip(messages, starts, strict=True)}
        if messages:
            with _staged(team, sum(nbytes for _, _, nbytes in messages)) as file:
                file.write([(places[team.rank, dest], block) for dest, block in sends])
                file.read([(places[source, team.rank], block) for source, block in recvs])


class _File:
    """The file of one call.

    Attributes:
        fd: on one node, the file, which has no name any more: it goes with the last process that has it open. On
            several it is opened by its name for each step, and closed, so that the other nodes see what was written.
    """

    def __init__(self, team: Team, place: Layout, nbytes: int) -> None:
        self.nbytes = nbytes
        self.fd: int | None = None
        self._team = team
        self._place = place

    def find(self) -> None:
        """See on this rank that it is the file that was meant."""
        format.look(self._place)
        if self._team.world.nodes == 1:
            self.fd = os.open(self._place.path, os.O_RDWR | os.O_CLOEXEC)

    def write(self, messages: list[tuple[int, Tensor]]) -> None:
        """Write (offset, bytes) on every rank. Collective."""
        agree.on_all(self._team.comm, VERB, lambda: _each(self._place, messages, os.O_WRONLY, raw.write_at, self.fd))

    def read(self, messages: list[tuple[int, Tensor]]) -> None:
        """Fill the messages on every rank from their offsets. Collective."""
        agree.on_all(self._team.comm, VERB, lambda: _each(self._place, messages, os.O_RDONLY, raw.read_at, self.fd))


def _each(
    place: Layout,
    messages: list[tuple[int, Tensor]],
    flags: int,
    step: Callable[[int, int, memoryview], None],
    opened: int | None = None,
) -> None:
    fd = os.open(place.path, flags | os.O_CLOEXEC) if opened is None else opened
    try:
        for offset, message in messages:
            step(fd, (place.data[0] or 0) + offset, raw.memory(message))
    finally:
        if opened is None:
            os.close(fd)


def fetch(ticket: list[Any], messages: list[tuple[int, Tensor]]) -> None:
    """Fill (offset, bytes) from the file of a :class:`Stage` on another rank.

    Raises:
        FileError: this rank does not see the file; OSError, EOFError: it cannot be read.
    """
    path, token, token_at, start = ticket
    if not (Path(path).name.startswith(PREFIX) or re.fullmatch(r"/proc/\d+/fd/\d+", path)):
        raise FileError(f"{path}: not a staging file")
    place = Layout(path, bytes.fromhex(token), token_at, 0, [start], [])
    format.look(place)
    _each(place, messages, os.O_RDONLY, raw.read_at)


@contextmanager
def _staged(team: Team, nbytes: int) -> Iterator[_File]:
    """A file for `nbytes` bytes of messages that every rank sees; it is gone afterwards. Collective.

    Raises:
        RankError: on every rank, if it cannot be made, or a rank does not see it. Nothing has been written.
    """
    held: list[Stage] = []
    file = None

    def make() -> Layout:
        held.append(Stage(team.world.staging, nbytes))
        return held[0].place

    try:
        place = agree.on_root(team.comm, VERB, make)
        abort.LITTER.add(place.path)
        file = _File(team, place, nbytes)
        agree.on_all(team.comm, VERB, file.find)
        if team.world.nodes == 1:
            for stage in held:
                stage.unname()
        yield file
    finally:
        for stage in held:
            stage.remove()
        if file is not None:
            abort.LITTER.discard(place.path)
            if file.fd is not None:
                os.close(file.fd)


class Stage:
    """A new file in the staging folder, on the rank that makes it.

    Raises:
        FileError: the folder is missing, not writable or full.
    """

    def __init__(self, folder: str, nbytes: int) -> None:
        try:
            check_folder(Path(folder), nbytes, "the staging folder")
        except FileError as error:
            raise FileError(f"{error} ({folder}; HPCDIST_STAGING, or init(staging=...), names another)") from error
        sweep(Path(folder), PREFIX)
        self._fd, self.path = tempfile.mkstemp(prefix=PREFIX, suffix=".h5", dir=folder)
        abort.LITTER.add(self.path)
        try:
            lock(self._fd)  # for as long as it is held, nobody sweeps the file
            dataset = Dataset("messages", (nbytes,), torch.uint8, [])
            self.place = format.create(
                Path(self.path), [dataset], format.summary([dataset], {}, ""), {}, format.ALIGNMENT
            )
        except BaseException as error:
            self.remove()
            if isinstance(error, OSError):
                raise FileError(f"{folder}: a staging file cannot be made: {reason(error)}") from error
            raise

    def ticket(self, one_node: bool) -> list[Any]:
        """What another rank needs to find the file, and to know that it is the same. On one node the file has no name
        from here on: it goes with this process."""
        path = self.place.path
        if one_node:
            self.unname()
            path = f"/proc/{os.getpid()}/fd/{self._fd}"
        return [path, self.place.token.hex(), self.place.token_at, self.place.data[0] or 0]

    def write(self, messages: list[tuple[int, Tensor]]) -> None:
        """Write (offset, bytes) on this rank."""
        _each(self.place, messages, os.O_WRONLY, raw.write_at, self._fd)

    def unname(self) -> None:
        """Take its name, by which nobody needs to find it any more."""
        Path(self.path).unlink(missing_ok=True)
        abort.LITTER.discard(self.path)

    def remove(self) -> None:
        self.unname()
        os.close(self._fd)


HDF5_ROUTE = _Hdf5()
