"""The data and the main program of the benchmarks of concat, gather and split."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from itertools import product

import harness
import memory
import report
import results
import torch
from harness import ROOT, Step
from mpi4py import MPI
from results import (
    BASELINE,
    CONTROL,
    GLOO_PADDED,
    HPCDIST_NEW,
    HPCDIST_OUT,
    MPI4PY_NEW,
    MPI4PY_PICKLE,
    PLAN_OUT,
    ROUTES,
)

import hpcdist as hd
from hpcdist.compare import byhand
from hpcdist.compare.timing import Contender, check

DTYPE = torch.int64  # a value is its index in the whole tensor, exactly


CONTENDERS = [  # of all three verbs
    Contender(BASELINE, byhand.preallocated),
    Contender(CONTROL, byhand.preallocated),
    Contender(HPCDIST_OUT, lambda case: byhand.ours(case, out=case.out)),
    Contender(HPCDIST_NEW, byhand.ours),
    Contender(PLAN_OUT, lambda case: case.plan(case.x, case.out)),
    Contender("hpcdist plan", lambda case: case.plan(case.x)),
    *(Contender(name, partial(byhand.ours, route=route)) for route, name in ROUTES.items()),
    Contender(MPI4PY_NEW, byhand.exchanged),
    Contender(MPI4PY_PICKLE, byhand.pickled),
    Contender(GLOO_PADDED, byhand.padded),
]


class Case(byhand.Case):
    """The data of one size and skew on this rank, in one dim; `size`, `skew` and `what` are those of results.Case."""

    what = ""

    def __init__(self, comm: MPI.Intracomm, verb: str, size: int, skew: str) -> None:
        self.size, self.skew = size, skew
        super().__init__(comm, verb, DTYPE, [[rows] for rows in make_counts(size, skew, comm.size)])


def make_counts(size: int, skew: str, world_size: int) -> list[int]:
    """Return the rows of each rank. With skew "16:1", rank 0 holds `size` bytes (at least 16 rows), the others 1/16."""
    rows = max(1, size // DTYPE.itemsize)
    if skew == "even":
        return [rows] * world_size
    times = int(skew.split(":")[0])
    small = max(1, rows // times)
    return [small * times] + [small] * (world_size - 1)


def peaks(contenders: Sequence[Contender], case: Case) -> list[results.Peak]:
    """Measure the peak additional memory of one call of each contender. Collective."""
    nbytes = sum(case.nbytes)
    found = []
    for contender in contenders:
        check(contender, case)
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
                record.peaks = peaks(contenders, Case(comm, verb, max(asked.sizes), "even"))
            if comm.rank == ROOT:
                print(report.peak_table(record) + "\n")
        steps = [
            Step(partial(Case, verb=verb, size=size, skew=skew), contenders)
            for size, skew in product(asked.sizes, asked.skew)
        ]
        harness.run(record, comm, steps, asked)


def _skews(text: str) -> list[str]:
    skews = text.split(",")
    if not set(skews) <= {"even", "16:1"}:
        raise argparse.ArgumentTypeError(f"expected even, 16:1 or both, got {text!r}")
    return skews
