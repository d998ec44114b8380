"""FSDP2: fully_shard, which gathers parameters, reduces and scatters gradients, as training on one process."""

from __future__ import annotations

import pytest
import torch
from collective import Findings
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from training import Batch, batches, check_close, mlp, mse, shard_of, train

import hpcdist as hd

pytestmark = pytest.mark.mpi

ROWS = 2  # of a batch, on each rank


def _sharded(model: nn.Sequential, **kwargs: object) -> FSDPModule:
    """Each layer, and the whole, as one would a transformer."""
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **kwargs)  # type: ignore[call-overload]
    return fully_shard(model, **kwargs)  # type: ignore[call-overload]


def _data(world: hd.World, count: int = 4) -> list[Batch]:
    return batches(count, ROWS * world.world_size)


def _own(world: hd.World, data: list[Batch]) -> list[Batch]:
    return [shard_of(batch, world.rank, world.world_size) for batch in data]


def _whole(tensors: object) -> list[Tensor]:
    return [x.full_tensor().detach() for x in tensors]  # type: ignore[attr-defined]


def test_training_equals_that_of_one_process(world: hd.World) -> None:
    """Layers of 7 and 3 rows: shards are uneven, and with more than 3 ranks some are empty."""
    findings, data = Findings(world.comm), _data(world)
    alone, model = mlp(), mlp()
    _sharded(model)
    for name, p in model.named_parameters():
        findings.check(isinstance(p, DTensor), f"{name} is not sharded")
        rows = torch.zeros(len(p)).chunk(world.world_size)
        expected = len(rows[world.rank]) if world.rank < len(rows) else 0
        findings.check(len(p.to_local()) == expected, f"{name}: {len(p.to_local())} rows, expected {expected}")
    train(alone, torch.optim.Adam(alone.parameters(), 0.01), data)
    train(model, torch.optim.Adam(model.parameters(), 0.01), _own(world, data))
    check_close(findings, _whole(model.parameters()), alone.parameters(), "parameters")
    findings.settle()


def _in_bf16(world: hd.World, reduce_dtype: torch.dtype) -> list[Tensor]:
    """The gradients of one process that computes each rank's in bfloat16 and sums them in `reduce_dtype`."""
    size, sums = world.world_size, []
    for rank in range(size):
        model = mlp(dtype=torch.float32).bfloat16()
        x, y = shard_of(batches(1, ROWS * size, torch.float32)[0], rank, size)
        mse(lambda x: model(x.bfloat16()), (x, y.bfloat16())).backward()  # noqa: B023
        found = [p.grad.to(reduce_dtype) for p in model.parameters()]  # type: ignore[union-attr]
        sums = found if not sums else [a + b for a, b in zip(sums, found, strict=True)]
    return [(x / size).float() for x in sums]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_mixed_precision(world: hd.World, dtype: torch.dtype) -> None:
    """Parameters travel and compute in bfloat16, gradients travel in `dtype`, the shards stay float32."""
    findings = Findings(world.comm)
    model = mlp(dtype=torch.float32)
    _sharded(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=dtype))
    x, y = _own(world, batches(1, ROWS * world.world_size, torch.float32))[0]
    mse(model, (x, y.bfloat16())).backward()
    got = _whole(p.grad for p in model.parameters())
    check_close(findings, got, _in_bf16(world, dtype), "gradients", 1e-6 if dtype == torch.float32 else 0.02)
    findings.settle()


def test_a_mesh_of_two_dimensions(world: hd.World) -> None:
    """Hybrid: sharded within one dimension, replicated over the other; 2 x n/2 where that is whole."""
    size = world.world_size
    rows = 2 if size % 2 == 0 else size
    mesh = init_device_mesh("cpu", (rows, size // rows), mesh_dim_names=("replicate", "shard"))
    findings, data = Findings(world.comm), _data(world)
    alone, model = mlp(), mlp()
    _sharded(model, mesh=mesh)
    train(alone, torch.optim.Adam(alone.parameters(), 0.01), data)
    train(model, torch.optim.Adam(model.parameters(), 0.01), _own(world, data))
    check_close(findings, _whole(model.parameters()), alone.parameters(), "parameters")
    findings.settle()


def test_parameters_unsharded_ahead(world: hd.World) -> None:
    """unshard(async_op=True) and prefetching: the gathers of several layers are under way at once."""
    findings, data = Findings(world.comm), _data(world)
    alone, model = mlp(), mlp()
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    _sharded(model)
    layers[0].set_modules_to_forward_prefetch(layers[1:])  # type: ignore[operator]
    layers[2].set_modules_to_backward_prefetch(layers[:2][::-1])  # type: ignore[operator]
    optimizer = torch.optim.Adam(model.parameters(), 0.01)  # of the shards
    handles = [layer.unshard(async_op=True) for layer in layers]  # type: ignore[operator]
    for handle in reversed(handles):
        handle.wait()
    train(alone, torch.optim.Adam(alone.parameters(), 0.01), data)
    train(model, optimizer, _own(world, data))
    check_close(findings, _whole(model.parameters()), alone.parameters(), "parameters")
    findings.settle()
