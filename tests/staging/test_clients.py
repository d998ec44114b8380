"""A folder that ranks see through different clients, each with a cache of pages, attributes and names of its own.

Run on two clients by the run openmpi-clients of tests/run.py; elsewhere the folder is an ordinary one.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import extents_of, part, whole_of
from collective import Findings, change_settings
from conftest import WRITERS
from safetensors.torch import load_file

import hpcdist as hd
from hpcdist import staging
from hpcdist.commands.outputs import Array, Output
from hpcdist.files.raw import memory
from hpcdist.staging.target import SaveOptions

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("writer", WRITERS)
def test_shards_that_meet_in_a_page(writer: str, world: hd.World, folder: Path) -> None:
    """A new name each time, and one that is replaced again and again: the bytes of all ranks, every time."""
    findings, size = Findings(world.comm), world.world_size
    for turn, counts in enumerate([(1000, 2007, 5, 0, 33)] * 3 + [(5, 3, 1, 1, 1), (100_000, 7, 0, 4000, 1)] * 2):
        extents = list(counts[:size])
        whole = whole_of((sum(extents),), torch.int16, salt=turn)
        mine = part(whole, 0, extents, world.rank)
        staging.save(folder / f"new{turn}.h5", mine, writer=writer)
        findings.same(staging.load(folder / f"new{turn}.h5", dim=None, verify=True), whole, f"turn {turn}")
        staging.save(folder / "same.h5", mine, writer=writer)
        if world.rank == 0:
            with staging.open(folder / "same.h5") as file:
                findings.same(file.read("data", verify=True), whole, f"replaced in turn {turn}")
        world.comm.Barrier()
    findings.settle()


def test_small_tensors_and_compressed_ones(world: hd.World, folder: Path) -> None:
    findings, extents = Findings(world.comm), extents_of("ragged", world.world_size)
    wholes = {f"t{i}": whole_of((sum(extents), 1 + i % 7), torch.float32, salt=i) for i in range(50)}
    mine = {name: part(whole, 0, extents, world.rank) for name, whole in wholes.items()}
    for name, options in (("plain.h5", {}), ("gzip.h5", {"compression": "gzip"})):
        staging.save(folder / name, mine, **options)
        got = staging.load(folder / name, dim=None, verify=True)
        for key, whole in wholes.items():
            findings.same(got[key], whole, f"{name} {key}")
    findings.settle()


def test_piecewise(world: hd.World, folder: Path) -> None:
    """Rows of the ranks in turn, of 100 bytes and of 10,000; and boxes of any shape."""
    findings, size = Findings(world.comm), world.world_size
    for columns in (25, 2500):
        whole = whole_of((40, columns), torch.int32)
        path = folder / f"rows{columns}.h5"
        with staging.open(path, "w", {"x": (tuple(whole.shape), whole.dtype)}, window=20_000) as file:
            for row in range(world.rank, 40, size):
                file.write("x", whole[row : row + 1], (row, 0))
        findings.same(staging.load(path, "x", dim=None, verify=True), whole, f"{columns} columns")
        path = folder / f"columns{columns}.h5"
        with staging.open(path, "w", {"x": (tuple(whole.shape), whole.dtype)}) as file:
            cuts = [columns * r // size for r in range(size + 1)]
            first, end = cuts[world.rank], cuts[world.rank + 1]
            file.write("x", whole[:, first:end], (0, first))
        findings.same(staging.load(path, "x", dim=None, verify=True), whole, f"{columns} columns, cut")
    findings.settle()


@pytest.mark.parametrize("suffix", [".npy", ".pt", ".safetensors", ".h5"])
def test_outputs_of_the_commands(suffix: str, world: hd.World, folder: Path) -> None:
    findings = Findings(world.comm)
    for n in (3000, 100_003):
        whole = whole_of((n,), torch.float32)
        path = folder / f"y{n}{suffix}"
        out = Output(world.team, "test", Array(str(path), (n,), torch.float32), SaveOptions(window=9000))
        for row in out.mine():
            out.put(row, whole[out.pieces[row].slices()].contiguous())
        out.finish()
        findings.check(out.kept == 0, "written anew")
        if world.rank == 0:
            findings.same(_read(path), whole, f"{n}")
        world.comm.Barrier()
    findings.settle()


def _read(path: Path) -> torch.Tensor:
    if path.suffix == ".npy":
        return torch.from_numpy(np.load(path))
    if path.suffix == ".pt":
        return torch.load(path)  # type: ignore[no-any-return]
    if path.suffix == ".safetensors":
        return load_file(path)["data"]
    with staging.open(path) as file:
        return file.read("data", verify=True)


def test_route_hdf5(world: hd.World, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change_settings(monkeypatch, world, staging=str(folder))
    findings, extents = Findings(world.comm), extents_of("ragged", world.world_size)
    for turn in range(5):
        whole = whole_of((sum(extents), 3), torch.int64, salt=turn)
        mine = part(whole, 0, extents, world.rank)
        findings.same(hd.concat(mine, route="hdf5"), whole, "concat")
        got = hd.split(whole if world.rank == 0 else None, counts=extents, route="hdf5")
        findings.same(got, mine, "split")
    findings.settle()
    assert os.listdir(folder) == []


def test_in_any_order(world: hd.World, folder: Path) -> None:
    """Boxes drawn at random, written by ranks drawn at random."""
    findings, draw = Findings(world.comm), random.Random(5)
    for turn in range(4):
        whole = whole_of((37, 53), torch.int16, salt=turn)
        rows, columns = sorted(draw.sample(range(1, 37), 5)), sorted(draw.sample(range(1, 53), 4))
        boxes = [(slice(a, b), slice(c, d)) for a, b in zip([0, *rows], [*rows, 37], strict=True)
                 for c, d in zip([0, *columns], [*columns, 53], strict=True)]  # fmt: skip
        takers = [draw.randrange(world.world_size) for _ in boxes]
        path = folder / f"boxes{turn}.h5"
        with staging.open(path, "w", {"x": ((37, 53), torch.int16)}, window=300) as file:
            for box, taker in zip(boxes, takers, strict=True):
                if taker == world.rank:
                    file.write("x", whole[box], (box[0].start, box[1].start))
        findings.same(staging.load(path, "x", dim=None, verify=True), whole, f"turn {turn}")
        findings.check(len(memory(whole)) == 37 * 53 * 2, "all of it")
    findings.settle()
