"""What goes wrong is one clear error on every rank, the old file survives, nothing is left, and the job goes on."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from collective import Findings, assert_on_all_ranks, raises_on_all_ranks
from conftest import WRITERS

import hpcdist as hd
from hpcdist import staging
from hpcdist.files import commit, h5, raw
from hpcdist.files.commit import Commit
from hpcdist.staging import drivers, journal

pytestmark = pytest.mark.mpi

X = torch.arange(6).view(3, 2)


def last(world: hd.World) -> int:
    return world.world_size - 1


def mistakes(rank: int, size: int) -> dict[str, tuple[Callable[[bool, Path], Any], str]]:
    """(a call, made wrongly where the first argument is true; what the error says)."""

    def save(wrong: bool, p: Path, x: Any = X, **kwargs: Any) -> None:
        staging.save(p / "x.h5", x, **(kwargs if wrong else {}))

    return {
        "not a tensor": (lambda w, p: save(w, p, [1] if w else X), "data must be a torch.Tensor, got list"),
        "an array": (
            lambda w, p: save(w, p, np.ones((3, 2), ">f8") if w else X.double()),
            "data must be a torch.Tensor, got ndarray of shape (3, 2) and dtype >f8 "
            "(torch.from_numpy(a.astype('float64')) converts",
        ),
        "suffix": (lambda w, p: staging.save(p / ("x.npz" if w else "x.h5"), X), "but an HDF5 file is written"),
        "NumPy's dtype": (
            lambda w, p: staging.open(p / "x.h5", "w", {"x": ((0,), np.float64 if w else torch.float64)}).__exit__(
                None, None, None
            ),
            "'x' has dtype <class 'numpy.float64'>, expected a torch.dtype",
        ),
        "dim": (lambda w, p: save(w, p, dim=2), "dim is 2, expected -2 to 1"),
        "name": (lambda w, p: save(w, p, {"a//b" if w else "a": X}), "'a//b' cannot be a name in an HDF5 file"),
        "our name": (lambda w, p: save(w, p, {"_hpcdist/x" if w else "a": X}), "are hpcdist's own"),
        "a tensor and a group": (lambda w, p: save(w, p, {"a": X, "a/b" if w else "b": X}), "'a' cannot be a tensor"),
        "compression": (lambda w, p: save(w, p, compression="zip"), "compression is 'zip', expected 'gzip'"),
        "chunks alone": (lambda w, p: save(w, p, chunks=(1, 1)), "chunks is given without compression"),
        "window": (lambda w, p: save(w, p, window=0), "window is 0, expected a number of bytes >= 1"),
        "writer": (lambda w, p: save(w, p, writer="pigeon"), "writer is 'pigeon', expected one of auto, mpio, posix"),
        "writers": (lambda w, p: save(w, p, writers=size + 1), f"writers is {size + 1}, expected 1 to {size}"),
        "hints": (lambda w, p: save(w, p, hints={"a": "b"}, writer="posix"), "hints are for MPI-IO"),
        "load: window": (lambda w, p: staging.load(p / "old.h5", window=-1 if w else 9), "window is -1"),
        "load: out": (
            lambda w, p: staging.load(p / "old.h5", dim=None, out=torch.empty(2 if w else 3, 2)),
            "out has shape (2, 2), expected (3, 2)",
        ),
        "load: dtype of out": (
            lambda w, p: staging.load(p / "old.h5", dim=None, out=X.clone() if w else X.float()),
            "out has dtype torch.int64, expected torch.float32, that of 'data' in the file",
        ),
        "load: box": (
            lambda w, p: staging.load(p / "old.h5", box=((0, 0), (4 if w else 3, 2))),
            "box is (offset (0, 0), shape (4, 2)), which is not in shape (3, 2)",
        ),
    }  # fmt: skip


@pytest.mark.parametrize("where", ["last rank", "all ranks"])
@pytest.mark.parametrize("mistake", mistakes(0, 1))
def test_a_mistake_is_the_same_error_everywhere(mistake: str, where: str, world: hd.World, folder: Path) -> None:
    staging.save(folder / "old.h5", X.float() if world.rank == 0 else X[:0].float())
    call, text = mistakes(world.rank, world.world_size)[mistake]
    wrong = where == "all ranks" or world.rank == last(world)
    error = raises_on_all_ranks(world.comm, hd.RankError, lambda: call(wrong, folder))
    expected = list(range(world.world_size)) if where == "all ranks" else [last(world)]
    assert_on_all_ranks(world.comm, sorted(error.problems) == expected, error)
    assert_on_all_ranks(world.comm, all(text in problem for problem in error.problems.values()), error)
    assert_on_all_ranks(world.comm, os.listdir(folder) == ["old.h5"], os.listdir(folder))
    call(False, folder)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("given", "text"),
    [
        (lambda last: {"tensors": {"b" if last else "a": X}}, "has no tensor 'a', which rank 0 has"),
        (lambda last: {"tensors": {"a": X, **({"b": X} if last else {})}}, "has a tensor 'b', which rank 0 does not"),
        (lambda last: {"tensors": X.float() if last else X}, "dtype is torch.float32, where rank 0 has torch.int64"),
        (lambda last: {"tensors": X[:, :1] if last else X}, "shape is (3, 1), which does not fit (3, 2) of rank 0"),
        (lambda last: {"tensors": X, "dim": int(last)}, "'data': dim is 1, where rank 0 has 0"),
        (lambda last: {"tensors": X, "window": 100 + last}, "window is 101, where rank 0 has 100"),
        (lambda last: {"tensors": X, "compression": 3 if last else None}, "compression is {'compression': 'gzip'"),
    ],
)  # fmt: skip
def test_ranks_that_differ(given: Callable[[bool], dict[str, Any]], text: str, world: hd.World, folder: Path) -> None:
    kwargs = given(world.rank == last(world))
    error = raises_on_all_ranks(world.comm, hd.RankError, lambda: staging.save(folder / "x.h5", **kwargs))
    assert_on_all_ranks(world.comm, list(error.problems) == [last(world)] and text in str(error), error)
    assert_on_all_ranks(world.comm, os.listdir(folder) == [], os.listdir(folder))


@pytest.mark.mpi(min_size=2)
def test_another_call_on_one_rank(world: hd.World, folder: Path) -> None:
    def call() -> object:
        return staging.save(folder / "x.h5", X) if world.rank else hd.concat(X)

    error = raises_on_all_ranks(world.comm, hd.RankError, call)
    assert_on_all_ranks(world.comm, "called concat()" in str(error) or "called staging.save()" in str(error), error)


def damage(folder: Path) -> dict[str, str]:
    """Files that cannot be loaded -> what the error says. Made on one rank."""
    (folder / "folder.h5").mkdir()
    (folder / "junk.h5").write_bytes(b"no HDF5 file at all" * 100)
    (folder / "empty.h5").touch()
    whole = (folder / "good.h5").read_bytes()
    (folder / "cut.h5").write_bytes(whole[: len(whole) // 2])
    (folder / "head.h5").write_bytes(whole[:200])
    with h5py.File(folder / "good.h5") as file:
        state, data = file["_hpcdist/state"].id.get_offset(), file["data"].id.get_offset()
    (folder / "incomplete.h5").write_bytes(whole[:state] + bytes(8) + whole[state + 8 :])
    (folder / "flipped.h5").write_bytes(whole[: data + 9] + bytes([whole[data + 9] ^ 4]) + whole[data + 10 :])
    return {
        "none.h5": "none.h5: no such file",
        "folder.h5": "folder.h5: is a folder",
        "junk.h5": "junk.h5: not an HDF5 file",
        "empty.h5": "empty.h5: not an HDF5 file",
        "cut.h5": "cut.h5: truncated",
        "head.h5": "head.h5: ",
        "incomplete.h5": "incomplete.h5: incomplete: the job that wrote it ended before it was done",
        "flipped.h5": "flipped.h5: data: piece 0 is damaged: elements [0:",
    }


@pytest.mark.parametrize("kwargs", [{}, {"dim": 1, "verify": True}, {"dim": None, "readers": 1}], ids=str)
def test_files_that_cannot_be_loaded(kwargs: dict[str, Any], world: hd.World, folder: Path) -> None:
    staging.save(folder / "good.h5", torch.arange(30).view(10, 3))
    wrong = world.comm.bcast(damage(folder) if world.rank == 0 else None)
    for name, text in wrong.items():
        error = raises_on_all_ranks(world.comm, hd.RankError, lambda n=name: staging.load(folder / n, **kwargs))
        assert_on_all_ranks(world.comm, text in str(error), f"{name}: {error}")
    error = raises_on_all_ranks(world.comm, hd.RankError, lambda: staging.load(folder / "good.h5", "weight"))
    assert_on_all_ranks(world.comm, "holds no tensor 'weight'; it has: data" in str(error), error)
    staging.load(folder / "flipped.h5", dim=1, verify=False)
    staging.load(folder / "good.h5")


def test_what_no_tensor_can_hold_is_named(world: hd.World, folder: Path) -> None:
    """Not an empty dict, and not "it has: nothing"."""
    if world.rank == 0:
        with h5py.File(folder / "x.h5", "w") as file:
            file["a"] = np.ones(4, np.longdouble)
            file["b/c"] = np.ones(4, [("x", "f8"), ("y", "i4")])
            file["d"] = ["text"]
    world.comm.Barrier()
    texts = {
        "a": f"holds no tensor 'a', but a (dtype {np.dtype(np.longdouble)})",
        "b": "holds no tensor 'b', but b/c (dtype [('x', '<f8'), ('y', '<i4')])",
        "d": "holds no tensor 'd', but d (text or references)",
        "e": "holds no tensor 'e'; it has: nothing",
        None: "x.h5: holds no tensor, but a (dtype ",
    }
    for name, text in texts.items():
        error = raises_on_all_ranks(world.comm, hd.RankError, lambda n=name: staging.load(folder / "x.h5", n))
        assert_on_all_ranks(world.comm, text in str(error), error)
    staging.save(folder / "none.h5", {})
    assert_on_all_ranks(world.comm, staging.load(folder / "none.h5") == {})


def test_folders_that_cannot_be_written(world: hd.World, folder: Path) -> None:
    (folder / "x.h5").mkdir(exist_ok=True)
    world.comm.Barrier()
    wrong = {"none/x.h5": "no such folder", "x.h5": "is a folder"}
    wrong |= dict.fromkeys(("y.h5/", "y.h5/.", "y.safetensors/", "y.pt/"), "is the name of a folder")
    specs = {"x": ((3,), torch.float32)}
    for name, text in wrong.items():
        path = f"{folder}/{name}"
        error = raises_on_all_ranks(world.comm, hd.RankError, lambda p=path: staging.save(p, X))
        assert_on_all_ranks(world.comm, text in str(error) and list(error.problems) == [0], error)
        error = raises_on_all_ranks(world.comm, hd.RankError, lambda p=path: staging.open(p, "w", specs))
        assert_on_all_ranks(world.comm, text in str(error) and list(error.problems) == [0], error)
    huge = torch.empty(1, dtype=torch.int8).expand(2**42 // world.world_size)
    error = raises_on_all_ranks(world.comm, hd.RankError, lambda: staging.save(folder / "y.h5", huge))
    assert_on_all_ranks(world.comm, "y.h5: no space for the output" in str(error), error)
    assert_on_all_ranks(world.comm, os.listdir(folder) == ["x.h5"], os.listdir(folder))


def test_no_permission(world: hd.World, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write anywhere: what os.access says is made up."""
    staging.save(folder / "x.h5", X)
    monkeypatch.setattr(os, "access", lambda *a: False)
    error = raises_on_all_ranks(world.comm, hd.RankError, lambda: staging.save(folder / "x.h5", X))
    assert_on_all_ranks(world.comm, "the folder is not writable" in str(error), error)
    monkeypatch.undo()
    assert_on_all_ranks(world.comm, torch.equal(staging.load(folder / "x.h5", dim=None)[:3], X))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("where", ["rank 0", "last rank", "all ranks"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_write_that_fails(
    code: int, where: str, dim: int, world: hd.World, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of the data, on any rank: the same error on all, the old file, no leftover, and the job goes on."""
    staging.save(folder / "x.h5", X)
    fails = where == "all ranks" or world.rank == (0 if where == "rank 0" else last(world))
    calls, pwrite = [], os.pwrite

    def failing(fd: int, data: bytes, offset: int) -> int:
        calls.append(offset)
        if fails and len(calls) > 3:
            raise OSError(code, os.strerror(code))
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", failing)
    big = torch.arange(60_000).view(2000, 30)  # 10 pieces a rank, with pages of their own
    window = 48_000 if dim == 0 else 96_000 * world.world_size
    save = lambda: staging.save(folder / "x.h5", big, dim, writer="posix", window=window)  # noqa: E731
    error = raises_on_all_ranks(world.comm, hd.RankError, save)
    monkeypatch.undo()
    assert_on_all_ranks(world.comm, f"writing failed: {os.strerror(code)}" in str(error), error)
    at_fault = {"rank 0": [0], "last rank": [last(world)]}.get(where, list(range(world.world_size)))
    assert_on_all_ranks(world.comm, sorted(error.problems) == at_fault, error)
    assert_on_all_ranks(world.comm, os.listdir(folder) == ["x.h5"], os.listdir(folder))
    assert_on_all_ranks(world.comm, torch.equal(staging.load(folder / "x.h5", dim=None)[:3], X))
    staging.save(folder / "x.h5", big, dim, writer="posix")


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_the_last_steps_fail(step: str, world: hd.World, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    staging.save(folder / "x.h5", X)

    def failing(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, step, failing)
    error = raises_on_all_ranks(world.comm, hd.RankError, lambda: staging.save(folder / "x.h5", X + 1))
    monkeypatch.undo()
    assert_on_all_ranks(world.comm, os.strerror(errno.EIO) in str(error), error)
    assert_on_all_ranks(world.comm, os.listdir(folder) == ["x.h5"], os.listdir(folder))
    assert_on_all_ranks(world.comm, torch.equal(staging.load(folder / "x.h5", dim=None)[:3], X))


@pytest.mark.mpi(min_size=2)
def test_a_folder_that_is_not_shared(world: hd.World, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found before any data are written: the last rank sees no file, or another one."""
    for case in ("none", "another"):
        if world.rank == last(world):
            if case == "none":
                monkeypatch.setattr(h5, "_unseen", lambda place: "not seen by this rank")
            else:
                monkeypatch.setattr(h5, "_unseen", lambda place: "another file by that name on this rank")
        monkeypatch.setattr(commit, "PATIENCE", 0.2)
        writes: list[int] = []
        monkeypatch.setattr(raw, "write_at", lambda *a, seen=writes: seen.append(1))
        error = raises_on_all_ranks(world.comm, hd.RankError, lambda: staging.save(folder / "x.h5", X, writer="posix"))
        monkeypatch.undo()
        assert_on_all_ranks(world.comm, list(error.problems) == [last(world)], error)
        assert_on_all_ranks(world.comm, "the folder is not shared by all nodes" in str(error), error)
        assert_on_all_ranks(world.comm, not writes and os.listdir(folder) == [], os.listdir(folder))


def test_two_jobs_do_not_write_one_file_at_once(world: hd.World, folder: Path) -> None:
    other = Commit(folder / "x.h5") if world.rank == 0 else None
    error = raises_on_all_ranks(world.comm, hd.RankError, lambda: staging.save(folder / "x.h5", X))
    assert_on_all_ranks(world.comm, "this process is writing it already" in str(error), error)
    if other is not None:
        other.discard()
    staging.save(folder / "x.h5", X)


def test_leftovers_are_swept_and_links_are_kept(world: hd.World, folder: Path) -> None:
    if world.rank == 0:
        (folder / "there").mkdir()
        left_behind(folder / "there/x.h5", b"what a job left that was killed" * 1000)
        (folder / "x.h5").symlink_to("there/x.h5")
    world.comm.Barrier()
    staging.save(folder / "x.h5", X)
    assert_on_all_ranks(world.comm, os.listdir(folder / "there") == ["x.h5"], os.listdir(folder / "there"))
    assert_on_all_ranks(world.comm, (folder / "x.h5").is_symlink())
    assert_on_all_ranks(world.comm, torch.equal(staging.load(folder / "x.h5", dim=None)[:3], X))


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("dim", [0, 1])
def test_resume(dim: int, writer: str, world: hd.World, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failure, only what is missing, or damaged since, is written; the data are the same bytes.

    What lies in pages that several ranks write is brought together at the end, and missing before.
    """
    x = torch.arange(60_000).view(2000, 30) + 1_000_000 * world.rank
    window = 40_000 if dim == 0 else 80_000 * world.world_size
    staging.save(folder / "whole.h5", x, dim, writer=writer, window=window)
    size = os.path.getsize(folder / "whole.h5")
    calls: list[int] = []
    put = staging.saving.Saving.put

    def failing(self: Any, i: int, row: int, piece: torch.Tensor) -> None:
        if len(calls) == 4:
            self.fail(OSError(errno.EIO, "made up"))
        calls.append(row)
        put(self, i, row, piece)

    monkeypatch.setattr(staging.saving.Saving, "put", failing)
    save = lambda: staging.save(folder / "x.h5", x, dim, writer=writer, window=window, resume=True)  # noqa: E731
    raises_on_all_ranks(world.comm, hd.RankError, save)
    (left,) = commit._left(folder / "x.h5")
    names = sorted([left.name, left.with_suffix(".journal").name, "whole.h5"])
    assert_on_all_ranks(world.comm, sorted(os.listdir(folder)) == names, os.listdir(folder))
    done = calls[:4]
    place = h5.find_map(left)
    if world.rank == 0:
        assert len(journal.read(left.with_suffix(".journal"))) == 4 * world.world_size
        with left.open("r+b") as file:  # a piece that was complete is damaged by now
            file.seek((place.data[0] or 0) + 3)
            file.write(b"\xff")
    world.comm.Barrier()
    monkeypatch.undo()
    again: list[int] = []
    write = staging.saving.Saving.record
    monkeypatch.setattr(
        staging.saving.Saving, "record", lambda self, i, row, sum_: (again.append(row), write(self, i, row, sum_))
    )
    save()
    twice = set(again) & set(done)
    assert_on_all_ranks(world.comm, twice <= {0, done[0]} and (0 in twice) == (0 in done), f"written twice: {twice}")
    assert_on_all_ranks(world.comm, os.path.getsize(folder / "x.h5") == size)
    got = [staging.load(folder / name, dim=None, verify=True) for name in ("x.h5", "whole.h5")]
    assert_on_all_ranks(world.comm, torch.equal(*got))


def left_behind(target: Path, content: bytes) -> Path:
    """The part of a target that a job has left which is dead."""
    left = Commit(target, keep=True)
    left.part.write_bytes(content)
    left.discard(keep=True)
    return left.part


@pytest.mark.filterwarnings("ignore:what another run has left cannot be resumed")
def test_resume_begins_anew_where_the_save_is_another(world: hd.World, folder: Path) -> None:
    """Nothing, something else, a save of other data, and one that is torn anywhere."""
    staging.save(folder / "x.h5", X)
    whole = (folder / "x.h5").read_bytes()
    torn = [whole[: len(whole) * k // 12] for k in range(1, 12)]
    zeroed = [whole[: 300 * k] + bytes(600) + whole[300 * k + 600 :] for k in range(12)]
    world.comm.Barrier()
    for left in (b"", b"junk" * 1000, *torn, *zeroed):
        if world.rank == 0:
            left_behind(folder / "x.h5", left)
        world.comm.Barrier()
        staging.save(folder / "x.h5", X.double(), resume=True)
        assert_on_all_ranks(world.comm, torch.equal(staging.load(folder / "x.h5", dim=None)[:3], X.double()))
        assert_on_all_ranks(world.comm, os.listdir(folder) == ["x.h5"], os.listdir(folder))
        world.comm.Barrier()


def test_a_long_attribute_that_has_changed_is_another_save(world: hd.World, folder: Path) -> None:
    for value in (0, 1):
        long = np.zeros(5000, np.int64)
        long[2500] = value
        if value:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(staging.target.Target, "complete", lambda self, *args: 1 / 0)
                save = partial(staging.save, folder / "x.h5", X, attrs={"data": {"long": long - 1}}, resume=True)
                raises_on_all_ranks(world.comm, hd.RankError, save)
        staging.save(folder / "x.h5", X, attrs={"data": {"long": long}}, resume=True)
        with staging.open(folder / "x.h5") as file:
            assert_on_all_ranks(world.comm, np.array_equal(file.attrs("data")["long"], long))


def test_piecewise(world: hd.World, folder: Path) -> None:
    whole, size = torch.arange(12 * 5).view(12, 5).to(torch.bfloat16), world.world_size
    found = Findings(world.comm)
    spec = {"x": {"a": ((12, 5), torch.bfloat16)}, "none": ((0, 2), torch.int8), "one": ((), torch.float64)}
    with staging.open(folder / "x.h5", "w", spec, attrs={"x/a": {"unit": "m"}, "": {"n": 1}}, window=30) as file:
        for row in range(world.rank, 12, size):
            file.write("x/a", whole[row : row + 1, :2], (row, 0))
            file.write("x/a", whole[row : row + 1, 2:], (row, 2))
        if world.rank == 0:
            file.write("one", torch.tensor(2.5, dtype=torch.float64), ())
        with pytest.raises(ValueError, match="is not in shape"):
            file.write("x/a", whole[:1], (0, 1))
        with pytest.raises(TypeError, match=r"x must be a torch\.Tensor, got ndarray"):
            file.write("x/a", np.ones((1, 5)), (0, 0))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"x has dtype torch\.float32"):
            file.write("x/a", whole[:1].float(), (0, 0))
    with staging.open(folder / "x.h5", window=30) as file:
        found.check(file.names == ["none", "one", "x/a"], file.names)
        found.check(file.attrs("x/a") == {"unit": "m"} and file.attrs() == {"n": 1}, "attributes")
        found.check((file.shape("x/a"), file.dtype("x/a")) == ((12, 5), torch.bfloat16), "shape and dtype")
        for verify in (None, True, False):
            found.same(file.read("x/a", verify=verify), whole, "all of it")
            found.same(file.read("x/a", (3, 1), (4, 2), verify=verify), whole[3:7, 1:3], "a box")
        out = torch.empty(5, 2, dtype=torch.bfloat16).t()
        found.same(file.read("x/a", (10, 0), out=out), whole[10:], "into strided memory")
        found.same(file.read("one"), torch.tensor(2.5, dtype=torch.float64), "0-d")
        found.same(file.read("none"), torch.empty(0, 2, dtype=torch.int8), "empty")
        with pytest.raises(hd.FileError, match="holds no tensor 'y'"):
            file.read("y")
    found.same(staging.load(folder / "x.h5", "x/a", dim=None, verify=True), whole, "as a whole, verified")
    found.settle()


def test_piecewise_with_a_hole_is_refused(world: hd.World, folder: Path) -> None:
    def write() -> None:
        with staging.open(folder / "x.h5", "w", {"x": ((world.world_size + 1,), torch.int8)}) as file:
            file.write("x", torch.ones(1, dtype=torch.int8), (world.rank,))

    error = raises_on_all_ranks(world.comm, hd.RankError, write)
    size = world.world_size
    assert_on_all_ranks(world.comm, f"x: elements {size}:{size + 1} were not written" in str(error), error)
    assert_on_all_ranks(world.comm, os.listdir(folder) == [], os.listdir(folder))


def test_a_file_that_is_not_there_or_damaged_cannot_be_opened(folder: Path, world: hd.World) -> None:
    with pytest.raises(hd.FileError, match="no such file"):
        staging.open(folder / "none.h5")
    staging.save(folder / "x.h5", X)
    if world.rank == 0:
        with h5py.File(folder / "x.h5") as file:
            start = file["data"].id.get_offset()
        with (folder / "x.h5").open("r+b") as raw_file:
            raw_file.seek(start)
            raw_file.write(b"\xff")
    world.comm.Barrier()
    with staging.open(folder / "x.h5") as file, pytest.raises(hd.FileError, match="piece 0 is damaged"):
        file.read("data")
    world.comm.Barrier()


@pytest.mark.mpi(min_size=2)
def test_ranks_that_would_write_differently(world: hd.World, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as on a node whose h5py was built without MPI: one clear error, instead of a wait for ever."""
    monkeypatch.setattr(drivers, "for_path", lambda name, path: "posix" if world.rank == 1 else "mpio")
    call = lambda: staging.save(folder / "x.h5", torch.arange(3))  # noqa: E731
    error = raises_on_all_ranks(world.comm, hd.RankError, call)
    assert_on_all_ranks(world.comm, "writes by posix, rank 0 by mpio" in str(error), error)
    assert_on_all_ranks(world.comm, os.listdir(folder) == [], os.listdir(folder))
