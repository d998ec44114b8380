"""What goes wrong is one clear error on every rank, the old file survives, nothing is left, and the job goes on."""

import errno
import os
import sys
from functools import partial
from unittest.mock import Mock

import h5py
import numpy as np
import pytest
import torch
from collective import assert_on_all_ranks, refused, several_ranks
from conftest import WRITERS, holds, same

import hpcdist as hd
from hpcdist import staging
from hpcdist.formats import paths
from hpcdist.formats.paths import Commit
from hpcdist.staging import drivers
from hpcdist.staging.reader import OpenFiles
from hpcdist.staging.writer import RankWriter, Target

X = torch.arange(6).view(3, 2)


def save(folder, path="x.h5", tensors=X, **options):
    staging.save(folder / path, tensors, **options)


def load(folder, dim=None, **options):
    return staging.load(folder / "old.h5", dim=0 if "box" in options else dim, **options)


def open_(folder, dtype=torch.float64, **options):
    with staging.open(folder / "x.h5", "w", {"x": ((0,), dtype)}, **options):
        pass


MISTAKES = [
    (save, {"tensors": [1]}, "data must be a torch.Tensor, got list"),
    (
        save,
        {"tensors": np.ones((3, 2), ">f8")},
        "data must be a torch.Tensor, got ndarray of shape (3, 2) and dtype >f8 (torch.from_numpy converts",
    ),
    (save, {"path": "x.npz"}, "but an HDF5 file is written"),
    (open_, {"dtype": np.float64}, "'x' has dtype <class 'numpy.float64'>, expected a torch.dtype"),
    (save, {"dim": 2}, "dim is 2, expected -2 to 1"),
    (save, {"tensors": {"a//b": X}}, "'a//b' cannot be a name in an HDF5 file"),
    (save, {"tensors": {"_hpcdist/x": X}}, "are hpcdist's own"),
    (save, {"tensors": {"a": X, "a/b": X}}, "'a' cannot be a tensor"),
    (save, {"window": 0}, "window is 0, expected a number of bytes >= 1"),
    (save, {"writer": "pigeon"}, "writer is 'pigeon', expected one of auto, mpio, posix"),
    (save, {"attrs": {"dta": {"a": 1}}}, "attrs has 'dta', which is not one of the tensors: data"),
    (save, {"attrs": {"data": {"torch_dtype": "int8"}}}, "torch_dtype is hpcdist's own"),
    (load, {"window": -1}, "window is -1"),
    (load, {"out": torch.empty(2, 2)}, "out has torch.float32 of shape (2, 2), expected torch.float32 of (3, 2)"),
    (load, {"out": X}, "out has torch.int64 of shape"),
    (load, {"box": ((0, 0), (4, 2))}, "box is (offset (0, 0), shape (4, 2)), which is not in shape (3, 2)"),
    *((load, {"box": box}, "not in shape (3, 2)") for box in (((-1, 0), (1, 2)), ((0,), (1,)), ((0, 0), (2**70, 1)))),
    (load, {"device": "cuda:99"}, ""),
    (open_, {"attrs": 5}, ""),
    (open_, {"window": 0}, "window is 0"),
    (open_, {"attrs": {"y": {}}}, "attrs has 'y'"),
    (open_, {"attrs": {"x": {"torch_dtype": "int8"}}}, "torch_dtype is hpcdist's own"),
]


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_mistake_is_the_same_error_everywhere(everywhere, world, last, rank, folder):
    staging.save(folder / "old.h5", X.float() if rank == 0 else X[:0].float())
    for call, wrong, text in MISTAKES:
        right = {"box": ((0, 0), (3, 2))} if "box" in wrong else {}
        given = wrong if everywhere or rank == last else right
        ranks = range(world.world_size) if everywhere else [last]
        error = refused(text, call, folder, ranks=ranks, **given)
        assert_on_all_ranks(all(text in problem for problem in error.problems.values()), error)
        holds(folder, "old.h5")
        call(folder, **right)
        world.comm.Barrier()
        (folder / "x.h5").unlink(missing_ok=True)
    refused("[HD408]", load, folder, dim={"m.w": None})


