"""What folders hold, and where each of their entries goes in the copy."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

from hpcdist.errors import FileError, reason

__all__ = ["Entry", "Link", "Tree", "digest", "links", "scan"]

_THREADS = 16  # a shared file system answers each request late, but many at once
_SYSTEM = ("/usr/", "/lib", "/bin/", "/sbin/", "/etc/", "/proc/", "/dev/", "/sys/")  # a node has them by itself
_COMPILED = ".pyc"


def _all(_: str) -> bool:
    return True


@dataclass(frozen=True)
class Tree:
    """A folder to be copied.

    Attributes:
        root: its absolute path.
        at: its name in the copy, without a "/".
        keep: whether an entry, whose name is relative to `root`, is copied, and what lies in it.
    """

    root: str
    at: str
    keep: Callable[[str], bool] = _all


class Entry(NamedTuple):
    """A file, folder or symbolic link: its name in the copy, its path, its status; of a link, what it holds."""

    name: str
    path: str
    mode: int
    size: int
    mtime: int  # seconds: more is not kept
    inode: tuple[int, int] | None  # of a file that has several names
    target: str


class Link(NamedTuple):
    """What a symbolic link holds in the copy, and whether that lies outside of the copy."""

    target: str
    outside: bool


def scan(trees: Sequence[Tree]) -> list[Entry]:
    """Return all entries of the trees: files and links by name, then folders, those within others first.

    A folder comes after all that it holds, so that its time and mode stay as they are set. Sockets, FIFOs and devices
    are left out.

    Raises:
        FileError: a folder cannot be read.
    """
    found: list[Entry] = []
    with ThreadPoolExecutor(_THREADS) as threads:
        for tree in trees:
            level = [_entry(tree.at, tree.root, os.lstat(tree.root))]
            found += level
            while level:
                inside = [entry for entries in threads.map(lambda e, t=tree: _list(t, e), level) for entry in entries]
                found += inside
                level = [entry for entry in inside if stat.S_ISDIR(entry.mode)]
    files = sorted(entry for entry in found if not stat.S_ISDIR(entry.mode))
    return files + sorted((entry for entry in found if stat.S_ISDIR(entry.mode)), reverse=True)


def _list(tree: Tree, folder: Entry) -> list[Entry]:
    entries = []
    try:
        with os.scandir(folder.path) as listed:
            for item in listed:
                if tree.keep(os.path.relpath(item.path, tree.root)):
                    with suppress(FileNotFoundError):  # gone since, as what Python compiles under a name for the moment
                        status = item.stat(follow_symlinks=False)
                        if any(kind(status.st_mode) for kind in (stat.S_ISREG, stat.S_ISDIR, stat.S_ISLNK)):
                            entries.append(_entry(f"{folder.name}/{item.name}", item.path, status))
    except OSError as error:
        raise FileError("HD402", f"{folder.path}: cannot be read: {reason(error)}") from error
    return entries


def _entry(name: str, path: str, status: os.stat_result) -> Entry:
    mode = status.st_mode
    inode = (status.st_dev, status.st_ino) if stat.S_ISREG(mode) and status.st_nlink > 1 else None
    target = os.readlink(path) if stat.S_ISLNK(mode) else ""
    return Entry(name, path, mode, status.st_size if stat.S_ISREG(mode) else 0, int(status.st_mtime), inode, target)


def digest(entries: Iterable[Entry]) -> str:
    """Return a digest of names, kinds, modes, sizes, times and targets: it differs if a file was written since.

    Compiled Python files do not count, nor when a folder was changed: programs that run from the folder write them.
    """
    made = xxhash.xxh3_128()
    for entry in entries:
        if not entry.name.endswith(_COMPILED) and not entry.name.endswith("/__pycache__"):
            mtime = 0 if stat.S_ISDIR(entry.mode) else entry.mtime
            key = (entry.name, entry.path, entry.mode, entry.size, mtime, entry.target)
            made.update(repr(key).encode(errors="surrogateescape"))
    return made.hexdigest()


def links(trees: Sequence[Tree], entries: Sequence[Entry]) -> dict[str, Link]:
    """Return what each symbolic link holds in the copy, by its name.

    A link to something that is copied, absolute or not, is made relative; one that leads elsewhere becomes absolute;
    one that leads nowhere in its own tree stays as it is.
    """
    names = {entry.name for entry in entries}
    return {entry.name: _link(trees, names, entry) for entry in entries if stat.S_ISLNK(entry.mode)}


def _link(trees: Sequence[Tree], names: set[str], entry: Entry) -> Link:
    here = os.path.dirname(entry.path)
    leads = os.path.normpath(os.path.join(here, entry.target))
    broken = False  # within its own tree
    for path in (leads, os.path.normpath(os.path.join(os.path.realpath(here), entry.target))):
        for tree in trees:
            if path == tree.root or path.startswith(tree.root + "/"):
                name = tree.at + path[len(tree.root) :]
                if name in names:
                    return Link(os.path.relpath(name, os.path.dirname(entry.name)), False)
                broken = broken or entry.name.startswith(f"{tree.at}/")
    if broken and not entry.target.startswith("/"):
        return Link(entry.target, False)
    return Link(leads, not broken and not leads.startswith(_SYSTEM))
