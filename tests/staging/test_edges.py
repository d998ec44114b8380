"""Where ranks could part, and where a file could say what is not so."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from collective import Findings, assert_on_all_ranks, raises_on_all_ranks
from conftest import WRITERS

import hpcdist as hd
from hpcdist import staging
from hpcdist.commands.outputs import Array, Output
from hpcdist.files import h5
from hpcdist.staging import drivers, opened
from hpcdist.staging.target import SaveOptions

pytestmark = pytest.mark.mpi

X = torch.arange(6).view(3, 2)


def last(world: hd.World) -> bool:
    return world.rank == world.world_size - 1


@contextmanager
def one_file(folder: Path, world: hd.World, left: int = 1) -> Iterator[None]:
    """Nothing is left beside the file, and the next save succeeds."""
    yield
    world.comm.Barrier()  # rank 0 removes what there was, each on its own
    assert_on_all_ranks(world.comm, len(os.listdir(folder)) == left, os.listdir(folder))
    staging.save(folder / "x.h5", X)
    assert_on_all_ranks(world.comm, torch.equal(staging.load(folder / "x.h5", dim=None)[:3], X))


def test_piecewise_with_names_in_another_order(world: hd.World, folder: Path) -> None:
    names = ["a", "b", "c"] if not last(world) else ["c", "b", "a"]
    spec = dict.fromkeys(names, ((world.world_size,), torch.int64))
    with staging.open(folder / "x.h5", "w", spec) as file:
        for i, name in enumerate("abc"):
            file.write(name, torch.tensor([10 * world.rank + i]), (world.rank,))
    got = staging.load(folder / "x.h5", dim=None, verify=True)
    for i, name in enumerate("abc"):
        assert_on_all_ranks(world.comm, got[name].tolist() == [10 * r + i for r in range(world.world_size)], got)


def test_piecewise_twice_at_one_place(world: hd.World, folder: Path) -> None:
    def write() -> None:
        with staging.open(folder / "x.h5", "w", {"x": ((2 * world.world_size,), torch.int8)}) as file:
            for _ in range(1 if world.rank else 2):
                file.write("x", torch.ones(2, dtype=torch.int8), (0,))

    error = raises_on_all_ranks(world.comm, hd.RankError, write)
    assert_on_all_ranks(world.comm, "elements 0:2 were written twice" in str(error), error)


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
            error = raises_on_all_ranks(world.comm, hd.RankError, lambda: _leave_early(world, folder))
            assert_on_all_ranks(world.comm, "staging.close()" in str(error), error)


def _leave_early(world: hd.World, folder: Path) -> None:
    with staging.open(folder / "x.h5", "w", {"x": ((2,), torch.int8)}):
        if last(world):
            hd.concat(X)


def test_arguments_of_open_that_are_wrong_on_one_rank(world: hd.World, folder: Path) -> None:
    for bad in ({"attrs": 5}, {"window": 0}, {"attrs": {"y": {}}}, {"attrs": {"x": {"torch_dtype": "int8"}}}):
        kwargs: dict[str, Any] = bad if last(world) else {}
        spec = {"x": ((2,), torch.int8)}
        error = raises_on_all_ranks(
            world.comm, hd.RankError, lambda k=kwargs, s=spec: staging.open(folder / "x.h5", "w", s, **k)
        )
        assert_on_all_ranks(world.comm, list(error.problems) == [world.world_size - 1], error)
    assert_on_all_ranks(world.comm, os.listdir(folder) == [], os.listdir(folder))


def test_resume_with_other_values(world: hd.World, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pieces that are there are complete, but of another state: they are written again, and so are attributes."""
    put = staging.saving.Saving.put

    def failing(self: Any, i: int, row: int, piece: torch.Tensor) -> None:
        put(self, i, row, piece)
        self.fail(OSError(5, "made up"))

    for dim in (0, 1):
        old, new = torch.arange(40).view(20, 2), torch.arange(40).view(20, 2) + 100
        for attrs in ({}, {"data": {"step": 2}}):
            monkeypatch.setattr(staging.saving.Saving, "put", failing)
            kwargs: dict[str, Any] = {"dim": dim, "resume": True, "window": 64}
            first = lambda k=kwargs, o=old: staging.save(folder / "x.h5", o, attrs={"data": {"step": 1}}, **k)  # noqa: E731
            raises_on_all_ranks(world.comm, hd.RankError, first)
            monkeypatch.undo()
            staging.save(folder / "x.h5", new, attrs=attrs, **kwargs)
            got = staging.load(folder / "x.h5", dim=None, verify=True)
            assert_on_all_ranks(world.comm, torch.equal(got, torch.cat([new] * world.world_size, dim)), got)
            with h5py.File(folder / "x.h5") as file:
                assert_on_all_ranks(world.comm, dict(file["data"].attrs) == attrs.get("data", {}))
            world.comm.Barrier()


