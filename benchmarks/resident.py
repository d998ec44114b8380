"""Measure the memory of python -m hpcdist.gather with a window. mpirun -n 2 python benchmarks/resident.py

Writes .npy files, runs the command to join them into one .h5 file, and reads the kernel's counters of each rank's whole
process, including Python, torch and MPI.
"""

from __future__ import annotations

import argparse
import os
import resource
import runpy
import shutil
import sys
import tempfile
from pathlib import Path

import h5py
import harness
import numpy as np
import results
from mpi4py import MPI

SHARDS = 12
COLUMNS = 1024  # of int64
BLOCK = 256  # rows written at a time, so that this program itself does not cause the peak


def write_shard(path: Path, first: int, rows: int) -> None:
    """Write a .npy file of `rows` rows from row `first` of the whole; each value is its index in the whole."""
    with path.open("wb") as file:
        header = {"descr": "<i8", "fortran_order": False, "shape": (rows, COLUMNS)}
        np.lib.format.write_array_header_1_0(file, header)
        for row in range(first, first + rows, BLOCK):
            end = min(row + BLOCK, first + rows)
            np.arange(row * COLUMNS, end * COLUMNS).tofile(file)


def gather(command: list[str]) -> None:
    """Run the command in this process; exit if it fails."""
    sys.argv = command
    try:
        runpy.run_module("hpcdist.gather", run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise


def check(path: Path, rows: int) -> None:
    """Check samples of the result; exit if one is wrong."""
    with h5py.File(path, "r") as file:
        (name,) = (name for name in file if isinstance(file[name], h5py.Dataset))
        for row in {*range(0, rows, max(1, rows // 1000)), rows - 1}:
            if file[name][row, -1] != (row + 1) * COLUMNS - 1:
                raise SystemExit(f"{path}: row {row} is wrong")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=harness.sizes, default="6G", help="total size of all files (%(default)s)")
    parser.add_argument("--window", default="64M", help="window of the command (%(default)s)")
    parser.add_argument(
        "--folder", type=Path, default=tempfile.gettempdir(), help="twice the size must fit (%(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the figures; in a folder: MPI-npN-resident")
    return parser.parse_args()


def main() -> None:
    asked = arguments()
    comm = MPI.COMM_WORLD
    folder = comm.bcast(
        Path(tempfile.mkdtemp(prefix="hpcdist-resident-", dir=asked.folder)) if comm.rank == 0 else None
    )
    rows = asked.size[0] // SHARDS // COLUMNS // 8
    try:
        for i in range(comm.rank, SHARDS, comm.size):
            write_shard(folder / f"{i:02}.npy", i * rows, rows)
        comm.Barrier()
        whole = folder / "whole.h5"
        gather(["gather", str(folder / "*.npy"), "-o", str(whole), "--window", asked.window])
        peaks = comm.gather(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        if peaks is not None:
            check(whole, rows * SHARDS)
            record = harness.new_record("resident", comm.size, len(os.sched_getaffinity(0)))
            command = f"python -m hpcdist.gather 'x/*.npy' -o whole.h5 --window {asked.window}"
            record.resident = results.Resident(command, rows * SHARDS * COLUMNS * 8, peaks)
            print(
                command, *(f"{peak / 2**20:.0f} MiB" for peak in peaks), "resident at the peak of each rank", sep="; "
            )
            if asked.json:
                results.save(record, asked.json)
        comm.Barrier()
    finally:
        if comm.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
