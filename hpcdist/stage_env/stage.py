"""The steps of staging, on all ranks together."""

from __future__ import annotations

import secrets
import shutil
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

from hpcdist.control import objects
from hpcdist.errors import FileError, InputError, RankError, listed
from hpcdist.runtime.commandline import problem, show_bytes
from hpcdist.stage_env import archive, transfer
from hpcdist.stage_env.archive import Request, Source
from hpcdist.stage_env.copies import Copy, Part, Record, Store
from hpcdist.stage_env.environment import BASE, Relocation
from hpcdist.stage_env.transfer import VERB
from hpcdist.stage_env.unpack import Unpacker, changed
from hpcdist.stage_env.watchdog import Watchdog

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Options", "Staged", "stage"]

T = TypeVar("T")
Note = Callable[[str], None]
Bar = Callable[[int], Callable[[int], object]]


@dataclass(frozen=True)
class Options:
    """Where the copies go, and how.

    Attributes:
        to: folder on each node's own disk.
        job: what identifies this job.
        readers: number of nodes that read the archive.
        verify: whether all files of the copies are read again and compared.
        timeout: seconds without progress after which the job ends.
    """

    to: str
    job: str
    readers: int = 1
    verify: bool = False
    timeout: float = 1800.0


@dataclass(frozen=True)
class Staged:
    """What was done: the path of the environment on every node, how many nodes were sent it, of how many."""

    path: str
    source: Source
    sent: int
    nodes: int
    preparing: float  # seconds, packing among them
    sending: float
    verifying: float


def stage(
    comm: MPI.Intracomm,
    request: Request,
    options: Options,
    note: Note,
    bar: Bar,
) -> Staged:
    """Copy a folder or file to every node of `comm`. Collective over `comm`; rank 0's `request` and `options` count.

    Args:
        note: prints a line on rank 0.
        bar: makes a function that shows progress, of a number of bytes.

    Returns:
        What was done; the same on all ranks.

    Raises:
        RankError: on all ranks, if a node cannot have the copy. What was unpacked for it is gone everywhere.
    """
    from mpi4py import MPI

    options = objects.run_on_root(comm, VERB, lambda: options)
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    leaders: MPI.Intracomm = comm.Split(  # type: ignore[assignment]
        0 if node.rank == 0 else MPI.UNDEFINED, comm.rank
    )
    try:
        with Watchdog(options.timeout) as dog:
            steps = _Steps(leaders, options, note, bar, dog)
            lead = _in_one_line(lambda: steps.run(request) if node.rank == 0 else None)
            done = objects.run_on_all(comm, VERB, lead)
    finally:
        if node.rank == 0:
            leaders.Free()
        node.Free()
    staged = next(found for found in done if found is not None)
    assert isinstance(staged, Staged)
    return staged


def _in_one_line(step: Callable[[], T]) -> Callable[[], T]:
    """The step, with an error that its ranks have agreed on as one line, for an agreement of more ranks."""

    def run() -> T:
        try:
            return step()
        except RankError as error:
            raise FileError(problem(error)) from error

    return run


