"""Train a model with DistributedDataParallel: torch's own program, with one line that starts it under MPI.

The ranks share the samples of each batch, and average the gradients. One process with the whole batches learns the same
weights, up to rounding.

mpirun -n 2 python -m hpcdist.examples.train_ddp
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import hpcdist as hd

SAMPLES, BATCH = 48, 12  # per rank

Samples = Dataset[tuple[Tensor, ...]]


def main() -> None:
    """Train, and compare with one process. Collective over all ranks of the job."""
    parser = argparse.ArgumentParser(prog="python -m hpcdist.examples.train_ddp")
    parser.add_argument("--epochs", type=int, default=3, help="passes over the samples (default 3)")
    epochs = parser.parse_args().epochs
    with hd.init() as world:  # in place of init_process_group() and torchrun's variables
        data = dataset(SAMPLES * world.world_size)
        model = DistributedDataParallel(network().to(world.device))
        sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data, shuffle=False)
        losses = train(model, DataLoader(data, BATCH, sampler=sampler), epochs, world.device)
        if world.rank == 0:
            print(f"{world.world_size} ranks, backend {dist.get_backend()}: each has {BATCH} samples of a step")
            for epoch, loss in enumerate(losses):
                print(f"epoch {epoch}: loss {loss:.4f}")

        alone = network().to(world.device)
        train(alone, DataLoader(data, BATCH * world.world_size), epochs, world.device)
        for got, want in zip(model.module.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        if world.rank == 0:
            print("one process learns the same weights")


def network() -> nn.Sequential:
    """Return a model with the same weights on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))


def dataset(samples: int) -> Samples:
    """Return points and a smooth function of them."""
    x = torch.rand(samples, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (3 * x).sin().mean(1, keepdim=True))


def train(model: nn.Module, loader: DataLoader[tuple[Tensor, ...]], epochs: int, device: torch.device) -> list[float]:
    """Return the mean loss of each epoch, over all ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    means = []
    for _ in range(epochs):
        total = torch.zeros((), device=device)
        for x, y in loader:
            optimizer.zero_grad()
            loss = functional.mse_loss(model(x.to(device)), y.to(device))
            # In DistributedDataParallel this averages the gradients of all ranks.
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total, op=dist.ReduceOp.AVG)
        means.append(total.item() / len(loader))
    return means


if __name__ == "__main__":
    main()
