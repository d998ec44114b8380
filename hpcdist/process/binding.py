"""Bind the ranks of a node to the cores of NUMA domains, as Linux lists them in /sys.

Memory follows: the kernel takes each page from the domain of the core that touches it first.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_SYS = Path("/sys")


def domains(root: Path = _SYS) -> list[set[int]]:
    """Return the cores of each NUMA domain of this node that has some; none where the system does not list them."""
    folders = sorted(root.glob("devices/system/node/node*[0-9]"), key=lambda path: int(path.name.removeprefix("node")))
    return [cores for folder in folders if (cores := _cores(folder / "cpulist"))]


def beside(address: str, root: Path = _SYS) -> set[int]:
    """Return the cores beside a PCI device, such as "0000:3b:00"; none if unknown."""
    return _cores(root / f"bus/pci/devices/{address}.0/local_cpulist") if address else set()


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


def apply(cores: set[int]) -> None:
    """Bind all threads of this process, such as those that libraries have started."""
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):  # it has ended
            os.sched_setaffinity(int(thread), cores)


def _cores(path: Path) -> set[int]:
    """Read a list of the kernel's, such as "0-3,8"."""
    with suppress(OSError):
        pairs = [part.partition("-") for part in path.read_text().strip().split(",") if part]
        return {core for first, _, last in pairs for core in range(int(first), int(last or first) + 1)}
    return set()
