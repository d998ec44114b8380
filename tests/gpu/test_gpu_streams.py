"""Calls on route nccl: none waits for the GPU, and each is in the order of the caller's stream."""

import pytest
import torch

import hpcdist as hd

BUSY = 1_000_000_000  # cycles: half a second of the GPU


def _calls(world, n):
    """Verbs and plans on tensors of `n` and fewer rows."""
    rank, size, device = world.rank, world.world_size, world.device
    x = torch.arange(n // (1 + rank % 2), device=device).float()
    out = torch.empty(sum(n // (1 + r % 2) for r in range(size)), device=device)
    whole = torch.arange(n * size, device=device) if rank == 0 else None
    rows = torch.ones(size, n // size, device=device)
    plans = {
        "concat": hd.plan(hd.concat, x),
        "gather": hd.plan(hd.gather, x),
        "split": hd.plan(hd.split, whole),
        "redistribute": hd.plan(hd.redistribute, rows, hd.Split(0), hd.Split(1)),
    }
    return {
        "concat": lambda: hd.concat(x),
        "concat, out": lambda: hd.concat(x, out=out),
        "gather": lambda: hd.gather(x),
        "split": lambda: hd.split(whole),
        "redistribute": lambda: hd.redistribute(rows, hd.Split(0), hd.Split(1)),
        "async": lambda: hd.concat(x, async_op=True),
        "plan of concat": lambda: plans["concat"](x),
        "plan of concat, out": lambda: plans["concat"](x, out),
        "plan of gather": lambda: plans["gather"](x),
        "plan of split": lambda: plans["split"](whole),
        "plan of redistribute": lambda: plans["redistribute"](rows),
    }


@pytest.mark.parametrize("n", [8, 1 << 12, 1 << 20])
def test_no_call_waits_for_the_gpu(n, gpu_world, routes):
    if "nccl" not in routes:
        return
    wrong = []
    for name, call in _calls(gpu_world, n).items():
        for _ in range(2):  # the second one is kept by the team
            call()
        torch.cuda.synchronize()
        gpu_world.comm.Barrier()
        begin = torch.cuda.Event()
        torch.cuda._sleep(BUSY)
        begin.record()
        call()
        if begin.query():  # the GPU had done its work before the call returned
            wrong.append(name)
        torch.cuda.synchronize()
        gpu_world.comm.Barrier()
    assert wrong == []


def test_calls_are_in_the_order_of_the_stream(gpu_world, routes):
    """On the default stream and on another one, repeated, what the stream has under way is in the result."""
    if "nccl" not in routes:
        return
    size = gpu_world.world_size
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            x, out = torch.zeros(1 << 16, device=gpu_world.device), torch.empty(size << 16, device=gpu_world.device)
            plan = hd.plan(hd.concat, x)
            for turn in range(4):
                torch.cuda._sleep(10_000_000)
                x.fill_(turn * size + gpu_world.rank)
                got = plan(x, out) if turn % 2 else hd.concat(x)
                doubled = got * 2
                x.fill_(-1), got.fill_(-2)
                expected = 2 * (torch.arange(size) + turn * size).repeat_interleave(1 << 16).float()
                assert torch.equal(doubled.cpu(), expected), turn
    torch.cuda.synchronize()
