"""Whether the ranks of a process group make the same call: compared before data move, if that costs little, or always.

MPI does not look: a longer message than expected may be written beyond the tensor, a shorter one leaves its end as it
was. A comparison is a message of some bytes, which is nothing beside data of `LEAST` and more; for less it is made
with TORCH_DISTRIBUTED_DEBUG=DETAIL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from mpi4py import MPI
from torch import Tensor, split

from hpcdist import callsite
from hpcdist.backend.memory import UnusableError, nbytes
from hpcdist.control import digests, objects
from hpcdist.errors import RankError, coded
from hpcdist.process import abort

if TYPE_CHECKING:
    from hpcdist.backend.communicator import Communicator

__all__ = ["Alike", "Pairs", "checked", "fail"]

LEAST = 2**15  # bytes of a rank's tensors
_DIGEST = 8  # bytes

Step = Callable[..., None]


Alike = tuple[Any, ...]
"""What must be the same on all ranks: number of elements and dtype of the first entry, a tensor or a list of them, and
the other entries. A tuple, since one is made in every call."""


def checked(team: Communicator, verb: str, step: Step, same: Alike | Pairs) -> Step:
    """Return a step of a call that compares first, if that costs little or is asked for.

    It raises a RankError on every rank if there is a difference.
    """
    if isinstance(same, Pairs):
        return same.before(step, verb) if team.compares else step
    tensors = same[0]
    if not team.compares and (tensors.nbytes if isinstance(tensors, Tensor) else nbytes(tensors)) < LEAST:
        return step
    sizes = [f"{x.numel()} x {x.dtype}" for x in ([tensors] if isinstance(tensors, Tensor) else tensors)]
    shown = ", ".join([*sizes, *map(str, same[1:])])
    at = _line(verb)

    def comparing(team: Communicator, *args: Any) -> None:
        _compare(team, verb, shown, at)
        step(team, *args)

    return comparing


class Pairs:
    """What each pair of ranks must agree on: the tensors that this rank sends, and those that it expects, by rank.

    Compared on demand only: the size of the data differs from rank to rank.
    """

    def __init__(self, sends: dict[int, Tensor], recvs: dict[int, Tensor]) -> None:
        self._sends, self._recvs = sends, recvs

    @classmethod
    def of_rows(
        cls, output: Tensor, input: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], size: int
    ) -> Pairs:
        """Return what the rows of an all_to_all_single amount to."""
        parts = [
            dict(enumerate(split(x, list(splits) or [x.shape[0] // size] * size)))
            for x, splits in ((input, input_splits), (output, output_splits))
        ]
        return cls(*parts)

    def before(self, step: Step, verb: str) -> Step:
        """Return a step that compares first."""
        sends, recvs = (
            {rank: f"{x.numel()} x {x.dtype}" for rank, x in xs.items()} for xs in (self._sends, self._recvs)
        )
        at = _line(verb)

        def comparing(team: Communicator, *args: Any) -> None:
            ranks = range(team.size)
            mine = [sends.get(rank) for rank in ranks], [recvs.get(rank) for rank in ranks]
            _compare(team, verb, "", at)
            objects.raise_problems(verb, dict(_problems(objects.all_gather_object(team.comm, mine, verb))))
            step(team, *args)

        return comparing


def _line(verb: str) -> str:
    """Return where the user's code makes this call, as in "train.py:57". In the thread that makes it."""
    return callsite.where(verb, 2).decode(errors="replace").removeprefix(f"{verb}() at ")


def _compare(team: Communicator, verb: str, shown: str, at: str) -> None:
    """Raise a RankError on every rank if the calls differ, wherever `at` they are."""
    text = f"{verb}() of {shown}" if shown else f"{verb}()"
    mine = blake2b(text.encode(), digest_size=_DIGEST).digest()
    found = bytearray(_DIGEST * team.size)
    team.comm.Allgather([mine, MPI.BYTE], [found, _DIGEST, MPI.BYTE])
    if found != mine * team.size:
        digests.same(team.comm, verb, text, (text, at), _difference)


def _difference(first: tuple[str, str], mine: tuple[str, str]) -> str | None:
    if mine[0] == first[0]:
        return None
    return coded("HD703", f"is in {mine[0]} at {mine[1]}, and rank 0 in {first[0]} at {first[1]}")


def _problems(every: Sequence[Any]) -> list[tuple[int, str]]:
    """(rank, problem) for each rank that does not expect what is sent to it."""
    return [
        (
            rank,
            coded(
                "HD703",
                f"expects {expected[source] or 'nothing'} from rank {source}, which sends {sent[rank] or 'nothing'}",
            ),
        )
        for rank, (_, expected) in enumerate(every)
        for source, (sent, _) in enumerate(every)
        if sent[rank] != expected[source]
    ]


def _sends(what: str | None) -> str:
    return f"which sends {what or 'nothing'}"


def fail(error: BaseException, verb: str, size: int) -> None:
    """End the job for an error on this rank while data move, since the other ranks cannot know of it.

    Does nothing for an error that all ranks raise alike, for one of the arguments, and for a rank alone.
    """
    if size == 1 or isinstance(error, (RankError, UnusableError)):
        return
    if isinstance(error, MPI.Exception) and error.Get_error_class() == MPI.ERR_TRUNCATE:
        error.add_note(
            "The ranks' tensors differ in size or dtype: TORCH_DISTRIBUTED_DEBUG=DETAIL compares them in each call."
        )
    abort.fail(error, f"{verb}() failed in the middle of a transfer")
