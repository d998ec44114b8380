"""Measure the overlap of concat(async_op=True) with a computation, compared with gloo's and MPI's own.

mpirun -n 2 python benchmarks/overlap.py --sizes 64M --methods mpi,gloo --kinds mm,sleep
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import median
from typing import Protocol

import harness
import torch
import torch.distributed as dist
from harness import Step
from mpi4py import MPI
from results import AFTER, COMPUTE, TOGETHER, TRANSFER
from torch import Tensor

import hpcdist as hd
from hpcdist.tools.timing import Contender

LATE = 0.05  # seconds that rank 1 is late
KINDS = ("mm", "sleep", "late")
SIDE = 256  # rows of the square matrices; one product is a step of the computation
# torch 2.13 has a new name for it; existing code uses this one.
warnings.filterwarnings("ignore", ".*all_gather_into_tensor.* is deprecated", FutureWarning)


class Handle(Protocol):
    """A transfer in progress."""

    def wait(self) -> object: ...


class Request:
    """An mpi4py request with the method names of torch and hpcdist."""

    def __init__(self, request: MPI.Request) -> None:
        self.wait = request.Wait


@dataclass(frozen=True)
class Method:
    """A method to concatenate shards: blocking, and asynchronous; both take the case and write to case.out."""

    blocking: Callable[[Case], object]
    begin: Callable[[Case], Handle]


def _hpcdist(route: str) -> Method:
    return Method(
        lambda case: hd.concat(case.shard, route=route, out=case.out),
        lambda case: hd.concat(case.shard, route=route, out=case.out, async_op=True),
    )


METHODS = {
    "mpi": _hpcdist("mpi"),
    "gloo": _hpcdist("gloo"),
    "Iallgather": Method(  # makes progress while a rank is inside MPI
        lambda case: case.comm.Allgather(case.shard.numpy(), case.out.numpy()),
        lambda case: Request(case.comm.Iallgather(case.shard.numpy(), case.out.numpy())),
    ),
    "gloo-async": Method(  # a thread of gloo
        lambda case: dist.all_gather_into_tensor(case.out, case.shard),
        lambda case: dist.all_gather_into_tensor(case.out, case.shard, async_op=True),
    ),
}


@dataclass(frozen=True)
class Case(harness.Data):
    """Equal shards to concatenate, and a computation.

    Attributes:
        size: bytes of a shard.
        skew: key of KINDS: the kind of computation, or "late": rank 1 computes nothing, and arrives LATE seconds late.
        what: key of METHODS.
        steps: number of matrix products in the computation.
        seconds: duration of the computation, as estimated in advance.
    """

    size: int
    skew: str
    what: str
    comm: MPI.Intracomm
    shard: Tensor
    out: Tensor
    expected: Tensor
    matrix: Tensor
    steps: int
    seconds: float

    @property
    def is_late(self) -> bool:
        return self.skew == "late" and self.comm.rank == 1

    def compute(self) -> None:
        """Keep the core busy, or sleep, as if another device computed."""
        if self.is_late:
            return
        if self.skew == "sleep":
            time.sleep(self.seconds)
            return
        multiply(self.matrix, self.steps)

    def arrive(self) -> None:
        """Delay a late rank."""
        if self.is_late:
            time.sleep(LATE)

    def reset(self) -> None:
        self.out.fill_(-1)

    def correct(self, result: Tensor | None) -> bool:
        return result is None or torch.equal(result, self.expected)

    def intact(self) -> bool:
        return torch.equal(self.shard, self.expected.view(self.comm.size, -1)[self.comm.rank])


def multiply(matrix: Tensor, steps: int) -> None:
    out = torch.empty_like(matrix)
    for _ in range(steps):
        torch.mm(matrix, matrix, out=out)


def make_case(comm: MPI.Intracomm, size: int, kind: str, method: str) -> Case:
    """Make the data of this rank, and a computation that takes about as long as the transfer. Collective."""
    rows = max(1, size // 8)
    expected = torch.arange(rows * comm.size)
    shard = expected[rows * comm.rank : rows * (comm.rank + 1)].clone()
    matrix = torch.rand(SIDE, SIDE)
    case = Case(size, kind, method, comm, shard, torch.full_like(expected, -1), expected, matrix, 0, 0.0)
    seconds = _seconds(comm, partial(METHODS[method].blocking, case)) + (LATE if kind == "late" else 0)
    steps = max(1, math.ceil(seconds / _seconds(comm, partial(multiply, matrix, 10)) * 10))
    return Case(size, kind, method, comm, shard, case.out, expected, matrix, steps, seconds)


def _seconds(comm: MPI.Intracomm, call: Callable[[], object]) -> float:
    """Return the median duration of a call on the slowest rank. Collective."""
    found = []
    for _ in range(7):
        comm.Barrier()
        start = time.perf_counter()
        call()
        found.append(comm.allreduce(time.perf_counter() - start, op=MPI.MAX))
    return median(found[2:])


def after(case: Case) -> Tensor:
    """Run the transfer, then the computation: the baseline."""
    case.arrive()
    METHODS[case.what].blocking(case)
    case.compute()
    return case.out


def together(case: Case) -> Tensor:
    """Start the transfer, run the computation, wait for the transfer."""
    case.arrive()
    handle = METHODS[case.what].begin(case)
    case.compute()
    handle.wait()
    return case.out


def transfer(case: Case) -> Tensor:
    """Run the transfer alone."""
    case.arrive()
    METHODS[case.what].blocking(case)
    return case.out


def compute(case: Case) -> None:
    """Run the computation alone: it has no result to check."""
    case.compute()


CONTENDERS = [
    Contender(AFTER, after),
    Contender(TOGETHER, together),
    Contender(TRANSFER, transfer),
    Contender(COMPUTE, compute),
]


def main() -> None:
    parser = harness.parser(__doc__, "64M")
    harness.choice(parser, "--methods", METHODS)
    harness.choice(parser, "--kinds", KINDS)
    asked = parser.parse_args()
    with hd.init(device="cpu", backend="gloo") as world:
        record = harness.start("overlap", world.comm)
        steps = [
            Step(partial(make_case, size=size, kind=kind, method=method), CONTENDERS)
            for method, kind, size in product(asked.methods, asked.kinds, asked.sizes)
        ]
        harness.run(record, world.comm, steps, asked)


if __name__ == "__main__":
    main()
