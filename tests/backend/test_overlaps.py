"""Tensors of one call that share memory: the result is that of copies, written in the order of the lists."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from collective import Findings
from torch import Tensor

import hpcdist as hd
from hpcdist.backend import collectives

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore::FutureWarning")]
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

MEMORY = 64  # elements a rank, each with a value of its own
DRAWS = 40
Places = list[Tensor]  # for each tensor of a list: the places of its elements in the memory of its rank


class Draw:
    """A random call: where the tensors of each rank lie, in memory of which all ranks know the values."""

    def __init__(self, world: hd.World, n: int, turn: int) -> None:
        self.size, self.rank, self.root = world.world_size, world.rank, turn % world.world_size
        choose = random.Random(turn)
        self.rows = n
        self.before = [torch.arange(float(MEMORY)) + 1000 * rank for rank in range(self.size)]
        self.memory = self.before[self.rank].clone()
        self.places = [
            [self._places(choose, count) for count in (*[n] * (2 * self.size), *[n * self.size] * 2, n, n)]
            for _ in range(self.size)
        ]

    @staticmethod
    def _places(choose: random.Random, n: int) -> Tensor:
        step = choose.choice([1, 1, 1, 2])
        start = choose.randrange(0, MEMORY - step * n, choose.choice([1, n]))
        return torch.arange(MEMORY)[start : start + step * n : step]

    def outs(self, rank: int) -> Places:
        return self.places[rank][: self.size]

    def ins(self, rank: int) -> Places:
        return self.places[rank][self.size : 2 * self.size]

    def whole(self, rank: int) -> Places:
        """One output and one input with elements of all ranks."""
        return self.places[rank][2 * self.size : -2]

    def two(self, rank: int) -> Places:
        """Two tensors more, on any number of ranks."""
        return self.places[rank][-2:]

    def at(self, places: Tensor) -> Tensor:
        """The tensor at these places of this rank's memory; in a storage of its own, in which torch sees nothing."""
        step = int(places[1] - places[0])
        view = self.memory.numpy()[int(places[0]) : int(places[-1]) + 1 : step]
        return torch.from_numpy(view)

    def tensors(self, places: Places) -> list[Tensor]:
        return list(map(self.at, places))

    def sent(self, rank: int, places: Tensor) -> Tensor:
        return self.before[rank][places]

    def part(self, rank: int, dest: int) -> Tensor:
        """What a rank sends to another one, of an input with elements for all ranks."""
        return self.sent(rank, self.whole(rank)[1])[dest * self.rows : (dest + 1) * self.rows]


Step = Callable[[Draw], Iterator[tuple[Tensor, Tensor]]]
"""Makes a call, and yields what it writes, in order: places of this rank's memory, and values."""


def all_gather(draw: Draw) -> Iterator[tuple[Tensor, Tensor]]:
    dist.all_gather(draw.tensors(draw.outs(draw.rank)), draw.at(draw.ins(draw.rank)[0]))
    yield from zip(draw.outs(draw.rank), (draw.sent(r, draw.ins(r)[0]) for r in range(draw.size)), strict=True)


def gather(draw: Draw) -> Iterator[tuple[Tensor, Tensor]]:
    is_root = draw.rank == draw.root
    outs = draw.tensors(draw.outs(draw.rank)) if is_root else None
    dist.gather(draw.at(draw.ins(draw.rank)[0]), outs, draw.root)
    if is_root:
        yield from zip(draw.outs(draw.rank), (draw.sent(r, draw.ins(r)[0]) for r in range(draw.size)), strict=True)


def scatter(draw: Draw) -> Iterator[tuple[Tensor, Tensor]]:
    out = draw.outs(draw.rank)[0]
    xs = draw.tensors(draw.ins(draw.rank)) if draw.rank == draw.root else None
    dist.scatter(draw.at(out), xs, draw.root)
    yield out, draw.sent(draw.root, draw.ins(draw.root)[draw.rank])


def all_to_all(draw: Draw) -> Iterator[tuple[Tensor, Tensor]]:
    dist.all_to_all(draw.tensors(draw.outs(draw.rank)), draw.tensors(draw.ins(draw.rank)))
    values = (draw.sent(r, draw.ins(r)[draw.rank]) for r in range(draw.size))
    yield from zip(draw.outs(draw.rank), values, strict=True)


def all_to_all_one(draw: Draw) -> Iterator[tuple[Tensor, Tensor]]:
    out, x = draw.whole(draw.rank)
    dist.all_to_all_single(draw.at(out), draw.at(x))
    yield out, torch.cat([draw.part(r, draw.rank) for r in range(draw.size)])


def all_gather_one(draw: Draw) -> Iterator[tuple[Tensor, Tensor]]:
    out = draw.whole(draw.rank)[0]
    all_gather_single(draw.at(out), draw.at(draw.ins(draw.rank)[0]))
    yield out, torch.cat([draw.sent(r, draw.ins(r)[0]) for r in range(draw.size)])


def reduce_scatter(draw: Draw) -> Iterator[tuple[Tensor, Tensor]]:
    out = draw.outs(draw.rank)[0]
    dist.reduce_scatter(draw.at(out), draw.tensors(draw.ins(draw.rank)))
    yield out, torch.stack([draw.sent(r, draw.ins(r)[draw.rank]) for r in range(draw.size)]).sum(0)


