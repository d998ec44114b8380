"""Where ranks could part, and where a file could say what is not so."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import h5py
import pytest
import torch
from collective import Findings, assert_on_all_ranks
from conftest import WRITERS, holds, refused, same
from safetensors.torch import save_file

import hpcdist as hd
from hpcdist import staging
from hpcdist.formats import hdf5
from hpcdist.staging.drivers import PartFile
from hpcdist.staging.reader import OpenFiles

pytestmark = pytest.mark.mpi

X = torch.arange(6).view(3, 2)


def last(world: hd.World) -> bool:
    return world.rank == world.world_size - 1


@contextmanager
def one_file(folder: Path, world: hd.World) -> Iterator[None]:
    """Nothing is left beside the file, and the next save succeeds."""
    yield
    world.comm.Barrier()  # rank 0 removes what there was, each on its own
    holds(world, folder, "x.h5")
    staging.save(folder / "x.h5", X)
    same(world, staging.load(folder / "x.h5", dim=None)[:3], X)


def test_piecewise_with_names_in_another_order(world: hd.World, folder: Path) -> None:
    names = ["a", "b", "c"] if not last(world) else ["c", "b", "a"]
    spec = dict.fromkeys(names, ((world.world_size,), torch.int64))
    with staging.open(folder / "x.h5", "w", spec) as file:
        for i, name in enumerate("abc"):
            file.write(name, torch.tensor([10 * world.rank + i]), (world.rank,))
    got = staging.load(folder / "x.h5", dim=None, verify=True)
    for i, name in enumerate("abc"):
        assert_on_all_ranks(world.comm, got[name].tolist() == [10 * r + i for r in range(world.world_size)], got)


def test_piecewise_with_a_hole_or_twice_at_one_place(world: hd.World, folder: Path) -> None:
    n = 2 * world.world_size
    one = torch.ones(1, dtype=torch.int8)
    cases = {
        f"{n} elements were written, expected {n + 1}, each once": (n + 1, lambda rank: [2 * rank, 2 * rank + 1]),
        f"0 elements were written, expected {n}, each once": (n, lambda rank: []),
        f"{n + 1} elements were written, expected {n}, each once": (
            n,
            lambda rank: [0, 2 * rank, 2 * rank + 1][rank > 0 :],
        ),
    }
    for text, (extent, places) in cases.items():

        def write(extent: int = extent, places: Callable[[int], list[int]] = places) -> None:
            with staging.open(folder / "x.h5", "w", {"x": ((extent,), torch.int8)}) as file:
                for place in places(world.rank):
                    file.write("x", one, (place,))

        refused(world, f"x: {text}", write)
        holds(world, folder)


def test_piecewise_that_raises(world: hd.World, folder: Path) -> None:
    """On all ranks, caught: nothing is left, no descriptor leaks, and the file can be written again."""
    staging.save(folder / "x.h5", X)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with (
            one_file(folder, world),
            pytest.raises(ZeroDivisionError),
            staging.open(folder / "x.h5", "w", {"x": ((2,), torch.int8)}) as file,
        ):
            raise ZeroDivisionError
        with pytest.raises(ValueError, match="the file is closed"):
            file.write("x", torch.ones(2, dtype=torch.int8), (0,))
    assert_on_all_ranks(world.comm, len(os.listdir("/proc/self/fd")) == before)
    if world.world_size > 1:  # one rank calls something else at the end
        with one_file(folder, world):
            refused(world, "staging.close()", _leave_early, world, folder)


def _leave_early(world: hd.World, folder: Path) -> None:
    with staging.open(folder / "x.h5", "w", {"x": ((2,), torch.int8)}):
        if last(world):
            hd.concat(X)


def test_arguments_of_open_that_are_wrong_on_one_rank(world: hd.World, folder: Path) -> None:
    for bad in ({"attrs": 5}, {"window": 0}, {"attrs": {"y": {}}}, {"attrs": {"x": {"torch_dtype": "int8"}}}):
        kwargs: dict[str, Any] = bad if last(world) else {}
        refused(
            world,
            "",
            staging.open,
            folder / "x.h5",
            "w",
            {"x": ((2,), torch.int8)},
            ranks=[world.world_size - 1],
            **kwargs,
        )
    holds(world, folder)


def test_a_file_that_is_replaced_while_it_is_opened(
    world: hd.World, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either the old or the new file is read, never one with the other's offsets."""
    module = sys.modules["hpcdist.staging.load"]
    for foreign in (False, True):
        for name, value, first in (("old", 1, "a"), ("new", 2, "b")):
            x = {first: torch.full((50,), -1), "w": torch.full((50,), value)}
            staging.save(folder / f"{name}.h5", x, {first: 0, "w": None})
            world.comm.Barrier()
            if foreign and world.rank == 0:
                with h5py.File(folder / f"{name}.h5", "r+") as file:
                    del file["_hpcdist"]
            world.comm.Barrier()
        describe = module.describe
        replaced: list[int] = []

        def late(path: str, inner: Any = describe, done: list[int] = replaced) -> Any:
            contents = inner(path)
            if not done:
                done.append(1)
                os.replace(folder / "new.h5", folder / "old.h5")
            return contents

        monkeypatch.setattr(module, "describe", late)
        got = staging.load(folder / "old.h5", "w", dim=None, verify=False)
        monkeypatch.undo()
        same(world, got, torch.full((50,), 2))


