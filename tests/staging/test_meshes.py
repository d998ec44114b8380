"""Checkpoints of what is sharded in two dimensions: FSDP2 with tensor parallel, HSDP, DTensors; on any other mesh."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases import whole_of
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from hpcdist import staging
from hpcdist.staging.dcp import HDF5Reader, HDF5Writer

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's, of redistributions that are slow

SMALL = 64  # bytes: a window that leaves every tensor in several pieces
SHAPES = {"0.weight": (7, 8), "0.bias": (7,), "1.weight": (9, 7), "1.bias": (9,)}
WHOLES = {name: whole_of(shape, torch.float32, i) for i, (name, shape) in enumerate(SHAPES.items())}
PLACEMENTS = [(Shard(0), Shard(1)), (Shard(1), Shard(0)), (Shard(0), Shard(0)), (Replicate(), Shard(1))]
TENSORS = {
    str(placements): whole_of(shape, dtype, i)
    for i, (placements, shape, dtype) in enumerate(
        zip(
            PLACEMENTS,
            [(7, 5), (3, 9, 2), (1, 2), (2, 3)],
            [torch.bfloat16, torch.int64, torch.float64, torch.bool],
            strict=True,
        )
    )
}


@pytest.fixture(scope="module")
def meshes(world):
    """Meshes of the first ranks, and the group of each, or None on the other ranks."""
    made = []
    for shape in [(2, 2), (1, 3), (3, 1), (2, 1), (1, 2), (1, 1)]:
        if (count := shape[0] * shape[1]) <= world.world_size:
            mesh = DeviceMesh("cpu", torch.arange(count).view(shape), mesh_dim_names=("dp", "tp"))
            group = dist.new_group(list(range(count)))
            made.append((mesh, group if world.rank < count else None))
    return made


def of_model(mesh, wholes, tensor_parallel):
    """The state of a model with these values, in FSDP2: with tensor parallel, or hybrid."""
    net = nn.Sequential(nn.Linear(8, 7), nn.Linear(7, 9))
    net.load_state_dict(wholes)
    if tensor_parallel:
        parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    return get_model_state_dict(fully_shard(net, mesh=mesh["dp"] if tensor_parallel else mesh))


def of_tensors(mesh, wholes):
    return {name: distribute_tensor(wholes[name], mesh, of) for name, of in zip(TENSORS, PLACEMENTS, strict=True)}


def zeros(wholes):
    return {name: torch.zeros_like(x) for name, x in wholes.items()}


CASES = {
    "tensor parallel": (partial(of_model, tensor_parallel=True), WHOLES),
    "hybrid": (partial(of_model, tensor_parallel=False), WHOLES),
    "tensors": (of_tensors, TENSORS),
}


@pytest.mark.parametrize("window", [SMALL, 2**20])
@pytest.mark.parametrize("kind", CASES)
def test_any_mesh_loads_what_another_has_saved(kind, window, meshes, world, folder, findings):
    path = folder / "x.h5"
    state_of, wholes = CASES[kind]
    for mesh, group in meshes[:2]:
        if group is not None:
            dcp.save(state_of(mesh, wholes), storage_writer=HDF5Writer(path, window=window), process_group=group)
        world.comm.Barrier()
        for name, x in wholes.items():
            findings.same(staging.load(path, name, dim=None), x, f"{name} of {mesh}")
        for other, some in meshes:
            if some is not None:
                state = state_of(other, zeros(wholes))
                dcp.load(state, storage_reader=HDF5Reader(path, window=window), process_group=some)
                for name, x in wholes.items():
                    findings.same(state[name].full_tensor(), x, f"{name} of {mesh} on {other}")
        world.comm.Barrier()


def test_two_saves_at_once_and_a_key_that_is_new(meshes, folder, findings, world):
    """The second one, of other values and with one more tensor, waits for no result of the first."""
    mesh, group = meshes[0]
    both = dist.new_group(list(range(mesh.size())), backend="gloo")
    if group is not None:
        second = {name: x + 1 for name, x in WHOLES.items()}
        first = dcp.async_save(
            of_model(mesh, WHOLES, True), storage_writer=HDF5Writer(folder / "a.h5"), process_group=both
        )
        state = {
            **of_model(mesh, second, True),
            "new": distribute_tensor(TENSORS[str(PLACEMENTS[0])], mesh, PLACEMENTS[0]),
        }
        later = dcp.async_save(state, storage_writer=HDF5Writer(folder / "b.h5"), process_group=both)
        for save in (later, first):
            save.result()
    world.comm.Barrier()
    for name, x in WHOLES.items():
        findings.same(staging.load(folder / "a.h5", name, dim=None), x, name)
        findings.same(staging.load(folder / "b.h5", name, dim=None), x + 1, name)
    findings.same(staging.load(folder / "b.h5", "new", dim=None), TENSORS[str(PLACEMENTS[0])], "new")
