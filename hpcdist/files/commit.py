"""A file that appears under its name only when it is complete: written beside it, made durable, renamed.

Whatever dies at whatever moment, the name holds the old file or the complete new one. Until then it is in
``.NAME.TAG.part``, which no pattern of a shell or of glob matches: TAG is new for every try, so that no cache of names
mixes two up, and says which process writes it. The next one that writes NAME removes what a dead one has left, or takes
it over. Locks help to tell, where the file system has them; nothing depends on them.

The new file is another inode. It gets from the one that it replaces: mode, owner, group, POSIX ACL and user attributes,
as far as the system permits. Other hard links to the old file keep the old contents.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import re
import secrets
import shutil
import stat
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import TypeVar

from hpcdist.errors import FileError, reason
from hpcdist.files.regular import kind

__all__ = ["Commit", "check_folder", "check_target", "lock", "patiently", "private_folder", "sweep", "sync"]

T = TypeVar("T")

PATIENCE = 5.0  # seconds that a shared file system's caches of names, attributes and contents may be behind
_NAP = 0.1  # seconds between two looks
_GRACE = 60  # seconds for which a file without a lock may still be on the way to one
_KEPT = ("user.", "system.posix_acl_access")  # extended attributes that the file which replaces another one gets
_UNLOCKABLE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # a file system without locks
_UNSYNCABLE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EACCES, errno.EPERM)  # of a folder


def check_target(target: Path, nbytes: int) -> None:
    """Find before anything is written what would keep a file of `nbytes` from being written at `target`.

    Raises:
        FileError: no such folder, no regular file in its place, not writable, or no space.
    """
    old = _old(target)
    real = Path(os.path.realpath(target)).parent
    if not target.parent.is_dir():  # what is no folder has no ".." either
        raise FileError(f"{target}: no such folder: {target.parent}")
    check_folder(real, nbytes, str(target))
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


def sync(path: Path, forget: bool = False) -> None:
    """Bring a file, or the entries of a folder, to the disk. To `forget`, have the system drop what it holds, which
    could hide what others write."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        if forget:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def patiently(look: Callable[[], T | None]) -> T | None:
    """The first problem-free look, None, or what `look` still finds wrong when caches can no longer be behind."""
    until = time.monotonic() + PATIENCE
    while (problem := look()) is not None and time.monotonic() < until:
        time.sleep(_NAP)
    return problem


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


_held: set[str] = set()  # the names of the parts that this process is writing


