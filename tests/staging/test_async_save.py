"""Saves in the background: the values of the call, whatever happens meanwhile; errors, names, the program's end."""

import os
import threading
import time
from textwrap import dedent
from unittest.mock import Mock

import h5py
import pytest
import torch
from cases import DTYPES, copy_of, extents_of, part, whole_of
from collective import refused
from conftest import holds
from launch import mpirun
from mpi4py import MPI

import hpcdist as hd
from hpcdist import staging
from hpcdist.formats import plain
from hpcdist.formats.safetensors import SAFETENSORS
from hpcdist.staging.save import flights
from hpcdist.tensors.storage import bits


@pytest.fixture
def gate(monkeypatch):
    """Holds the writes of this rank's background until it is set."""
    event, write_at, here = threading.Event(), plain.write_at, threading.get_ident()

    def gated(*args):
        assert threading.get_ident() == here or event.wait(30)
        write_at(*args)

    monkeypatch.setattr(plain, "write_at", gated)
    yield event
    event.set()


def flying():
    return [flight for flight in list(flights.values()) if not flight.handle.done()]


def some(world, dtypes=DTYPES):
    """(this rank's shards, the whole tensors, their dims): small, large and empty ones, of several dtypes."""
    extents = extents_of("zero in the middle", world.world_size)
    wholes = {f"{i}": whole_of((sum(extents), 3), dtype) for i, dtype in enumerate(sorted(dtypes, key=str)[::3])}
    wholes["large"] = whole_of((sum(extents), 60_000), torch.int64)
    shards = {name: copy_of(part(x, 0, extents, world.rank)) for name, x in wholes.items()}
    wholes["copy"] = whole_of((40,), torch.int64)
    shards["copy"] = wholes["copy"].clone()
    return shards, wholes, {**dict.fromkeys(shards, 0), "copy": None}


def check_file(findings, path, wholes, what):
    got = staging.load(path, dim=None, verify=True)
    for name, x in wholes.items():
        findings.same(got[name], x, (what, name))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("x.h5", {"writer": writer, "buffer": n}) for writer in ("auto", "posix") for n in (None, 0, 2000, 10**6)),
        ("x.h5", {"resume": True}),
        *(("x.safetensors", options) for options in ({}, {"max_shard_size": 10**6}, {"buffer": 0})),
    ],
    ids=str,
)
def test_values_of_the_call(name, options, world, findings, folder):
    """Which are changed as soon as it returns, however little can be copied; along rows, and columns with strides."""
    shards, wholes, dims = some(world, SAFETENSORS.dtypes if "safetensors" in name else DTYPES)
    extents, attrs, seen = extents_of("ragged", world.world_size), {"": {"title": "a"}}, []
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
    findings.check(flying() == [], flying())
    total = world.comm.allreduce(sum(seen))
    findings.check(total == sum(x.nbytes for x in wholes.values()), total)


def test_the_folder_of_the_call(gate, findings, folder, monkeypatch):
    """A program that changes its folder meanwhile finds the file where it asked for it."""
    monkeypatch.chdir(folder)
    handle = staging.save("x.h5", torch.ones(3), None, async_op=True)
    monkeypatch.chdir("/")
    gate.set()
    handle.wait()
    findings.same(staging.load(folder / "x.h5", dim=None), torch.ones(3), "x")


def test_the_program_goes_on(gate, world, size, findings, folder):
    """The call returns while the file cannot be written; other calls run meanwhile, also with async_op, also saves."""
    path, (shards, wholes, dims) = folder / "x.h5", some(world)
    mine, ranks = torch.tensor([world.rank]), torch.arange(size)
    handle = staging.save(path, shards, dims, async_op=True)
    for x in shards.values():
        bits(x).zero_()
    time.sleep(0.05)
    findings.check(not handle.done() and not path.exists(), "it is on its way, without its name")
    findings.same(hd.concat(mine), ranks, "concat")
    later = hd.concat(mine, async_op=True)
    staging.save(folder / "y.h5", mine)
    findings.same(staging.load(folder / "y.h5", dim=None), ranks, "another file")
    with pytest.raises(TimeoutError):
        handle.wait(timeout=0.01)
    findings.check(world.comm.allreduce(1) == size, "the caller's own communicator")
    world.comm.Barrier()
    gate.set()
    handle.wait()
    findings.same(later.wait(), ranks, "a call behind it")
    check_file(findings, path, wholes, "in the end")


