"""Measure how long one rank plans a save or load of many tensors by many ranks. python benchmarks/planning.py

Needs neither MPI nor files: planning is arithmetic on shapes, extents and tables of pieces. A case plans for one rank
of a job of that size: every tensor, this rank's own pieces, and the ranks that it sends to and receives from in all
rounds. Comparing arguments, exchanging extents and reading tables from the file are not included.

Each case runs in its own process. s: seconds to plan all tensors once, the median of three. CPU s: processor time of
the same. MB: peak resident memory, less that of Python, numpy and torch before; 1 MB is 10^6 bytes.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

BESIDES = 256  # extent of the other dim; float32
WINDOW = 2**28
TARGET = 5.0, 500.0  # seconds and MB
REPEATS = 3


def shape_of(dim: int | None, extent: int) -> tuple[int, int]:
    return (BESIDES, extent) if dim == 1 else (extent, BESIDES)


def now() -> tuple[float, float]:
    """Return wall-clock time and processor time."""
    return time.perf_counter(), time.process_time()


def peers(plan: Any, rank: int) -> int:
    """Find this rank's pieces, and the ranks with which it exchanges data; return the number of both."""
    pieces = [plan.pieces[row] for row in plan.rows(rank)]
    if plan.straight:
        return len(pieces)
    sources = sum(len(plan.held.intersecting(box)) for box in pieces)
    return sources + sum(len(plan.met(rank, round_)) for round_ in plan.rounds)


def save(asked: argparse.Namespace, dim: int | None, ragged: bool) -> int:
    import numpy as np
    import torch

    from hpcdist.formats.contents import Dataset
    from hpcdist.staging.pieces import plan_save

    asked.before = asked.before or resident()
    extents = np.empty((asked.tensors, asked.ranks), np.int64)  # as gathered from all ranks
    for i in range(asked.tensors):
        extents[i] = asked.extent // asked.ranks + (np.random.default_rng(i).integers(0, 9, asked.ranks) * ragged)
    plans = []
    start = now()
    for along in extents:
        shape = shape_of(dim, int(along.sum()))
        plans.append(plan_save(Dataset("x", shape, torch.float32), dim, along, WINDOW))
    found = sum(peers(plan, asked.ranks // 2) for plan in plans)
    asked.seconds.append([end - begin for end, begin in zip(now(), start, strict=True)])
    return found


def load(asked: argparse.Namespace, how: str) -> int:
    """Plan loads, with different shapes, since plans are cached by shape; with `counts`, all extents are equal."""
    import torch

    from hpcdist import layout
    from hpcdist.formats.contents import Stored
    from hpcdist.formats.plain import Raw
    from hpcdist.layout import Box

    planner = import_module("hpcdist.staging.load")  # the package has the function of that name
    dim = None if how == "dim=None" else 1 if "dim 1" in how or "boxes" in how else 0
    counts = None
    if how.startswith("ragged"):
        counts = tuple(c + (i % 2 or -1) for i, c in enumerate(layout.block(asked.extent, asked.ranks)))
        counts = (*counts[:-1], asked.extent - sum(counts[:-1]))
    datasets = {}
    for i in range(asked.tensors):
        shape = shape_of(dim, asked.extent + (0 if counts else i))
        raw = Raw("x.h5", 0, shape, torch.float32)
        datasets[str(i)] = Stored(str(i), shape, torch.float32, raw)
    each = asked.extent // asked.ranks
    boxes = [Box((0, rank * each), (BESIDES, each)) for rank in range(asked.ranks)] if how == "boxes" else []
    asked.before = asked.before or resident()
    start, found, same = now(), 0, {"dim": dim, "counts": counts}
    wants = {key: planner._wants(stored, same, boxes, asked.ranks) for key, stored in datasets.items()}
    for key, stored in datasets.items():
        stored = replace(stored)  # as load() does, for what is computed from a table is not kept
        if planner._reads_alone(stored, wants[key], None):
            found += 1
        else:
            found += peers(planner.plan_load(stored, wants[key], WINDOW, None)[0], asked.ranks // 2)
    asked.seconds.append([end - begin for end, begin in zip(now(), start, strict=True)])
    return found


CASES: dict[str, Callable[[argparse.Namespace], int]] = {
    "save, regular, dim 0": lambda asked: save(asked, 0, False),
    "save, ragged, dim 0": lambda asked: save(asked, 0, True),
    "save, regular, dim 1": lambda asked: save(asked, 1, False),
    "save, ragged, dim 1": lambda asked: save(asked, 1, True),
    "save, dim=None": lambda asked: save(asked, None, False),
    "load, regular, dim 0": lambda asked: load(asked, "regular"),
    "load, ragged, dim 0": lambda asked: load(asked, "ragged"),
    "load, regular, dim 1": lambda asked: load(asked, "regular, dim 1"),
    "load, ragged, dim 1": lambda asked: load(asked, "ragged, dim 1"),
    "load, dim=None": lambda asked: load(asked, "dim=None"),
    "load, boxes, columns": lambda asked: load(asked, "boxes"),
}


def resident() -> int:
    """Return the resident memory in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def one(case: str, asked: argparse.Namespace) -> None:
    """Run a case, and print its figures for the parent process."""
    import torch  # noqa: F401

    import hpcdist.staging  # noqa: F401

    asked.before, asked.seconds = 0, []
    for _ in range(REPEATS):
        found = CASES[case](asked)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps([*map(statistics.median, zip(*asked.seconds, strict=True)), (peak - asked.before) / 1e6, found]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=10_000, help="number of tensors (%(default)s)")
    parser.add_argument("--ranks", type=int, default=1024, help="number of ranks; the middle one plans (%(default)s)")
    parser.add_argument("--extent", type=int, default=16_384, help=f"rows along dim, of {BESIDES} (%(default)s)")
    parser.add_argument("--only", default="", metavar="WORDS", help="cases with these words in their name")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.case:
        one(asked.case, asked)
        return
    sizes = ["--tensors", str(asked.tensors), "--ranks", str(asked.ranks), "--extent", str(asked.extent)]
    print(
        f"{asked.tensors:,} tensors, {asked.ranks:,} ranks, {asked.extent * BESIDES * 4 / 1e6:.0f} MB each; one rank:\n"
    )
    print("| planning | s | CPU s | MB | own pieces and messages |\n|---|---|---|---|---|")
    missed = []
    for case in CASES:
        if asked.only in case:
            command = [sys.executable, __file__, *sizes, "--case", case]
            seconds, cpu, memory, found = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
            print(f"| {case} | {seconds:.2f} | {cpu:.2f} | {memory:.0f} | {found:,} |", flush=True)
            missed += [case] if cpu > TARGET[0] or memory > TARGET[1] else []
    print(f"\nTarget: below {TARGET[0]:g} CPU s and {TARGET[1]:g} MB; missed by: {', '.join(missed) or 'none'}")


if __name__ == "__main__":
    main()
