"""FSDP2: fully_shard, which gathers parameters, reduces and scatters gradients, as training on one process."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from training import check_close, data_of, mlp, train


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
    if how == "ahead":
        layers[0].set_modules_to_forward_prefetch(layers[1:])
        layers[2].set_modules_to_backward_prefetch(layers[:2][::-1])
        for handle in [layer.unshard(async_op=True) for layer in layers][::-1]:
            handle.wait()
    train(alone, torch.optim.Adam(alone.parameters(), 0.01), data)
    train(model, optimizer, own)
    check_close(findings, _whole(model.parameters()), alone.parameters(), "parameters")
