"""Checkpoints from one layout to another by the command: DCP folders, sharded safetensors, one file, and back."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
import torch.distributed.checkpoint as dcp
from cases import same_bits, whole_of
from launch import Job, commands, mpirun
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
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
        state["turned"] = state["turned"].contiguous()
        dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter("hf", save_distributed=True))
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


def gather(np_: int, *lines: list[object]) -> list[Job]:
    return commands(np_, *(["hpcdist.gather", *line] for line in lines))


def read(path: Path) -> dict[str, torch.Tensor]:
    """All tensors, by libraries of others; but for .h5, which numpy does not know all dtypes of."""
    if path.is_dir() and (path / ".metadata").exists():
        dcp_to_torch_save(path, path / "whole.pt")
        found: dict[str, torch.Tensor] = torch.load(path / "whole.pt")
        (path / "whole.pt").unlink()
        return found
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


def assert_same(path: Path, wholes: dict[str, torch.Tensor] = WHOLES) -> None:
    found = read(path)
    assert found.keys() == wholes.keys()
    for name, x in wholes.items():
        assert same_bits(found[name], x.contiguous()), f"{path}: {name}"


INPUTS = ["dcp", "hf", "sharded", "whole.h5", "whole.safetensors"]


@pytest.mark.once
@pytest.mark.parametrize("np_", [1, 2, 3])
def test_every_layout_to_every_other(np_: int, made: Path, tmp_path: Path) -> None:
    lines: list[list[object]] = []
    for i, name in enumerate(INPUTS):
        for j, (output, options) in enumerate(
            [("a.safetensors", []), ("b.h5", []), ("c/", []), ("d.safetensors", ["--max-shard-size", "2KB"])]
        ):
            window = ("1K", "2K", "256M")[(i + j) % 3]
            lines.append([made / name, "-o", f"{tmp_path}/{i}{output}", "--tensors", "--window", window, *options])
    jobs = gather(np_, *lines)
    assert [job.err for job in jobs if job.status] == []
    for line in lines:
        assert_same(Path(str(line[2])))
    assert len(list(tmp_path.glob("0d-*"))) > 2
    said = [job.out.splitlines() for job in jobs[::4]]
    assert [lines[1].startswith("LEFT OUT, 2 that are no tensors: ") for lines in said] == [
        True,
        *[False] * 2,
        True,
        False,
    ]
    assert said[0][0].startswith(f"gather: DCP folder {made}/dcp of 3 files: 8 tensors, ")
    assert "step, groups.0.lr" in said[0][1]
    assert "step, groups.0.lr" in said[3][1]
    with safe_open(tmp_path / "4a.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "who": "me"}
    assert not list(tmp_path.glob(".*"))


@pytest.mark.once
def test_dcp_loads_a_folder_on_any_number_of_ranks(made: Path, tmp_path: Path) -> None:
    (job,) = gather(2, [made / "whole.safetensors", "-o", f"{tmp_path}/c/", "--window", "1K"])
    assert job.status == 0, job.err
    code = """
        import torch, hpcdist as hd, torch.distributed.checkpoint as dcp
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor
        wholes = torch.load(%r)
        with hd.init(device="cpu") as world:
            mesh = init_device_mesh("cpu", (world.world_size,))
            state = {k: distribute_tensor(torch.zeros_like(x), mesh, [Shard(x.dim() - 1)]) if x.dim() > 1
                     else torch.zeros_like(x) for k, x in wholes.items()}
            dcp.load(state, checkpoint_id="c")
            for k, x in wholes.items():
                got = state[k].full_tensor() if hasattr(state[k], "full_tensor") else state[k]
                got, x = (y.contiguous().view(-1).view(torch.uint8) for y in (got, x))  # some are NaN
                assert torch.equal(got, x), k
    """
    job = mpirun(3, code=code % f"{made}/wholes.pt", cwd=tmp_path)
    assert job.status == 0, job.err


@pytest.mark.once
def test_files_of_one_writer_and_index_and_strides(tmp_path: Path) -> None:
    """What one process writes with torch; an index named as INPUT; of its files only what it names."""
    state = {"model": {"w": torch.arange(12.0).view(3, 4).t(), "part": torch.arange(99)[3:7]}, "n": 5}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    save_file({"a": torch.arange(3), "old": torch.arange(4)}, tmp_path / "x-1.safetensors")
    save_file({"b": torch.arange(5)}, tmp_path / "x-2.safetensors")
    index = {"weight_map": {"a": "x-1.safetensors", "b": "x-2.safetensors"}}
    (tmp_path / "x.safetensors.index.json").write_text(json.dumps(index))
    jobs = gather(
        2,
        [tmp_path / "dcp", "-o", tmp_path / "one.safetensors"],
        [tmp_path / "x.safetensors.index.json", "-o", tmp_path / "two.h5"],
    )
    assert [job.err for job in jobs if job.status] == []
    assert_same(tmp_path / "one.safetensors", {"model.w": state["model"]["w"], "model.part": torch.arange(3, 7)})  # type: ignore[index]
    assert_same(tmp_path / "two.h5", {"a": torch.arange(3), "b": torch.arange(5)})
    assert "LEFT OUT, 1 that are no tensors: old" in jobs[1].out


class Boom:
    """Whose pickle makes a file named boom where it is loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("boom",)


