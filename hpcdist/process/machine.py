"""This machine: its memory, and that of the control groups that limit this process; its cores, by NUMA domain; sizes as
text.

Linux lists the domains in /sys. If a rank is bound to the cores of one, its memory follows: the kernel takes each page
from the domain of the core that touches it first.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
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
    limits = []
    for line in _lines(OWN):
        _, controllers, name = line.split(":", 2)  # version 2 lists no controllers
        if controllers and "memory" not in controllers.split(","):
            continue
        root = ROOT / "memory" if controllers else ROOT
        group = root / name.strip().lstrip("/")
        for folder in (group, *group.parents):
            with suppress(OSError, ValueError):  # "max" stands for no limit
                limits.append((folder, int((folder / _FILES[bool(controllers)][0]).read_text())))
            if folder == root:
                break
    return limits


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
    free: list[int] = [psutil.virtual_memory().available]
    for folder, most in groups():
        _, usage, cache = _FILES[not (folder / _FILES[0][1]).exists()]
        with suppress(OSError, ValueError, IndexError):  # this user may not read it
            held = [int(line.split()[1]) for line in _lines(folder / "memory.stat") if line.split()[0] == cache]
            free.append(most - int((folder / usage).read_text()) + sum(held))
    return max(0, min(free))


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


SYS = Path("/sys")


def domains() -> list[set[int]]:
    """Return the cores of each NUMA domain of this node that has some; none where the system does not list them."""
    folders = sorted(SYS.glob("devices/system/node/node*[0-9]"), key=lambda path: int(path.name.removeprefix("node")))
    return [cores for folder in folders if (cores := listed_cores(folder / "cpulist"))]


def beside(address: str) -> set[int]:
    """Return the cores beside a PCI device, such as "0000:3b:00"; none if unknown."""
    return listed_cores(SYS / f"bus/pci/devices/{address}.0/local_cpulist") if address else set()


def choose(ranks: Sequence[tuple[set[int], set[int]]], domains: Sequence[set[int]]) -> list[set[int]]:
    """Choose the cores of each rank of a node: those of one domain, and never others than the launcher has given it.

    A rank with a GPU gets the domain beside it; the others are spread over the domains in blocks. All keep their cores
    if the launcher has bound them: if the ranks have different cores, or one rank alone has not all of the node's.

    Args:
        ranks: for each rank, the cores that it has, and those beside its GPU.
        domains: the cores of each domain.

    Example::

        >>> everything, two = {0, 1, 2, 3}, [{0, 1}, {2, 3}]
        >>> choose([(everything, set()), (everything, set())], two)
        [{0, 1}, {2, 3}]
        >>> choose([(everything, {2, 3}), (everything, {0, 1})], two)
        [{2, 3}, {0, 1}]
        >>> choose([({0, 2}, set()), ({1, 3}, set())], two)
        [{0, 2}, {1, 3}]
    """
    given = [own for own, _ in ranks]
    cores = given[0]
    usable = [cores & domain for domain in domains if cores & domain]
    if not usable or any(own != cores for own in given) or (len(given) == 1 and cores < set().union(*domains)):
        return given
    return [cores & gpu or usable[i * len(usable) // len(ranks)] for i, (_, gpu) in enumerate(ranks)]


def bind(cores: set[int]) -> None:
    """Bind all threads of this process, such as those that libraries have started."""
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):  # it has ended
            os.sched_setaffinity(int(thread), cores)


def listed_cores(path: Path) -> set[int]:
    """Read a list of the kernel's, such as "0-3,8"."""
    with suppress(OSError):
        pairs = [part.partition("-") for part in path.read_text().strip().split(",") if part]
        return {core for first, _, last in pairs for core in range(int(first), int(last or first) + 1)}
    return set()
