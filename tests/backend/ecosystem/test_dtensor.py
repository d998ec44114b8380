"""DTensor: every placement into every other, as indexing of the whole."""

from itertools import product

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from training import check_close

SHAPES = {
    "even": (6, 12, 6),
    "uneven": (7, 5, 3),
    "some empty": (1, 7, 2),
    "empty": (0, 4, 3),
}
REDUCTIONS = {
    "sum": lambda parts: parts.sum(0),
    "avg": lambda parts: parts.mean(0),
    "max": lambda parts: parts.amax(0),
    "min": lambda parts: parts.amin(0),
}
PLACEMENTS = (Shard(0), Shard(1), Shard(2), Replicate(), *(Partial(op) for op in REDUCTIONS))


def _mesh(world):
    return init_device_mesh("cpu", (world.world_size,))


def _source(shape, placement, mesh):
    """A tensor placed so, made of local tensors alone, and the whole."""
    rank, size = mesh.get_local_rank(), mesh.size()
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)
    if isinstance(placement, Partial):
        parts = torch.stack([whole * (-1) ** r * (r + 1) + r for r in range(size)])
        local, whole = parts[rank].clone(), REDUCTIONS[placement.reduce_op](parts)
    else:
        local = _local(whole, placement, rank, size).clone()
    return DTensor.from_local(
        local, mesh, [placement], run_check=False, shape=whole.size(), stride=whole.stride()
    ), whole


def _local(whole, placement, rank, size):
    """This rank's part, by torch.chunk's rule."""
    if not isinstance(placement, Shard):
        return whole
    parts = whole.chunk(size, placement.dim)
    return parts[rank] if rank < len(parts) else whole.narrow(placement.dim, 0, 0)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_placement_into_every_other(world, findings, shape):
    mesh = _mesh(world)
    for start, end, wait in product(PLACEMENTS, PLACEMENTS[:4], (True, False)):  # torch redistributes to no Partial
        name = f"{shape} {start} to {end}{'' if wait else ', asynchronous'}"
        source, whole = _source(shape, start, mesh)
        moved = source.redistribute(mesh, [end], async_op=not wait)
        check_close(findings, [moved.to_local() + 0], [_local(whole, end, world.rank, world.world_size)], name)
        check_close(findings, [moved.full_tensor()], [whole], f"{name}, whole")
