"""Predict variable-length sequences on all ranks, and gather them for metrics in their order, without padding.

Rank 0 has texts of very different lengths, and gives all ranks about the same number of tokens. A stand-in for a model
predicts. Rank 0 gathers all predictions in the order of the texts.

mpirun -n 3 python -m hpcdist.examples.sequences
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import hpcdist as hd

LENGTHS = (9, 1, 2, 3, 2, 8, 4)  # tokens of each text
COST = 0.1  # loss of a token that is wrong or missing


def main() -> None:
    """Predict, gather, and print. Collective over all ranks of the job."""
    with hd.init() as world:
        texts = corpus(world.device) if world.rank == 0 else None
        # Each rank gets consecutive texts with about the same number of tokens, so the numbers of texts differ.
        counts = hd.balance([len(target) for target in texts["targets"]]) if texts is not None else None
        mine: Any = hd.split(texts, counts=counts)  # splits the lists, whose items may have any shape

        tokens = [predict(target) for target in mine["targets"]]
        right = sum(int((got == want[: len(got)]).sum()) for got, want in zip(tokens, mine["targets"], strict=True))
        total = sum(map(len, mine["targets"]))

        # Lists are concatenated in rank order. Single values, such as the loss, become a list with one value per rank.
        # The losses are sums, because a mean of means is wrong if ranks have different numbers of tokens.
        found: Any = hd.gather({"ids": mine["ids"], "tokens": tokens, "loss": COST * (total - right)}, root=0)

        # concat gives every rank the result, for example to decide when to stop.
        sums = hd.concat({"right": right, "total": total, "texts": len(tokens)})
        accuracy = sum(sums["right"]) / sum(sums["total"])

        if world.rank == 0:
            print(f"texts and tokens of each rank: {sums['texts']}, {sums['total']}")
            for name, got in zip(found["ids"], found["tokens"], strict=True):
                print(f"{name}: {got.tolist()}")
            print(f"accuracy {accuracy:.3f}, loss {sum(found['loss']) / sum(sums['total']):.4f} a token")


def corpus(device: torch.device) -> dict[str, Any]:
    """Return the ids of the texts, and the tokens that a perfect model predicts."""
    ids = [f"text-{number}" for number in range(len(LENGTHS))]
    targets = [100 * number + torch.arange(length, device=device) for number, length in enumerate(LENGTHS)]
    return {"ids": ids, "targets": targets}


def predict(target: Tensor) -> Tensor:
    """Stand in for a model: every third token is wrong, and long texts end too early."""
    tokens = target.clone()
    tokens[2::3] = -1
    return tokens[: len(target) - len(target) // 4]


if __name__ == "__main__":
    main()
