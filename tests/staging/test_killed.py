"""A rank is killed at 50 random points of a save: the name holds the old file or the complete new one, every time.

The points are calls of the system, of HDF5 and of MPI, so that every step of a save is met; what is left is then
resumed, or swept by the next save.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from launch import mpirun

from hpcdist.commit import Commit
from hpcdist.layout import whole
from hpcdist.staging import contents, writers
from hpcdist.staging.reader import Reader, opened

POINTS = 50 if writers.missing("mpio") is None else 12  # serial HDF5 has half of the ways
RANKS = 2
KINDS = 6  # of turns: the writer and the dim alternate

# The ranks save files one after the other; one of them is told the call at which it kills itself.
PROGRAM = """
    import os, signal, sys
    import h5py, torch
    import hpcdist as hd
    from hpcdist import abort, agree, staging

    point, victim = {point}, {victim}
    calls = 0

    def counted(place, name):
        inner = getattr(place, name)
        def call(*args, **kwargs):
            global calls
            calls += 1
            if calls == point and world.rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            return inner(*args, **kwargs)
        setattr(place, name, call)

    with hd.init(device="cpu") as world:
        for place, names in {{
            os: ("pwrite", "fsync", "replace", "open", "close", "truncate"), h5py: ("File",),
            agree: ("on_root", "on_all", "exchange"), h5py.Group: ("create_group", "__getitem__"),
        }}.items():
            for name in names:
                counted(place, name)
        for turn in {turns}:
            x = torch.arange(3000).view(100, 30) + 10_000 * world.rank + 1_000_000 * turn
            calls = 0
            writer = "posix" if turn % 3 else "auto"
            staging.save({path!r}, x, turn % 2, window=1500, writer=writer, resume={resume})
            print(f"calls of turn {{turn}}, rank {{world.rank}}: {{calls}} ")
"""


def save(path: Path, turns: Sequence[int], point: int = -1, victim: int = 0, resume: bool = False) -> tuple[int, str]:
    code = PROGRAM.format(point=point, victim=victim, turns=list(turns), path=str(path), resume=resume)
    job = mpirun(RANKS, code=code)
    return job.status, job.out + job.err


def expected(turn: int) -> torch.Tensor:
    shards = [torch.arange(3000).view(100, 30) + 10_000 * rank + 1_000_000 * turn for rank in range(RANKS)]
    return torch.cat(shards, turn % 2)


def load(path: Path) -> torch.Tensor:
    stored = contents.describe(str(path)).datasets["data"]
    out = torch.empty(stored.shape, dtype=stored.dtype)
    with opened(str(path)) as fd:
        Reader(str(path), fd, stored, 2**20, True).read(whole(stored.shape), out)
    return out


@pytest.mark.timeout(1500)
def test_killed_at_random_points(tmp_path: Path) -> None:
    draw, path = random.Random(3), tmp_path / "x.h5"
    status, text = save(path, range(KINDS))
    assert status == 0, text
    found = re.findall(r"calls of turn (\d+), rank (\d): (\d+) ", text)
    calls = {(int(turn), int(rank)): int(count) for turn, rank, count in found}
    assert len(calls) == KINDS * RANKS
    now = KINDS - 1
    for turn in range(KINDS, KINDS + POINTS):
        resume, victim = draw.randrange(5) == 0, draw.randrange(RANKS)
        point = draw.randrange(1, calls[turn % KINDS, victim] + 1)
        status, text = save(path, [turn], point, victim, resume)
        where = f"turn {turn}, rank {victim} killed at call {point} of {calls[turn % KINDS, victim]}"
        assert status != 0, f"{where}: {text}"
        left = {path.suffix: path.stem for path in tmp_path.iterdir()}
        assert set(left) in ({".h5"}, {".h5", ".part"}, {".h5", ".part", ".journal"}), (
            f"{where}: {os.listdir(tmp_path)}"
        )
        got = load(path)
        new = torch.equal(got, expected(turn))
        assert new or torch.equal(got, expected(now)), f"{where}: neither the old nor the new file"
        now = turn if new else now
        if not new and resume:
            status, text = save(path, [turn], resume=True)
            assert status == 0, text
            assert torch.equal(load(path), expected(turn)), f"{where}: not resumed"
            now = turn
    Commit(path).discard()
    assert os.listdir(tmp_path) == ["x.h5"]