class _Steps:
    """The steps of the ranks that act for their nodes, one a node."""

    def __init__(self, comm: MPI.Intracomm, options: Options, note: Note, bar: Bar, dog: Watchdog) -> None:
        self.comm, self.options, self.note, self.bar, self.dog = comm, options, note, bar, dog

    def run(self, request: Request) -> Staged | None:
        """Make the copies. Collective; returns what was done on rank 0."""
        comm, dog = self.comm, self.dog
        times = [time.monotonic()]

        stores: list[Store] = []

        def destination() -> tuple[int, str]:
            stores.append(Store(self.options.to))
            return stores[0].available(), f"{stores[0].folder} on {socket.gethostname()}"

        free, where = min(objects.run_on_all(comm, VERB, destination))
        self._check_own(stores[0])

        def prepare() -> Source:
            with dog.doing(f"preparing {request.source}"):
                return archive.prepare(request, dog.touch, self.note, lambda needed: _check_space(where, needed, free))

        source = objects.run_on_root(comm, VERB, prepare)
        times.append(time.monotonic())
        node = _Node(stores[0], source, self.options, dog)
        try:
            sent = self._send(node)
            times.append(time.monotonic())
            if self.options.verify:
                objects.run_on_all(comm, VERB, node.verify)
        except BaseException as error:
            node.give_up(remove=isinstance(error, RankError))
            raise
        times.append(time.monotonic())
        prepared, moved, verified = (end - begin for begin, end in pairwise(times))
        staged = Staged(str(node.path), source, sent, comm.size, prepared, moved, verified)
        return staged if comm.rank == 0 else None

    def _check_own(self, store: Store) -> None:
        """Check that the nodes do not share the folder for the copies: each would write them all."""
        name, host = objects.run_on_root(self.comm, VERB, lambda: (f".{secrets.token_hex(8)}", socket.gethostname()))
        seen = store.folder / name

        def write() -> None:
            if self.comm.rank == 0:
                seen.touch()

        def look() -> None:
            if seen.exists() and socket.gethostname() != host:
                text = "is shared by the nodes: expected a folder on each node's own disk"
                raise InputError("HD409", f"{self.options.to}: {text}")

        objects.run_on_all(self.comm, VERB, write)
        try:
            objects.run_on_all(self.comm, VERB, look)
        finally:
            if self.comm.rank == 0:
                seen.unlink(missing_ok=True)

    def _send(self, node: _Node) -> int:
        """Send the archive to the nodes that have no copy of it; return how many those are."""
        from mpi4py import MPI

        have = objects.run_on_all(self.comm, VERB, node.look)
        if all(have):
            return 0
        rank, readers = self.comm.rank, max(1, self.options.readers)
        part: MPI.Intracomm = self.comm.Split(  # type: ignore[assignment]
            0 if not have[rank] or rank < readers else MPI.UNDEFINED, rank
        )

        def send() -> None:
            if part != MPI.COMM_NULL:
                moved = self.bar(node.source.nbytes)

                def progress(nbytes: int) -> None:
                    self.dog.touch()
                    moved(nbytes)

                with self.dog.doing(f"copying {node.source.origin}"):
                    transfer.send(part, node.source, node.unpacker, readers, progress)

        try:
            objects.run_on_all(self.comm, VERB, _in_one_line(send))
        finally:
            if part != MPI.COMM_NULL:
                part.Free()
        objects.run_on_all(self.comm, VERB, node.finish)
        return have.count(False)


def _check_space(where: str, needed: int, free: int) -> None:
    if free < needed:
        text = f"{show_bytes(needed)} needed, {show_bytes(free)} free"
        raise FileError("HD412", f"{where}: no space for the copy: {text}")


class _Node:
    """The copy on this node.

    Attributes:
        path: of the environment, when it is complete.
        unpacker: what writes it; None if it is there.
    """

    def __init__(self, store: Store, source: Source, options: Options, dog: Watchdog) -> None:
        self.store, self.source = store, source
        self.unpacker: Unpacker | None = None
        self.path = store.path(source.digest) / source.name
        self._options, self._dog = options, dog
        self._part: Part | None = None

    def look(self) -> bool:
        """Whether there is a copy already; else begin one, or go on with one."""
        source, job = self.source, self._options.job
        copy = self.store.find(source.digest, job)
        if copy is not None:
            name = self._changed(copy, False)
            if name is None:
                return True
            users = self.store.remove(copy, job)
            if users:
                text = f"{name} was changed since it was copied, and {listed(users)} may use it"
                raise FileError("HD410", f"{copy.folder} on {socket.gethostname()}: {text}")
        self.store.sweep(source.digest)
        self._part = self.store.begin(source.digest)
        self.unpacker = Unpacker(self._part.folder, self._part.notes, self._relocation(), source.window // 4)
        needed, free = source.nbytes - self.unpacker.journal.offset, shutil.disk_usage(self.store.folder).free
        _check_space(f"{self.store.folder} on {socket.gethostname()}", needed, free)
        return False

    def _relocation(self) -> Relocation:
        folder = self.store.path(self.source.digest)
        moved = {old: str(folder / at) for old, at in self.source.prefixes}
        base = (self.source.base, str(folder / BASE)) if self.source.base else None
        return Relocation(moved, base, self.source.name)

    def finish(self) -> None:
        if self._part is not None:
            record = Record(self.source.digest, self.source.name, self.source.origin)
            self.store.finish(self._part, record, self._options.job)

    def verify(self) -> None:
        """Read all files of the copy again."""
        copy = Copy(self.store.path(self.source.digest))
        name = self._changed(copy, True)
        if name is not None:
            users = self.store.remove(copy, self._options.job)
            what = f"it stays, since {listed(users)} may use it" if users else "the copy is removed"
            raise FileError("HD410", f"{copy.folder} on {socket.gethostname()}: {name} is not what was sent: {what}")

    def _changed(self, copy: Copy, read: bool) -> str | None:
        with self._dog.doing(f"checking {copy.folder}"):
            return changed(copy.folder, copy.notes, read, self._dog.touch)

    def give_up(self, remove: bool) -> None:
        """After an error: what was unpacked is removed, or left to the next job."""
        if self._part is not None:
            self._part.close(remove)
        Copy(self.store.path(self.source.digest)).release(self._options.job)
