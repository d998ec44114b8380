"""Checkpoints from one layout to another by the command: DCP folders, sharded safetensors, one file."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from functools import partial
from glob import iglob
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from cases import same_bits, whole_of
from launch import Job, commands, mpirun
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import Metadata

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
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of WHOLES that others have written on 3 ranks."""
    folder = tmp_path_factory.mktemp("made")
    torch.save(WHOLES, folder / "wholes.pt")
    (folder / "sharded").mkdir()
    job = mpirun(3, code=MAKE, cwd=folder)
    assert job.status == 0, job.err
    assert len(list((folder / "sharded").glob("*.safetensors"))) > 2
    return folder


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def convert(np_: int, *lines: str) -> list[Job]:
    return commands(np_, *(f"hpcdist convert {line}".split() for line in lines))


def read(path: Path) -> dict[str, torch.Tensor]:
    """All tensors, by libraries of others; but for .h5, which numpy does not know all dtypes of."""
    if path.suffix == ".safetensors" and not path.exists():
        where = json.loads(path.with_name(f"{path.name}.index.json").read_text())["weight_map"]
        return {name: load_file(path.with_name(file))[name] for name, file in where.items()}
    if path.suffix == ".safetensors":
        return load_file(path)
    with h5py.File(path) as file:
        names = [name for name in file if name != "_hpcdist"]
        return {name: _tensor(file[name]) for name in names}


def _tensor(dataset: Any) -> torch.Tensor:
    dtype = getattr(torch, dataset.attrs.get("torch_dtype", b"float32").decode())
    x = torch.from_numpy(dataset[()]) if dataset.shape else torch.tensor(dataset[()])
    return x.view(dtype) if "torch_dtype" in dataset.attrs else x


def assert_same(path: str, wholes: dict[str, torch.Tensor] = WHOLES) -> None:
    found = read(Path(path))
    assert found.keys() == wholes.keys()
    for name, x in wholes.items():
        assert same_bits(found[name], x.contiguous()), f"{path}: {name}"


INPUTS = ["dcp", "sharded", "whole.h5", "whole.safetensors", "wholes.pt"]


