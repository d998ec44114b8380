"""Safetensors: every shape, dim and dtype, as the library reads them; several files and folders; refusals."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import EXTENTS, extents_of, part, whole_of
from collective import Findings
from conftest import holds, refused
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file

import hpcdist as hd
from hpcdist import staging
from hpcdist.formats.safetensors import SAFETENSORS, _header
from hpcdist.staging.writer import RankWriter, Target

pytestmark = pytest.mark.mpi

SMALL = 100  # bytes: a window that divides nothing evenly


@pytest.mark.parametrize("case", EXTENTS)
def test_every_extent_dim_and_dtype(case: str, world: hd.World, findings: Findings, folder: Path) -> None:
    path = folder / "x.safetensors"
    extents = extents_of(case, world.world_size)
    for dim in (0, 1, 2):
        shape = [2, 3, 4]
        shape[dim] = sum(extents)
        wholes = {str(dtype): whole_of(tuple(shape), dtype) for dtype in SAFETENSORS.dtypes}
        shards = {name: part(whole, dim, extents, world.rank) for name, whole in sorted(wholes.items())}
        staging.save(path, shards, dim, window=SMALL)
        loaded, theirs = load_file(path), folder / "theirs.safetensors"
        if world.rank == 0:
            save_file(loaded, theirs)
        world.comm.Barrier()
        got = staging.load(theirs, dim=dim, counts=extents, window=SMALL)
        findings.check(loaded.keys() == got.keys() == wholes.keys(), loaded.keys())
        for name, whole in wholes.items():
            findings.same(loaded[name], whole, (name, dim, "by load_file"))
            findings.same(got[name], shards[name], (name, dim, "by load"))
        for name, raw in _header(str(path))[0].items():
            findings.check(raw.offset % wholes[name].itemsize == 0, f"{name} begins at {raw.offset}")
        world.comm.Barrier()


def test_names_scalars_and_metadata(world: hd.World, findings: Findings, folder: Path) -> None:
    path = folder / "x.safetensors"
    tensors = {"b": {"é": torch.arange(3.0), "step": torch.tensor(7)}, "loss": torch.tensor(world.rank / 2)}
    staging.save(path, tensors, {"b": {"é": None, "step": None}, "loss": 0}, attrs={"": {"title": "a run"}})
    loaded = load_file(path)
    findings.same(loaded["b/é"], torch.arange(3.0), "whole")
    findings.same(loaded["b/step"], torch.tensor(7), "0-d")
    findings.same(loaded["loss"], torch.arange(world.world_size) / 2, "stacked")
    with safe_open(path, framework="pt") as file:
        findings.check(file.metadata() == {"format": "pt", "title": "a run"}, file.metadata())
    staging.save(path, {})
    findings.check(load_file(path) == {}, "no tensors")
    tensors = {
        "a": whole_of((3, 2), torch.float32),
        "b": whole_of((4,), torch.float32),
        "c": whole_of((3,), torch.int8),
    }
    staging.save(path, tensors, None)
    own, theirs = path.read_bytes(), save(tensors, {"format": "pt"})
    sizes = [8 + int.from_bytes(data[:8], "little") for data in (own, theirs)]
    findings.check(json.loads(own[8 : sizes[0]]) == json.loads(theirs[8 : sizes[1]]), "the header is the library's")
    findings.check(own[sizes[0] :] == theirs[sizes[1] :], "and so are the data")


def test_several_files_and_their_index(
    world: hd.World, findings: Findings, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hugging Face's names and index; every file loads; none appears if one of them fails."""
    path = folder / "model.safetensors"
    wholes = {f"layer.{k}": whole_of((4, 5 + k), torch.float32, k) for k in range(5)}  # 80 to 144 bytes
    save = partial(
        staging.save, path, {name: x.tensor_split(world.world_size)[world.rank] for name, x in wholes.items()}
    )
    save(max_shard_size="1KB", window=SMALL)
    holds(world, folder, "model.safetensors")
    if world.rank == 0:
        path.unlink()
    world.comm.Barrier()
    write = RankWriter.write

    def failing(self: Any, i: int, *args: Any) -> bool:
        if "00002-of" in self._where[i][0].name and world.rank == world.world_size - 1:
            raise OSError(5, "a broken disk")
        return write(self, i, *args)

    with monkeypatch.context() as patch:
        patch.setattr(RankWriter, "write", failing)
        refused(world, "a broken disk", save, max_shard_size=200)
    holds(world, folder)
    save(max_shard_size=200, window=SMALL, resume=True)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    names = {f"layer.{k}": f"model-{n:05d}-of-00004.safetensors" for k, n in enumerate((1, 1, 2, 3, 4))}
    findings.check(index == {"metadata": {"total_size": 16 * 35}, "weight_map": names}, index)
    for name, whole in wholes.items():
        findings.same(load_file(folder / names[name])[name], whole, name)
    holds(world, folder, *{*names.values()}, "model.safetensors.index.json")


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP, errno.EACCES])
def test_a_name_holds_the_last_save_alone(
    code: int, world: hd.World, findings: Findings, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One file after several, and several after one: readers find no older ones, where a folder cannot be synced, too.
    Old and new ones are never in one index, whatever fails in between."""
    path = folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    fsync, complete, taken = os.fsync, Target.complete, list[int]()

    def save(start: int, size: int | None) -> None:
        world.comm.Barrier()
        wholes = {name: torch.arange(start, start + 20).float() for name in ("a", "b")}
        staging.save(path, wholes, dim=None, max_shard_size=size)

    def no_folder(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(code, os.strerror(code))
        fsync(fd)

    def failing(self: Any, *args: Any) -> None:  # one file has its name, the other does not
        taken.append(1)
        complete(self, *args) if len(taken) == 1 else 1 / 0

    def full(path: Path, text: str) -> None:
        path.write_bytes(text[:10].encode())
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", no_folder)
    for start, size in ((0, 80), (100, None), (200, 80)):
        save(start, size)
        findings.check((index.exists(), path.exists()) == (size == 80, size != 80), f"one form: {start}")
        got = staging.load(path if size is None else index, "a", dim=None)
        findings.check(got[0] == start, f"the last save: {got}")
    for place, name, value, text in (
        (Target, "complete", failing, "division by zero"),
        (Path, "write_text", full, f"{index.name}: cannot be written: No space left on device"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, value)
            refused(world, text, save, 300, 80, ranks=[0])
        held = [load_file(folder / f"model-0000{k}-of-00002.safetensors") for k in (1, 2)]
        olds = {200, 300} if value is failing else {300}
        findings.check({float(x[0]) for part in held for x in part.values()} == olds, "files have their names in turn")
        findings.check(len(os.listdir(folder)) == 2, "an index of old and new files")
    save(400, 80)
    findings.check(index.exists(), "again")


def test_what_the_format_cannot_hold(world: hd.World, folder: Path) -> None:
    x = torch.ones(2)
    cases: list[tuple[str, torch.Tensor, dict[str, Any], str]] = [
        ("x", x.to(torch.complex128), {}, "'x' has dtype torch.complex128"),
        ("__metadata__", x, {}, "'__metadata__' cannot be the name"),
        ("x", x, {"attrs": {"x": {"unit": "m"}}}, "only for the file"),
        ("x", x, {"attrs": {"": {"epoch": 3}}}, "must be text"),
        ("x", x, {"max_shard_size": 0}, "max_shard_size is 0"),
        ("x", x, {"max_shard_size": "5 XB"}, "max_shard_size is '5 XB'"),
    ]
    for name, tensor, options, text in cases:
        refused(world, text, staging.save, folder / "x.safetensors", {name: tensor}, **options)
    refused(world, "is for .safetensors files", staging.save, folder / "x.h5", {}, max_shard_size=9)
    holds(world, folder)


# --- folders, as Hugging Face's libraries and hpcdist lay them out ----------------------------------------------------

WHOLES = {
    "model.embed_tokens.weight": whole_of((11, 6), torch.float32),
    "model.layers.0.weight": whole_of((5, 4), torch.bfloat16, 1),
    "model.layers.1.weight": whole_of((300, 400), torch.int64, 2),
    "model.norm.weight": whole_of((7,), torch.float64, 3),
    "scale": torch.tensor(2.5),
    "none": torch.empty(0, 3),
}
INDEX = "model.safetensors.index.json"


def test_every_part_of_a_folder(folder: Path, world: hd.World, findings: Findings) -> None:
    """Of several files that this package has written."""
    name, several = "model.layers.1.weight", folder.glob("*-of-*.safetensors")
    staging.save(folder / "model.safetensors", WHOLES, None, max_shard_size="1KB")
    findings.check(len(list(several)) > 2, "several files")
    ways: list[dict[str, Any]] = [
        *({"dim": dim, "path": path} for dim in (0, None) for path in (folder / INDEX, f"{folder}/")),
        {"dim": {name: 1, "scale": None}},
    ]
    for options in ways:
        got: Any = staging.load(**{"path": folder, **options})
        findings.check(got.keys() == WHOLES.keys(), got.keys())
        for key, x in WHOLES.items():
            dim = options["dim"].get(key, 0) if isinstance(options["dim"], dict) else options["dim"]
            findings.same(got[key], x if dim is None or not x.dim() else hd.local(x, hd.Split(dim)), (options, key))
    out = torch.empty(4, 3, dtype=torch.int64).t()
    staging.load(folder, name, box=((world.rank, 5), (3, 4)), out=out)
    findings.same(out, WHOLES[name][world.rank : world.rank + 3, 5:9], "box")
    said = hd.plan(staging.load, folder, dim=None)
    findings.check(said.file_bytes_of_all == world.world_size * sum(x.nbytes for x in WHOLES.values()), said)


def test_groups_and_no_index(folder: Path, world: hd.World) -> None:
    """Names with slashes are nested; without an index, all files of the folder count; with one, those that it names."""
    if world.rank == 0:
        save_file({"a/x": WHOLES["scale"], "a/y": WHOLES["none"]}, folder / "one.safetensors")
        save_file({"a/z": WHOLES["model.norm.weight"], "b": WHOLES["scale"]}, folder / "two.safetensors")
    world.comm.Barrier()
    got = staging.load(folder, "a", dim=None)
    assert got.keys() == {"x", "y", "z"} and torch.equal(got["z"], WHOLES["model.norm.weight"])
    assert staging.load(folder, dim=None).keys() == {"a", "b"}
    assert staging.load(folder, "b").item() == 2.5
    if world.rank == 0:
        (folder / INDEX).write_text(json.dumps({"weight_map": {"a/z": "two.safetensors"}}))
    world.comm.Barrier()
    assert staging.load(folder, dim=None)["a"].keys() == {"z"}


def test_a_load_waits_for_the_save_of_its_folder(folder: Path, world: hd.World) -> None:
    for turn, path in enumerate((folder / INDEX, folder)):
        now = {name: x + turn for name, x in WHOLES.items()}
        handle = staging.save(folder / "model.safetensors", now, None, max_shard_size="1KB", async_op=True)
        got = staging.load(path, "model.layers.1.weight", dim=None)
        handle.wait()
        assert torch.equal(got, now["model.layers.1.weight"])


def _index(folder: Path, where: dict[str, str]) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": where}))


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "empty": (lambda f: None, "without a complete checkpoint"),
    "torch's folder": (lambda f: (f / ".metadata").write_bytes(b""), ".metadata: cannot be read"),
    "parts of tensors": (
        lambda f: save_file({"x": torch.ones(2)}, f / "a.safetensors", {"DCP_SHARDING_INFO": "{}"}),
        "holds parts of tensors, which torch's consolidate_safetensors_files() joins",
    ),
    "the file of an index is missing": (lambda f: _index(f, {"x": "gone.safetensors"}), "gone.safetensors"),
    "an index that leads out": (lambda f: _index(f, {"x": "../x.safetensors"}), "names a file outside the folder"),
    "a damaged file": (lambda f: (f / "a.safetensors").write_bytes(bytes(20)), "a.safetensors: cannot be read"),
    "a damaged index": (lambda f: (f / INDEX).write_text("{"), "cannot be read"),
    "an index of what is not there": (
        lambda f: (save_file({"y": torch.ones(2)}, f / "a.safetensors"), _index(f, {"x": "a.safetensors"})),
        "incomplete: x is not in a.safetensors",
    ),
    "twice": (
        lambda f: [save_file({"x": torch.ones(2)}, f / f"{name}.safetensors") for name in "ab"],
        "x is in another file of the folder, too",
    ),
    "shards without their index": (
        lambda f: [save_file({"x": torch.ones(2)}, f / f"x-0000{k}-of-00002.safetensors") for k in (1, 2)],
        "x-00001-of-00002.safetensors is one of several files, whose index is missing",
    ),
    "two indices": (
        lambda f: [(f / f"{name}.safetensors.index.json").write_text("{}") for name in "ab"],
        "holds several checkpoints; name one of them",
    ),
    "no such tensor": (
        lambda f: save_file({"y": torch.ones(2)}, f / "a.safetensors"),
        "holds no tensor 'x'; it has: y",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_wrong_with_a_folder(case: str, folder: Path, world: hd.World) -> None:
    make, text = BROKEN[case]
    if world.rank == 0:
        shutil.rmtree(folder)
        folder.mkdir()
        make(folder)
    world.comm.Barrier()
    refused(world, text, staging.load, folder, "x")
