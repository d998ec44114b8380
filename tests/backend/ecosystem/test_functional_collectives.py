"""Functional collectives, eager, differentiated and compiled; and torch.compile over DDP and DTensor."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as differentiable
from training import check_close

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning"),  # newer torch has other names for some
]


def _of(rank, rows=3):
    """The shard of a rank."""
    return torch.arange(4.0 * rows, dtype=torch.float64).view(rows, 4) + 100 * rank


def _blocks(rank, size):
    """A rank's tensor of one row for each rank, of 2 columns for each rank."""
    return torch.arange(2.0 * size * size, dtype=torch.float64).view(size, 2 * size) + 100 * rank


def _rows(source, dest):
    """How many rows `source` sends to `dest`: some none."""
    return (source + 2 * dest) % 3


def _results(group, rank, size):
    """What each call gives, and what it must give on this rank."""
    shards, blocks = [_of(r) for r in range(size)], [_blocks(r, size) for r in range(size)]
    x, y, total = shards[rank], blocks[rank], sum(blocks[1:], blocks[0])
    sent = [_rows(rank, dest) for dest in range(size)]
    received = [_rows(source, rank) for source in range(size)]
    ragged = _of(rank, sum(sent))
    parts = [
        _of(r, sum(_rows(r, d) for d in range(size))).split([_rows(r, d) for d in range(size)]) for r in range(size)
    ]
    ring = [(r + 1) % size for r in range(size)]
    return {
        "all_reduce": (lambda: funcol.all_reduce(x, "sum", group), sum(shards[1:], shards[0])),
        "all_reduce avg": (lambda: funcol.all_reduce(x, "avg", group), sum(shards[1:], shards[0]) / size),
        "all_reduce max": (lambda: funcol.all_reduce(x, "max", group), shards[-1]),
        "all_gather_tensor": (lambda: funcol.all_gather_tensor(x, 0, group), torch.cat(shards)),
        "all_gather_tensor, dim 1": (lambda: funcol.all_gather_tensor(x, 1, group), torch.cat(shards, 1)),
        "reduce_scatter_tensor": (lambda: funcol.reduce_scatter_tensor(y, "sum", 0, group), total[rank : rank + 1]),
        "reduce_scatter_tensor, dim 1": (
            lambda: funcol.reduce_scatter_tensor(y, "avg", 1, group),
            (total / size)[:, 2 * rank : 2 * rank + 2],
        ),
        "broadcast": (lambda: funcol.broadcast(x, size - 1, group), shards[-1]),
        "all_to_all_single": (
            lambda: funcol.all_to_all_single(y, None, None, group),
            torch.stack([block[rank] for block in blocks]),
        ),
        "all_to_all_single, uneven": (
            lambda: funcol.all_to_all_single(ragged, received, sent, group),
            torch.cat([part[rank] for part in parts]),
        ),
        "permute_tensor": (lambda: funcol.permute_tensor(x.flatten(), ring, group), shards[rank - 1].flatten()),
        "all_reduce_coalesced": (
            lambda: funcol.all_reduce_coalesced([x, y], "sum", group),
            [sum(shards[1:], shards[0]), total],
        ),
        "all_gather_into_tensor_coalesced": (
            lambda: funcol.all_gather_into_tensor_coalesced([x, y], group),
            [torch.cat(shards), torch.cat(blocks)],
        ),
        "reduce_scatter_tensor_coalesced": (
            lambda: funcol.reduce_scatter_tensor_coalesced([y, 2 * y], "sum", [0, 0], group),
            [total[rank : rank + 1], 2 * total[rank : rank + 1]],
        ),
    }


def _listed(x):
    return [y + 0 for y in (x if isinstance(x, list) else [x])]  # which waits


@pytest.mark.parametrize("members", ["all", "some"])
def test_what_each_gives(world, size, findings, members):
    """In the default group, and in one of some ranks, the last of which comes first."""
    ranks = list(range(size)) if members == "all" else [size - 1, *range(size // 2)]
    ranks = list(dict.fromkeys(ranks))
    group = dist.group.WORLD if members == "all" else dist.new_group(ranks)
    if world.rank in ranks:
        for name, (call, expected) in _results(group, dist.get_rank(group), len(ranks)).items():
            if name == "broadcast" and members == "some":
                continue  # its source is a rank of the world
            check_close(findings, _listed(call()), _listed(expected), name)
    findings.checked += 1


def test_compiled(world, findings):
    """In one graph with what comes before and after."""
    group = dist.group.WORLD
    torch._dynamo.reset()

    def step(x):
        y = funcol.all_reduce(x * 2, "sum", group)
        z = funcol.all_gather_tensor(y.sin(), 0, group)
        dist.all_reduce(y, op=dist.ReduceOp.MAX)  # which the compiler makes a functional one of
        back = funcol.reduce_scatter_tensor(z, "avg", 0, group)
        return y + 1, z * 2, back, funcol.all_to_all_single(z, None, None, group)

    x = _of(world.rank) / 50
    got = torch.compile(step, backend="aot_eager", fullgraph=True)(x)
    check_close(findings, [y + 0 for y in got], [y + 0 for y in step(x)], "compiled")


def test_gradients(rank, size, findings):
    """The transpose of each call: the loss is the sum of all ranks' losses."""
    group = dist.group.WORLD
    weights = [
        torch.arange(2.0 * size * size, dtype=torch.float64).view(size, 2 * size).cos() * (r + 1) for r in range(size)
    ]
    x = _blocks(rank, size).requires_grad_()

    def gradient(y, weight):
        return torch.autograd.grad((y * weight).sum(), x)[0]

    total = sum(weights[1:], weights[0])
    wide = [torch.cat([w * (i + 1) for i in range(size)]) for w in weights]
    summed = sum(wide[1:], wide[0])[size * rank : size * (rank + 1)]
    got = {
        "all_gather_tensor_autograd": gradient(funcol.all_gather_tensor_autograd(x, 0, group), wide[rank]),
        "reduce_scatter_tensor_autograd": gradient(
            funcol.reduce_scatter_tensor_autograd(x, "sum", 0, group),
            weights[rank][:1],
        ),
        "all_to_all_single_autograd": gradient(
            funcol.all_to_all_single_autograd(x, [1] * size, [1] * size, group),
            weights[rank],
        ),
        "nn.all_reduce": gradient(differentiable.all_reduce(x), weights[rank]),
        "nn.all_gather": gradient(torch.cat(differentiable.all_gather(x)), wide[rank]),
        "nn.all_to_all_single": gradient(differentiable.all_to_all_single(torch.empty_like(x), x), weights[rank]),
    }
    across = torch.stack([w[rank] for w in weights])
    expected = {
        "all_gather_tensor_autograd": summed,
        "reduce_scatter_tensor_autograd": torch.cat([w[:1] for w in weights]),
        "all_to_all_single_autograd": across,
        "nn.all_reduce": total,
        "nn.all_gather": summed,
        "nn.all_to_all_single": across,
    }
    for name, value in expected.items():
        check_close(findings, [got[name]], [value], name)
