"""Safetensors: every shape, dim and dtype, as the library reads them; several files and folders; refusals."""

import errno
import json
import os
from functools import partial
from pathlib import Path

import pytest
import torch
from cases import whole_of
from collective import refused
from conftest import holds
from safetensors.torch import load_file, save, save_file

import hpcdist as hd
from hpcdist import staging
from hpcdist.staging.writer import RankWriter, Target


def test_the_file_is_the_library_s(findings, folder):
    path = folder / "x.safetensors"
    tensors = {
        "b": whole_of((3, 2), torch.float32),
        "é": whole_of((4,), torch.float32),
        "c": whole_of((3,), torch.int8),
        "step": torch.tensor(7),
    }
    for held, attrs in ((tensors, {"": {"title": "a run"}}), ({}, {})):
        staging.save(path, held, None, attrs=attrs)
        own, theirs = path.read_bytes(), save(held, {"format": "pt", **attrs.get("", {})})
        sizes = [8 + int.from_bytes(data[:8], "little") for data in (own, theirs)]
        findings.check(json.loads(own[8 : sizes[0]]) == json.loads(theirs[8 : sizes[1]]), "the header")
        findings.check(own[sizes[0] :] == theirs[sizes[1] :], "the data")


def test_several_files_and_their_index(world, rank, size, findings, folder, monkeypatch):
    """Hugging Face's names and index; every file loads; none appears if one of them fails."""
    path = folder / "model.safetensors"
    wholes = {f"layer.{k}": whole_of((4, 5 + k), torch.float32, k) for k in range(5)}  # 80 to 144 bytes
    shards = {name: x.tensor_split(size)[rank] for name, x in wholes.items()}
    save, write = partial(staging.save, path, shards, window=100), RankWriter.write
    save(max_shard_size="1KB")
    holds(folder, "model.safetensors")
    world.comm.Barrier()
    path.unlink(missing_ok=True)

    def failing(self, i, *args):
        if "00002-of" in self._where[i][0].name and rank == size - 1:
            raise OSError(5, "a broken disk")
        return write(self, i, *args)

    with monkeypatch.context() as patch:
        patch.setattr(RankWriter, "write", failing)
        refused("a broken disk", save, max_shard_size=200)
    holds(folder)
    save(max_shard_size=200, resume=True)
    index = json.loads((folder / INDEX).read_text())
    names = {f"layer.{k}": f"model-{n:05d}-of-00004.safetensors" for k, n in enumerate((1, 1, 2, 3, 4))}
    findings.check(index == {"metadata": {"total_size": 16 * 35}, "weight_map": names}, index)
    for name, whole in wholes.items():
        findings.same(load_file(folder / names[name])[name], whole, name)
    holds(folder, *{*names.values()}, INDEX)


def test_a_name_holds_the_last_save_alone(world, findings, folder, monkeypatch):
    """One file after several, and several after one: readers find no older ones. Old and new ones are never in one
    index, whatever fails in between."""
    path, index = folder / "model.safetensors", folder / INDEX
    complete, taken = Target.complete, []

    def save(start, size=80):
        world.comm.Barrier()
        x = torch.arange(start, start + 20).float()
        staging.save(path, {"a": x, "b": x}, dim=None, max_shard_size=size)

    def failing(self, *args):  # one file has its name, the other does not
        taken.append(1)
        complete(self, *args) if len(taken) == 1 else 1 / 0

    def full(path, text):
        path.write_bytes(text[:10].encode())
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for start, size in ((0, 80), (100, None), (200, 80)):
        save(start, size)
        findings.check((index.exists(), path.exists()) == (size == 80, size != 80), f"one form: {start}")
        got = staging.load(path if size is None else index, "a", dim=None)
        findings.check(got[0] == start, f"the last save: {got}")
    for place, name, value, text, olds in (
        (Target, "complete", failing, "division by zero", {200, 300}),
        (Path, "write_text", full, f"{INDEX}: cannot be written: No space left on device", {300}),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, value)
            refused(text, save, 300, ranks=[0])
        held = [load_file(folder / f"model-0000{k}-of-00002.safetensors") for k in (1, 2)]
        findings.check({float(x[0]) for part in held for x in part.values()} == olds, "files have their names in turn")
        findings.check(len(os.listdir(folder)) == 2, "an index of old and new files")
    save(400)
    findings.check(index.exists(), "again")


