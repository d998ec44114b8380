"""Capacity and free memory of this host, and of the control groups that limit this process; sizes as text."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import psutil

from hpcdist.errors import FileError

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
# Of control groups, of version 2 and 1: files of the limit and of the usage, and the name of the cache in memory.stat.
_FILES = (
    ("memory.max", "memory.current", "file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache"),
)


def groups() -> list[tuple[Path, int]]:
    """Return (folder, limit in bytes) of the control groups of this process that limit its memory, and those above."""
    found = []
    for line in _lines(OWN):
        _, controllers, name = line.split(":", 2)  # of version 2, no controllers
        if controllers and "memory" not in controllers.split(","):
            continue
        root = ROOT / "memory" if controllers else ROOT
        group = root / name.strip().lstrip("/")
        for folder in (group, *group.parents):
            with suppress(OSError, ValueError):  # without a limit: "max"
                found.append((folder, int((folder / _FILES[bool(controllers)][0]).read_text())))
            if folder == root:
                break
    return found


def capacity() -> tuple[int, int]:
    """Return the bytes that this process can have at most, and those that all processes of this host can have.

    The latter is RAM and swap; the former also the lowest limit of the control groups of this process.
    """
    host: int = psutil.virtual_memory().total + psutil.swap_memory().total
    return min([host, *(most for _, most in groups())]), host


def available() -> int:
    """Return the bytes that this process can take without swapping, by the host and by all its control groups.

    A group's cache of files counts as free: the system reclaims it when memory is short.
    """
    found: list[int] = [psutil.virtual_memory().available]
    for folder, most in groups():
        _, usage, cache = _FILES[not (folder / _FILES[0][1]).exists()]
        with suppress(OSError, ValueError, IndexError):  # not readable for this user
            held = [int(line.split()[1]) for line in _lines(folder / "memory.stat") if line.split()[0] == cache]
            found.append(most - int((folder / usage).read_text()) + sum(held))
    return max(0, min(found))


def require(path: str, nbytes: int) -> None:
    """Raise a FileError if memory cannot hold a file, or a part of one, that can only be read whole."""
    free = available()
    if nbytes > free:
        raise FileError(
            "HD310", f"{path}: can only be read whole: {nbytes:,} bytes of memory needed, {free:,} available"
        )


def parse(text: str) -> int | None:
    """Parse a number of bytes: 4096, 64K, 64M, 1G; None if it is not one."""
    match = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", text, re.IGNORECASE)
    return None if match is None or len(text) > 20 else int(match[1]) << 10 * " KMG".index(match[2].upper() or " ")


def _lines(path: Path) -> list[str]:
    with suppress(OSError):
        return path.read_text().splitlines()
    return []
