"""redistribute: change the layout of a tensor; compared with hand-written Alltoallv and Alltoallw, and DTensor.

mpirun -n 4 python benchmarks/redistribute.py --kinds columns,tiles
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate, product
from typing import Any

import harness
import torch
from harness import Step
from mpi4py import MPI
from results import (
    BASELINE,
    CONTROL,
    DTENSOR,
    HPCDIST_NEW,
    HPCDIST_OUT,
    KINDS,
    PLAN_OUT,
    ROUTES,
)
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import hpcdist as hd
from hpcdist.tools.timing import Contender

Box = tuple[range, range]  # rows, columns


@dataclass(frozen=True)
class Case(harness.Data):
    """A 2-d tensor of int64 to redistribute; each value is its index in the whole.

    Attributes:
        size: mean bytes of a shard, rounded to whole rows.
        skew: key of KINDS.
        shape: shape of the whole tensor.
        sources, targets: rows and columns that each rank holds, and those that it must get.
        counts: rows of each rank, if ragged.
        shard, expected: shard and result of this rank, contiguous.
        out: preallocated memory for the result.
    """

    size: int
    skew: str
    comm: MPI.Intracomm
    shape: tuple[int, int]
    sources: list[Box]
    targets: list[Box]
    counts: list[int] | None
    shard: Tensor
    expected: Tensor
    out: Tensor
    what: str = ""

    @property
    def nbytes(self) -> list[int]:
        return [len(rows) * len(columns) * 8 for rows, columns in self.sources]

    @property
    def layouts(self) -> tuple[object, object]:
        """Return source and target as hpcdist layouts."""
        rows, columns = hd.Split(0, counts=self.counts), hd.Split(1)
        if self.skew == "tiles":
            return rows, hd.Block((2, self.comm.size // 2), (0, 1))
        return {"columns": (rows, columns), "rows": (columns, rows), "ragged": (rows, hd.Split(0))}[self.skew]

    def reset(self) -> None:
        self.out.fill_(-1)

    def correct(self, result: Tensor) -> bool:
        return torch.equal(result, self.expected)

    def intact(self) -> bool:
        me = self.comm.rank
        return all(
            torch.equal(x, values(box[me], self.shape))
            for x, box in ((self.shard, self.sources), (self.expected, self.targets))
        )


def shares(extent: int, parts: int) -> list[range]:
    """Partition by the block rule: the first extent % parts get one extra."""
    return spans([extent // parts + (r < extent % parts) for r in range(parts)])


def spans(counts: Sequence[int]) -> list[range]:
    edges = list(accumulate(counts, initial=0))
    return [range(edges[r], edges[r + 1]) for r in range(len(counts))]


def values(box: Box, shape: tuple[int, int]) -> Tensor:
    """Return the index in the whole of each element of a box."""
    rows, columns = (torch.arange(r.start, r.stop) for r in box)
    return rows.unsqueeze(1) * shape[1] + columns


def make_case(comm: MPI.Intracomm, size: int, kind: str) -> Case:
    """Make the data of one size and kind on this rank."""
    p, total = comm.size, comm.size * size // 8
    columns = 1 << (total.bit_length() - 1) // 2
    if kind == "ragged":
        columns += 1  # odd, and a number of rows that is no multiple of the ranks
    shape = (max(p, total // columns), columns)
    all_rows, all_columns = range(shape[0]), range(columns)
    rows: list[Box] = [(part, all_columns) for part in shares(shape[0], p)]
    cut: list[Box] = [(all_rows, part) for part in shares(columns, p)]
    sources, targets, counts = rows, cut, None
    if kind == "rows":
        sources, targets = cut, rows
    elif kind == "tiles":
        targets = [(r, c) for r in shares(shape[0], 2) for c in shares(columns, p // 2)]
    elif kind == "ragged":
        counts = [shape[0] * (2 * r + 1) // p**2 for r in range(p)]
        counts[-1] += shape[0] - sum(counts)
        sources, targets = [(part, all_columns) for part in spans(counts)], rows
    shard, expected = (values(boxes[comm.rank], shape) for boxes in (sources, targets))
    out = torch.full_like(expected, -1)
    return Case(size, kind, comm, shape, sources, targets, counts, shard, expected, out)


def pieces(x: Tensor, mine: Box, others: Sequence[Box]) -> list[Tensor]:
    """Return views of the intersections of `x`, which holds `mine`, with the box of each rank."""
    return [x[tuple(slice(*bounds) for bounds in common(mine, other))] for other in others]


def common(mine: Box, other: Box) -> list[tuple[int, int]]:
    """Return start and end of the intersection of two boxes, relative to the first, in each dim."""
    found = []
    for a, b in zip(mine, other, strict=True):
        start = min(max(a.start, b.start), a.stop)
        found.append((start - a.start, max(start, min(a.stop, b.stop)) - a.start))
    return found


class ByHand:
    """Pack, Alltoallv, unpack, as written by an expert: prepared in advance, without needless copies.

    If the pieces of all ranks are one run each in the shard (or in the result), MPI sends (or receives) in place. Each
    rank copies its own piece, without MPI; or MPI moves it too, with `own_by_mpi`.
    """

    def __init__(self, case: Case, out: Tensor, own_by_mpi: bool = False) -> None:
        me = case.comm.rank
        sends = pieces(case.shard, case.sources[me], case.targets)
        recvs = pieces(out, case.targets[me], case.sources)
        self.own: list[tuple[Tensor, Tensor]] = []
        if not own_by_mpi:
            self.own = [(recvs[me], sends[me])]
            sends[me], recvs[me] = sends[me][:0], recvs[me][:0]
        self.send, packed = self.message(case.shard, sends)
        self.recv, unpacked = self.message(out, recvs)
        self.packs = [(a, b) for a, b in zip(packed, sends, strict=False) if b.numel()]
        self.unpacks = [(b, a) for a, b in zip(unpacked, recvs, strict=False) if b.numel()]
        self.comm = case.comm
        self.out = out

    @staticmethod
    def message(x: Tensor, parts: list[Tensor]) -> tuple[list[object], list[Tensor]]:
        """Return (mpi4py buffer specification, views to pack; empty if in place)."""
        counts = [part.numel() for part in parts]
        if all(part.is_contiguous() for part in parts):
            return [x.numpy(), counts, [part.storage_offset() for part in parts], MPI.INT64_T], []
        buffer = torch.empty(sum(counts), dtype=x.dtype)
        views = [flat.view(part.shape) for flat, part in zip(buffer.split(counts), parts, strict=True)]
        return [buffer.numpy(), counts, list(accumulate(counts, initial=0))[:-1], MPI.INT64_T], views

    def __call__(self) -> Tensor:
        for to, of in self.packs:
            to.copy_(of)
        self.comm.Alltoallv(self.send, self.recv)
        for to, of in self.own + self.unpacks:
            to.copy_(of)
        return self.out


def by_hand(case: Case) -> Tensor:
    """The baseline."""
    return case.once("hand", lambda: ByHand(case, case.out))()


def by_hand_own(case: Case) -> Tensor:
    """The same, but MPI moves the own piece, too."""
    return case.once("hand, own", lambda: ByHand(case, case.out, own_by_mpi=True))()


def by_hand_new(case: Case) -> Tensor:
    """The same as the baseline, with new memory for result and messages, and without preparation."""
    return ByHand(case, torch.empty_like(case.out))()


def _subarrays(x: Tensor, mine: Box, others: Sequence[Box], without: int | None = None) -> list[Any]:
    """Return the mpi4py Alltoallw specification: a subarray datatype for each rank's piece, nothing packed."""
    counts, types = [], []
    for rank, other in enumerate(others):
        bounds = common(mine, other)
        lengths, starts = [end - start for start, end in bounds], [start for start, _ in bounds]
        empty = 0 in lengths or rank == without
        kind = MPI.INT64_T.Dup() if empty else MPI.INT64_T.Create_subarray(list(x.shape), lengths, starts)
        counts.append(int(not empty))
        types.append(kind.Commit())
    return [x.numpy(), counts, [0] * len(others), types]


