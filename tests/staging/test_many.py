"""What plans by arithmetic bring to ranks: many tensors in any order of names, tables of pieces in any order."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from cases import seal
from collective import Findings
from conftest import WRITERS

import hpcdist as hd
from hpcdist import staging
from hpcdist.formats.hdf5 import record_dtype

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("writer", WRITERS)
def test_many_tensors_with_names_in_another_order(
    writer: str, findings: Findings, world: hd.World, folder: Path
) -> None:
    """Ragged in ways of their own; the ranks but the first name them in another order."""
    size = world.world_size
    extents = {f"g{i % 3}/x{i}": [(i * r + 1) % 4 for r in range(size)] for i in range(12)}
    dims = {name: i % 2 for i, name in enumerate(extents)}
    wholes = {}
    for name, counts in extents.items():
        shape = (5, sum(counts)) if dims[name] else (sum(counts), 5)
        wholes[name] = torch.arange(5 * sum(counts)).view(shape)
    parts = {name: whole.split(extents[name], dims[name])[world.rank] for name, whole in wholes.items()}
    if world.rank:
        parts = dict(reversed(parts.items()))
    staging.save(folder / "x.h5", parts, dims, writer=writer, window=64 * size)
    for name, whole in wholes.items():
        findings.same(staging.load(folder / "x.h5", name, dim=None, verify=True), whole, name)
        mine = whole.split(extents[name], dims[name])[world.rank]
        got = staging.load(folder / "x.h5", name, dim=dims[name], counts=extents[name], window=100)
        findings.same(got, mine, f"{name}, as it was saved")


def test_a_table_of_pieces_in_any_order(findings: Findings, world: hd.World, folder: Path) -> None:
    """Nothing promises that the pieces of a file come in the order of the tensor."""
    whole, path = torch.arange(40 * 6).view(40, 6), folder / "x.h5"
    size = world.world_size
    staging.save(path, whole[:0] if world.rank else whole, window=100)
    for order in (range(19, -1, -1), np.random.default_rng(1).permutation(20)):
        if world.rank == 0:
            with h5py.File(path, "r+") as file:
                table = file["_hpcdist/pieces"]
                rows = np.frombuffer(table[()].tobytes(), record_dtype(2))
                assert len(rows) == 20
                table[...] = np.frombuffer(rows[list(order)].tobytes(), np.uint8)
            seal(path)
        world.comm.Barrier()
        for verify in (None, True, False):
            findings.same(staging.load(path, dim=None, verify=verify), whole, f"whole, {verify}")
            got = staging.load(path, dim=1, verify=verify)
            findings.same(got, whole.tensor_split(size, 1)[world.rank], f"columns, {verify}")
            with staging.open(path) as file:
                findings.same(file.read("data", (3, 1), (30, 4), verify=verify), whole[3:33, 1:5], "a box")
                findings.same(file.read("data", (7, 0), (20, 6), verify=verify), whole[7:27], "rows")
        world.comm.Barrier()
    if world.rank == 0:
        with h5py.File(path) as file:
            start = file["data"].id.get_offset()
        with path.open("r+b") as raw:
            raw.seek(start + 8 * 6 * 20)
            raw.write(b"\xff" * 8)
    world.comm.Barrier()
    with staging.open(path) as file:
        findings.same(file.read("data", (0, 0), (10, 6), verify=True), whole[:10], "what is right")
        with pytest.raises(hd.FileError, match="is damaged"):
            file.read("data", (20, 1), (1, 1), verify=True)


def test_boxes_leave_out_pieces(findings: Findings, world: hd.World, folder: Path) -> None:
    """The ranks share the reading of boxes in the middle of a tensor: its first and last rows are not read."""
    whole, read = torch.arange(64 * 64).view(64, 64), list[int]()
    staging.save(folder / "x.h5", whole, None, window=64 * 8)
    got = staging.load(folder / "x.h5", box=((8, 3), (48, 47)), progress=read.append)
    findings.same(got, whole[8:56, 3:50], "the box")
    findings.check(sum(map(sum, world.comm.allgather(read))) == 48 * 64 * 8, read)
