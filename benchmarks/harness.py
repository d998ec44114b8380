"""Times several ways to do the same thing, taking turns in one run. What the words mean: README.md, Definitions."""

from __future__ import annotations

import argparse
import gc
import math
import os
import platform
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Protocol

import mpi4py
import report
import results
import torch
from mpi4py import MPI
from tqdm import tqdm

import hpcdist as hd

ROOT = 0
SAMPLE = 0.004  # seconds that a sample lasts when its number of calls is chosen; calls may get faster after that
MOST_CALLS = 5000  # in one sample
WARM_UP = 2  # rounds that are not counted
FEWEST = 5  # rounds, for a contender that is too slow for all of them

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


class Data(Protocol):
    """What the contenders of a case work on, the same for each; `size`, `skew`, `nbytes`, `what` as in results.Case."""

    @property
    def size(self) -> int: ...
    @property
    def skew(self) -> str: ...
    @property
    def what(self) -> str: ...
    @property
    def nbytes(self) -> list[int]: ...
    @property
    def comm(self) -> MPI.Intracomm: ...

    def spoil(self) -> None:
        """Fill with -1 what contenders write to."""

    def right(self, result: Any) -> bool:
        """Whether it is what plain indexing gives."""

    def intact(self) -> bool:
        """Whether what the contenders read, and what they are compared with, is unchanged."""


def no_lack(case: Any) -> str | None:
    """Of a contender for every case."""
    return None


@dataclass(frozen=True)
class Contender:
    """One way to do it: a name, and a function that takes a case and returns the result on this rank, if any.

    `lacks` says of a case why it cannot be done this way.
    """

    name: str
    call: Callable[[Any], Any]
    lacks: Callable[[Any], str | None] = no_lack


@dataclass(frozen=True)
class Step:
    """A case to come: how its data are made, and who is timed on them; the first is the baseline."""

    make: Callable[[MPI.Intracomm], Data]
    contenders: Sequence[Contender]


@dataclass(frozen=True)
class Turn:
    """A contender, its timing so far, and the rounds that it takes part in."""

    contender: Contender
    timing: results.Timing
    rounds: set[int]


def check(contender: Contender, case: Data) -> None:
    """Call it once and compare with plain indexing. Collective; ends the program on every rank if one is wrong."""
    case.spoil()
    right = case.right(contender.call(case))
    wrong = [rank for rank, ok in enumerate(case.comm.allgather(right and case.intact())) if not ok]
    if wrong:
        what = f"{results.show_size(case.size)}, {case.skew}"
        raise SystemExit(f"{contender.name!r} gave wrong data, or changed its input, on ranks {wrong} ({what})")


def sample(contender: Contender, case: Data, calls: int) -> float:
    """Seconds per call on the slowest rank, of `calls` calls from one barrier on. Collective.

    A batch of short calls comes after one that is not timed, or the first would pay for the contender before it.
    """
    call = contender.call
    if calls > 1:
        call(case)
    case.comm.Barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call(case)
    mine = time.perf_counter() - start
    return float(case.comm.allreduce(mine, op=MPI.MAX)) / calls


def calibrate(contender: Contender, case: Data) -> tuple[int, float]:
    """(calls that last at least SAMPLE, seconds per call). Collective, the same on all ranks."""
    calls = 1
    while True:
        each = sample(contender, case, calls)
        if calls * each < 5 * SAMPLE:  # short enough to be wrong by chance
            each = min(each, sample(contender, case, calls), sample(contender, case, calls))
        if calls * each >= SAMPLE or calls == MOST_CALLS:
            return calls, each
        calls = min(MOST_CALLS, max(2 * calls, math.ceil(1.2 * SAMPLE / each)))


def plan(costs: Sequence[float], rounds: int, left: float, fewest: int = FEWEST) -> list[int]:
    """How many rounds each contender takes part in: at most `rounds`, at least `fewest`, in `left` seconds if it can.

    `costs` are the seconds that a round takes each, the baseline's first. The cheap ones come first, and what they
    leave of their share goes to the slow ones. The baseline takes part in all, or the others would have nothing to be
    compared with.
    """
    taken = [0] * len(costs)
    for done, i in enumerate(sorted(range(len(costs)), key=costs.__getitem__)):
        share = left / (len(costs) - done)
        taken[i] = min(rounds, max(fewest, int(share / costs[i])))
        left -= taken[i] * costs[i]
    taken[0] = max(taken)
    return taken


