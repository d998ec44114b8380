"""Capacity and free memory of this host, and of the control groups that limit this process; sizes as text."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from hpcdist.errors import FileError
from hpcdist.process import cgroups

__all__ = ["available", "capacity", "parse", "require"]

_USAGE, _USAGE_1 = ("memory.current", "file"), ("memory.usage_in_bytes", "total_cache")  # version 2, and version 1
_TOTALS = ("MemTotal:", "SwapTotal:")


def capacity() -> tuple[int, int]:
    """Return the bytes that this process can have at most, and those that all processes of this host can have.

    The latter is RAM and swap; the former also the lowest limit of the control groups of this process.
    """
    total = sum(int(line.split()[1]) * 1024 for line in _lines(Path("/proc/meminfo")) if line.startswith(_TOTALS))
    host = total or 2**63
    return min([host, *(most for _, most in cgroups.memory())]), host


def available() -> int:
    """Return the bytes that this process can take without swapping, by the host and by all its control groups.

    A group's cache of files counts as free: the system reclaims it when memory is short.
    """
    found = [int(line.split()[1]) * 1024 for line in _lines(Path("/proc/meminfo")) if line.startswith("MemAvailable:")]
    for folder, most in cgroups.memory():
        usage, cache = _USAGE if (folder / _USAGE[0]).exists() else _USAGE_1
        with suppress(OSError, ValueError, IndexError):  # not readable for this user
            held = [int(line.split()[1]) for line in _lines(folder / "memory.stat") if line.split()[0] == cache]
            found.append(most - int((folder / usage).read_text()) + sum(held))
    return max(0, min(found, default=2**63))


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
