"""save() to .safetensors: every shape, dim and dtype, as the library reads them; commit, resumption, refusals."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import EXTENTS, extents_of, part, whole_of
from collective import Findings, assert_on_all_ranks, raises_on_all_ranks
from safetensors import safe_open
from safetensors.torch import load_file

import hpcdist as hd
from hpcdist import staging
from hpcdist.files import safetensors
from hpcdist.staging import drivers, saving

pytestmark = pytest.mark.mpi

SMALL = 100  # bytes: a window that divides nothing evenly


@pytest.mark.parametrize("case", EXTENTS)
def test_every_extent_dim_and_dtype(case: str, world: hd.World, folder: Path) -> None:
    findings, path = Findings(world.comm), folder / "x.safetensors"
    extents = extents_of(case, world.world_size)
    for dim in (0, 1, 2):
        shape = [2, 3, 4]
        shape[dim] = sum(extents)
        wholes = {str(dtype): whole_of(tuple(shape), dtype) for dtype in safetensors.KINDS}
        shards = {name: part(whole, dim, extents, world.rank) for name, whole in sorted(wholes.items())}
        staging.save(path, shards, dim, window=SMALL)
        loaded = load_file(path)
        findings.check(loaded.keys() == wholes.keys(), loaded.keys())
        for name, whole in wholes.items():
            findings.same(loaded[name], whole, f"{name} {dim} by load_file")
        with safe_open(path, framework="pt") as file:
            for name in ("torch.float32", "torch.bfloat16"):
                if wholes[name].numel():
                    findings.same(
                        file.get_slice(name)[1:, :, 1:], wholes[name][1:, :, 1:], f"{name} {dim} by safe_open"
                    )
        start, header = safetensors.header_of(str(path))
        for name, entry in header.items():
            if name != safetensors.METADATA:
                at = start + entry["data_offsets"][0]
                findings.check(at % wholes[name].itemsize == 0, f"{name} begins at {at}")
        world.comm.Barrier()
    findings.settle()


def test_names_scalars_whole_tensors_and_metadata(world: hd.World, folder: Path) -> None:
    findings, path = Findings(world.comm), folder / "x.safetensors"
    tensors = {
        "model.w": torch.full((2, world.rank), world.rank),
        "b": {"é": torch.arange(3.0), "step": torch.tensor(7)},
        "loss": torch.tensor(world.rank / 2),
        "none": torch.empty(0, 4),
    }
    dims: dict[str, Any] = {"model.w": 1, "b": {"é": None, "step": None}, "loss": 0, "none": 0}
    staging.save(path, tensors, dims, attrs={"": {"title": "a run"}})
    loaded = load_file(path)
    columns = [rank for rank in range(world.world_size) for _ in range(rank)]
    findings.check(loaded["model.w"].tolist() == [columns] * 2, loaded["model.w"])
    findings.same(loaded["b/é"], torch.arange(3.0), "whole")
    findings.same(loaded["b/step"], torch.tensor(7), "0-d")
    findings.same(loaded["loss"], torch.arange(world.world_size) / 2, "stacked")
    findings.same(loaded["none"], torch.empty(0, 4), "none")
    with safe_open(path, framework="pt") as file:
        findings.check(file.metadata() == {"format": "pt", "title": "a run"}, file.metadata())
    staging.save(path, {})
    findings.check(load_file(path) == {}, "no tensors")
    staging.save(path, torch.ones(1, 2))
    findings.same(load_file(path)["data"], torch.ones(world.world_size, 2), "one tensor without a name")
    findings.settle()


@pytest.mark.parametrize("again", ["the same", "other values", "other shapes"])
def test_a_failed_save_is_resumed(again: str, world: hd.World, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it wrote is not written again, but where values or shapes are others."""
    findings, path = Findings(world.comm), folder / "x.safetensors"
    staging.save(path, {"old": torch.ones(1)})
    whole = whole_of((5 * world.world_size, 10), torch.float32)
    shard = whole[5 * world.rank : 5 * world.rank + 5].clone()
    plain = saving.Saving._end

    def failing(self: Any) -> int:
        self.problem = self.problem or "fails at the end"
        return plain(self)

    with monkeypatch.context() as patch:
        patch.setattr(saving.Saving, "_end", failing)
        raises_on_all_ranks(
            world.comm, hd.RankError, lambda: staging.save(path, {"x": shard}, window=SMALL, resume=True)
        )
    findings.check(load_file(path).keys() == {"old"}, "the old file")
    world.comm.Barrier()
    written = [0]
    write_ahead = drivers.write_ahead

    def counted(fd: int, place: int, data: memoryview, digest: Any = None) -> None:
        written[0] += len(data)
        write_ahead(fd, place, data, digest)

    monkeypatch.setattr(drivers, "write_ahead", counted)
    if again == "other values":
        shard[0, 0] = 7
    if again == "other shapes":
        shard = shard[:, :4].contiguous()
    staging.save(path, {"x": shard}, window=SMALL, resume=True)
    total = sum(world.comm.allgather(written[0]))
    if again == "the same":
        findings.check(total == 0, f"{total} bytes were written again")
    elif again == "other values":
        findings.check(0 < total <= 2 * SMALL * world.world_size, f"{total} bytes were written again")
    expected = torch.cat(world.comm.allgather(shard))
    findings.same(load_file(path)["x"], expected, again)
    findings.check(os.listdir(folder) == ["x.safetensors"], os.listdir(folder))
    findings.settle()


