"""Names of files: only regular files are read and replaced, and a new file appears complete, or not at all.

A FIFO waits for its other end for ever, and a device cannot hold an array: neither is opened.

A new file is written beside its name, made durable, and renamed.

Even if a process is killed, the name always refers to the old file or the complete new one. Until it is complete, the
data are in ``.NAME.TAG.part``, which no pattern of a shell or of glob matches. TAG identifies the process that writes
it. It is new for every attempt, so that no cache of names confuses two attempts. The next process that writes NAME
removes or resumes the part of a dead process. Locks show which processes are alive, if the file system supports locks.
Correctness does not depend on them.

The new file is another inode. It gets mode, owner, group, POSIX ACL and user attributes of the one that it replaces, as
far as the system permits. Other hard links to the old file keep the old contents.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import json
import os
import re
import secrets
import shutil
import stat
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from hpcdist.activity.procstat import started
from hpcdist.errors import FileError, coded, reason, refusal

PATIENCE = 5.0  # seconds that a shared file system's caches of names, attributes and contents may be out of date
_NAP = 0.1  # seconds between two attempts
_GRACE = 60  # seconds in which the creator of a file may not have locked it yet
_KEPT = ("user.", "system.posix_acl_access")  # extended attributes that a file takes over from the one that it replaces
_UNLOCKABLE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF)  # no locks; NFS: open for reading only
_UNSYNCABLE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EACCES, errno.EPERM)  # of a folder

_KINDS = {"d": "folder", "p": "FIFO", "s": "socket", "c": "device", "b": "device"}


@contextmanager
def file_errors(what: str | Path, written: bool = False) -> Iterator[None]:
    """Make a FileError about `what`, such as a path, of every error of the system or of a format's library."""
    try:
        yield
    except FileError:
        raise
    except Exception as error:  # each library has errors of its own for a damaged file
        if written:
            raise FileError("HD410", f"{what}: cannot be written: {reason(error)}") from error
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            raise FileError("HD401", f"{what}: no such file") from None
        raise FileError("HD402", f"{what}: cannot be read: {reason(error)}") from error


write_errors = partial(file_errors, written=True)


def check_regular(path: str) -> os.stat_result:
    """The status of a regular file, at the end of all symbolic links; it is not opened.

    Raises:
        FileError: no such file, or something that is not a regular file.
    """
    with file_errors(path):
        return _regular(path, ", expected a regular file")


def _regular(path: str | Path, more: str) -> os.stat_result:
    """The status of a regular file; a FileError with `more` to say if it is of another kind, but for a folder."""
    found = os.stat(path)
    if (kind := _KINDS.get(stat.filemode(found.st_mode)[0])) is not None:
        raise FileError("HD401", f"{path}: is a {kind}" + ("" if kind == "folder" else more))
    return found


def status_of_old(target: Path) -> os.stat_result | None:
    """The status of the file to be replaced, at the end of all symbolic links; None without a file there.

    Raises:
        FileError: it is not a regular file, or cannot be looked at.
    """
    with write_errors(target), suppress(FileNotFoundError):
        return _regular(target, ": only a regular file is replaced")
    return None


def open_regular(path: str) -> int:
    """Open a regular file for reading; return its descriptor.

    Raises:
        FileError: no such file, not a regular file, or it may not be read.
    """
    check_regular(path)  # before it is opened, which waits if it is a FIFO
    with file_errors(path):
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


@contextmanager
def utf8_path(path: str) -> Iterator[str]:
    """A path of a regular file for libraries that accept only names in UTF-8, which Linux does not require."""
    if path.encode(errors="replace") == os.fsencode(path):
        yield path
    else:
        fd = open_regular(path)
        try:
            yield f"/proc/self/fd/{fd}"
        finally:
            os.close(fd)


def shown(text: str) -> str:
    r"""Escape text, such as a file's name, into one line that every terminal can print.

    Example::

        >>> shown("a\nb\udcff.npy")
        'a\\nb\\udcff.npy'
    """
    return "".join(c if c.isprintable() or c == " " else c.encode("unicode_escape").decode() for c in text)


