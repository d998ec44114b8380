"""The steps of staging, on all ranks together; one rank of each node does the work of its node."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import xxhash

from hpcdist.control import objects
from hpcdist.errors import FileError, HangError, InputError, RankError, coded, reason
from hpcdist.process import abort, exits
from hpcdist.runtime.commandline import problem
from hpcdist.stage_env.copies import Copy, open_folder
from hpcdist.stage_env.source import Packer, Source, fail

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["VERB", "Request", "Staged", "stage"]

T = TypeVar("T")
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
        try:
            return stage_on_nodes(leaders, request, bar) if leads else None
        except RankError as error:  # of those that lead: as one line
            raise FileError(problem(error)) from error

    try:
        done = objects.run_on_all(comm, VERB, work)[0]
    finally:
        leaders.Free()
    assert done is not None
    return done


def stage_on_nodes(comm: MPI.Intracomm, request: Request, bar: Bar) -> Staged:
    """Stage on the nodes of all ranks, one rank for each. Collective over `comm`."""
    packer: Packer | None = None  # rank 0's

    def run(doing: str, step: Callable[[], T]) -> list[T]:
        """Take a step on all nodes; return its results."""

        def guarded() -> T:
            with _deadline(doing, request.timeout):
                try:
                    return step()
                except OSError as error:
                    raise FileError("HD410", f"{_HOST}: {error.filename}: {reason(error)}") from error

        return objects.run_on_all(comm, VERB, guarded)

    def mark() -> tuple[str, str]:
        name = f".mark-{secrets.token_hex(8)}"
        if comm.rank == 0:
            (folder / name).touch()
        return _HOST, name

    def read() -> Source | None:
        nonlocal packer
        if host != _HOST and (folder / name).exists():  # each node would write a copy
            raise InputError("HD401", f"{request.to}: is shared by the nodes: expected a folder on each node's disk")
        if comm.rank == 0:
            packer = Packer(request.source, request.with_base, request.also)
        return packer.source if packer else None

    folder = run(f"opening {request.to}", lambda: open_folder(request.to))[comm.rank]
    host, name = run(f"marking {folder}", mark)[0]
    try:
        source = run(f"reading {request.source}", read)[0]
    finally:
        if comm.rank == 0:
            (folder / name).unlink(missing_ok=True)
    assert source is not None
    with closing(Copy(folder, source, request.job)) as copy:
        have = run(f"checking {copy.folder}", copy.prepare)
        start = time.monotonic()
        if not all(have):
            with _deadline(f"copying {request.source}", request.timeout) as moved:
                show = bar(source.nbytes)
                tar = packer.tar() if packer else iter(())
                _send(comm, tar, None if have[comm.rank] else copy, lambda nbytes: (moved(), show(nbytes)))
            run(f"renaming {copy.folder}", copy.finish)
    path = str(copy.folder / source.name)
    return Staged(path, source, have.count(False), comm.size, time.monotonic() - start)


@contextmanager
def _deadline(doing: str, seconds: float) -> Iterator[Callable[[], None]]:
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


def _send(comm: MPI.Intracomm, tar: Iterator[bytes], copy: Copy | None, received: Callable[[int], object]) -> None:
    """Send a tar from rank 0, and unpack it into the copies, in bounded memory. Collective over `comm`.

    Args:
        tar: on rank 0, what is sent.
        copy: None on a rank that needs none.
        received: called with the bytes of each piece.

    Raises:
        RankError: on all ranks, if one of them cannot read, or unpack.
    """
    from mpi4py import MPI

    color = 0 if copy or comm.rank == 0 else MPI.UNDEFINED
    part: MPI.Intracomm = comm.Split(color, comm.rank)  # type: ignore[assignment]
    checksum = xxhash.xxh3_128()

    def note(piece: bytes) -> None:
        checksum.update(piece)
        received(len(piece))

    pieces = _pieces(comm, part, tar, note)
    try:
        if copy is not None:
            copy.unpack(pieces)
        for _ in pieces:
            pass
    except RankError:
        raise
    except Exception as error:
        objects.run_on_all(comm, VERB, partial(fail, error))  # in place of the next piece
    finally:
        pieces.close()
        if part:
            part.Free()
    sums = objects.all_gather_object(comm, checksum.hexdigest() if color == 0 else None, VERB)
    text = coded("HD404", "what was sent was damaged on its way")
    objects.raise_problems(VERB, {rank: text for rank, found in enumerate(sums) if found not in (sums[0], None)})


def _pieces(
    comm: MPI.Intracomm, part: MPI.Intracomm, tar: Iterator[bytes], received: Callable[[bytes], object]
) -> Generator[bytes, None, None]:
    """Yield the pieces of rank 0's tar on the ranks of `part`, on others nothing as often. A thread reads ahead.

    Before each piece, all ranks of `comm` agree that none has failed.
    """

    def size() -> int:
        return len(ahead.result())

    with ThreadPoolExecutor(1) as thread:
        ahead = thread.submit(_joined, tar)
        while objects.run_on_all(comm, VERB, size)[0]:
            piece, ahead = ahead.result(), thread.submit(_joined, tar)
            piece = objects.broadcast_bytes(part, piece, 0) if part else b""
            received(piece)
            yield piece


def _joined(blocks: Iterator[bytes]) -> bytes:
    joined, size = [], 0
    for block in blocks:
        joined.append(block)
        size += len(block)
        if size >= PIECE:
            break
    return b"".join(joined)