@pytest.mark.once
@pytest.mark.parametrize("np_", [1, 2, 3])
def test_every_layout_to_every_other(np_: int, made: Path, tmp_path: Path) -> None:
    outs = [f"{i}{out}" for i in range(len(INPUTS)) for out in ("a.safetensors", "b.h5", "d.safetensors")]
    lines = [
        f"{made}/{INPUTS[int(out[0])]} {out} --window {('1K', '2K', '256M')[i % 3]}"
        + " --max-shard-size 2KB" * (out[1] == "d")
        for i, out in enumerate(outs)
    ]
    jobs = convert(np_, *lines)
    assert [job.err for job in jobs if job.status] == []
    for out in outs:
        assert_same(out)
    assert len(list(tmp_path.glob("0d-*"))) > 2
    said = [job.out.splitlines() for job in jobs[::3]]
    assert said[0][0].startswith(f"convert: DCP folder {made}/dcp: 4 files, 8 tensors, ")
    left_out = "LEFT OUT, 2 values besides tensors: step, groups.0.lr"
    assert [INPUTS[i] for i, (_, second, *_) in enumerate(said) if second == left_out] == ["dcp", "whole.h5"]
    with safe_open("3a.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "who": "me"}
    assert not list(tmp_path.glob(".*"))


@pytest.mark.once
def test_files_of_one_writer_and_index_and_strides() -> None:
    """What one process writes with torch; an index named as INPUT; of its files only what it names."""
    held = {"w": torch.arange(12.0).view(3, 4).t(), "part": torch.arange(99)[3:7]}
    dcp.save({"model": held, "n": 5}, checkpoint_id="dcp", no_dist=True)
    save_file({"a": torch.arange(3), "old": torch.arange(4)}, "x-1.safetensors")
    save_file({"b": torch.arange(5)}, "x-2.safetensors")
    index = {"weight_map": {"a": "x-1.safetensors", "b": "x-2.safetensors"}}
    Path("x.safetensors.index.json").write_text(json.dumps(index))
    one, two = convert(2, "dcp one.safetensors", "x.safetensors.index.json two.h5")
    assert (one.status, two.status) == (0, 0), one.err + two.err
    assert_same("one.safetensors", {f"model.{name}": x for name, x in held.items()})
    assert_same("two.h5", {"a": torch.arange(3), "b": torch.arange(5)})
    assert "LEFT OUT, 1 value besides tensors: old" in two.out


def test_a_pt_file_names_what_is_left_out_and_repeats_what_is_in_it_twice() -> None:
    weights: dict[str, Any] = {"w": torch.arange(3.0), "itself": {}}
    weights["itself"] = weights
    held = {"model": weights, "ema": {"model": weights}, "step": 3, "optimizer": {"groups": [{"lr": 0.1}]}}
    torch.save(held, "x.pt")
    (job,) = convert(1, "x.pt x.safetensors")
    assert job.status == 0, job.err
    assert_same("x.safetensors", dict.fromkeys(["model/w", "ema/model/w"], torch.arange(3.0)))
    assert "LEFT OUT, 2 values besides tensors: step, optimizer/groups" in job.out


class Boom:
    """Whose pickle makes a file named boom where it is loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("boom",)


def _change(change: Callable[[Metadata], object]) -> None:
    held = pickle.loads(Path(".metadata").read_bytes())
    change(held)
    Path(".metadata").write_bytes(pickle.dumps(held))


def _info(held: Metadata, name: str) -> Any:
    return next(info for index, info in held.storage_data.items() if index.fqn == name)


@pytest.mark.once
def test_no_pickle_of_others_is_run(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planner's own objects are passed over; what stands for a tensor is refused; in the archives, too."""
    for name in ("planner", "tensor", "archive"):
        shutil.copytree(made / "dcp", name)

    def forged(held: Metadata) -> None:
        torch.save(Boom(), "forged")
        info = _info(held, "rows")
        info.relative_path, info.offset, info.length = "forged", 0, os.path.getsize("forged")

    for name, change in {
        "planner": lambda held: setattr(held, "planner_data", [Boom(), {"a": Boom()}]),
        "tensor": lambda held: held.state_dict_metadata.update(rows=Boom()),
        "archive": forged,
    }.items():
        monkeypatch.chdir(tmp_path / name)
        _change(change)
    monkeypatch.chdir(tmp_path)
    good, tensor, archive = convert(2, "planner planner.h5", "tensor tensor.h5", "archive archive.h5")
    assert (good.status, tensor.status, archive.status) == (0, 2, 2), good.err
    assert_same("planner.h5")
    assert "tensor: rows: is stored in a way that is not known" in tensor.err
    assert "archive/forged: rows: cannot be read: it holds Python objects" in archive.err
    assert sorted(os.listdir()) == ["archive", "planner", "planner.h5", "tensor"]


def _flip_archive() -> None:
    info = _info(pickle.loads(Path(".metadata").read_bytes()), "scalar")
    with open(info.relative_path, "r+b") as file:
        file.seek(info.offset)
        file.write(b"\xff")


INDEX = Path("model.safetensors.index.json")


def _index(**names: str) -> None:
    index = json.loads(INDEX.read_text())
    index["weight_map"] |= names
    INDEX.write_text(json.dumps(index))


OF_METADATA: dict[str, Callable[[Any], object]] = {  # the error -> what causes it
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
DAMAGES: list[tuple[str, Callable[[], object], str]] = [
    *(("dcp", partial(_change, change), message) for message, change in OF_METADATA.items()),
    ("dcp", lambda: os.unlink("__1_0.distcp"), "/__1_0.distcp: no such file"),
    ("dcp", lambda: os.truncate("__2_0.distcp", 99), "/__2_0.distcp: truncated: "),
    ("dcp", lambda: os.unlink(".metadata"), "is a folder without a complete checkpoint"),
    ("dcp", lambda: os.truncate(".metadata", 99), "/.metadata: cannot be read: "),
    ("dcp", lambda: Path(".metadata").write_bytes(pickle.dumps(Path("x"))), "a pickle that torch.distributed."),
    ("dcp", _flip_archive, "_0.distcp: scalar: cannot be read: "),
    ("sharded", lambda: os.unlink(next(iglob("*-00002-*"))), "no such file"),
    ("sharded", lambda: _index(rows=next(iglob("*-00002-*"))), "rows is not in"),
    ("sharded", lambda: _index(no=next(iglob("*-00002-*"))), "incomplete: no is not in"),
    ("sharded", lambda: _index(no="../x"), "outside the folder: ../x"),
    ("sharded", lambda: INDEX.write_text("[]"), "cannot be read"),
    (
        "sharded",
        lambda: INDEX.rename(shutil.copy(next(iglob("*1-of*")), "z.safetensors") + ".json"),
        "index is missing",
    ),
]


@pytest.mark.once
def test_damaged_and_incomplete_folders_are_one_line(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i, (kind, damage, _) in enumerate(DAMAGES):
        shutil.copytree(made / kind, tmp_path / f"{i}")
        save_file({"x": torch.arange(3)}, tmp_path / f"{i}.safetensors")
        monkeypatch.chdir(tmp_path / f"{i}")
        damage()
    monkeypatch.chdir(tmp_path)
    before = sorted(os.listdir())
    jobs = convert(2, *(f"{i} {i}{out}" for i in range(len(DAMAGES)) for out in (".safetensors", ".h5")))
    for i, job in enumerate(jobs):
        (line,) = [line for line in job.err.splitlines() if "Warn" not in line]
        message = DAMAGES[i // 2][2]
        assert job.status == 2, message
        assert line.startswith(f"hpcdist convert: error: {i // 2}") and message in line, f"{message}: {line}"
        assert torch.equal(load_file(f"{i // 2}.safetensors")["x"], torch.arange(3))
    assert sorted(os.listdir()) == before


REFUSED = {
    "dcp": "the following arguments are required: DST",
    "dcp dcp out.h5": "unrecognized arguments",
    "dcp out.h5 --dim 1": "unrecognized arguments: --dim",
    "dcp out.npy": "out.npy: expected a name that ends with .safetensors or .h5; dcp.load",
    "dcp out.h5 --max-shard-size 1KB": "max_shard_size is for .safetensors files",
    "dcp out.safetensors --max-shard-size much": "expected a number of bytes or text such as '5GB'",
    "empty out.h5": "is a folder without a complete checkpoint",
    "no.txt out.h5": "no.txt: expected a file of tensors or a checkpoint: a folder",
    "dcp new": "new: expected a name that ends with .safetensors or .h5; dcp.load(state, storage_reader=HDF5Reader(",
    "mix.pt c.h5": "mix.pt: no such file",
    "x.npy c.h5": "x.npy: holds an array without a name: hpcdist.gather copies it",
    "names.safetensors out.h5": "cannot be a tensor and hold",
    "odd.h5 out.safetensors": "'z' has dtype torch.complex128, which a .safetensors file cannot hold",
    "sharded sharded/model.safetensors": "would be read as a part of the input, sharded",
    "names.safetensors names.safetensors": "is also an input, which it would replace",
    "bare bare/model.safetensors --max-shard-size 2KB": "whose index is missing",
    "dcp out.safetensors/.": "is the name of a folder",
}


@pytest.mark.once
def test_refusals_are_one_line(made: Path) -> None:
    os.mkdir("empty")
    shutil.copytree(made / "dcp", "dcp")
    shutil.copytree(made / "sharded", "sharded")
    shutil.copytree(made / "sharded", "bare", ignore=shutil.ignore_patterns("*.json"))
    save_file({"a/b": torch.arange(2), "a": torch.arange(2)}, "names.safetensors")
    with h5py.File("odd.h5", "w") as file:
        file["z"] = [1j]
    np.save("x.npy", np.arange(3))
    before = sorted(os.listdir())
    for (line, message), job in zip(REFUSED.items(), convert(2, *REFUSED), strict=True):
        assert (job.status, message in job.err, job.err.count("\n")) == (2, True, 1), f"{line}: {job.err}"
        assert "ArgumentError" not in job.err, job.err
    assert sorted(os.listdir()) == before


@pytest.mark.once
def test_a_name_holds_one_file_or_several(made: Path) -> None:
    """Not an old index beside the new file, nor the reverse; a name that begins like the input's is another one."""
    shutil.copy(made / "whole.safetensors", "model-fp32.safetensors")
    line = "model-fp32.safetensors model.safetensors"
    jobs = convert(1, line, f"{line} --max-shard-size 2000", line)
    assert [job.status for job in jobs] == [0] * 3, jobs
    assert_same("model.safetensors")
    assert not INDEX.exists()
    (job,) = convert(1, f"{line} --max-shard-size 2000")
    assert job.status == 0, job
    assert not Path("model.safetensors").exists()
    assert json.loads(INDEX.read_text())["weight_map"].keys() == WHOLES.keys()


KILLED = """
    import os, runpy, signal, sys
    from hpcdist.staging.writer import RankWriter
    def dying(kind, name, count):
        original, done = getattr(kind, name), []
        def method(self, *args):
            found = original(self, *args)
            done.append(args)
            if len(done) == count:
                if hasattr(self, "team"): self.team.comm.Barrier()
                os.kill(os.getpid(), signal.SIGKILL)
            return found
        setattr(kind, name, method)
    sys.argv = ["convert", *{arguments!r}]
    dying(RankWriter, "put", 3)
    runpy.run_module("hpcdist.commands.conversion", run_name="__main__")
"""


@pytest.mark.once
def test_killed_jobs() -> None:
    """With --resume, what is there is kept."""
    wholes = {"a": torch.arange(2**17), "b": torch.rand(16_000, 3)}
    dcp.save(wholes, checkpoint_id="dcp", no_dist=True)
    for output in ("x.safetensors", "x.h5"):
        line = f"dcp {output} --window 64K --resume"
        assert mpirun(2, code=KILLED.format(arguments=line.split())).status != 0
        assert not Path(output).exists()
        (job,) = convert(2, line)
        assert job.status == 0, job.err
        assert re.search(r"resumed: [3-6] of \d\d pieces were there and are kept", job.out), job.out
        assert_same(output, wholes)


@pytest.mark.once
def test_each_byte_is_read_once_within_the_window() -> None:
    """96 MiB in a DCP folder, and from a file with checksums: bytes read by all ranks, and what is resident."""
    state = {"a": torch.arange(2**22), "b": torch.rand(12288, 1024), "c": torch.ones(2**21, dtype=torch.float64)}
    dcp.save(state, checkpoint_id="dcp", no_dist=True)
    torch.save(state, "z.pt")
    code = """
        import json, re, hpcdist as hd
        from hpcdist.commands import conversion
        peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
        chars = lambda: int(re.search(r"rchar: (\\d+)", open("/proc/self/io").read())[1])
        with hd.init(device="cpu") as world:
            lines = [["dcp", "x.h5"], ["x.h5", "y.safetensors"],
                     ["y.safetensors", "z.safetensors", "--max-shard-size", "20MB"], ["z.pt", "z.h5"]]
            for line in lines:
                before = peak(), chars()
                conversion.main(world, conversion.parser().parse_args([*line, "--window", "4M"]))
                found = world.comm.gather((peak() - before[0], chars() - before[1]))
                if found: print(json.dumps(found))
    """
    job = mpirun(2, code=code)
    assert job.status == 0, job.err
    lines = [json.loads(line) for line in job.out.splitlines() if line.startswith("[[")]
    assert len(lines) == 4
    data = sum(x.nbytes for x in state.values())
    for found in lines:
        assert max(grown for grown, _ in found) < 40 * 1024, f"KiB: {lines}"
        assert data < sum(count for _, count in found) < 1.15 * data, lines
    assert torch.equal(read(Path("y.safetensors"))["b"], state["b"])
    assert read(Path("z.safetensors")).keys() == state.keys()
