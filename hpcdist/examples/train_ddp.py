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

__all__ = ["main"]

SAMPLES, BATCH = 96, 24  # samples of all ranks together: 1, 2, 3, 4, 6, 8, 12 or 24 ranks can share a batch


def main() -> None:
    """Train, and compare with one process. Collective over all ranks of the job."""
    epochs = options().epochs
    with hd.init() as world:  # in place of init_process_group() and torchrun's variables
        if BATCH % world.world_size:
            raise ValueError(f"a batch of {BATCH} samples cannot be shared equally by {world.world_size} ranks")
        data = dataset()
        model = DistributedDataParallel(network().to(world.device))
        sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data, shuffle=False)
        loader = DataLoader(data, BATCH // world.world_size, sampler=sampler)
        losses = train(model, loader, epochs, world.device)

        if world.rank == 0:
            share = f"{BATCH // world.world_size} of the {BATCH} samples of a step"
            print(f"{world.world_size} ranks, backend {dist.get_backend()}: each has {share}")
            for epoch, loss in enumerate(losses):
                print(f"epoch {epoch}: loss {loss:.4f}")
        compare(model.module, data, epochs, world.device)
        if world.rank == 0:
            print("one process learns the same weights")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3, help="passes over the samples (default 3)")
    return parser.parse_args()


def network() -> nn.Sequential:
    """Return a model with the same weights on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))


def dataset() -> Dataset[tuple[Tensor, ...]]:
    """Return points and a smooth function of them."""
    x = torch.rand(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
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


def compare(model: nn.Module, data: Dataset[tuple[Tensor, ...]], epochs: int, device: torch.device) -> None:
    """Raise an AssertionError unless whole batches on this rank alone give the same weights."""
    alone = network().to(device)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for _ in range(epochs):
        for x, y in DataLoader(data, BATCH):
            optimizer.zero_grad()
            loss = functional.mse_loss(alone(x.to(device)), y.to(device))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    for got, want in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    main()
