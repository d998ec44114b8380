"""Small models and their training on one process, which training on all ranks must equal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from collective import Findings
    from mpi4py import MPI

__all__ = ["Batch", "batches", "check_close", "check_same_on_all_ranks", "mlp", "mse", "shard_of", "train"]

Batch = tuple[Tensor, Tensor]  # inputs and targets, one row a sample

INPUTS, HIDDEN, OUTPUTS = 5, 7, 3  # no multiples of 2 or 3, so that shards are uneven


def mlp(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Three layers; the same weights on every rank that gives the same seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [
            nn.Linear(INPUTS, HIDDEN),
            nn.Tanh(),
            nn.Linear(HIDDEN, HIDDEN),
            nn.Tanh(),
            nn.Linear(HIDDEN, OUTPUTS),
        ]
        return nn.Sequential(*layers).to(dtype)


def batches(count: int, rows: int, dtype: torch.dtype = torch.float64) -> list[Batch]:
    """`count` batches of `rows` samples, the same on every rank."""
    draw = torch.Generator().manual_seed(1)
    shapes = (rows, INPUTS), (rows, OUTPUTS)
    return [tuple(torch.randn(s, generator=draw, dtype=torch.float64).to(dtype) for s in shapes) for _ in range(count)]  # type: ignore[misc]


def shard_of(batch: Batch, rank: int, size: int) -> Batch:
    """This rank's rows of a batch whose rows are a multiple of `size`."""
    x, y = batch
    rows = len(x) // size
    return x[rank * rows : (rank + 1) * rows], y[rank * rows : (rank + 1) * rows]


def mse(model: Callable[[Tensor], Tensor], batch: Batch) -> Tensor:
    return functional.mse_loss(model(batch[0]), batch[1])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: Iterable[Batch]) -> list[float]:
    """One step a batch; the losses."""
    losses = []
    for batch in data:
        optimizer.zero_grad()
        loss = mse(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def check_close(
    findings: Findings, got: Iterable[Tensor], expected: Iterable[Tensor], message: str, tolerance: float = 1e-12
) -> None:
    """Both have as many tensors, of equal dtypes and shapes, and of values that rounding alone tells apart."""
    for i, (x, y) in enumerate(zip(got, expected, strict=True)):
        if x.dtype != y.dtype or x.shape != y.shape:
            findings.check(
                False, f"{message}, tensor {i}: {x.dtype} {tuple(x.shape)}, expected {y.dtype} {tuple(y.shape)}"
            )
            continue
        shown = f"{x.flatten()[:3].tolist()} ..., expected {y.flatten()[:3].tolist()} ..."
        findings.check(torch.allclose(x, y, rtol=tolerance, atol=tolerance), f"{message}, tensor {i}: {shown}")


def check_same_on_all_ranks(findings: Findings, comm: MPI.Comm, tensors: Sequence[Tensor], message: str) -> None:
    """Every bit: replicas that differ in rounding drift apart."""
    digests = [
        sha256(x.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest() for x in tensors
    ]
    of_ranks = comm.allgather(digests)
    findings.check(all(each == of_ranks[0] for each in of_ranks), f"{message}: the bits differ between ranks")
