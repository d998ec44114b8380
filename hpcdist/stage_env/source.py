"""What is sent: a folder or file, and what is copied with it, as a tar that is made while the files are read."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, NamedTuple, NoReturn

import xxhash

from hpcdist.errors import FileError, InputError, reason
from hpcdist.formats.paths import check_regular
from hpcdist.stage_env.environment import BASE, added_paths, base_tree, describe

__all__ = ["MANIFEST", "Packer", "Source", "below", "fail", "lines", "scan"]

MANIFEST = ".stage_env"  # name of a file in the copy that is not the source's own
_THREADS = 16  # a shared file system answers each request late, but many at once
_BATCH, _AHEAD = 64, 2**18  # files whose first bytes are read ahead of their turn, and how many bytes
_CHUNK = 2**20  # bytes that are read at once
_KINDS = {stat.S_IFREG: tarfile.REGTYPE, stat.S_IFDIR: tarfile.DIRTYPE, stat.S_IFLNK: tarfile.SYMTYPE}
_SYSTEM = ("/usr/", "/lib", "/bin/", "/sbin/", "/etc/", "/proc/", "/dev/", "/sys/")  # a node has them by itself


@dataclass(frozen=True)
class Source:
    """What is sent, as all ranks know it.

    Attributes:
        name: name of the environment, or file, in the copy.
        digest: differs if something was changed.
        prefixes: old paths, and their names in the copy, where files are corrected for them.
        outside: paths that the copy still uses.
        files, nbytes: number of files, links and folders, and about their bytes.
    """

    name: str
    digest: str
    prefixes: tuple[tuple[str, str], ...]
    outside: tuple[str, ...]
    files: int
    nbytes: int


class Entry(NamedTuple):
    """A file, folder or symbolic link: its name in the copy, its path, its status; of a link, what it holds."""

    name: str
    path: str
    status: os.stat_result
    target: str = ""

    @property
    def kind(self) -> int:
        return stat.S_IFMT(self.status.st_mode)


class Packer:
    """A folder or file, and what is copied with it, as rank 0 finds them.

    Args:
        path: the folder or file.
        with_base: also copy the interpreter that a venv was made with.
        also: other folders.

    Raises:
        FileError, InputError: something is not there, cannot be read, or cannot be added.
    """

    def __init__(self, path: str, with_base: bool = False, also: Sequence[str] = ()) -> None:
        origin = os.path.abspath(path)
        name = os.path.basename(origin)
        self._trees: list[tuple[str, str, Callable[[str], object]]] = [(origin, name, bool)]
        try:
            if not stat.S_ISDIR(os.stat(path).st_mode):
                check_regular(path)
            here = describe(origin)
            if with_base:
                root, keep = base_tree(path, here)
                self._trees.append((root, BASE, keep))
            for number, folder in enumerate(map(os.path.abspath, also)):
                if not os.path.isdir(folder):
                    raise InputError("HD401", f"{folder}: no such folder")
                self._trees.append((folder, f"with-{number}-{os.path.basename(folder)}", bool))
            if name in ("", MANIFEST, *(at for _, at, _ in self._trees[1:])):
                raise InputError("HD505", f"{path}: its name, {name!r}, is one that the copy has for something else")
            roots = [(root, at) for old, at, _ in self._trees for root in (old, os.path.realpath(old))]
            self._roots = list(dict.fromkeys(roots))
            self._entries = self._scan()
            self._names = {entry.name for entry in self._entries}
            files = [entry.path for entry in self._entries if entry.kind == stat.S_IFREG]
            used = [folder for file in files for folder in added_paths(file)]
        except OSError as error:
            raise FileError("HD402", f"{error.filename or path}: {reason(error)}") from error
        self._held = {entry.name: self._in_copy(entry) for entry in self._entries if entry.target}
        used += [held for held in self._held.values() if held.startswith("/") and not held.startswith(_SYSTEM)]
        outside = [here.base] if here.base and not with_base else []
        known = [*here.prefixes, *(root for root, _ in self._roots), *outside, *map(os.path.realpath, outside)]
        outside += [path for path in dict.fromkeys(used) if not any(below(path, root) for root in known)]
        corrected = [(root, name) for root in here.prefixes] + [pair for pair in self._roots if pair[1] != name]
        self.source = Source(
            name=name,
            digest=self._digest(self._entries),
            prefixes=tuple(corrected if here.prefixes else ()),
            outside=tuple(outside),
            files=len(self._entries),
            nbytes=sum(_size(entry) + 1024 for entry in self._entries),
        )

    def _scan(self) -> list[Entry]:
        return [entry for tree in self._trees for entry in scan(*tree)]

    def _digest(self, entries: Iterable[Entry]) -> str:
        return xxhash.xxh3_128_hexdigest(ascii((self._roots, *lines(entries))).encode())

    def _in_copy(self, entry: Entry) -> str:
        """Return what a symbolic link holds in the copy: a relative path if that is copied, else an absolute one."""
        # From the real folder on, as the system follows it; the last name is not followed.
        folder, _, last = os.path.join(os.path.dirname(entry.path), entry.target).rpartition("/")
        leads = os.path.normpath(os.path.join(os.path.realpath(f"{folder}/"), last))
        for root, at in self._roots:
            name = at + leads[len(root) :]
            if below(leads, root) and (name in self._names or entry.name.startswith(f"{at}/")):
                return os.path.relpath(name, os.path.dirname(entry.name))
        return entry.target if entry.target.startswith("/") else leads

    def tar(self) -> Iterator[bytes]:
        """Read the files, and yield the bytes of a tar of them.

        Raises:
            FileError: something cannot be read, or was changed meanwhile.
        """
        first: dict[tuple[int, int], str] = {}  # name of each file that has several
        try:
            with ThreadPoolExecutor(_THREADS) as threads:
                for start in range(0, len(self._entries), _BATCH):
                    batch = self._entries[start : start + _BATCH]
                    for entry, file in zip(batch, threads.map(_opened, batch), strict=True):
                        if file is not None:
                            with file:
                                yield from self._member(entry, file, first)
            now = self._digest(self._scan())
        except OSError as error:
            raise FileError("HD402", f"{error.filename}: cannot be read: {reason(error)}") from error
        if now != self.source.digest:
            raise _changed(self._trees[0][0])
        yield bytes(2 * tarfile.BLOCKSIZE)

    def _member(self, entry: Entry, file: IO[bytes], first: dict[tuple[int, int], str]) -> Iterator[bytes]:
        info, status, left = tarfile.TarInfo(entry.name), entry.status, 0
        info.mode, info.mtime = stat.S_IMODE(status.st_mode), int(status.st_mtime)
        info.type, info.linkname = _KINDS[entry.kind], self._held.get(entry.name, "")
        if info.isreg():
            name = first.setdefault((status.st_dev, status.st_ino), entry.name) if status.st_nlink > 1 else entry.name
            if name == entry.name:
                info.size = left = status.st_size
            else:
                info.type, info.linkname = tarfile.LNKTYPE, name
        yield info.tobuf(tarfile.GNU_FORMAT)
        while left:
            data = file.read(min(left, _CHUNK))
            if not data:
                raise _changed(entry.path)
            yield data
            left -= len(data)
        yield bytes(-info.size % tarfile.BLOCKSIZE)


def _opened(entry: Entry) -> IO[bytes] | None:
    """Open a file, and read its first bytes; None of one that Python has compiled anew meanwhile."""
    if entry.kind != stat.S_IFREG:
        return io.BytesIO()
    with suppress(FileNotFoundError):
        file = open(entry.path, "rb", buffering=_AHEAD)  # noqa: SIM115
        if os.fstat(file.fileno()).st_size == entry.status.st_size:
            file.read(1)
            file.seek(0)  # within what is read already
            return file
        file.close()
    if _compiled(entry.name):
        return None
    raise _changed(entry.path)


def _changed(path: str) -> FileError:
    return FileError("HD413", f"{path}: was changed while it was read: try again")


def scan(root: str, at: str, keep: Callable[[str], object] = bool) -> list[Entry]:
    """Return all that a folder or file holds, by name, those in a folder before it: its time and mode are set last.

    Sockets, FIFOs and devices are left out. `root` may be a symbolic link: what it leads to counts.

    Args:
        at: name of `root` in the copy.
        keep: whether an entry is taken, and what lies in it, by its name relative to `root`.
    """
    names: list[str] = []
    for folder, folders, files in os.walk(root, onerror=fail) if os.path.isdir(root) else ():
        within = folder[len(root) + 1 :]
        folders[:] = [name for name in folders if keep(os.path.join(within, name))]
        names += [os.path.join(within, name) for name in [*folders, *files] if keep(os.path.join(within, name))]
    with ThreadPoolExecutor(_THREADS) as threads:
        found = threads.map(lambda name: _entry(f"{at}/{name}", os.path.join(root, name)), sorted(names, reverse=True))
        return [*filter(None, found), Entry(at, root, os.stat(root))]


def fail(error: Exception) -> NoReturn:
    """Raise an error."""
    raise error


def _entry(name: str, path: str) -> Entry | None:
    with suppress(FileNotFoundError):  # gone since, as what Python compiles under a name for the moment
        entry = Entry(name, path, os.lstat(path))
        if entry.kind in _KINDS:
            return entry if entry.kind != stat.S_IFLNK else entry._replace(target=os.readlink(path))
    return None


def lines(entries: Iterable[Entry]) -> list[str]:
    """Return a line for each entry, which differs if it was written since; with the time in seconds, as not every
    client of a file system knows more.

    Compiled files do not count, nor when a folder was changed: programs that run from the folder write them.
    """
    kept = [entry for entry in entries if not _compiled(entry.name)]
    times = [0 if entry.kind == stat.S_IFDIR else int(entry.status.st_mtime) for entry in kept]
    return [ascii((e.name, e.status.st_mode, _size(e), time, e.target)) for e, time in zip(kept, times, strict=True)]


def _size(entry: Entry) -> int:
    return 0 if entry.kind == stat.S_IFDIR else entry.status.st_size


def _compiled(name: str) -> bool:
    return name.endswith(".pyc") or "/__pycache__" in name


def below(path: str, root: str) -> bool:
    """Whether a path is `root`, or lies in it."""
    return f"{path}/".startswith(f"{root}/")
