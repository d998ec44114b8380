"""The verbs on GPU memory: NCCL where each rank has its own GPU, else ranks that share one, over mpi and gloo."""

import itertools

import pytest
import torch
from cases import copy_of, extents_of, part, whole_of
from stand_in import STAND_IN, on_gpu

import hpcdist as hd
from hpcdist.layout import limits
from hpcdist.tensors.storage import DTYPES, as_bytes, bits

TYPES = list(DTYPES)[:: 9 if STAND_IN else 1]
CASES = ("even", "ragged", "zero first", "zero last", "all on one rank", "all zero")


def strided(x, device):
    """A copy on the device whose dims lie in memory the other way round: as integers, since CUDA copies no int1."""
    return bits(copy_of(x)).to(device).t().contiguous().t().view(x.dtype)


def same(x, y):
    return x is not None and on_gpu(x) and torch.equal(as_bytes(x.cpu().contiguous()), as_bytes(copy_of(y)))


@pytest.mark.parametrize("window", [limits.WINDOW, 64])
@pytest.mark.parametrize("case", CASES)
def test_every_verb_route_dtype_and_dim(case, window, routes, gpu_world, monkeypatch):
    monkeypatch.setattr(limits, "WINDOW", window)
    rank, size = gpu_world.rank, gpu_world.world_size
    extents = extents_of(case, size)
    for route in routes:
        for dtype in TYPES:
            for dim in (0, 1):
                shape = (sum(extents), 3) if dim == 0 else (3, sum(extents))
                whole = whole_of(shape, dtype)
                mine = part(whole, dim, extents, rank)
                x = strided(mine, gpu_world.device)
                assert same(hd.concat(x, dim, route=route), whole), (route, dtype, dim)
                got = hd.gather(x, dim, size - 1, route=route)
                assert got is None if rank < size - 1 else same(got, whole), (route, dtype, dim)
                sent = whole.to(gpu_world.device) if rank == 0 else None
                assert same(hd.split(sent, dim, counts=extents, route=route), mine), (route, dtype, dim)
                blocks, received = hd.all_to_all(
                    sent_by_all := whole.to(gpu_world.device), extents, dim=dim, route=route
                )
                assert same(blocks, torch.cat([bits(mine)] * size, dim).view(dtype)), (route, dtype, dim)
                assert received == [extents[rank]] * size and same(sent_by_all, whole)


def test_streams(routes, gpu_world):
    """What the caller's stream has under way is waited for. In the background memory is not used again too early."""
    expected = torch.arange(1, gpu_world.world_size + 1).repeat_interleave(1 << 20).float()
    for route, later in itertools.product(routes, (False, True)):
        with torch.cuda.stream(torch.cuda.Stream()):
            results = []
            for _ in range(3):
                x = torch.zeros(1 << 20, device=gpu_world.device)
                torch.cuda._sleep(20_000_000)
                x += gpu_world.rank + 1
                results.append(hd.concat(x, route=route, async_op=later))
                del x
                torch.full((1 << 20,), -1.0, device=gpu_world.device)  # would land in x's memory
            for result in results:
                assert torch.equal((result.wait(60) if later else result).cpu(), expected), (route, later)
        torch.cuda.synchronize()


def test_cpu_and_gpu_ranks_together(gpu_world):
    x = torch.full((3,), gpu_world.rank)
    whole = hd.concat(x.to(gpu_world.device) if gpu_world.rank % 2 else x, route="mpi")
    assert whole.tolist() == [r for r in range(gpu_world.world_size) for _ in range(3)]
    assert STAND_IN or whole.is_cuda == bool(gpu_world.rank % 2)


