"""Torch's own calls on GPU memory: backend "mpi" and checkpoints."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from stand_in import DEVICE
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import hpcdist as hd
from hpcdist.staging.dcp import HDF5Reader, HDF5Writer

pytestmark = pytest.mark.filterwarnings("ignore")

SIZES = [0, 3, 1000, 1 << 18]  # elements: none, inline, small, large


@pytest.fixture(scope="module")
def group(gpu_world):
    """Backend "mpi", which takes GPU memory through host memory."""
    return dist.new_group(backend="mpi")


def _mine(rank, numel, dtype):
    """Small whole numbers, which every dtype adds up exactly."""
    return ((torch.arange(numel) + 3 * rank) % 5).to(dtype)


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_backend_mpi(dtype, later, gpu_world, group):
    """On a side stream that is still computing: what it will have computed is sent, strided memory included."""
    rank, size, device = gpu_world.rank, gpu_world.world_size, gpu_world.device
    for numel in SIZES:
        every = [_mine(r, numel, dtype) for r in range(size)]

        def fresh(numel=numel):
            x = torch.zeros(numel, 2, dtype=dtype, device=device)[:, 0]
            torch.cuda._sleep(5_000_000)
            return x.add_(_mine(rank, numel, dtype).to(device))

        with torch.cuda.stream(torch.cuda.Stream()):
            x, gathered = fresh(), [torch.zeros(numel, dtype=dtype, device=device) for _ in range(size)]
            _wait(dist.all_reduce(x, group=group, async_op=later))
            assert torch.equal(x.cpu(), torch.stack(every).sum(0).to(dtype)), numel
            _wait(dist.all_gather(gathered, fresh(), group=group, async_op=later))
            assert all(torch.equal(y.cpu(), every[r]) for r, y in enumerate(gathered)), numel
            for root in range(size):
                x = fresh()
                _wait(dist.broadcast(x, root, group=group, async_op=later))
                assert torch.equal(x.cpu(), every[root]), (numel, root)
            x = torch.cat([fresh() + to for to in range(size)])
            got = torch.zeros_like(x)
            _wait(dist.all_to_all_single(got, x, group=group, async_op=later))
            assert torch.equal(got.cpu(), torch.cat([y + rank for y in every])), numel
            part = torch.zeros(numel, dtype=dtype, device=device)
            _wait(dist.reduce_scatter_tensor(part, x, group=group, async_op=later))
            assert torch.equal(part.cpu(), torch.stack([y + rank for y in every]).sum(0).to(dtype)), numel
            if size > 1:
                x, got = fresh(), torch.zeros(numel, dtype=dtype, device=device)
                works = [
                    dist.isend(x, (rank + 1) % size, group=group),
                    dist.irecv(got, (rank - 1) % size, group=group),
                ]
                for work in works:
                    _wait(work)
                assert torch.equal(got.cpu(), every[(rank - 1) % size]), numel


def _wait(work):
    if work is not None:
        work.wait()


def test_dtensors_in_a_checkpoint(gpu_world, folder):
    """By dcp, at once and in the background, and by staging, into .h5 and .safetensors; ragged rows."""
    rank, size, device = gpu_world.rank, gpu_world.world_size, gpu_world.device
    whole = torch.arange((2 * size + 1) * 700, dtype=torch.float32).view(-1, 700)
    local = hd.local(whole, hd.Split(0, "chunk")).clone().to(device)
    mesh = DeviceMesh(DEVICE, list(range(size)))

    def of(x):
        return DTensor.from_local(x, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())

    state = {"w": of(local.clone()), "b": torch.arange(9.0, device=device), "step": 3}
    later = dist.new_group(backend="gloo")
    for background in (False, True):
        path = folder / f"{background}.h5"
        if background:
            torch.cuda._sleep(5_000_000)
            state["w"].to_local().add_(1)
            dcp.async_save(state, storage_writer=HDF5Writer(path), process_group=later).result()
        else:
            dcp.save(state, storage_writer=HDF5Writer(path), process_group=later)
        got = {"w": of(torch.zeros_like(local)), "b": torch.zeros(9, device=device), "step": 0}
        dcp.load(got, storage_reader=HDF5Reader(path), process_group=later)
        assert got["w"].to_local().device == device and got["step"] == 3
        assert torch.equal(got["w"].to_local().cpu(), local.cpu() + background), background
        assert torch.equal(got["b"].cpu(), torch.arange(9.0)), background
    hd.staging.save(folder / "x.safetensors", {"w": local, "b": state["b"]}, dim={"w": 0, "b": None})
    found = load_file(folder / "x.safetensors")
    assert torch.equal(found["w"], whole) and torch.equal(found["b"], torch.arange(9.0)), rank
