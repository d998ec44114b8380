"""staging.save and staging.load, compared with other methods to write shards to a disk and read them back.

mpirun -n 2 python benchmarks/staging.py --folder DIR       DIR on a disk, with space for five times the shards
benchmarks/disk.sh ext4 aged mpirun -n 2 python benchmarks/staging.py --shared --sizes 128M --layouts even
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
import report
import results
import safetensors
import staging_peers as peers
import torch
from mpi4py import MPI
from results import POSIX
from staging_peers import COLUMNS, LOADS, SAVES, SERIAL, Case, Method, make_case, sync
from tqdm import tqdm

import hpcdist as hd
from hpcdist.compare.timing import plan

FEWEST = 3  # rounds, for a contender that is too slow for all of them
SPACE = 5  # times the shards: the files of four formats that load reads, and one extra


def clear(case: Case) -> None:
    """Remove all files, and sync the folder. Collective."""
    if case.comm.rank == 0:
        shutil.rmtree(case.folder, ignore_errors=True)
        case.folder.mkdir()
        sync(case.folder)
        sync(case.folder.parent)
    case.comm.Barrier()


def page_in(case: Case, pattern: str) -> None:
    """Read files into the page cache, each rank a part, so that no contender pays for pages that the kernel dropped."""
    buffer = bytearray(2**22)
    for path in sorted(case.folder.glob(pattern)):
        with path.open("rb", buffering=0) as file:
            share = -(-path.stat().st_size // case.comm.size)
            file.seek(case.comm.rank * share)
            for _ in range(-(-share // len(buffer))):
                file.readinto(buffer)


def sample(case: Case, method: Method) -> tuple[float, torch.Tensor | None]:
    """Return (seconds of one call on the slowest rank, its result). Collective."""
    if method.files:
        page_in(case, method.files)
    else:
        clear(case)
    case.comm.Barrier()
    start = time.perf_counter()
    result = method.call(case)
    mine = time.perf_counter() - start
    return float(case.comm.allreduce(mine, op=MPI.MAX)), result


def check(case: Case, method: Method) -> float:
    """Call a method once, exit if the data are wrong; return the seconds per round. Collective."""
    begin = time.monotonic()
    _, result = sample(case, method)
    cost = case.comm.allreduce(time.monotonic() - begin, op=MPI.MAX)
    got = method.back(case) if method.back else result
    want, first = case.shard, case.start - case.base
    if method.in_order:
        want = torch.arange(first // 8, first // 8 + want.numel()).view_as(want)
    wrong = [rank for rank, ok in enumerate(case.comm.allgather(got is not None and torch.equal(got, want))) if not ok]
    if wrong:
        raise SystemExit(f"{method.name!r} gave wrong data on ranks {wrong} ({case.size} bytes a rank, {case.layout})")
    return float(cost)


def measure(case: Case, methods: Sequence[Method], rounds: int, seconds: float) -> list[results.Timing]:
    """Check all contenders, then time them in turn; slow ones in fewer rounds, if necessary. Collective."""
    until = time.monotonic() + seconds
    costs = {method.name: check(case, method) for method in methods if not method.unsupported}
    left = case.comm.bcast(until - time.monotonic())
    taken = dict(zip(costs, plan(list(costs.values()), rounds, left, min(FEWEST, rounds)), strict=True))
    total = taken[POSIX]
    timings = [results.Timing(method.name, 1, [None] * total, method.unsupported) for method in methods]
    turns = {name: {i * total // n for i in range(n)} for name, n in taken.items()}
    for round_ in range(total):
        for method, timing in random.Random(round_).sample(list(zip(methods, timings, strict=True)), len(methods)):
            if round_ in turns.get(method.name, ()):
                timing.samples[round_] = float(f"{sample(case, method)[0]:.4g}")
    return timings


def measure_loads(case: Case, methods: Sequence[Method], rounds: int, seconds: float) -> list[results.Timing]:
    """Measure loads, of hpcdist's file, which most of them read, or of their own. Collective."""
    clear(case)
    for save in (peers.save_hpcdist, peers.save_torch, peers.save_dcp, peers.save_safetensors):
        save(case)
    case.comm.Barrier()
    with h5py.File(case.path, "r") as file:
        base = file["data"].id.get_offset()
    return measure(replace(case, base=base), methods, rounds, seconds)


