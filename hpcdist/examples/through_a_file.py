"""Pass a large tensor through a file to another layout.

Use this for tensors that fill the memory of a rank, or that must outlive the job. The files are in the staging folder,
which all nodes share: hd.init(staging=...) or HPCDIST_STAGING.

mpirun -n 2 python -m hpcdist.examples.through_a_file --mib 8
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile

import torch
from torch import Tensor

import hpcdist as hd
from hpcdist import staging

__all__ = ["main"]

ROWS, COLUMNS = 256, 1024  # of 4 bytes: 1 MiB


def main() -> None:
    """Pass the tensor on, and compare with one process. Collective over all ranks of the job."""
    parser = argparse.ArgumentParser(prog="python -m hpcdist.examples.through_a_file")
    parser.add_argument("--mib", type=int, default=8, help="size of the tensor (default 8)")
    shape = (ROWS * parser.parse_args().mib, COLUMNS)
    with hd.init() as world:
        to_another_layout(shape, world)


def to_another_layout(shape: tuple[int, int], world: hd.World) -> None:
    """Redistribute from rows to columns. No rank holds the whole."""
    rows, columns = (hd.Split(dim).boxes(shape, world.world_size) for dim in (0, 1))
    # All ranks use the folder that rank 0 makes.
    folder = world.comm.bcast(tempfile.mkdtemp(dir=world.staging) if world.rank == 0 else None)
    path = os.path.join(folder, "large.h5")
    try:
        # Each rank writes its rows. The result is an ordinary file with one dataset, which outlives the job.
        staging.save(path, {"x": part(rows[world.rank], world.device)}, dim=0)

        # Any number of ranks may read it, in this job or another, by dim and counts or by one box per rank.
        got = staging.load(path, "x", dim=1, device=world.device)
        compare(got, columns[world.rank], world)

        row = hd.layout.Box(offset=(world.rank, 0), shape=(1, COLUMNS))
        compare(staging.load(path, "x", box=row, device=world.device), row, world)
    finally:
        if world.rank == 0:  # load has returned, so every rank has its data
            shutil.rmtree(folder)
    if world.rank == 0:
        for name, boxes in (("saved", rows), ("loaded", columns)):
            print(f"{name}: " + ", ".join(str(box.shape) for box in boxes))
        print("each part equals that of one process")


def part(box: hd.layout.Box, device: torch.device) -> Tensor:
    """Return a part of the tensor, whose values are element numbers modulo 2**24, exact in float32."""
    rows, columns = (torch.arange(o, o + n, device=device) for o, n in zip(box.offset, box.shape, strict=True))
    return ((rows[:, None] * COLUMNS + columns) % 2**24).float()


def compare(got: Tensor, box: hd.layout.Box, world: hd.World) -> None:
    if not torch.equal(got, part(box, world.device)):
        raise RuntimeError(f"rank {world.rank} did not get {box} of the tensor")


if __name__ == "__main__":
    main()
