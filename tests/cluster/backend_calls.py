"""torch's collectives with backend "mpi" over several hosts, against plain computing: ``backend_calls.py``."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hpcdist as hd

checks = 0


def same(found, expected, what):
    global checks
    checks += 1
    assert torch.equal(found, expected), f"{what}: {found.flatten()[:5]}, expected {expected.flatten()[:5]}"


def of(rank, numel):
    return torch.arange(numel, dtype=torch.float64) + 1000 * rank


def calls(group, ranks):
    """Every kind of collective, of small tensors and of such that travel by windows or in pieces."""
    rank, size = ranks.index(dist.get_rank()), len(ranks)
    for numel in (1, 24, 12 * 1024, 300_000):
        numel += -numel % size
        every = torch.stack([of(r, numel) for r in range(size)])
        part = numel // size
        mine = slice(rank * part, (rank + 1) * part)
        for async_op in (False, True):
            x = of(rank, numel)
            work = dist.all_reduce(x, group=group, async_op=async_op)
            work.wait() if work else None
            same(x, every.sum(0), f"all_reduce of {numel}")
        x = of(rank, numel)
        dist.broadcast(x, ranks[-1], group=group)
        same(x, every[-1], "broadcast")
        out = torch.empty(size * numel, dtype=torch.float64)
        dist.all_gather_into_tensor(out, of(rank, numel), group=group)
        same(out, every.flatten(), "all_gather_single")
        out = torch.empty(part, dtype=torch.float64)
        dist.reduce_scatter_tensor(out, of(rank, numel), group=group)
        same(out, every.sum(0)[mine], "reduce_scatter_single")
        out = torch.empty(numel, dtype=torch.float64)
        dist.all_to_all_single(out, of(rank, numel), group=group)
        same(out, every[:, mine].flatten(), "all_to_all_single")
        outs = [torch.empty(numel + i, dtype=torch.float64) for i in range(size)]
        dist.all_gather(outs, of(rank, numel + rank), group=group)
        for i, out in enumerate(outs):
            same(out, of(i, numel + i), "all_gather of uneven tensors")
        after, before = ranks[(rank + 1) % size], ranks[(rank - 1) % size]
        sent, got = dist.isend(of(rank, numel), after, group=group), torch.empty(numel, dtype=torch.float64)
        dist.recv(got, before, group=group)
        sent.wait()
        same(got, every[(rank - 1) % size], "a message")
    found = [None] * size
    dist.all_gather_object(found, {"rank": rank}, group=group)
    assert found == [{"rank": i} for i in range(size)]
    dist.barrier(group=group)


with hd.init() as world:
    assert dist.get_backend() == "mpi"
    everyone = list(range(world.world_size))
    calls(dist.group.WORLD, everyone)
    nodes = [
        ranks for node in range(world.nodes) if (ranks := [r for r in everyone if world.settings.node_of[r] == node])
    ]
    leaders = [ranks[0] for ranks in nodes]
    for ranks in (*nodes, leaders):  # groups of one host each, and one over all hosts
        group = dist.new_group(ranks)
        if world.rank in ranks:
            calls(group, ranks)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(1000, 300))
    model(torch.full((1, 1000), 1.0 + world.rank)).sum().backward()
    mean = sum(1.0 + rank for rank in everyone) / len(everyone)
    same(model.module.weight.grad, torch.full((300, 1000), mean), "the gradient of a DDP step")
    os.write(1, f"rank {world.rank} of node {world.node}: {checks} checks\n".encode())  # one write: lines do not mix
