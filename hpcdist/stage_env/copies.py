"""The copies on this node, in a folder of this user's alone: DIR/hpcdist-UID/stage_env/DIGEST_JOB/NAME.

A copy is unpacked beside its name, and renamed when it is complete. A folder that is being filled or removed is called
.part-TAG, and a process holds a lock on it: one without a lock was left by a killed job.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import stat
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from hpcdist.errors import FileError, InputError, reason
from hpcdist.formats.paths import lock, private_folder, shown
from hpcdist.runtime.commandline import show_bytes
from hpcdist.stage_env.environment import Relocation
from hpcdist.stage_env.source import MANIFEST, Source, below, lines, scan

__all__ = ["Copy", "cleanup", "open_folder", "unpack"]

_HOST = socket.gethostname()


def open_folder(base: str) -> Path:
    """Return the folder of this user's copies below the folder `base`, on this node; make it if it is missing.

    Raises:
        FileError: no such folder, or other users could replace what is in it.
    """
    base = os.path.abspath(base)
    private = f"{base}/hpcdist-{os.getuid()}"
    if not os.path.isdir(base):
        raise FileError("HD401", f"{base}: no such folder on {_HOST}")
    mode = os.stat(base).st_mode
    if mode & (stat.S_IWGRP | stat.S_IWOTH) and not mode & stat.S_ISVTX:
        raise FileError("HD402", f"{base} on {_HOST}: other users could replace the copy (it has no sticky bit)")
    if private_folder(base) == base:
        what = "is not this user's alone" if os.path.lexists(private) else "cannot be made"
        raise FileError("HD402", f"{private}: {what} on {_HOST}")
    folder = Path(private, "stage_env")
    folder.mkdir(0o700, exist_ok=True)
    return folder


class Copy:
    """The copy of a source on this node, for one job.

    Attributes:
        folder: its folder, when it is complete.
    """

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
        unpack(pieces, str(self._part), Relocation(moved, self._source.name))

    def finish(self) -> None:
        """List and rename what was unpacked. If another process was faster, its copy of the same source is used."""
        if self._lock >= 0:
            manifest = lines(scan(str(self._part), ""))
            (self._part / MANIFEST).write_text("\n".join(manifest))
            try:
                os.rename(self._part, self.folder)
            except OSError:
                if not self.folder.is_dir():
                    raise

    def close(self) -> None:
        """Remove what is not complete."""
        if self._lock >= 0:
            shutil.rmtree(self._part, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _locked(folder: Path) -> int:
    """Lock a folder; return its descriptor, or -1 if another process has locked it, or it is gone."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return -1
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
    """Remove the copy with this path on this node, if it is there.

    Raises:
        InputError: `path` is none that this command has printed.
        FileError: the copy cannot be removed.
    """
    folder, name = os.path.split(os.path.abspath(path))
    found = re.fullmatch(r"(.*)/hpcdist-(\d+)/stage_env/[0-9a-f]{16}(_[^/]+)?", folder)
    if found is None:
        raise InputError("HD402", f"{path}: not a copy that hpcdist.stage_env has made")
    if int(found[2]) != os.getuid():
        raise InputError("HD402", f"{path}: a copy of another user's")
    if os.path.isdir(folder):
        open_folder(found[1])
        made = all(os.path.lexists(f"{folder}/{known}") for known in (name, MANIFEST))
        if not made and os.path.isdir(folder):  # else another process of the job has removed it meanwhile
            raise InputError("HD402", f"{path}: not a copy that hpcdist.stage_env has made")
        try:
            _remove(Path(folder))
        except OSError as error:
            raise FileError("HD410", f"{path}: cannot be removed: {reason(error)} on {_HOST}") from error


def unpack(pieces: Iterator[bytes], root: str, relocation: Relocation) -> None:
    """Unpack the pieces of a tar as they arrive into an empty folder; nothing outside of it is touched.

    Raises:
        FileError: something cannot be written, or must not be unpacked.
    """
    root = os.path.realpath(root)
    real: set[str] = set()  # folders that no link leads into
    try:
        stream = _Stream(pieces)
        with tarfile.open(fileobj=stream, mode="r|", bufsize=2**16, errorlevel=2) as tar:  # type: ignore[call-overload]
            tar.extraction_filter = lambda member, _: member  # newer Pythons refuse absolute links by default
            while (member := tar.next()) is not None:
                for name in (member.name, *[member.linkname] * member.islnk()):
                    _check_inside(root, name, real)
                linked = member.islnk() and os.path.isfile(os.path.join(root, member.linkname))
                if not (member.isreg() or member.isdir() or member.issym() or linked):
                    raise FileError("HD511", f"{shown(member.name)} is no file, folder, link, or name of a file here")
                member.mode = member.mode & 0o777 | 0o700 * member.isdir()  # else it could not be removed
                tar.extract(member, root)
                if member.isreg() and relocation.concerns(member.name, member.size):
                    path = Path(root, member.name)
                    old = path.read_bytes()
                    new = relocation.corrected(member.name, old)
                    if new is not old:  # with the time of now, else what was compiled of it would seem up to date
                        path.unlink()
                        path.write_bytes(new)
                        path.chmod(member.mode)
                tar.members.clear()  # else all are kept in memory
    except tarfile.TarError as error:
        raise FileError("HD404", f"{_HOST}: {root}: cannot be unpacked: {reason(error)}") from error
    except OSError as error:
        raise FileError("HD410", f"{_HOST}: {error.filename or root}: {reason(error)}") from error


def _check_inside(root: str, name: str, real: set[str]) -> None:
    """Raise a FileError unless a name lies in `root`, in folders that are no links, and is no link itself."""
    path = os.path.join(root, name)
    folder = os.path.dirname(path)
    inside = folder in real or (os.path.realpath(folder) == folder and below(folder, root))
    if not inside or os.path.normpath(path) != path or os.path.islink(path):
        raise FileError("HD511", f"{shown(name)} would lie elsewhere: it is not unpacked")
    if os.path.isdir(folder):
        real.add(folder)


class _Stream:
    """Pieces as a file whose read() returns fewer bytes than asked for at the end of a piece."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self._rest = filter(None, pieces), memoryview(b"")

    def read(self, size: int) -> bytes:
        if not self._rest:
            self._rest = memoryview(next(self._pieces, b""))
        data, self._rest = bytes(self._rest[:size]), self._rest[size:]
        return data
