"""Saves in the background: the values of the call, whatever happens meanwhile; errors, names, the program's end."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import DTYPES, extents_of, part, whole_of
from collective import Findings, assert_on_all_ranks, raises_on_all_ranks
from conftest import WRITERS
from launch import mpirun
from safetensors.torch import load_file

import hpcdist as hd
from hpcdist import staging
from hpcdist.files import raw
from hpcdist.files.safetensors import KINDS
from hpcdist.runtime import background
from hpcdist.staging import in_flight
from hpcdist.tensors.storage import bits

mpi = pytest.mark.mpi


class Gate:
    """Holds the writes of this rank's background until it is opened; counts them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.event = threading.Event()
        self.event.set()
        write_at, here = raw.write_at, threading.get_ident()

        def gated(fd: int, offset: int, data: memoryview, digest: Any = None) -> None:
            if threading.get_ident() != here:
                assert self.event.wait(30)
            write_at(fd, offset, data, digest)

        patch.setattr(raw, "write_at", gated)

    def close(self) -> None:
        self.event.clear()

    def open(self) -> None:
        self.event.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.open()


def copied(x: torch.Tensor) -> torch.Tensor:
    """A copy, also of the dtypes that torch cannot copy."""
    return bits(x).clone().view(x.dtype)


def some(world: hd.World, value: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """(this rank's shards, the whole tensors): small, large and empty ones, of several dtypes."""
    extents = extents_of("zero in the middle", world.world_size)
    wholes = {f"{dtype}".removeprefix("torch."): whole_of((sum(extents), 3), dtype) for dtype in list(DTYPES)[::3]}
    wholes["large"] = whole_of((sum(extents), 60_000), torch.int64) + value
    wholes["copy"] = whole_of((40,), torch.int64) + value
    shards: dict[str, Any] = {name: copied(part(x, 0, extents, world.rank)) for name, x in wholes.items()}
    shards["copy"] = wholes["copy"].clone()
    return shards, wholes


def dims(shards: dict[str, Any]) -> dict[str, int | None]:
    return {name: None if name == "copy" else 0 for name in shards}


def check_file(findings: Findings, path: Path, wholes: dict[str, Any], what: object) -> None:
    got = staging.load(path, dim=None, verify=True)
    for name, x in wholes.items():
        findings.same(got[name], x, (what, name))


@mpi
@pytest.mark.parametrize("buffer", [None, 0, 2000, 10**6], ids="buffer-{}".format)
@pytest.mark.parametrize("writer", ["auto", *WRITERS])
def test_values_of_the_call(writer: str, buffer: int | None, world: hd.World, folder: Path) -> None:
    """Which are changed as soon as it returns, however little can be copied."""
    findings = Findings(world.comm)
    shards, wholes = some(world, 0)
    attrs = {"": {"title": ["a"]}}
    handle = staging.save(
        folder / "x.h5", shards, dims(shards), attrs=attrs, writer=writer, buffer=buffer, async_op=True, window=100_000
    )
    attrs[""]["title"][0] = "b"
    for x in shards.values():
        bits(x).zero_()
    findings.check(handle.wait() is None, "wait returns None")
    findings.check(handle.done(), "done")
    check_file(findings, folder / "x.h5", wholes, (writer, buffer))
    with staging.open(folder / "x.h5") as file:
        findings.check(list(file.attrs()["title"]) == ["a"], file.attrs())
    findings.check(in_flight._flights == [], in_flight._flights)
    findings.settle()


@mpi
@pytest.mark.parametrize("options", [{"compression": 1}, {"resume": True}, {"writers": 1}], ids=str)
def test_options(options: dict[str, Any], world: hd.World, folder: Path) -> None:
    findings = Findings(world.comm)
    shards, wholes = some(world, 0)
    seen: list[int] = []
    staging.save(folder / "x.h5", shards, dims(shards), progress=seen.append, async_op=True, **options).wait()
    check_file(findings, folder / "x.h5", wholes, options)
    total = world.comm.allreduce(sum(seen))
    findings.check(total == sum(x.nbytes for x in wholes.values()), total)
    findings.settle()


@mpi
def test_strides_dims_and_a_single_tensor(world: hd.World, folder: Path) -> None:
    findings, extents = Findings(world.comm), extents_of("ragged", world.world_size)
    whole = whole_of((30, sum(extents)), torch.bfloat16)
    mine = part(whole, 1, extents, world.rank).t().contiguous().t()
    handle = staging.save(folder / "x.h5", mine, 1, async_op=True)
    bits(mine).zero_()
    handle.wait()
    findings.same(staging.load(folder / "x.h5", dim=None), whole, "columns")
    findings.settle()


@mpi
def test_safetensors(world: hd.World, folder: Path) -> None:
    findings = Findings(world.comm)
    shards, wholes = some(world, 0)
    keep = {name: x for name, x in shards.items() if x.dtype in KINDS and x.dtype.itemsize > 1}
    for options in ({}, {"max_shard_size": 10**6}, {"buffer": 0}):
        handle = staging.save(folder / "x.safetensors", keep, dims(keep), async_op=True, **options)
        handle.wait()
        files = sorted(path for path in folder.iterdir() if path.suffix == ".safetensors")
        got = {name: x for path in files for name, x in load_file(path).items()}
        for name in keep:
            findings.same(got[name], wholes[name], (options, name))
        world.comm.Barrier()
        if world.rank == 0:
            for path in folder.iterdir():
                path.unlink()
        world.comm.Barrier()
    findings.settle()


@mpi
def test_the_program_goes_on(gate: Gate, world: hd.World, folder: Path) -> None:
    """The call returns while the file cannot be written; other calls run meanwhile, also with async_op, also saves."""
    findings, size = Findings(world.comm), world.world_size
    shards, wholes = some(world, 0)
    gate.close()
    handle = staging.save(folder / "x.h5", shards, dims(shards), async_op=True)
    for x in shards.values():
        bits(x).zero_()
    time.sleep(0.05)
    findings.check(not handle.done(), "it is on its way")
    findings.check(not (folder / "x.h5").exists(), "nothing has its name yet")
    whole = hd.concat(torch.tensor([world.rank]))
    findings.same(whole, torch.arange(size), "concat")
    later = hd.concat(torch.tensor([world.rank]), async_op=True)
    staging.save(folder / "y.h5", torch.full((2,), world.rank))
    findings.same(staging.load(folder / "y.h5", dim=None), torch.arange(size).repeat_interleave(2), "another file")
    with pytest.raises(TimeoutError):
        handle.wait(timeout=0.01)
    findings.check(world.comm.allreduce(1) == size, "the caller's own communicator")
    world.comm.Barrier()
    gate.open()
    handle.wait()
    findings.same(later.wait(), torch.arange(size), "a call behind it")
    check_file(findings, folder / "x.h5", wholes, "in the end")
    findings.settle()


@mpi
@pytest.mark.parametrize("how", ["async", "sync", "another group", "open"])
def test_two_saves_of_one_name(how: str, gate: Gate, world: hd.World, folder: Path) -> None:
    """The file is that of the later call."""
    findings, comm = Findings(world.comm), world.comm.Dup()
    gate.close()
    first = staging.save(folder / "x.h5", torch.full((2,), 1.0), None, async_op=True)
    threading.Timer(0.2, gate.open).start()
    second = None
    if how == "open":
        with staging.open(folder / "x.h5", "w", {"data": ((2,), torch.float32)}) as file:
            if world.rank == 0:
                file.write("data", torch.full((2,), 2.0), (0,))
    elif how == "sync":
        staging.save(folder / "x.h5", torch.full((2,), 2.0), None)
    else:
        group = comm if how == "another group" else None
        second = staging.save(folder / "x.h5", torch.full((2,), 2.0), None, async_op=True, group=group)
    got = staging.load(folder / "x.h5", dim=None)
    findings.same(got, torch.full((2,), 2.0), how)
    for handle in (first, second):
        if handle is not None:
            handle.wait()
    comm.Barrier()
    findings.check(os.listdir(folder) == ["x.h5"], os.listdir(folder))
    findings.settle()
    comm.Free()


@mpi
def test_load_waits_for_the_save(gate: Gate, world: hd.World, folder: Path) -> None:
    findings = Findings(world.comm)
    staging.save(folder / "x.h5", torch.full((2,), 1.0), None)
    gate.close()
    handle = staging.save(folder / "x.h5", torch.full((2,), 2.0), None, async_op=True)
    threading.Timer(0.2, gate.open).start()
    findings.same(staging.load(folder / "x.h5", dim=None), torch.full((2,), 2.0), "the new file")
    handle.wait()
    with staging.open(folder / "x.h5") as file:
        findings.same(file.read("data"), torch.full((2,), 2.0), "open")
    findings.settle()


@mpi
def test_copies_are_bounded(gate: Gate, world: hd.World, folder: Path) -> None:
    """A second save waits for the memory of the first; a larger state is written before the call returns."""
    findings = Findings(world.comm)
    x = torch.arange(200_000)
    gate.close()
    first = staging.save(folder / "a.h5", x, None, buffer=x.nbytes, async_op=True)
    findings.check([flight.nbytes for flight in in_flight._flights] == [x.nbytes], "one copy")
    threading.Timer(0.3, gate.open).start()
    begin = time.monotonic()
    second = staging.save(folder / "b.h5", x, None, buffer=x.nbytes + 10, async_op=True)
    findings.check(first.done() and time.monotonic() - begin > 0.1, "it has waited for the first")
    second.wait()
    gate.close()
    threading.Timer(0.3, gate.open).start()
    begin = time.monotonic()
    state = {"a": x, "b": x + 1, "c": x + 2}
    third = staging.save(folder / "c.h5", state, buffer=2 * x.nbytes, async_op=True)
    findings.check(time.monotonic() - begin > 0.1, "it has waited until a is written")
    copied = sum(flight.nbytes for flight in in_flight._flights)
    findings.check(copied in (0, 2 * x.nbytes), copied)  # 0: it is complete by now
    for y in state.values():
        bits(y).zero_()
    third.wait()
    got = staging.load(folder / "c.h5")
    for i, name in enumerate("abc"):
        findings.same(got[name], torch.arange(200_000) + i, name)
    findings.settle()


@mpi
@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"dim": 7}, "dim is 7"),
        ({"window": 0}, "window is 0"),
        ({"buffer": -1}, "buffer is -1"),
        ({"tensors": [1]}, "must be a torch.Tensor"),
    ],
    ids=str,
)
def test_a_mistake_is_raised_by_wait(wrong: dict[str, Any], text: str, world: hd.World, folder: Path) -> None:
    last = world.world_size - 1
    staging.save(folder / "x.h5", torch.ones(2))
    given = {"tensors": torch.ones(2), **(wrong if world.rank == last else {})}
    handle = staging.save(folder / "x.h5", **given, async_op=True)
    error = raises_on_all_ranks(world.comm, hd.RankError, handle.wait)
    assert_on_all_ranks(world.comm, list(error.problems) == [last] and text in str(error), error)
    raises_on_all_ranks(world.comm, hd.RankError, handle.wait)
    findings = Findings(world.comm)
    findings.same(staging.load(folder / "x.h5", dim=None), torch.ones(2 * world.world_size), "the old file")
    staging.save(folder / "x.h5", torch.zeros(2), async_op=True).wait()
    findings.same(staging.load(folder / "x.h5", dim=None), torch.zeros(2 * world.world_size), "a new one")
    findings.settle()


