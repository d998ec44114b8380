"""Tensors of one call that share memory: the result is that of copies, written in the order of the lists."""

import random

import pytest
import torch
import torch.distributed as dist
from collective import all_gather_single, reduce_scatter_single

from hpcdist.backend import collectives

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

MEMORY = 64  # elements a rank, each with a value of its own
DRAWS = 40


class Draw:
    """A random call: where the tensors of each rank lie, in memory of which all ranks know the values.

    Of each rank: outputs and inputs, one for each rank; an output and an input with rows of all ranks; two more.
    """

    def __init__(self, world, rows, turn):
        self.size, self.rank, self.root = world.world_size, world.rank, turn % world.world_size
        self.rows = rows
        choose = random.Random(turn)
        self.before = [torch.arange(float(MEMORY)) + 1000 * rank for rank in range(self.size)]
        self.memory = self.before[self.rank].clone()
        counts = [rows] * (2 * self.size) + [rows * self.size] * 2 + [rows] * 2
        self.places = [[_places(choose, count) for count in counts] for _ in range(self.size)]
        mine, n = self.places[self.rank], self.size
        self.outs, self.ins, self.whole, self.two = mine[:n], mine[n : 2 * n], mine[2 * n : -2], mine[-2:]

    def at(self, places):
        """The tensors at these places of this rank's memory; in a storage of their own, in which torch sees nothing."""
        memory = self.memory.numpy()
        return [torch.from_numpy(memory[int(p[0]) : int(p[-1]) + 1 : int(p[1] - p[0])]) for p in places]

    def one(self, places):
        return self.at([places])[0]

    def sent(self, number):
        """What each rank has in its tensor of that number."""
        return [memory[own[number]] for memory, own in zip(self.before, self.places, strict=True)]

    @property
    def first(self):
        return self.sent(self.size)

    @property
    def mine(self):
        """Of each rank, the input for this rank."""
        return self.sent(self.size + self.rank)

    @property
    def rows_for_me(self):
        return [x.split(self.rows)[self.rank] for x in self.sent(2 * self.size + 1)]

    def if_root(self, x):
        return x if self.rank == self.root else None

    def lists(self):
        """Two outputs for each rank."""
        outs = [*self.outs, *reversed(self.outs)]
        return outs, [self.at([outs[i], outs[self.size + i]]) for i in range(self.size)]


def _places(choose, n):
    step = choose.choice([1, 1, 1, 2])
    start = choose.randrange(0, MEMORY - step * n, choose.choice([1, n]))
    return torch.arange(MEMORY)[start : start + step * n : step]


def _sum(parts):
    return torch.stack(parts).sum(0)


def _reduce_scatter_coalesced(draw):
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    backend.reduce_scatter_tensor_coalesced(draw.at(draw.two), [draw.one(draw.whole[1])] * 2).wait()


STEPS = {  # a call, and the places that it writes, in order, and the values
    "all_gather": (
        lambda d: dist.all_gather(d.at(d.outs), d.one(d.ins[0])),
        *(lambda d: d.outs, lambda d: d.first),
    ),
    "gather": (
        lambda d: dist.gather(d.one(d.ins[0]), d.if_root(d.at(d.outs)), d.root),
        *(lambda d: d.if_root(d.outs) or [], lambda d: d.if_root(d.first) or []),
    ),
    "scatter": (
        lambda d: dist.scatter(d.one(d.outs[0]), d.if_root(d.at(d.ins)), d.root),
        *(lambda d: d.outs[:1], lambda d: [d.mine[d.root]]),
    ),
    "all_to_all": (
        lambda d: dist.all_to_all(d.at(d.outs), d.at(d.ins)),
        *(lambda d: d.outs, lambda d: d.mine),
    ),
    "all_to_all_single": (
        lambda d: dist.all_to_all_single(*d.at(d.whole)),
        *(lambda d: d.whole[:1], lambda d: [torch.cat(d.rows_for_me)]),
    ),
    "all_gather_single": (
        lambda d: all_gather_single(d.one(d.whole[0]), d.one(d.ins[0])),
        *(lambda d: d.whole[:1], lambda d: [torch.cat(d.first)]),
    ),
    "reduce_scatter": (
        lambda d: dist.reduce_scatter(d.one(d.outs[0]), d.at(d.ins)),
        *(lambda d: d.outs[:1], lambda d: [_sum(d.mine)]),
    ),
    "reduce_scatter_single": (
        lambda d: reduce_scatter_single(d.one(d.outs[0]), d.one(d.whole[1])),
        *(lambda d: d.outs[:1], lambda d: [_sum(d.rows_for_me)]),
    ),
    "all_reduce_coalesced": (
        lambda d: dist.all_reduce_coalesced(d.at(d.ins)),
        *(lambda d: d.ins, lambda d: [_sum(d.sent(d.size + i)) for i in range(d.size)]),
    ),
    "all_gather_coalesced": (
        lambda d: dist.all_gather_coalesced(d.lists()[1], d.at(d.two)),
        *(lambda d: d.lists()[0], lambda d: [*d.sent(-2), *d.sent(-1)]),
    ),
    "reduce_scatter_coalesced": (
        _reduce_scatter_coalesced,
        *(lambda d: d.two, lambda d: [_sum(d.rows_for_me)] * 2),
    ),
}