@pytest.mark.parametrize("window", [2**28, 100])
@pytest.mark.parametrize("case", CASES)
def test_staging_from_and_to_gpu_memory(case, window, gpu_world, folder):
    """Through two pinned buffers: every dtype, along every dim, strided, in pieces of the window."""
    rank, size = gpu_world.rank, gpu_world.world_size
    extents = extents_of(case, size)
    for dim in (0, 1):
        shape = (sum(extents), 3) if dim == 0 else (3, sum(extents))
        wholes = {str(dtype): whole_of(shape, dtype) for dtype in TYPES}
        parts = {name: part(whole, dim, extents, rank) for name, whole in wholes.items()}
        x = {name: strided(mine, gpu_world.device) for name, mine in parts.items()}
        hd.staging.save(folder / "x.h5", x, dim, window=window)
        got = hd.staging.load(folder / "x.h5", dim=dim, counts=extents, device=gpu_world.device, window=window)
        whole = hd.staging.load(folder / "x.h5", dim=None, device=gpu_world.device, window=window, verify=True)
        for name in wholes:
            assert same(got[name], parts[name]), (name, dim)
            assert same(whole[name], wholes[name]), (name, dim)
            out = torch.empty(shape[::-1], dtype=wholes[name].dtype, device=gpu_world.device).t()
            hd.staging.load(folder / "x.h5", name, dim=None, out=out, window=window)
            assert same(bits(out).contiguous(), bits(wholes[name])), (name, dim)


def test_staging_waits_for_streams(gpu_world, folder):
    """The values at the call, though a side stream has yet to compute them, and they are changed afterwards."""
    with torch.cuda.stream(torch.cuda.Stream()):
        for later, buffer in ((False, None), (True, None), (True, 0), (True, 5_000_000)):
            x = {name: torch.zeros(n, device=gpu_world.device) for name, n in (("large", 1 << 22), ("small", 9))}
            torch.cuda._sleep(50_000_000)
            for part in x.values():
                part += gpu_world.rank + 1
            options = {"async_op": True, "buffer": buffer} if later else {"window": 1 << 22}
            handle = hd.staging.save(folder / "x.h5", x, **options)
            for part in x.values():
                part.zero_()
            if later:
                handle.wait()
            got = hd.staging.load(folder / "x.h5", device=gpu_world.device)
            for name in x:
                assert torch.equal(got[name], torch.full_like(x[name], gpu_world.rank + 1)), (name, later, buffer)
    torch.cuda.synchronize()


def test_staging_into_gpu_and_host_memory(gpu_world, folder):
    """GPU memory on rank 0, and host memory elsewhere."""
    whole = torch.arange(1 << 20).view(1 << 10, 1 << 10)
    hd.staging.save(folder / "x.h5", {"a": whole, "b": whole[0] + 1}, None)
    device = gpu_world.device if gpu_world.rank == 0 else torch.device("cpu")
    got = hd.staging.load(folder / "x.h5", dim=None, device=device)
    assert got["a"].device == device
    assert torch.equal(got["a"].cpu(), whole)
    assert torch.equal(got["b"].cpu(), whole[0] + 1)


@pytest.mark.parametrize("keep", ["node", "file"])
def test_batches_on_the_gpu(keep, gpu_world, folder):
    """Copied before the step needs them; what the caller's stream then does finds them there."""
    if gpu_world.rank == 0:
        x = torch.arange(1000 * 64).view(1000, 64)
        hd.staging.save(folder / "x.h5", {"x": x, "y": x[:, 0] * 2.0}, dim=None, group=gpu_world.comm.Split(0))
    else:
        gpu_world.comm.Split(1)
    gpu_world.comm.Barrier()
    data = hd.data.open(folder / "x.h5", ["x", "y"], keep)
    loader = hd.data.Loader(data, 7, even="short", device=gpu_world.device, window=2**16)
    for epoch in range(2):
        sums = []
        for x, y in loader.epoch(epoch):
            assert on_gpu(x) and on_gpu(y)
            assert torch.equal(2.0 * x[:, 0], y)
            sums.append(x[:, 0] // 64)
        whole = hd.concat(torch.cat(sums))
        assert whole.sort().values.tolist() == list(range(1000))
    loader.close()
