"""How much memory this host, or this job's part of it, has, and how much of it is left."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

__all__ = ["available", "capacity"]

_CGROUPS = Path("/sys/fs/cgroup")
_USAGE, _USAGE_1 = ("memory.current", "file"), ("memory.usage_in_bytes", "total_cache")  # version 2, and version 1
_TOTALS = ("MemTotal:", "SwapTotal:")


def capacity() -> tuple[int, int]:
    """The bytes that this process may have at most, and those that all processes of this host may have together.

    The latter is RAM and swap, the former the least limit of a control group that the process is in.
    """
    total = sum(int(line.split()[1]) * 1024 for line in _lines(Path("/proc/meminfo")) if line.startswith(_TOTALS))
    host = total or 2**63
    return min([host, *(most for _, most in _limits())]), host


def available() -> int:
    """The bytes that can be taken without swapping: of the host, and of every control group that this process is in.

    What a group holds of files is counted as free: it is given back when memory is short.
    """
    found = [int(line.split()[1]) * 1024 for line in _lines(Path("/proc/meminfo")) if line.startswith("MemAvailable:")]
    for folder, most in _limits():
        usage, cache = _USAGE if (folder / _USAGE[0]).exists() else _USAGE_1
        with suppress(OSError, ValueError, IndexError):  # not of ours to see
            held = [int(line.split()[1]) for line in _lines(folder / "memory.stat") if line.split()[0] == cache]
            found.append(most - int((folder / usage).read_text()) + sum(held))
    return max(0, min(found, default=2**63))


def _limits() -> list[tuple[Path, int]]:
    """The control groups that this process is in, and those above them, with the limit of each that has one."""
    found = []
    for line in _lines(Path("/proc/self/cgroup")):
        _, kinds, name = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        root, limit = (_CGROUPS / "memory", "memory.limit_in_bytes") if kinds else (_CGROUPS, "memory.max")
        group = root / name.strip().lstrip("/")
        for folder in (group, *group.parents):
            with suppress(OSError, ValueError):  # without a limit: "max"
                found.append((folder, int((folder / limit).read_text())))
            if folder == root:
                break
    return found


def _lines(path: Path) -> list[str]:
    with suppress(OSError):
        return path.read_text().splitlines()
    return []
