"""The steps of staging, on all ranks together, and the copies on each node.

One rank of each node does the work of its node. The copies are in a private per-user directory:
DIR/hpcdist-UID/stage_env/DIGEST_JOB/NAME. A copy is unpacked beside its name, and renamed when it is complete. A folder
that is being filled or removed is called .part-TAG, and a process holds a lock on it: one without a lock was left by a
killed job.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import stat
import tarfile
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import xxhash

from hpcdist.control import objects
from hpcdist.errors import FileError, InputError, RankError, reason
from hpcdist.formats.paths import lock, private_folder
from hpcdist.runtime.commandline import problem, show_bytes
from hpcdist.stage_env.source import MANIFEST, Packer, Source, fail, lines, relocation, scan
from hpcdist.watch.deadlines import limited

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")

VERB = "stage_env"
PIECE = 2**24  # bytes that are read, sent and unpacked at once
_BLOCK = 2**16  # bytes that tarfile reads at once
_TEXT = 2**20  # bytes: larger files are no scripts
_HOST = socket.gethostname()


@dataclass(frozen=True)
class Request:
    """The user's request, the same on all ranks: a folder or file, the folder for it on each node's own disk, and the
    name of this job ("" for none). Also other folders, and the seconds without progress after which the job ends."""

    source: str
    to: str
    job: str = ""
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


def stage(comm: MPI.Intracomm, request: Request) -> Staged:
    """Copy a folder or file to every node; return the result, the same on all ranks. Collective over `comm`.

    Raises:
        RankError: on all ranks, if a node cannot have the copy. Its unpacked files are removed.
    """
    from mpi4py import MPI

    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    leads = node.rank == 0
    node.Free()
    leaders: MPI.Intracomm = comm.Split(0 if leads else 1, comm.rank)  # type: ignore[assignment]

    def work() -> Staged | None:
        try:
            return stage_on_nodes(leaders, request) if leads else None
        except RankError as error:  # of those that lead: as one line
            raise FileError(problem(error)) from error

    try:
        done = objects.run_on_all(comm, VERB, work)[0]
    finally:
        leaders.Free()
    assert done is not None
    return done


def stage_on_nodes(comm: MPI.Intracomm, request: Request) -> Staged:
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

    def read() -> Source | None:
        nonlocal packer
        if comm.rank == 0:
            packer = Packer(request.source, request.also)
        return packer.source if packer else None

    folder = Path(run(f"opening {request.to}", lambda: str(open_folder(request.to)))[comm.rank])
    source = run(f"reading {request.source}", read)[0]
    assert source is not None
    with closing(Copy(folder, source, request.job)) as copy:
        have = run(f"checking {copy.folder}", copy.prepare)
        start = time.monotonic()
        if not all(have):
            limit = partial(_deadline, f"copying {request.source}", request.timeout)
            _send(comm, packer.tar() if packer else iter(()), None if have[comm.rank] else copy, limit)
            run(f"renaming {copy.folder}", copy.finish)
    path = str(copy.folder / source.name)
    return Staged(path, source, have.count(False), comm.size, time.monotonic() - start)


def _deadline(doing: str, seconds: float) -> AbstractContextManager[None]:
    """A context that ends the job after so many seconds."""
    return limited(seconds, f"{doing} on {_HOST} has made no progress for {seconds:g} s")


def _send(
    comm: MPI.Intracomm, tar: Iterator[bytes], copy: Copy | None, limit: Callable[[], AbstractContextManager[None]]
) -> None:
    """Send a tar from rank 0, and unpack it where there is a `copy`, in bounded memory. Collective over `comm`. Each
    piece is in a context of `limit`. A RankError on all ranks if one of them cannot read, or unpack."""

    def pieces() -> Generator[bytes, None, None]:
        """Yield the pieces of rank 0's tar, once all ranks agree that none has failed. A thread reads ahead."""

        def head() -> tuple[int, bytes]:
            return len(ahead.result()), xxhash.xxh3_128_digest(ahead.result())

        with ThreadPoolExecutor(1) as thread:
            ahead = thread.submit(_joined, tar)
            while True:
                with limit():
                    size, digest = objects.run_on_all(comm, VERB, head)[0]
                    if not size:
                        return
                    piece, ahead = ahead.result(), thread.submit(_joined, tar)
                    piece = objects.broadcast_bytes(comm, piece, 0)
                    if xxhash.xxh3_128_digest(piece) != digest:
                        raise FileError("HD404", f"{_HOST}: the data were damaged in transit")
                    yield piece

    with closing(pieces()) as coming:
        try:
            if copy is not None:
                copy.unpack(coming)
            for _ in coming:
                pass
        except RankError:
            raise
        except Exception as error:
            objects.run_on_all(comm, VERB, partial(fail, error))  # in place of the next piece


def _joined(blocks: Iterator[bytes]) -> bytes:
    joined, size = [], 0
    for block in blocks:
        joined.append(block)
        size += len(block)
        if size >= PIECE:
            break
    return b"".join(joined)


def open_folder(base: str) -> Path:
    """Return the folder of this user's copies below the folder `base`, on this node; make it if it is missing. A
    FileError if there is no `base`, or other users could replace what is in it."""
    base = os.path.abspath(base)
    if not os.path.isdir(base):
        raise FileError("HD401", f"{base}: no such folder on {_HOST}")
    mode = os.stat(base).st_mode
    if mode & (stat.S_IWGRP | stat.S_IWOTH) and not mode & stat.S_ISVTX:
        raise FileError("HD402", f"{base} on {_HOST}: other users could replace the copy (it has no sticky bit)")
    if (private := private_folder(base)) == base:
        name = f"hpcdist-{os.getuid()}"
        raise FileError("HD402", f"{base}/{name} on {_HOST}: is not this user's alone, or cannot be made")
    folder = Path(private, "stage_env")
    folder.mkdir(0o700, exist_ok=True)
    return folder