@pytest.mark.parametrize("packed", [None, 0], ids=["small", "as if large"])
@pytest.mark.parametrize("name", STEPS)
def test_as_from_copies(name, packed, world, findings, monkeypatch):
    if packed is not None:
        monkeypatch.setattr(collectives, "PACKED", packed)
    (call, written, values) = STEPS[name]
    for turn in range(DRAWS):
        draw = Draw(world, 2 + turn % 3, turn)
        expected = draw.memory.clone()
        call(draw)
        for places, value in zip(written(draw), values(draw), strict=True):
            expected[places] = value
        findings.same(draw.memory, expected, f"draw {turn}: {draw.places[world.rank]}")


@pytest.mark.parametrize("count", [3, 2**14, 2**18])
def test_lists_that_hold_the_input(count, rank, size, findings):
    """What people write to save memory: of sizes that MPI sends at once, and that wait for the receiver."""

    def of(source, dest=0):
        return torch.full((count,), float(1 + source + 100 * dest))

    for turn in range(10):
        other, root = (rank + 1) % size, turn % size
        outs = [torch.zeros(count) for _ in range(size)]
        dist.all_gather(outs, outs[other].copy_(of(rank)))
        for i, out in enumerate(outs):
            findings.same(out, of(i), f"all_gather from {i}, x is outs[{other}]")
        xs = [of(rank, i) for i in range(size)]
        out = xs[(root + 1) % size] if rank == root else xs[0]
        dist.scatter(out, xs if rank == root else None, root)
        findings.same(out, of(root, rank), "scatter into xs")
        outs = [torch.zeros(count)] * size
        dist.all_gather(outs, of(rank))
        findings.same(outs[0], of(size - 1), "all_gather into one tensor: the last one stays")


def test_columns_of_one_row_in_place(rank, size, findings):
    """Torch keeps the stride of a dim of 1, by which two views of the same memory differ."""
    ranks, mine, is_root = list(range(size)), [rank] * size, rank == 0

    def row(values):
        return torch.tensor(values).repeat_interleave(collectives.PACKED)[None]

    calls = {
        "all_gather": (lambda xs: dist.all_gather(xs, xs[rank]), mine, ranks),
        "gather": (lambda xs: dist.gather(xs[rank], xs if is_root else None), mine, ranks if is_root else mine),
        "scatter": (
            lambda xs: dist.scatter(xs[rank], xs if is_root else None),
            ranks if is_root else [-1] * size,
            ranks if is_root else [rank if i == rank else -1 for i in ranks],
        ),
        "all_to_all": (
            lambda xs: dist.all_to_all(xs, xs),
            *([100 * rank + i for i in ranks], [100 * i + rank for i in ranks]),
        ),
    }
    for name, (call, before, after) in calls.items():
        x = row(before)
        call(list(x.chunk(size, 1)))
        findings.same(x, row(after), name)
