"""The source: a folder or file, and other folders with it, as a tar that is made while the files are read.

An environment names its own path in many files: these are corrected where the copy is made.
"""

from __future__ import annotations

import io
import os
import re
import stat
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple, NoReturn

import xxhash

from hpcdist.errors import FileError, InputError, reason
from hpcdist.formats.paths import check_regular

MANIFEST = ".stage_env"  # name of a file in the copy that is not the source's own
_THREADS = 16  # a shared file system answers each request late, but many at once
_BATCH, _AHEAD = 64, 2**18  # files whose first bytes are read ahead of their turn, and how many bytes
_CHUNK = 2**20  # bytes that are read at once
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
                    for (path, info), file in zip(batch, threads.map(_opened, batch), strict=True):
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
    for left in range(size, 0, -_CHUNK):
        wanted = min(left, _CHUNK)
        data = file.read(wanted)
        if len(data) < wanted:
            raise _changed(path)
        yield data
    yield bytes(-size % tarfile.BLOCKSIZE)


def _opened(entry: Entry) -> IO[bytes] | None:
    """Open a file, and read its first bytes; None of one that Python has compiled anew meanwhile."""
    if not entry.info.isreg():
        return io.BytesIO()
    with suppress(FileNotFoundError):
        file = open(entry.path, "rb", buffering=_AHEAD)  # noqa: SIM115
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
    """Return the paths by which the files of an environment may name it: its own, its real one and, in a venv, the one
    that it was made for; none of another folder."""
    own = [os.path.abspath(root), os.path.realpath(root)]
    if not Path(root, "pyvenv.cfg").is_file():
        return own if Path(root, "conda-meta").is_dir() else []
    activate = Path(root, "bin", "activate")
    text = activate.read_text(errors="surrogateescape") if activate.is_file() else ""
    return own + [match[2] for match in re.finditer(r"VIRTUAL_ENV=(['\"]?)(/[^'\"\n]+)\1$", text, re.MULTILINE)]


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