def _change(folder: Path, change: Callable[[Metadata], object]) -> None:
    held = pickle.loads((folder / ".metadata").read_bytes())
    change(held)
    (folder / ".metadata").write_bytes(pickle.dumps(held))


@pytest.mark.once
def test_no_pickle_of_others_is_run(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planner's own objects are passed over; what stands for a tensor is refused; in the archives, too."""
    monkeypatch.chdir(tmp_path)
    for name in ("planner", "tensor", "archive"):
        shutil.copytree(made / "dcp", tmp_path / name)
    _change(tmp_path / "planner", lambda held: setattr(held, "planner_data", [Boom(), {"a": Boom()}]))
    _change(tmp_path / "tensor", lambda held: held.state_dict_metadata.update(rows=Boom()))

    def forged(held: Metadata) -> None:
        torch.save(Boom(), tmp_path / "archive" / "forged")
        info = next(info for index, info in held.storage_data.items() if index.fqn == "rows")
        info.relative_path, info.offset, info.length = "forged", 0, (tmp_path / "archive" / "forged").stat().st_size

    _change(tmp_path / "archive", forged)
    good, *bad = gather(2, *([name, "-o", f"{name}.h5"] for name in ("planner", "tensor", "archive")))
    assert good.status == 0, good.err
    assert_same(tmp_path / "planner.h5")
    assert [job.status for job in bad] == [2, 2]
    assert "tensor: rows: is stored in a way that is not known" in bad[0].err
    assert "archive/forged: cannot be read: it holds Python objects" in bad[1].err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["archive", "planner", "planner.h5", "tensor"]


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    path.write_bytes(data)


def _index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def _info(held: Metadata, name: str) -> Any:
    return next(info for index, info in held.storage_data.items() if index.fqn == name)


def _flip_archive(folder: Path) -> None:
    info = _info(pickle.loads((folder / ".metadata").read_bytes()), "scalar")
    _flip(folder / info.relative_path, info.offset)


DAMAGES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "no file": ("dcp", lambda f: (f / "__1_0.distcp").unlink(), "/__1_0.distcp: no such file"),
    "short file": ("dcp", lambda f: os.truncate(f / "__2_0.distcp", 99), "/__2_0.distcp: truncated: "),
    "no metadata": ("dcp", lambda f: (f / ".metadata").unlink(), "holds no checkpoint, or an incomplete one"),
    "short metadata": ("dcp", lambda f: os.truncate(f / ".metadata", 99), "/.metadata: cannot be read: "),
    "empty metadata": ("dcp", lambda f: os.truncate(f / ".metadata", 0), "/.metadata: cannot be read: "),
    "another pickle": (
        "dcp", lambda f: (f / ".metadata").write_bytes(pickle.dumps({"a": 1})),
        "/.metadata: cannot be read: a pickle that torch.distributed.checkpoint did not write",
    ),
    "an unknown class's pickle": (
        "dcp", lambda f: (f / ".metadata").write_bytes(pickle.dumps(Path("x"))),
        "/.metadata: cannot be read: a pickle that torch.distributed.checkpoint did not write",
    ),
    "a part less": (
        "dcp",
        lambda f: _change(f, lambda held: held.state_dict_metadata["rows"].chunks.pop()),  # type: ignore[union-attr]
        "incomplete: the parts of rows are not the tensor of shape (40, 30), once",
    ),
    "no place": (
        "dcp", lambda f: _change(f, lambda held: held.storage_data.clear()), "incomplete: .metadata does not say",
    ),
    "outside": (
        "dcp", lambda f: _change(f, lambda held: setattr(_info(held, "same"), "relative_path", "../x")),
        "outside the folder",
    ),
    "transformed": (
        "dcp", lambda f: _change(f, lambda held: setattr(_info(held, "same"), "transform_descriptors", ["zstd"])),
        "same: is stored through zstd",
    ),
    "another part": (
        "dcp", lambda f: _change(f, lambda held: held.storage_data.update(
            {i: _info(held, "same") for i in held.storage_data if i.fqn == "few"})),
        "few: holds torch.float64 of shape (4, 3), where torch.int16",
    ),
    "archive": ("dcp", _flip_archive, "_0.distcp: cannot be read: scalar: "),
    "not a file of the index": ("sharded", lambda f: next(f.glob("*-00002-*")).unlink(), "no such file"),
    "not in its file": ("sharded", lambda f: _index(f, lambda names: names.update(rows=names["same"])), "is not in"),
    "more than there are": (
        "sharded", lambda f: _index(f, lambda names: names.update(no=names["same"])), "incomplete: no is not in",
    ),
    "elsewhere": ("sharded", lambda f: _index(f, lambda names: names.update(no="../x")), "outside the folder: ../x"),
    "no index": ("sharded", lambda f: (f / "model.safetensors.index.json").write_text("[]"), "cannot be read"),
    "two of one": (
        "sharded",
        lambda f: (
            (f / "model.safetensors.index.json").unlink(), shutil.copy(next(f.glob("*1-of*")), f / "z.safetensors"),
        ),
        "is in another file of the folder, too",
    ),
    "short": ("hf", lambda f: os.truncate(next(f.glob("shard-00002*")), 300), "cannot be read"),
    "a rank less": ("hf", lambda f: next(f.glob("shard-00001*")).unlink(), "incomplete: the parts of"),
}  # fmt: skip


