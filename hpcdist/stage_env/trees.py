"""What folders hold, and where each of their entries goes in the copy."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import xxhash

from hpcdist.errors import FileError, reason

__all__ = ["Entry", "Link", "Tree", "compiled", "digest", "links", "scan"]

_THREADS = 16  # a shared file system answers each request late, but many at once
_SYSTEM = ("/usr/", "/lib", "/bin/", "/sbin/", "/etc/", "/proc/", "/dev/", "/sys/")  # a node has them by itself


def _all(_: str) -> bool:
    return True


@dataclass(frozen=True)
class Tree:
    """A folder to be copied.

    Attributes:
        root: its absolute path.
        at: its name in the copy, without a "/".
        keep: whether an entry, whose name is relative to `root`, is copied, and what lies in it.
        roots: `root`, and the path without symbolic links if that is another one.
    """

    root: str
    at: str
    keep: Callable[[str], bool] = _all

    @cached_property
    def roots(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.root, os.path.realpath(self.root))))


class Entry(NamedTuple):
    """A file, folder or symbolic link: its name in the copy, its path, its status; of a link, what it holds."""

    name: str
    path: str
    mode: int
    gid: int
    size: int
    mtime: int  # seconds: more is not kept
    inode: tuple[int, int] | None  # of a file that has several names
    target: str


class Link(NamedTuple):
    """What a symbolic link holds in the copy, and whether that lies outside of the copy."""

    target: str
    outside: bool


def nbytes(entries: Sequence[Entry]) -> int:
    """Return the bytes of all files, of one that has several names once."""
    files = {entry.inode or entry.name: entry.size for entry in entries if stat.S_ISREG(entry.mode)}
    return sum(files.values())


def scan(trees: Sequence[Tree]) -> list[Entry]:
    """Return all entries of the trees: files and links by name, then folders, those within others first.

    A folder comes after all that it holds, so that its time and mode stay as they are set. Sockets, FIFOs and devices
    are left out. A tree's own folder may be a symbolic link: what it leads to is copied.

    Raises:
        FileError: a folder cannot be read.
    """
    found: list[Entry] = []
    with ThreadPoolExecutor(_THREADS) as threads:
        for tree in trees:
            level = [_entry(tree.at, tree.root, os.stat(tree.root))]
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
    size = status.st_size if stat.S_ISREG(mode) else 0
    return Entry(name, path, mode, status.st_gid, size, int(status.st_mtime), inode, target)


def compiled(name: str) -> bool:
    """Whether a file is one that a program writes as it runs, and does without: .pyc, and all in a __pycache__."""
    return name.endswith(".pyc") or "/__pycache__/" in name


def digest(entries: Iterable[Entry]) -> str:
    """Return a digest of names, kinds, modes, sizes, times and targets: it differs if a file was written since.

    Compiled files do not count, nor when a folder was changed: programs that run from the folder write them.
    """
    made = xxhash.xxh3_128()
    for entry in entries:
        if not compiled(entry.name) and not entry.name.endswith("/__pycache__"):
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
    leads = _followed(entry)
    roots = [(tree, root) for tree in trees for root in tree.roots]
    broken = False  # within its own tree
    for path in dict.fromkeys((leads, os.path.realpath(leads))):
        for tree, root in roots:
            if path == root or path.startswith(root + "/"):
                name = tree.at + path[len(root) :]
                if name in names:
                    return Link(os.path.relpath(name, os.path.dirname(entry.name)), False)
                broken = broken or entry.name.startswith(f"{tree.at}/")
    absolute = entry.target.startswith("/")
    if broken and not absolute:
        return Link(entry.target, False)
    return Link(entry.target if absolute else leads, not broken and not leads.startswith(_SYSTEM))


def _followed(entry: Entry) -> str:
    """The path that a link names, from the real folder on, as the system follows it; the last name is not followed."""
    folder, _, last = os.path.join(os.path.dirname(entry.path), entry.target).rpartition("/")
    return os.path.normpath(os.path.join(os.path.realpath(f"{folder}/"), last))
