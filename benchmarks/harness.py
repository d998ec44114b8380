"""Time several implementations of the same operation, interleaved in one run. For terms, see README.md, Definitions."""

from __future__ import annotations

import argparse
import gc
import math
import os
import platform
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
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
SAMPLE = 0.004  # target seconds per sample, when the number of calls is chosen; calls may get faster later
MOST_CALLS = 5000  # per sample
WARM_UP = 2  # uncounted rounds
FEWEST = 5  # rounds, for a contender that is too slow for all of them

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


class Data(Protocol):
    """The data of a case, the same for each contender; `size`, `skew`, `nbytes`, `what` as in results.Case."""

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

    def reset(self) -> None:
        """Fill the memory for results with -1."""

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

    `unsupported` returns why a case is not supported, else None.
    """

    name: str
    call: Callable[[Any], Any]
    unsupported: Callable[[Any], str | None] = supported


@dataclass(frozen=True)
class Step:
    """A case to run: a function that makes its data, and its contenders, the baseline first."""

    make: Callable[[MPI.Intracomm], Data]
    contenders: Sequence[Contender]


@dataclass(frozen=True)
class Turn:
    """A contender, its timing so far, and the rounds in which it is timed."""

    contender: Contender
    timing: results.Timing
    rounds: set[int]


def check(contender: Contender, case: Data) -> None:
    """Call a contender once, and compare with plain indexing. Collective; exits on every rank if one is wrong."""
    case.reset()
    correct = case.correct(contender.call(case))
    wrong = [rank for rank, ok in enumerate(case.comm.allgather(correct and case.intact())) if not ok]
    if wrong:
        what = f"{results.show_size(case.size)}, {case.skew}"
        raise SystemExit(f"{contender.name!r} gave wrong data, or changed its input, on ranks {wrong} ({what})")


def sample(contender: Contender, case: Data, calls: int) -> float:
    """Return the seconds per call on the slowest rank, over `calls` calls after a barrier. Collective.

    Before a batch of short calls, one call is not timed: it may be slow after another contender.
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


def prepare(contenders: Sequence[Contender], case: Data, rounds: int, budget: float, until: float) -> list[Turn]:
    """Check every contender, and choose its rounds: evenly spread, none if it is too slow.

    Collective. The baseline is the first. `until` is the target end of the case, by time.monotonic() on the root.
    """
    found, turns = [], []
    for contender in contenders:
        reason = contender.unsupported(case)
        if reason:
            turns.append(Turn(contender, results.Timing(contender.name, 1, [], reason), set()))
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

    Ends early after `until`, by time.monotonic() on the root, but not before FEWEST rounds.
    """
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
        if round_ + 1 >= FEWEST and case.comm.bcast(time.monotonic() > until, ROOT):
            break
    gc.enable()
    for turn in turns:
        del turn.timing.samples[round_ + 1 :]
        if not turn.timing.rounds and not turn.timing.skipped:
            turn.timing.skipped = "the time was up before its turn"


def run(record: results.Record, comm: MPI.Intracomm, steps: Sequence[Step], asked: argparse.Namespace) -> None:
    """Time every step, print on rank 0, write JSON. Collective; `asked` comes from :func:`parser`."""
    root, end = comm.rank == ROOT, time.monotonic() + asked.seconds
    for done, step in enumerate(tqdm(steps, desc=record.verb, unit="case", disable=None if root else True)):
        case = step.make(comm)  # disable=None: tqdm checks whether stderr is a terminal
        now = time.monotonic()
        share = max(0, end - now) / (len(steps) - done)
        chosen = [c for i, c in enumerate(step.contenders) if not i or not any(w in c.name for w in asked.without)]
        turns = prepare(chosen, case, asked.rounds, asked.budget, now + share)
        measure(turns, case, now + 2 * share)
        record.cases.append(results.Case(case.size, case.skew, case.nbytes, [turn.timing for turn in turns], case.what))
        if root:
            tqdm.write(report.case_table(record, record.cases[-1]) + "\n")
        if asked.json and root:  # keeps the measurements if the run is interrupted
            results.save(record, asked.json)
        del case  # frees its memory before the next one is made


def start(verb: str, comm: MPI.Intracomm) -> results.Record:
    """Give torch its share of the cores, and create an empty record."""
    cpus = len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, cpus // comm.size))
    return new_record(verb, comm.size, cpus)


def new_record(verb: str, world_size: int, cpus: int) -> results.Record:
    """Create an empty record: the software and the machine."""
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


@contextmanager
def shared_folder(comm: MPI.Intracomm, parent: Path, name: str) -> Iterator[Path]:
    """A context with a new folder in `parent` for the files of all ranks, which is removed at its end. Collective."""
    made = tempfile.mkdtemp(prefix=f"hpcdist-{name}-", dir=parent) if comm.rank == ROOT else None
    folder = Path(comm.bcast(made))
    try:
        yield folder
        comm.Barrier()
    finally:
        if comm.rank == ROOT:
            shutil.rmtree(folder, ignore_errors=True)


def parser(what: str, sizes_: str, seconds: float = 150, budget: float = 12) -> argparse.ArgumentParser:
    """Create the parser of the common command line; `sizes_` are the default sizes."""
    found = argparse.ArgumentParser(description=what, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--sizes", type=sizes, default=sizes_, metavar="LIST", help=f"bytes per rank ({sizes_})")
    found.add_argument("--rounds", type=_rounds, default=30, help="samples per contender (%(default)s)")
    found.add_argument(
        "--seconds",
        type=float,
        default=seconds,
        help="target duration; slow contenders get fewer rounds (%(default)g)",
    )
    found.add_argument(
        "--budget",
        type=float,
        default=budget,
        metavar="SECONDS",
        help=f"skip a contender, with a note in the table, if {FEWEST} calls take longer (%(default)g)",
    )
    found.add_argument(
        "--without", type=words, default=[], metavar="LIST", help="omit contenders with these words in their name"
    )
    found.add_argument("--json", type=Path, metavar="FILE", help="file for all samples; in a folder: MPI-npN-verb")
    return found


def some_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Return a parser of known words for the command line."""

    def parse(text: str) -> list[str]:
        found = words(text)
        if not set(found) <= set(known):
            raise argparse.ArgumentTypeError(f"expected some of {','.join(known)}, got {text!r}")
        return found

    return parse


def words(text: str) -> list[str]:
    """Parse a list on the command line."""
    return text.split(",")


def _rounds(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError("expected at least 1")
    return int(text)


def sizes(text: str) -> list[int]:
    """Parse a list of sizes on the command line."""
    try:
        return [int(part.rstrip("KMG")) * _UNITS[part.lstrip("0123456789")] for part in text.upper().split(",")]
    except (KeyError, ValueError):
        raise argparse.ArgumentTypeError(f"expected sizes as in 8,64K,16M, got {text!r}") from None
