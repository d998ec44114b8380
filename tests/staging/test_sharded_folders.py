"""staging.load of folders of .safetensors files, as Hugging Face's libraries and hpcdist lay them out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import whole_of
from collective import Findings, raises_on_all_ranks
from safetensors.torch import save_file

import hpcdist as hd
from hpcdist import staging

pytestmark = pytest.mark.mpi

WHOLES = {
    "model.embed_tokens.weight": whole_of((11, 6), torch.float32),
    "model.layers.0.weight": whole_of((5, 4), torch.bfloat16, 1),
    "model.layers.1.weight": whole_of((300, 400), torch.int64, 2),
    "model.norm.weight": whole_of((7,), torch.float64, 3),
    "scale": torch.tensor(2.5),
    "none": torch.empty(0, 3),
}
INDEX = "model.safetensors.index.json"


@pytest.fixture
def saved(folder: Path, world: hd.World) -> Path:
    """A folder that this package has written, in several files."""
    staging.save(folder / "model.safetensors", WHOLES, None, max_shard_size="1KB")
    if world.rank == 0:
        assert len(list(folder.glob("*-of-*.safetensors"))) > 2
    return folder


def _mine(x: torch.Tensor, dim: int | None, world: hd.World) -> torch.Tensor:
    return x if dim is None or x.dim() == 0 else hd.local(x, hd.Split(dim))


def test_every_part(saved: Path, world: hd.World) -> None:
    findings = Findings(world.comm)
    for path in (saved, saved / INDEX, str(saved) + "/"):
        for dim in (0, None):
            got = staging.load(path, dim=dim)
            findings.check(got.keys() == WHOLES.keys(), got.keys())
            for name, x in WHOLES.items():
                findings.same(got[name], _mine(x, dim, world), (path, dim, name))
    got = staging.load(saved, dim={"model.layers.1.weight": 1, "scale": None})
    findings.same(got["model.layers.1.weight"], _mine(WHOLES["model.layers.1.weight"], 1, world), "dim by name")
    findings.same(got["model.norm.weight"], _mine(WHOLES["model.norm.weight"], 0, world), "dim by name")
    x = WHOLES["model.layers.1.weight"]
    out = torch.empty(4, 3, dtype=x.dtype).t()
    staging.load(saved, "model.layers.1.weight", box=((world.rank, 5), (3, 4)), out=out)
    findings.same(out, x[world.rank : world.rank + 3, 5:9], "box")
    for options in ({"once_per": "job"}, {"once_per": "node"}, {"shared": True}, {"readers": 1, "window": 1000}):
        got = staging.load(saved, dim=None, **options)
        for name, x in WHOLES.items():
            findings.same(got[name], x, (options, name))
    said = hd.explain(staging.load, saved, dim=None, once_per="job")
    findings.check(said.read_by_all == sum(x.nbytes for x in WHOLES.values()), said)
    findings.settle()


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


def _unconsolidated(folder: Path) -> None:
    save_file(
        {"x": torch.ones(2)}, folder / "shard-1.safetensors", {"DCP_SHARDING_INFO": '{"x": {"saved_offsets": [0]}}'}
    )


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "empty": (lambda f: None, "holds no checkpoint"),
    "torch's folder": (lambda f: (f / ".metadata").write_bytes(b""), "torch's DCP, which dcp.load reads"),
    "not consolidated": (_unconsolidated, "holds parts of tensors"),
    "the file of an index is missing": (lambda f: _index(f, {"x": "gone.safetensors"}), "gone.safetensors"),
    "an index that leads out": (lambda f: _index(f, {"x": "../x.safetensors"}), "names a file outside the folder"),
    "a damaged index": (lambda f: (f / INDEX).write_text("{"), "cannot be read"),
    "an index of what is not there": (
        lambda f: (save_file({"y": torch.ones(2)}, f / "a.safetensors"), _index(f, {"x": "a.safetensors"})),
        "incomplete: x is not in a.safetensors",
    ),
    "twice": (
        lambda f: [save_file({"x": torch.ones(2)}, f / f"{name}.safetensors") for name in "ab"],
        "x is in another file of the folder, too",
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
    error = raises_on_all_ranks(world.comm, hd.RankError, lambda: staging.load(folder, "x"))
    assert text in str(error), error
