"""parallelize_module: layers split by columns and rows, sequence parallel, embeddings and losses, as on one process."""

from copy import deepcopy

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from training import check_close

WIDTH, HIDDEN, WORDS = 6, 12, 11


def _mesh(world):
    return init_device_mesh("cpu", (world.world_size,))


class _Block(nn.Module):
    """The half of a transformer's block that has the most weights."""

    def __init__(self, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(self.norm(x))))


def _block(hidden=HIDDEN):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return _Block(hidden).double()


def _input(tokens=3):
    return torch.randn(2, tokens, WIDTH, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def _full(x):
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach()


def _check(findings, model, alone, x, steps=2):
    """Outputs, gradients and updates are those of one process."""
    optimizers = [torch.optim.Adam(m.parameters(), 0.01) for m in (model, alone)]
    for step in range(steps):
        results = []
        for m, optimizer in zip((model, alone), optimizers, strict=True):
            mine = x.clone().requires_grad_()
            optimizer.zero_grad()
            y = m(mine)
            (y**2).sum().backward()
            results.append([_full(y), _full(mine.grad), *(_full(p.grad) for p in m.parameters())])
            optimizer.step()
        check_close(findings, *results, f"step {step}")
    check_close(findings, map(_full, model.parameters()), map(_full, alone.parameters()), "parameters")


def test_sequence_parallel(world, size, findings):
    """The norm computes its tokens alone; they are gathered for the columns, reduced and scattered after the rows."""
    alone = nn.Sequential(_block(4 * size), _block(4 * size))
    model, mesh = deepcopy(alone), _mesh(world)
    styles = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    inputs = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1))
    parallelize_module(model, mesh, {f"{i}.{name}": style for i in (0, 1) for name, style in styles.items()})
    parallelize_module(model, mesh, {"0": inputs})
    _check(findings, model, alone, _input(2 * size))