def reduce_scatter_one(draw: Draw) -> Iterator[tuple[Tensor, Tensor]]:
    out = draw.outs(draw.rank)[0]
    reduce_scatter_single(draw.at(out), draw.at(draw.whole(draw.rank)[1]))
    yield out, torch.stack([draw.part(r, draw.rank) for r in range(draw.size)]).sum(0)


def all_reduce_coalesced(draw: Draw) -> Iterator[tuple[Tensor, Tensor]]:
    dist.all_reduce_coalesced(draw.tensors(draw.ins(draw.rank)))
    for i, places in enumerate(draw.ins(draw.rank)):
        yield places, torch.stack([draw.sent(r, draw.ins(r)[i]) for r in range(draw.size)]).sum(0)


def all_gather_coalesced(draw: Draw) -> Iterator[tuple[Tensor, Tensor]]:
    """Two inputs of each rank; the list of rank i has those of rank i."""
    outs = [*draw.outs(draw.rank), *reversed(draw.outs(draw.rank))]
    lists = [draw.tensors([outs[i], outs[draw.size + i]]) for i in range(draw.size)]
    dist.all_gather_coalesced(lists, draw.tensors(draw.two(draw.rank)))
    for turn in range(2):
        for i in range(draw.size):
            yield outs[draw.size * turn + i], draw.sent(i, draw.two(i)[turn])


def reduce_scatter_coalesced(draw: Draw) -> Iterator[tuple[Tensor, Tensor]]:
    outs = draw.two(draw.rank)
    x = draw.whole(draw.rank)[1]
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    backend.reduce_scatter_tensor_coalesced(draw.tensors(outs), [draw.at(x)] * 2).wait()
    for out in outs:
        yield out, torch.stack([draw.part(r, draw.rank) for r in range(draw.size)]).sum(0)


STEPS: list[Step] = [
    *(all_gather, gather, scatter, all_to_all, all_to_all_one, all_gather_one, reduce_scatter, reduce_scatter_one),
    *(all_reduce_coalesced, all_gather_coalesced, reduce_scatter_coalesced),
]


@pytest.mark.parametrize("packed", [None, 0], ids=["small", "as if large"])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_as_from_copies(step: Step, packed: int | None, world: hd.World, monkeypatch: pytest.MonkeyPatch) -> None:
    if packed is not None:
        monkeypatch.setattr(collectives, "PACKED", packed)
    findings = Findings(world.comm)
    for turn in range(DRAWS):
        draw = Draw(world, 2 + turn % 3, turn)
        expected = draw.memory.clone()
        for places, values in step(draw):
            expected[places] = values
        findings.same(draw.memory, expected, f"draw {turn}: {draw.places[world.rank]}")
    findings.settle()


@pytest.mark.parametrize("count", [3, 2**14, 2**18])
def test_lists_that_hold_the_input(count: int, world: hd.World) -> None:
    """What people write to save memory: of sizes that MPI sends at once, and that wait for the receiver."""
    findings = Findings(world.comm)
    rank, size = world.rank, world.world_size

    def of(source: int, dest: int = 0) -> Tensor:
        return torch.full((count,), float(1 + source + 100 * dest))

    for turn in range(10):
        other, root = (rank + 1) % size, turn % size
        outs = [torch.zeros(count) for _ in range(size)]
        dist.all_gather(outs, outs[other].copy_(of(rank)))
        for i, out in enumerate(outs):
            findings.same(out, of(i), f"all_gather from {i}, x is outs[{other}]")
        xs = [of(rank, i) for i in range(size)]
        dist.scatter(xs[(root + 1) % size] if rank == root else xs[0], xs if rank == root else None, root)
        findings.same(xs[(root + 1) % size] if rank == root else xs[0], of(root, rank), "scatter into xs")
        xs = [of(rank, i) for i in range(size)]
        dist.all_to_all(xs, xs)
        for i, x in enumerate(xs):
            findings.same(x, of(i, rank), f"all_to_all in place from {i}")
        outs = [torch.zeros(count)] * size
        dist.all_gather(outs, of(rank))
        findings.same(outs[0], of(size - 1), "all_gather into one tensor: the last one stays")
    findings.settle()


def test_columns_of_one_row_in_place(world: hd.World) -> None:
    """Torch keeps the stride of a dim of 1, by which two views of the same memory differ."""
    findings, rank, size = Findings(world.comm), world.rank, world.world_size

    def row(values: list[int]) -> Tensor:
        return torch.tensor(values).repeat_interleave(collectives.PACKED)[None]

    def columns() -> list[Tensor]:
        return list(x.chunk(size, 1))

    ranks = list(range(size))
    x = row([rank] * size)
    dist.all_gather(columns(), columns()[rank])
    findings.same(x, row(ranks), "all_gather")
    x = row([rank] * size)
    dist.gather(columns()[rank], columns() if rank == 0 else None)
    findings.same(x, row(ranks if rank == 0 else [rank] * size), "gather")
    x = row(ranks if rank == 0 else [-1] * size)
    dist.scatter(columns()[rank], columns() if rank == 0 else None)
    findings.same(x, row(ranks if rank == 0 else [rank if i == rank else -1 for i in ranks]), "scatter")
    x = row([100 * rank + i for i in ranks])
    dist.all_to_all(columns(), columns())
    findings.same(x, row([100 * i + rank for i in ranks]), "all_to_all")
    findings.settle()
