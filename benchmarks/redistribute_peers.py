"""What benchmarks/redistribute.py times: the case, and the ways people write a change of layout by hand.

Heat is optional, and wants an environment of its own: its 1.8 asks for a torch older than the one that all others run
with here, and for torchvision, which resplit does not use. With Debian's Open MPI:

    python3 -m venv .venv/heat
    .venv/heat/bin/pip install -c .ci/constraints.txt torch==2.13.0 mpi4py scipy -e .
    .venv/heat/bin/pip install --no-deps heat==1.8.0
    mpirun -n 2 .venv/heat/bin/python benchmarks/redistribute.py        # or benchmarks/all.py --verbs redistribute

There everything else runs beside it, in one run; without it, the tables say so.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from mpi4py import MPI
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import hpcdist as hd

Box = tuple[range, range]  # rows, columns
NO_HEAT = None if importlib.util.find_spec("heat") else "Heat is not installed here (see redistribute_peers.py)"


@dataclass(frozen=True)
class Case:
    """A 2-d tensor of int64 in one layout, wanted in another; each value is its index in the whole.

    Attributes:
        size: bytes of a shard, in the mean, rounded to whole rows.
        skew: a key of KINDS.
        shape: of the whole.
        sources, targets: of each rank, the rows and columns it holds, and those it must get.
        counts: of each rank's rows, where they are ragged.
        shard, expected: this rank's, contiguous.
        out: memory for the result, filled already.
        kept: what contenders prepare in their first call, which is not timed.
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
    kept: dict[object, Any] = field(default_factory=dict)
    what: str = ""

    @property
    def nbytes(self) -> list[int]:
        return [len(rows) * len(columns) * 8 for rows, columns in self.sources]

    @property
    def layouts(self) -> tuple[object, object]:
        """The same in hpcdist's words."""
        rows, columns = hd.Split(0, counts=self.counts), hd.Split(1)
        if self.skew == "tiles":
            return rows, hd.Block((2, self.comm.size // 2), (0, 1))
        return {"columns": (rows, columns), "rows": (columns, rows), "ragged": (rows, hd.Split(0))}[self.skew]

    def once(self, key: object, make: Callable[[], Any]) -> Any:
        """What `make` gave in the first call."""
        if key not in self.kept:
            self.kept[key] = make()
        return self.kept[key]

    def spoil(self) -> None:
        self.out.fill_(-1)

    def right(self, result: Tensor) -> bool:
        return torch.equal(result, self.expected)

    def intact(self) -> bool:
        me = self.comm.rank
        return all(
            torch.equal(x, values(box[me], self.shape))
            for x, box in ((self.shard, self.sources), (self.expected, self.targets))
        )


def shares(extent: int, parts: int) -> list[range]:
    """By the block rule: the first extent % parts get one more."""
    return spans([extent // parts + (r < extent % parts) for r in range(parts)])


def spans(counts: Sequence[int]) -> list[range]:
    edges = list(accumulate(counts, initial=0))
    return [range(edges[r], edges[r + 1]) for r in range(len(counts))]


def values(box: Box, shape: tuple[int, int]) -> Tensor:
    """The index in the whole of each element of a box."""
    rows, columns = (torch.arange(r.start, r.stop) for r in box)
    return rows.unsqueeze(1) * shape[1] + columns


def make_case(comm: MPI.Intracomm, size: int, kind: str) -> Case:
    """The data of one size and kind on this rank."""
    p, total = comm.size, comm.size * size // 8
    columns = 1 << (total.bit_length() - 1) // 2
    if kind == "ragged":
        columns += 1  # an odd number, and rows that no number of ranks divides
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
    """Views of what `x`, which holds `mine`, has in common with the box of each rank."""
    return [x[tuple(slice(*bounds) for bounds in common(mine, other))] for other in others]


def common(mine: Box, other: Box) -> list[tuple[int, int]]:
    """In each dim, where the common part of two boxes begins and ends within the first."""
    found = []
    for a, b in zip(mine, other, strict=True):
        start = min(max(a.start, b.start), a.stop)
        found.append((start - a.start, max(start, min(a.stop, b.stop)) - a.start))
    return found


class ByHand:
    """pack + Alltoallv + unpack, as an expert writes it: all prepared, and nothing copied that need not be.

    Where the pieces of all ranks lie in the shard (or in the result) in one run each, MPI gets them from there (or
    puts them there). Each rank keeps its own piece: one copy, past MPI; or, with `own_by_mpi`, MPI has that too.
    """

    def __init__(self, case: Case, out: Tensor, own_by_mpi: bool = False) -> None:
        me = case.comm.rank
        gives = pieces(case.shard, case.sources[me], case.targets)
        takes = pieces(out, case.targets[me], case.sources)
        self.own: list[tuple[Tensor, Tensor]] = []
        if not own_by_mpi:
            self.own = [(takes[me], gives[me])]
            gives[me], takes[me] = gives[me][:0], takes[me][:0]
        self.send, packed = self.message(case.shard, gives)
        self.recv, unpacked = self.message(out, takes)
        self.packs = [(a, b) for a, b in zip(packed, gives, strict=False) if b.numel()]
        self.unpacks = [(b, a) for a, b in zip(unpacked, takes, strict=False) if b.numel()]
        self.comm = case.comm
        self.out = out

    @staticmethod
    def message(x: Tensor, parts: list[Tensor]) -> tuple[list[object], list[Tensor]]:
        """(what mpi4py takes, the same as views of memory that must be packed; none if it is x's own)."""
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
    """The same, and MPI moves the piece that stays, too."""
    return case.once("hand, own", lambda: ByHand(case, case.out, own_by_mpi=True))()


def by_hand_new(case: Case) -> Tensor:
    """The same as the baseline with new memory, for the result and for messages, and everything prepared anew."""
    return ByHand(case, torch.empty_like(case.out))()


def _subarrays(x: Tensor, mine: Box, others: Sequence[Box], without: int | None = None) -> list[Any]:
    """What mpi4py's Alltoallw takes: nothing is packed, a datatype tells MPI where each rank's piece lies."""
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
    """Nothing is packed by hand: MPI is told where each piece lies, in advance.

    With `own_by_mpi`, that which stays is one of them; else torch copies it, past MPI.
    """

    def __init__(self, case: Case, own_by_mpi: bool) -> None:
        p, me = case.comm.size, case.comm.rank
        without = None if own_by_mpi else me
        self.comm, self.out = case.comm, case.out
        self.send = _subarrays(case.shard, case.sources[me], case.targets, without)
        self.recv = _subarrays(case.out, case.targets[me], case.sources, without)
        give, take = (
            pieces(case.shard, case.sources[me], case.targets),
            pieces(case.out, case.targets[me], case.sources),
        )
        self.own = [] if own_by_mpi else [(take[me], give[me])]
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
    """Alltoallw with subarrays: MPI's own way to say it."""
    return _by_subarrays(case, own_by_mpi=True).alltoallw()


def alltoallw_copy(case: Case) -> Tensor:
    """The same, but for the piece that stays, which torch copies."""
    return _by_subarrays(case).alltoallw()


def alltoallw_new(case: Case) -> Tensor:
    """The same as alltoallw, with new memory; the datatypes are there."""
    prepared, out = _by_subarrays(case, own_by_mpi=True), torch.empty_like(case.out)
    case.comm.Alltoallw(prepared.send, [out.numpy(), *prepared.recv[1:]])
    return out


def messages(case: Case) -> Tensor:
    """A message a piece, of subarrays, all begun at once; meanwhile torch copies the piece that stays."""
    return _by_subarrays(case).messages()


@lru_cache
def _mesh(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape)


def dtensor(case: Case) -> Tensor:
    """DTensor, on gloo: redistribute of a DTensor that is there, and to_local."""
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


@lru_cache
def _heat() -> ModuleType:
    if not importlib.util.find_spec("torchvision"):  # Heat imports it for its data sets
        sys.modules.update({name: mock.MagicMock() for name in ("torchvision", "torchvision.transforms")})
    import heat

    return heat


def heat(case: Case) -> Tensor:
    """Heat, over MPI: resplit of a DNDarray that is there; balance, where the rows are ragged."""
    ht, columns = _heat(), 1
    split = columns if case.skew == "rows" else 0
    whole = case.once("Heat", lambda: ht.array(case.shard, is_split=split))
    found = ht.balance(whole, copy=True) if case.skew == "ragged" else ht.resplit(whole, 1 - split)
    local: Tensor = found.larray
    return local


def no_heat(case: Case) -> str | None:
    return NO_HEAT or ("Heat splits one dimension only" if case.skew == "tiles" else None)


def plan(case: Case) -> Callable[..., Tensor]:
    """hpcdist's plan, made in advance."""
    found: Callable[..., Tensor] = case.once(
        "plan", lambda: hd.plan_redistribute(case.shard, *case.layouts, route="mpi")
    )
    return found
