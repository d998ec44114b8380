"""A folder that ranks see through different clients, each with a cache of pages, attributes and names of its own.

Run on two clients by the run openmpi-clients of tests/run.py; elsewhere the folder is an ordinary one.
"""

import itertools
import os
import random
from itertools import pairwise

import pytest
import torch
from cases import extents_of, load, part, whole_of
from collective import change_settings
from conftest import WRITERS

import hpcdist as hd
from hpcdist import staging
from hpcdist.commands.arrays import NO_PIECES, OUTPUTS, copy
from hpcdist.formats.contents import Dataset
from hpcdist.runtime.world import team_of
from hpcdist.staging.writer import SaveOptions


@pytest.mark.parametrize("writer", WRITERS)
def test_shards_that_meet_in_a_page(writer, findings, world, rank, folder):
    """A new name each time, and one that is replaced again and again: the bytes of all ranks, every time; of one
    tensor, and of many small ones."""
    for turn, counts in enumerate([(1000, 2007, 5, 0, 33)] * 3 + [(5, 3, 1, 1, 1), (100_000, 7, 0, 4000, 1)] * 2):
        extents = counts[: world.world_size]
        wholes = {"x": whole_of((sum(extents),), torch.int16, salt=turn)}
        wholes |= {f"t{i}": whole_of((sum(extents), 1 + i % 7), torch.float32, salt=i) for i in range(50 * (turn == 4))}
        mine = {name: part(whole, 0, extents, rank) for name, whole in wholes.items()}
        for name in (f"new{turn}.h5", "same.h5"):
            staging.save(folder / name, mine, writer=writer)
        got = staging.load(folder / f"new{turn}.h5", dim=None, verify=True)
        for name, whole in wholes.items():
            findings.same(got[name], whole, f"turn {turn}: {name}")
        if rank == 0:
            with staging.open(folder / "same.h5") as file:
                findings.same(file.read("x", verify=True), wholes["x"], f"replaced in turn {turn}")
        world.comm.Barrier()


def test_piecewise(findings, world, size, folder):
    """Rows of the ranks in turn, of 100 bytes and of 10,000; columns; boxes and their writers drawn at random."""
    draw = random.Random(5)
    cases = []
    for columns in (25, 2500):
        cuts = [columns * r // size for r in range(size + 1)]
        cases += [(columns, [*range(41)], [0, columns]), (columns, [0, 40], cuts)]
    cases += [(53, [0, *sorted(draw.sample(range(1, 40), 5)), 40], [0, *sorted(draw.sample(range(1, 53), 4)), 53])] * 4
    for turn, (columns, rows, cuts) in enumerate(cases):
        whole, path = whole_of((40, columns), torch.int32, salt=turn), folder / f"{turn}.h5"
        with staging.open(path, "w", {"x": ((40, columns), whole.dtype)}, window=20_000 if turn < 4 else 300) as file:
            for k, ((top, end), (left, right)) in enumerate(itertools.product(pairwise(rows), pairwise(cuts))):
                if (k if turn < 4 else draw.randrange(size)) % size == world.rank:
                    file.write("x", whole[top:end, left:right], (top, left))
        findings.same(staging.load(path, "x", dim=None, verify=True), whole, f"turn {turn}")


@pytest.mark.parametrize("suffix", OUTPUTS)
def test_outputs_of_the_commands(suffix, findings, world, folder):
    for n in (3000, 100_003):
        whole, path = whole_of((n,), torch.float32), str(folder / f"y{n}{suffix}")
        one, read = Dataset("data", (n,), torch.float32), lambda i, box, out: out.copy_(whole[box.slices()])  # noqa: B023
        made = copy(world, team_of(), "test", path, [(one, NO_PIECES)], read, SaveOptions("posix", 9000))
        findings.check(made[1] == 0, made)
        if world.rank == 0:
            findings.same(load(path, by_library=True), whole, f"{n}")
        world.comm.Barrier()


def test_route_hdf5(findings, world, rank, folder, monkeypatch):
    change_settings(monkeypatch, world, staging=str(folder))
    extents = extents_of("ragged", world.world_size)
    for turn in range(5):
        whole = whole_of((sum(extents), 3), torch.int64, salt=turn)
        mine = part(whole, 0, extents, rank)
        findings.same(hd.concat(mine, route="hdf5"), whole, "concat")
        got = hd.split(whole if rank == 0 else None, counts=extents, route="hdf5")
        findings.same(got, mine, "split")
    world.comm.Barrier()
    findings.check(os.listdir(folder) == [], os.listdir(folder))
