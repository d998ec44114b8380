"""A file that appears under its name only when it is complete: written beside it, made durable, renamed.

Whatever dies at whatever moment, the name holds the old file or the complete new one. What a killed job leaves is
``.NAME.part``: the next one that writes NAME takes it over, and no pattern of a shell or of glob matches it.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import shutil
import stat
import time
from contextlib import suppress
from pathlib import Path

from hpcdist.errors import FileError, reason

__all__ = ["Commit", "check_folder", "check_target", "lock", "private_folder", "sweep", "sync"]

_GRACE = 60  # seconds for which a file without a lock may still be on the way to one
_UNLOCKABLE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # a file system without locks


def check_target(target: Path, nbytes: int) -> None:
    """Find before anything is written what would keep a file of `nbytes` from being written at `target`.

    Raises:
        FileError: no such folder, a folder in its place, not writable, or no space.
    """
    if target.is_dir():
        raise FileError(f"{target}: is a folder")
    check_folder(target.parent, nbytes, str(target))


def check_folder(folder: Path, nbytes: int, target: str) -> None:
    """Find what would keep `nbytes` from being written in a folder; a FileError about `target`."""
    if not folder.is_dir():
        raise FileError(f"{target}: no such folder: {folder}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise FileError(f"{target}: the folder is not writable")
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise FileError(f"{target}: no space for the output: {nbytes:,} bytes needed, {free:,} free")


def private_folder(base: str) -> str:
    """A folder in `base` that only this user can look into; `base`, if somebody else has taken its name.

    Example::

        >>> private_folder("/tmp")
        '/tmp/hpcdist-1000'
    """
    folder = os.path.join(base, f"hpcdist-{os.getuid()}")
    with suppress(OSError):
        with suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        found = os.lstat(folder)
        if found.st_uid == os.getuid() and stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077:
            return folder
    return base


def sync(path: Path) -> None:
    """Bring a file, or the entries of a folder, to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def lock(fd: int) -> bool:
    """Take the lock on a file, for as long as it is open here; False if another process has it.

    On a file system without locks everybody gets it.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _UNLOCKABLE:
            raise
    return True


def sweep(folder: Path, prefix: str) -> None:
    """Remove the files of that prefix that jobs which are gone have left: those that nobody holds locked."""
    for path in folder.glob(f"{glob.escape(prefix)}*"):
        with suppress(OSError):  # somebody else's, or gone by now
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if time.time() - os.fstat(fd).st_mtime > _GRACE and lock(fd):
                    path.unlink()
            finally:
                os.close(fd)


class Commit:
    """The one writer of a target. In a job one rank has it, and the others write to `part`.

    Attributes:
        target: the name the file will have; of a symbolic link, what it points to.
        part: the name it has until then; it exists, and is empty unless `keep` found what another run left.
        resumed: there was something left.

    Raises:
        FileError: another process is writing the same target, or the part cannot be made.
    """

    def __init__(self, path: str | Path, keep: bool = False) -> None:
        self.target = Path(os.path.realpath(path))
        self.part = self.target.with_name(f".{self.target.name}.part")
        self._lock = self._locked(path)
        self.resumed = keep and os.fstat(self._lock).st_size > 0
        if not self.resumed:
            os.ftruncate(self._lock, 0)

    def _locked(self, path: str | Path) -> int:
        """An open, locked file that has the part's name."""
        while True:
            try:
                fd = os.open(self.part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except OSError as error:
                raise FileError(f"{path}: cannot be written: {reason(error)}") from error
            if not lock(fd):
                os.close(fd)
                raise FileError(f"{path}: another process is writing it (it holds {self.part})")
            # Between open and lock the one who had it may have finished: then this is the target, not the part.
            if self.part.exists() and os.path.samestat(os.fstat(fd), self.part.stat()):
                return fd
            os.close(fd)

    def finish(self) -> None:
        """Put the complete file in place. The caller has brought what other processes wrote to the disk."""
        os.fsync(self._lock)
        os.replace(self.part, self.target)
        self._unlock()  # at once: HDF5 does not read a file that is locked
        sync(self.target.parent)

    def discard(self, keep: bool = False) -> None:
        """Give up; what was written goes, or stays for another try. The target is as it was. After finish(), or a
        second time, it does nothing."""
        if self._lock >= 0:
            if not keep:
                self.part.unlink(missing_ok=True)
            self._unlock()

    def _unlock(self) -> None:
        os.close(self._lock)
        self._lock = -1
