"""How much memory this host, or this job's part of it, still has."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

__all__ = ["available"]

_CGROUPS = Path("/sys/fs/cgroup")


def available() -> int:
    """The bytes that can be taken without swapping: of the host, and of every control group that this process is in.

    What a group holds of files is counted as free: it is given back when memory is short.
    """
    found = [int(line.split()[1]) * 1024 for line in _lines(Path("/proc/meminfo")) if line.startswith("MemAvailable:")]
    for line in _lines(Path("/proc/self/cgroup")):
        _, kinds, name = line.split(":", 2)
        if kinds == "":  # version 2, one tree
            found += _left(_CGROUPS, name, "memory.max", "memory.current", "file")
        elif "memory" in kinds.split(","):
            usage = "memory.usage_in_bytes"
            found += _left(_CGROUPS / "memory", name, "memory.limit_in_bytes", usage, "total_cache")
    return max(0, min(found, default=2**63))


def _left(root: Path, name: str, limit: str, usage: str, cache: str) -> list[int]:
    """What a group and those above it may still take."""
    found = []
    group = root / name.strip().lstrip("/")
    for folder in (group, *group.parents):
        with suppress(OSError, ValueError, IndexError):  # without a limit, or not of ours to see
            most = int((folder / limit).read_text())
            held = [int(line.split()[1]) for line in _lines(folder / "memory.stat") if line.split()[0] == cache]
            found.append(most - int((folder / usage).read_text()) + sum(held))
        if folder == root:
            break
    return found


def _lines(path: Path) -> list[str]:
    with suppress(OSError):
        return path.read_text().splitlines()
    return []