@several_ranks
def test_ranks_that_differ(last, rank, folder, monkeypatch):
    odd = rank == last
    cases = {
        "tensor 'a' is None, where rank 0 has 'torch.int64 of shape (*, 2), dim 0'": {
            "tensors": {"b" if odd else "a": X}
        },
        "tensor 'b' is 'torch.int64 of shape (*, 2), dim 0', where rank 0 has None": {
            "tensors": {"a": X, **({"b": X} if odd else {})}
        },
        "tensor 'data' is 'torch.float32 of shape (*, 2), dim 0', where rank 0 has 'torch.int64 of": {
            "tensors": X.float() if odd else X
        },
        "tensor 'data' is 'torch.int64 of shape (*, 1), dim 0', where rank 0 has 'torch.int64 of shape (*, 2),": {
            "tensors": X[:, :1] if odd else X
        },
        "tensor 'data' is 'torch.int64 of shape (3, *), dim 1', where rank 0 has": {"dim": int(odd)},
        "window is 101, where rank 0 has 100": {"window": 100 + odd},
        "writer is 'posix', where rank 0 has 'mpio'": {},  # the h5py of a node was built without MPI
    }
    for text, given in cases.items():
        if not given:
            monkeypatch.setattr(drivers, "active", lambda: ("posix" if odd else "mpio", ""))
        refused(text, save, folder, ranks=[last], **given)
        holds(folder)
    monkeypatch.undo()
    refused("called ", lambda: save(folder) if rank else hd.concat(X))
    save(folder, "old.h5")
    refused("[HD303]", load, folder, ranks=[last], verify=odd or None)