class Copy:
    """The copy of a source on this node, for one job: in `folder`, when it is complete."""

    def __init__(self, store: Path, source: Source, job: str) -> None:
        self.folder = store / "_".join(filter(None, (source.digest[:16], job)))
        self._source = source
        self._part, self._lock = store / f".part-{secrets.token_hex(8)}", -1

    def prepare(self) -> bool:
        """Return whether the copy is there, and all that was unpacked is as it was, by sizes and times.

        If not, remove it, and what killed jobs have left, and make an empty folder to unpack into.
        """
        with suppress(OSError):
            if set((self.folder / MANIFEST).read_text().splitlines()) <= set(lines(scan(str(self.folder), ""))):
                return True
        store = self.folder.parent
        for left in store.glob(".part-*"):
            with suppress(OSError):
                _remove(left)
        _remove(self.folder)
        new = store / f".new-{secrets.token_hex(8)}"
        new.mkdir(0o700)
        self._lock = _locked(new)
        new.rename(self._part)  # only now others would remove it, if it were not locked
        free = shutil.disk_usage(store).free
        if free < self._source.nbytes:
            text = f"{show_bytes(self._source.nbytes)} needed, {show_bytes(free)} free"
            raise FileError("HD410", f"{store} on {_HOST}: no space for the copy: {text}")
        return False

    def unpack(self, pieces: Iterator[bytes]) -> None:
        """Unpack the pieces of a tar of the source, with its paths corrected for the final folder."""
        moved = {old: str(self.folder / at) for old, at in self._source.prefixes}
        unpack(pieces, str(self._part), relocation(moved), self._source.name)

    def finish(self) -> None:
        """List and rename the unpacked files. If another process was faster, its copy of the same source is used."""
        if self._lock >= 0:
            (self._part / MANIFEST).write_text("\n".join(lines(scan(str(self._part), ""))))
            try:
                os.rename(self._part, self.folder)
            except OSError:
                if not self.folder.is_dir():
                    raise

    def close(self) -> None:
        """Remove an incomplete copy."""
        if self._lock >= 0:
            shutil.rmtree(self._part, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _locked(folder: Path) -> int:
    """Lock a folder; return its descriptor, or -1 if another process has locked it, or it is gone."""
    with suppress(FileNotFoundError):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        if lock(fd):
            return fd
        os.close(fd)
    return -1


def _remove(folder: Path) -> None:
    """Remove a folder that no process has locked. Its name is free at once."""
    fd = _locked(folder)
    if fd >= 0:
        try:
            trash = folder.with_name(f".part-{secrets.token_hex(8)}")
            os.rename(folder, trash)
            shutil.rmtree(trash)
        finally:
            os.close(fd)


def cleanup(path: str) -> None:
    """Remove the copy with this path on this node, if it is there. An InputError for a path that was not printed here,
    a FileError if the copy cannot be removed."""
    folder, name = os.path.split(os.path.abspath(path))
    found = re.fullmatch(rf"(.*)/hpcdist-{os.getuid()}/stage_env/[0-9a-f]{{16}}(_[^/]+)?", folder)
    made = found is not None and all(os.path.lexists(f"{folder}/{known}") for known in (name, MANIFEST))
    if found is None or (not made and os.path.isdir(folder)):
        raise InputError("HD402", f"{path}: not a copy that hpcdist.stage_env has made for this user")
    if made:
        open_folder(found[1])
        try:
            _remove(Path(folder))
        except OSError as error:
            raise FileError("HD410", f"{path}: cannot be removed: {reason(error)} on {_HOST}") from error


def unpack(pieces: Iterator[bytes], root: str, corrected: Callable[[bytes], bytes], inside: str) -> None:
    """Unpack the pieces of a tar as they arrive into an empty folder; nothing outside of it is touched. `corrected` is
    for the texts in the folder `inside`. A FileError if something cannot be written, or must not be unpacked."""
    # Short ones: tarfile copies what it has not used yet at each read.
    blocks = (piece[start : start + _BLOCK] for piece in pieces for start in range(0, len(piece), _BLOCK))
    stream: Any = SimpleNamespace(read=lambda _: next(blocks, b""))
    try:
        with tarfile.open(fileobj=stream, mode="r|", bufsize=_BLOCK, errorlevel=2) as tar:
            tar.extraction_filter = getattr(tarfile, "tar_filter", None)  # Python 3.11.4 and later
            while (member := tar.next()) is not None:
                member.mode = member.mode & 0o755 | 0o700 * member.isdir()  # as tar_filter; a folder can be removed
                tar.extract(member, root)
                if member.isreg() and member.size <= _TEXT and member.name.startswith(f"{inside}/"):
                    path = Path(root, member.name)
                    old = path.read_bytes()
                    new = corrected(old)
                    if new is not old:  # with the time of now, else what was compiled of it would seem up to date
                        mode = path.stat().st_mode
                        path.unlink()
                        path.write_bytes(new)
                        path.chmod(mode)
                tar.members.clear()  # type: ignore[attr-defined]  # else all are kept in memory
    except tarfile.TarError as error:
        raise FileError("HD404", f"{_HOST}: {root}: cannot be unpacked: {reason(error)}") from error
    except OSError as error:
        raise FileError("HD410", f"{_HOST}: {error.filename or root}: {reason(error)}") from error
