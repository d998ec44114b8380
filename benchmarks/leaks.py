"""Make every kind of call many times, and show whether memory, files, threads and communicators stay the same.

mpirun -n 2 python benchmarks/leaks.py
mpirun -n 2 python benchmarks/leaks.py --calls 10000 --groups 1000 --only groups,concat

A row for each kind, and in it the growth of the rank that grew most, from after the first tenth of the calls to after
the last. What may not grow by a call is "flat" if it grows by no more than LIMITS and, for resident memory, PER_CALL.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

import hpcdist as hd
from hpcdist import activity
from hpcdist.activity import callsite
from hpcdist.comm.node_memory import SPARE

_MIB = 2**20
_CONTEXT_IDS = {"MPICH": 2048, "Intel MPI": 32768}  # communicators that a process can have at once
_CACHED = 5000  # calls with new arguments after which every cache of the library is full


class State(NamedTuple):
    """What a rank has.

    Attributes:
        resident: anonymous memory of this process; files that it maps belong to the page cache.
        shared: memory that this process shares by memfd or /dev/shm, divided by the processes that map it.
        devshm: bytes in /dev/shm, of all programs.
        descriptors, threads: open file descriptors and threads of this process.
        communicators: of MPI.
        objects: those that Python's garbage collector knows.
        records: entries of the library's own tables: teams, routes, plans, repeated calls, records of calls, messages.
    """

    resident: float
    shared: float
    devshm: float
    descriptors: float
    threads: float
    communicators: float
    objects: float
    records: float


LIMITS = State(4, 1, 1, 2, 1, 0, 500, 20)
PER_CALL = 16 / _MIB  # resident MiB: less than the smallest thing that a call could lose
UNITS = State("MiB", "MiB", "MiB", "fds", "threads", "comms", "objects", "records")  # type: ignore[arg-type]


def state(world: hd.World) -> State:
    """Count what this rank has now. Collective over the world."""
    hd.memory.empty_cache()
    for _ in range(3):  # what a finalizer drops may be garbage, too
        gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)
    world.comm.Barrier()  # memory that ranks share counts by how many of them have it
    rollup = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    in_use = os.statvfs("/dev/shm")
    found = State(
        resident=_kib(rollup["Anonymous"]),
        shared=_kib(rollup.get("Pss_Shmem", "0 kB")),
        devshm=(in_use.f_blocks - in_use.f_bfree) * in_use.f_frsize / _MIB,
        descriptors=len(os.listdir("/proc/self/fd")),
        threads=len(os.listdir("/proc/self/task")),
        communicators=communicators(world.comm),
        objects=len(gc.get_objects()),
        records=_records(world),
    )
    world.comm.Barrier()  # no rank goes on while another one looks at /dev/shm
    return found


def _kib(text: str) -> float:
    return int(text.split()[0]) / 1024


def communicators(comm: MPI.Intracomm) -> int:
    """Count the MPI communicators of this process. Collective.

    MPICH has a fixed number, so those that can still be made are made and freed, by each rank alone, which is quick.
    Open MPI numbers its handles from the lowest free number: that of a new communicator is the number of those before.
    """
    most = _CONTEXT_IDS.get(MPI.get_vendor()[0])
    if most is None:
        made = comm.Dup()
        number = made.py2f()
        made.Free()
        return int(number)
    more: list[MPI.Intracomm] = []
    with suppress(MPI.Exception):
        while len(more) < most:
            more.append(MPI.COMM_SELF.Dup())
    free = len(more)
    for made in more:
        made.Free()
    return most - free


def _records(world: hd.World) -> int:
    context = world._context
    found = len(context.teams) + len(context._torch_groups) + len(activity.peers)
    found += len(callsite.texts) + len(callsite.insides)
    for team in context.teams.values():
        found += sum(map(len, (team.torch_groups, team.routes, team.repeats)))
    return found


Call = Callable[[int], object]
Make = Callable[[hd.World, Path], Call]


class Kind(NamedTuple):
    """A kind of call: `make` returns a function that makes the call for the i-th time.

    Attributes:
        one_of: one call is made for so many of --calls; 0: the calls are those of --groups.
        least: ranks needed.
        warm_up: calls before the first measurement at least.
        cached: descriptors of what is kept for later calls, more or less of it from call to call.
        kept: objects that torch itself keeps of every call.
    """

    make: Make
    one_of: int = 1
    least: int = 1
    warm_up: int = 5
    cached: int = 0
    kept: int = 0


def _collectives(rows: Callable[[int], int]) -> dict[str, Make]:
    def redistribute(world: hd.World, folder: Path) -> Call:
        wide = world.world_size
        return lambda i: hd.redistribute(torch.ones(rows(i), wide), hd.Split(0), hd.Split(1))

    return {
        "gather": lambda world, folder: lambda i: hd.gather(torch.ones(rows(i)), root=0),
        "concat": lambda world, folder: lambda i: hd.concat(torch.ones(rows(i))),
        "split": lambda world, folder: (
            lambda i: hd.split(torch.ones(rows(i) * world.world_size) if world.rank == 0 else None)
        ),
        "redistribute": redistribute,
    }


def _send(world: hd.World, folder: Path) -> Call:
    other = world.rank ^ 1

    def call(i: int) -> None:
        if other < world.world_size:
            x = {"x": torch.ones(i % 7), "n": i}
            if world.rank < other:
                hd.send(x, other)
            assert hd.recv(other)["n"] == i
            if world.rank > other:
                hd.send(x, other)

    return call


def _neighbours(world: hd.World) -> tuple[int, int]:
    return (world.rank + 1) % world.world_size, (world.rank - 1) % world.world_size


def _isend(world: hd.World, folder: Path) -> Call:
    after, before = _neighbours(world)

    def call(i: int) -> None:
        received, sent = hd.irecv(before, i % 5), hd.isend(torch.ones(i % 700), after, i % 5)
        received.wait(60)
        sent.wait(60)

    return call


def _plan_calls(world: hd.World, folder: Path) -> Call:
    x = torch.ones(3)
    plans: list[Any] = [hd.plan(hd.concat, x), hd.plan(hd.gather, x), hd.plan(hd.split, x if world.rank == 0 else None)]
    return lambda i: plans[i % 3](x if i % 3 < 2 or world.rank == 0 else None)


def _plans(world: hd.World, folder: Path) -> Call:
    def call(i: int) -> None:
        x = torch.ones(i % 20 + 1, 2)
        whole = x if world.rank == 0 else None
        hd.plan(hd.concat, x)(x)
        hd.plan(hd.gather, x)(x)
        hd.plan(hd.split, whole)(whole)
        hd.plan(hd.redistribute, x, hd.Split(0), hd.Split(1) if world.world_size < 3 else hd.Replicate())

    return call


def _refused(world: hd.World, folder: Path) -> Call:
    def call(i: int) -> None:
        with suppress(hd.RankError):
            hd.concat(torch.ones(3), dim=world.rank + 1)
            raise SystemExit("a wrong call was not refused")

    return call


def _large(world: hd.World, folder: Path, shared: bool = False) -> Call:
    x = torch.ones(2**19)  # 2 MiB
    kept: list[Tensor] = []

    def call(i: int) -> None:
        kept.append(hd.concat(x[: len(x) - i % 100 * 1024], shared=shared))
        del kept[: -(i % 5)]  # several are held at once

    return call


def _files(world: hd.World, folder: Path) -> Call:
    def call(i: int) -> None:
        hd.staging.save(folder / "x.h5", {"x": torch.ones(1000 + i % 7), "y": torch.ones(3)})
        hd.staging.load(folder / "x.h5")

    return call


def _comms(world: hd.World, folder: Path) -> Call:
    """Communicators of some of the ranks, used in front and in the background, then freed."""

    def call(i: int) -> None:
        comm = world.comm.Split(0 if i % 2 else world.rank % 2, world.rank)
        hd.concat(torch.ones(3), group=comm)
        hd.concat(torch.ones(100_000), group=comm, shared=True)
        if i % 10 == 0:
            hd.concat(torch.ones(3), group=comm, async_op=True).wait(60)
        comm.Free()

    return call


def _torch_groups(world: hd.World, folder: Path) -> Call:
    def call(i: int) -> None:
        group = dist.new_group(backend="gloo" if i % 2 else None)
        hd.concat(torch.ones(3), group=group)
        dist.all_reduce(torch.ones(3), group=group)
        dist.destroy_process_group(group)

    return call


def _backend(world: hd.World, folder: Path) -> Call:
    """torch's calls with backend "mpi": at once, in the background, between two ranks."""
    group, (after, before) = dist.new_group(backend="mpi"), _neighbours(world)
    calls: list[Callable[[Tensor], object]] = [
        lambda x: dist.all_reduce(x, group=group),
        lambda x: dist.all_reduce(x, group=group, async_op=True).wait(),
        lambda x: dist.all_to_all_single(x.repeat(world.world_size), x.repeat(world.world_size), group=group),
    ]
    if world.world_size > 1:
        calls.append(lambda x: [dist.isend(x, after, group=group), dist.recv(x.clone(), before, group=group)][0].wait())
    return lambda i: calls[i % len(calls)](torch.ones(i % 700))


