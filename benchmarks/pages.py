"""Measure the cost of page alignment (no two ranks write the same page): saves with real pages, and with 1-byte pages.

mpirun -n 2 python benchmarks/pages.py [FOLDER]

ms: median over the rounds of the slowest rank's time; spread: its quartiles. ratio: whole pages to single bytes. With
single bytes no data move between ranks, as in a folder of one client.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import hpcdist as hd
from hpcdist import staging
from hpcdist.formats.plain import page_size

ROUNDS = 15
CASES: dict[str, Any] = {
    "1 MiB a rank": torch.arange(2**17),
    "64 MiB a rank": torch.arange(2**23),
    "300 tensors of some 200 B a rank": {f"t{i}": torch.ones(50 + i % 10) for i in range(300)},
    "300 tensors of some 20 KB a rank": {f"t{i}": torch.ones(5000 + i % 10) for i in range(300)},
}


def save(world: hd.World, path: Path, data: Any) -> float:
    """Save, and return the seconds of the slowest rank."""
    world.comm.Barrier()
    start = time.perf_counter()
    staging.save(path, data, writer="posix")
    return max(world.comm.allgather(time.perf_counter() - start))


def main() -> None:
    with hd.init(device="cpu") as world, tempfile.TemporaryDirectory(dir=sys.argv[1] if sys.argv[1:] else ".") as own:
        path = Path(world.comm.bcast(own)) / "x.h5"
        if world.rank == 0:
            print(f"{'':34}{'pages, ms':>12}{'spread':>14}{'bytes, ms':>12}{'spread':>14}{'ratio':>8}")
        for name, data in CASES.items():
            seconds: dict[bool, list[float]] = {True: [], False: []}
            for turn in range(2 * ROUNDS + 2):
                whole = turn % 2 == 0
                with mock.patch("hpcdist.formats.contents.page_size", page_size if whole else lambda folder: 1):
                    took = save(world, path, data)
                if turn > 1:  # the first two are warm-up
                    seconds[whole].append(1e3 * took)
            if world.rank == 0:
                print(f"{name:34}{_shown(seconds[True])}{_shown(seconds[False])}{_ratio(seconds):8.2f}", flush=True)


def _shown(ms: list[float]) -> str:
    low, median, high = statistics.quantiles(ms, n=4)
    return f"{median:12.1f}{f'{low:.1f}-{high:.1f}':>14}"


def _ratio(ms: dict[bool, list[float]]) -> float:
    return statistics.median(ms[True]) / statistics.median(ms[False])


if __name__ == "__main__":
    main()