@pytest.mark.parametrize("writer", WRITERS)
def test_one_rank_cannot_open_the_file_for_writing(
    writer: str, world: hd.World, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging.save(folder / "x.h5", X)
    see = PartFile.see

    def failing(self: PartFile) -> None:
        see(self)
        if last(world):
            raise OSError(24, "Too many open files")

    monkeypatch.setattr(PartFile, "see", failing)
    with one_file(folder, world):
        refused(
            world,
            "Too many open files",
            staging.save,
            folder / "x.h5",
            X + 1,
            ranks=[world.world_size - 1],
            writer=writer,
        )
        monkeypatch.undo()


def test_names_that_cannot_be_in_one_dict(world: hd.World, folder: Path) -> None:
    """Of files of other tools: refused before anything is read, and each can be loaded by its name."""
    for k, names in enumerate((("a", "a/b"), ("a/b", "a"), ("/a", "a"), ("", "x"), ("x//y", "x/"))):
        if world.rank == 0:
            save_file({name: torch.full((2,), i) for i, name in enumerate(names)}, folder / f"{k}.safetensors")
        world.comm.Barrier()
        refused(world, "cannot both be in one nested dict", staging.load, folder / f"{k}.safetensors", ranks=None)
        for i, name in enumerate(names):
            if name:
                same(world, staging.load(folder / f"{k}.safetensors", name, dim=None), torch.full((2,), i))


def test_a_dim_of_a_tensor_that_is_not_there(world: hd.World, folder: Path) -> None:
    staging.save(folder / "x.h5", {"m/w": X})
    refused(world, "dim names 'm.w', which is not there", staging.load, folder / "x.h5", dim={"m.w": None}, ranks=None)


def test_a_file_that_cannot_be_opened_is_not_tried_for_ever(
    world: hd.World, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging.save(folder / "x.h5", X)
    monkeypatch.setattr(OpenFiles, "fd", Mock(side_effect=hd.FileError("HD402", "x.h5: cannot be read")))
    with pytest.raises(hd.FileError, match="cannot be read"):
        staging.open(folder / "x.h5")


@pytest.mark.parametrize("writer", WRITERS)
def test_progress_that_raises(writer: str, world: hd.World, folder: Path) -> None:
    staging.save(folder / "x.h5", X)

    def raising(nbytes: int) -> None:
        if last(world):
            raise ZeroDivisionError("no such luck")

    for dim in (0, 1):
        options: dict[str, Any] = {"dim": dim, "progress": raising, "window": 16}
        save = partial(staging.save, folder / "x.h5", X + 1, writer=writer, **options)
        with one_file(folder, world):
            refused(world, "progress raised ZeroDivisionError: no such luck", save)
        refused(world, "no such luck", staging.load, folder / "x.h5", **options)


def test_pieces_that_are_damaged(world: hd.World, folder: Path) -> None:
    """Found where a whole piece is read, unless nothing is to be verified."""
    x = torch.arange(600).view(20, 30)
    staging.save(folder / "x.h5", x, window=400 * world.world_size)
    same(world, staging.load(folder / "x.h5", dim=None)[:20], x)
    if world.rank == 0:
        with h5py.File(folder / "x.h5", "r+") as file:
            file["data"][0, 4] = 99  # a piece has a row or more
    world.comm.Barrier()
    for verify in (None, True):
        refused(world, "data: piece 0 is damaged", staging.load, folder / "x.h5", dim=None, verify=verify)
    assert_on_all_ranks(world.comm, staging.load(folder / "x.h5", dim=None, verify=False)[0, 4] == 99)
    with staging.open(folder / "x.h5") as file:
        same(world, file.read("data", (0, 5), (1, 1)), x[0:1, 5:6], "a part of a piece")


@pytest.mark.parametrize("path", ["x.h5", "x.safetensors", "piecewise"])
def test_what_is_lost_with_the_power(
    path: str, world: hd.World, findings: Findings, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every prefix of what the ranks do, what was not synced by the rank that wrote it may be gone: the name never
    stands for it, nor do the tables that make the file complete."""
    steps: list[tuple[float, int, str]] = []  # when, the rank, what

    def noting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            about = os.readlink(f"/proc/self/fd/{args[0]}") if name in ("pwrite", "fsync") else str(args[0])
            if about.endswith(".part") or name == "mark":
                steps.append((time.monotonic(), world.rank, name))
            return result

        return noted

    for name in ("pwrite", "fsync", "replace"):
        monkeypatch.setattr(os, name, noting(name, getattr(os, name)))
    monkeypatch.setattr(hdf5._HDF5, "complete", noting("mark", hdf5._HDF5.complete))
    x = torch.arange(60_000).view(2000, 30)
    if path == "piecewise":
        with staging.open(folder / path, "w", {"x": ((2000 * world.world_size, 30), x.dtype)}) as file:
            file.write("x", x, (2000 * world.rank, 0))
    else:
        staging.save(folder / path, x, writer="posix", window=50_000)
    monkeypatch.undo()
    all_ = sorted(step for rank in world.comm.allgather(steps) for step in rank)
    dirty: set[int] = set()  # ranks with data that may be lost
    lost = {}  # when the tables were written, and when the file got its name
    for _, rank, what in all_:
        if what == "fsync":
            dirty.discard(rank)
        elif what in ("mark", "replace"):
            lost[what] = set(dirty)
        if what in ("mark", "pwrite"):
            dirty.add(rank)
    findings.check(all_[-1][2] == "replace" and "pwrite" in {what for *_, what in all_}, all_[-5:])
    findings.check(set(lost) == ({"replace"} if path == "x.safetensors" else {"mark", "replace"}), lost)
    findings.check(not any(lost.values()), f"ranks whose data were not synced: {lost}")


def test_a_file_that_is_replaced_while_it_is_read(world: hd.World, findings: Findings, folder: Path) -> None:
    """By the next checkpoint, say: what is open is read to its end, and no part of the new one."""
    x = torch.zeros(40, 10)
    save = partial(staging.save, folder / "x.h5")
    save(x)
    n = 40 * world.world_size
    with staging.open(folder / "x.h5") as file:
        findings.check(not file.read("data", (0, 0), (n // 2, 10)).any(), "the first half")
        save(x + 1)
        findings.check(not file.read("data", (n // 2, 0), (n - n // 2, 10)).any(), "the second half")
    world.comm.Barrier()
    replaced: list[int] = []

    def replace(nbytes: int) -> None:
        if not replaced and world.rank == 0:
            os.rename(folder / "new.h5", folder / "x.h5")
        replaced.append(nbytes)

    staging.save(folder / "new.h5", x)
    got = staging.load(folder / "x.h5", dim=None, window=400, progress=replace)
    findings.check(bool((got == 1).all()), got)


@pytest.mark.parametrize("again", [False, True])
def test_a_write_that_fails(again: bool, world: hd.World, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program that caught the error may write the box again; if it does not, the box is missing at the end."""
    n = world.world_size

    def close() -> None:
        with staging.open(folder / "x.h5", "w", {"x": ((100, n), torch.int64)}) as file:
            write = partial(file.write, "x", torch.full((100, 1), world.rank), (0, world.rank))
            if last(world):
                with monkeypatch.context() as patch:
                    patch.setattr(file._file.files[0].edges._data, "write", lambda data: 1 / 0)
                    with pytest.raises(ZeroDivisionError):
                        write()
            if again or not last(world):
                write()

    if again:
        close()
        same(world, staging.load(folder / "x.h5", dim=None)["x"], torch.arange(n).expand(100, n))
    else:
        refused(
            world, f"{100 * (n - 1)} elements were written, expected {100 * n}, each once", close, ranks=list(range(n))
        )
        holds(world, folder)