def _backend_groups(world: hd.World, folder: Path) -> Call:
    def call(i: int) -> None:
        group = dist.new_group(backend="mpi")
        dist.all_reduce(torch.ones(3), group=group, async_op=i % 2 == 0)
        dist.destroy_process_group(group)

    return call


KINDS: dict[str, Kind] = {
    **{f"{verb}, 12 B": Kind(make) for verb, make in _collectives(lambda i: 3).items()},
    **{  # 80 kB at most
        f"{verb}, ever other sizes": Kind(make, 1, 1, _CACHED)
        for verb, make in _collectives(lambda i: i % 20_011).items()
    },
    "concat of structures": Kind(
        lambda world, folder: lambda i: hd.concat({"x": torch.ones(i % 7), "names": ["a"] * (i % 3), "loss": 0.5})
    ),
    "concat, with gradients": Kind(
        lambda world, folder: lambda i: hd.concat(torch.ones(i % 7 + 1, requires_grad=True)).sum().backward()
    ),
    "concat, async_op": Kind(lambda world, folder: lambda i: hd.concat(torch.ones(i % 700), async_op=True).wait(60)),
    "concat, refused": Kind(_refused),
    "concat, 2 MiB from the pool": Kind(_large, 100),
    "concat, 2 MiB shared": Kind(partial(_large, shared=True), 100, cached=3 * SPARE),
    "plans called": Kind(_plan_calls),
    "plans made and dropped": Kind(_plans, 4),
    "send, recv": Kind(_send, least=2),
    "isend, irecv": Kind(_isend, least=2),
    "staging.save, load": Kind(_files, 1000),
    "torch.distributed, backend mpi": Kind(_backend),
    "groups of communicators": Kind(_comms, 0),
    "groups of torch, backend mpi": Kind(_backend_groups, 0, kept=1),
    "groups of torch": Kind(_torch_groups, 0, kept=1),
}


