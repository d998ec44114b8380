"""The copies of an environment on every node: the steps of all ranks together, rank 0's source, and a node's own copy.

The source is a folder or file, and other folders with it: a tar that is made while the files are read. An environment
names its own path in many files: these are corrected where the copy is made.

One rank of each node does the work of its node. The copies are in a private per-user directory:
DIR/hpcdist-UID/stage_env/DIGEST_JOB/NAME. A copy is unpacked beside its name, and renamed when it is complete. A folder
that is being filled or removed is called .part-TAG, and a process holds a lock on it: one without a lock was left by a
killed job.
"""

from __future__ import annotations

import io
import os
import re
import secrets
import shutil
import socket
import stat
import tarfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import IO, TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

import xxhash

from hpcdist.control import objects
from hpcdist.errors import FileError, InputError, RankError, reason
from hpcdist.formats.paths import check_regular, lock, private_folder
from hpcdist.runtime.commandline import problem, show_bytes
from hpcdist.watch.deadlines import limited

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")

VERB = "stage_env"
PIECE = 2**24  # bytes that are read, sent and unpacked at once
_BLOCK = 2**16  # bytes that tarfile reads at once
_TEXT = 2**20  # bytes: larger files are no scripts
_HOST = socket.gethostname()
MANIFEST = ".stage_env"  # name of a file in the copy that is not the source's own
_THREADS = 16  # a shared file system answers each request late, but many at once
_BATCH, AHEAD = 64, 2**18  # files whose first bytes are read ahead of their turn, and how many bytes
CHUNK = 2**20  # bytes that are read at once
_KINDS = {stat.S_IFREG: tarfile.REGTYPE, stat.S_IFDIR: tarfile.DIRTYPE, stat.S_IFLNK: tarfile.SYMTYPE}


@dataclass(frozen=True)
class Source:
    """The source, as all ranks know it: its name in the copy, and a digest that differs after a change. Also pairs of
    an old path and its name in the copy, the number of files, links and folders, and their approximate bytes."""

    name: str
    digest: str
    prefixes: tuple[tuple[str, str], ...]
    files: int
    nbytes: int


class Entry(NamedTuple):
    """A file, folder or symbolic link: its path, and its header in the tar, with its name in the copy."""

    path: str
    info: tarfile.TarInfo


class Packer:
    """A folder or file at `path`, and the folders `also`, as rank 0 finds them. A FileError or InputError if something
    is not there, cannot be read, or cannot be added."""

    def __init__(self, path: str, also: Sequence[str] = ()) -> None:
        origin = os.path.abspath(path)
        name = os.path.basename(origin)
        more = [(at, f"with-{i}-{os.path.basename(at)}") for i, at in enumerate(map(os.path.abspath, also))]
        self._trees = [(origin, name), *more]
        try:
            if not stat.S_ISDIR(os.stat(path).st_mode):
                check_regular(path)
            for folder, _ in more:
                if not os.path.isdir(folder):
                    raise InputError("HD401", f"{folder}: no such folder")
            if name in ("", MANIFEST, *(at for _, at in more)):
                raise InputError("HD505", f"{path}: its name, {name!r}, is one that the copy has for something else")
            roots = [(root, at) for old, at in self._trees for root in (old, os.path.realpath(old))]
            self._roots = list(dict.fromkeys(roots))
            self._entries = self._scan()
            own = _own_paths(origin)
        except OSError as error:
            raise FileError("HD402", f"{error.filename or path}: {reason(error)}") from error
        moved = [(root, name) for root in own] + [pair for pair in self._roots if pair[1] != name]
        digest, nbytes = self._digest(self._entries), sum(entry.info.size + 1024 for entry in self._entries)
        self.source = Source(name, digest, tuple(moved if own else ()), len(self._entries), nbytes)
        names = {entry.info.name for entry in self._entries}
        for path, info in self._entries:
            if info.issym():
                info.linkname = self._in_copy(path, info, names)

    def _scan(self) -> list[Entry]:
        return [entry for tree in self._trees for entry in scan(*tree)]

    def _digest(self, entries: Iterable[Entry]) -> str:
        return xxhash.xxh3_128_hexdigest(ascii((self._roots, *lines(entries))).encode())

    def _in_copy(self, path: str, info: tarfile.TarInfo, names: set[str]) -> str:
        """Return the target of a symbolic link in the copy: a relative path if that is copied, else an absolute one."""
        # From the real folder on, as the system follows it; the last name is not followed.
        folder, _, last = os.path.join(os.path.dirname(path), info.linkname).rpartition("/")
        leads = os.path.normpath(os.path.join(os.path.realpath(f"{folder}/"), last))
        for root, at in self._roots:
            name = at + leads[len(root) :]
            if f"{leads}/".startswith(f"{root}/") and (name in names or info.name.startswith(f"{at}/")):
                return os.path.relpath(name, os.path.dirname(info.name))
        return info.linkname if info.linkname.startswith("/") else leads

    def tar(self) -> Iterator[bytes]:
        """Read the files, and yield the bytes of a tar of them; a FileError if one cannot be read, or was changed."""
        try:
            with ThreadPoolExecutor(_THREADS) as threads:
                for start in range(0, len(self._entries), _BATCH):
                    batch = self._entries[start : start + _BATCH]
                    for (path, info), file in zip(batch, threads.map(opened, batch), strict=True):
                        if file is not None:
                            with file:
                                yield info.tobuf(tarfile.GNU_FORMAT)
                                yield from _contents(path, file, info.size)
            now = self._digest(self._scan())
        except OSError as error:
            raise FileError("HD402", f"{error.filename}: cannot be read: {reason(error)}") from error
        if now != self.source.digest:
            raise _changed(self._trees[0][0])
        yield bytes(2 * tarfile.BLOCKSIZE)


