"""The copies on this node, in a folder of this user's alone: DIR/hpcdist-UID/stage_env/DIGEST/NAME.

A copy appears under its digest when it is complete. Each job that uses it has a claim on it: a file in its folder. The
last job to clean up removes it. What is being unpacked is locked by the process that does; what a killed job has left
is continued, or removed.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from hpcdist.errors import FileError, InputError, reason
from hpcdist.formats.atomic import lock, private_folder

__all__ = ["Copy", "Part", "Record", "Store", "cleanup"]

_NAME = "stage_env"
_NOTES = f".{_NAME}"  # folder of a copy with what is not the environment's own
_CLAIM = 86400  # seconds for which a job's claim counts if no process of it is seen
_SELF = b"hpcdist.stage_env"  # in the command line of those that only stage, or clean up


@dataclass(frozen=True)
class Record:
    """What a copy is: the digest of what was sent, the name of the environment in it, and where that comes from."""

    digest: str
    name: str
    origin: str

    @staticmethod
    def read(folder: Path) -> Record | None:
        try:
            return Record(**json.loads((folder / _NOTES / "record").read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, folder: Path) -> None:
        (folder / _NOTES / "record").write_text(json.dumps(asdict(self)))


@dataclass(frozen=True)
class Copy:
    """A complete copy: its folder, and that with the claims, the manifest and the record."""

    folder: Path

    @property
    def notes(self) -> Path:
        return self.folder / _NOTES

    @property
    def _claims(self) -> Path:
        return self.notes / "jobs"

    def claim(self, job: str) -> None:
        self._claims.mkdir(exist_ok=True)
        (self._claims / job).touch()

    def release(self, job: str) -> None:
        with suppress(FileNotFoundError, NotADirectoryError):
            (self._claims / job).unlink()

    def users(self, job: str | None) -> list[str]:
        """Return who uses it but `job`: other jobs, by their claims, and processes that run from it."""
        jobs = [f"job {other}" for other in self.jobs(job)]
        return jobs + [f"process {pid}" for pid in _processes(self.folder)]

    def jobs(self, job: str | None) -> list[str]:
        """Return the jobs but `job` that have a claim on it."""
        found = []
        with suppress(FileNotFoundError, NotADirectoryError):
            for claim in sorted(os.scandir(self._claims), key=lambda entry: entry.name):
                if claim.name != job and time.time() - claim.stat().st_mtime < _CLAIM:
                    found.append(claim.name)
        return found


def _processes(folder: Path) -> list[int]:
    """The processes of this user, but for those of this command, that have files of a folder open, or are in it."""
    inside = os.fsencode(f"{os.path.realpath(folder)}/")  # as /proc has it
    found = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with suppress(OSError):  # another user's, or gone by now
            if _SELF not in Path(f"/proc/{pid}/cmdline").read_bytes():
                places = [os.fsencode(os.readlink(f"/proc/{pid}/{what}")) + b"/" for what in ("cwd", "exe")]
                if any(place.startswith(inside) for place in places) or inside in _maps(pid):
                    found.append(pid)
    return found


def _maps(pid: int) -> bytes:
    return Path(f"/proc/{pid}/maps").read_bytes()


class Part:
    """A copy in the making, which this process has locked."""

    def __init__(self, folder: Path, fd: int) -> None:
        self.folder = folder
        self.notes = folder / _NOTES
        self._fd = fd

    def close(self, remove: bool) -> None:
        """Give it up; what was unpacked is removed, or left to the next job. A second time, it does nothing."""
        if self._fd >= 0:
            if remove:
                shutil.rmtree(self.folder, ignore_errors=True)
            os.close(self._fd)
            self._fd = -1


class Store:
    """The copies of this user on this node, below the folder `base`.

    Raises:
        FileError: no such folder, or it cannot be trusted with code: another user may write in it.
    """

    def __init__(self, base: str) -> None:
        base = os.path.abspath(base)
        if not os.path.isdir(base):
            raise FileError("HD409", f"{base}: no such folder on {socket.gethostname()}")
        mode = os.stat(base).st_mode
        if mode & (stat.S_IWGRP | stat.S_IWOTH) and not mode & stat.S_ISVTX:
            text = "other users could put another copy in the place of one (it has no sticky bit)"
            raise FileError("HD403", f"{base} on {socket.gethostname()}: {text}")
        private = private_folder(base)
        if private == base:
            name = f"{base}/hpcdist-{os.getuid()}"
            problem = "is not this user's alone" if os.path.lexists(name) else "cannot be made"
            raise FileError("HD403", f"{name}: {problem} on {socket.gethostname()}")
        self.folder = Path(private, _NAME)
        try:
            self.folder.mkdir(0o700, exist_ok=True)
            self._lock = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise FileError("HD410", f"{self.folder}: {reason(error)} on {socket.gethostname()}") from error

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A context in which no other process adds, claims or removes copies; for moments only."""
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def available(self) -> int:
        """Return the bytes that a new copy may need; those of the whole disk where old copies may be removed for it."""
        disk = shutil.disk_usage(self.folder)
        return disk.total if any(path.name != ".lock" for path in self.folder.iterdir()) else disk.free

    def path(self, digest: str) -> Path:
        return self.folder / digest[:16]

    def find(self, digest: str, job: str) -> Copy | None:
        """Return the copy of a digest, with a claim of this job on it."""
        with self.alone():
            record = Record.read(self.path(digest))
            if record is None or record.digest != digest:
                return None
            copy = Copy(self.path(digest))
            copy.claim(job)
            return copy

    def begin(self, digest: str) -> Part:
        """Return the part of a digest that a killed job has left, or a new one.

        One of before the last boot is not continued: the disk may lack what it had been told.
        """
        stem = f".part-{digest[:16]}-{_boot()}-"
        with self.alone():
            for left in sorted(self.folder.glob(f"{stem}*")):
                fd = _locked(left)
                if fd is not None:
                    return Part(left, fd)
            folder = self.folder / f"{stem}{secrets.token_hex(4)}"
            (folder / _NOTES).mkdir(parents=True, mode=0o700)
            fd = _locked(folder)
            assert fd is not None
            return Part(folder, fd)

    def finish(self, part: Part, record: Record, job: str) -> Copy:
        """Give a part its name, with a claim of this job. If another job was faster, use what that has made.

        A copy whose record is gone is replaced; who has a claim on it keeps that.
        """
        copy = Copy(self.path(record.digest))
        record.write(part.folder)
        Copy(part.folder).claim(job)
        trash: Path | None = None
        with self.alone():
            known = Record.read(copy.folder)
            if known is None:
                if os.path.lexists(copy.folder):
                    for other in copy.jobs(job):
                        Copy(part.folder).claim(other)
                    trash = self._withdraw(copy.folder)
                os.rename(part.folder, copy.folder)
            else:
                copy.claim(job)
        part.close(remove=known is not None)
        if trash is not None:
            shutil.rmtree(trash, ignore_errors=True)
        return copy

    def _withdraw(self, folder: Path) -> Path:
        """Take a folder's name away; return the one under which it can be removed while others go on."""
        trash = self.folder / f".trash-{secrets.token_hex(8)}"
        os.rename(folder, trash)
        return trash

    def remove(self, copy: Copy, job: str | None) -> list[str]:
        """Remove a copy unless others than `job` use it; return who does. The claim of `job` is gone in any case."""
        with self.alone():
            if job is not None:
                copy.release(job)
            users = copy.users(job)
            if users or not os.path.lexists(copy.folder):
                return users
            trash = self._withdraw(copy.folder)
        while trash.exists():
            with suppress(FileNotFoundError):  # another job sweeps, too
                shutil.rmtree(trash)
        return []

    def sweep(self, keep: str) -> None:
        """Remove what nobody uses any more, but for the copy and the parts of the digest `keep`.

        What cannot be removed stays: the job that sweeps does without it.
        """
        for path in self.folder.iterdir():
            if path.name.startswith(".trash-"):
                shutil.rmtree(path, ignore_errors=True)
            elif path.name.startswith(".part-") and not path.name.startswith(f".part-{keep[:16]}-{_boot()}-"):
                self._sweep_part(path)
            elif re.fullmatch(r"[0-9a-f]{16}", path.name) and path != self.path(keep):
                with suppress(OSError):
                    self.remove(Copy(path), None)

    def _sweep_part(self, path: Path) -> None:
        with self.alone():
            fd = _locked(path)
            if fd is None:
                return
            try:
                trash = self._withdraw(path)
            finally:
                os.close(fd)
        shutil.rmtree(trash, ignore_errors=True)


