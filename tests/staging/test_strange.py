"""Files that are no regular files, files that lead to other files, and sizes that nothing can have: refused on all
ranks in one clear line, before anything is opened, and the job goes on."""

import os
from functools import partial

import h5py
import numpy as np
import pytest
import torch
from cases import load
from collective import assert_on_all_ranks, refused
from conftest import holds, same

from hpcdist import staging
from hpcdist.errors import FileError, HpcdistError
from hpcdist.formats import hdf5

X = torch.arange(6).view(3, 2)


def lead_elsewhere(folder):
    """Files that lead to another one, a FIFO, which hangs whoever opens it -> the name that does, and what is said."""
    os.mkfifo(folder / "other.h5")
    (folder / "secret").write_bytes(bytes(range(48)))
    shape, secret = (3, 2), [(str(folder / "secret"), 0, 48)]
    whole = np.arange(6).reshape(shape)
    files = {
        name: h5py.File(folder / f"{name}.h5", "w") for name in ("virtual", "own", "external", "link", "ours", "plan")
    }
    source = h5py.VirtualSource("other.h5", "x", shape, maxshape=(None, 2))
    virtual, own = h5py.VirtualLayout(shape, "i8", maxshape=(None, 2)), h5py.VirtualLayout((4,), "i8")
    virtual[: h5py.h5s.UNLIMITED, :] = source[: h5py.h5s.UNLIMITED, :]
    own[:] = h5py.VirtualSource(".", "y", (4,))
    files["virtual"].create_virtual_dataset("x", virtual)
    files["own"]["y"] = np.arange(4)
    files["own"].create_virtual_dataset("x", own)
    files["external"].create_dataset("x", (6,), "i8", external=secret)
    for name, link in {
        "link": h5py.ExternalLink("other.h5", "x"),
        "soft": h5py.SoftLink("/link"),
        "group/deep": h5py.SoftLink("../link"),
        "folder": h5py.ExternalLink("other.h5", "/"),
        "round": h5py.SoftLink("/round"),
    }.items():
        files["link"][name] = link
    files["ours"]["_hpcdist"] = h5py.ExternalLink("other.h5", "/")
    files["ours"]["x"] = files["plan"]["x"] = whole
    files["plan"].create_group("_hpcdist").attrs["version"] = 1
    files["plan"]["_hpcdist/state"] = np.frombuffer(hdf5.seal({}), np.uint8)
    files["plan"].create_dataset("_hpcdist/plan", (48,), "u1", external=secret)
    for file in files.values():
        file.close()
    return {
        "virtual.h5": ("x", "x is a virtual dataset"),
        "own.h5": ("x", "x is a virtual dataset"),
        "external.h5": ("x", "x has its data in another file ("),
        "plan.h5": ("x", "plan or values differ from their checksum"),
        "link.h5:link": ("link", "link (a link into another file (other.h5), which is not followed)"),
        "link.h5:soft": ("soft", "soft (a link, which is not followed)"),
        "link.h5:folder/x": ("folder/x", "'folder/x'"),
    }


def test_no_other_file_than_the_one_that_is_named_is_read(world, folder):
    """By load, open and the commands; what is beside it in the file is."""
    wrong = world.comm.bcast(lead_elsewhere(folder) if world.rank == 0 else None)
    for spec, (name, text) in wrong.items():
        path = folder / spec.partition(":")[0]
        for wanted in (name,) if ":" in spec else (name, None):
            refused(text, staging.load, path, wanted)
        for by_library in (False, True):
            with pytest.raises(HpcdistError) as caught:
                load(f"{path}:{name}", by_library)
            assert text in str(caught.value)
        with pytest.raises(FileError) as refusal, staging.open(path) as file:
            file.read(name)
        assert text in str(refusal.value)
    same(staging.load(folder / "own.h5", "y", dim=None), torch.arange(4))
    same(staging.load(folder / "ours.h5", "x", dim=None), X)
    for name in ("round", "group/deep"):
        refused(f"{name} (a link, which is not followed)", staging.load, folder / "link.h5", name)


SHAPES = {
    "2^80 elements": ((2**80,), f"'x' has shape ({2**80},): no file has more than {2**63 - 1} bytes"),
    "2^80 in two dims": ((2**40, 2**40), "no file has more than"),
    "2^63 bytes": ((2**60,), "no file has more than"),
    "nothing, but wide": ((0, 2**70), "no file has more than"),
    "2^62 bytes": ((2**59,), "in more than 1,048,576 pieces of 67,108,864: window is too small"),
    "more than the disk": ((2**43,), "no space for the output"),
    "negative": ((3, -1), "'x' has shape (3, -1), expected extents >= 0"),
    "float": ((3.0,), "'x' is ((3.0,), torch.int64), expected (shape, dtype)"),
    "bool": ((True, 3), "'x' has shape (True, 3), expected extents >= 0"),
    "text": ("12", "'x' is ('12', torch.int64), expected (shape, dtype)"),
    "no shape": (None, "'x' is (None, torch.int64), expected (shape, dtype)"),
    "33 dims": ((1,) * 33, "'x' has 33 dims, and HDF5 has 32 at most"),
}


def test_sizes_and_values_that_nothing_can_have(last, rank, size, folder):
    make = partial(staging.open, folder / "x.h5", "w")
    for name, (shape, text) in SHAPES.items():
        for alone in (False, True):
            given = (4,) if alone and rank != last else shape
            differ = alone and last and name == "more than the disk"
            refused("tensors is {'x': ((" if differ else text, make, {"x": (given, torch.int64)}, what=name)
    holds(folder)
    with make({"x": ((1,) * 32, torch.int64)}, window=2**80) as file:
        if rank == 0:
            file.write("x", torch.ones((1,) * 32, dtype=torch.int64), (0,) * 32)
    one = torch.empty(1, dtype=torch.int8)
    saves = [
        (one.expand(2**25), {"window": 1}, "window is too small"),
        (one.expand(2**44), {}, "no space for the output"),
        (one.view((1,) * 33), {}, "has 33 dims, and HDF5 has 32"),
        (X, {"attrs": {"data": {"a": "x\0y"}}}, "text cannot hold NUL"),
        (X, {"attrs": {"data": {"a\0b": 1}}}, "name cannot be empty or hold NUL"),
        (X, {"attrs": {"data": {"a": object()}}}, "cannot be written: Object"),
        (X, {"attrs": {"data": 3}}, "must be a dict"),
        *([(one.expand(2**63 - 1), {}, "no file has more than")] * (last > 0)),  # a sum beyond int64
    ]
    errors = [refused(text, staging.save, folder / "y.h5", x, **options) for x, options, text in saves]
    errors.append(refused("[HD213]", staging.load, folder / "x.h5", box=((2**70, 0), (1, 1))))
    with staging.open(folder / "x.h5") as file, pytest.raises(ValueError, match="is not in shape"):
        file.read("x", (2**70, 0), (1, 1))
    errors.append(refused("[HD213]", staging.load, folder / "x.h5", counts=[2**70] * size))
    assert_on_all_ranks(all(len(str(e).splitlines()) <= 1 + size for e in errors), errors)
    holds(folder, "x.h5")
    staging.load(folder / "x.h5", window=2**80)
