"""Do compute and transfer run at once? concat with async_op=True around a computation, beside gloo's and MPI's own.

mpirun -n 2 python benchmarks/overlap.py --sizes 64M --ways mpi,gloo --kinds mm,sleep
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
from harness import Contender, Step
from mpi4py import MPI
from overlap_tables import AFTER, COMPUTE, KINDS, LATE, TOGETHER, TRANSFER
from torch import Tensor

import hpcdist as hd

SIDE = 256  # of the square matrices whose product is a step of the computation
# torch 2.13 has a new name for it; everybody's code has this one.
warnings.filterwarnings("ignore", ".*all_gather_into_tensor.* is deprecated", FutureWarning)


class Handle(Protocol):
    """A transfer that has begun."""

    def wait(self) -> object: ...


class Request:
    """An mpi4py request with torch's and hpcdist's word for it."""

    def __init__(self, request: MPI.Request) -> None:
        self.wait = request.Wait


@dataclass(frozen=True)
class Way:
    """How the ranks' shards come together: blocking, and begun; both get (case) and write to case.out."""

    blocking: Callable[[Case], object]
    begin: Callable[[Case], Handle]


def _hpcdist(route: str) -> Way:
    """hpcdist's concat."""
    return Way(
        lambda case: hd.concat(case.shard, route=route, out=case.out),
        lambda case: hd.concat(case.shard, route=route, out=case.out, async_op=True),
    )


WAYS = {
    "mpi": _hpcdist("mpi"),
    "gloo": _hpcdist("gloo"),
    "Iallgather": Way(  # moves while a rank is inside MPI
        lambda case: case.comm.Allgather(case.shard.numpy(), case.out.numpy()),
        lambda case: Request(case.comm.Iallgather(case.shard.numpy(), case.out.numpy())),
    ),
    "gloo-async": Way(  # a thread of gloo's
        lambda case: dist.all_gather_into_tensor(case.out, case.shard),
        lambda case: dist.all_gather_into_tensor(case.out, case.shard, async_op=True),
    ),
}


@dataclass(frozen=True)
class Case:
    """As many values on each rank, to be brought together on all, and a computation.

    Attributes:
        size: bytes of a shard.
        skew: a key of KINDS: what the computation is, or "late": rank 1 computes nothing, and comes LATE seconds late.
        what: a key of WAYS.
        steps: products of matrices that the computation consists of.
        seconds: that it takes, as far as that was found out in advance.
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
    def nbytes(self) -> list[int]:
        return [self.size] * self.comm.size

    @property
    def comes_late(self) -> bool:
        return self.skew == "late" and self.comm.rank == 1

    def compute(self) -> None:
        """Keep the core busy, or, for sleep, wait for what another device does."""
        if self.comes_late:
            return
        if self.skew == "sleep":
            time.sleep(self.seconds)
            return
        multiply(self.matrix, self.steps)

    def come(self) -> None:
        """What happens before the transfer can begin."""
        if self.comes_late:
            time.sleep(LATE)

    def spoil(self) -> None:
        self.out.fill_(-1)

    def right(self, result: Tensor | None) -> bool:
        return result is None or torch.equal(result, self.expected)

    def intact(self) -> bool:
        return torch.equal(self.shard, self.expected.view(self.comm.size, -1)[self.comm.rank])


def multiply(matrix: Tensor, steps: int) -> None:
    out = torch.empty_like(matrix)
    for _ in range(steps):
        torch.mm(matrix, matrix, out=out)


def make_case(comm: MPI.Intracomm, size: int, kind: str, way: str) -> Case:
    """The data of this rank, and a computation that lasts about as long as the transfer. Collective."""
    rows = max(1, size // 8)
    expected = torch.arange(rows * comm.size)
    shard = expected[rows * comm.rank : rows * (comm.rank + 1)].clone()
    matrix = torch.rand(SIDE, SIDE)
    case = Case(size, kind, way, comm, shard, torch.full_like(expected, -1), expected, matrix, 0, 0.0)
    seconds = _seconds(comm, partial(WAYS[way].blocking, case)) + (LATE if kind == "late" else 0)
    steps = max(1, math.ceil(seconds / _seconds(comm, partial(multiply, matrix, 10)) * 10))
    return Case(size, kind, way, comm, shard, case.out, expected, matrix, steps, seconds)


def _seconds(comm: MPI.Intracomm, call: Callable[[], object]) -> float:
    """Of a call on the slowest rank, the median of some. Collective."""
    found = []
    for _ in range(7):
        comm.Barrier()
        start = time.perf_counter()
        call()
        found.append(comm.allreduce(time.perf_counter() - start, op=MPI.MAX))
    return median(found[2:])


def after(case: Case) -> Tensor:
    """The transfer, then the computation: the baseline."""
    case.come()
    WAYS[case.what].blocking(case)
    case.compute()
    return case.out


def together(case: Case) -> Tensor:
    """The transfer begins, the computation runs, the transfer is waited for."""
    case.come()
    handle = WAYS[case.what].begin(case)
    case.compute()
    handle.wait()
    return case.out


def transfer(case: Case) -> Tensor:
    """The transfer alone."""
    case.come()
    WAYS[case.what].blocking(case)
    return case.out


def compute(case: Case) -> None:
    """The computation alone, of which there is nothing to check."""
    case.compute()


CONTENDERS = [
    Contender(AFTER, after),
    Contender(TOGETHER, together),
    Contender(TRANSFER, transfer),
    Contender(COMPUTE, compute),
]


def main() -> None:
    parser = harness.parser(__doc__, "64M")
    parser.add_argument("--ways", type=harness.words, default=",".join(WAYS), metavar="LIST", help="%(default)s")
    parser.add_argument("--kinds", type=harness.words, default=",".join(KINDS), metavar="LIST", help="%(default)s")
    asked = parser.parse_args()
    if not set(asked.ways) <= set(WAYS) or not set(asked.kinds) <= set(KINDS):
        parser.error(f"expected --ways of {', '.join(WAYS)} and --kinds of {', '.join(KINDS)}")
    with hd.init(device="cpu") as world:
        record = harness.start("overlap", world.comm)
        torch.set_num_threads(record.threads)
        steps = [
            Step(partial(make_case, size=size, kind=kind, way=way), CONTENDERS)
            for way, kind, size in product(asked.ways, asked.kinds, asked.sizes)
        ]
        harness.run(record, world.comm, steps, asked)


if __name__ == "__main__":
    main()
