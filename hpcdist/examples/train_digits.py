"""Train a network on the handwritten digits of scikit-learn, in batches of a file that the ranks share.

Each batch is split over the ranks. The order of the samples does not depend on the number of ranks, so the losses are
the same on any number, also if the training goes on after a stop, on another number.

mpirun -n 2 python -m hpcdist.examples.train_digits FOLDER
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import h5py
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import hpcdist as hd

BATCH = 64  # of all ranks together


def main() -> None:
    """Train, and print the loss of each epoch. Collective over all ranks of the job."""
    parser = argparse.ArgumentParser(prog="python -m hpcdist.examples.train_digits")
    parser.add_argument("folder", type=Path, help="where digits.h5 and state.pt are, or will be")
    parser.add_argument("--epochs", type=int, default=3, help="passes over the samples (default 3)")
    parser.add_argument("--stop-after", type=int, help="save and end after this number of steps")
    options = parser.parse_args()
    with hd.init() as world:
        file, saved = options.folder / "digits.h5", options.folder / "state.pt"
        if world.rank == 0 and not file.exists():
            write(file)
        world.comm.Barrier()
        data = hd.data.open(file, fields=["x", "y"])
        loader = hd.data.Loader(data, BATCH, seed=0, split_batches=True, even="short", device=world.device)
        model = network().to(world.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        total = torch.zeros((), dtype=torch.float64, device=world.device)  # of the losses of this epoch
        if saved.exists():
            weights, moments, position, total = torch.load(saved, map_location=world.device)
            model.load_state_dict(weights)
            optimizer.load_state_dict(moments)
            loader.load_state_dict(position)

        steps = 0
        for epoch in range(loader.next_epoch, options.epochs):
            for x, y in loader.epoch(epoch):
                total += step(model, optimizer, x, y)
                steps += 1
                if steps == options.stop_after:
                    if world.rank == 0:
                        torch.save([model.state_dict(), optimizer.state_dict(), loader.state_dict(), total], saved)
                    return
            if world.rank == 0:
                print(f"epoch {epoch}: loss {total.item() / len(data):.12f}")
            total.zero_()


def write(file: Path) -> None:
    """Write the 1,797 images of 8 x 8 grey values from 0 to 1, and their digits."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        sys.exit("train_digits needs scikit-learn: pip install scikit-learn")
    digits = load_digits()
    with h5py.File(file, "w") as f:
        f["x"] = digits.data / 16
        f["y"] = digits.target


def network() -> nn.Sequential:
    """Return a network in float64, with the same weights on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).double()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Make a step with a batch, of which each rank has a part, maybe none; return the sum of its losses."""
    optimizer.zero_grad()
    loss = cross_entropy(model(x), y, reduction="sum")
    loss.backward()  # type: ignore[no-untyped-call]
    weights = list(model.parameters())
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    samples = torch.tensor(float(len(y)), dtype=loss.dtype, device=loss.device)
    flat = torch.cat([part.flatten() for part in (*gradients, loss.detach(), samples)])
    *sums, total, count = torch.split_with_sizes(hd.all_reduce(flat), [*(weight.numel() for weight in weights), 1, 1])
    for weight, gradient in zip(weights, sums, strict=True):
        weight.grad = gradient.view_as(weight) / count
    optimizer.step()
    return total[0]


if __name__ == "__main__":
    main()