def test_a_file_that_is_replaced_while_it_is_opened(
    world: hd.World, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either the old or the new file is read, never one with the other's offsets."""
    for foreign in (False, True):
        for name, value, first in (("old", 1, "a"), ("new", 2, "b")):
            x = {first: torch.full((50,), -1), "w": torch.full((50,), value)}
            staging.save(folder / f"{name}.h5", x, {first: 0, "w": None})
            world.comm.Barrier()
            if foreign and world.rank == 0:
                with h5py.File(folder / f"{name}.h5", "r+") as file:
                    del file["_hpcdist"]
            world.comm.Barrier()
        describe = opened._describe
        replaced: list[int] = []

        def late(path: str, name: str | None, inner: Any = describe, done: list[int] = replaced) -> Any:
            contents = inner(path, name)
            if not done:
                done.append(1)
                os.replace(folder / "new.h5", folder / "old.h5")
            return contents

        monkeypatch.setattr(opened, "_describe", late)
        got = staging.load(folder / "old.h5", "w", dim=None, verify=False)
        monkeypatch.undo()
        assert_on_all_ranks(world.comm, torch.equal(got, torch.full((50,), 2)), got)


@pytest.mark.parametrize("writer", WRITERS)
def test_one_rank_cannot_open_the_file_for_writing(
    writer: str, world: hd.World, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging.save(folder / "x.h5", X)
    open_driver = drivers.open_driver

    def failing(name: str, team: Any, *args: Any) -> Any:
        if last(world):
            raise OSError(24, "Too many open files")
        return open_driver("posix", team, *args)

    monkeypatch.setattr(drivers, "open_driver", failing)
    with one_file(folder, world):
        error = raises_on_all_ranks(
            world.comm, hd.RankError, lambda: staging.save(folder / "x.h5", X + 1, writer=writer)
        )
        monkeypatch.undo()
        assert_on_all_ranks(world.comm, "Too many open files" in str(error), error)


def test_a_result_for_which_there_is_no_memory(world: hd.World, folder: Path) -> None:
    staging.save(folder / "x.h5", X)
    device = "cuda:99" if last(world) else "cpu"
    error = raises_on_all_ranks(world.comm, hd.RankError, lambda: staging.load(folder / "x.h5", device=device))
    assert_on_all_ranks(world.comm, list(error.problems) == [world.world_size - 1], error)


@pytest.mark.parametrize("writer", WRITERS)
def test_progress_that_raises(writer: str, world: hd.World, folder: Path) -> None:
    staging.save(folder / "x.h5", X)

    def raising(nbytes: int) -> None:
        if last(world):
            raise ZeroDivisionError("no such luck")

    for dim in (0, 1):
        with one_file(folder, world):
            error = raises_on_all_ranks(
                world.comm,
                hd.RankError,
                lambda d=dim: staging.save(folder / "x.h5", X + 1, d, writer=writer, progress=raising, window=16),
            )
            assert_on_all_ranks(world.comm, "no such luck" in str(error), error)
        error = raises_on_all_ranks(
            world.comm, hd.RankError, lambda d=dim: staging.load(folder / "x.h5", dim=d, progress=raising, window=16)
        )
        assert_on_all_ranks(world.comm, "no such luck" in str(error), error)


def test_what_was_left_cannot_be_read(world: hd.World, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the last rank, while it looks at its pieces."""
    put = staging.saving.Saving.put

    def failing(self: Any, i: int, row: int, piece: torch.Tensor) -> None:
        put(self, i, row, piece)
        self.fail(OSError(5, "made up"))

    def unreadable(*args: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(staging.saving.Saving, "put", failing)
    save = lambda: staging.save(folder / "x.h5", X, resume=True)  # noqa: E731
    raises_on_all_ranks(world.comm, hd.RankError, save)
    monkeypatch.undo()
    if last(world):
        monkeypatch.setattr(staging.saving.Saving, "_proven", unreadable)
    error = raises_on_all_ranks(world.comm, hd.RankError, save)
    assert_on_all_ranks(world.comm, "Input/output error" in str(error), error)
    monkeypatch.undo()
    save()
    assert_on_all_ranks(world.comm, os.listdir(folder) == ["x.h5"], os.listdir(folder))


def test_attributes_that_cannot_be(world: hd.World, folder: Path) -> None:
    for attrs, text in (
        ({"dta": {"a": 1}}, "attrs has 'dta', which is not one of the tensors: data"),
        ({"data": {"torch_dtype": "int8"}}, "torch_dtype is hpcdist's own"),
    ):
        error = raises_on_all_ranks(world.comm, hd.RankError, lambda a=attrs: staging.save(folder / "x.h5", X, attrs=a))
        assert_on_all_ranks(world.comm, text in str(error), error)
    error = raises_on_all_ranks(
        world.comm, hd.RankError, lambda: staging.save(folder / "x.h5", X, compression={"scaleoffset": 2})
    )
    assert_on_all_ranks(world.comm, "lossy" in str(error), error)


def test_a_file_of_ours_that_others_have_changed(world: hd.World, folder: Path) -> None:
    """Without our group, and with a group of its name: read as a foreign file."""
    staging.save(folder / "x.h5", {"a": X, "b": X}, dim=None)
    if world.rank == 0:
        with h5py.File(folder / "x.h5", "r+") as file:
            del file["a"], file["_hpcdist"]
            file["a"] = torch.arange(4).numpy()
        with h5py.File(folder / "y.h5", "w") as file:
            file["_hpcdist/other"] = 1
            file["_hpcdist"].attrs["version"] = 1
            file["a"] = torch.arange(4).numpy()
    world.comm.Barrier()
    found = Findings(world.comm)
    for name in ("x.h5", "y.h5"):
        found.same(staging.load(folder / name, "a", dim=None, verify=True), torch.arange(4), name)
    found.same(staging.load(folder / "x.h5", "b", dim=None, verify=True), X, "the other tensor")
    found.settle()
    with staging.open(folder / "x.h5") as file, pytest.raises(hd.FileError, match="holds no 'nope'"):
        file.attrs("nope")
    with staging.open(folder / "x.h5") as file, pytest.raises(ValueError, match="out overlaps itself"):
        file.read("b", out=torch.empty(1, 2, dtype=torch.int64).expand(3, 2))
    world.comm.Barrier()


def test_compressed_pieces_that_are_damaged(world: hd.World, folder: Path) -> None:
    """Found where a whole piece is read, unless nothing is to be verified."""
    x = torch.arange(600).view(20, 30)
    staging.save(folder / "x.h5", x, compression="gzip", chunks=(5, 6), window=400 * world.world_size)
    assert_on_all_ranks(world.comm, torch.equal(staging.load(folder / "x.h5", dim=None)[:20], x))
    world.comm.Barrier()
    if world.rank == 0:
        with h5py.File(folder / "x.h5", "r+") as file:
            file["data"][3, 4] = 99  # chunks that HDF5 finds in order
    world.comm.Barrier()
    for verify in (None, True):
        load = partial(staging.load, folder / "x.h5", dim=None, verify=verify)
        error = raises_on_all_ranks(world.comm, hd.RankError, load)
        assert_on_all_ranks(world.comm, "data: piece 0 is damaged" in str(error), error)
    got = staging.load(folder / "x.h5", dim=None, verify=False)
    assert_on_all_ranks(world.comm, got[3, 4] == 99)
    with staging.open(folder / "x.h5") as file:
        assert_on_all_ranks(
            world.comm, torch.equal(file.read("data", (3, 5), (1, 1)), x[3:4, 5:6]), "a part of a piece"
        )


@pytest.mark.parametrize("path", ["x.h5", "x.npy", "piecewise"])
def test_what_is_lost_with_the_power(path: str, world: hd.World, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every prefix of what the ranks do, what was not synced by the rank that wrote it may be gone: the name never
    stands for it, nor the mark that the file is complete."""
    steps: list[tuple[float, int, str]] = []  # when, the rank, what

    def noting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            about = os.readlink(f"/proc/self/fd/{args[0]}") if name != "replace" else str(args[0])
            if about.endswith(".part"):
                mark = name == "pwrite" and len(args[1]) == len(h5.INCOMPLETE)
                steps.append((time.monotonic(), world.rank, "mark" if mark else name))
            return result

        return noted

    for name in ("pwrite", "fsync", "replace"):
        monkeypatch.setattr(os, name, noting(name, getattr(os, name)))
    x = torch.arange(60_000).view(2000, 30)
    if path == "piecewise":
        with staging.open(folder / path, "w", {"x": ((2000 * world.world_size, 30), x.dtype)}) as file:
            file.write("x", x, (2000 * world.rank, 0))
    elif path == "x.h5":
        staging.save(folder / path, x, writer="posix", window=50_000)
    else:
        out = Output(world.team, "test", Array(str(folder / path), tuple(x.shape), x.dtype), SaveOptions(window=50_000))
        for row in out.mine():
            out.put(row, x[out.pieces[row].slices()].contiguous())
        out.finish()
    monkeypatch.undo()
    all_ = sorted(step for rank in world.comm.allgather(steps) for step in rank)
    dirty: set[int] = set()  # ranks with data that may be lost
    lost = {}  # when the mark was written, and when the file got its name
    for _, rank, what in all_:
        if what == "fsync":
            dirty.discard(rank)
        elif what in ("mark", "replace"):
            lost[what] = dirty - {rank} if what == "mark" else set(dirty)
        if what in ("mark", "pwrite"):
            dirty.add(rank)
    found = Findings(world.comm)
    found.check(all_[-1][2] == "replace", all_[-5:])
    found.check(set(lost) == ({"replace"} if path == "x.npy" else {"mark", "replace"}), lost)
    found.check(not any(lost.values()), f"ranks whose data were not synced: {lost}")
    found.settle()


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_a_file_that_is_replaced_while_it_is_read(compression: str | None, world: hd.World, folder: Path) -> None:
    """By the next checkpoint, say: what is open is read to its end, and no part of the new one."""
    x = torch.zeros(40, 10)
    save = partial(staging.save, folder / "x.h5", compression=compression, chunks=compression and (5, 10))
    save(x)
    n, found = 40 * world.world_size, Findings(world.comm)
    with staging.open(folder / "x.h5") as file:
        found.check(not file.read("data", (0, 0), (n // 2, 10)).any(), "the first half")
        save(x + 1)
        found.check(not file.read("data", (n // 2, 0), (n - n // 2, 10)).any(), "the second half")
    world.comm.Barrier()
    replaced: list[int] = []

    def replace(nbytes: int) -> None:
        if not replaced and world.rank == 0:
            os.rename(folder / "new.h5", folder / "x.h5")
        replaced.append(nbytes)

    staging.save(folder / "new.h5", x, compression=compression, chunks=compression and (5, 10))
    got = staging.load(folder / "x.h5", dim=None, window=400, progress=replace)
    found.check(bool((got == 1).all()), got)
    found.settle()


def test_a_write_that_fails_is_what_close_says(world: hd.World, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the program caught the error, and went on."""

    def close() -> None:
        with staging.open(folder / "x.h5", "w", {"x": ((100, world.world_size), torch.int64)}) as file:
            keep = file._saving._edges._data.write
            if last(world):
                monkeypatch.setattr(file._saving._edges._data, "write", lambda data: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    file.write("x", torch.ones(100, 1, dtype=torch.int64), (0, world.rank))
                monkeypatch.setattr(file._saving._edges._data, "write", keep)
            file.write("x", torch.ones(100, 1, dtype=torch.int64), (0, world.rank))

    error = raises_on_all_ranks(world.comm, hd.RankError, close)
    monkeypatch.undo()
    assert_on_all_ranks(world.comm, "writing failed: division by zero" in str(error), error)
    assert_on_all_ranks(world.comm, list(error.problems) == [world.world_size - 1], error)
    assert_on_all_ranks(world.comm, os.listdir(folder) == [], os.listdir(folder))
