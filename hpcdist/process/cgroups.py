"""The control groups of this process, of version 1 and 2: what they allow it of memory and of CPU time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["cpus", "identity", "memory"]

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def memory() -> list[tuple[Path, int]]:
    """Return (folder, limit in bytes) of the groups of this process that limit its memory, and of those above."""
    found = []
    for folder, version in _groups("memory"):
        name = "memory.limit_in_bytes" if version == 1 else "memory.max"
        with suppress(OSError, ValueError):  # without a limit: "max"
            found.append((folder, int((folder / name).read_text())))
    return found


def cpus() -> list[tuple[Path, float]]:
    """Return (folder, number of CPUs) of the groups of this process that limit its CPU time, and of those above.

    With 2.5 CPUs, the threads of all processes of the group may compute for 250 ms in each 100 ms; then the kernel
    stops them.
    """
    found = []
    for folder, version in _groups("cpu"):
        with suppress(OSError, ValueError):  # without a limit: "max", or -1
            if version == 1:
                quota = int((folder / "cpu.cfs_quota_us").read_text())
                period = int((folder / "cpu.cfs_period_us").read_text())
            else:
                quota, period = map(int, (folder / "cpu.max").read_text().split())
            if quota > 0 and period > 0:
                found.append((folder, quota / period))
    return found


def identity(folder: Path) -> str:
    """Return what is the same for a group wherever it is seen: each container may show its own group by one path."""
    found = folder.stat()
    return f"{found.st_dev}:{found.st_ino}"


def _groups(controller: str) -> Iterator[tuple[Path, int]]:
    """Yield (folder, version) of the groups of this process that a controller may limit, each before those above it."""
    try:
        lines = OWN.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = ROOT / controller if controllers else ROOT
        group = root / name.strip().lstrip("/")
        for folder in (group, *group.parents):
            yield folder, 1 if controllers else 2
            if folder == root:
                break
