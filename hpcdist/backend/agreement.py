"""Compare the calls of the ranks of a process group, in each collective before its data move.

MPI does not look: a longer message than expected may be written beyond the tensor, a shorter one leaves its end as it
was, and different collectives wait for each other. So each collective begins as a verb does, with one Allgather of
headers and small data: see :mod:`hpcdist.validation.collective`. The header of such a call has

- digests of what must be the same on all ranks: call, dtype, root, operation, and the sizes that all ranks know;
- in place of an extent, the balance of what only pairs of ranks know: each rank adds ``key(me, dest) * elements`` for
  each message that it sends, and subtracts ``key(source, me) * elements`` for each one that it expects. If all pairs
  agree, the balances of all ranks add up to 0 modulo 2^64. The keys are pseudo-random and odd: else they do so once in
  some 2^60 calls;
- whether it has an argument that cannot be sent.

If the data of all ranks fit, they have arrived, and nothing else is sent. Only if the ranks differ, they exchange
descriptions of their calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from torch import Tensor, dtype

from hpcdist import activity
from hpcdist.activity import callsite
from hpcdist.backend.host_copies import UnusableError, address
from hpcdist.comm.team import HEADER, digest
from hpcdist.control import objects
from hpcdist.errors import SHOWN, RankError, coded, listed
from hpcdist.layout import limits
from hpcdist.process import abort
from hpcdist.tensors.accelerator import MemoryKind
from hpcdist.validation import collective

if TYPE_CHECKING:
    from hpcdist.comm.team import Team

Sizes = tuple[tuple[int, dtype], ...]  # elements and dtype of tensors
Counts = Mapping[int, int]  # elements by rank

Chunks = Sequence[memoryview]  # the data that came behind the header of each rank

_NONE: Counts = {}
_RANGE = 2**64


class GroupCall(NamedTuple):
    """One rank's call.

    Attributes:
        verb: name of the call.
        sizes: those of the tensors that have the same sizes on all ranks.
        rest: what else must be the same: the operation, the root (an int), the dtype of messages.
        sends, recvs: elements that this rank sends to each rank, or expects from it, itself included.
        problem: why the arguments of this rank are refused, with a code.
        place: where the user's code makes the call, once a difference is to be explained.
    """

    verb: str
    sizes: Sizes = ()
    rest: tuple[Any, ...] = ()
    sends: Counts = _NONE
    recvs: Counts = _NONE
    problem: str | None = None
    place: str = ""

    @property
    def parts(self) -> list[str]:
        """The tensors and all else that must be the same, as text."""
        parts = [f"{count} x {kind}" for count, kind in self.sizes]
        return parts + [f"root {value}" if isinstance(value, int) else str(value) for value in self.rest]

    def shown(self, first: int) -> str:
        """Describe the call, with the tensors from number `first` on."""
        skipped = f"{first} tensors, " if first else ""
        of = f"of {skipped}{listed(self.parts[first:])}" if self.parts else ""
        return " ".join(filter(None, [f"{self.verb}()", of, self.place and f"at {self.place}"]))


@dataclass(frozen=True)
class Step:
    """A collective whose data travel behind the headers if they are small. Called as its `run`.

    Attributes:
        run: moves the data, given the team and the arguments.
        send: returns what this rank sends so, given the same: contiguous host memory, one tensor after the other; None
            if it does not fit.
        take: writes this rank's result, given the data of all ranks, and then the same.
    """

    run: Callable[..., None]
    send: Callable[..., Sequence[Tensor] | None]
    take: Callable[..., None]

    def __call__(self, team: Team, *args: Any) -> None:
        self.run(team, *args)


def sizes(*tensors: Tensor) -> Sizes:
    return tuple([(x.numel(), x.dtype) for x in tensors])


def checked(team: Team, call: GroupCall, step: Callable[..., None], *args: Any) -> None:
    """Run the step of a call, if all ranks make the same call. Another error on this rank alone ends the job.

    Raises:
        RankError: on every rank, if they do not, or if one of them has a tensor that cannot be sent.
        UnusableError: for an argument, before data move.
    """
    try:
        if team.size > 1 or call.problem:
            small = step if isinstance(step, Step) and not call.problem else None
            chunks = _compare(team, call, None if small is None else small.send(team, *args))
            if small is not None and chunks is not None:
                small.take(chunks, team, *args)
                return
        step(team, *args)
    except BaseException as error:
        if team.size > 1 and not isinstance(error, (RankError, UnusableError)):
            abort.fail(error, f"{call.verb}() failed in the middle of a transfer")
        raise


def _compare(team: Team, call: GroupCall, data: Sequence[Tensor] | None) -> Chunks | None:
    """Compare the calls of all ranks; return the data of all ranks, if they came along."""
    verb, sizes, rest, sends, recvs, problem, _ = call
    balance = 0
    if sends or recvs:
        to, of = _keys(team.rank, team.size)
        balance = sum([to[rank] * count for rank, count in sends.items()])
        balance -= sum([of[rank] * count for rank, count in recvs.items()])
        balance = (balance + _RANGE // 2) % _RANGE - _RANGE // 2  # as an integer with a sign
    behind = [] if data is None else [address(x) for x in data]
    nbytes = -1 if data is None else sum(map(len, behind))
    facts = balance, -1, MemoryKind.CPU, False, problem is not None, nbytes, 0, 0
    agreed = collective.agree(team, collective.HEADER_OF(collective.digests((verb, rest), sizes), *facts), behind)
    if agreed is None:
        _raise_difference(team, call)
    if not agreed.inline:
        return None
    whole, room = memoryview(team.headers.all), team.inline
    return [whole[start : start + room] for start in team.headers.starts]


def capacity(size: int) -> int:
    """Return how many bytes of a rank's data fit behind its header, in a team of `size` ranks."""
    return max(0, min(limits.INLINE, limits.SHORT // size - HEADER)) // 16 * 16


@lru_cache(maxsize=64)
def _keys(rank: int, size: int) -> tuple[list[int], list[int]]:
    """Return the keys of messages to each rank, and from each rank."""
    others = range(size)
    return [digest("", (rank, other)) | 1 for other in others], [digest("", (other, rank)) | 1 for other in others]


class ArgumentsError(RankError, ValueError):
    """Wrong arguments on some ranks: a ValueError as well, as from torch's own backends."""


def _raise_difference(team: Team, call: GroupCall) -> NoReturn:
    """Raise the same RankError on every rank."""
    every: list[GroupCall] = objects.all_gather_object(team.comm, call._replace(place=_place()), call.verb)
    group = "" if team.peers == list(range(team.size)) else f"; in the group of world ranks {listed(team.peers)}"
    problems = {rank: other.problem + group for rank, other in enumerate(every) if other.problem}
    if problems:
        raise ArgumentsError(every[0].verb, problems)
    wrong = dict(_other_calls(every)) or dict(_unmatched(every))
    raise RankError(every[0].verb, {rank: coded("HD301", text + group) for rank, text in wrong.items()})


def _place() -> str:
    """Return where the user's code makes the call that this thread is in, as in "train.py:57"."""
    own = activity.thread_calls()
    call = None if own is None else own.record.current()
    return "" if call is None else callsite.parts(call.text)[1]


def _other_calls(every: Sequence[GroupCall]) -> Iterator[tuple[int, str]]:
    """(rank, problem) for each rank whose call is not that of rank 0."""
    first = every[0]
    for rank, other in enumerate(every):
        if other[:3] != first[:3]:
            pairs = enumerate(zip_longest(first.parts, other.parts))
            at = next((i for i, (one, another) in pairs if one != another), 0)
            at = at if at >= SHOWN else 0  # of a long list, show where it differs
            yield rank, f"is in {other.shown(at)}, and rank 0 in {first.shown(at)}"


def _unmatched(every: Sequence[GroupCall]) -> Iterator[tuple[int, str]]:
    """(rank, problem) for each rank that does not expect what another one sends to it."""
    for rank, told in enumerate(every):
        for source, other in enumerate(every):
            sent, expected = other.sends.get(rank, 0), told.recvs.get(source, 0)
            if sent != expected:
                kind = told.parts[0]
                text = f"expects {expected} x {kind} from rank {source}, which sends {sent} x {kind}"
                yield rank, f"{text}; they are at {told.place} and {other.place}"
