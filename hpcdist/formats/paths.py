"""Regular files only: a FIFO waits for its other end for ever, and a device cannot hold an array."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpcdist.errors import FileError, reason

__all__ = ["check_regular", "kind", "open_regular", "shown", "status_of_old", "utf8_path"]

_KINDS = {
    stat.S_IFDIR: "folder",
    stat.S_IFIFO: "FIFO",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
    stat.S_IFLNK: "symbolic link",
}


def kind(mode: int) -> str | None:
    """The kind of a file that is not regular, in one or two words; None of a regular file."""
    return None if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "special file")


def check_regular(path: str) -> os.stat_result:
    """The status of a regular file, at the end of all symbolic links; it is not opened.

    Raises:
        FileError: no such file, or something that is not a regular file.
    """
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        raise FileError("HD401", f"{path}: no such file") from None
    except OSError as error:
        raise FileError("HD402", f"{path}: cannot be read: {reason(error)}") from error
    _require(path, found.st_mode)
    return found


def status_of_old(target: Path) -> os.stat_result | None:
    """The status of the file to be replaced, at the end of all symbolic links; None without a file there.

    Raises:
        FileError: it is not a regular file, or cannot be looked at.
    """
    try:
        old = os.stat(target)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise FileError("HD410", f"{target}: cannot be written: {reason(error)}") from error
    if (what := kind(old.st_mode)) is not None:
        more = "" if what == "folder" else ": only a regular file is replaced"
        raise FileError("HD411", f"{target}: is a {what}{more}")
    return old


@contextmanager
def open_regular(path: str) -> Iterator[int]:
    """A file descriptor for reading a regular file.

    Raises:
        FileError: no such file, not a regular file, or it may not be read.
    """
    check_regular(path)  # before it is opened, which waits if it is a FIFO
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise FileError("HD402", f"{path}: cannot be read: {reason(error)}") from error
    try:
        _require(path, os.fstat(fd).st_mode)  # it may have been replaced meanwhile
        yield fd
    finally:
        os.close(fd)


@contextmanager
def utf8_path(path: str) -> Iterator[str]:
    """A path of a regular file for libraries that accept only names in UTF-8, which Linux does not require."""
    if path.encode(errors="replace") == os.fsencode(path):
        yield path
    else:
        with open_regular(path) as fd:
            yield f"/proc/self/fd/{fd}"


def _require(path: str, mode: int) -> None:
    what = kind(mode)
    if what is not None:
        raise FileError("HD411", f"{path}: is a {what}" + ("" if what == "folder" else ", expected a regular file"))


def shown(text: str) -> str:
    r"""Escape text, such as a file's name, into one line that every terminal can print.

    Example::

        >>> shown("a\nb\udcff.npy")
        'a\\nb\\udcff.npy'
    """
    return "".join(c if c.isprintable() or c == " " else c.encode("unicode_escape").decode() for c in text)
