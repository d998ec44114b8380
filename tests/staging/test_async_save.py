"""Saves in the background: the values of the call, whatever happens meanwhile; errors, names, the program's end."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any
from unittest.mock import Mock

import h5py
import pytest
import torch
from cases import DTYPES, copy_of, extents_of, part, whole_of
from collective import Findings
from conftest import holds, refused
from launch import mpirun

import hpcdist as hd
from hpcdist import staging
from hpcdist.formats import plain
from hpcdist.formats.safetensors import SAFETENSORS
from hpcdist.runtime import background
from hpcdist.staging.save import _flights
from hpcdist.tensors.storage import bits

mpi = pytest.mark.mpi


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Holds the writes of this rank's background until it is set."""
    event, write_at, here = threading.Event(), plain.write_at, threading.get_ident()

    def gated(fd: int, offset: int, data: memoryview, digest: Any = None) -> None:
        if threading.get_ident() != here:
            assert event.wait(30)
        write_at(fd, offset, data, digest)

    monkeypatch.setattr(plain, "write_at", gated)
    yield event
    event.set()


def some(
    world: hd.World, dtypes: Collection[torch.dtype] = DTYPES
) -> tuple[dict[str, Any], dict[str, Any], dict[str, int | None]]:
    """(this rank's shards, the whole tensors, their dims): small, large and empty ones, of several dtypes."""
    extents = extents_of("zero in the middle", world.world_size)
    wholes = {
        f"{dtype}".removeprefix("torch."): whole_of((sum(extents), 3), dtype) for dtype in sorted(dtypes, key=str)[::3]
    }
    wholes["large"] = whole_of((sum(extents), 60_000), torch.int64)
    shards: dict[str, Any] = {name: copy_of(part(x, 0, extents, world.rank)) for name, x in wholes.items()}
    wholes["copy"] = whole_of((40,), torch.int64)
    shards["copy"] = wholes["copy"].clone()
    return shards, wholes, {name: None if name == "copy" else 0 for name in shards}


def check_file(findings: Findings, path: Path, wholes: dict[str, Any], what: object) -> None:
    got = staging.load(path, dim=None, verify=True)
    for name, x in wholes.items():
        findings.same(got[name], x, (what, name))


@mpi
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("x.h5", {"writer": writer, "buffer": n}) for writer in ("auto", "posix") for n in (None, 0, 2000, 10**6)),
        *(("x.h5", options) for options in ({"resume": True}, {"writers": 1})),
        *(("x.safetensors", options) for options in ({}, {"max_shard_size": 10**6}, {"buffer": 0})),
    ],
    ids=str,
)
def test_values_of_the_call(
    name: str, options: dict[str, Any], world: hd.World, findings: Findings, folder: Path
) -> None:
    """Which are changed as soon as it returns, however little can be copied; along rows, and columns with strides."""
    shards, wholes, dims = some(world, SAFETENSORS.dtypes if "safetensors" in name else DTYPES)
    extents, attrs, seen = extents_of("ragged", world.world_size), {"": {"title": "a"}}, list[int]()
    wholes["columns"], dims["columns"] = whole_of((30, sum(extents)), torch.bfloat16), 1
    shards["columns"] = part(wholes["columns"], 1, extents, world.rank).t().contiguous().t()
    options = {"attrs": attrs, "window": 100_000, "progress": seen.append, **options}
    handle = staging.save(folder / name, shards, dims, async_op=True, **options)
    attrs[""]["title"] = "b"
    for x in shards.values():
        bits(x).zero_()
    findings.check(handle.wait() is None and handle.done(), "done")
    path = folder if "max_shard_size" in options else folder / name
    check_file(findings, path, wholes, options)
    with staging.open(path) as file:
        findings.check(file.attrs()["title"] == "a", file.attrs())
    findings.check(_flights == [], _flights)
    total = world.comm.allreduce(sum(seen))
    findings.check(total == sum(x.nbytes for x in wholes.values()), total)