@pytest.mark.parametrize("how", ["load", "async", "sync", "another group", "open"])
def test_two_calls_of_one_name(how, gate, world, findings, folder):
    """The file is that of the later save, which a load sees."""
    comm, path, spec = world.comm.Dup(), folder / "x.h5", {"data": ((2,), torch.float32)}
    one, two = torch.full((2,), 1.0), torch.full((2,), 2.0)
    if how == "load":
        staging.save(path, two, None)
    handles = [staging.save(path, one, None, async_op=True)]
    threading.Timer(0.2, gate.set).start()
    if how == "open":
        with staging.open(path, "w", spec) as file:
            if world.rank == 0:
                file.write("data", two, (0,))
    elif how == "sync":
        staging.save(path, two, None)
    elif how != "load":
        handles.append(staging.save(path, two, None, async_op=True, group=comm if how == "another group" else None))
    findings.same(staging.load(path, dim=None), one if how == "load" else two, how)
    for handle in handles:
        handle.wait()
    comm.Barrier()
    holds(folder, "x.h5")
    comm.Free()


def test_copies_are_bounded(gate, world, findings, folder):
    """A second save waits for the memory of the first; a larger state is written before the call returns."""
    x = torch.arange(200_000)

    def late(name, state, buffer):
        """A save that the gate holds up before it returns: that of the rank which writes."""
        world.comm.Barrier()  # else a late rank finds that the first has ended
        threading.Timer(1, gate.set).start()
        handle = staging.save(folder / name, state, None, buffer=buffer, async_op=True)
        findings.check(gate.is_set(), f"{name} has not waited")
        return handle

    first = staging.save(folder / "a.h5", x, None, buffer=x.nbytes, async_op=True)
    findings.check([flight.nbytes for flight in flying()] == [x.nbytes], "one copy")
    second = late("b.h5", x, x.nbytes + 10)
    findings.check(first.done(), "it has waited for the first")
    second.wait()
    gate.clear()
    state = {name: x + i for i, name in enumerate("abc")}
    third = late("c.h5", state, 2 * x.nbytes)
    findings.check((folder / "c.h5").exists(), "all is written")
    for y in state.values():
        bits(y).zero_()
    third.wait()
    check_file(findings, folder / "c.h5", {name: x + i for i, name in enumerate("abc")}, "the values of the call")


@pytest.mark.parametrize("suffix", [".h5", ".safetensors"])
def test_a_failure_is_raised_by_wait(suffix, world, size, findings, folder, monkeypatch):
    """A mistake of one rank, or a disk without space there; the old file stays, and the job goes on."""
    path, is_last = folder / f"x{suffix}", world.rank == size - 1
    old, new = torch.ones(20_000), torch.zeros(20_000)
    staging.save(path, old)
    cases = [
        ({"dim": 7}, "dim is 7"),
        ({"buffer": -1}, "buffer is -1"),
        ({"writer": "mpio"}, "writer mpio does not write in the background"),
        ({"tensors": [1]}, "must be a torch.Tensor"),
        ({"buffer": None}, "No space"),
        ({"buffer": 0}, "No space"),
    ]
    for wrong, text in cases:
        given = {"tensors": new, **(wrong if is_last else {})}
        with monkeypatch.context() as patch:
            if is_last and text == "No space":
                patch.setattr(plain, "write_at", Mock(side_effect=OSError(28, os.strerror(28))))
            handle = staging.save(path, **given, async_op=True)
            for _ in range(2):
                refused(text, handle.wait, ranks=[size - 1])
        findings.check(flying() == [], flying())
        holds(folder, path.name)
        findings.same(staging.load(path, "data", dim=None), old.repeat(size), "the old file")
    staging.save(path, new, async_op=True).wait()
    findings.same(staging.load(path, "data", dim=None), new.repeat(size), "a new one")
    monkeypatch.setattr(MPI, "Query_thread", lambda: MPI.THREAD_SINGLE)
    with pytest.raises(hd.HpcdistError, match="MPI_THREAD_MULTIPLE"):
        staging.save(folder / "y.h5", new, async_op=True)
    holds(folder, path.name)


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
    hd.staging.save(path + "/no folder/x.h5", torch.ones(2), async_op=True)
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
@pytest.mark.both
def test_the_end_of_the_program(np, tmp_path):
    """Waits for the save; a killed job leaves the old file, and the next save sweeps what it has left. A failure is
    reported if nobody waits."""
    path, first = tmp_path / "x.h5", -1
    for turn, end in enumerate(("with", "kill one", "finalize", "kill all", "nothing")[:: 3 - np]):
        job = mpirun(np, "-c", dedent(PROGRAM), str(path), end, str(turn))
        if "kill" in end:
            assert job.status != 0, job
        else:
            said = "hpcdist: staging.save() failed, and wait() was not called: RankError("
            assert (job.status, job.err.count(said), job.err.count("no folder") > 0) == (0, np, True), job
            assert os.listdir(tmp_path) == ["x.h5"]
            first = turn
        with h5py.File(path, "r", locking=False) as file:
            assert file["data"][()].tolist() == [*range(first, first + 3 * np)], end
