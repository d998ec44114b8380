"""What plans by arithmetic bring to ranks: many tensors in any order of names, tables of pieces in any order."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from cases import seal
from collective import Findings, assert_on_all_ranks
from conftest import WRITERS

import hpcdist as hd
from hpcdist import staging
from hpcdist.files import h5
from hpcdist.staging.reader import DatasetReader

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("writer", WRITERS)
def test_many_tensors_with_names_in_another_order(writer: str, world: hd.World, folder: Path) -> None:
    """Ragged in ways of their own; the ranks but the first name them in another order."""
    size, found = world.world_size, Findings(world.comm)
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
        found.same(staging.load(folder / "x.h5", name, dim=None, verify=True), whole, name)
        mine = whole.split(extents[name], dims[name])[world.rank]
        got = staging.load(folder / "x.h5", name, dim=dims[name], counts=extents[name], window=100, readers=size)
        found.same(got, mine, f"{name}, as it was saved")
    found.settle()


@pytest.mark.parametrize("order", ["reversed", "shuffled"])
def test_a_table_of_pieces_in_any_order(order: str, world: hd.World, folder: Path) -> None:
    """Nothing promises that the pieces of a file come in the order of the tensor."""
    whole = torch.arange(40 * 6).view(40, 6)
    staging.save(folder / "x.h5", whole[:: world.world_size][:0] if world.rank else whole, window=100)
    if world.rank == 0:
        with h5py.File(folder / "x.h5", "r+") as file:
            table = file["_hpcdist/pieces"]
            rows = np.frombuffer(table[()].tobytes(), h5.record_dtype(2))
            assert len(rows) > 10
            chosen = (
                np.arange(len(rows))[::-1] if order == "reversed" else np.random.default_rng(1).permutation(len(rows))
            )
            table[...] = np.frombuffer(rows[chosen].tobytes(), np.uint8)
        seal(folder / "x.h5")
    world.comm.Barrier()
    found = Findings(world.comm)
    for verify in (None, True, False):
        found.same(staging.load(folder / "x.h5", dim=None, verify=verify), whole, f"whole, verify={verify}")
        for readers in (None, 1):
            got = staging.load(folder / "x.h5", dim=1, verify=verify, readers=readers)
            found.same(got, whole.tensor_split(world.world_size, 1)[world.rank], f"columns, verify={verify}")
        with staging.open(folder / "x.h5") as file:
            found.same(file.read("data", (3, 1), (30, 4), verify=verify), whole[3:33, 1:5], "a box")
            found.same(file.read("data", (7, 0), (20, 6), verify=verify), whole[7:27], "rows")
    found.settle()
    world.comm.Barrier()
    if world.rank == 0:
        with h5py.File(folder / "x.h5") as file:
            start = file["data"].id.get_offset()
        with (folder / "x.h5").open("r+b") as raw:
            raw.seek(start + 8 * 6 * 20)
            raw.write(b"\xff" * 8)
    world.comm.Barrier()
    with staging.open(folder / "x.h5") as file:
        file.read("data", (0, 0), (10, 6), verify=True)
        with pytest.raises(hd.FileError, match="is damaged"):
            file.read("data", (20, 1), (1, 1), verify=True)
    world.comm.Barrier()


def test_boxes_leave_out_pieces(world: hd.World, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Narrow boxes at both ends of a tensor: what lies between them is not read."""
    whole = torch.arange(64 * 64).view(64, 64)
    staging.save(folder / "x.h5", whole, None, window=64 * 8)
    filled: list[int] = []
    fill = DatasetReader.fill
    monkeypatch.setattr(
        DatasetReader, "fill", lambda self, box, *rest: (filled.append(box.offset[0]), fill(self, box, *rest))
    )
    row = 62 if world.rank == world.world_size - 1 else 0
    got = staging.load(folder / "x.h5", box=((row, 3), (2, 2)), readers=world.world_size)
    found = Findings(world.comm)
    found.same(got, whole[row : row + 2, 3:5], "the box")
    read = sorted(at for one in world.comm.allgather(filled) for at in one)
    expected = [0, 1, 62, 63] if world.world_size > 1 else [62, 63]
    found.check(read == expected, f"rows that were read: {read}")
    found.settle()


def test_copies_are_compressed_once(world: hd.World, folder: Path) -> None:
    """Of a tensor that every rank holds whole, nothing has to travel."""
    x = torch.arange(600).view(20, 30)
    staging.save(folder / "x.h5", x, None, compression=1, chunks=(3, 7), window=400)
    got = staging.load(folder / "x.h5", dim=None, verify=True)
    assert_on_all_ranks(world.comm, torch.equal(got, x))