def _boot() -> str:
    """What identifies this boot of the node."""
    return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]


def _locked(folder: Path) -> int | None:
    """The folder's lock; None if another process has it, or the folder is gone."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    if lock(fd):
        return fd
    os.close(fd)
    return None


def cleanup(path: str, job: str) -> list[str]:
    """Remove the copy that a job was given on this node, unless others use it; return who does.

    Raises:
        InputError: `path` is none that this command has given.
        FileError: the copy cannot be removed.
    """
    folder = Path(os.path.abspath(path)).parent
    private = folder.parent.parent
    if not re.fullmatch(r"[0-9a-f]{16}", folder.name) or folder.parent.name != _NAME:
        raise InputError("HD403", f"{path}: not a copy that hpcdist.stage_env has made")
    if private.name != f"hpcdist-{os.getuid()}":
        raise InputError("HD403", f"{path}: a copy of another user's")
    if not folder.parent.is_dir():
        return []
    store = Store(str(private.parent))
    if not folder.exists():
        return []
    record = Record.read(folder)
    if record is None and not folder.exists():  # another process of this job on the node was faster
        return []
    if record is None or record.name != os.path.basename(os.path.abspath(path)):
        raise InputError("HD403", f"{path}: not a copy that hpcdist.stage_env has made")
    try:
        return store.remove(Copy(folder), job)
    except OSError as error:
        raise FileError("HD410", f"{path}: cannot be removed: {reason(error)} on {socket.gethostname()}") from error
