"""Pass a large tensor through a file to another layout.

Use this for tensors that fill the memory of a rank, or that must outlive the job. The file is in the staging folder,
which all nodes share: hd.init(staging=...) or HPCDIST_STAGING.

mpirun -n 2 python -m hpcdist.examples.through_a_file --mib 8
"""

from __future__ import annotations

import argparse
import os

import torch

import hpcdist as hd
from hpcdist import staging

ROWS, COLUMNS = 256, 1024  # of 4 bytes: 1 MiB


def main() -> None:
    """Redistribute from rows to columns. No rank holds the whole. Collective over all ranks of the job."""
    parser = argparse.ArgumentParser(prog="python -m hpcdist.examples.through_a_file")
    parser.add_argument("--mib", type=int, default=8, help="size of the tensor (default 8)")
    shape = (ROWS * parser.parse_args().mib, COLUMNS)
    with hd.init() as world:
        rows, columns = (hd.Split(dim).boxes(shape, world.world_size)[world.rank] for dim in (0, 1))
        path = os.path.join(world.staging, "through_a_file.h5")

        # Each rank writes its rows. The result is an ordinary file with one dataset, which outlives the job.
        x = part(rows, world.device)
        staging.save(path, {"x": x}, dim=0)

        # Any number of ranks may read it, in this job or another, by dim and counts or by one box per rank.
        y = staging.load(path, "x", dim=1, device=world.device)
        one_row = hd.layout.Box(offset=(world.rank, 0), shape=(1, COLUMNS))
        row = staging.load(path, "x", box=one_row, device=world.device)

        if world.rank == 0:  # load has returned, so every rank has its data
            os.unlink(path)
        assert torch.equal(y, part(columns, world.device)) and torch.equal(row, part(one_row, world.device))
        ranks = world.comm.gather(f"saved {tuple(x.shape)}, loaded {tuple(y.shape)}")  # on rank 0
        for rank, text in enumerate(ranks or ()):
            print(f"rank {rank}: {text}")


def part(box: hd.layout.Box, device: torch.device) -> torch.Tensor:
    """Return a part of the tensor, whose values are element numbers modulo 2**24, exact in float32."""
    rows, columns = (torch.arange(o, o + n, device=device) for o, n in zip(box.offset, box.shape, strict=True))
    return ((rows[:, None] * COLUMNS + columns) % 2**24).float()


if __name__ == "__main__":
    main()
