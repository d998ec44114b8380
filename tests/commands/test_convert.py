"""Checkpoints from one layout to another by the command: DCP folders, sharded safetensors, one file."""

import copyreg
import json
import os
import pickle
import shutil
from functools import partial
from pathlib import Path

import h5py
import pytest
import torch
import torch.distributed.checkpoint as dcp
from cases import same_bits, whole_of
from launch import commands, finished
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from hpcdist.errors import FileError
from hpcdist.formats.known import describe

pytestmark = pytest.mark.usefixtures("here")

WHOLES = {
    "rows": whole_of((40, 30), torch.float32),
    "columns": whole_of((30, 40), torch.bfloat16, 1),
    "few": whole_of((2, 9), torch.int16, 2),
    "same": whole_of((4, 3), torch.float64, 3),
    "scalar": torch.tensor(2.5),
    "none": torch.empty(0, 3),
    "turned": whole_of((7, 5), torch.int64, 4).t(),
    "mask": whole_of((5,), torch.uint8, 5).bool(),
}
MAKE = """
    import pickle, torch, hpcdist as hd, torch.distributed as dist, torch.distributed.checkpoint as dcp
    from hpcdist import staging
    from hpcdist.staging.dcp import HDF5Writer
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    wholes = torch.load("wholes.pt")
    with hd.init(device="cpu") as world:
        mesh = init_device_mesh("cpu", (world.world_size,))
        dims = {"rows": Shard(0), "columns": Shard(1), "few": Shard(0), "same": Replicate()}
        state = {k: distribute_tensor(x, mesh, [dims[k]]) if k in dims else x for k, x in wholes.items()}
        values = {"step": 7, "groups": [{"lr": 0.1}]}
        dcp.save({**state, **values}, checkpoint_id="dcp")
        dcp.save({**state, **values}, storage_writer=HDF5Writer("whole.h5"))
        held = {k: hd.split(x if world.rank == 0 else None, 0) if x.dim() else x for k, x in wholes.items()}
        dims = {k: 0 if x.dim() else None for k, x in wholes.items()}
        staging.save("whole.safetensors", held, dims, attrs={"": {"format": "pt", "who": "me"}})
        staging.save("sharded/model.safetensors", held, dims, max_shard_size=2000)
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Checkpoints of WHOLES that others have written on 3 ranks."""
    folder = tmp_path_factory.mktemp("made")
    torch.save(WHOLES, folder / "wholes.pt")
    (folder / "sharded").mkdir()
    finished(3, code=MAKE, cwd=folder)
    assert len(list((folder / "sharded").glob("*.safetensors"))) > 2
    return folder


def convert(np_, *lines):
    return commands(np_, *(["hpcdist", "convert", *line.split()] for line in lines))


def read(path):
    """All tensors, by libraries of others; but for .h5, which numpy does not know all dtypes of."""
    if path.suffix == ".safetensors":
        files = [path] if path.exists() else path.parent.glob(f"{path.stem}-*")
        return {name: x for file in files for name, x in load_file(file).items()}
    with h5py.File(path) as file:
        return {name: _tensor(file[name]) for name in file if name != "_hpcdist"}


def _tensor(dataset):
    dtype = getattr(torch, dataset.attrs.get("torch_dtype", b"float32").decode())
    x = torch.from_numpy(dataset[()]) if dataset.shape else torch.tensor(dataset[()])
    return x.view(dtype) if "torch_dtype" in dataset.attrs else x


def assert_same(path, wholes=WHOLES):
    found = read(Path(path))
    assert found.keys() == wholes.keys()
    for name, x in wholes.items():
        assert same_bits(found[name], x.contiguous()), f"{path}: {name}"


INPUTS = ["dcp", "sharded", "whole.h5", "whole.safetensors", "wholes.pt"]