@mpi
def test_the_folder_of_the_call(
    gate: threading.Event, findings: Findings, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that changes its folder meanwhile finds the file where it asked for it."""
    monkeypatch.chdir(folder)
    handle = staging.save("x.h5", torch.ones(3), None, async_op=True)
    monkeypatch.chdir("/")
    gate.set()
    handle.wait()
    findings.same(staging.load(folder / "x.h5", dim=None), torch.ones(3), "x")


@mpi
def test_the_program_goes_on(gate: threading.Event, world: hd.World, findings: Findings, folder: Path) -> None:
    """The call returns while the file cannot be written; other calls run meanwhile, also with async_op, also saves."""
    size, (shards, wholes, dims) = world.world_size, some(world)
    handle = staging.save(folder / "x.h5", shards, dims, async_op=True)
    for x in shards.values():
        bits(x).zero_()
    time.sleep(0.05)
    findings.check(not handle.done() and not (folder / "x.h5").exists(), "it is on its way, without its name")
    findings.same(hd.concat(torch.tensor([world.rank])), torch.arange(size), "concat")
    later = hd.concat(torch.tensor([world.rank]), async_op=True)
    staging.save(folder / "y.h5", torch.full((2,), world.rank))
    findings.same(staging.load(folder / "y.h5", dim=None), torch.arange(size).repeat_interleave(2), "another file")
    with pytest.raises(TimeoutError):
        handle.wait(timeout=0.01)
    findings.check(world.comm.allreduce(1) == size, "the caller's own communicator")
    world.comm.Barrier()
    gate.set()
    handle.wait()
    findings.same(later.wait(), torch.arange(size), "a call behind it")
    check_file(findings, folder / "x.h5", wholes, "in the end")


@mpi
@pytest.mark.parametrize("how", ["load", "async", "sync", "another group", "open"])
def test_two_calls_of_one_name(
    how: str, gate: threading.Event, world: hd.World, findings: Findings, folder: Path
) -> None:
    """The file is that of the later save, which a load sees."""
    comm, path = world.comm.Dup(), folder / "x.h5"
    one, two = torch.full((2,), 1.0), torch.full((2,), 2.0)
    if how == "load":
        staging.save(path, two, None)
    handles = [staging.save(path, one, None, async_op=True)]
    threading.Timer(0.2, gate.set).start()
    if how == "open":
        with staging.open(path, "w", {"data": ((2,), torch.float32)}) as file:
            if world.rank == 0:
                file.write("data", two, (0,))
    elif how == "sync":
        staging.save(path, two, None)
    elif how != "load":
        group = comm if how == "another group" else None
        handles.append(staging.save(path, two, None, async_op=True, group=group))
    findings.same(staging.load(path, dim=None), one if how == "load" else two, how)
    for handle in handles:
        handle.wait()
    comm.Barrier()
    holds(world, folder, "x.h5")
    comm.Free()


@mpi
def test_copies_are_bounded(gate: threading.Event, world: hd.World, findings: Findings, folder: Path) -> None:
    """A second save waits for the memory of the first; a larger state is written before the call returns."""
    x = torch.arange(200_000)
    first = staging.save(folder / "a.h5", x, None, buffer=x.nbytes, async_op=True)
    findings.check([flight.nbytes for flight in _flights] == [x.nbytes], "one copy")
    threading.Timer(0.3, gate.set).start()
    begin = time.monotonic()
    second = staging.save(folder / "b.h5", x, None, buffer=x.nbytes + 10, async_op=True)
    findings.check(first.done() and time.monotonic() - begin > 0.1, "it has waited for the first")
    second.wait()
    gate.clear()
    threading.Timer(0.3, gate.set).start()
    begin, state = time.monotonic(), {name: x + i for i, name in enumerate("abc")}
    third = staging.save(folder / "c.h5", state, buffer=2 * x.nbytes, async_op=True)
    findings.check(time.monotonic() - begin > 0.1 and (folder / "c.h5").exists(), "it has waited until all is written")
    for y in state.values():
        bits(y).zero_()
    third.wait()
    got = staging.load(folder / "c.h5")
    for i, name in enumerate("abc"):
        findings.same(got[name], torch.arange(200_000) + i, name)


@mpi
@pytest.mark.parametrize("suffix", [".h5", ".safetensors"])
def test_a_failure_is_raised_by_wait(
    suffix: str, world: hd.World, findings: Findings, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mistake of one rank, or a disk without space there; the old file stays, and the job goes on."""
    path, last = folder / f"x{suffix}", world.world_size - 1
    old, new = torch.ones(20_000), torch.zeros(20_000)
    staging.save(path, old)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"dim": 7}, "dim is 7"),
        ({"buffer": -1}, "buffer is -1"),
        ({"writer": "mpio"}, "writer mpio does not write in the background"),
        ({"tensors": [1]}, "must be a torch.Tensor"),
        ({"buffer": None}, "No space"),
        ({"buffer": 0}, "No space"),
    ]
    fail = Mock(side_effect=OSError(28, os.strerror(28)))
    for wrong, text in cases:
        given = {"tensors": new, **(wrong if world.rank == last else {})}
        with monkeypatch.context() as patch:
            if world.rank == last and text == "No space":
                patch.setattr(plain, "write_at", fail)
            handle = staging.save(path, **given, async_op=True)
            for _ in range(2):
                refused(world, text, handle.wait, ranks=[last])
        findings.check(_flights == [], _flights)
        holds(world, folder, path.name)
        findings.same(staging.load(path, "data", dim=None), old.repeat(world.world_size), "the old file")
    staging.save(path, new, async_op=True).wait()
    findings.same(staging.load(path, "data", dim=None), new.repeat(world.world_size), "a new one")


