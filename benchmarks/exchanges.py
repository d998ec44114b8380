"""reduce_scatter and all_to_all of uneven parts beside mpi4py, which knows the counts, and gloo.

mpirun -n 2 python benchmarks/exchanges.py --verbs reduce_scatter,all_to_all --sizes 8,64M
"""

from __future__ import annotations

import warnings
from functools import partial
from itertools import product
from typing import Any

import harness
import torch
import torch.distributed as dist
from harness import Step
from mpi4py import MPI
from results import BASELINE, CONTROL, GLOO_PADDED, HPCDIST_NEW, HPCDIST_OUT, MPI4PY_NEW
from torch import Tensor

import hpcdist as hd
from hpcdist.layout import displs
from hpcdist.tools.timing import Contender

LIST = "hpcdist, a list"
# torch 2.13 has a new name for it; existing code uses this one.
warnings.filterwarnings("ignore", ".*reduce_scatter_tensor.* is deprecated", FutureWarning)


class Case(harness.Data):
    """A float32 tensor of `size` bytes on every rank, whose parts are uneven; values encode rank and index, exactly.

    Attributes:
        what: the verb.
        sends, recvs: elements of the parts of this rank's tensor, and of those that it gets.
    """

    skew = "uneven"

    def __init__(self, comm: MPI.Intracomm, what: str, size: int) -> None:
        self.comm, self.what, self.size, n, me = comm, what, size, comm.size, comm.rank
        numel = max(n, size // 4) if what == "reduce_scatter" else max(n, size // 8 * (n if size == 8 else 1))
        dtype = torch.float32 if what == "reduce_scatter" else torch.int64
        shares = [
            [(2 * ((dest + source * (what == "all_to_all")) % n) + 1) for dest in range(n)] for source in range(n)
        ]
        ends = [[numel * sum(row[: i + 1]) // n**2 for i in range(n)] for row in shares]
        table = [[end - start for end, start in zip(row, [0, *row], strict=False)] for row in ends]
        if size == 8:  # to every rank
            table = [[numel // n] * n] * n
        self.sends, self.recvs = table[me], [row[me] for row in table]
        self.x = self.made(me, numel, dtype)
        if what == "all_to_all":
            starts = [sum(row[:me]) for row in table]
            parts = [
                self.made(source, numel, dtype)[at : at + k]
                for source, (at, k) in enumerate(zip(starts, self.recvs, strict=True))
            ]
            self.expected = torch.cat(parts)
        else:
            whole = torch.stack([self.made(rank, numel, dtype) for rank in range(n)]).sum(0)
            self.expected = whole.split(self.sends)[me].clone()
        self.parts = list(self.x.split(self.sends))
        self.out = torch.empty_like(self.expected)

    @staticmethod
    def made(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
        return ((torch.arange(numel) * 7 + rank) % 2**16).to(dtype)

    def reset(self) -> None:
        self.out.fill_(-1)

    def correct(self, result: Any) -> bool:
        if isinstance(result, list):
            result = torch.cat(result)
        return torch.equal(result[0] if isinstance(result, tuple) else result, self.expected)

    def intact(self) -> bool:
        return torch.equal(self.x, self.made(self.comm.rank, len(self.x), self.x.dtype))


def scattered(case: Case) -> Tensor:
    """The baseline: Reduce_scatter with known counts, into memory that exists."""
    case.comm.Reduce_scatter(*case.once("arguments", lambda: (case.x.numpy(), case.out.numpy(), case.sends)))
    return case.out


def scattered_padded(case: Case) -> Tensor:
    """reduce_scatter_tensor on gloo, which takes equal blocks: pad them to the longest, and trim the result."""
    longest = max(case.sends)
    padded = torch.cat([torch.nn.functional.pad(part, (0, longest - len(part))) for part in case.parts])
    block = case.x.new_empty(longest)
    dist.reduce_scatter_tensor(block, padded)
    return block[: len(case.out)]


def exchanged(case: Case) -> Tensor:
    """The baseline: Alltoallv with known counts, into memory that exists."""
    sends, recvs = case.once(
        "arguments",
        lambda: [
            [x.numpy(), counts, displs(counts), MPI.INT64_T]
            for x, counts in ((case.x, case.sends), (case.out, case.recvs))
        ],
    )
    case.comm.Alltoallv(sends, recvs)
    return case.out


def exchanged_new(case: Case) -> Tensor:
    """The counts first, with the lower-case call; then Alltoallv into new memory."""
    recvs = case.comm.alltoall(case.sends)
    out = torch.empty(sum(recvs), dtype=torch.int64)
    sent = [case.x.numpy(), case.sends, displs(case.sends), MPI.INT64_T]
    case.comm.Alltoallv(sent, [out.numpy(), recvs, displs(recvs), MPI.INT64_T])
    return out


def exchanged_by_gloo(case: Case) -> Tensor:
    """The same on gloo, with all_to_all_single."""
    sends, recvs = torch.tensor(case.sends), torch.empty(case.comm.size, dtype=torch.int64)
    dist.all_to_all_single(recvs, sends)
    out = torch.empty(int(recvs.sum()), dtype=torch.int64)
    dist.all_to_all_single(out, case.x, recvs.tolist(), case.sends)
    return out


CONTENDERS = {
    "reduce_scatter": [
        Contender(BASELINE, scattered),
        Contender(CONTROL, scattered),
        Contender(HPCDIST_NEW, lambda case: hd.reduce_scatter(case.x, 0, case.sends)),
        Contender(HPCDIST_OUT, lambda case: hd.reduce_scatter(case.x, 0, case.sends, out=case.out)),
        Contender(GLOO_PADDED, scattered_padded),
    ],
    "all_to_all": [
        Contender(BASELINE, exchanged),
        Contender(CONTROL, exchanged),
        Contender(HPCDIST_NEW, lambda case: hd.all_to_all(case.x, case.sends)),
        Contender(LIST, lambda case: hd.all_to_all(case.parts)),
        Contender(MPI4PY_NEW, exchanged_new),
        Contender("gloo, counts exchanged", exchanged_by_gloo),
    ],
}


def main() -> None:
    parser = harness.parser(__doc__, "8,64K,64M", seconds=120)
    harness.choice(parser, "--verbs", CONTENDERS)
    asked = parser.parse_args()
    with hd.init(device="cpu", backend="gloo") as world:
        steps = [
            Step(partial(Case, what=verb, size=size), CONTENDERS[verb])
            for verb, size in product(asked.verbs, asked.sizes)
        ]
        harness.run(harness.start("exchanges", world.comm), world.comm, steps, asked)


if __name__ == "__main__":
    main()