class BySubarrays:
    """Subarray datatypes for all pieces, prepared in advance: nothing is packed by hand.

    With `own_by_mpi`, MPI moves the own piece too; else torch copies it.
    """

    def __init__(self, case: Case, own_by_mpi: bool) -> None:
        p, me = case.comm.size, case.comm.rank
        without = None if own_by_mpi else me
        self.comm, self.out = case.comm, case.out
        self.send = _subarrays(case.shard, case.sources[me], case.targets, without)
        self.recv = _subarrays(case.out, case.targets[me], case.sources, without)
        send, recv = (
            pieces(case.shard, case.sources[me], case.targets),
            pieces(case.out, case.targets[me], case.sources),
        )
        self.own = [] if own_by_mpi else [(recv[me], send[me])]
        ranks = [(me + step) % p for step in range(1, p)]  # the next rank first
        self.sends = [([self.send[0], 1, self.send[3][r]], r) for r in ranks if self.send[1][r]]
        self.recvs = [([self.recv[0], 1, self.recv[3][r]], r) for r in ranks[::-1] if self.recv[1][r]]

    def copy_own(self) -> None:
        for to, of in self.own:
            to.copy_(of)

    def alltoallw(self) -> Tensor:
        self.comm.Alltoallw(self.send, self.recv)
        self.copy_own()
        return self.out

    def messages(self) -> Tensor:
        requests = [self.comm.Irecv(spec, rank) for spec, rank in self.recvs]
        requests += [self.comm.Isend(spec, rank) for spec, rank in self.sends]
        self.copy_own()
        MPI.Request.Waitall(requests)
        return self.out


