"""Time several ways to do the same: interleaved, in a random order that all ranks share; the slowest rank counts."""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import quantiles
from typing import Any, NamedTuple

from hpcdist.control import objects
from hpcdist.errors import HpcdistError, coded
from hpcdist.runtime.cli import ranks_text, timed
from hpcdist.runtime.world import current

SAMPLE = 0.004  # target seconds per sample, when the number of calls is chosen; calls may get faster later
MOST_CALLS = 5000  # per sample
WARM_UP = 2  # uncounted rounds
FEWEST = 5  # rounds, for a contender that is too slow for all of them


@dataclass(frozen=True)
class Contender:
    """A way: a name, and a function that takes the data of a case and returns the result on this rank, if any.

    `unsupported` returns why a case is not supported, else None; the same on all ranks. The data have a communicator,
    `comm`; `reset()` fills the memory for results with other values, `correct(result)` compares a result with that of
    plain indexing, and `intact()` returns whether the input is unchanged.
    """

    name: str
    call: Callable[[Any], Any]
    unsupported: Callable[[Any], str | None] = lambda case: None


class Spread(NamedTuple):
    """The median and the quartiles of a set of figures, in their unit."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Compute median and quartiles."""
    low, middle, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return Spread(middle, low, high)


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
        return len(self.samples) - self.samples.count(None)

    @property
    def seconds(self) -> Spread:
        """The time of one call on the slowest rank."""
        return spread([sample for sample in self.samples if sample is not None])


def check(contender: Contender, case: Any) -> None:
    """Call a contender once, and compare with plain indexing. Collective.

    Raises:
        HpcdistError: on every rank, if the data are wrong on one.
    """
    case.reset()
    correct = case.correct(contender.call(case)) and case.intact()
    wrong = [rank for rank, ok in enumerate(objects.all_gather_object(case.comm, correct)) if not ok]
    if wrong:
        text = f"{contender.name!r} gave wrong data, or changed its input, on {ranks_text(wrong)}"
        raise HpcdistError(coded("HD901", text))


def sample(contender: Contender, case: Any, calls: int) -> float:
    """Return the seconds per call on the slowest rank, over `calls` calls after a barrier. Collective.

    Before a batch of short calls, one call is not timed: it may be slow after another contender.
    """
    here, call = current(), partial(contender.call, case)
    if calls > 1:
        timed(here, call)

    def batch() -> None:
        for _ in range(calls):
            call()

    return timed(here, batch) / calls


def calibrate(contender: Contender, case: Any) -> tuple[int, float]:
    """Return (calls that take at least SAMPLE, seconds per call). Collective, the same on all ranks."""
    calls = 1
    while True:
        each = sample(contender, case, calls)
        if calls * each < 5 * SAMPLE:  # short enough for outliers
            each = min(each, sample(contender, case, calls), sample(contender, case, calls))
        if calls * each >= SAMPLE or calls == MOST_CALLS:
            return calls, each
        calls = min(MOST_CALLS, max(2 * calls, math.ceil(1.2 * SAMPLE / each)))


def measure(
    contenders: Sequence[Contender], case: Any, rounds: int, seconds: float, budget: float = math.inf
) -> list[Timing]:
    """Check every contender, and time it in up to `rounds` rounds. Collective; the same result on all ranks.

    Args:
        contenders: the first one is the baseline, and is timed in all rounds.
        seconds: target duration, of which each has an equal share; twice that ends the rounds, but not before FEWEST.
        budget: a contender whose FEWEST calls take longer is skipped.

    Raises:
        HpcdistError: on every rank, if a contender gives wrong data.
    """
    until = time.monotonic() + seconds
    timings = [Timing(contender.name, 1, [], contender.unsupported(case)) for contender in contenders]
    costs = dict[int, float]()  # seconds of a sample
    for i, (contender, timing) in enumerate(zip(contenders, timings, strict=True)):
        if not timing.skipped:
            check(contender, case)
            timing.calls, each = calibrate(contender, case)
            costs[i] = timing.calls * each
            if FEWEST * costs[i] > budget and i:
                timing.skipped = f"{FEWEST} rounds exceed the budget of {budget:g} s: a call takes {each:.2f} s"
                del costs[i]
    share = objects.all_gather_object(case.comm, until - time.monotonic())[0] / len(costs)
    taken = {i: min(rounds, max(FEWEST, int(share / cost))) for i, cost in costs.items()}
    taken[0] = total = max(taken.values())
    warm_up = WARM_UP if total > FEWEST else 0  # if so slow, the two earlier calls must suffice
    gc.collect()
    gc.freeze()  # objects that exist by now stay: exclude them from the collection after every round
    gc.disable()
    for round_ in range(-warm_up, total):
        for i in random.Random(round_).sample([*taken], len(taken)):  # so that none always runs after the same other
            turn = round_ * taken[i] % total < taken[i]  # evenly spread
            seconds_of = sample(contenders[i], case, timings[i].calls) if turn else None
            if round_ >= 0:
                timings[i].samples.append(seconds_of and float(f"{seconds_of:.4g}"))
        gc.collect()
        if round_ + 1 >= FEWEST and objects.all_gather_object(case.comm, time.monotonic() > until + seconds)[0]:
            break
    gc.enable()
    return timings
