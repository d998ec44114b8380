"""concat, gather and split beside what people write by hand instead; ranks: concat by some ranks of one node.

mpirun -n 2 python benchmarks/shards.py concat
mpirun -n 4 python benchmarks/shards.py gather --sizes 8,64K --skew 16:1
mpirun -n 8 python benchmarks/shards.py ranks
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import harness
import memory
import report
import results
import torch
import torch.distributed as dist
from harness import ROOT, Step
from mpi4py import MPI
from results import BASELINE, CONTROL, GLOO_PADDED, HPCDIST_NEW, HPCDIST_SHARED, MPI4PY_NEW, ROUTES
from torch import Tensor

import hpcdist as hd
from hpcdist.tools import compare as byhand
from hpcdist.tools.timing import Contender, check

DTYPE = torch.int64  # a value is its index in the whole tensor, exactly
SKEWS = ("even", "16:1")
# torch 2.13 has a new name for it; existing code uses this one.
warnings.filterwarnings("ignore", ".*all_gather_into_tensor.* is deprecated", FutureWarning)


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
    small = max(1, rows // 16)
    return [small * 16] + [small] * (world_size - 1)


# More hand-written ways, beside those of hpcdist.tools.compare


def _move(x: Tensor | None, buffers: Sequence[Tensor], to_root: bool) -> None:
    """Move shards between the root, which has all `buffers`, and the others, which have their own, unpadded."""
    if dist.get_rank() != ROOT:
        works = [(dist.isend if to_root else dist.irecv)(x, ROOT)]
    else:
        move = dist.irecv if to_root else dist.isend
        works = [move(buffer, rank) for rank, buffer in enumerate(buffers) if rank != ROOT]
        pair = (buffers[ROOT], x) if to_root else (x, buffers[ROOT])
        pair[0].copy_(pair[1])
    for work in works:
        work.wait()


def into_tensor(case: Case) -> Tensor | None:
    """all_reduce of the sizes, pad to the largest, all_gather_into_tensor, trim if ragged.

    As accelerate's pad_across_processes and gather, whose users trim themselves. gather is the same, since torch has
    no ragged gather: all ranks but the root drop the result.
    """
    sizes = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    sizes[dist.get_rank()] = len(case.x)
    dist.all_reduce(sizes)
    longest = int(sizes.max())
    whole = case.x.new_empty(len(sizes) * longest)
    dist.all_gather_into_tensor(whole, byhand.padded_to(case.x, longest))
    if int(sizes.min()) != longest:
        whole = torch.cat([row[:size] for row, size in zip(whole.view(-1, longest), sizes.tolist(), strict=True)])
    return whole if case.verb == "concat" or case.rank == ROOT else None


def by_root(case: Case) -> Tensor | None:
    """Exchange sizes, then send to the root, directly into place; for concat, broadcast the whole from there."""
    sizes = byhand.sizes_of_all(case)
    whole = case.x.new_empty(sum(sizes)) if case.verb == "concat" or case.rank == ROOT else None
    _move(case.x, () if whole is None else torch.split(whole, sizes), to_root=True)
    if case.verb == "concat":
        dist.broadcast(whole, ROOT)
    return whole


def split_broadcast(case: Case) -> Tensor:
    """Broadcast the whole, then copy this rank's part."""
    sizes = byhand.sizes_of_all(case)
    whole = torch.empty(sum(sizes), dtype=case.dtype) if case.x is None else case.x
    dist.broadcast(whole, ROOT)
    return torch.split(whole, sizes)[case.rank].clone()


def split_sends(case: Case) -> Tensor:
    """Broadcast the sizes, then the root sends each part directly from its place."""
    sizes = byhand.sizes_of_all(case)
    mine = torch.empty(sizes[case.rank], dtype=case.dtype)
    _move(mine, () if case.x is None else torch.split(case.x, sizes), to_root=False)
    return mine


COMMON = [
    Contender(BASELINE, byhand.preallocated),
    Contender(CONTROL, byhand.preallocated),
    Contender(results.HPCDIST_OUT, lambda case: byhand.ours(case, out=case.out)),
    Contender(HPCDIST_NEW, byhand.ours),
    Contender(results.PLAN_OUT, lambda case: case.plan(case.x, case.out)),
    Contender("hpcdist plan", lambda case: case.plan(case.x)),
    *(Contender(name, partial(byhand.ours, route=route)) for route, name in ROUTES.items()),
    Contender(MPI4PY_NEW, byhand.exchanged),
    Contender(results.MPI4PY_PICKLE, byhand.pickled),
    Contender(GLOO_PADDED, byhand.padded),
]
OWN: dict[str, dict[str, Callable[[Any], object]]] = {
    "concat": {
        HPCDIST_SHARED: lambda case: byhand.ours(case, shared=True),
        "gloo, all_reduce + all_gather_into_tensor": into_tensor,
        results.GLOO_BY_ROOT: by_root,
        results.GLOO_OBJECT: byhand.objects,
    },
    "gather": {
        "gloo, all_reduce + all_gather_into_tensor": into_tensor,
        "gloo, sends to the root": by_root,
        "gloo, gather_object": byhand.objects,
    },
    "split": {
        "gloo, broadcast the whole, keep a part": split_broadcast,
        "gloo, sends from the root": split_sends,
        "gloo, scatter_object_list": byhand.objects,
    },
}
CONTENDERS = {verb: [*COMMON, *(Contender(*pair) for pair in own.items())] for verb, own in OWN.items()}
FEW = (BASELINE, MPI4PY_NEW, GLOO_PADDED, HPCDIST_NEW, HPCDIST_SHARED)
CONTENDERS["ranks"] = [contender for contender in CONTENDERS["concat"] if contender.name in FEW]


def peaks(comm: MPI.Intracomm, name: str, size: int) -> tuple[list[results.Peak], str | None]:
    """Measure the memory of one call of each contender, or return why it cannot be. Collective.

    Of "ranks", that of the node while it holds the results; else the peak of a rank.
    """
    reason = None if name == "ranks" else memory.unavailable(comm) or memory.too_small(size)
    if reason:
        return [], reason
    case, found = Case(comm, "concat", size, "even"), []
    for contender in CONTENDERS[name]:
        if name == "ranks" and contender.name == BASELINE:  # whose result has its memory already
            continue
        check(contender, case)
        extra = (memory.node if name == "ranks" else memory.peak)(comm, partial(contender.call, case))
        found.append(results.Peak(contender.name, extra, sum(case.nbytes)))
    return found, None


def main() -> None:
    parser = harness.parser(__doc__, "")
    parser.add_argument("name", choices=CONTENDERS)
    harness.choice(parser, "--skew", SKEWS)
    asked = parser.parse_args()
    few = asked.name == "ranks"
    verb = "concat" if few else asked.name
    sizes = asked.sizes or harness.sizes("8,64K,8M" if few else "8,128,64K,1M,16M,64M")
    with hd.init(device="cpu", backend="gloo") as world:
        comm, record = world.comm, harness.start(asked.name, world.comm)
        if few:
            record.nodes, _ = peaks(comm, asked.name, max(sizes))
        elif verb == "concat":
            record.peaks, record.no_peaks = peaks(comm, verb, max(sizes))
            if comm.rank == ROOT:
                print(record.no_peaks or report.memory_table(record, "peaks"))
        steps = [
            Step(partial(Case, verb=verb, size=size, skew=skew), CONTENDERS[asked.name])
            for size, skew in product(sizes, SKEWS[:1] if few else asked.skew)
        ]
        harness.run(record, comm, steps, asked)


if __name__ == "__main__":
    main()