def prepare(contenders: Sequence[Contender], case: Data, rounds: int, budget: float, until: float) -> list[Turn]:
    """Check every contender, and choose the rounds it takes part in: evenly spread, none if it is too slow.

    Collective. The baseline is the first. `until` is when the case should be done, by time.monotonic() on the root.
    """
    found, turns = [], []
    for contender in contenders:
        lack = contender.lacks(case)
        if lack:
            turns.append(Turn(contender, results.Timing(contender.name, 1, [], lack), set()))
            continue
        check(contender, case)
        found.append((contender, *calibrate(contender, case)))
    costs = {c.name: calls * each for c, calls, each in found if FEWEST * calls * each <= budget or c is contenders[0]}
    left = case.comm.bcast(until - time.monotonic(), ROOT)
    taken = dict(zip(costs, plan(list(costs.values()), rounds, left), strict=True))
    total = taken[contenders[0].name]
    for contender, calls, each in found:
        timing, n = results.Timing(contender.name, calls, [None] * total), taken.get(contender.name, 0)
        if not n:
            timing.skipped = f"one call takes {each:.2f} s, so that {FEWEST} rounds exceed the budget of {budget:g} s"
        turns.append(Turn(contender, timing, {i * total // n for i in range(n)}))
    return sorted(turns, key=lambda turn: contenders.index(turn.contender))


def measure(turns: Sequence[Turn], case: Data, until: float) -> None:
    """Fill in the timings, round by round. Collective.

    Past `until`, by time.monotonic() on the root, it ends early, but not before FEWEST rounds.
    """
    rounds = len(turns[0].rounds)
    warm_up = WARM_UP if rounds > FEWEST else 0  # so slow that being called twice already has to do
    gc.collect()
    gc.freeze()  # what is loaded by now stays, and need not be looked through after every round
    gc.disable()
    for round_ in range(-warm_up, rounds):
        order = random.Random(round_).sample(turns, len(turns))  # none always runs after the same other one
        for turn in order:
            if round_ in turn.rounds:
                turn.timing.samples[round_] = float(f"{sample(turn.contender, case, turn.timing.calls):.4g}")
            elif round_ < 0 and len(turn.rounds) == rounds:
                sample(turn.contender, case, turn.timing.calls)
        gc.collect()
        if round_ + 1 >= FEWEST and case.comm.bcast(time.monotonic() > until, ROOT):
            break
    gc.enable()
    for turn in turns:
        del turn.timing.samples[round_ + 1 :]
        if not turn.timing.rounds and not turn.timing.skipped:
            turn.timing.skipped = "the time was up before its turn"


def run(record: results.Record, comm: MPI.Intracomm, steps: Sequence[Step], asked: argparse.Namespace) -> None:
    """Time every step, print on rank 0, write JSON. Collective; `asked` comes from a parser of :func:`parser`."""
    root, end = comm.rank == ROOT, time.monotonic() + asked.seconds
    for done, step in enumerate(tqdm(steps, desc=record.verb, unit="case", disable=None if root else True)):
        case = step.make(comm)  # disable=None: tqdm looks whether stderr is a terminal
        now = time.monotonic()
        share = max(0, end - now) / (len(steps) - done)
        chosen = [c for i, c in enumerate(step.contenders) if not i or not any(w in c.name for w in asked.without)]
        turns = prepare(chosen, case, asked.rounds, asked.budget, now + share)
        measure(turns, case, now + 2 * share)
        record.cases.append(results.Case(case.size, case.skew, case.nbytes, [turn.timing for turn in turns], case.what))
        if root:
            tqdm.write(report.case_table(record, record.cases[-1]) + "\n")
        if asked.json and root:  # what has been measured stays, should the run be ended
            results.save(record, asked.json)
        del case  # or the next one would be made beside it


def start(verb: str, comm: MPI.Intracomm) -> results.Record:
    """A record without figures yet, once torch has its share of the cores."""
    cpus = len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, cpus // comm.size))
    return new_record(verb, comm.size, cpus)


def new_record(verb: str, world_size: int, cpus: int) -> results.Record:
    """A record without figures yet: what runs, and on what."""
    vendor, version = MPI.get_vendor()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return results.Record(
        verb=verb,
        world_size=world_size,
        mpi=f"{vendor} {'.'.join(map(str, version))}",
        versions={
            "hpcdist": hd.__version__,
            "torch": str(torch.__version__),
            "mpi4py": mpi4py.__version__,
            "python": platform.python_version(),
        },
        machine=f"{model}, {cpus} cores, Linux {platform.release().split('-')[0]}",
        threads=torch.get_num_threads(),
        date=date.today().isoformat(),
    )


def parser(what: str, sizes_: str, seconds: float = 150, budget: float = 12) -> argparse.ArgumentParser:
    """The command line that the benchmarks have in common; `sizes_` are the default ones."""
    found = argparse.ArgumentParser(description=what, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--sizes", type=sizes, default=sizes_, metavar="LIST", help=f"bytes a rank ({sizes_})")
    found.add_argument("--rounds", type=_rounds, default=30, help="samples of each contender (%(default)s)")
    found.add_argument(
        "--seconds", type=float, default=seconds, help="for the run: fewer rounds for slow contenders (%(default)g)"
    )
    found.add_argument(
        "--budget",
        type=float,
        default=budget,
        metavar="SECONDS",
        help=f"skip a contender, and say so in the table, if {FEWEST} calls take longer (%(default)g)",
    )
    found.add_argument(
        "--without", type=words, default=[], metavar="LIST", help="leave out contenders with these words in their name"
    )
    found.add_argument(
        "--json", type=Path, metavar="FILE", help="write all samples there; in a folder: as MPI-npN-verb"
    )
    return found


def some_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """For the command line: words, all of them among the known ones."""

    def parse(text: str) -> list[str]:
        found = words(text)
        if not set(found) <= set(known):
            raise argparse.ArgumentTypeError(f"expected some of {','.join(known)}, got {text!r}")
        return found

    return parse


def words(text: str) -> list[str]:
    """A list on the command line."""
    return text.split(",")


def _rounds(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError("expected at least 1")
    return int(text)


def sizes(text: str) -> list[int]:
    """A list of sizes on the command line."""
    try:
        return [int(part.rstrip("KMG")) * _UNITS[part.lstrip("0123456789")] for part in text.upper().split(",")]
    except (KeyError, ValueError):
        raise argparse.ArgumentTypeError(f"expected sizes as in 8,64K,16M, got {text!r}") from None
