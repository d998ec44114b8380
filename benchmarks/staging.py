"""staging.save and staging.load beside the other ways to bring shards to a disk and back.

mpirun -n 2 python benchmarks/staging.py --folder DIR       DIR on a disk, with room for five times the shards
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import h5py
import harness
import results
import safetensors
import staging_peers as peers
import staging_tables
import torch
from mpi4py import MPI
from results import POSIX
from staging_peers import COLUMNS, LOADS, SAVES, SERIAL, Case, Way, make_case, sync
from tqdm import tqdm

import hpcdist as hd

FEWEST = 3  # rounds, for a contender that is too slow for all of them
ROOM = 5  # times the shards: the files of four formats that load reads, and one to spare


def clear(case: Case) -> None:
    """Remove all files, and wait until the disk knows. Collective."""
    if case.comm.rank == 0:
        shutil.rmtree(case.folder, ignore_errors=True)
        case.folder.mkdir()
        sync(case.folder)
        sync(case.folder.parent)
    case.comm.Barrier()


def page_in(case: Case, pattern: str) -> None:
    """Have files in the page cache, each rank a share of each: what the kernel has dropped is no contender's fault."""
    buffer = bytearray(2**22)
    for path in sorted(case.folder.glob(pattern)):
        with path.open("rb", buffering=0) as file:
            share = -(-path.stat().st_size // case.comm.size)
            file.seek(case.comm.rank * share)
            for _ in range(-(-share // len(buffer))):
                file.readinto(buffer)


def sample(case: Case, way: Way) -> tuple[float, torch.Tensor | None]:
    """(seconds of one call on the slowest rank, what it returned). Collective."""
    if way.files:
        page_in(case, way.files)
    else:
        clear(case)
    case.comm.Barrier()
    start = time.perf_counter()
    result = way.call(case)
    mine = time.perf_counter() - start
    return float(case.comm.allreduce(mine, op=MPI.MAX)), result


def check(case: Case, way: Way) -> float:
    """Call it once, end the program if the data are wrong; the seconds that a round takes. Collective."""
    begin = time.monotonic()
    _, result = sample(case, way)
    cost = case.comm.allreduce(time.monotonic() - begin, op=MPI.MAX)
    got = way.back(case) if way.back else result
    want, first = case.shard, case.start - case.base
    if way.in_order:
        want = torch.arange(first // 8, first // 8 + want.numel()).view_as(want)
    wrong = [rank for rank, ok in enumerate(case.comm.allgather(got is not None and torch.equal(got, want))) if not ok]
    if wrong:
        raise SystemExit(f"{way.name!r} gave wrong data on ranks {wrong} ({case.size} bytes a rank, {case.layout})")
    return float(cost)


def measure(case: Case, ways: Sequence[Way], rounds: int, seconds: float) -> list[results.Timing]:
    """Check all contenders, then let them take turns; slow ones in fewer rounds, if need be. Collective."""
    until = time.monotonic() + seconds
    costs = {way.name: check(case, way) for way in ways if not way.lacks}
    left = case.comm.bcast(until - time.monotonic())
    taken = dict(zip(costs, harness.plan(list(costs.values()), rounds, left, min(FEWEST, rounds)), strict=True))
    total = taken[POSIX]
    timings = [results.Timing(way.name, 1, [None] * total, way.lacks) for way in ways]
    turns = {name: {i * total // n for i in range(n)} for name, n in taken.items()}
    for round_ in range(total):
        for way, timing in random.Random(round_).sample(list(zip(ways, timings, strict=True)), len(ways)):
            if round_ in turns.get(way.name, ()):
                timing.samples[round_] = float(f"{sample(case, way)[0]:.4g}")
    return timings


def measure_loads(case: Case, rounds: int, seconds: float) -> list[results.Timing]:
    """The same for what reads: hpcdist's file, which most of them read, and those of the others. Collective."""
    clear(case)
    for save in (peers.save_hpcdist, peers.save_torch, peers.save_dcp, peers.save_safetensors):
        save(case)
    case.comm.Barrier()
    with h5py.File(case.path, "r") as file:
        base = file["data"].id.get_offset()
    return measure(replace(case, base=base), LOADS, rounds, seconds)


def fitting(comm: MPI.Intracomm, folder: Path, sizes: Sequence[int]) -> tuple[list[int], list[str]]:
    """(the sizes that there is room for, why not the others). As rank 0 sees it; collective."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    memory = int(lines["MemAvailable"].removesuffix("kB")) * 1024
    disk = shutil.disk_usage(folder).free
    room, notes = [], []
    for size in sizes:
        need = size * comm.size
        if 4 * need > memory or ROOM * need > disk:  # the shard, the result and copies of those who make them
            notes.append(f"{results.show_size(size)} a rank: left out, for want of memory or room on the disk")
        else:
            room.append(size)
    return comm.bcast((room, notes))


def run(asked: argparse.Namespace, world: hd.World, folder: Path) -> None:
    """Time every layout and size, print on rank 0, write JSON."""
    comm, end = world.comm, time.monotonic() + asked.seconds
    cpus = len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, cpus // comm.size))
    record = harness.new_record("staging", comm.size, cpus)
    kind = "without MPI" if SERIAL else f"HDF5 {h5py.version.hdf5_version} with MPI"
    record.versions |= {"h5py": f"{h5py.__version__} ({kind})", "safetensors": safetensors.__version__}
    record.versions[staging_tables.WRITER] = hd.staging.writer()[0]
    sizes, notes = fitting(comm, folder, asked.sizes)
    root = comm.rank == 0
    if root:
        print(*notes, sep="\n", end="\n" if notes else "")
    steps = list(product(asked.layouts, sizes, ("save", "load")))
    weights = [size for _, size, _ in steps]
    for done, (layout, size, what) in enumerate(tqdm(steps, "staging", disable=None if root else True)):
        case = make_case(comm, folder / "files", size, layout)
        seconds = comm.bcast(max(0, end - time.monotonic()) * size / sum(weights[done:]))
        rounds = (case, asked.rounds, seconds)
        timings = measure_loads(*rounds) if what == "load" else measure(case, SAVES, *rounds[1:])
        record.cases.append(results.Case(size, layout, case.nbytes, timings, what))
        if root:
            tqdm.write(staging_tables.case_table(record, record.cases[-1]) + "\n")
        if root and asked.json:  # what has been measured stays, should the run be ended
            results.save(record, asked.json)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes, layouts = "64M,256M,1G", ",".join(COLUMNS)
    parser.add_argument("--sizes", type=harness.sizes, default=sizes, metavar="LIST", help=f"bytes a rank ({sizes})")
    parser.add_argument("--layouts", type=lambda text: text.split(","), default=layouts, metavar="LIST", help=layouts)
    parser.add_argument("--rounds", type=int, default=5, help="samples of each contender (%(default)s)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=900,
        help=f"for the run: fewer rounds, but {FEWEST}, for slow ones (%(default)g)",
    )
    parser.add_argument(
        "--folder", type=Path, default=tempfile.gettempdir(), help="on the disk that is to be measured (%(default)s)"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write all samples there; in a folder: MPI-npN-staging"
    )
    asked = parser.parse_args()
    if asked.rounds < 1 or not set(asked.layouts) <= set(COLUMNS):
        parser.error(f"expected --rounds of at least 1, and --layouts out of {layouts}")
    return asked


def main() -> None:
    asked = arguments()
    with hd.init(device="cpu") as world:
        root = world.rank == 0
        folder = world.comm.bcast(Path(tempfile.mkdtemp(prefix="hpcdist-staging-", dir=asked.folder)) if root else None)
        try:
            run(asked, world, folder)
            world.comm.Barrier()
        finally:
            if root:
                shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
