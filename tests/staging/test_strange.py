"""Files that are no regular files, files that lead to other files, and sizes that nothing can have: refused on all
ranks in one clear line, before anything is opened, and the job goes on."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from collective import assert_on_all_ranks, raises_on_all_ranks

import hpcdist as hd
from hpcdist import staging
from hpcdist.commands import sources
from hpcdist.errors import FileError, InputError

pytestmark = pytest.mark.mpi

X = torch.arange(6).view(3, 2)


def test_what_is_no_regular_file_is_neither_read_nor_replaced(world: hd.World, folder: Path) -> None:
    if world.rank == 0:
        os.mkfifo(folder / "fifo.h5")
        (folder / "link.h5").symlink_to("fifo.h5")
        (folder / "dir.h5").mkdir()
    world.comm.Barrier()
    before = sorted(os.listdir(folder))
    for name, kind in {"fifo.h5": "FIFO", "link.h5": "FIFO", "dir.h5": "folder"}.items():
        calls: dict[str, Callable[[], Any]] = {
            "save": lambda p=folder / name: staging.save(p, X),
            "open to write": lambda p=folder / name: staging.open(p, "w", {"x": ((1,), torch.int64)}),
            "load": lambda p=folder / name: staging.load(p),
        }
        for what, call in calls.items():
            error = raises_on_all_ranks(world.comm, hd.RankError, call)
            assert_on_all_ranks(world.comm, f"{name}: is a {kind}" in str(error), f"{what}: {error}")
        with pytest.raises(FileError, match=f"{name}: is a {kind}"):
            staging.open(folder / name)
    assert_on_all_ranks(world.comm, sorted(os.listdir(folder)) == before, os.listdir(folder))
    assert_on_all_ranks(world.comm, not (folder / "fifo.h5").is_file())


def lead_elsewhere(folder: Path) -> dict[str, tuple[str | None, str]]:
    """Files that lead to another one, a FIFO, which hangs whoever opens it -> the name that does, and what is said."""
    os.mkfifo(folder / "other.h5")
    (folder / "secret").write_bytes(bytes(range(48)))
    source = h5py.VirtualSource("other.h5", "x", (3, 4), maxshape=(None, 4))
    virtual = h5py.VirtualLayout((3, 4), "i8", maxshape=(None, 4))
    virtual[: h5py.h5s.UNLIMITED, :] = source[: h5py.h5s.UNLIMITED, :]
    with h5py.File(folder / "virtual.h5", "w") as file:
        file.create_virtual_dataset("x", virtual)
    with h5py.File(folder / "own.h5", "w") as file:
        file["y"] = np.arange(4)
        layout = h5py.VirtualLayout((4,), "i8")
        layout[:] = h5py.VirtualSource(".", "y", (4,))
        file.create_virtual_dataset("x", layout)
    with h5py.File(folder / "external.h5", "w") as file:
        file.create_dataset("x", (6,), "i8", external=[(str(folder / "secret"), 0, 48)])
    with h5py.File(folder / "link.h5", "w") as file:
        file["link"] = h5py.ExternalLink("other.h5", "x")
        file["soft"] = h5py.SoftLink("/link")
        file["group/deep"] = h5py.SoftLink("../link")
        file["folder"] = h5py.ExternalLink("other.h5", "/")
        file["round"] = h5py.SoftLink("/round")
    with h5py.File(folder / "ours.h5", "w") as file:
        file["_hpcdist"] = h5py.ExternalLink("other.h5", "/")
        file["x"] = np.arange(6).reshape(3, 2)
    staging_parts = {"state": b"\1", "token": bytes(16)}
    with h5py.File(folder / "plan.h5", "w") as file:
        file["x"] = np.arange(6).reshape(3, 2)
        file.create_group("_hpcdist").attrs["version"] = 1
        for name, content in staging_parts.items():
            file[f"_hpcdist/{name}"] = np.frombuffer(content, np.uint8)
        file.create_dataset("_hpcdist/plan", (48,), "u1", external=[(str(folder / "secret"), 0, 48)])
    return {
        "virtual.h5": ("x", "x is a virtual dataset"),
        "own.h5": ("x", "x is a virtual dataset"),
        "external.h5": ("x", "x has its data in another file ("),
        "link.h5:link": ("link", "link is a link into another file (other.h5), which is not read"),
        "link.h5:soft": ("soft", "soft is a link into another file (other.h5), which is not read"),
        "link.h5:folder/x": ("folder/x", "folder/x is a link into another file (other.h5), which is not read"),
    }


def test_no_other_file_than_the_one_that_is_named_is_read(world: hd.World, folder: Path) -> None:
    """By load, open and the commands; what is beside it in the file is."""
    wrong = world.comm.bcast(lead_elsewhere(folder) if world.rank == 0 else None)
    for spec, (name, text) in wrong.items():
        path = folder / spec.partition(":")[0]
        error = raises_on_all_ranks(world.comm, hd.RankError, lambda p=path, n=name: staging.load(p, n))
        assert_on_all_ranks(world.comm, text in str(error), error)
        for by_library in (False, True):
            with pytest.raises(InputError) as caught:
                sources.load(f"{path}:{name}", by_library)
            assert text in str(caught.value)
        if ":" not in spec:
            error = raises_on_all_ranks(world.comm, hd.RankError, lambda p=path: staging.load(p))
            assert_on_all_ranks(world.comm, text in str(error), error)
            with staging.open(path) as file, pytest.raises(FileError) as refused:
                file.read(name or "")
            assert text in str(refused.value)
    assert_on_all_ranks(world.comm, staging.load(folder / "own.h5", "y", dim=None).tolist() == [0, 1, 2, 3])
    for name in ("ours.h5", "plan.h5"):  # whose group of ours is somebody else's
        assert_on_all_ranks(world.comm, torch.equal(staging.load(folder / name, "x", dim=None), X), name)
    for name, text in {"round": "holds no tensor 'round'; it has: nothing", "group/deep": "holds no tensor"}.items():
        error = raises_on_all_ranks(world.comm, hd.RankError, lambda n=name: staging.load(folder / "link.h5", n))
        assert_on_all_ranks(world.comm, text in str(error), error)
    with staging.open(folder / "link.h5") as file, pytest.raises(FileError, match="is a link into another file"):
        file.attrs("link")


SHAPES: dict[str, tuple[Any, str]] = {
    "2^80 elements": ((2**80,), f"'x' has shape ({2**80},): no file has more than {2**63 - 1} bytes"),
    "2^80 in two dims": ((2**40, 2**40), "no file has more than"),
    "2^63 bytes": ((2**60,), "no file has more than"),
    "nothing, but wide": ((0, 2**70), "no file has more than"),
    "2^62 bytes": ((2**59,), "in more than 4,194,304 pieces of 67,108,864: window is too small"),
    "more than the disk": ((2**44,), "no space for the output"),
    "negative": ((3, -1), "'x' has shape (3, -1), expected extents >= 0"),
    "float": ((3.0,), "'x' is ((3.0,), torch.int64), expected (shape, dtype)"),
    "bool": ((True, 3), "'x' has shape (True, 3), expected extents >= 0"),
    "text": ("12", "'x' is ('12', torch.int64), expected (shape, dtype)"),
    "no shape": (None, "'x' is (None, torch.int64), expected (shape, dtype)"),
    "33 dims": ((1,) * 33, "'x' has 33 dims, and HDF5 has 32 at most"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_open_looks_at_sizes(name: str, world: hd.World, folder: Path) -> None:
    shape, text = SHAPES[name]
    for wrong in {world.world_size - 1, None}:  # on one rank, on all
        given = shape if wrong in (None, world.rank) else (4,)
        call = lambda g=given: staging.open(folder / "x.h5", "w", {"x": (g, torch.int64)})  # noqa: E731
        error = raises_on_all_ranks(world.comm, hd.RankError, call)
        differ = "tensors is {'x': ((" if wrong is not None and name == "more than the disk" else text
        assert_on_all_ranks(world.comm, differ in str(error) or world.world_size == 1, error)
    assert_on_all_ranks(world.comm, os.listdir(folder) == [], os.listdir(folder))
    with staging.open(folder / "x.h5", "w", {"x": ((1,) * 32, torch.int64)}, window=2**80) as file:
        if world.rank == 0:
            file.write("x", torch.ones((1,) * 32, dtype=torch.int64), (0,) * 32)


def test_save_and_load_look_at_sizes(world: hd.World, folder: Path) -> None:
    one = torch.empty(1, dtype=torch.int8)
    staging.save(folder / "old.h5", X)
    calls: dict[str, tuple[Callable[[], Any], str]] = {
        "a sum beyond int64": (lambda: staging.save(folder / "x.h5", one.expand(2**63 - 1)), "no file has more than"),
        "more pieces than there can be": (
            lambda: staging.save(folder / "x.h5", one.expand(2**25), window=1), "window is too small"
        ),
        "more than the disk": (lambda: staging.save(folder / "x.h5", one.expand(2**50)), "no space for the output"),
        "33 dims": (lambda: staging.save(folder / "x.h5", one.view((1,) * 33)), "has 33 dims, and HDF5 has 32"),
        "an attribute's text with NUL": (
            lambda: staging.save(folder / "x.h5", X, attrs={"data": {"a": "x\0y"}}), "text cannot hold NUL"
        ),
        "an attribute of no kind": (
            lambda: staging.save(folder / "x.h5", X, attrs={"data": {"a": object()}}), "cannot be written: Object"
        ),
        "attributes that are none": (lambda: staging.save(folder / "x.h5", X, attrs={"data": 3}), "must be a dict"),
        "a box far out": (lambda: staging.load(folder / "old.h5", box=((2**70, 0), (1, 1))), "is not in shape"),
        "a box too long": (lambda: staging.load(folder / "old.h5", box=((0, 0), (2**70, 1))), "is not in shape"),
        "a negative box": (lambda: staging.load(folder / "old.h5", box=((-1, 0), (1, 1))), "is not in shape"),
        "counts": (lambda: staging.load(folder / "old.h5", counts=[2**70] * world.world_size), "counts"),
    }  # fmt: skip
    if world.world_size == 1:
        del calls["a sum beyond int64"]
    for name, (call, text) in calls.items():
        error = raises_on_all_ranks(world.comm, hd.RankError, call)
        assert_on_all_ranks(world.comm, text in str(error), f"{name}: {error}")
        assert_on_all_ranks(world.comm, len(str(error).splitlines()) <= 1 + world.world_size, f"{name}: {error}")
    assert_on_all_ranks(world.comm, os.listdir(folder) == ["old.h5"], os.listdir(folder))
    staging.load(folder / "old.h5", window=2**80)
    with staging.open(folder / "old.h5") as file, pytest.raises(ValueError, match="is not in shape"):
        file.read("data", (2**70, 0), (1, 1))