@mpi
@pytest.mark.parametrize("suffix", [".h5", ".safetensors"])
def test_a_write_that_fails(suffix: str, world: hd.World, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, last = folder / f"x{suffix}", world.world_size - 1
    staging.save(path, torch.ones(20_000))

    def fail(*args: Any) -> None:
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patch:
        if world.rank == last:
            patch.setattr(raw, "write_at", fail)
        for buffer in (None, 0):
            handle = staging.save(path, torch.zeros(20_000), buffer=buffer, async_op=True)
            error = raises_on_all_ranks(world.comm, hd.RankError, handle.wait)
            assert_on_all_ranks(world.comm, list(error.problems) == [last] and "No space" in str(error), error)
            assert_on_all_ranks(world.comm, in_flight._flights == [], in_flight._flights)
    assert_on_all_ranks(world.comm, os.listdir(folder) == [path.name], os.listdir(folder))
    if suffix == ".h5":
        got = staging.load(path, dim=None)
        assert_on_all_ranks(world.comm, torch.equal(got, torch.ones(20_000 * world.world_size)), got)


@mpi
def test_without_threads(world: hd.World, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_thread_level", lambda: 0)
    with pytest.raises(hd.HpcdistError, match="MPI_THREAD_MULTIPLE"):
        staging.save(folder / "x.h5", torch.ones(2), async_op=True)
    world.comm.Barrier()
    assert_on_all_ranks(world.comm, os.listdir(folder) == [], os.listdir(folder))


@pytest.mark.parametrize("np", [1, 2])
@pytest.mark.parametrize("end", ["with", "finalize", "nothing"])
def test_the_end_of_the_program_waits(end: str, np: int, tmp_path: Path) -> None:
    code = f"""
        import time, torch, hpcdist as hd
        from hpcdist.files import raw
        world = hd.init(device="cpu")
        slow = raw.write_at
        def write_at(*args):
            time.sleep(0.3)
            slow(*args)
        raw.write_at = write_at
        hd.staging.save({str(tmp_path / "x.h5")!r}, torch.full((3,), world.rank), async_op=True)
        if {end!r} == "with":
            with world:
                pass
        if {end!r} == "finalize":
            hd.finalize()
    """
    job = mpirun(np, code=code)
    assert (job.status, job.err) == (0, ""), job
    with staging_file(tmp_path / "x.h5") as got:
        assert got.tolist() == [rank for rank in range(np) for _ in range(3)]
    assert os.listdir(tmp_path) == ["x.h5"]


def staging_file(path: Path) -> Any:
    import contextlib

    import h5py

    @contextlib.contextmanager
    def opened() -> Iterator[Any]:
        with h5py.File(path, "r", locking=False) as file:
            yield file["data"][()]

    return opened()


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
    assert job.err.count("hpcdist: staging.save() failed, but was never waited for: RankError(") == 2, job.err
    assert "no folder" in job.err
    assert os.listdir(tmp_path) == ["x.h5"]


@pytest.mark.parametrize("victims", ["world.rank == 1", "True"])
def test_a_killed_job_leaves_the_old_file(victims: str, tmp_path: Path) -> None:
    """And the next save sweeps what it has left."""
    path = tmp_path / "x.h5"
    code = f"""
        import os, signal, sys, time, torch, hpcdist as hd
        from hpcdist.files import raw
        world = hd.init(device="cpu")
        kill = len(sys.argv) > 1
        hd.staging.save({str(path)!r}, torch.full((3,), world.rank))
        slow = raw.write_at
        def write_at(*args):
            if kill:
                time.sleep(20)
            slow(*args)
        raw.write_at = write_at
        handle = hd.staging.save({str(path)!r}, torch.full((3,), world.rank + 10), async_op=True)
        time.sleep(0.3)
        if kill and {victims}:
            os.kill(os.getpid(), signal.SIGKILL)
        handle.wait()
    """
    job = mpirun(2, "-c", __import__("textwrap").dedent(code), "kill")
    assert job.status != 0, job
    with staging_file(path) as got:
        assert got.tolist() == [0, 0, 0, 1, 1, 1]
    assert mpirun(2, code=code).status == 0
    with staging_file(path) as got:
        assert got.tolist() == [10, 10, 10, 11, 11, 11]
    assert os.listdir(tmp_path) == ["x.h5"]
