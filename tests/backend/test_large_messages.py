"""Tensors of more than 2^31 bytes, which no count of MPI 3 can describe."""

import pytest
import torch
import torch.distributed as dist
from collective import assert_on_all_ranks, several_ranks

pytestmark = [several_ranks, pytest.mark.large, pytest.mark.timeout(300)]

NUMEL = 2**31 + 2**20  # of int8
PLACES = [0, 1, 2**30 - 1, 2**30, 2**31 - 1, 2**31, NUMEL - 1]


def _of(rank, numel=NUMEL):
    """Each value tells the place and the rank."""
    x = torch.arange(251, dtype=torch.uint8).repeat(numel // 251 + 1)[:numel]
    return x.add_(rank)


def _wrong(x, rank):
    return [place for place in PLACES if x[place].item() != (place % 251 + rank) % 256]


def _reduced(world):
    x = _of(world.rank)
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return x.sub_(world.world_size - 1)


def _broadcast(world):
    x = _of(0) if world.rank == 1 else torch.zeros(NUMEL, dtype=torch.uint8)
    dist.broadcast(x, 1)
    return x


def _message(world):
    x = _of(0) if world.rank == 0 else torch.zeros(NUMEL, dtype=torch.uint8)
    if world.rank == 0:
        dist.send(x, 1)
    elif world.rank == 1:
        dist.recv(x)
    return x


def _gathered(world):
    """Shards that are short themselves: the result is not."""
    part = NUMEL // world.world_size + 1
    out = torch.zeros(part * world.world_size, dtype=torch.uint8)
    start = part * world.rank
    dist.all_gather_into_tensor(out, _of(0, start + part)[start:].clone())
    return out[:NUMEL]


@pytest.mark.parametrize("call", [_reduced, _broadcast, _message, _gathered])
def test_more_than_an_int_can_count(call, world):
    wrong = _wrong(call(world), 0) if world.rank < 2 or call is not _message else []
    assert_on_all_ranks(not wrong, f"wrong at {wrong}")
    world.comm.Barrier()
