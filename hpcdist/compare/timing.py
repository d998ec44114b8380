"""Time several ways to do the same: interleaved, in a random order that all ranks share; the slowest rank counts."""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from hpcdist.control import objects
from hpcdist.errors import HpcdistError, coded
from hpcdist.runtime.cli import ranks_text
from hpcdist.runtime.world import current
from hpcdist.tensors import accelerator

if TYPE_CHECKING:
    from mpi4py import MPI

SAMPLE = 0.004  # target seconds per sample, when the number of calls is chosen; calls may get faster later
MOST_CALLS = 5000  # per sample
WARM_UP = 2  # uncounted rounds
FEWEST = 5  # rounds, for a contender that is too slow for all of them


class Data(Protocol):
    """The data of a case, the same for each contender."""

    @property
    def comm(self) -> MPI.Intracomm: ...

    def reset(self) -> None:
        """Fill the memory for results with other values."""

    def correct(self, result: Any) -> bool:
        """Return whether the result equals that of plain indexing."""

    def intact(self) -> bool:
        """Return whether the input and the expected result are unchanged."""


def supported(case: Any) -> str | None:
    """Support every case."""
    return None


@dataclass(frozen=True)
class Contender:
    """An implementation: a name, and a function that takes a case and returns the result on this rank, if any.

    `unsupported` returns why a case is not supported, else None; the same on all ranks.
    """

    name: str
    call: Callable[[Any], Any]
    unsupported: Callable[[Any], str | None] = supported


class Spread(NamedTuple):
    """The median and the quartiles of a set of figures, in their unit."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Compute median and quartiles."""
    low, _, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return Spread(median(values), low, high)


@dataclass
class Timing:
    """The timing of one contender in one case.

    Attributes:
        name: name of the contender.
        calls: number of consecutive calls in a sample.
        samples: seconds per call on the slowest rank, for each round; None if it was not timed in the round.
        skipped: reason why it was not timed at all, or None.
    """

    name: str
    calls: int
    samples: list[float | None]
    skipped: str | None = None

    @property
    def rounds(self) -> int:
        return sum(sample is not None for sample in self.samples)

    @property
    def seconds(self) -> Spread:
        """The time of one call on the slowest rank."""
        return spread([sample for sample in self.samples if sample is not None])


def ratio(one: Timing, other: Timing) -> Spread | None:
    """Compute the paired ratio: in each round with both, the time of `one` divided by that of `other`."""
    both = [a / b for a, b in zip(one.samples, other.samples, strict=False) if a is not None and b is not None]
    return spread(both) if both else None


@dataclass(frozen=True)
class Turn:
    """A contender, its timing so far, and the rounds in which it is timed."""

    contender: Contender
    timing: Timing
    rounds: set[int]


def check(contender: Contender, case: Data) -> None:
    """Call a contender once, and compare with plain indexing. Collective.

    Raises:
        HpcdistError: on every rank, if the data are wrong on one.
    """
    case.reset()
    correct = case.correct(contender.call(case)) and case.intact()
    found = objects.all_gather_object(case.comm, correct)
    if not all(found):
        wrong = ranks_text(rank for rank, ok in enumerate(found) if not ok)
        raise HpcdistError(coded("HD901", f"{contender.name!r} gave wrong data, or changed its input, on {wrong}"))


def sample(contender: Contender, case: Data, calls: int) -> float:
    """Return the seconds per call on the slowest rank, over `calls` calls after a barrier. Collective.

    Before a batch of short calls, one call is not timed: it may be slow after another contender.
    """
    call, comm, device = contender.call, case.comm, current().device
    if calls > 1:
        call(case)
    if device.type != "cpu":
        accelerator.synchronize(device)
    comm.Barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call(case)
    if device.type != "cpu":
        accelerator.synchronize(device)
    return float(max(comm.allgather(time.perf_counter() - start))) / calls