def _by_subarrays(case: Case, own_by_mpi: bool = False) -> BySubarrays:
    found: BySubarrays = case.once(("subarrays", own_by_mpi), lambda: BySubarrays(case, own_by_mpi))
    return found


def alltoallw(case: Case) -> Tensor:
    """Alltoallw with subarrays: the direct equivalent in MPI."""
    return _by_subarrays(case, own_by_mpi=True).alltoallw()


def alltoallw_copy(case: Case) -> Tensor:
    """The same, except that torch copies the own piece."""
    return _by_subarrays(case).alltoallw()


def alltoallw_new(case: Case) -> Tensor:
    """The same as alltoallw, with new memory, but prepared datatypes."""
    prepared, out = _by_subarrays(case, own_by_mpi=True), torch.empty_like(case.out)
    case.comm.Alltoallw(prepared.send, [out.numpy(), *prepared.recv[1:]])
    return out


def messages(case: Case) -> Tensor:
    """One message per piece, of subarrays, all at the same time, while torch copies the own piece."""
    return _by_subarrays(case).messages()


@lru_cache
def _mesh(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape)


def dtensor(case: Case) -> Tensor:
    """DTensor on gloo: redistribute of an existing DTensor, and to_local."""
    before, after = {
        "columns": ([Shard(0)], [Shard(1)]),
        "rows": ([Shard(1)], [Shard(0)]),
        "tiles": ([Shard(0), Shard(0)], [Shard(0), Shard(1)]),
    }[case.skew]
    mesh = _mesh((2, case.comm.size // 2) if case.skew == "tiles" else (case.comm.size,))
    whole = case.once("DTensor", lambda: DTensor.from_local(case.shard, mesh, before))
    found: Tensor = whole.redistribute(placements=after).to_local()
    return found


def no_dtensor(case: Case) -> str | None:
    return "DTensor has no ragged shards" if case.skew == "ragged" else None


def plan(case: Case) -> Callable[..., Tensor]:
    """Return hpcdist's plan, made in advance."""
    found: Callable[..., Tensor] = case.once(
        "plan", lambda: hd.plan(hd.redistribute, case.shard, *case.layouts, route="mpi")
    )
    return found


CONTENDERS = [
    Contender(BASELINE, by_hand),
    Contender(CONTROL, by_hand),
    Contender("Alltoallv, own piece by MPI too", by_hand_own),
    Contender("Alltoallw, subarrays", alltoallw),
    Contender("Alltoallw, own piece copied", alltoallw_copy),
    Contender("Isend, Irecv, subarrays, own piece copied", messages),
    Contender(PLAN_OUT, lambda case: plan(case)(case.shard, out=case.out)),
    Contender("hpcdist plan", lambda case: plan(case)(case.shard)),
    Contender(HPCDIST_OUT, lambda case: hd.redistribute(case.shard, *case.layouts, out=case.out)),
    Contender(HPCDIST_NEW, lambda case: hd.redistribute(case.shard, *case.layouts)),
    *(
        Contender(name, lambda case, r=r: hd.redistribute(case.shard, *case.layouts, route=r))
        for r, name in ROUTES.items()
    ),
    Contender("Alltoallv, new memory", by_hand_new),
    Contender("Alltoallw, new memory", alltoallw_new),
    Contender(DTENSOR, dtensor, no_dtensor),
]


def main() -> None:
    parser = harness.parser(__doc__, "64K,16M,64M", seconds=240)
    harness.choice(parser, "--kinds", KINDS)
    asked = parser.parse_args()
    with hd.init(device="cpu", backend="gloo") as world:
        few = world.world_size < 4 or world.world_size % 2  # on 2 ranks, tiles are columns
        steps = [
            Step(partial(make_case, size=size, kind=kind), CONTENDERS)
            for kind, size in product(asked.kinds, asked.sizes)
            if not (kind == "tiles" and few)
        ]
        harness.run(harness.start("redistribute", world.comm), world.comm, steps, asked)


if __name__ == "__main__":
    main()