def fitting(comm: MPI.Intracomm, folder: Path, sizes: Sequence[int]) -> tuple[list[int], list[str]]:
    """Return (the sizes that fit, notes on the others), as determined by rank 0. Collective."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    memory = int(lines["MemAvailable"].removesuffix("kB")) * 1024
    disk = shutil.disk_usage(folder).free
    fit, notes = [], []
    for size in sizes:
        need = size * comm.size
        if 4 * need > memory or SPACE * need > disk:  # the shard, the result, and copies that some contenders make
            notes.append(f"{results.show_size(size)} a rank: left out: not enough memory or disk space")
        else:
            fit.append(size)
    return comm.bcast((fit, notes))


def run(asked: argparse.Namespace, world: hd.World, folder: Path) -> None:
    """Time every layout and size, print on rank 0, write JSON."""
    comm, end = world.comm, time.monotonic() + asked.seconds
    cpus = len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, cpus // comm.size))
    record = harness.new_record("staging", comm.size, cpus)
    kind = "without MPI" if SERIAL else f"HDF5 {h5py.version.hdf5_version} with MPI"
    record.versions |= {"h5py": f"{h5py.__version__} ({kind})", "safetensors": safetensors.__version__}
    record.versions[results.WRITER] = hd.staging.writer()[0]
    sizes, notes = fitting(comm, folder, asked.sizes)
    root = comm.rank == 0
    if root:
        print(*notes, sep="\n", end="\n" if notes else "")
    steps = list(product(asked.layouts, sizes, ("save", "load")))
    weights = [size for _, size, _ in steps]
    for done, (layout, size, what) in enumerate(tqdm(steps, "staging", disable=None if root else True)):
        case = make_case(comm, folder / "files", size, layout)
        seconds = comm.bcast(max(0, end - time.monotonic()) * size / sum(weights[done:]))
        rounds = (asked.rounds, seconds)
        methods = [m for m in (LOADS if what == "load" else SAVES) if not asked.shared or m.shared]
        timings = (measure_loads if what == "load" else measure)(case, methods, *rounds)
        record.cases.append(results.Case(size, layout, case.nbytes, timings, what))
        if root:
            tqdm.write(report.case_table(record, record.cases[-1]) + "\n")
        if root and asked.json:  # keeps the measurements if the run is interrupted
            results.save(record, asked.json)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes, layouts = "64M,256M,1G", ",".join(COLUMNS)
    parser.add_argument("--sizes", type=harness.sizes, default=sizes, metavar="LIST", help=f"bytes per rank ({sizes})")
    parser.add_argument("--layouts", type=lambda text: text.split(","), default=layouts, metavar="LIST", help=layouts)
    parser.add_argument("--rounds", type=int, default=5, help="samples per contender (%(default)s)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=900,
        help=f"target duration of the run: slow contenders get fewer rounds, at least {FEWEST} (%(default)g)",
    )
    parser.add_argument(
        "--folder", type=Path, default=tempfile.gettempdir(), help="folder on the disk to measure (%(default)s)"
    )
    parser.add_argument("--shared", action="store_true", help="only contenders with one file of all ranks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for all samples; in a folder: MPI-npN-staging")
    asked = parser.parse_args()
    if asked.rounds < 1 or not set(asked.layouts) <= set(COLUMNS):
        parser.error(f"expected --rounds of at least 1, and --layouts out of {layouts}")
    return asked


def main() -> None:
    asked = arguments()
    with hd.init(device="cpu") as world, harness.shared_folder(world.comm, asked.folder, "staging") as folder:
        run(asked, world, folder)


if __name__ == "__main__":
    main()