@pytest.mark.parametrize("np_", [1, 3])
def test_every_layout_to_every_other(np_, made, tmp_path):
    outs = [f"{i}{out}" for i in range(len(INPUTS)) for out in ("a.safetensors", "b.h5", "d.safetensors")]
    jobs = convert(
        np_,
        *(
            f"{made}/{INPUTS[int(out[0])]} {out} --window {('1K', '2K', '256M')[i % 3]}"
            + " --max-shard-size 2KB" * (out[1] == "d")
            for i, out in enumerate(outs)
        ),
    )
    assert [job.err for job in jobs if job.status] == []
    for out in outs:
        assert_same(out)
    assert len(list(tmp_path.glob("0d-*"))) > 2
    said = [job.out.splitlines() for job in jobs[::3]]
    assert said[0][0].startswith(f"convert: DCP folder {made}/dcp: 4 files, 8 tensors, ")
    left_out = "LEFT OUT, 2 values besides tensors: step (a value), groups.0.lr (a value)"
    assert [INPUTS[i] for i, (_, second, *_) in enumerate(said) if second == left_out] == ["dcp", "whole.h5"]
    with safe_open("3a.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "who": "me"}
    assert not list(tmp_path.glob(".*"))


def test_inputs_with_more_than_tensors():
    """What one process writes with torch; an index named as INPUT, of whose files it names a part; a .pt file that
    holds a tensor twice. What is left out is named."""
    held = {"w": torch.arange(12.0).view(3, 4).t(), "part": torch.arange(99)[3:7]}
    dcp.save({"model": held, "n": 5}, checkpoint_id="dcp", no_dist=True)
    save_file({"a": torch.arange(3), "old": torch.arange(4)}, "x-1.safetensors")
    save_file({"b": torch.arange(5)}, "x-2.safetensors")
    index = {"weight_map": {"a": "x-1.safetensors", "b": "x-2.safetensors"}}
    Path("x.safetensors.index.json").write_text(json.dumps(index))
    weights = {"w": torch.arange(3.0)}
    weights["itself"] = weights
    torch.save({"model": weights, "ema": {"model": weights}, "step": 3, "optimizer": {"groups": [1]}}, "y.pt")
    twice = dict.fromkeys(["model/w", "ema/model/w"], torch.arange(3.0))
    cases = {
        "dcp one.safetensors": (
            {f"model.{name}": x for name, x in held.items()},
            "1 value besides tensors: n (a value)",
        ),
        "x.safetensors.index.json two.h5": (
            {"a": torch.arange(3), "b": torch.arange(5)},
            "1 value besides tensors: old (in x-1.safetensors, where the index does not look for it)",
        ),
        "y.pt three.safetensors": (
            twice,
            "2 values besides tensors: step (a value: int), optimizer/groups (a value: list)",
        ),
    }
    for job, (line, (wholes, text)) in zip(convert(2, *cases), cases.items(), strict=True):
        assert job.status == 0, job.err
        assert_same(line.split()[1], wholes)
        assert f"LEFT OUT, {text}" in job.out


class Boom:
    """Whose pickle makes a file named boom where it is loaded."""

    def __reduce__(self):
        return os.mkdir, ("boom",)


def _change(change):
    held = pickle.loads(Path(".metadata").read_bytes())
    change(held)
    Path(".metadata").write_bytes(pickle.dumps(held))


def _info(held, name):
    return next(info for index, info in held.storage_data.items() if index.fqn == name)


def test_no_pickle_of_others_is_run(made, tmp_path, monkeypatch):
    """A planner's own objects are passed over; what stands for a tensor is refused; in the archives, too."""

    def forged(held):
        torch.save([Boom(), torch.zeros(5000)], "forged")  # as long as the data that are expected
        info = _info(held, "rows")
        info.relative_path, info.offset, info.length = "forged", 0, os.path.getsize("forged")

    for name, change in {
        "planner": lambda held: setattr(held, "planner_data", [Boom(), {"a": Boom()}]),
        "tensor": lambda held: held.state_dict_metadata.update(rows=Boom()),
        "archive": forged,
    }.items():
        shutil.copytree(made / "dcp", tmp_path / name)
        monkeypatch.chdir(tmp_path / name)
        _change(change)
    monkeypatch.chdir(tmp_path)
    good, tensor, archive = convert(2, "planner planner.h5", "tensor tensor.h5", "archive archive.h5")
    assert (good.status, tensor.status, archive.status) == (0, 2, 2), good.err
    assert_same("planner.h5")
    assert "tensor: rows: is stored in a way that is not known" in tensor.err
    assert "archive/forged: rows: cannot be read: it holds Python objects" in archive.err
    assert sorted(os.listdir()) == ["archive", "planner", "planner.h5", "tensor"]


def test_members_of_enums_as_python_3_11_0_to_3_11_3_pickle_them(monkeypatch):
    """By getattr, which gives nothing else here."""
    dcp.save({"x": torch.ones(3)}, checkpoint_id=".", no_dist=True)
    for kind, what in ((_MEM_FORMAT_ENCODING, "Size"), (Boom, "__class__")):
        monkeypatch.setitem(copyreg.dispatch_table, kind, lambda x, w=what: (getattr, (type(x), getattr(x, "name", w))))
    _change(lambda held: setattr(held, "planner_data", [Boom()]))
    assert list(describe(".").tensors) == ["x"]
    _change(lambda held: held.state_dict_metadata.update(x=Boom()))
    with pytest.raises(FileError, match="is stored in a way that is not known"):
        describe(".")


def _flip_archive():
    info = _info(pickle.loads(Path(".metadata").read_bytes()), "scalar")
    with open(info.relative_path, "r+b") as file:
        file.seek(info.offset)
        file.write(b"\xff")


OF_METADATA = {  # the error -> what causes it
    "incomplete: the parts of rows are not the tensor of shape (40, 30), once": (
        lambda held: held.state_dict_metadata["rows"].chunks.pop()
    ),
    "incomplete: .metadata does not say": lambda held: held.storage_data.clear(),
    "outside the folder": lambda held: setattr(_info(held, "same"), "relative_path", "../x"),
    "same: is stored through zstd": lambda held: setattr(_info(held, "same"), "transform_descriptors", ["zstd"]),
    ": few: holds torch.float64 of shape (4, 3), where torch.int16": lambda held: held.storage_data.update(
        {i: _info(held, "same") for i in held.storage_data if i.fqn == "few"}
    ),
}
DAMAGES = {
    **{message: partial(_change, change) for message, change in OF_METADATA.items()},
    "/__1_0.distcp: no such file": lambda: os.unlink("__1_0.distcp"),
    "/__2_0.distcp: truncated: ": lambda: os.truncate("__2_0.distcp", 99),
    "is a folder without a complete checkpoint": lambda: os.unlink(".metadata"),
    "/.metadata: cannot be read: ": lambda: os.truncate(".metadata", 99),
    "a pickle that torch.distributed.": lambda: Path(".metadata").write_bytes(pickle.dumps(Path("x"))),
    "_0.distcp: scalar: cannot be read: ": _flip_archive,
}


def test_damaged_and_incomplete_folders_are_one_line(made, tmp_path, monkeypatch):
    """Of DCP; those of safetensors are in tests/staging."""
    for i, damage in enumerate(DAMAGES.values()):
        shutil.copytree(made / "dcp", tmp_path / f"{i}")
        monkeypatch.chdir(tmp_path / f"{i}")
        damage()
    monkeypatch.chdir(tmp_path)
    Path("x.h5").write_text("old")
    before = sorted(os.listdir())
    jobs = convert(2, *(f"{i} x.h5" for i in range(len(DAMAGES))))
    for i, (job, message) in enumerate(zip(jobs, DAMAGES, strict=True)):
        (line,) = [line for line in job.err.splitlines() if "Warn" not in line]
        assert job.status == 2, message
        assert line.startswith(f"hpcdist convert: error: {i}") and message in line, f"{message}: {line}"
    assert (sorted(os.listdir()), Path("x.h5").read_text()) == (before, "old")
