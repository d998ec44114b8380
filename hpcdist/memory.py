"""Is there memory for a result? Found before data move: the same error on all ranks, and the job goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from hpcdist import agree

if TYPE_CHECKING:
    from hpcdist.team import Team

__all__ = ["allocate", "host_memory"]

T = TypeVar("T")

LARGE = 2**28  # bytes of a result from which the ranks agree that all of them have the memory
_CGROUP = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def host_memory() -> int:
    """Bytes of memory that the processes of this host may use together: RAM and swap, or the limit of the cgroup."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total = sum(1024 * int(fields[name].split()[0]) for name in ("MemTotal", "SwapTotal"))
    for path in _CGROUP:
        with suppress(OSError, ValueError):  # not there, or "max"
            total = min(total, int(Path(path).read_text()))
    return total


def allocate(verb: str, team: Team, nbytes: Sequence[int], make: Callable[[], T]) -> T:
    """Call `make`, which takes memory for this rank's result. Collective if a result is large.

    Args:
        nbytes: of the result of each rank of the team; the same on all ranks.

    Raises:
        RankError: on every rank, if the results on some node have more bytes than it has memory, or if `make` fails on
            some rank.
    """
    if max(nbytes) < LARGE:
        return make()
    world = team.world
    needed: dict[int, int] = {}
    for peer, size in zip(team.peers, nbytes, strict=True):
        node = world.node_of[peer]
        needed[node] = needed.get(node, 0) + size
    problems = {}
    for rank, (peer, size) in enumerate(zip(team.peers, nbytes, strict=True)):
        on_node, memory = needed[world.node_of[peer]], world.memory[peer]
        if size and on_node > memory:
            more = "" if on_node == size else f", and those of all ranks on its node {on_node:,} bytes"
            problems[rank] = f"its result has {size:,} bytes{more}: more than the {memory:,} bytes of memory there"
    agree.require(verb, problems)
    if team.size == 1:
        return make()
    made: list[T] = []
    agree.on_all(team.comm, verb, lambda: made.append(make()))
    return made[0]