@mpi
def test_without_threads(world: hd.World, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_thread_level", lambda: 0)
    with pytest.raises(hd.HpcdistError, match="MPI_THREAD_MULTIPLE"):
        staging.save(folder / "x.h5", torch.ones(2), async_op=True)
    holds(world, folder)


# A save whose writes take their time. "kill" kills rank 1, or all, meanwhile; else the program ends as said.
PROGRAM = """
    import os, signal, sys, time, torch, hpcdist as hd
    from hpcdist.formats import plain
    path, end, first = sys.argv[1:]
    world = hd.init(device="cpu")
    slow = plain.write_at
    def write_at(*args):
        time.sleep(20 if "kill" in end else 0.3)
        slow(*args)
    plain.write_at = write_at
    hd.staging.save(path, torch.arange(3) + 3 * world.rank + int(first), async_op=True)
    if "kill" in end:
        time.sleep(0.3)
        if world.rank or "all" in end:
            os.kill(os.getpid(), signal.SIGKILL)
    if end == "with":
        with world:
            pass
    if end == "finalize":
        hd.finalize()
"""


@pytest.mark.parametrize("np", [1, 2])
def test_the_end_of_the_program(np: int, tmp_path: Path) -> None:
    """Waits for the save; a killed job leaves the old file, and the next save sweeps what it has left."""
    path, first = tmp_path / "x.h5", -1
    for turn, end in enumerate(("with", "kill one" if np > 1 else "kill all", "finalize", "kill all", "nothing")):
        job = mpirun(np, "-c", dedent(PROGRAM), str(path), end, str(turn))
        if "kill" in end:
            assert job.status != 0, job
        else:
            assert (job.status, job.err) == (0, ""), job
            assert os.listdir(tmp_path) == ["x.h5"]
            first = turn
        with h5py.File(path, "r", locking=False) as file:
            assert file["data"][()].tolist() == [*range(first, first + 3 * np)], end


def test_a_failure_is_reported_if_nobody_waits(tmp_path: Path) -> None:
    code = f"""
        import torch, hpcdist as hd
        world = hd.init(device="cpu")
        handles = [hd.staging.save({str(tmp_path / "no folder" / "x.h5")!r}, torch.ones(2), async_op=True)]
        handles.append(hd.staging.save({str(tmp_path / "x.h5")!r}, torch.ones(2), async_op=True))
        handles[1].wait()
    """
    job = mpirun(2, code=code)
    assert job.status == 0, job
    assert job.err.count("hpcdist: staging.save() failed, and wait() was not called: RankError(") == 2, job.err
    assert "no folder" in job.err
    assert os.listdir(tmp_path) == ["x.h5"]