def calibrate(contender: Contender, case: Data) -> tuple[int, float]:
    """Return (calls that take at least SAMPLE, seconds per call). Collective, the same on all ranks."""
    calls = 1
    while True:
        each = sample(contender, case, calls)
        if calls * each < 5 * SAMPLE:  # short enough for outliers
            each = min(each, sample(contender, case, calls), sample(contender, case, calls))
        if calls * each >= SAMPLE or calls == MOST_CALLS:
            return calls, each
        calls = min(MOST_CALLS, max(2 * calls, math.ceil(1.2 * SAMPLE / each)))


def plan(costs: Sequence[float], rounds: int, left: float, fewest: int = FEWEST) -> list[int]:
    """Return the number of rounds of each contender: from `fewest` to `rounds`, within `left` seconds if possible.

    `costs` are the seconds per round of each, the baseline's first. Time that fast contenders do not need goes to the
    slow ones. The baseline runs in all rounds, since the others are compared with it.
    """
    taken = [0] * len(costs)
    for done, i in enumerate(sorted(range(len(costs)), key=costs.__getitem__)):
        share = left / (len(costs) - done)
        taken[i] = min(rounds, max(fewest, int(share / costs[i])))
        left -= taken[i] * costs[i]
    taken[0] = max(taken)
    return taken


def measure(
    contenders: Sequence[Contender], case: Data, rounds: int, seconds: float, budget: float = math.inf
) -> list[Timing]:
    """Check every contender, and time it in up to `rounds` rounds. Collective; the same result on all ranks.

    Args:
        contenders: the first one is the baseline, and is timed in all rounds.
        seconds: target duration; twice that ends the rounds, but not before FEWEST.
        budget: a contender whose FEWEST calls take longer is skipped.

    Raises:
        HpcdistError: on every rank, if a contender gives wrong data.
    """
    start = time.monotonic()
    turns = _prepare(contenders, case, rounds, budget, start + seconds)
    _run(turns, case, start + 2 * seconds)
    return [turn.timing for turn in turns]


def _prepare(contenders: Sequence[Contender], case: Data, rounds: int, budget: float, until: float) -> list[Turn]:
    """Check every contender, and choose its rounds: evenly spread, none if it is too slow."""
    found, turns = [], []
    for contender in contenders:
        reason = contender.unsupported(case)
        if reason:
            turns.append(Turn(contender, Timing(contender.name, 1, [], reason), set()))
            continue
        check(contender, case)
        found.append((contender, *calibrate(contender, case)))
    costs = {c.name: calls * each for c, calls, each in found if FEWEST * calls * each <= budget or c is contenders[0]}
    left = case.comm.bcast(until - time.monotonic())
    taken = dict(zip(costs, plan(list(costs.values()), rounds, left), strict=True))
    total = taken[contenders[0].name]
    for contender, calls, each in found:
        timing, n = Timing(contender.name, calls, [None] * total), taken.get(contender.name, 0)
        if not n:
            timing.skipped = f"one call takes {each:.2f} s, so that {FEWEST} rounds exceed the budget of {budget:g} s"
        turns.append(Turn(contender, timing, {i * total // n for i in range(n)}))
    return sorted(turns, key=lambda turn: contenders.index(turn.contender))


def _run(turns: Sequence[Turn], case: Data, until: float) -> None:
    """Fill in the timings, round by round."""
    rounds = len(turns[0].rounds)
    warm_up = WARM_UP if rounds > FEWEST else 0  # if so slow, the two earlier calls must suffice
    gc.collect()
    gc.freeze()  # objects that exist by now stay: exclude them from the collection after every round
    gc.disable()
    for round_ in range(-warm_up, rounds):
        order = random.Random(round_).sample(turns, len(turns))  # so that none always runs after the same other one
        for turn in order:
            if round_ in turn.rounds:
                turn.timing.samples[round_] = float(f"{sample(turn.contender, case, turn.timing.calls):.4g}")
            elif round_ < 0 and len(turn.rounds) == rounds:
                sample(turn.contender, case, turn.timing.calls)
        gc.collect()
        if round_ + 1 >= FEWEST and case.comm.bcast(time.monotonic() > until):
            break
    gc.enable()
    for turn in turns:
        del turn.timing.samples[round_ + 1 :]
        if not turn.timing.rounds and not turn.timing.skipped:
            turn.timing.skipped = "the time was up before its turn"
