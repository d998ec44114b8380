"""The verbs on GPU memory: NCCL where each rank has its own GPU, else ranks that share one, over mpi and gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hpcdist as hd
from hpcdist.comm import mpi
from hpcdist.layout import limits
from hpcdist.tensors.storage import DTYPES, as_bytes, bits

pytestmark = [pytest.mark.mpi, pytest.mark.gpu]

EXTENTS = {
    "even": lambda rank, size: 3,
    "ragged": lambda rank, size: 2 * rank + 1,
    "zero first": lambda rank, size: rank,
    "zero last": lambda rank, size: size - 1 - rank,
    "all on one": lambda rank, size: 5 * (rank == size // 2),
    "none": lambda rank, size: 0,
}


def routes(world: hd.World) -> list[str]:
    return ["auto", "mpi", "gloo", "hdf5", *(["nccl"] if world.settings.own_gpus else [])]


def whole_of(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Bytes that count up, on the CPU (bool: 0 and 1 in turn)."""
    raw = (torch.arange(int(torch.Size(shape).numel()) * dtype.itemsize) * 7 % 251).to(torch.uint8)
    return (raw % 2 if dtype is torch.bool else raw).view(dtype).view(shape)


def part_of(whole: torch.Tensor, dim: int, start: int, extent: int) -> torch.Tensor:
    return bits(whole).narrow(dim, start, extent).contiguous().view(whole.dtype)