def damage(folder):
    """Files that cannot be loaded -> what the error says. Made on one rank. For others see tests/commands."""
    whole = (folder / "good.h5").read_bytes()
    with h5py.File(folder / "good.h5") as file:
        at = file["data"].id.get_offset() + 9
    (folder / "flipped.h5").write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
    (folder / "cut.h5").write_bytes(whole[: len(whole) // 2])
    (folder / "head.h5").write_bytes(whole[:200])
    (folder / "incomplete.h5").write_bytes(whole)
    with h5py.File(folder / "incomplete.h5", "r+") as file:
        del file["_hpcdist/state"]
    return {
        "none.h5": "no such file",
        "cut.h5": "truncated",
        "head.h5": "",
        "incomplete.h5": "incomplete: the job that wrote it ended before it was done",
        "flipped.h5": "data: piece 0 is damaged: elements [0:",
    }


def test_files_that_cannot_be_loaded(world, folder, monkeypatch):
    path = folder / "good.h5"
    staging.save(path, torch.arange(30).view(10, 3))
    wrong = world.comm.bcast(damage(folder) if world.rank == 0 else None)
    refused("[HD408]", staging.load, path, "weight")
    for name, text in wrong.items():
        for options in ({}, {"dim": 1, "verify": True}, {"dim": None}):
            refused(f"{name}: {text}", staging.load, folder / name, **options)
        with pytest.raises(hd.FileError) as caught, staging.open(folder / name) as file:
            file.read("data")
        assert f"{name}: {text}" in str(caught.value)
    staging.load(folder / "flipped.h5", dim=1, verify=False)
    staging.load(path)
    monkeypatch.setattr(paths, "PATIENCE", 0.2)
    monkeypatch.setattr(OpenFiles, "fd", Mock(side_effect=hd.FileError("HD402", "not tried for ever")))
    with pytest.raises(hd.FileError, match="not tried for ever"):
        staging.open(path)


def test_folders_that_cannot_be_written(world, folder, monkeypatch):
    """Root may write anywhere: what os.access says is made up."""
    (folder / "x.h5").mkdir(exist_ok=True)
    world.comm.Barrier()
    wrong = {"none/x.h5": "no such folder", "x.h5": "is a folder"}
    wrong |= dict.fromkeys(("y.h5/", "y.h5/.", "y.safetensors/", "y.pt/"), "is the name of a folder")
    for name, text in wrong.items():
        path = f"{folder}/{name}"
        refused(text, staging.save, path, X, ranks=[0])
        refused(text, staging.open, path, "w", {"x": ((3,), torch.float32)}, ranks=[0])
    huge = torch.empty(1, dtype=torch.int8).expand(2**42 // world.world_size)
    refused("[HD410]", save, folder, "y.h5", huge, ranks=[0])
    monkeypatch.setattr(os, "access", lambda *a: False)
    refused("[HD410]", save, folder, "y.h5", ranks=[0])
    holds(folder, "x.h5")


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(
    ("step", "place", "code"),
    [
        *(("pwrite", place, code) for place in (0, -1, None) for code in (errno.ENOSPC, errno.EIO)),
        *((step, None, errno.EIO) for step in ("fsync", "replace")),
    ],
)
def test_a_step_that_fails(step, place, code, dim, world, size, folder, monkeypatch):
    """In the middle of the data or at the end, on any rank: the same error on all, the old file, no leftover, and the
    job goes on."""
    save(folder)
    ranks = list(range(size)) if place is None else [range(size)[place]]
    calls, inner = [], getattr(os, step)

    def failing(*args):
        calls.append(args)
        if world.rank in ranks and (len(calls) > 3 or step != "pwrite"):
            raise OSError(code, os.strerror(code))
        return inner(*args)

    monkeypatch.setattr(os, step, failing)
    big = torch.arange(60_000).view(2000, 30)  # 10 pieces a rank, with pages of their own
    window = 48_000 if dim == 0 else 96_000 * size
    again = partial(save, folder, tensors=big, dim=dim, writer="posix", window=window)
    if step == "pwrite":
        refused(f"writing failed: {os.strerror(code)}", again, ranks=ranks)
    else:
        refused(os.strerror(code), again)
    monkeypatch.undo()
    holds(folder, "x.h5")
    same(staging.load(folder / "x.h5", dim=None)[:3], X)
    again()


@several_ranks
@pytest.mark.parametrize("writer", WRITERS)
def test_a_folder_that_is_not_shared(writer, world, last, folder, monkeypatch):
    """The last rank does not see the file that rank 0 has made."""
    exists = os.path.exists
    monkeypatch.setattr(paths, "PATIENCE", 0.2)
    if world.rank == last:
        monkeypatch.setattr(os.path, "exists", lambda path: exists(path) and not str(path).endswith(".part"))
    refused("[HD413]", save, folder, ranks=[last], writer=writer)
    refused("[HD413]", open_, folder, ranks=[last])
    holds(folder)
    monkeypatch.undo()
    save(folder, writer=writer)


def left_behind(target, content):
    """The part of a target that a job has left which is dead."""
    left = Commit(target, keep=True)
    left.part.write_bytes(content)
    left.discard(keep=True)


def test_what_other_jobs_write_and_have_left(world, folder):
    """Two do not write one file at once; leftovers are swept, and links are kept."""
    other = Commit(folder / "x.h5") if world.rank == 0 else None
    refused("[HD414]", save, folder)
    if other is not None:
        other.discard()
        (folder / "there").mkdir()
        left_behind(folder / "there/x.h5", b"what a job left that was killed" * 1000)
        (folder / "x.h5").symlink_to("there/x.h5")
    world.comm.Barrier()
    save(folder)
    holds(folder / "there", "x.h5")
    assert_on_all_ranks((folder / "x.h5").is_symlink())
    same(staging.load(folder / "x.h5", dim=None)[:3], X)


@pytest.mark.parametrize(("name", "driver"), [*(("x.h5", name) for name in WRITERS), ("x.safetensors", "posix")])
@pytest.mark.parametrize("dim", [0, 1])
def test_resume(dim, name, driver, world, last, rank, folder, monkeypatch):
    """After a failure, only what is missing, or damaged since, is written; the data are the same bytes."""
    x, is_last = torch.arange(60_000).view(2000, 30) + 1_000_000 * rank, rank == last
    options = {"dim": dim, "writer": driver}
    options["window"] = 40_000 if dim == 0 else 80_000 * world.world_size
    save(folder, f"whole{name}", x, **options)
    resume = partial(save, folder, name, x, **options, resume=True)
    calls, again = [], set()
    put, write = RankWriter.put, RankWriter.write

    def failing(self, i, row, box, piece):
        if len(calls) == 4:
            self.fail(OSError(errno.EIO, "made up"))
        calls.append(row)
        put(self, i, row, box, piece)

    monkeypatch.setattr(RankWriter, "put", failing)
    refused("made up", resume)
    (left,) = folder.glob(".*.part")
    holds(folder, left.name, f"whole{name}")
    if rank == 0:
        with left.open("r+b") as file:  # a piece that was complete is damaged by now, and so is what is no data
            file.seek(left.read_bytes().index(bytes(x[100:101, :20].numpy())) + 3)
            file.write(b"\xff")
            file.seek(0)
            file.write(b"not a header")
    world.comm.Barrier()
    monkeypatch.undo()

    rows = {}

    def numbering(self, i, row, box, piece):
        rows[box] = row
        put(self, i, row, box, piece)

    def noting(self, i, box, *data):
        if not (kept := write(self, i, box, *data)):
            again.add(rows[box])
        return kept

    monkeypatch.setattr(RankWriter, "write", noting)
    monkeypatch.setattr(RankWriter, "put", numbering)
    with monkeypatch.context() as patch:
        if is_last:
            unreadable = Mock(side_effect=OSError(errno.EIO, "unreadable"))
            patch.setattr(sys.modules["hpcdist.staging.writer"], "holds", unreadable)
        refused("unreadable", resume, ranks=[last])
    resume()
    twice = again & {*calls[:4]}
    assert_on_all_ranks(twice == {0} & {*calls[:4]}, f"written twice: {twice}")
    same(*(staging.load(folder / path, "data", dim=None, verify=True) for path in (name, f"whole{name}")))


def long(value):
    array = np.zeros(5000, np.int64)
    array[2500] = value
    return {"data": {"long": array}}


AGAIN = [
    {},
    {"tensors": X + 100},
    {"tensors": X.double()},
    {"attrs": {"data": {"step": 2}}},
    {"attrs": {}},
    {"attrs": long(2)},
]
"""What differs in a save that is tried again."""


@pytest.mark.parametrize("dim", [0, 1])
def test_what_another_save_has_left_is_not_mixed_in(dim, world, folder):
    """Other values, dtypes and attributes, of which the middle differs, and junk."""
    path, options = folder / "x.h5", {"dim": dim, "resume": True, "window": 16}
    for change in (b"", b"junk" * 1000, *AGAIN):
        second = {"tensors": X, "attrs": long(1), **options}
        if isinstance(change, bytes):
            if world.rank == 0:
                left_behind(path, change)
        else:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Target, "complete", lambda self, *args: 1 / 0)
                refused("division by zero", save, folder, **second)
            second |= change
        world.comm.Barrier()
        save(folder, **second)
        expected = torch.cat([second["tensors"]] * world.world_size, dim)
        same(staging.load(path, dim=None, verify=True), expected, change)
        with staging.open(path) as file:
            got, wanted = file.attrs("data"), second["attrs"].get("data", {})
        assert_on_all_ranks(got.keys() == wanted.keys(), got)
        assert_on_all_ranks(all(np.array_equal(got[key], x) for key, x in wanted.items()), got)
        holds(folder, "x.h5")
        world.comm.Barrier()


def test_piecewise(world, last, rank, findings, folder):
    """The last rank names the tensors in another order."""
    whole, path = torch.arange(12 * 5).view(12, 5).to(torch.bfloat16), folder / "x.h5"
    spec = {
        "x/a": ((12, 5), torch.bfloat16), "none": ((0, 2), torch.int8), "one": ((), torch.float64)
    }  # fmt: skip
    if rank == last:
        spec = dict(reversed(spec.items()))
    with staging.open(path, "w", spec, attrs={"x/a": {"unit": "m"}, "": {"n": 1}}, window=30) as file:
        for row in range(rank, 12, world.world_size):
            file.write("x/a", whole[row : row + 1, :2], (row, 0))
            file.write("x/a", whole[row : row + 1, 2:], (row, 2))
        if rank == 0:
            file.write("one", torch.tensor(2.5, dtype=torch.float64), ())
        x = whole[:1]
        for kind, text, wrong, place in (
            (ValueError, "is not in shape", x, (0, 1)),
            (TypeError, "x must be a torch.Tensor, got ndarray", np.ones((1, 5)), (0, 0)),
            (ValueError, "x has dtype torch.float32", x.float(), (0, 0)),
        ):
            with pytest.raises(kind, match=text):
                file.write("x/a", wrong, place)
    with staging.open(path, window=30) as file:
        findings.check(file.names == ["none", "one", "x/a"], file.names)
        findings.check(file.attrs("x/a") == {"unit": "m"} and file.attrs() == {"n": 1}, "attributes")
        findings.check((file.shape("x/a"), file.dtype("x/a")) == ((12, 5), torch.bfloat16), "shape and dtype")
        for verify in (None, True, False):
            findings.same(file.read("x/a", verify=verify), whole, "all of it")
            findings.same(file.read("x/a", (3, 1), (4, 2), verify=verify), whole[3:7, 1:3], "a box")
        out = torch.empty(5, 2, dtype=torch.bfloat16).t()
        findings.same(file.read("x/a", (10, 0), out=out), whole[10:], "into strided memory")
        findings.same(file.read("one"), torch.tensor(2.5, dtype=torch.float64), "0-d")
        findings.same(file.read("none"), torch.empty(0, 2, dtype=torch.int8), "empty")
        with pytest.raises(hd.FileError, match="holds no tensor 'y'"):
            file.read("y")
        with pytest.raises(hd.FileError, match="holds no 'nope'"):
            file.attrs("nope")
        with pytest.raises(ValueError, match="out overlaps itself"):
            file.read("x/a", out=whole[:1].expand(12, 5))
    findings.same(staging.load(path, "x/a", dim=None, verify=True), whole, "as a whole, verified")


def test_working_folder_that_is_gone(world, last, folder, monkeypatch):
    """On one rank; a relative path is refused on all."""
    with monkeypatch.context() as patch:
        if world.rank == last:
            patch.setattr(os, "getcwd", Mock(side_effect=FileNotFoundError("gone")))
        refused("gone", staging.save, "x.h5", X, ranks=[last])
        refused("[HD401]", staging.load, "absent.h5")
    staging.save(folder / "x.h5", X)
