"""Times several ways to do the same thing, taking turns in one run. What the words mean: README.md, Definitions."""

from __future__ import annotations

import argparse
import gc
import math
import os
import platform
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from itertools import accumulate, product
from pathlib import Path

import memory
import mpi4py
import report
import results
import torch
from mpi4py import MPI
from tqdm import tqdm

import hpcdist as hd

ROOT = 0
DTYPE, MPI_TYPE = torch.int64, MPI.INT64_T  # a value is its index in the whole tensor, exactly
SAMPLE = 0.004  # seconds that a sample lasts when its number of calls is chosen; calls may get faster after that
MOST_CALLS = 5000  # in one sample
WARM_UP = 2  # rounds that are not counted
FEWEST = 5  # rounds, for a contender that is too slow for all of them

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True)
class Case:
    """The data of one size and skew on this rank; every contender gets the same.

    Attributes:
        size, skew: as in results.Case.
        rank, comm: of this process, and the communicator of all ranks.
        counts: rows of each rank's shard, in rank order.
        shard: this rank's rows: what it brings to concat and gather, what it must get from split.
        whole: all rows: what split's root brings, what concat and gather's root must get; None on the other ranks.
        expected: the one of the two that this rank must get; None where it gets nothing.
        out: memory for the result, filled already; None where there is none.
        send, recv: the same as mpi4py takes it, made in advance.
    """

    size: int
    skew: str
    rank: int
    comm: MPI.Intracomm
    counts: list[int]
    shard: torch.Tensor
    whole: torch.Tensor | None
    expected: torch.Tensor | None
    out: torch.Tensor | None
    send: list[object] | None
    recv: list[object] | None

    def intact(self) -> bool:
        """Whether what the contenders read, and what they are compared with, is unchanged."""
        first = sum(self.counts[: self.rank])
        shard, whole = torch.arange(first, first + len(self.shard)), torch.arange(sum(self.counts))
        return torch.equal(self.shard, shard) and (self.whole is None or torch.equal(self.whole, whole))


@dataclass(frozen=True)
class Contender:
    """One way to do it: a name, and a function that takes a case and returns the result on this rank, if any."""

    name: str
    call: Callable[[Case], torch.Tensor | None]


@dataclass(frozen=True)
class Turn:
    """A contender, its timing so far, and the rounds that it takes part in."""

    contender: Contender
    timing: results.Timing
    rounds: set[int]


