"""Small models and their training on one process, which training on all ranks must equal."""

from hashlib import sha256

import torch
from torch import nn
from torch.nn import functional

INPUTS, HIDDEN, OUTPUTS = 5, 7, 3  # no multiples of 2 or 3, so that shards are uneven


def mlp(seed=0, dtype=torch.float64):
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


def batches(count, rows, dtype=torch.float64):
    """`count` batches of `rows` samples, the same on every rank."""
    draw = torch.Generator().manual_seed(1)
    shapes = (rows, INPUTS), (rows, OUTPUTS)
    return [tuple(torch.randn(s, generator=draw, dtype=torch.float64).to(dtype) for s in shapes) for _ in range(count)]


ROWS = 2  # of a batch, on each rank


def data_of(world, count=4):
    """Batches for all ranks, and this rank's rows of them."""
    data = batches(count, ROWS * world.world_size)
    return data, [shard_of(batch, world.rank, world.world_size) for batch in data]


def shard_of(batch, rank, size):
    """This rank's rows of a batch whose rows are a multiple of `size`."""
    x, y = batch
    rows = len(x) // size
    return x[rank * rows : (rank + 1) * rows], y[rank * rows : (rank + 1) * rows]


def mse(model, batch):
    return functional.mse_loss(model(batch[0]), batch[1])


def train(model, optimizer, data):
    """One step a batch; the losses."""
    losses = []
    for batch in data:
        optimizer.zero_grad()
        loss = mse(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def check_close(findings, got, expected, message, tolerance=1e-12):
    """Both have as many tensors, of equal dtypes and shapes, and of values that rounding alone tells apart."""
    for i, (x, y) in enumerate(zip(got, expected, strict=True)):
        if x.dtype != y.dtype or x.shape != y.shape:
            findings.check(
                False, f"{message}, tensor {i}: {x.dtype} {tuple(x.shape)}, expected {y.dtype} {tuple(y.shape)}"
            )
            continue
        shown = f"{x.flatten()[:3].tolist()} ..., expected {y.flatten()[:3].tolist()} ..."
        findings.check(torch.allclose(x, y, rtol=tolerance, atol=tolerance), f"{message}, tensor {i}: {shown}")


def check_same_on_all_ranks(findings, comm, tensors, message):
    """Every bit: replicas that differ in rounding drift apart."""
    digests = [
        sha256(x.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest() for x in tensors
    ]
    of_ranks = comm.allgather(digests)
    findings.check(all(each == of_ranks[0] for each in of_ranks), f"{message}: the bits differ between ranks")
