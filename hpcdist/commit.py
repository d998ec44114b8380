"""A file that appears under its name only when it is complete: written beside it, made durable, renamed.

Whatever dies at whatever moment, the name holds the old file or the complete new one. What a killed job leaves is
``.NAME.part``: the next one that writes NAME takes it over, and no pattern of a shell or of glob matches it.

The new file is another inode. It gets from the one that it replaces: mode, owner, group, POSIX ACL and user attributes,
as far as the system permits. Other hard links to the old file keep the old contents.
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
from hpcdist.regular import kind

__all__ = ["Commit", "check_folder", "check_target", "lock", "private_folder", "sweep", "sync"]

_GRACE = 60  # seconds for which a file without a lock may still be on the way to one
_KEPT = ("user.", "system.posix_acl_access")  # extended attributes that the file which replaces another one gets
_UNLOCKABLE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # a file system without locks


def check_target(target: Path, nbytes: int) -> None:
    """Find before anything is written what would keep a file of `nbytes` from being written at `target`.

    Raises:
        FileError: no such folder, no regular file in its place, not writable, or no space.
    """
    old = _old(target)
    for folder in {target.parent, Path(os.path.realpath(target)).parent}:  # what is no folder has no ".." either
        check_folder(folder, nbytes, str(target))
    if old is not None and not os.access(target, os.W_OK):
        raise FileError(f"{target}: is there already, and read-only")


def _old(target: Path) -> os.stat_result | None:
    """The file that a new one would replace, at the end of all symbolic links; a FileError if it is not regular."""
    try:
        old = os.stat(target)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise FileError(f"{target}: cannot be written: {reason(error)}") from error
    what = kind(old.st_mode)
    if what is not None:
        raise FileError(f"{target}: is a {what}" + ("" if what == "folder" else ": only a regular file is replaced"))
    return old


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
        check_target(Path(path), 0)
        self._old = _old(self.target)
        self._lock, self.resumed = self._locked(path, keep)

    def _locked(self, path: str | Path, keep: bool) -> tuple[int, bool]:
        """An open, locked file that has the part's name, and whether it is one that was left, and is wanted."""
        while True:
            try:
                fd, new = self._opened(path)
            except OSError as error:
                raise FileError(f"{path}: cannot be written: {reason(error)}") from error
            if not lock(fd):
                os.close(fd)
                raise FileError(f"{path}: another process is writing it (it holds {self.part})")
            # Between open and lock the one who had it may have finished: then this is the target, not the part.
            if self.part.exists() and os.path.samestat(os.fstat(fd), self.part.stat()):
                resumed = not new and keep and os.fstat(fd).st_size > 0
                if new or resumed:
                    return fd, resumed
                self.part.unlink()  # what is made anew has the mode that a new file has
            os.close(fd)

    def _opened(self, path: str | Path) -> tuple[int, bool]:
        """The part, and whether it is new; a FileError, and nothing is touched, if hpcdist cannot have left it."""
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        mode = 0o666 if self._old is None else 0o600  # until it is complete, nobody reads more than of the old file
        with suppress(FileExistsError):
            return os.open(self.part, flags | os.O_CREAT | os.O_EXCL, mode), True
        try:
            found = os.lstat(self.part)
        except FileNotFoundError:  # its writer has finished meanwhile
            return self._opened(path)
        what = kind(found.st_mode)
        if what is not None:
            raise FileError(f"{path}: cannot be written: {self.part} is a {what}, and not hpcdist's: remove it")
        if found.st_uid != os.geteuid() or found.st_nlink > 1:
            whose = f"belongs to user {found.st_uid}" if found.st_nlink == 1 else "has other names, too (hard links)"
            raise FileError(f"{path}: cannot be written: {self.part} {whose}: remove it")
        return os.open(self.part, flags), False

    def finish(self) -> None:
        """Put the complete file in place. The caller has brought what other processes wrote to the disk."""
        self._old = _old(self.target) or self._old
        if self._old is not None:
            _look_like(self._lock, self._old, self.target)
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


def _look_like(fd: int, old: os.stat_result, path: Path) -> None:
    """Give an open file what the one that it replaces has: mode, owner and group, ACL and attributes."""
    mine, mode, kept = os.fstat(fd), stat.S_IMODE(old.st_mode) & ~(stat.S_ISUID | stat.S_ISGID), list(_KEPT)
    if (mine.st_uid, mine.st_gid) != (old.st_uid, old.st_gid):
        try:
            os.fchown(fd, old.st_uid, old.st_gid)
        except OSError:  # another user's file: the group at least; another group may do no more than everybody
            try:
                os.fchown(fd, -1, old.st_gid)
            except OSError:
                mode &= ~0o070 | (mode & 0o007) << 3
                kept = kept[:1]
    os.fchmod(fd, mode)
    with suppress(OSError):  # gone by now, or a file system without attributes
        names = [name for name in os.listxattr(path) if name.startswith(tuple(kept))]
        for name in os.listxattr(fd):
            if name.startswith(_KEPT) and name not in names:
                os.removexattr(fd, name)  # such as an ACL that the folder gives to new files
        for name in names:
            os.setxattr(fd, name, os.getxattr(path, name))
