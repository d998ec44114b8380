"""redistribute, structures, messages, asynchronous calls and gradients on GPU memory."""

import itertools

import pytest
import torch
from stand_in import on_gpu
from torch import Tensor

import hpcdist as hd
from hpcdist.layout import limits
from hpcdist.tensors import message


def _equal(x, y):
    return isinstance(x, Tensor) and on_gpu(x) and torch.equal(x.cpu(), y)


@pytest.mark.parametrize("window", [limits.WINDOW, 64])
def test_redistribute(gpu_world, routes, window, monkeypatch):
    monkeypatch.setattr(limits, "WINDOW", window)
    size = gpu_world.world_size
    layouts = [hd.Split(0), hd.Split(1), hd.Replicate(), hd.Block((1, size), (0, 1), "chunk")]
    whole = torch.arange((2 * size + 1) * 6).view(-1, 6)
    for of, route, src, dst in itertools.product((whole, whole.byte()), routes, layouts, layouts):
        dtype = torch.int1 if of is not whole else whole.dtype  # which CUDA cannot even copy
        x = hd.local(of, src).to(gpu_world.device)
        expected = hd.local(of, dst)
        got = hd.redistribute(x.view(dtype), src, dst, route=route)
        assert got.dtype == dtype and _equal(got.view(x.dtype), expected), (route, src, dst)
        plan = hd.plan(hd.redistribute, x.view(dtype), src, dst, route=route)
        out = torch.zeros(plan.box.shape[::-1], dtype=x.dtype, device=x.device).t()
        plan(x.t().contiguous().t().view(dtype), out.view(dtype))
        assert _equal(out, expected), (route, src, dst)


@pytest.mark.parametrize("small", [message.SMALL, 16])
def test_structures(gpu_world, routes, small, monkeypatch):
    """Tensors of the GPU and of the host side by side; each arrives where it was, on the receiver's own GPU."""
    monkeypatch.setattr(message, "SMALL", small)
    rank, size, device = gpu_world.rank, gpu_world.world_size, gpu_world.device
    mine = {
        "gpu": torch.full((rank + 1, 40), rank, device=device),
        "host": torch.full((rank + 1, 40), rank),
        "list": [torch.arange(50 + rank, device=device), torch.tensor(rank), "text"],
    }
    for route in [route for route in routes if route != "nccl"]:
        for got in (hd.concat(mine, route=route), hd.gather(mine, root=size - 1, route=route)):
            if got is None:
                assert rank < size - 1
                continue
            expected = torch.cat([torch.full((r + 1, 40), r) for r in range(size)])
            assert _equal(got["gpu"], expected) and torch.equal(got["host"], expected), route
            assert all(_equal(got["list"][3 * r], torch.arange(50 + r)) for r in range(size)), route
            assert got["list"][2::3] == ["text"] * size and got["gpu"].device == device
        part = hd.split({"x": torch.arange(400 * size, device=device)} if rank == 0 else None, route=route)
        assert _equal(part["x"], torch.arange(400 * size)[400 * rank : 400 * (rank + 1)]), route


@pytest.mark.parametrize("piece", [limits.PIECE, 1000])
def test_send_and_recv(gpu_world, piece, monkeypatch):
    monkeypatch.setattr(limits, "PIECE", piece)
    rank, size = gpu_world.rank, gpu_world.world_size
    x = [torch.arange(n, device=gpu_world.device) + rank for n in (0, 3, 10_000, 300_000)]
    handle = hd.isend({"x": x, "rank": rank}, (rank + 1) % size)
    got, source = hd.recv((rank - 1) % size, with_source=True)
    handle.wait(60)
    assert got["rank"] == source
    assert all(_equal(y, torch.arange(len(y)) + source) and y.device == gpu_world.device for y in got["x"])


def test_gradients(gpu_world, routes):
    rank, size = gpu_world.rank, gpu_world.world_size
    for route in routes:
        x = torch.ones(rank + 1, 3, device=gpu_world.device, requires_grad=True)
        for result in (hd.concat(x, route=route), hd.redistribute(x, hd.Split(0), hd.Replicate(), route=route)):
            x.grad = None
            (result * (rank + 1)).sum().backward()
            assert bool((x.grad == size * (size + 1) / 2).all()), route
        x.grad = None
        hd.gather(x, route=route).sum().backward()
        assert bool((x.grad == 1).all()), route


def test_plans_and_repeated_small_calls(gpu_world, routes):
    """Nothing of GPU memory travels behind the headers; plans hold for every route."""
    rank, size, device = gpu_world.rank, gpu_world.world_size, gpu_world.device
    for route, turn in itertools.product(routes, range(3)):
        x = torch.arange(rank + 1, device=device) + 100 * rank + turn
        whole = torch.cat([torch.arange(r + 1) + 100 * r + turn for r in range(size)])
        assert _equal(hd.concat(x, route=route), whole), (route, turn)
        got = hd.gather(x, route=route)
        assert got is None if rank else _equal(got, whole), (route, turn)
        counts = [r + 1 for r in range(size)]
        sent = whole.to(device) if rank == 0 else None
        assert _equal(hd.split(sent, counts=counts, route=route), x.cpu()), (route, turn)
        for plan, given, expected in (
            (hd.plan(hd.concat, x, route=route), x, whole),
            (hd.plan(hd.gather, x, root=size - 1, route=route), x, whole if rank == size - 1 else None),
            (hd.plan(hd.split, sent, counts=counts, route=route), sent, x.cpu()),
        ):
            for _ in range(2):
                result = plan(given)
                assert result is None if expected is None else _equal(result, expected), (route, turn)
