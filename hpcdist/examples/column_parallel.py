"""Split the output features of a linear layer among the ranks. The gradients equal those of one process.

Every rank has the same input and its own rows of the weight. Ranks may have different numbers of rows.

mpirun -n 3 python -m hpcdist.examples.column_parallel
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import hpcdist as hd

BATCH, INPUTS, OUTPUTS = 5, 4, 10
ROWS = hd.Split(0)  # of the weight, and of the bias: output features


class ColumnParallelLinear(nn.Module):
    """y = x W^T + b, with the same x and y on every rank, and W and b in parts. Collective, also in backward.

    Let P ranks hold W_r and b_r, so that y = (y_0 ... y_{P-1}) with y_r = x W_r^T + b_r. Let G = dL/dy be the gradient
    of the loss. It is the same on every rank, because every rank computes the same loss from the same y.

    - dL/dW_r = G_r^T x, and dL/db_r = the column sums of G_r. Rank r can compute both. But the backward pass of concat
      allows for a different loss on every rank: it sums the gradients of y_r over all ranks, which differentiates
      L_0 + ... + L_{P-1} = P L. Therefore each rank contributes G / P.
    - dL/dx = G W = the sum over r of G_r W_r. Rank r has one term, because its x affects the loss through y_r alone.
      An all_reduce sums the terms.

    The layer does both. Therefore every rank calls loss.backward() as one process does, and layers can be stacked.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        # Clones: a view would keep the memory of the whole layer.
        self.weight = nn.Parameter(hd.local(layer.weight.detach(), ROWS).clone())
        self.bias = nn.Parameter(hd.local(layer.bias.detach(), ROWS).clone())

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x = x.view_as(x)  # the hook then receives only the gradient of this use of x
            x.register_hook(sum_over_ranks)  # type: ignore[no-untyped-call]
        y: Tensor = hd.concat(functional.linear(x, self.weight, self.bias), dim=-1)
        if y.requires_grad:
            y.register_hook(share_of_rank)  # type: ignore[no-untyped-call]
        return y


def share_of_rank(grad: Tensor) -> Tensor:
    return grad / dist.get_world_size()


def sum_over_ranks(grad: Tensor) -> Tensor:
    total = grad.clone(memory_format=torch.contiguous_format)  # a hook must not change its argument
    dist.all_reduce(total)
    return total


def main() -> None:
    """Run forward and backward, and compare with the layer on one process. Collective over all ranks of the job."""
    with hd.init() as world:
        torch.manual_seed(0)  # the same layer and the same data on all ranks
        whole = nn.Linear(INPUTS, OUTPUTS, dtype=torch.float64).to(world.device)
        x = torch.randn(BATCH, INPUTS, dtype=torch.float64).to(world.device)
        target = torch.randn(BATCH, OUTPUTS, dtype=torch.float64).to(world.device)

        one_y, one_dx, one_dw, one_db = run(whole, x, target)
        expected = (one_y, one_dx, hd.local(one_dw, ROWS), hd.local(one_db, ROWS))
        names = ("output", "input's gradient", "weight's gradient", "bias's gradient")
        for name, got, want in zip(names, run(ColumnParallelLinear(whole), x, target), expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)  # a difference on any rank ends the job
            shapes = world.comm.gather(tuple(got.shape))  # on rank 0
            if shapes is not None:
                print(f"{name}: {' '.join(map(str, shapes))}, as on one process")


def run(layer: nn.Linear | ColumnParallelLinear, x: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    """Return the output, and the gradients of the loss with respect to input, weight and bias."""
    x = x.clone().requires_grad_()
    y = layer(x)
    loss = functional.mse_loss(y, target)
    return (y, *torch.autograd.grad(loss, (x, layer.weight, layer.bias)))


if __name__ == "__main__":
    main()