def test_several_files_and_their_index(world: hd.World, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hugging Face's names and index; every file loads; none appears if one of them fails."""
    findings, path = Findings(world.comm), folder / "model.safetensors"
    wholes = {f"layer.{k}": whole_of((4, 5 + k), torch.float32, k) for k in range(5)}  # 80 to 144 bytes
    shards = {name: x.tensor_split(world.world_size)[world.rank] for name, x in wholes.items()}
    staging.save(path, shards, max_shard_size="1KB", window=SMALL)
    findings.check(os.listdir(folder) == ["model.safetensors"], os.listdir(folder))
    world.comm.Barrier()
    if world.rank == 0:
        path.unlink()
    plain = saving.Saving._write

    def failing(self: Any, place: int, data: memoryview, digest: Any = None) -> None:
        if "00002-of" in self.map.path and world.rank == world.world_size - 1:
            raise OSError(5, "a broken disk")
        plain(self, place, data, digest)

    with monkeypatch.context() as patch:
        patch.setattr(saving.Saving, "_write", failing)
        error = raises_on_all_ranks(world.comm, hd.RankError, lambda: staging.save(path, shards, max_shard_size=200))
        findings.check("a broken disk" in str(error), error)
    world.comm.Barrier()
    findings.check(os.listdir(folder) == [], os.listdir(folder))
    world.comm.Barrier()
    staging.save(path, shards, max_shard_size=200, window=SMALL, resume=True)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    held = {"layer.0": 1, "layer.1": 1, "layer.2": 2, "layer.3": 3, "layer.4": 4}
    names = {name: f"model-{k:05d}-of-00004.safetensors" for name, k in held.items()}
    findings.check(index == {"metadata": {"total_size": 16 * 35}, "weight_map": names}, index)
    findings.check(sorted(os.listdir(folder)) == sorted({*names.values(), "model.safetensors.index.json"}), "names")
    loaded = {}
    for name in set(names.values()):
        loaded |= load_file(folder / name)
    for name, whole in wholes.items():
        findings.same(loaded[name], whole, name)
    for size, text in ((0, "max_shard_size is 0"), ("5 XB", "max_shard_size is '5 XB'")):
        error = raises_on_all_ranks(
            world.comm, hd.RankError, lambda s=size: staging.save(path, shards, max_shard_size=s)
        )
        findings.check(text in str(error), error)
    error = raises_on_all_ranks(world.comm, hd.RankError, lambda: staging.save(folder / "x.h5", {}, max_shard_size=9))
    findings.check("is for .safetensors files" in str(error), error)
    findings.settle()


def test_a_name_holds_the_last_save_alone(world: hd.World, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file after several, and several after one: readers find no older ones. Old and new ones are never in one
    index, whatever fails in between."""
    findings, path = Findings(world.comm), folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"

    def save(start: int, size: int | None) -> None:
        world.comm.Barrier()
        wholes = {name: torch.arange(start, start + 20).float() for name in ("a", "b")}
        staging.save(path, wholes, dim=None, max_shard_size=size)

    save(0, 80)
    findings.check(index.exists() and not path.exists(), "several")
    save(100, None)
    findings.check(not index.exists(), "the old index is beside the new file")
    findings.check(load_file(path)["a"][0] == 100, "one")
    save(200, 80)
    findings.check(index.exists() and not path.exists(), "the old file is beside the new index")

    with monkeypatch.context() as patch:  # one file has its name, the other does not
        plain, taken = saving.Saving.commit, list[int]()

        def failing(self: Any) -> None:
            if taken:
                self.problem = "a broken disk"
            taken.append(1)
            plain(self)

        patch.setattr(saving.Saving, "commit", failing)
        raises_on_all_ranks(world.comm, hd.RankError, lambda: save(300, 80))
    held = [load_file(folder / f"model-0000{k}-of-00002.safetensors") for k in (1, 2)]
    findings.check({float(x[0]) for part in held for x in part.values()} == {200, 300}, "one of two is new")
    findings.check(not index.exists(), "an index of old and new files")
    save(400, 80)
    findings.check(index.exists(), "again")
    findings.settle()


def test_what_the_format_cannot_hold(world: hd.World, folder: Path) -> None:
    findings, path = Findings(world.comm), folder / "x.safetensors"
    x = torch.ones(2)
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"x": torch.ones(2, dtype=torch.complex128)}, {}, "'x' has dtype torch.complex128"),
        ({"__metadata__": x}, {}, "'__metadata__' cannot be the name"),
        ({"x": x}, {"compression": "gzip"}, "compression is given"),
        ({"x": x}, {"align": 4096}, "align is given"),
        ({"x": x}, {"attrs": {"x": {"unit": "m"}}}, "only for the file"),
        ({"x": x}, {"attrs": {"": {"epoch": 3}}}, "must be text"),
    ]
    for tensors, options, text in cases:
        error = raises_on_all_ranks(world.comm, hd.RankError, lambda t=tensors, o=options: staging.save(path, t, **o))
        findings.check(text in str(error), error)
    findings.check(os.listdir(folder) == [], os.listdir(folder))
    findings.settle()


def test_the_header_is_the_librarys(world: hd.World, folder: Path) -> None:
    """Byte for byte, where names are in the library's order."""
    from safetensors.torch import save

    tensors = {
        "a": whole_of((3, 2), torch.float32),
        "b": whole_of((4,), torch.float32, 1),
        "c": whole_of((3,), torch.int8),
    }
    staging.save(folder / "x.safetensors", tensors, dim=None)
    own, theirs = (folder / "x.safetensors").read_bytes(), save(tensors, {"format": "pt"})
    sizes = [int.from_bytes(data[:8], "little") for data in (own, theirs)]
    heads = [json.loads(data[8 : 8 + size]) for data, size in zip((own, theirs), sizes, strict=True)]
    assert_on_all_ranks(world.comm, heads[0] == heads[1] and own[8 + sizes[0] :] == theirs[8 + sizes[1] :], heads)


def test_load(world: hd.World, folder: Path) -> None:
    """Whatever wrote the file: every dtype, along every dim, in boxes, on any number of ranks; names with dots."""
    from safetensors.torch import save_file

    findings, path = Findings(world.comm), folder / "x.safetensors"
    wholes = {str(dtype): whole_of((5, 4, 3), dtype) for dtype in safetensors.KINDS}
    wholes |= {"none": torch.empty(0, 4, 3), "scalar": torch.tensor(2.5)}
    if world.rank == 0:
        save_file(wholes, path)
    world.comm.Barrier()
    for dim in (0, 1, 2, None):
        loaded = staging.load(path, dim=dim, window=SMALL)
        findings.check(loaded.keys() == wholes.keys(), loaded.keys())
        for name, whole in wholes.items():
            parts = [whole] * world.world_size if dim is None or not whole.dim() else blocks(whole, dim, world)
            findings.same(loaded[name], parts[world.rank], f"{name} {dim}")
    box = (world.rank % 4, 1, 0), (2, 3, 2)
    found = staging.load(path, "torch.bfloat16", box=box)
    at = tuple(slice(o, o + n) for o, n in zip(*box, strict=True))
    findings.same(found, wholes["torch.bfloat16"][at], "box")
    for name, text in (("no", "holds no tensor 'no'"), (None, "cannot be read")):
        if name is None and world.rank == 0:
            os.truncate(path, 200)
        world.comm.Barrier()
        error = raises_on_all_ranks(world.comm, hd.RankError, lambda n=name: staging.load(path, n))
        findings.check(text in str(error), error)
    findings.settle()


def blocks(whole: torch.Tensor, dim: int, world: hd.World) -> list[torch.Tensor]:
    """The block rule, by torch."""
    return [part.contiguous() for part in whole.tensor_split(world.world_size, dim)]
