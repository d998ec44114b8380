"""DTensor: every placement into every other, distribution of rank 0's tensor, products, as indexing of the whole."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from cases import whole_of
from collective import Findings
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from training import check_close

import hpcdist as hd

pytestmark = pytest.mark.mpi

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
PLACEMENTS: tuple[Placement, ...] = (Shard(0), Shard(1), Shard(2), Replicate(), *(Partial(op) for op in REDUCTIONS))


def _mesh(world: hd.World) -> DeviceMesh:
    return init_device_mesh("cpu", (world.world_size,))


def _source(shape: tuple[int, ...], placement: Placement, mesh: DeviceMesh) -> tuple[DTensor, Tensor]:
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


def _local(whole: Tensor, placement: Placement, rank: int, size: int) -> Tensor:
    """This rank's part, by torch.chunk's rule."""
    if not isinstance(placement, Shard):
        return whole
    parts = whole.chunk(size, placement.dim)
    return parts[rank] if rank < len(parts) else whole.narrow(placement.dim, 0, 0)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_placement_into_every_other(world: hd.World, shape: tuple[int, ...]) -> None:
    findings, mesh = Findings(world.comm), _mesh(world)
    for start, end, wait in product(PLACEMENTS, PLACEMENTS[:4], (True, False)):  # torch redistributes to no Partial
        name = f"{shape} {start} to {end}{'' if wait else ', asynchronous'}"
        source, whole = _source(shape, start, mesh)
        moved = source.redistribute(mesh, [end], async_op=not wait)
        check_close(findings, [moved.to_local() + 0], [_local(whole, end, world.rank, world.world_size)], name)
        check_close(findings, [moved.full_tensor()], [whole], f"{name}, whole")
    findings.settle()


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.bfloat16, torch.complex64, torch.uint8], ids=str)
def test_placements_of_every_kind_of_dtype(world: hd.World, dtype: torch.dtype) -> None:
    findings, mesh, whole = Findings(world.comm), _mesh(world), whole_of((7, 5), dtype)
    for start, end in product((Shard(0), Shard(1), Replicate()), repeat=2):
        local = _local(whole, start, world.rank, world.world_size).clone()
        x = DTensor.from_local(local, mesh, [start], run_check=False, shape=whole.size(), stride=whole.stride())
        got = x.redistribute(mesh, [end]).to_local() + torch.zeros((), dtype=dtype)
        findings.same(got, _local(whole, end, world.rank, world.world_size).contiguous(), f"{start} to {end}")
    findings.settle()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_rank_0_distributes(world: hd.World, shape: tuple[int, ...]) -> None:
    """What the other ranks hold does not count; src_data_rank=None sends nothing."""
    findings, mesh = Findings(world.comm), _mesh(world)
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)
    for placement in (Shard(0), Shard(1), Shard(2), Replicate()):
        mine = whole if world.rank == 0 else torch.full_like(whole, -1)
        got = distribute_tensor(mine, mesh, [placement])
        expected = _local(whole, placement, world.rank, world.world_size)
        check_close(findings, [got.to_local()], [expected], str(placement))
        got = distribute_tensor(whole, mesh, [placement], src_data_rank=None)
        check_close(findings, [got.to_local()], [expected], f"{placement}, each its own")
    findings.settle()


def test_two_dimensions(world: hd.World) -> None:
    """Every pair of placements into every other pair, on a mesh of 2 x n/2 where that is whole, else n x 1."""
    findings, size = Findings(world.comm), world.world_size
    rows = 2 if size % 2 == 0 else size
    mesh = init_device_mesh("cpu", (rows, size // rows), mesh_dim_names=("rows", "columns"))
    whole = torch.arange(35, dtype=torch.float64).view(7, 5)
    pairs = list(product((Shard(0), Shard(1), Replicate()), repeat=2))
    for start, end in product(pairs, repeat=2):
        x = distribute_tensor(whole, mesh, start, src_data_rank=None).redistribute(mesh, end)
        expected = whole
        for dim, placement in enumerate(end):
            expected = _local(expected, placement, mesh.get_local_rank(dim), mesh.size(dim))
        check_close(findings, [x.to_local()], [expected], f"{start} to {end}")
        check_close(findings, [x.full_tensor()], [whole], f"{start} to {end}, whole")
    findings.settle()


def test_products_and_their_gradients(world: hd.World) -> None:
    """Of factors placed in every way, against those of one process."""
    findings, mesh = Findings(world.comm), _mesh(world)
    draw = torch.Generator().manual_seed(2)
    a, b, g = (torch.randn(s, generator=draw, dtype=torch.float64) for s in ((7, 5), (5, 3), (7, 3)))
    one, two = a.clone().requires_grad_(), b.clone().requires_grad_()
    (one @ two * g).sum().backward()
    for left, right, out in product((Shard(0), Shard(1), Replicate()), repeat=3):
        x = distribute_tensor(a, mesh, [left]).requires_grad_()
        y = distribute_tensor(b, mesh, [right]).requires_grad_()
        z = (x @ y).redistribute(mesh, [out])
        name = f"{left} @ {right} into {out}"
        check_close(findings, [z.full_tensor().detach()], [a @ b], name)
        (z * distribute_tensor(g, mesh, [Replicate()])).sum().full_tensor().backward()
        check_close(findings, [x.grad.full_tensor(), y.grad.full_tensor()], [one.grad, two.grad], f"{name}: gradients")  # type: ignore[list-item,union-attr]
    findings.settle()


def test_operations_that_reduce(world: hd.World) -> None:
    """Sums, means, maxima, norms and softmax, along the dimension that is sharded and the other one."""
    findings, mesh = Findings(world.comm), _mesh(world)
    whole = (torch.arange(35, dtype=torch.float64).view(7, 5) * 0.37).sin()
    for placement, dim in product((Shard(0), Shard(1)), (0, 1)):
        x = distribute_tensor(whole, mesh, [placement])
        for name in ("sum", "mean", "amax", "amin", "softmax", "var", "argmax"):
            got = getattr(x, name)(dim).full_tensor()
            check_close(findings, [got], [getattr(whole, name)(dim)], f"{name} along {dim} of {placement}")
        for name in ("sum", "mean", "max", "norm"):
            check_close(
                findings, [getattr(x, name)().full_tensor()], [getattr(whole, name)()], f"{name} of {placement}"
            )
    findings.settle()
