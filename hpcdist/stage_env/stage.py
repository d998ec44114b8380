"""The steps of staging, on all ranks together; one rank of each node does the work of its node."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import xxhash

from hpcdist.control import objects
from hpcdist.errors import FileError, HangError, InputError, RankError, coded, described, reason
from hpcdist.process import abort, exits
from hpcdist.runtime.commandline import problem
from hpcdist.stage_env.copies import Copy, open_folder
from hpcdist.stage_env.source import Packer, Source

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["VERB", "Request", "Staged", "stage"]

T = TypeVar("T")
Moved = Callable[[], object]  # notes that there is progress
Bar = Callable[[int], Callable[[int], object]]

VERB = "stage_env"
PIECE = 2**24  # bytes that are read, sent and unpacked at once
_HOST = socket.gethostname()


@dataclass(frozen=True)
class Request:
    """What the user asks for; the same on all ranks.

    Attributes:
        source: folder or file.
        to: folder on each node's own disk.
        job: what identifies this job, "" for none: jobs of one name share a copy.
        with_base, also: whether the base interpreter of a venv, and which other folders, are copied, too.
        timeout: seconds without progress after which the job ends.
    """

    source: str
    to: str
    job: str = ""
    with_base: bool = False
    also: tuple[str, ...] = ()
    timeout: float = 1800.0


@dataclass(frozen=True)
class Staged:
    """The path of the environment on every node, and how many nodes were sent it, of how many, in how many seconds."""

    path: str
    source: Source
    sent: int
    nodes: int
    seconds: float


def stage(comm: MPI.Intracomm, request: Request, bar: Bar) -> Staged:
    """Copy a folder or file to every node. Collective over `comm`.

    Args:
        bar: makes a function that shows progress, of a number of bytes; called on each rank that receives them.

    Returns:
        What was done; the same on all ranks.

    Raises:
        RankError: on all ranks, if a node cannot have the copy. What was unpacked for it is removed.
    """
    from mpi4py import MPI

    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    leads = node.rank == 0
    node.Free()
    leaders: MPI.Intracomm = comm.Split(0 if leads else 1, comm.rank)  # type: ignore[assignment]

    def work() -> Staged | None:
        with _one_line():
            return stage_on_nodes(leaders, request, bar) if leads else None

    try:
        done = objects.all_gather(comm, VERB, work)[0]
    finally:
        leaders.Free()
    assert done is not None
    return done


def stage_on_nodes(comm: MPI.Intracomm, request: Request, bar: Bar) -> Staged:
    """Stage on the nodes of all ranks, one rank for each. Collective over `comm`."""
    host, mark = objects.broadcast(comm, VERB, lambda: (_HOST, f".mark-{secrets.token_hex(8)}"))
    packers: list[Packer] = []  # rank 0's

    def run(doing: str, work: Callable[[Moved], T]) -> list[T]:
        def guarded() -> T:
            with _deadline(doing, request.timeout) as moved, _one_line():
                return work(moved)

        return objects.all_gather(comm, VERB, guarded)

    def open_(_: Moved) -> Path:
        folder = open_folder(request.to)
        if comm.rank == 0:
            (folder / mark).touch()
        return folder

    def read(_: Moved) -> Source | None:
        if host != _HOST and (folder / mark).exists():  # each node would write a copy
            raise InputError("HD409", f"{request.to}: is shared by the nodes: expected a folder on each node's disk")
        if comm.rank == 0:
            packers.append(Packer(request.source, request.with_base, request.also))
        return packers[0].source if packers else None

    def send(moved: Moved) -> None:
        if needed or comm.rank == 0:
            tar, show = packers[0].tar() if packers else iter(()), bar(nbytes)
            _send(part, tar, copy if needed else None, lambda nbytes: (moved(), show(nbytes)))
        if needed:
            copy.finish()

    folder = run(f"opening {request.to}", open_)[comm.rank]
    try:
        source = run(f"reading {request.source}", read)[0]
    finally:
        if comm.rank == 0:
            (folder / mark).unlink(missing_ok=True)
    assert source is not None
    nbytes = source.nbytes
    with closing(Copy(folder, source, request.job)) as copy:
        whole = run(f"checking {copy.folder}", lambda _: copy.prepare())
        start, needed = time.monotonic(), not whole[comm.rank]
        part: MPI.Intracomm = comm.Split(0 if needed or comm.rank == 0 else 1, comm.rank)  # type: ignore[assignment]
        try:
            if not all(whole):
                run(f"copying {request.source}", send)
        finally:
            part.Free()
    path = str(copy.folder / source.name)
    return Staged(path, source, whole.count(False), comm.size, time.monotonic() - start)


@contextmanager
def _deadline(doing: str, seconds: float) -> Iterator[Moved]:
    """A context that ends the job if the function it yields is not called for `seconds`."""
    timers: list[threading.Timer] = []

    def end() -> None:
        text = f"{doing} on {_HOST} has made no progress for {seconds:g} s"
        exits.show(HangError("HD601", text), None)
        abort.job(1)

    def moved() -> None:
        for timer in timers:
            timer.cancel()
        timers[:] = [threading.Timer(min(seconds, threading.TIMEOUT_MAX), end)]
        timers[0].daemon = True
        timers[0].start()

    moved()
    try:
        yield moved
    finally:
        timers[0].cancel()


@contextmanager
def _one_line() -> Iterator[None]:
    """A context whose errors are one line with a code, for the other ranks."""
    try:
        yield
    except OSError as error:
        raise FileError("HD410", f"{_HOST}: {error.filename}: {reason(error)}") from error
    except RankError as error:  # of some of the ranks
        raise FileError(problem(error)) from error


def _send(comm: MPI.Intracomm, tar: Iterator[bytes], copy: Copy | None, progress: Callable[[int], object]) -> None:
    """Send a tar from rank 0, and unpack it into the copies, in bounded memory. Collective over `comm`.

    Raises:
        RankError: on all ranks, if one of them cannot read, or unpack.
    """
    with ThreadPoolExecutor(1) as thread:
        stream = _Stream(comm, tar, thread, progress)
        try:
            if copy is not None:
                copy.unpack(stream)
            while stream.read(PIECE):  # the end of a tar has any length
                pass
        except RankError:
            raise
        except Exception as error:
            _agree(comm, f"{_HOST}: {described(error, 'HD901')}")
    sums = objects.all_gather_object(comm, stream.checksum.hexdigest(), VERB)
    text = coded("HD404", "what was sent was damaged on its way")
    objects.raise_problems(VERB, {rank: text for rank, found in enumerate(sums) if found != sums[0]})


class _Stream:
    """Rank 0's tar, as a file that all ranks read together: they receive each piece, and rank 0 reads ahead meanwhile.

    read() returns fewer bytes than asked for at the end of a piece.
    """

    def __init__(
        self, comm: MPI.Intracomm, tar: Iterator[bytes], thread: ThreadPoolExecutor, progress: Callable[[int], object]
    ) -> None:
        self._comm, self._tar, self._thread, self._progress = comm, tar, thread, progress
        self.checksum = xxhash.xxh3_128()
        self._ahead = thread.submit(_joined, tar)
        self._buffer, self._rest, self._over = bytearray(), memoryview(b""), False

    def read(self, size: int) -> bytes:
        if not self._rest and not self._over:
            self._receive()
        data, self._rest = bytes(self._rest[:size]), self._rest[size:]
        return data

    def _receive(self) -> None:
        from mpi4py import MPI

        mine = self._ahead.result()
        nbytes = _agree(self._comm, None, len(mine))
        if self._comm.rank == 0:
            self._buffer, self._ahead = mine, self._thread.submit(_joined, self._tar)
        elif len(self._buffer) < nbytes:
            self._buffer = bytearray(nbytes)
        self._comm.Bcast([self._buffer, nbytes, MPI.BYTE])
        self._rest, self._over = memoryview(self._buffer)[:nbytes], nbytes == 0
        self.checksum.update(self._rest)
        self._progress(nbytes)


def _joined(blocks: Iterator[bytes]) -> bytearray:
    piece = bytearray()
    for block in blocks:
        piece += block
        if len(piece) >= PIECE:
            break
    return piece


def _agree(comm: MPI.Intracomm, problem: str | None, nbytes: int = 0) -> int:
    """Return the bytes of rank 0's next piece, 0 at the end; raise a RankError on all ranks if one has a problem.

    A rank that fails calls this in place of the call before its next piece.
    """
    from mpi4py import MPI

    state = array("q", [problem is not None, nbytes])
    comm.Allreduce(MPI.IN_PLACE, [state, MPI.INT64_T], MPI.MAX)
    if state[0]:
        problems = enumerate(objects.all_gather_object(comm, problem, VERB))
        objects.raise_problems(VERB, {rank: text for rank, text in problems if text is not None})
    return state[1]
