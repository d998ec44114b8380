"""Train two towers with a contrastive loss over the embeddings of all ranks, as CLIP does, with unequal batches.

Each rank embeds its own pairs. `hd.concat` gives every rank the embeddings of all, of batches that differ in size, and
sends their gradients back. One process with the whole batches computes the same gradients.

mpirun -n 3 python -m hpcdist.examples.contrastive
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.nn.parallel import DistributedDataParallel

import hpcdist as hd

PAIRS = 13  # of all ranks together: not all batches are equal


class Towers(nn.Module):
    """An encoder of images, and one of texts, into one space, in float64; the same weights on every rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = (nn.Sequential(nn.Linear(n, 16), nn.Tanh(), nn.Linear(16, 8)).double() for n in (6, 4))

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
        return normalize(self.image(images)), normalize(self.text(texts))


def main() -> None:
    """Train, and compare the gradients of each step with one process'. Collective over all ranks of the job."""
    parser = argparse.ArgumentParser(prog="python -m hpcdist.examples.contrastive")
    parser.add_argument("--steps", type=int, default=5, help="steps of the training (default 5)")
    steps = parser.parse_args().steps
    with hd.init() as world:
        alone = Towers().to(world.device)
        model = DistributedDataParallel(Towers().to(world.device))
        optimizers = [torch.optim.SGD(towers.parameters(), lr=1.0) for towers in (model, alone)]
        for step in range(steps):
            pairs = [part.to(world.device) for part in batch(step)]
            for optimizer in optimizers:
                optimizer.zero_grad()

            images, texts = model(*(hd.local(part, hd.Split(0)) for part in pairs))
            loss = contrastive(hd.concat(images), hd.concat(texts))  # the same on every rank
            # concat adds the gradients of all ranks' losses, one for each rank; DDP divides by the number of ranks.
            loss.backward()  # type: ignore[no-untyped-call]

            contrastive(*alone(*pairs)).backward()  # type: ignore[no-untyped-call]
            for got, want in zip(model.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(got.grad, want.grad, rtol=1e-10, atol=1e-13)
            for optimizer in optimizers:
                optimizer.step()
            if world.rank == 0:
                print(f"step {step}: loss {loss.item():.4f}, the gradients of one process")


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return the pairs of a step: of one hidden thing, what an image and what a text show."""
    generator = torch.Generator().manual_seed(step)
    hidden = torch.rand(PAIRS, 4, generator=generator, dtype=torch.float64)
    return torch.cat([hidden, hidden[:, :2] ** 2], 1), hidden.cos()


def contrastive(images: Tensor, texts: Tensor) -> Tensor:
    """Return CLIP's loss: each image's own text among all texts, and each text's own image."""
    logits = images @ texts.T / 0.1
    own = torch.arange(len(logits), device=logits.device)
    return (cross_entropy(logits, own) + cross_entropy(logits.T, own)) / 2


if __name__ == "__main__":
    main()
