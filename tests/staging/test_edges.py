"""Where ranks could part, and where a file could say what is not so."""

import os
import sys
import time
from contextlib import contextmanager
from functools import partial
from unittest.mock import Mock

import h5py
import pytest
import torch
from collective import assert_on_all_ranks, refused
from conftest import WRITERS, holds, same
from safetensors.torch import save_file

import hpcdist as hd
from hpcdist import staging
from hpcdist.formats import hdf5
from hpcdist.staging import drivers

X = torch.arange(6).view(3, 2)


def last(world):
    return world.rank == world.world_size - 1


@contextmanager
def one_file(folder, world):
    """Nothing is left beside the file, and the next save succeeds."""
    yield
    world.comm.Barrier()  # rank 0 removes what there was, each on its own
    holds(folder, "x.h5")
    staging.save(folder / "x.h5", X)
    same(staging.load(folder / "x.h5", dim=None)[:3], X)


def test_piecewise_with_a_hole_or_twice_at_one_place(world, rank, folder):
    n, own = 2 * world.world_size, [2 * rank, 2 * rank + 1]
    for count, extent, places in ((n, n + 1, own), (0, n, []), (n + 1, n, own if rank else [0, *own])):

        def write(extent=extent, places=places):
            with staging.open(folder / "x.h5", "w", {"x": ((extent,), torch.int8)}) as file:
                for place in places:
                    file.write("x", torch.ones(1, dtype=torch.int8), (place,))

        refused(f"x: {count} elements were written, expected {extent}, each once", write)
        holds(folder)


def test_piecewise_that_raises(world, folder):
    """On all ranks, caught: nothing is left, no descriptor leaks, and the file can be written again."""
    staging.save(folder / "x.h5", X)
    before, open_ = (
        len(os.listdir("/proc/self/fd")),
        partial(staging.open, folder / "x.h5", "w", {"x": ((6,), X.dtype)}),
    )
    for _ in range(3):
        with one_file(folder, world), pytest.raises(ZeroDivisionError), open_() as file:
            raise ZeroDivisionError
        with pytest.raises(ValueError, match="the file is closed"):
            file.write("x", X[0], (0,))
    assert_on_all_ranks(len(os.listdir("/proc/self/fd")) == before)

    def leave_early():
        with open_():
            if last(world):
                hd.concat(X)

    if world.world_size > 1:  # one rank calls something else at the end
        with one_file(folder, world):
            refused("staging.close()", leave_early)


@pytest.mark.parametrize("foreign", [False, True])
def test_a_file_that_is_replaced_while_it_is_opened(foreign, world, folder, monkeypatch):
    """Either the old or the new file is read, never one with the other's offsets."""
    module = sys.modules["hpcdist.staging.load"]
    for name, value, first in (("old", 1, "a"), ("new", 2, "b")):
        x = {first: torch.full((50,), -1), "w": torch.full((50,), value)}
        staging.save(folder / f"{name}.h5", x, {first: 0, "w": None})
        if foreign and world.rank == 0:
            with h5py.File(folder / f"{name}.h5", "r+") as file:
                del file["_hpcdist"]
    world.comm.Barrier()
    describe = module.describe

    def late(path):
        contents = describe(path)
        monkeypatch.undo()
        os.replace(folder / "new.h5", folder / "old.h5")
        return contents

    monkeypatch.setattr(module, "describe", late)
    same(staging.load(folder / "old.h5", "w", dim=None, verify=False), torch.full((50,), 2))


def test_names_that_cannot_be_in_one_dict(world, folder):
    """Of files of other tools: refused before anything is read, and each can be loaded by its name."""
    for k, names in enumerate((("a", "a/b"), ("a/b", "a"), ("/a", "a"), ("", "x"), ("x//y", "x/"))):
        path = folder / f"{k}.safetensors"
        if world.rank == 0:
            save_file({name: torch.full((2,), i) for i, name in enumerate(names)}, path)
        world.comm.Barrier()
        refused("[HD408]", staging.load, path)
        for i, name in enumerate(names):
            if name:
                same(staging.load(path, name, dim=None), torch.full((2,), i))


@pytest.mark.parametrize("writer", WRITERS)
def test_progress_that_raises(writer, world, folder):
    staging.save(folder / "x.h5", X)
    raising = Mock(side_effect=ZeroDivisionError("no such luck") if last(world) else None)
    for dim in (0, 1):
        options = {"dim": dim, "progress": raising, "window": 16, "writer": writer}
        with one_file(folder, world):
            text = "progress raised ZeroDivisionError: no such luck"
            refused(text, staging.save, folder / "x.h5", X + 1, **options)