def make_counts(size: int, skew: str, world_size: int) -> list[int]:
    """Rows of each rank's shard. For skew "16:1" rank 0 holds `size` bytes (16 rows at least), the others 1/16."""
    rows = max(1, size // DTYPE.itemsize)
    if skew == "even":
        return [rows] * world_size
    times = int(skew.split(":")[0])
    small = max(1, rows // times)
    return [small * times] + [small] * (world_size - 1)


def make_case(comm: MPI.Intracomm, verb: str, size: int, skew: str) -> Case:
    """The data of `verb` on this rank."""
    counts = make_counts(size, skew, comm.size)
    displs = list(accumulate(counts, initial=0))
    everything = torch.arange(displs[-1], dtype=DTYPE)
    shard = everything[displs[comm.rank] : displs[comm.rank + 1]].clone()
    whole = everything if verb == "concat" or comm.rank == ROOT else None
    brings, gets = (whole, shard) if verb == "split" else (shard, whole)
    out = None if gets is None else torch.full_like(gets, -1)

    def message(x: torch.Tensor | None) -> list[object] | None:
        if x is None:
            return None
        return [x.numpy(), len(x), MPI_TYPE] if len(x) == len(shard) else [x.numpy(), counts, displs[:-1], MPI_TYPE]

    return Case(size, skew, comm.rank, comm, counts, shard, whole, gets, out, message(brings), message(out))


def check(contender: Contender, case: Case) -> None:
    """Call it once and compare with plain indexing. Collective; ends the program on every rank if one is wrong."""
    if case.out is not None:
        case.out.fill_(-1)
    result = contender.call(case)
    if result is None or case.expected is None:
        right = result is None and case.expected is None
    else:
        right = torch.equal(result, case.expected)
    wrong = [rank for rank, ok in enumerate(case.comm.allgather(right and case.intact())) if not ok]
    if wrong:
        what = f"{results.show_size(case.size)}, {case.skew}"
        raise SystemExit(f"{contender.name!r} gave wrong data, or changed its input, on ranks {wrong} ({what})")


def sample(contender: Contender, case: Case, calls: int) -> float:
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


def calibrate(contender: Contender, case: Case) -> tuple[int, float]:
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


def prepare(contenders: Sequence[Contender], case: Case, rounds: int, budget: float, until: float) -> list[Turn]:
    """Check every contender, and choose the rounds it takes part in: evenly spread, none if it is too slow.

    Collective. The baseline is the first. `until` is when the case should be done, by time.monotonic() on the root.
    """
    found = []
    for contender in contenders:
        check(contender, case)
        found.append((contender, *calibrate(contender, case)))
    costs = {c.name: calls * each for c, calls, each in found if FEWEST * calls * each <= budget or c is contenders[0]}
    left = case.comm.bcast(until - time.monotonic(), ROOT)
    taken = dict(zip(costs, plan(list(costs.values()), rounds, left), strict=True))
    total = taken[contenders[0].name]
    turns = []
    for contender, calls, each in found:
        timing, n = results.Timing(contender.name, calls, [None] * total), taken.get(contender.name, 0)
        if not n:
            timing.skipped = f"one call takes {each:.2f} s, so that {FEWEST} rounds exceed the budget of {budget:g} s"
        turns.append(Turn(contender, timing, {i * total // n for i in range(n)}))
    return turns


def measure(turns: Sequence[Turn], case: Case, until: float) -> None:
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


def peaks(contenders: Sequence[Contender], case: Case) -> list[results.Peak]:
    """The peak of extra memory of one call of each. Collective."""
    nbytes = sum(case.counts) * DTYPE.itemsize
    found = []
    for contender in contenders:
        check(contender, case)
        extra = memory.peak(case.comm, partial(contender.call, case))
        found.append(results.Peak(contender.name, extra, nbytes))
    return found


def run(verb: str, contenders: Sequence[Contender], with_peaks: bool = False) -> None:
    """The program of a verb: parse the command line, time every size and skew, print on rank 0, write JSON.

    The first contender is the baseline.
    """
    asked = _arguments(verb)
    end = time.monotonic() + asked.seconds
    with hd.init(device="cpu") as world:
        cpus = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, cpus // world.world_size))
        record = new_record(verb, world.world_size, cpus)
        show = tqdm.write if world.rank == 0 else _say_nothing
        if with_peaks:
            record.no_peaks = memory.unavailable(world.comm) or memory.too_small(max(asked.sizes))
            if not record.no_peaks:
                record.peaks = peaks(contenders, make_case(world.comm, verb, max(asked.sizes), "even"))
            show(report.peak_table(record) + "\n")
        cases = list(product(asked.sizes, asked.skew))
        quiet = None if world.rank == 0 else True  # None: tqdm looks whether stderr is a terminal
        for done, (size, skew) in enumerate(tqdm(cases, desc=verb, unit="case", disable=quiet)):
            case = make_case(world.comm, verb, size, skew)
            now = time.monotonic()
            share = max(0, end - now) / (len(cases) - done)
            turns = prepare(contenders, case, asked.rounds, asked.budget, now + share)
            measure(turns, case, now + 2 * share)
            nbytes = [count * DTYPE.itemsize for count in case.counts]
            record.cases.append(results.Case(size, skew, nbytes, [turn.timing for turn in turns]))
            show(report.case_table(record, record.cases[-1]) + "\n")
            if asked.json and world.rank == 0:  # what has been measured stays, should the run be ended
                results.save(record, asked.json)


def _say_nothing(text: str) -> None:
    """What the other ranks do instead of printing."""


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


def _arguments(verb: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=f"Time {verb} and what people write by hand instead.")
    parser.add_argument(
        "--sizes", type=sizes, default=sizes("8,64K,16M,64M"), metavar="LIST", help="bytes a rank (8,64K,16M,64M)"
    )
    parser.add_argument("--skew", type=_skews, default=_skews("even,16:1"), metavar="LIST", help="even,16:1")
    parser.add_argument("--rounds", type=int, default=30, help="samples of each contender (%(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=150, help="for the run: fewer rounds for slow contenders (%(default)g)"
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=12,
        metavar="SECONDS",
        help=f"skip a contender, and say so in the table, if {FEWEST} calls take longer (%(default)g)",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write all samples there; in a folder: as MPI-npN-verb"
    )
    asked = parser.parse_args()
    if asked.rounds < 1:
        parser.error("--rounds must be at least 1")
    return asked


def sizes(text: str) -> list[int]:
    """A list of sizes on the command line."""
    try:
        return [int(part.rstrip("KMG")) * _UNITS[part.lstrip("0123456789")] for part in text.upper().split(",")]
    except (KeyError, ValueError):
        raise argparse.ArgumentTypeError(f"expected sizes as in 8,64K,16M, got {text!r}") from None


def _skews(text: str) -> list[str]:
    skews = text.split(",")
    if not set(skews) <= {"even", "16:1"}:
        raise argparse.ArgumentTypeError(f"expected even, 16:1 or both, got {text!r}")
    return skews
