"""Pack entries into a tar, with a checksum of each window of it."""

from __future__ import annotations

import io
import os
import stat
import tarfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import xxhash

from hpcdist.errors import FileError, reason
from hpcdist.formats.atomic import Commit, umask
from hpcdist.stage_env import environment, trees
from hpcdist.stage_env.environment import Environment
from hpcdist.stage_env.trees import Entry, Tree

__all__ = ["WINDOW", "Packed"]

WINDOW = 2**24  # bytes that are read, sent and written at once
_SMALL = 2**20  # bytes of a file that is read ahead of its turn
_AHEAD = 32  # files that are


class _Summed(io.RawIOBase):
    """Writes to a file, and computes the checksum of each window."""

    def __init__(self, fd: int, moved: Callable[[], object]) -> None:
        self.sums: list[str] = []
        self.nbytes = 0
        self._fd, self._moved = fd, moved
        self._sum = xxhash.xxh3_128()

    def write(self, data: bytes) -> int:  # type: ignore[override]
        view = memoryview(data)
        while view:
            part = view[: WINDOW - self.nbytes % WINDOW]
            put = os.write(self._fd, part)
            self._sum.update(part[:put])
            self.nbytes += put
            if self.nbytes % WINDOW == 0:
                self._next()
            view = view[put:]
        return len(data)

    def tell(self) -> int:
        return self.nbytes

    def _next(self) -> None:
        self.sums.append(self._sum.hexdigest())
        self._sum.reset()
        self._moved()

    def finish(self) -> tuple[str, ...]:
        if self.nbytes % WINDOW:
            self._next()
        return tuple(self.sums)


class Packed:
    """The archive of entries, which has its name when this returns.

    Attributes:
        trees: what was packed.
        files, nbytes: number of entries, and size of the archive in bytes.
        sums: checksum of each window.
        outside: paths to which links and editable installs lead, and which are not packed.
        seconds: time that it took.

    Raises:
        FileError: something cannot be read or written, or was changed meanwhile.
    """

    def __init__(
        self,
        archive: Path,
        all_: Sequence[Tree],
        entries: Sequence[Entry],
        here: Environment,
        moved: Callable[[], object],
    ) -> None:
        start = time.monotonic()
        self.trees, self.files = all_, len(entries)
        self._prefixes = here.prefixes
        self._links = trees.links(all_, entries)
        self.outside = dict.fromkeys(self._links[name].target for name in self._links if self._links[name].outside)
        self._first: dict[tuple[int, int], str] = {}  # name of each file that has several
        commit = Commit(archive)
        try:
            fd = os.open(commit.part, os.O_WRONLY | os.O_CLOEXEC)
            try:
                with suppress(OSError):  # nothing to be replaced, or a group that this user is not in
                    os.fchown(fd, -1, os.stat(archive).st_gid)
                mode = _mode(all_, entries, os.fstat(fd).st_gid)
                os.fchmod(fd, mode)
                summed = _Summed(fd, moved)
                with tarfile.open(fileobj=summed, mode="w", format=tarfile.GNU_FORMAT) as tar:
                    for entry, data in _ahead(entries):
                        self._add(tar, entry, data)
                        tar.members.clear()  # type: ignore[attr-defined]  # else all are kept in memory
            finally:
                os.close(fd)
            self.sums = summed.finish()
            commit.finish(mode)
        except OSError as error:
            commit.discard()
            raise FileError(
                "HD410", f"{archive}: cannot be packed: {error.filename or archive}: {reason(error)}"
            ) from error
        except BaseException:
            commit.discard()
            raise
        self.nbytes = summed.nbytes
        self.seconds = time.monotonic() - start

    def _add(self, tar: tarfile.TarFile, entry: Entry, data: bytes | None) -> None:
        info = tarfile.TarInfo(entry.name)
        info.mode, info.mtime = stat.S_IMODE(entry.mode), entry.mtime
        if stat.S_ISDIR(entry.mode):
            info.type = tarfile.DIRTYPE
        elif stat.S_ISLNK(entry.mode):
            info.type, info.linkname = tarfile.SYMTYPE, self._links[entry.name].target
        elif entry.inode is not None and entry.inode in self._first:
            info.type, info.linkname = tarfile.LNKTYPE, self._first[entry.inode]
        else:
            info.size = entry.size
            if entry.inode is not None:
                self._first[entry.inode] = entry.name
            if data is None:
                with open(entry.path, "rb") as file:
                    tar.addfile(info, file)
            else:
                for path in environment.elsewhere(entry.name, data, self._prefixes):
                    if not any(f"{path}/".startswith(f"{root}/") for tree in self.trees for root in tree.roots):
                        self.outside[path] = None
                tar.addfile(info, io.BytesIO(data))
            return
        tar.addfile(info)


def _mode(all_: Sequence[Tree], entries: Sequence[Entry], gid: int) -> int:
    """The mode of an archive of group `gid`: who cannot read all that is in it cannot read the archive."""
    above = {folder for tree in all_ for folder in Path(os.path.realpath(tree.root)).parents}
    allowed = {(status.st_mode << 2 | 0o022, status.st_gid) for status in map(os.stat, above)}  # to be entered
    for entry in entries:
        if stat.S_ISDIR(entry.mode):
            allowed.add((entry.mode & (entry.mode << 2 | 0o022), entry.gid))  # and listed
        elif stat.S_ISREG(entry.mode):
            allowed.add((entry.mode, entry.gid))
    mode = 0o666 & ~umask()
    for given, group in allowed:
        if group != gid:  # a member of one group may be one of the others for the other, and the other way round
            given &= given >> 3 & 0o007
            given |= given << 3
        mode &= 0o600 | given
    return mode


def _ahead(entries: Sequence[Entry]) -> Iterator[tuple[Entry, bytes | None]]:
    """The entries, each with its contents if it is a small file: several are read at once."""
    waiting: deque[tuple[Entry, Future[bytes] | None]] = deque()
    with ThreadPoolExecutor(_AHEAD // 2) as threads:
        try:
            for entry in entries:
                small = stat.S_ISREG(entry.mode) and entry.size <= _SMALL
                waiting.append((entry, threads.submit(_contents, entry) if small else None))
                if len(waiting) > _AHEAD:
                    yield from _next(waiting)
            while waiting:
                yield from _next(waiting)
        finally:
            threads.shutdown(cancel_futures=True)


def _next(waiting: deque[tuple[Entry, Future[bytes] | None]]) -> Iterator[tuple[Entry, bytes | None]]:
    entry, reading = waiting.popleft()
    try:
        yield entry, None if reading is None else reading.result()
    except (FileNotFoundError, _ChangedError) as error:
        # Python writes these at any time, under a name of their own at first, and does without them.
        if "/__pycache__/" not in entry.name:
            raise FileError("HD407", f"{entry.path}: was changed while it was packed: try again") from error


class _ChangedError(Exception):
    """A file has another size than it had."""


def _contents(entry: Entry) -> bytes:
    with open(entry.path, "rb") as file:
        data = file.read(entry.size + 1)
    if len(data) != entry.size:
        raise _ChangedError
    return data