@pytest.mark.once
def test_damaged_and_incomplete_folders_are_one_line(made: Path, tmp_path: Path) -> None:
    before = torch.arange(3)
    for i, (kind, damage, _) in enumerate(DAMAGES.values()):
        shutil.copytree(made / kind, tmp_path / str(i))
        damage(tmp_path / str(i))
        save_file({"x": before}, tmp_path / f"{i}.safetensors")
    count = len(DAMAGES)
    to_files = gather(2, *([tmp_path / str(i), "-o", tmp_path / f"{i}.safetensors"] for i in range(count)))
    to_folders = gather(2, *([tmp_path / str(i), "-o", f"{tmp_path}/{i}c/"] for i in range(count)))
    for i, (name, (_, _, message)) in enumerate(DAMAGES.items()):
        for job in (to_files[i], to_folders[i]):
            assert job.status == 2, f"{name}: {job}"
            (line,) = [line for line in job.err.splitlines() if "Warn" not in line]
            assert line.startswith(f"hpcdist.gather: error: {tmp_path}/{i}"), name
            assert message in line, f"{name}: {line}"
        assert torch.equal(load_file(tmp_path / f"{i}.safetensors")["x"], before)
    left = {p.name for p in tmp_path.iterdir()}
    assert left == {str(i) for i in range(count)} | {f"{i}.safetensors" for i in range(count)}