class Growth(NamedTuple):
    """What the rank that grew most has more than before, of each thing, after `calls` calls of a kind."""

    calls: int
    before: State
    more: State
    cached: int
    kept: int

    def leaks(self) -> list[str]:
        """Describe what is not flat."""
        resident, descriptors = LIMITS.resident + PER_CALL * self.calls, LIMITS.descriptors + self.cached
        objects = LIMITS.objects + self.kept * self.calls
        allowed = LIMITS._replace(resident=resident, descriptors=descriptors, objects=objects)
        named = zip(State._fields, UNITS, self.more, allowed, strict=True)
        return [
            f"{name}: {more:.1f} {unit} more, {limit:.1f} allowed"
            for name, unit, more, limit in named
            if more > limit and name != "devshm"  # of which other programs use some, too
        ]


def grow(world: hd.World, kind: Kind, calls: int, folder: Path) -> Growth:
    """Make the calls, the first tenth of them as a warm-up; compare what there is before and after. Collective."""
    comm, warm_up = world.comm, max(kind.warm_up, calls // 10)
    call = kind.make(world, folder)
    for i in range(warm_up):
        call(i)
    state(world)  # makes what it needs itself
    before = state(world)
    for i in range(warm_up, warm_up + calls):
        call(i)
    after = state(world)
    most = [comm.allreduce(b - a, op=MPI.MAX) for a, b in zip(before, after, strict=True)]
    first = State(*(comm.allreduce(a, op=MPI.MAX) for a in before))
    return Growth(calls, first, State(*most), kind.cached, kind.kept)


def main() -> None:
    from harness import shared_folder

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=100_000, help="calls of each kind (%(default)s)")
    parser.add_argument("--groups", type=int, default=10_000, help="groups made and freed (%(default)s)")
    parser.add_argument("--only", default="", metavar="LIST", help="kinds with one of these words in their name")
    asked = parser.parse_args()
    found = []
    with (
        hd.init(device="cpu", backend="gloo") as world,
        shared_folder(world.comm, Path(tempfile.gettempdir()), "leaks") as folder,
    ):
        if world.rank == 0:
            print("", "kind", "calls", *map(", ".join, zip(State._fields, UNITS, strict=True)), "flat", "", sep=" | ")
            print("|---" * (len(State._fields) + 3) + "|")
        for name, kind in KINDS.items():
            if world.world_size < kind.least or not any(word in name for word in asked.only.split(",")):
                continue
            calls = max(1, asked.calls // kind.one_of) if kind.one_of else asked.groups
            growth = grow(world, kind, calls, folder)
            cells = [f"{b:.1f} {more:+.1f}" for b, more in zip(growth.before, growth.more, strict=True)]
            leaks = growth.leaks()
            found += [f"{name}: {leak}" for leak in leaks]
            if world.rank == 0:
                flat = "NO" if leaks else "yes"
                print("", name, f"{calls:,}", *cells, flat, "", sep=" | ", flush=True)
        if world.rank == 0:
            print(*(f"not flat: {leak}" for leak in found), sep="\n")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