def strided(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the device whose dims lie in memory the other way round: as integers, since CUDA copies no int1."""
    return bits(x.contiguous()).to(device).t().contiguous().t().view(x.dtype)


def same(x: torch.Tensor | None, y: torch.Tensor) -> bool:
    return x is not None and x.is_cuda and torch.equal(as_bytes(x.cpu().contiguous()), as_bytes(y.contiguous()))


@pytest.mark.parametrize("window", [limits.WINDOW, 64])
@pytest.mark.parametrize("case", EXTENTS)
def test_every_verb_route_dtype_and_dim(
    case: str, window: int, gpu_world: hd.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "WINDOW", window)
    rank, size = gpu_world.rank, gpu_world.world_size
    extents = [EXTENTS[case](r, size) for r in range(size)]
    start = sum(extents[:rank])
    for route in routes(gpu_world):
        for dtype in DTYPES:
            for dim in (0, 1):
                shape = (sum(extents), 3) if dim == 0 else (3, sum(extents))
                whole = whole_of(shape, dtype)
                part = part_of(whole, dim, start, extents[rank])
                x = strided(part, gpu_world.device)
                assert same(hd.concat(x, dim, route=route), whole), (route, dtype, dim)
                got = hd.gather(x, dim, size - 1, route=route)
                assert got is None if rank < size - 1 else same(got, whole), (route, dtype, dim)
                sent = whole.to(gpu_world.device) if rank == 0 else None
                assert same(hd.split(sent, dim, counts=extents, route=route), part), (route, dtype, dim)


def test_work_on_a_side_stream_is_waited_for(gpu_world: hd.World) -> None:
    """The shard is still being computed on the current stream when the verb is called."""
    for route in routes(gpu_world):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            x = torch.zeros(1 << 20, device=gpu_world.device)
            torch.cuda._sleep(50_000_000)
            x += gpu_world.rank + 1
            whole = hd.concat(x, route=route)
            expected = torch.arange(1, gpu_world.world_size + 1, device=x.device).repeat_interleave(1 << 20)
            assert torch.equal(whole, expected.to(x.dtype)), route
        torch.cuda.synchronize()


def test_cpu_and_gpu_ranks_together(gpu_world: hd.World) -> None:
    x = torch.full((3,), gpu_world.rank)
    whole = hd.concat(x.to(gpu_world.device) if gpu_world.rank % 2 else x, route="mpi")
    assert whole.tolist() == [r for r in range(gpu_world.world_size) for _ in range(3)]
    assert whole.is_cuda == bool(gpu_world.rank % 2)


def test_whether_mpi_takes_gpu_memory_is_found_without_harm(gpu_world: hd.World) -> None:
    assert mpi.MPI_ROUTE.carries(gpu_world.team, gpu=True) in (True, False)
    assert torch.ones(3, device=gpu_world.device).sum().item() == 3


@pytest.mark.parametrize("window", [2**28, 100])
@pytest.mark.parametrize("case", EXTENTS)
def test_staging_from_and_to_gpu_memory(case: str, window: int, gpu_world: hd.World, folder: Path) -> None:
    """Through two pinned buffers: every dtype, along every dim, strided, in pieces of the window."""
    rank, size = gpu_world.rank, gpu_world.world_size
    extents = [EXTENTS[case](r, size) for r in range(size)]
    start = sum(extents[:rank])
    for dim in (0, 1):
        shape = (sum(extents), 3) if dim == 0 else (3, sum(extents))
        wholes = {str(dtype): whole_of(shape, dtype) for dtype in DTYPES}
        parts = {
            name: bits(whole).narrow(dim, start, extents[rank]).contiguous().view(whole.dtype)
            for name, whole in wholes.items()
        }
        x = {name: strided(part, gpu_world.device) for name, part in parts.items()}
        hd.staging.save(folder / "x.h5", x, dim, window=window)
        got = hd.staging.load(folder / "x.h5", dim=dim, counts=extents, device=gpu_world.device, window=window)
        whole = hd.staging.load(folder / "x.h5", dim=None, device=gpu_world.device, window=window, verify=True)
        for name in wholes:
            assert same(got[name], parts[name]), (name, dim)
            assert same(whole[name], wholes[name]), (name, dim)
            out = torch.empty(shape[::-1], dtype=wholes[name].dtype, device=gpu_world.device).t()
            hd.staging.load(folder / "x.h5", name, dim=None, out=out, window=window)
            assert same(bits(out).contiguous(), bits(wholes[name])), (name, dim)


def test_staging_waits_for_work_on_a_side_stream(gpu_world: hd.World, folder: Path) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        x = torch.zeros(1 << 24, device=gpu_world.device)
        torch.cuda._sleep(50_000_000)
        x += gpu_world.rank + 1
        hd.staging.save(folder / "x.h5", x, window=1 << 22)
        got = hd.staging.load(folder / "x.h5", device=gpu_world.device, window=1 << 22)
        assert torch.equal(got, x)
    torch.cuda.synchronize()


def test_staging_in_the_background(gpu_world: hd.World, folder: Path) -> None:
    """The values at the call, though a side stream has yet to compute them, and they are changed afterwards."""
    with torch.cuda.stream(torch.cuda.Stream()):
        for buffer in (None, 0, 5_000_000):
            x = {
                "large": torch.zeros(1 << 22, device=gpu_world.device),
                "small": torch.zeros(9, device=gpu_world.device),
            }
            torch.cuda._sleep(50_000_000)
            for part in x.values():
                part += gpu_world.rank + 1
            handle = hd.staging.save(folder / "x.h5", x, buffer=buffer, async_op=True)
            for part in x.values():
                part.zero_()
            handle.wait()
            got = hd.staging.load(folder / "x.h5", device=gpu_world.device)
            for name in x:
                assert torch.equal(got[name], torch.full_like(x[name], gpu_world.rank + 1)), (name, buffer)
    torch.cuda.synchronize()


@pytest.mark.parametrize("once_per", ["auto", "rank", "job"])
def test_staging_reads_once(once_per: str, gpu_world: hd.World, folder: Path) -> None:
    """Into GPU memory on rank 0, and host memory elsewhere."""
    whole = torch.arange(1 << 20).view(1 << 10, 1 << 10)
    hd.staging.save(folder / "x.h5", {"a": whole, "b": whole[0] + 1}, None)
    device = gpu_world.device if gpu_world.rank == 0 else torch.device("cpu")
    got = hd.staging.load(folder / "x.h5", dim=None, once_per=once_per, device=device)
    assert got["a"].device == device
    assert torch.equal(got["a"].cpu(), whole)
    assert torch.equal(got["b"].cpu(), whole[0] + 1)
