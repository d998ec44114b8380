"""A linear layer whose output features are split among the ranks, with the gradients of the one-process layer.

Every rank has the same input, and its own rows of the weight, of which there need not be a multiple of the ranks.

mpirun -n 3 python -m hpcdist.examples.column_parallel
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import hpcdist as hd

__all__ = ["ColumnParallelLinear", "main"]

BATCH, INPUTS, OUTPUTS = 5, 4, 10
ROWS = hd.Split(0)  # of the weight, and of the bias: output features


class ColumnParallelLinear(nn.Module):
    """y = x W^T + b, with the same x and the same y on every rank, and W and b in parts. Collective, backward too.

    Let P ranks hold W_r and b_r, so that y = (y_0 ... y_{P-1}) with y_r = x W_r^T + b_r, and let G = dL/dy be the
    gradient of the loss, which every rank has, since every rank has the same y and works out the same loss.

    - dL/dW_r = G_r^T x and dL/db_r = the column sums of G_r: rank r has all that it needs. But concat, which serves
      any use of y, cannot know that the P losses are one: it brings y_r's gradients from all ranks together and adds
      them up, which differentiates L_0 + ... + L_{P-1} = P L. So each rank contributes G / P.
    - dL/dx = G W = the sum over r of G_r W_r: rank r has one term, as its x reached the loss through y_r alone. The
      terms are added up by an all_reduce.

    With both inside the layer every rank calls loss.backward() as one process does, and layers can follow each other.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        # Clones, since parts of the layer's own memory would keep all of it.
        self.weight = nn.Parameter(hd.local(layer.weight.detach(), ROWS).clone())
        self.bias = nn.Parameter(hd.local(layer.bias.detach(), ROWS).clone())

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x = x.view_as(x)  # so that the hook sees the gradient of this use of x alone
            x.register_hook(sum_over_ranks)  # type: ignore[no-untyped-call]
        y: Tensor = hd.concat(functional.linear(x, self.weight, self.bias), dim=-1)
        if y.requires_grad:
            y.register_hook(share_of_rank)  # type: ignore[no-untyped-call]
        return y


def share_of_rank(grad: Tensor) -> Tensor:
    return grad / dist.get_world_size()


def sum_over_ranks(grad: Tensor) -> Tensor:
    total = grad.clone(memory_format=torch.contiguous_format)  # a hook must not change what it is given
    dist.all_reduce(total)
    return total


def main() -> None:
    """Forward and backward, beside the layer on one process. Collective over all ranks of the job."""
    with hd.init() as world:
        torch.manual_seed(0)  # the same layer and the same data on all ranks
        whole = nn.Linear(INPUTS, OUTPUTS, dtype=torch.float64).to(world.device)
        x = torch.randn(BATCH, INPUTS, dtype=torch.float64).to(world.device)
        target = torch.randn(BATCH, OUTPUTS, dtype=torch.float64).to(world.device)

        y, dx, dw, db = run(ColumnParallelLinear(whole), x, target)
        one_y, one_dx, one_dw, one_db = run(whole, x, target)

        # Each rank compares what it has, and a difference on one of them ends the job.
        pairs = {
            "output": (y, one_y),
            "input's gradient": (dx, one_dx),
            "weight's gradient": (dw, hd.local(one_dw, ROWS)),
            "bias's gradient": (db, hd.local(one_db, ROWS)),
        }
        for got, want in pairs.values():
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)
        shapes = world.comm.gather([tuple(got.shape) for got, _ in pairs.values()])  # on rank 0
        if shapes is not None:
            for name, each in zip(pairs, zip(*shapes, strict=True), strict=True):
                print(f"{name}: {' '.join(map(str, each))}, as on one process")


def run(layer: nn.Linear | ColumnParallelLinear, x: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    """The output, and the loss's gradients by input, weight and bias; loss.backward() would leave them in .grad."""
    x = x.clone().requires_grad_()
    y = layer(x)
    loss = functional.mse_loss(y, target)
    return (y, *torch.autograd.grad(loss, (x, layer.weight, layer.bias)))


if __name__ == "__main__":
    main()
