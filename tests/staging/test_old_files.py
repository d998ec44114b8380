"""Files made by the version before this one (commit 5dbe7de, on 2 ranks) load, and its killed save resumes.

tests/data holds two complete files, and what a save with `resume` left whose rank 1 was killed.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from collective import Findings, assert_on_all_ranks
from conftest import WRITERS

import hpcdist as hd
from hpcdist import staging
from hpcdist.staging.saving import Saving

KEPT = 9  # of ten pieces that were noted; one had a part in a page of the other rank, and was not sent
DATA = Path(__file__).parents[1] / "data"

WHOLE = {
    "model/w": torch.arange(30, dtype=torch.float32).view(6, 5),
    "model/b": torch.arange(6, dtype=torch.bfloat16),
    "cols": torch.arange(24).view(4, 6),
    "same": torch.tensor(2.5, dtype=torch.float64),
}


@pytest.mark.mpi
@pytest.mark.parametrize("dim", [0, 1, None])
@pytest.mark.parametrize("name", ["complete.h5", "compressed.h5"])
def test_a_complete_file_loads(name: str, dim: int | None, world: hd.World) -> None:
    findings = Findings(world.comm)
    with staging.open(DATA / name) as file:
        names = file.names
        findings.check(file.attrs() == {"epoch": 3}, "the file's attributes")
        findings.check(file.attrs("model/w") == {"unit": "m"}, "a tensor's attributes")
    findings.check(set(names) == {*WHOLE} - ({"model/b", "same"} if name == "compressed.h5" else set()), names)
    for key in names:
        along = dim if dim is None or dim < WHOLE[key].dim() else 0
        got = staging.load(DATA / name, key, dim=along, verify=True)
        if along is None or not WHOLE[key].dim():
            expected = WHOLE[key]
        else:
            cuts = [-(-WHOLE[key].shape[along] * r // world.world_size) for r in range(world.world_size + 1)]
            start = sum(part.shape[along] for part in world.comm.allgather(got)[: world.rank])
            findings.check(abs(start - cuts[world.rank]) <= 1, "about its share")
            expected = WHOLE[key].narrow(along, start, got.shape[along])
        findings.same(got, expected, f"{name} {key}")
    findings.settle()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("writer", WRITERS)
def test_a_killed_save_resumes(writer: str, world: hd.World, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On two ranks, as it was saved; only the pieces that were missing are written."""
    if world.rank == 0:
        for left in DATA.glob(".killed.h5.*"):
            long_ago = time.time() - 3600  # as of a process on another host: it must have let the file rest
            os.utime(shutil.copy(left, folder), (long_ago, long_ago))
    world.comm.Barrier()
    done: list[int] = []
    prove = Saving.prove

    def counted(self: Saving, rows: Sequence[Sequence[int]]) -> None:
        prove(self, rows)
        done.append(len(self.done))

    monkeypatch.setattr(Saving, "prove", counted)
    two = world.comm.Split(0 if world.rank < 2 else 1, world.rank)
    if world.rank < 2:
        tensors: dict[str, Any] = {
            "rows": torch.arange(6 * 256).view(6, 256) + 10_000 * world.rank,
            "columns": torch.arange(64 * 4).view(64, 4) + 10_000 * world.rank,
            "same": torch.arange(50, dtype=torch.bfloat16),
        }
        dims, attrs = {"rows": 0, "columns": 1, "same": None}, {"": {"epoch": 3}}
        staging.save(
            folder / "killed.h5", tensors, dims, attrs=attrs, window=2048, resume=True, writer=writer, group=two
        )
    two.Free()
    findings = Findings(world.comm)
    findings.check(done == ([KEPT] if world.rank < 2 else []), f"{done} pieces were there")
    got = staging.load(folder / "killed.h5", dim=None, verify=True)
    rows, columns = torch.arange(6 * 256).view(6, 256), torch.arange(64 * 4).view(64, 4)
    findings.same(got["rows"], torch.cat([rows, rows + 10_000]), "rows")
    findings.same(got["columns"], torch.cat([columns, columns + 10_000], 1), "columns")
    findings.same(got["same"], torch.arange(50, dtype=torch.bfloat16), "same")
    findings.settle()
    assert_on_all_ranks(world.comm, os.listdir(folder) == ["killed.h5"], os.listdir(folder))
