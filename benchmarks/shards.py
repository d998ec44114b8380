"""The data and the main program of the benchmarks of concat, gather and split."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, product
from typing import Any

import harness
import memory
import report
import results
import torch
from harness import ROOT, Contender, Step
from mpi4py import MPI

import hpcdist as hd

DTYPE, MPI_TYPE = torch.int64, MPI.INT64_T  # a value is its index in the whole tensor, exactly


@dataclass(frozen=True)
class Case:
    """The data of one size and skew on this rank; every contender gets the same.

    Attributes:
        size, skew, what: as in results.Case.
        rank, comm: rank of this process, and communicator of all ranks.
        counts: rows of each rank's shard, in rank order.
        shard: rows of this rank: the input of concat and gather, the result of split.
        whole: all rows: the input of split's root, the result of concat and of gather's root; None on other ranks.
        expected: expected result of this rank (shard or whole); None if it gets none.
        out: preallocated memory for the result, if any.
        send, recv: mpi4py buffer specifications of input and result, made in advance.
        plans: plans of hpcdist, made in the first, untimed call.
    """

    size: int
    skew: str
    what: str
    rank: int
    comm: MPI.Intracomm
    counts: list[int]
    shard: torch.Tensor
    whole: torch.Tensor | None
    expected: torch.Tensor | None
    out: torch.Tensor | None
    send: list[object] | None
    recv: list[object] | None
    plans: list[Callable[..., Any]] = field(default_factory=list)

    def plan(self, make: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
        """Return the plan of this case; the first call makes it. Collective then."""
        if not self.plans:
            self.plans.append(make())
        return self.plans[0]

    @property
    def nbytes(self) -> list[int]:
        return [count * DTYPE.itemsize for count in self.counts]

    def reset(self) -> None:
        if self.out is not None:
            self.out.fill_(-1)

    def correct(self, result: torch.Tensor | None) -> bool:
        if result is None or self.expected is None:
            return result is None and self.expected is None
        return torch.equal(result, self.expected)

    def intact(self) -> bool:
        """Return whether the input and the expected result are unchanged."""
        first = sum(self.counts[: self.rank])
        shard, whole = torch.arange(first, first + len(self.shard)), torch.arange(sum(self.counts))
        return torch.equal(self.shard, shard) and (self.whole is None or torch.equal(self.whole, whole))


def make_counts(size: int, skew: str, world_size: int) -> list[int]:
    """Return the rows of each rank. With skew "16:1", rank 0 holds `size` bytes (at least 16 rows), the others 1/16."""
    rows = max(1, size // DTYPE.itemsize)
    if skew == "even":
        return [rows] * world_size
    times = int(skew.split(":")[0])
    small = max(1, rows // times)
    return [small * times] + [small] * (world_size - 1)


def make_case(comm: MPI.Intracomm, verb: str, size: int, skew: str) -> Case:
    """Make the data of `verb` on this rank."""
    counts = make_counts(size, skew, comm.size)
    displs = list(accumulate(counts, initial=0))
    everything = torch.arange(displs[-1], dtype=DTYPE)
    shard = everything[displs[comm.rank] : displs[comm.rank + 1]].clone()
    whole = everything if verb == "concat" or comm.rank == ROOT else None
    x, expected = (whole, shard) if verb == "split" else (shard, whole)
    out = None if expected is None else torch.full_like(expected, -1)

    def message(x: torch.Tensor | None) -> list[object] | None:
        if x is None:
            return None
        return [x.numpy(), len(x), MPI_TYPE] if len(x) == len(shard) else [x.numpy(), counts, displs[:-1], MPI_TYPE]

    return Case(size, skew, "", comm.rank, comm, counts, shard, whole, expected, out, message(x), message(out))


def peaks(contenders: Sequence[Contender], case: Case) -> list[results.Peak]:
    """Measure the peak additional memory of one call of each contender. Collective."""
    nbytes = sum(case.counts) * DTYPE.itemsize
    found = []
    for contender in contenders:
        harness.check(contender, case)
        extra = memory.peak(case.comm, partial(contender.call, case))
        found.append(results.Peak(contender.name, extra, nbytes))
    return found


def run(verb: str, contenders: Sequence[Contender], with_peaks: bool = False) -> None:
    """Run the benchmark of a verb: parse the command line, time every size and skew, print on rank 0, write JSON.

    The first contender is the baseline.
    """
    parser = harness.parser(f"Time {verb} and what people write by hand instead.", "8,128,64K,1M,16M,64M")
    parser.add_argument("--skew", type=_skews, default="even,16:1", metavar="LIST", help="%(default)s")
    asked = parser.parse_args()
    with hd.init(device="cpu", backend="gloo") as world:
        comm = world.comm
        record = harness.start(verb, comm)
        if with_peaks:
            record.no_peaks = memory.unavailable(comm) or memory.too_small(max(asked.sizes))
            if not record.no_peaks:
                record.peaks = peaks(contenders, make_case(comm, verb, max(asked.sizes), "even"))
            if comm.rank == ROOT:
                print(report.peak_table(record) + "\n")
        steps = [
            Step(partial(make_case, verb=verb, size=size, skew=skew), contenders)
            for size, skew in product(asked.sizes, asked.skew)
        ]
        harness.run(record, comm, steps, asked)


def _skews(text: str) -> list[str]:
    skews = text.split(",")
    if not set(skews) <= {"even", "16:1"}:
        raise argparse.ArgumentTypeError(f"expected even, 16:1 or both, got {text!r}")
    return skews