def test_what_the_format_cannot_hold(folder):
    x = torch.ones(2)
    cases = [
        ({"x": x.to(torch.complex128)}, {}, "'x' has dtype torch.complex128"),
        ({"__metadata__": x}, {}, "'__metadata__' cannot be the name"),
        ({"x": x}, {"attrs": {"x": {"unit": "m"}}}, "only for the file"),
        ({}, {"attrs": {"": {"epoch": 3}}}, "must be text"),
        ({}, {"max_shard_size": 0}, "max_shard_size is 0"),
        ({}, {"max_shard_size": "5 XB"}, "max_shard_size is '5 XB'"),
    ]
    for tensors, options, text in cases:
        refused(text, staging.save, folder / "x.safetensors", tensors, **options)
    refused("[HD419]", staging.save, folder / "x.h5", {}, max_shard_size=9)
    holds(folder)


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


def test_every_part_of_a_folder(folder, rank, findings):
    """Of several files that this package has written."""
    name = "model.layers.1.weight"
    staging.save(folder / "model.safetensors", WHOLES, None, max_shard_size="1KB")
    findings.check(len(os.listdir(folder)) > 3, "several files")
    ways = [
        *({"dim": dim, "path": path} for dim in (0, None) for path in (folder / INDEX, f"{folder}/")),
        {"dim": {name: 1, "scale": None}},
    ]
    for options in ways:
        got = staging.load(**{"path": folder, **options})
        findings.check(got.keys() == WHOLES.keys(), got.keys())
        for key, x in WHOLES.items():
            dim = options["dim"].get(key, 0) if isinstance(options["dim"], dict) else options["dim"]
            findings.same(got[key], x if dim is None or not x.dim() else hd.local(x, hd.Split(dim)), (options, key))
    out = torch.empty(4, 3, dtype=torch.int64).t()
    staging.load(folder, name, box=((rank, 5), (3, 4)), out=out)
    findings.same(out, WHOLES[name][rank : rank + 3, 5:9], "box")


def test_groups_and_no_index(folder, world, rank):
    """Names with slashes are nested; without an index, all files of the folder count; with one, those that it names."""
    norm, scale = WHOLES["model.norm.weight"], WHOLES["scale"]
    if rank == 0:
        save_file({"a/x": scale, "a/y": norm}, folder / "one.safetensors")
        save_file({"a/z": norm, "b": scale}, folder / "two.safetensors")
    world.comm.Barrier()
    got = staging.load(folder, "a", dim=None)
    assert got.keys() == {"x", "y", "z"} and torch.equal(got["z"], norm)
    assert staging.load(folder, dim=None).keys() == {"a", "b"}
    assert staging.load(folder, "b").item() == 2.5
    world.comm.Barrier()
    if rank == 0:
        _index(folder, {"a/z": "two.safetensors"})
    world.comm.Barrier()
    assert staging.load(folder, dim=None)["a"].keys() == {"z"}


def test_a_load_waits_for_the_save_of_its_folder(folder):
    for turn, path in enumerate((folder / INDEX, folder)):
        now = {name: x + turn for name, x in WHOLES.items()}
        handle = staging.save(folder / "model.safetensors", now, None, max_shard_size="1KB", async_op=True)
        got = staging.load(path, "model.layers.1.weight", dim=None)
        handle.wait()
        assert torch.equal(got, now["model.layers.1.weight"])


def _index(folder, where):
    (folder / INDEX).write_text(json.dumps({"weight_map": where}))


BROKEN = {
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
def test_what_is_wrong_with_a_folder(case, folder, world):
    make, text = BROKEN[case]
    if world.rank == 0:
        make(folder)
    world.comm.Barrier()
    refused(text, staging.load, folder, "x")
