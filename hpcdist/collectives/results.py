"""Allocate results before data move: if memory is short, all ranks raise the same error, and the job can continue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from hpcdist.comm.team import Team
from hpcdist.control import objects
from hpcdist.errors import coded
from hpcdist.tensors.accelerator import MemoryKind
from hpcdist.validation import collective

T = TypeVar("T")

AGREED = 2**20  # bytes; of larger results, the ranks agree that all have been allocated, which takes microseconds
LARGE = 2**28  # bytes; larger results are compared with the memory in advance


def allocate(
    verb: str, team: Team, nbytes: Sequence[int], make: Callable[[], T], agreed: collective.Agreed | None = None
) -> T:
    """Call `make`, which allocates this rank's result, and copies of its data to send. Collective if a result is large.

    Args:
        nbytes: size of the result of each rank of the team; the same on all ranks.
        agreed: headers of the ranks: results with `out`, or on a GPU, take no host memory.

    Raises:
        RankError: on every rank, if the results on a node exceed its memory, or `make` fails on any rank.
    """
    longest = max(nbytes)
    if longest >= LARGE:
        _check_memory(verb, team, nbytes, agreed)
    return everywhere(verb, team, longest, make)


def everywhere(verb: str, team: Team, nbytes: int, make: Callable[[], T]) -> T:
    """Call `make`, which allocates this rank's result. Collective if the largest result has AGREED bytes.

    Raises:
        RankError: on every rank, if `make` fails on any rank.
    """
    if nbytes < AGREED:
        return make()
    made: list[T] = []
    causes: list[Exception] = []
    try:
        made.append(make())
    except Exception as error:
        causes.append(error)
    if not objects.everywhere(team.comm, not causes):

        def fail() -> None:
            made.clear()
            if causes:
                raise causes.pop()

        objects.run_on_all(team.comm, verb, fail)
    return made[0]


def _check_memory(verb: str, team: Team, nbytes: Sequence[int], agreed: collective.Agreed | None) -> None:
    """Raise a RankError on every rank, if the results on a node exceed its memory."""
    if agreed is not None:
        ranks = enumerate(zip(nbytes, agreed.kinds, strict=True))
        nbytes = [0 if rank in agreed.outs or kind == MemoryKind.GPU else size for rank, (size, kind) in ranks]
    settings = team.settings
    needed = Counter[int]()
    for peer, size in zip(team.peers, nbytes, strict=True):
        needed[settings.node_of[peer]] += size
    problems = {}
    for rank, (peer, size) in enumerate(zip(team.peers, nbytes, strict=True)):
        on_node, (own, host) = needed[settings.node_of[peer]], settings.memory[peer]
        if size > own:
            problems[rank] = f"its result has {size:,} bytes, more than the {own:,} bytes of memory there"
        elif size and on_node > host:
            together = f"its result has {size:,} bytes, and the results on its node have {on_node:,} bytes"
            problems[rank] = f"{together}, more than the {host:,} bytes of memory there"
    objects.raise_problems(verb, {rank: coded("HD310", text) for rank, text in problems.items()})