def _contents(path: str, file: IO[bytes], size: int) -> Iterator[bytes]:
    for left in range(size, 0, -CHUNK):
        wanted = min(left, CHUNK)
        data = file.read(wanted)
        if len(data) < wanted:
            raise _changed(path)
        yield data
    yield bytes(-size % tarfile.BLOCKSIZE)


def opened(entry: Entry) -> IO[bytes] | None:
    """Open a file, and read its first bytes; None of one that Python has compiled anew meanwhile."""
    if not entry.info.isreg():
        return io.BytesIO()
    with suppress(FileNotFoundError):
        file = open(entry.path, "rb", buffering=AHEAD)  # noqa: SIM115
        if os.fstat(file.fileno()).st_size == entry.info.size:
            file.peek()  # type: ignore[attr-defined]
            return file
        file.close()
    if _compiled(entry.info.name):
        return None
    raise _changed(entry.path)


def _changed(path: str) -> FileError:
    return FileError("HD413", f"{path}: was changed while it was read: try again")


def scan(root: str, at: str) -> list[Entry]:
    """Return all that a folder or file holds, and itself, which is `at` in the copy: its time and mode are set last.

    Sockets, FIFOs and devices are left out. `root` may be a symbolic link: what it leads to counts.
    """
    names: list[str] = []
    for folder, folders, files in os.walk(root, onerror=fail) if os.path.isdir(root) else ():
        names += [os.path.join(folder, name)[len(root) :] for name in [*folders, *files]]
    names.sort(reverse=True)
    with ThreadPoolExecutor(_THREADS) as threads:
        paths = [*(root + name for name in names), os.path.realpath(root)]
        return [*filter(None, threads.map(_entry, [*(at + name for name in names), at], paths))]


def fail(error: Exception) -> NoReturn:
    """Raise an error."""
    raise error


def _entry(name: str, path: str) -> Entry | None:
    with suppress(FileNotFoundError):  # gone since, as what Python compiles under a name for the moment
        status, info = os.lstat(path), tarfile.TarInfo(name)
        if kind := _KINDS.get(stat.S_IFMT(status.st_mode)):
            info.type, info.mode, info.mtime = kind, stat.S_IMODE(status.st_mode), int(status.st_mtime)
            info.size = status.st_size if info.isreg() else 0
            info.linkname = os.readlink(path) if info.issym() else ""
            return Entry(path, info)
    return None


def lines(entries: Iterable[Entry]) -> list[str]:
    """Return a line for each entry, which differs if it was written since; with the time in seconds, as not every
    client of a file system knows more. Compiled files and times of folders do not count: programs that run from it
    write them."""
    return [
        ascii((info.name, info.type, info.mode, info.size, not info.isdir() and info.mtime, info.linkname))
        for _, info in entries
        if not _compiled(info.name)
    ]


def _compiled(name: str) -> bool:
    return name.endswith(".pyc") or "/__pycache__" in name