def check_unicode(text: str) -> None:
    """Raise a ValueError for text that has no UTF-8, such as a file's name that os.fsdecode() made of other bytes."""
    if text.encode(errors="replace").decode() != text:
        raise refusal(ValueError, "HD418", f"{text!r} is not text that UTF-8 can hold")


def check_target(path: str | Path, nbytes: int) -> None:
    """Check before anything is written that a file of `nbytes` can be written at `path`.

    Args:
        path: as the user has given it. ``x.npy/`` names no file, and as a Path it would name ``x.npy``.

    Raises:
        FileError: the name of a folder, no such folder, no regular file in its place, not writable, or no space.
    """
    if os.fspath(path).endswith(("/", "/.")):
        raise FileError("HD401", f"{path}: is the name of a folder")
    target = Path(path)
    old = status_of_old(target)
    real = Path(os.path.realpath(target)).parent
    if not target.parent.is_dir():  # without a folder, there is no ".." either
        raise FileError("HD401", f"{target}: no such folder: {target.parent}")
    check_folder(real, nbytes, str(target))
    if old is not None and not os.access(target, os.W_OK):
        raise FileError("HD410", f"{target}: is there already, and read-only")


def check_folder(folder: Path, nbytes: int, target: str) -> None:
    """Check that `nbytes` can be written to a folder; raise a FileError about `target` if not."""
    if not folder.is_dir():
        raise FileError("HD401", f"{target}: no such folder: {folder}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise FileError("HD410", f"{target}: the folder is not writable")
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise FileError("HD410", f"{target}: no space for the output: {nbytes:,} bytes needed, {free:,} free")


def private_folder(base: str) -> str:
    """Make a folder in `base` that only this user can read; return `base` if somebody else has taken its name.

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
    """Bring a file, or the entries of a folder, to the disk; to `forget`, also drop it from the system's cache, which
    could hide what others write. Not every folder can be opened, or synced: that is no error."""
    try:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            if forget:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno not in _UNSYNCABLE or not path.is_dir():
            raise


def check_shared(path: str, look: Callable[[], str | None]) -> None:
    """Check that this rank sees a file that another one has made, and may write to it.

    Args:
        look: says what this rank sees in its place, if anything else; it is called until caches of names cannot be out
            of date any more.

    Raises:
        FileError: it does not, or may not.
    """
    until = time.monotonic() + PATIENCE
    while (problem := look()) is not None:
        if time.monotonic() > until:
            raise FileError("HD413", f"{path}: {problem}: the folder is not shared by all nodes")
        time.sleep(_NAP)
    if not os.access(path, os.R_OK | os.W_OK):
        raise FileError("HD410", f"{path}: cannot be written by this rank")


def lock(fd: int) -> bool:
    """Take the lock on a file, for as long as it is open here; False if another process has it.

    On a file system without locks, every process gets it.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _UNLOCKABLE:
            raise
    return True


def _unlock(fd: int) -> None:
    """Release the lock on a file, also where a child process of this one has inherited it."""
    with suppress(OSError):  # a file system without locks
        fcntl.flock(fd, fcntl.LOCK_UN)


def sweep(folder: Path, prefix: str) -> None:
    """Remove the files with a prefix that dead jobs have left: those that no process has locked."""
    for path in folder.glob(f"{glob.escape(prefix)}*"):
        with suppress(OSError):  # another user's, or gone by now
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
        target: name that the file will have; of a symbolic link, the name that it points to.
        part: name that it has until then; it exists, and is empty.
        left: with `keep`, the part that a dead process has left, open; else None. See :meth:`adopt`.

    Raises:
        FileError: another process is writing the same target, or the part cannot be made.
    """

    def __init__(self, path: str | Path, keep: bool = False) -> None:
        self.target = Path(os.path.realpath(path))
        check_target(path, 0)
        self._old = status_of_old(self.target)
        self.part = self.target.with_name(_part_name(self.target.name))
        self.left: int | None = None
        self._left_path = self.part
        mode = 0o666 if self._old is None else 0o600  # until it is complete, it is no more readable than the old file
        try:
            with write_errors(path):
                for left in _left(self.target):
                    self._take_over(path, left, keep)
                self._lock = os.open(self.part, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_CREAT | os.O_EXCL, mode)
                lock(self._lock)
        except BaseException:
            self._close_left()
            raise
        _held.add(self.part.name)

    def _take_over(self, path: str | Path, left: Path, keep: bool) -> None:
        """Open and lock a part that a dead process has left, or remove it. A part of a process that may be alive
        stays."""
        try:
            fd = os.open(left, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:  # its writer has finished meanwhile
            return
        try:
            if not lock(fd):
                who = "this process is writing it already" if left.name in _held else "another process is writing it"
                raise FileError("HD414", f"{path}: {who} (it holds {left})")
            if not _is_dead(left, fd):  # no locks, or not locked yet: whichever ends last gets the name
                if keep:
                    text = f"{left} may still be written by another host, and is not resumed: written again"
                    warnings.warn(coded("HD414", text), stacklevel=3)
                return
            for path in left.parent.glob(f"{glob.escape(left.name)}-*.lock"):  # of Open MPI's MPI-IO
                path.unlink(missing_ok=True)
            if keep and self.left is None and os.fstat(fd).st_size > 0:
                self.left, self._left_path, fd = fd, left, -1
            else:
                left.unlink(missing_ok=True)
        finally:
            if fd >= 0:
                os.close(fd)

    def adopt(self, spans: Iterable[tuple[int, int]]) -> bool:
        """Replace the part by an earlier one, and keep its data in `spans`, (first byte, end) each. Its size, and its
        bytes outside of the spans, become equal to those of this part. False if another process has taken it."""
        left, self.left = self.left, None
        assert left is not None
        made, size = self._lock, os.fstat(self._lock).st_size
        try:
            os.replace(self._left_path, self.part)  # first: of several processes, one gets it
        except FileNotFoundError:
            os.close(left)
            return False
        self._lock = left
        try:
            os.fchmod(left, stat.S_IMODE(os.fstat(made).st_mode))
            os.truncate(left, size)
            at = 0
            with open(left, "r+b", closefd=False) as file:
                for start, end in (*sorted(spans), (size, size)):
                    block = os.pread(made, max(0, start - at), at)
                    if os.pread(left, len(block), at) != block:  # most are holes
                        file.seek(at)
                        file.write(block)
                    at = max(at, end)
        finally:
            os.close(made)
        return True

    def finish(self) -> None:
        """Put the complete file in place. The caller has synced the data of other processes."""
        if (old := status_of_old(self.target) or self._old) is not None:
            _look_like(self._lock, old, self.target)
        os.fsync(self._lock)
        _unlock(self._lock)  # before it can be read: HDF5 does not read a file that is locked
        try:
            os.replace(self.part, self.target)
        except FileNotFoundError as error:
            text = f"{self.target}: {self.part} is gone: another process has taken or removed it"
            raise FileError("HD414", text) from error
        self._unlock()
        sync(self.target.parent)

    def discard(self, keep: bool = False) -> None:
        """Give up; the part is removed, or kept for another attempt. After finish(), or again, it does nothing."""
        if self._lock >= 0:
            if not keep or self.left is not None:
                self.part.unlink(missing_ok=True)
            self._unlock()

    def _unlock(self) -> None:
        _held.discard(self.part.name)
        _unlock(self._lock)
        os.close(self._lock)
        self._lock = -1
        self._close_left()

    def _close_left(self) -> None:
        if self.left is not None:
            os.close(self.left)
            self.left = None


def _part_name(name: str) -> str:
    """``.NAME.TAG.part``; TAG identifies the name, the system, this process, its start, and the try: 8 hex digits each.

    A long name is cut: a file's name has 255 bytes at most.
    """
    pid = os.getpid()
    tag = f"{_digest(name)}{own_system()}{pid:08x}{start_of(pid)}{secrets.token_hex(4)}"
    return f"{_stem(name)}{tag}.part"


def _stem(name: str) -> str:
    return os.fsdecode(b"." + os.fsencode(name)[:200] + b".")


def _digest(text: str) -> str:
    return blake2b(text.encode(errors="surrogateescape"), digest_size=4).hexdigest()


def own_system() -> str:
    """A digest that identifies this host and container: the processes that this one can see."""
    return _digest(Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid"))


def start_of(pid: int) -> str:
    """A digest of when a process started, which its number alone does not identify; of 0 if it does not exist."""
    return _digest(str(started(pid)))


def _left(target: Path) -> list[Path]:
    """The parts of a target, those with the most data first; only this user's, and such as hpcdist makes."""
    stem = _stem(target.name)
    tag = re.compile(re.escape(f"{stem}{_digest(target.name)}") + r"[0-9a-f]{32}\.part")
    found, names = [], []
    with suppress(PermissionError):  # a folder whose entries can be used, but not listed
        names = [name for name in os.listdir(target.parent) if tag.fullmatch(name)]
    for path in map(target.with_name, names):
        with suppress(FileNotFoundError):  # its writer has finished meanwhile
            stat_ = os.lstat(path)
            if stat.S_ISREG(stat_.st_mode) and stat_.st_uid == os.geteuid() and stat_.st_nlink == 1:
                found.append((stat_.st_blocks, path))
    return [path for _, path in sorted(found, reverse=True)]


def _is_dead(part: Path, fd: int) -> bool:
    """Check that no process writes a part any more: its own is gone from this system, or elsewhere has let it rest."""
    if not part.exists() or not os.path.samestat(os.fstat(fd), os.lstat(part)):
        return False  # it has been renamed, or another process has taken it over
    system, pid, started = part.stem[-32:-24], int(part.stem[-24:-16], 16), part.stem[-16:-8]
    if system != own_system():
        return time.time() - os.fstat(fd).st_mtime > _GRACE
    return part.name not in _held if pid == os.getpid() else started != start_of(pid)


def _look_like(fd: int, old: os.stat_result, path: Path) -> None:
    """Copy mode, owner and group, ACL and attributes of a file to the open one that replaces it."""
    mode, kept = old.st_mode & 0o777, list(_KEPT)
    with suppress(OSError):
        os.fchown(fd, -1, old.st_gid)
    with suppress(OSError):  # another user's file
        os.fchown(fd, old.st_uid, -1)
    if os.fstat(fd).st_gid != old.st_gid:  # a group that differs gets the rights of all others
        mode, kept = mode & (~0o070 | (mode & 0o007) << 3), kept[:1]
    os.fchmod(fd, mode)
    with suppress(OSError):  # gone by now, or a file system without attributes
        names = [name for name in os.listxattr(path) if name.startswith(tuple(kept))]
        for name in os.listxattr(fd):
            if name.startswith(_KEPT) and name not in names:
                os.removexattr(fd, name)  # such as an ACL that the folder gives to new files
        for name in names:
            os.setxattr(fd, name, os.getxattr(path, name))


def read_json(path: str, kind: str) -> dict[str, Any]:
    """Return the contents of a JSON file whose "format" is `kind`.

    Raises:
        FileError: it cannot be read, or is of another kind or version.
    """
    with file_errors(path):
        found: dict[str, Any] = json.loads(Path(path).read_text())
        if found["format"] != kind:
            raise FileError("HD402", f"{path}: is not in {kind!r}")
        return found


def write_text(path: str | Path, text: str) -> None:
    """Write a small text file, which appears under its name when it is complete.

    Raises:
        FileError: it cannot be written; an earlier file stays.
    """
    commit = Commit(path)
    try:
        with write_errors(path):
            commit.part.write_text(text)
            commit.finish()
    finally:
        commit.discard()  # does nothing after finish()
