"""Model calls of up to 16,384 ranks from what the real code does on each rank; compare small jobs with measured ones.

python benchmarks/model.py     # writes results/model-*.json; needs root, and smpirun: apt-get install libsimgrid-dev
"""

from __future__ import annotations

import json
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from math import log2
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any
from unittest.mock import patch

import h5py
import numpy as np
import torch
from mpi4py import MPI
from report import figure
from results import FOLDER, show_size
from simulated import (
    CASES,
    Machine,
    least_outside,
    measured,
    messages,
    metadata,
    outside,
    record,
    recorded,
    seconds,
    simulate,
)

import hpcdist as hd
from hpcdist.errors import RankError
from hpcdist.formats.contents import Dataset
from hpcdist.formats.hdf5 import table_of
from hpcdist.staging.writer import WINDOW, SaveOptions, Target

TESTS = Path(__file__).parents[1] / "tests"
sys.path += [str(TESTS / "cluster"), str(TESTS / "helpers")]
from hosts import Hosts  # noqa: E402

TENSORS, ROW = 2000, 16  # of many tensors; elements of a row, of which each rank has one
CHECKED = [("concat", 8), ("concat", 2**16), *((case, 2**24) for case in CASES)]


def measure(comm: MPI.Intracomm) -> None:
    """Measure a machine and the calls, in a job; rank 0 prints the seconds."""
    machine, alone = measured(comm), seconds(comm, partial(hd.concat, torch.empty(8), group=MPI.COMM_SELF), 100)
    times = [
        seconds(comm, CASES[case](comm.rank, comm.size, nbytes), max(1, 2**20 // max(nbytes, 2**13)))
        for case, nbytes in CHECKED
    ]
    if comm.rank == 0:
        print(json.dumps({"machine": machine, "call": alone, "seconds": times}))


def check(program: str = __file__) -> Iterator[list[str]]:
    """Yield rows of a table: measured and simulated, on one node, and on hosts at 1 Gbit/s."""
    for nodes, ranks in ((1, 2), (1, 4), (2, 2), (4, 2)):
        with Hosts(nodes) as hosts:
            if nodes > 1:
                hosts.rate("1gbit")
            job = hosts.mpirun([ranks] * nodes, program)
        assert job.status == 0, job.err
        found = json.loads(job.out.splitlines()[-1])
        machine = Machine(*found["machine"])
        for (case, nbytes), real in zip(CHECKED, found["seconds"], strict=True):
            model = found["call"] + simulate(machine, recorded(case, nbytes, machine, range(machine.size)))
            times = figure(1e3 * real), figure(1e3 * model)
            yield [f"{nodes} x {ranks}: {case}, {show_size(nbytes)}", *times, f"{model / real:.2f}"]


# Large jobs


def scale(machine: Machine) -> Iterator[list[str]]:
    """Yield rows of a table for a job of a cluster."""
    nodes, ranks, size = machine.nodes, machine.ranks, machine.size
    for case, nbytes in [("concat", 8), *((case, 2**18) for case in CASES)]:
        logs = recorded(case, nbytes, machine, range(size) if size <= 128 else (0, 1, size - 1))
        node = [(logs[0], 0, 1), (logs[1], 1, ranks - 2), (logs[-1], size - 1, 1)]  # others are like rank 1
        into, out = np.sum([times * np.array(outside(e, rank, machine)) for log, rank, times in node for e in log], 0)
        told, wire = metadata(logs[0], size), max(into, out)
        steps = messages(logs[0]) + len(told) * log2(size)
        copied = max(sum(e.nbytes for e in log if e.name == "copy") for log in logs)
        loggp = steps * machine.wire_latency + (wire + ranks * sum(told)) / machine.wire + copied / machine.copies
        by_simgrid = figure(1e3 * simulate(machine, logs)) if len(logs) == size else "-"
        memory = sum(times * log[-1].nbytes for log, _, times in node)
        ratio = f"{wire / least_outside(case, nbytes, machine):.3f}" if wire else "-"
        yield [
            f"{nodes} x {ranks}: {case}, {show_size(nbytes)}", ratio, f"{steps:,.0f}", f"{memory / 2**20:,.1f}",
            f"{sum(told) / 2**10:,.0f}", figure(1e3 * loggp), by_simgrid,
        ]  # fmt: skip


def files(machine: Machine) -> Iterator[list[str]]:
    """Yield rows of a table: what rank 0 does to save a tensor of 16 MiB, and to load it."""
    size = machine.size
    for dim in (0, 1, None):
        shape = [256, 256]
        if dim is not None:
            shape[dim] = 2**14 // size
        shard, whole = torch.zeros(shape), [n * (size if i == dim else 1) for i, n in enumerate(shape)]
        with TemporaryDirectory() as folder:
            window = {0: shard.nbytes, 1: WINDOW // size, None: WINDOW}[dim]  # for the pieces that the ranks make
            hd.staging.save(f"{folder}/saved.h5", torch.zeros(whole), None, window=window, group=MPI.COMM_SELF)

            def save() -> None:
                with suppress(RankError):  # in the end, since no other rank has written its pieces
                    hd.staging.save(f"{folder}/new.h5", {"x": shard}, dim)  # noqa: B023

            load = partial(hd.staging.load, f"{folder}/saved.h5", dim=dim, verify=False)
            for verb, call in (("save", save), ("load", load)):
                log = record(call, 0, machine)
                sent, told = ([e.nbytes for e in log if e.name == "Isend"], sum(metadata(log, size)))
                gathered = sum(sum(e.received) for e in log if e.name == "Gatherv")
                calls = sum(e.name not in ("copy", "result", "Isend", "Irecv", "Wait") for e in log)
                yield [
                    f"{machine.nodes} x {machine.ranks}: {verb}, dim {dim}", str(calls),
                    f"{sum(e.name in ('Isend', 'Irecv') for e in log):,}", f"{sum(sent) / 2**10:,.0f}",
                    f"{(told + gathered) / 2**10:,.0f}",
                ]  # fmt: skip


def whole_file(folder: str, size: int) -> str:
    """Write the file of a job that saved many tensors of zeros: each has the data and the table of a real one."""
    hd.staging.save(f"{folder}/one.h5", torch.zeros(size, ROW), window=4 * ROW, group=MPI.COMM_SELF)
    with h5py.File(f"{folder}/one.h5") as file:
        table = file["_hpcdist/pieces"][()].tobytes()
    datasets = [Dataset(f"layer.{i}.weight", (size, ROW), torch.float32, size) for i in range(TENSORS)]
    target = Target(f"{folder}/saved.h5", [*datasets, table_of(datasets)], SaveOptions())
    laid = target.lay_out()
    with open(laid.path, "r+b") as part:
        part.seek(laid.data[-1])
        for _ in datasets:
            part.write(table)
    target.complete([(TENSORS * size, 0)])
    return target.path


def many(machine: Machine) -> Iterator[list[str]]:
    """Yield rows of a table: what rank 0 does to save 2,000 tensors, once and again, and to load its part of them."""
    shards, planned = {f"layer.{i}.weight": torch.zeros(1, ROW) for i in range(TENSORS)}, list[float]()

    def timed(plan: Callable[..., Any], *args: Any) -> Any:
        start = process_time()
        made = plan(*args)
        planned.append(process_time() - start)
        return made

    def cost(call: Callable[[], Any]) -> float:
        start = process_time()
        call()
        return process_time() - start

    def peak(call: Callable[[], Any]) -> float:
        tracemalloc.start()
        call()
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    with TemporaryDirectory() as folder, ExitStack() as patches:
        path = whole_file(folder, machine.size)
        save = partial(hd.staging.save, f"{folder}/new.h5", shards)
        calls = {"first save": save, "second save": save, "load": partial(hd.staging.load, path)}
        for module in ("hpcdist.staging.save", "hpcdist.staging.load"):
            plan = sys.modules[module]._plan  # type: ignore[attr-defined]
            patches.enter_context(patch(f"{module}._plan", partial(timed, plan)))
        found = list[float]()
        for measured in (cost, peak):
            record(lambda: found.extend([measured(call) for call in calls.values()]), 0, machine)  # noqa: B023
    for i, name in enumerate(calls):
        numbers = f"{found[i]:.2f}", f"{1e3 * planned[i]:.0f}", f"{found[i + 3] / 2**20:.1f}"
        yield [f"{machine.nodes} x {machine.ranks}: {name}", *numbers]


def main() -> None:
    hd.init()
    if MPI.COMM_WORLD.size > 1:
        measure(MPI.COMM_WORLD)
        return
    jobs = [Machine(2, 8), Machine(16, 8), Machine(16, 64), Machine(256, 64)]
    made: dict[str, tuple[str, Iterator[list[str]]]] = {
        "check": ("nodes x ranks: call; measured, ms; model, ms; ratio", check()),
        "scale": (
            "nodes x ranks: call; bytes between nodes / least; messages; result, MiB a node; metadata, KiB; LogGP, ms; "
            "SimGrid, ms",
            (row for job in jobs for row in scale(job)),
        ),
        "files": (
            "nodes x ranks: call; collectives; messages; sent, KiB; metadata, KiB",
            (row for job in jobs[2:] for row in files(job)),
        ),
        "many": (
            "nodes x ranks: call; CPU time, s; of it planning, ms; memory, MiB",
            (row for job in jobs[2:] for row in many(job)),
        ),
    }
    for name, (head, rows) in made.items():
        if name in sys.argv or not sys.argv[1:]:
            (FOLDER / f"model-{name}.json").write_text(json.dumps([head.split("; "), [*rows]], indent=0) + "\n")


if __name__ == "__main__":
    main()
