"""Redistribute an embedding table from rows to columns to tiles, and look words up in each layout.

By rows, every rank has all features of some words. By columns, it has some features of all words. By tiles, it has some
features of some words.

mpirun -n 4 python -m hpcdist.examples.embeddings
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

import hpcdist as hd

WORDS, FEATURES = 10, 6
WANTED = [7, 0, 9, 4, 4]  # words to look up, the same on all ranks


def main() -> None:
    """Redistribute the table and look words up. Collective over all ranks of the job."""
    with hd.init() as world:
        by_rows, by_columns = hd.Split(0), hd.Split(1)
        by_tiles = hd.Block(grid(world.world_size), (0, 1))

        # Each rank makes, or loads, its own rows. No rank holds the whole table.
        rows = table(by_rows.boxes((WORDS, FEATURES), world.world_size)[world.rank], world.device)

        # For one call: each rank sends every other rank only the elements that it needs.
        columns = hd.redistribute(rows, by_rows, by_columns)

        # For many calls, as in every training step: make the plan once. Its calls move only data.
        to_tiles = hd.plan(hd.redistribute, columns, by_columns, by_tiles)
        tiles = to_tiles(columns)
        received = world.comm.gather((to_tiles.received, tiles.nbytes))  # on rank 0

        words = torch.tensor(WANTED, device=world.device)
        expected = table(hd.layout.whole((WORDS, FEATURES)), world.device)[words]
        for name, layout, part in (
            ("rows", by_rows, rows),
            ("columns", by_columns, columns),
            ("tiles", by_tiles, tiles),
        ):
            boxes = layout.boxes((WORDS, FEATURES), world.world_size)
            assert torch.equal(look_up(words, part, boxes[world.rank]), expected)
            if world.rank == 0:
                print(f"by {name}: " + ", ".join(f"rank {rank} {show(box)}" for rank, box in enumerate(boxes)))
        if received is not None:
            print("columns to tiles, bytes received: " + ", ".join(f"{got} of {new}" for got, new in received))
            print(f"words {WANTED}: by rows, columns and tiles the same as in the whole table")


def grid(size: int) -> tuple[int, int]:
    """Return the most nearly square grid of ranks: 2 x 2 for 4, 3 x 1 for 3."""
    columns = next(n for n in range(math.isqrt(size), 0, -1) if size % n == 0)
    return size // columns, columns


def table(box: hd.layout.Box, device: torch.device) -> Tensor:
    """Return a part of the table, whose values encode their place: feature 3 of word 7 is 7.03."""
    words, features = (torch.arange(o, o + n, device=device) for o, n in zip(box.offset, box.shape, strict=True))
    return words[:, None] + features / 100


def look_up(words: Tensor, part: Tensor, box: hd.layout.Box) -> Tensor:
    """Return the vectors of the words on every rank, from the ranks' parts of the table. Collective."""
    first, count = box.offset[0], box.shape[0]
    here = (words >= first) & (words < first + count)
    vectors = part.new_zeros(len(words), FEATURES)
    vectors[here, box.slices()[1]] = part[words[here] - first]
    dist.all_reduce(vectors)  # each value is on one rank, with zeros on the others
    return vectors


def show(box: hd.layout.Box) -> str:
    """Return the rows and columns of a box as text: [0:5, 0:3]."""
    return f"[{', '.join(f'{part.start}:{part.stop}' for part in box.slices())}]"


if __name__ == "__main__":
    main()