class Commit:
    """The one writer of a target. In a job one rank has it, and the others write to `part`.

    Attributes:
        target: the name the file will have; of a symbolic link, what it points to.
        part: the name it has until then; it exists, and is empty unless `keep` found what another run left.
        journal: the name of a file beside it in which the ranks may note what is complete; it goes with the part.
        resumed: there was something left.

    Raises:
        FileError: another process is writing the same target, or the part cannot be made.
    """

    def __init__(self, path: str | Path, keep: bool = False) -> None:
        self.target = Path(os.path.realpath(path))
        check_target(Path(path), 0)
        self._old = _old(self.target)
        self.part = self.target.with_name(_part_name(self.target.name))
        try:
            self._lock, self.resumed = self._opened(path, keep)
        except OSError as error:
            raise FileError(f"{path}: cannot be written: {reason(error)}") from error
        _held.add(self.part.name)

    @property
    def journal(self) -> Path:
        return self.part.with_suffix(".journal")

    def _opened(self, path: str | Path, keep: bool) -> tuple[int, bool]:
        """The part, open and locked, and whether it is one that was left, and is wanted."""
        mode = 0o666 if self._old is None else 0o600  # until it is complete, nobody reads more than of the old file
        for left in _left(self.target):
            fd = self._taken(path, left, keep)
            if fd is not None:
                os.fchmod(fd, mode & ~_umask())
                return fd, True
        fd = os.open(self.part, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_CREAT | os.O_EXCL, mode)
        lock(fd)
        return fd, False

    def _taken(self, path: str | Path, left: Path, keep: bool) -> int | None:
        """A part that a dead process has left, open and locked, under this one's name; else None, and it is gone if it
        is nobody's."""
        try:
            fd = os.open(left, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:  # its writer has finished meanwhile
            return None
        taken = False
        try:
            if not lock(fd):
                who = "this process is writing it already" if left.name in _held else "another process is writing it"
                raise FileError(f"{path}: {who} (it holds {left})")
            if not _is_dead(left, fd):  # no locks, or on its way to one: whoever ends last has the name
                if keep:
                    told = f"{left} may still be written by another host, and is not gone on with: begun anew"
                    warnings.warn(told, stacklevel=2)
            elif keep and os.fstat(fd).st_size > 0 and _renamed(left, self.part):
                _renamed(left.with_suffix(".journal"), self.journal)
                taken = True
                _remove_beside(left)
            else:
                _remove_beside(left)
                left.unlink(missing_ok=True)
        finally:
            if not taken:
                os.close(fd)
        return fd if taken else None

    def finish(self) -> None:
        """Put the complete file in place. The caller has brought what other processes wrote to the disk."""
        self._old = _old(self.target) or self._old
        if self._old is not None:
            _look_like(self._lock, self._old, self.target)
        os.fsync(self._lock)
        self.journal.unlink(missing_ok=True)
        try:
            os.replace(self.part, self.target)
        except FileNotFoundError as error:
            raise FileError(f"{self.target}: {self.part} is gone: another process has taken or removed it") from error
        self._unlock()  # at once: HDF5 does not read a file that is locked
        try:
            sync(self.target.parent)
        except OSError as error:  # the file has its name, and not every folder can be opened, or synced
            if error.errno not in _UNSYNCABLE:
                raise

    def discard(self, keep: bool = False) -> None:
        """Give up; what was written goes, or stays for another try. The target is as it was. After finish(), or a
        second time, it does nothing."""
        if self._lock >= 0:
            if not keep:
                self.journal.unlink(missing_ok=True)
                self.part.unlink(missing_ok=True)
            self._unlock()

    def _unlock(self) -> None:
        _held.discard(self.part.name)
        os.close(self._lock)
        self._lock = -1


def _part_name(name: str) -> str:
    """``.NAME.TAG.part``, with TAG for the name, the system, this process, its start, and the try: 8 hex digits each.

    Of a long name only the beginning is there: a file's name has 255 bytes at most.
    """
    pid = os.getpid()
    tag = f"{_digest(name)}{_system()}{pid:08x}{_started(pid)}{secrets.token_hex(4)}"
    return f"{_stem(name)}{tag}.part"


def _umask() -> int:
    """The bits that a new file does not get."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return 0o077


def _stem(name: str) -> str:
    return os.fsdecode(b"." + os.fsencode(name)[:200] + b".")


def _digest(text: str) -> str:
    return blake2b(text.encode(errors="surrogateescape"), digest_size=4).hexdigest()


def _system() -> str:
    """What tells the processes that this one sees from those of other hosts and containers."""
    return _digest(Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid"))


def _started(pid: int) -> str:
    """What tells a process from others that had or will have its number; zeros if there is none."""
    try:
        return _digest(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return "0" * 8


def _left(target: Path) -> list[Path]:
    """The parts of a target, newest first; only what hpcdist can have left of this user's."""
    stem = _stem(target.name)
    tag = re.compile(re.escape(f"{stem}{_digest(target.name)}") + r"[0-9a-f]{32}\.part")
    found = []
    for path in target.parent.glob(f"{glob.escape(stem)}*.part"):
        with suppress(FileNotFoundError):  # its writer has finished meanwhile
            stat_ = os.lstat(path)
            regular = stat.S_ISREG(stat_.st_mode) and stat_.st_uid == os.geteuid() and stat_.st_nlink == 1
            if tag.fullmatch(path.name) and regular:
                found.append((stat_.st_mtime_ns, path))
    return [path for _, path in sorted(found, reverse=True)]


def _is_dead(part: Path, fd: int) -> bool:
    """Whether nobody writes a part any more: its process is gone from this system, or elsewhere has let it rest."""
    if not part.exists() or not os.path.samestat(os.fstat(fd), os.lstat(part)):
        return False  # it has got its name, or another one has taken it
    system, pid, started = part.stem[-32:-24], int(part.stem[-24:-16], 16), part.stem[-16:-8]
    if system != _system():
        return time.time() - os.fstat(fd).st_mtime > _GRACE
    return part.name not in _held if pid == os.getpid() else started != _started(pid)


def _remove_beside(part: Path) -> None:
    """Remove what belongs to a part: its journal, and what Open MPI's MPI-IO leaves of a process that was killed."""
    for path in (part.with_suffix(".journal"), *part.parent.glob(f"{glob.escape(part.name)}-*.lock")):
        path.unlink(missing_ok=True)


def _renamed(old: Path, new: Path) -> bool:
    with suppress(FileNotFoundError):  # another process was first
        os.rename(old, new)
        return True
    return False


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
