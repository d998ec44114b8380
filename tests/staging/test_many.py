"""Tables of many pieces: each rank reads the rows that concern it, finds that some are wrong, and writes its own."""

import sys

import h5py
import pytest
import torch

import hpcdist as hd
from hpcdist import staging
from hpcdist.formats.contents import PieceTable, row_dtype
from hpcdist.staging.arguments import flatten
from hpcdist.staging.pieces import plan_save

module = sys.modules["hpcdist.staging.save"]


@pytest.mark.parametrize("alike", [True, False])
def test_the_rows_of_a_box_are_found(alike, findings, world, rank, folder, monkeypatch):
    """In a table of 1,000 rows and more, by few reads: one, if pieces are alike."""
    own, n = 1000 - 100 * rank, world.world_size
    whole = torch.arange(sum(1000 - 100 * r for r in range(n)) * 6).view(-1, 6)
    start = sum(1000 - 100 * r for r in range(rank))
    if alike:
        staging.save(folder / "x.h5", whole[start : start + own], window=48)
    else:
        with staging.open(folder / "x.h5", "w", {"data": (whole.shape, whole.dtype)}) as file:
            while own:  # boxes of 1 row in front, of 90 at the end
                rows = min(own, 1 if start < 600 else 90)
                file.write("data", whole[start : start + rows], (start, 0))
                start, own = start + rows, own - rows
    taken, read = [], PieceTable.read

    def reading(self, fd, first, last):
        taken.append(last - first)
        return read(self, fd, first, last)

    monkeypatch.setattr(PieceTable, "read", reading)
    with staging.open(folder / "x.h5") as file:
        for first, last in ((0, 1), (500, 517), (len(whole) - 3, len(whole)), (7, 7)):
            for verify in (None, True):
                got = file.read("data", (first, 1), (last - first, 4), verify=verify)
                findings.same(got, whole[first:last, 1:5], f"rows {first} to {last}")
                few = len(taken) == 1 if alike else len(taken) <= 25
                findings.check(few and sum(taken) <= last - first + 40, taken)
                taken.clear()
    findings.same(staging.load(folder / "x.h5", dim=None, verify=True), whole, "all")


@pytest.mark.parametrize("rows", [20, 200])
def test_rows_that_are_wrong(rows, findings, world, rank, folder):
    """Where a row is damaged, moved, or there twice, a reader of that part says so, and no other one."""
    whole = torch.arange(rows * 6).view(rows, 6)
    staging.save(folder / "good.h5", whole[:0] if rank else whole, window=48)
    for kind in ("flipped", "moved", "twice"):
        path = folder / f"{kind}.h5"
        if rank == 0:
            path.write_bytes((folder / "good.h5").read_bytes())
            with h5py.File(path, "r+") as file:
                table = file["_hpcdist/pieces"][()].view(row_dtype(2))
                if kind == "flipped":
                    table["offset"][10, 0] ^= 1
                else:
                    table[[10, 11]] = table[[11, 10]] if kind == "moved" else table[[11, 11]]
                file["_hpcdist/pieces"][...] = table.view("u1")
        world.comm.Barrier()
        with staging.open(path) as file:
            with pytest.raises(hd.FileError, match=r"table of the pieces of a tensor is damaged.*HD404"):
                file.read("data", (8, 0), (5, 6))
            findings.same(file.read("data", (8, 0), (5, 6), verify=False), whole[8:13], "unchecked")
            if rows > 100:
                findings.same(file.read("data", (150, 0), (50, 6), verify=True), whole[150:], "elsewhere")
        with pytest.raises(hd.RankError, match="HD404"):
            staging.load(path, dim=1, verify=True)


def test_boxes_that_are_no_runs_tile_the_tensor(world, rank, folder):
    """A row in the place of another leaves a hole, which no reader takes for data."""
    path = folder / "x.h5"
    with staging.open(path, "w", {"data": ((6, 6), torch.int64)}) as file:
        for k in range(rank, 4, world.world_size):
            file.write("data", torch.full((3, 3), k), (k // 2 * 3, k % 2 * 3))
    if rank == 0:
        with h5py.File(path, "r+") as file:
            table = file["_hpcdist/pieces"][()].view(row_dtype(2))
            table[1] = table[0]
            file["_hpcdist/pieces"][...] = table.view("u1")
    world.comm.Barrier()
    for verify in (None, True):
        damaged = pytest.raises(hd.FileError, match=r"table of the pieces of a tensor is damaged.*HD404")
        with staging.open(path) as file, damaged:
            file.read("data", (0, 0), (6, 6), verify=verify)
        with pytest.raises(hd.RankError, match="HD404"):
            staging.load(path, dim=None, verify=verify)


def test_each_rank_writes_its_rows(world, rank, findings, folder):
    """Of many tensors of one piece, and of one of many; a second save like the first has the same rows."""
    few = {f"t/{i}": torch.full((rank + 1, *(2,) * (i % 3)), i) for i in range(70)}
    many = {"m": torch.arange(300).view(100, 3) + 300 * rank}
    for turn in range(3):
        for name, tensors, window in (("few", few, 2**20), ("many", many, 24)):
            if turn == 2:
                tensors = {key: x[rank:] for key, x in tensors.items()}  # another extent on all ranks but the first
            staging.save(folder / f"{name}.h5", tensors, window=window)
            with h5py.File(folder / f"{name}.h5") as file:
                plan = file["_hpcdist/plan"][()].tobytes().decode()
            findings.check('"runs": true' in plan and len(set(world.comm.allgather(plan))) == 1, plan)
            got = staging.load(folder / f"{name}.h5", verify=True, dim=None)
            for key, x in flatten(got).items():
                parts = world.comm.allgather(tensors[key])
                findings.same(x, torch.cat(parts), f"{key}, turn {turn}")


def test_a_second_save_exchanges_no_extents(world, rank, findings, folder, monkeypatch):
    """One digest shows that nothing has changed, whatever the values and the path; a change on one rank is seen."""
    calls = []
    monkeypatch.setattr(module, "plan_save", lambda *args: calls.append(args) or plan_save(*args))
    for k, (extent, planned) in enumerate([(3, 1), (3, 0), (3 + (rank == 0), 1), (3 + (rank == 0), 0), (3, 1)]):
        x = torch.full((extent, 2), k) + torch.arange(extent)[:, None] * 10 + 100 * rank
        staging.save(folder / f"{k}.h5", {"x": x, "step": torch.tensor(k)}, {"x": 0, "step": None})
        findings.check(len(calls) == planned, f"save {k}: planned {len(calls)} times")
        calls.clear()
        whole = torch.cat(world.comm.allgather(x))
        findings.same(staging.load(folder / f"{k}.h5", "x", dim=None, verify=True), whole, f"save {k}")
        findings.same(staging.load(folder / f"{k}.h5", "step", dim=None), torch.tensor(k), "step")