def _own_paths(root: str) -> list[str]:
    """Return the paths by which the files of an environment may name it: its own, and its real one; none of another
    folder."""
    known = os.path.isfile(f"{root}/pyvenv.cfg") or os.path.isdir(f"{root}/conda-meta")
    return [os.path.abspath(root), os.path.realpath(root)] if known else []


def relocation(moved: dict[str, str]) -> Callable[[bytes], bytes]:
    """Return the function that corrects a text for the copy: a script, activate, a .pth or other file; it returns the
    same object if that names no old path. `moved` has the new path of each old one of what is copied."""
    new = {os.fsencode(old): os.fsencode(at) for old, at in moved.items()}
    either = b"|".join(map(re.escape, sorted(new, key=len, reverse=True)))
    # A path that continues before or after it is another one: /env2 is not /env. But -I/env/include names it.
    pattern = re.compile(rb"(?:(?<![\w.+-])|(?<=-[BFILR]))(?:" + either + rb")(?![\w.+-])")

    def corrected(data: bytes) -> bytes:
        unchanged = not new or b"\0" in data or not pattern.search(data)
        return data if unchanged else pattern.sub(lambda match: new[match[0]], data)

    return corrected


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
    leaders: MPI.Intracomm = comm.Split(not leads, comm.rank)  # type: ignore[assignment]

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
                    piece = broadcast(comm, piece, size)
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


def broadcast(comm: MPI.Intracomm, piece: bytes, size: int) -> bytes:
    """Return rank 0's bytes, of this size, on every rank. Collective over `comm`."""
    data = bytearray(piece if comm.rank == 0 else size)
    comm.Bcast(data)
    return bytes(data)


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
        self.part, self._lock = store / f".part-{secrets.token_hex(8)}", -1

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
        new.rename(self.part)  # only now others would remove it, if it were not locked
        free = shutil.disk_usage(store).free
        if free < self._source.nbytes:
            text = f"{show_bytes(self._source.nbytes)} needed, {show_bytes(free)} free"
            raise FileError("HD410", f"{store} on {_HOST}: no space for the copy: {text}")
        return False

    def unpack(self, pieces: Iterator[bytes]) -> None:
        """Unpack the pieces of a tar of the source, with its paths corrected for the final folder."""
        moved = {old: str(self.folder / at) for old, at in self._source.prefixes}
        unpack(pieces, str(self.part), relocation(moved), self._source.name)

    def finish(self) -> None:
        """List and rename the unpacked files. If another process was faster, its copy of the same source is used."""
        if self._lock >= 0:
            (self.part / MANIFEST).write_text("\n".join(lines(scan(str(self.part), ""))))
            try:
                os.rename(self.part, self.folder)
            except OSError:
                if not self.folder.is_dir():
                    raise

    def close(self) -> None:
        """Remove an incomplete copy."""
        if self._lock >= 0:
            shutil.rmtree(self.part, ignore_errors=True)
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
        raise InputError("HD402", f"{path}: not a copy that hpcdist.tools.stage_env has made for this user")
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
    real = os.path.realpath(root)
    stream: Any = SimpleNamespace(read=lambda _: next(blocks, b""))
    try:
        with tarfile.open(fileobj=stream, mode="r|", bufsize=_BLOCK, errorlevel=2) as tar:
            # Not one of tarfile's filters: Python 3.11.4 has the first, and each version's allow something else.
            tar.extraction_filter = lambda member, _: member
            while (member := tar.next()) is not None:
                path = f"{real}/{member.name}"
                if member.type not in _KINDS.values() or os.path.realpath(path) != path:  # ".." or a link is in it
                    raise tarfile.ExtractError(f"{member.name!r} must not be in an archive")
                member.mode = member.mode & 0o755 | 0o700 * member.isdir()  # a folder can be removed
                tar.extract(member, root)
                if member.isreg() and member.size <= _TEXT and member.name.startswith(f"{inside}/"):
                    file = Path(path)
                    old = file.read_bytes()
                    new = corrected(old)
                    if new is not old:  # with the time of now, else what was compiled of it would seem up to date
                        mode = file.stat().st_mode
                        file.unlink()
                        file.write_bytes(new)
                        file.chmod(mode)
                tar.members.clear()  # type: ignore[attr-defined]  # else all are kept in memory
    except tarfile.TarError as error:
        raise FileError("HD404", f"{_HOST}: {root}: cannot be unpacked: {reason(error)}") from error
    except OSError as error:
        raise FileError("HD410", f"{_HOST}: {error.filename or root}: {reason(error)}") from error