@pytest.mark.once
def test_refusals_are_one_line(made: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    (tmp_path / "empty").mkdir()
    shutil.copytree(made / "dcp", tmp_path / "dcp")
    shutil.copytree(made / "sharded", tmp_path / "sharded")
    shutil.copytree(made / "sharded", tmp_path / "bare", ignore=shutil.ignore_patterns("*.json"))
    save_file({"a/b": torch.arange(2), "a": torch.arange(2)}, tmp_path / "names.safetensors")
    with h5py.File(tmp_path / "odd.h5", "w") as file:
        file["z"] = [1j]
    ckpt, out = made / "dcp", tmp_path / "out.safetensors"
    wrong: list[tuple[list[object], str]] = [
        ([ckpt], "-o is missing"),
        ([ckpt, ckpt, "-o", out], "one INPUT is expected, 2 are given"),
        ([ckpt, "-o", out, "--dim", "1"], "--dim: is for arrays that are joined"),
        ([ckpt, "-o", out, "--verify"], "--verify: is for arrays"),
        ([ckpt, "-o", out, "--all"], "--all: is for arrays"),
        ([ckpt, "-o", out, "--root", "0"], "--root: is for arrays"),
        ([ckpt, "-o", out, "--route", "mpi"], "--route: is for arrays"),
        ([ckpt, "-o", tmp_path / "out.npy"], "unknown suffix '.npy' for all tensors"),
        (
            [ckpt, "-o", tmp_path / "out"],
            "expected .safetensors, .h5 or, for a folder of torch's DCP, a name that ends",
        ),
        ([ckpt, "-o", tmp_path / "out.h5", "--max-shard-size", "1KB"], "max_shard_size is for .safetensors files"),
        ([ckpt, "-o", out, "--max-shard-size", "much"], "expected a number of bytes or text such as '5GB'"),
        ([ckpt, "-o", f"{tmp_path}/c/", "--max-shard-size", "1KB"], "has no --max-shard-size"),
        ([ckpt, "-o", tmp_path / "full"], "is not empty: it holds x"),
        ([ckpt, "-o", tmp_path / "dcp"], "holds a checkpoint already, which is not replaced"),
        ([tmp_path / "empty", "-o", out], "holds no checkpoint, or an incomplete one"),
        ([tmp_path / "no.npz", "-o", out, "--tensors"], "no.npz: expected a checkpoint: a folder"),
        ([tmp_path / "mix.pt", "-o", f"{tmp_path}/c/"], "mix.pt: expected a checkpoint: a folder"),
        ([tmp_path / "names.safetensors", "-o", tmp_path / "out.h5", "--tensors"], "cannot be a tensor and hold"),
        ([tmp_path / "odd.h5", "-o", out, "--tensors"], "cannot hold torch.complex128, which z has"),
        ([made / "whole.safetensors", "-o", out], "hpcdist.gather --tensors copies all"),
        ([tmp_path / "sharded", "-o", tmp_path / "sharded" / "model.safetensors"], "would replace an input"),
        ([made / "whole.safetensors", "-o", f"{made}/whole.safetensors/.", "--tensors"], "is the name of a folder"),
        (
            [tmp_path / "bare", "-o", tmp_path / "bare" / "model.safetensors", "--max-shard-size", "1KB"],
            "would replace an input",
        ),
    ]
    for (_, message), job in zip(wrong, gather(2, *(line for line, _ in wrong)), strict=True):
        assert job.status == 2, job
        assert message in job.err, (message, job.err)
        assert len(job.err.splitlines()) == 1, job.err
        assert "WrongError" not in job.err, job.err
    assert not out.exists()
    assert not (tmp_path / "c").exists()


@pytest.mark.once
def test_a_name_holds_one_file_or_several(made: Path, tmp_path: Path) -> None:
    """Not an old index beside the new file, nor the reverse; a name that begins like the input's is another one."""
    source, path = tmp_path / "model-fp32.safetensors", tmp_path / "model.safetensors"
    shutil.copy(made / "whole.safetensors", source)
    line = [source, "-o", path]
    jobs = gather(1, [*line, "--tensors"], [*line, "--max-shard-size", "2000"], ["--tensors", *line])
    assert [job.status for job in jobs] == [0] * 3, jobs
    assert not (tmp_path / "model.safetensors.index.json").exists()
    same_bits(load_file(path)["rows"], WHOLES["rows"])
    (job,) = gather(1, [*line, "--max-shard-size", "2000"])
    assert job.status == 0, job
    assert not path.exists()
    assert json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"].keys() == WHOLES.keys()


KILLED = """
    import os, runpy, signal, sys
    from hpcdist.commands import dcp_output
    from hpcdist.staging import saving
    def dying(kind, name, count):
        original, done = getattr(kind, name), []
        def method(self, *args):
            original(self, *args)
            done.append(args)
            if len(done) == count:
                (self.team if hasattr(self, "team") else self._team).comm.Barrier()
                os.kill(os.getpid(), signal.SIGKILL)
        setattr(kind, name, method)
    dying(saving.Saving, "record", 3)
    dying(dcp_output.Folder, "put", 3)
    sys.argv = ["gather", *{arguments!r}]
    runpy.run_module("hpcdist.gather", run_name="__main__")
"""


@pytest.mark.once
def test_killed_jobs(made: Path, tmp_path: Path) -> None:
    """With --resume, what is there is kept; a folder is no checkpoint until it is complete, and is taken over."""
    wholes = {"a": torch.arange(8192), "b": torch.rand(1000, 3)}  # of more pages than the ranks share
    dcp.save(wholes, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for output in ("x.safetensors", "x.h5"):
        line = [str(tmp_path / "dcp"), "-o", output, "--window", "4K", "--resume"]
        assert mpirun(2, code=KILLED.format(arguments=line), cwd=tmp_path).status != 0
        assert not (tmp_path / output).exists()
        job = mpirun(2, "-m", "hpcdist.gather", *line, cwd=tmp_path)
        assert job.status == 0, job.err
        assert re.search(r"resumed: [3-6] of \d\d pieces were there and are kept", job.out), job.out
        assert_same(tmp_path / output, wholes)
    line = [str(made / "dcp"), "-o", "c/", "--window", "1K"]
    assert mpirun(3, code=KILLED.format(arguments=line), cwd=tmp_path).status != 0
    assert not (tmp_path / "c" / ".metadata").exists()
    job = mpirun(2, "-m", "hpcdist.gather", *line, cwd=tmp_path)
    assert job.status == 0, job.err
    assert_same(tmp_path / "c")
    assert len(list((tmp_path / "c").iterdir())) == 3


@pytest.mark.once
def test_each_byte_is_read_once_within_the_window(tmp_path: Path) -> None:
    """96 MiB in a DCP folder, and from a file with checksums: bytes read by all ranks, and what is resident."""
    state = {"a": torch.arange(2**22), "b": torch.rand(12288, 1024), "c": torch.ones(2**21, dtype=torch.float64)}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    code = """
        import json, re, hpcdist as hd
        from hpcdist.commands import convert, gather  # convert is imported by gather once it is wanted
        peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
        chars = lambda: int(re.search(r"rchar: (\\d+)", open("/proc/self/io").read())[1])
        with hd.init(device="cpu") as world:
            lines = [["dcp", "-o", "x.h5"], ["x.h5", "-o", "y/"], ["y", "-o", "y.safetensors"],
                     ["y.safetensors", "-o", "z.safetensors", "--max-shard-size", "20MB"]]
            for line in lines:
                before = peak(), chars()
                gather.main(world, gather.parser().parse_args([*line, "--window", "4M"]))
                found = world.comm.gather((peak() - before[0], chars() - before[1]))
                if found: print(json.dumps(found))
    """
    job = mpirun(2, code=code, cwd=tmp_path)
    assert job.status == 0, job.err
    lines = [json.loads(line) for line in job.out.splitlines() if line.startswith("[[")]
    assert len(lines) == 4
    data = sum(x.nbytes for x in state.values())
    for found in lines:
        assert max(grown for grown, _ in found) < 40 * 1024, f"KiB: {lines}"
        assert data < sum(count for _, count in found) < 1.15 * data, lines
    assert torch.equal(read(tmp_path / "y.safetensors")["b"], state["b"])
    assert read(tmp_path / "z.safetensors").keys() == state.keys()
