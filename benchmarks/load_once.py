"""staging.load of tensors that all ranks want whole: every rank reads, it is read once a job, or shared by the node.

mpirun -n 2 python benchmarks/load_once.py --folder DIR         DIR on a disk, with space for the file

The file is in the page cache: what is measured on one node is how fast ranks get what the system has read once.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import harness
import torch
from mpi4py import MPI
from results import show_size

import hpcdist as hd

METHODS: dict[str, dict[str, Any]] = {
    "every rank reads": {"once_per": "rank"},
    "control: every rank reads": {"once_per": "rank"},
    "default": {},
    "read once a job": {"once_per": "job"},
    "one copy a node": {"shared": True},
}


def bytes_read() -> int:
    """Return the bytes that this process has read with system calls so far, from the page cache or the disk."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["rchar"])


def proportional_memory() -> int:
    """Return the bytes of memory of this process: of what it shares with others, its part."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def once(world: hd.World, path: Path, expected: Mapping[str, torch.Tensor], options: dict[str, Any]) -> tuple[int, ...]:
    """Check a load; return (bytes read, sent, memory that it added) of all ranks. Collective."""
    comm = world.comm
    said = hd.plan(hd.staging.load, path, dim=None, **options)
    hd.memory.empty_cache()
    ctypes.CDLL(None).malloc_trim(0)
    comm.Barrier()
    before, memory = bytes_read(), proportional_memory()
    got = hd.staging.load(path, dim=None, **options)
    read = comm.allreduce(bytes_read() - before)
    right = all(torch.equal(got[name], x) for name, x in expected.items())
    comm.Barrier()
    added = comm.allreduce(proportional_memory() - memory)
    if not all(comm.allgather(right)):
        raise SystemExit(f"wrong data with {options}")
    if abs(read - said.file_bytes_of_all) > 2**20 * comm.size:  # and its structure
        raise SystemExit(f"{read:,} bytes were read with {options}, expected {said.file_bytes_of_all:,}")
    return read, said.sent_by_all, added


def seconds(world: hd.World, path: Path, options: dict[str, Any]) -> float:
    """Return the time of one call on the slowest rank. Collective."""
    world.comm.Barrier()
    start = time.perf_counter()
    hd.staging.load(path, dim=None, **options)
    return float(world.comm.allreduce(time.perf_counter() - start, op=MPI.MAX))


def run(world: hd.World, asked: argparse.Namespace, folder: Path) -> None:
    torch.set_num_threads(1)
    for size in asked.sizes:
        for count in (1, 16):
            path = folder / f"{count}.h5"
            tensors = {f"x{i}": torch.arange(size // count // 8) + i for i in range(count)}
            hd.staging.save(path, tensors, None)
            moved = {name: once(world, path, tensors, options) for name, options in METHODS.items()}
            times: dict[str, list[float]] = {name: [] for name in METHODS}
            for round_ in range(asked.rounds):
                for name in random.Random(round_).sample(list(METHODS), len(METHODS)):
                    times[name].append(seconds(world, path, METHODS[name]))
            if world.rank:
                continue
            print(f"\nload, np {world.world_size}, {show_size(size)} in {count} tensors")
            print(f"{'':28}{'ms':>8}{'ratio':>8}{'MiB read':>10}{'sent':>8}{'memory':>8}")
            for name, samples in times.items():
                pairs = [a / b for a, b in zip(samples, times["every rank reads"], strict=True)]
                mib = "".join(f"{n / 2**20:{width}.0f}" for n, width in zip(moved[name], (10, 8, 8), strict=True))
                print(
                    f"{name:28}{statistics.median(samples) * 1e3:8.1f}{statistics.median(pairs):8.2f}{mib}", flush=True
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=harness.sizes, default="1M,64M,256M", help="bytes of all tensors (%(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="calls of each (%(default)s)")
    parser.add_argument("--folder", type=Path, default=tempfile.gettempdir(), help="folder for the file (%(default)s)")
    asked = parser.parse_args()
    with hd.init(device="cpu") as world, harness.shared_folder(world.comm, asked.folder, "load") as folder:
        run(world, asked, folder)


if __name__ == "__main__":
    main()
