"""FSDP2: fully_shard, which gathers parameters, reduces and scatters gradients, as training on one process."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from training import ROWS, batches, check_close, data_of, mlp, mse, shard_of, train


def _sharded(model, **kwargs):
    """Each layer, and the whole, as one would a transformer."""
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **kwargs)
    return fully_shard(model, **kwargs)


def _whole(tensors):
    return [x.full_tensor().detach() for x in tensors]


@pytest.mark.parametrize("how", ["plain", "hybrid", "ahead"])
def test_training_equals_that_of_one_process(world, rank, size, findings, how):
    """Layers of 7 and 3 rows: shards are uneven, and with more than 3 ranks some are empty.

    Hybrid: sharded within one dimension, replicated over the other; 2 x n/2 where that is whole. Ahead:
    unshard(async_op=True) and prefetching; the gathers of several layers are under way at once.
    """
    (data, own) = data_of(world)
    rows = 2 if size % 2 == 0 else size
    alone, model = mlp(), mlp()
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    names = ("replicate", "shard")
    mesh = init_device_mesh("cpu", (rows, size // rows), mesh_dim_names=names) if how == "hybrid" else None
    _sharded(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)  # of the shards
    for name, p in model.named_parameters() if how == "plain" else ():
        findings.check(isinstance(p, DTensor), f"{name} is not sharded")
        rows = torch.zeros(len(p)).chunk(size)
        expected = len(rows[rank]) if rank < len(rows) else 0
        findings.check(len(p.to_local()) == expected, f"{name}: {len(p.to_local())} rows, expected {expected}")
    if how == "ahead":
        layers[0].set_modules_to_forward_prefetch(layers[1:])
        layers[2].set_modules_to_backward_prefetch(layers[:2][::-1])
        for handle in [layer.unshard(async_op=True) for layer in layers][::-1]:
            handle.wait()
    train(alone, torch.optim.Adam(alone.parameters(), 0.01), data)
    train(model, optimizer, own)
    check_close(findings, _whole(model.parameters()), alone.parameters(), "parameters")


def _in_bf16(world, reduce_dtype):
    """The gradients of one process that computes each rank's in bfloat16 and sums them in `reduce_dtype`."""
    size, sums = world.world_size, []
    for rank in range(size):
        model = mlp(dtype=torch.float32).bfloat16()
        x, y = shard_of(batches(1, ROWS * size, torch.float32)[0], rank, size)
        mse(lambda x: model(x.bfloat16()), (x, y.bfloat16())).backward()  # noqa: B023
        found = [p.grad.to(reduce_dtype) for p in model.parameters()]
        sums = found if not sums else [a + b for a, b in zip(sums, found, strict=True)]
    return [(x / size).float() for x in sums]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_mixed_precision(world, size, findings, dtype):
    """Parameters travel and compute in bfloat16, gradients travel in `dtype`, the shards stay float32."""
    model = mlp(dtype=torch.float32)
    _sharded(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=dtype))
    x, y = shard_of(batches(1, ROWS * size, torch.float32)[0], world.rank, size)
    mse(model, (x, y.bfloat16())).backward()
    got = _whole(p.grad for p in model.parameters())
    check_close(findings, got, _in_bf16(world, dtype), "gradients", 1e-6 if dtype == torch.float32 else 0.02)