@pytest.mark.parametrize("path", ["x.h5", "x.safetensors", "piecewise"])
def test_what_is_lost_with_the_power(path, world, findings, folder, monkeypatch):
    """At every prefix of what the ranks do, what was not synced by the rank that wrote it may be gone: the name never
    stands for it, nor do the tables that make the file complete."""
    steps = []  # when, the rank, what

    def note(place, name):
        inner = getattr(place, name)

        def noted(*args, **kwargs):
            result = inner(*args, **kwargs)
            about = os.readlink(f"/proc/self/fd/{args[0]}") if name in ("pwrite", "fsync") else str(args[0])
            if about.endswith(".part") or name == "complete":
                steps.append((time.monotonic(), world.rank, name))
            return result

        monkeypatch.setattr(place, name, noted)

    for name in ("pwrite", "fsync", "replace"):
        note(os, name)
    note(type(hdf5.HDF5), "complete")
    x = torch.arange(60_000).view(2000, 30)
    if path == "piecewise":
        with staging.open(folder / path, "w", {"x": ((2000 * world.world_size, 30), x.dtype)}) as file:
            file.write("x", x, (2000 * world.rank, 0))
    else:
        staging.save(folder / path, x, writer="posix", window=50_000)
    monkeypatch.undo()
    every = sorted(step for of_rank in world.comm.allgather(steps) for step in of_rank)
    dirty, lost = set(), {}  # ranks with data that may be lost: now; when the file got its name
    for _, rank, done in every:
        if done == "fsync":
            dirty.discard(rank)
        elif done != "pwrite":  # or the tables were written
            lost[done] = set(dirty)
        if done in ("complete", "pwrite"):
            dirty.add(rank)
    findings.check(every[-1][2] == "replace" and "pwrite" in {done for *_, done in every}, every[-5:])
    findings.check(set(lost) == {"replace", *["complete"] * (path != "x.safetensors")}, lost)
    findings.check(not any(lost.values()), f"ranks whose data were not synced: {lost}")


def test_a_file_that_is_replaced_while_it_is_read(world, findings, folder):
    """By the next checkpoint, say: what is open is read to its end, and no part of the new one."""
    path, x, n = folder / "x.h5", torch.zeros(40, 10), 40 * world.world_size
    staging.save(path, x)
    with staging.open(path) as file:
        findings.check(not file.read("data", (0, 0), (n // 2, 10)).any(), "the first half")
        staging.save(path, x + 1)
        findings.check(not file.read("data", (n // 2, 0), (n - n // 2, 10)).any(), "the second half")

    def replace(nbytes):
        if world.rank == 0 and (folder / "new.h5").exists():
            os.rename(folder / "new.h5", path)

    staging.save(folder / "new.h5", x)
    findings.check(staging.load(path, dim=None, window=400, progress=replace).eq(1).all(), "the file of the call")


def test_a_rank_that_opens_late(world, rank, folder, monkeypatch):
    """Rank 0 has given up its file before: what the others write reaches it, or fails for a reason of its own."""
    pages = torch.arange(2**14)
    if rank:
        see = drivers.PartFile.see
        monkeypatch.setattr(drivers.PartFile, "see", lambda self: (time.sleep(0.3), see(self)))

    def write():
        with staging.open(folder / "x.h5", "w", {"x": ((len(pages),), pages.dtype)}) as file:
            if rank:
                file.write("x", pages, (0,))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write()
    world.comm.Barrier()
    holds(folder)


@pytest.mark.parametrize("again", [False, True])
def test_a_write_that_fails(again, world, rank, folder, monkeypatch):
    """The program that caught the error may write the box again; if it does not, the box is missing at the end."""
    n = world.world_size

    def close():
        with staging.open(folder / "x.h5", "w", {"x": ((100, n), torch.int64)}) as file:
            write = partial(file.write, "x", torch.full((100, 1), rank), (0, rank))
            if last(world):
                with monkeypatch.context() as patch:
                    patch.setattr(file._file.files[0].edges._data, "write", lambda data: 1 / 0)
                    with pytest.raises(ZeroDivisionError):
                        write()
            if again or not last(world):
                write()

    if again:
        close()
        same(staging.load(folder / "x.h5", "x", dim=None), torch.arange(n).expand(100, n))
    else:
        refused(f"{100 * (n - 1)} elements were written, expected {100 * n}, each once", close, ranks=range(n))
        holds(folder)
