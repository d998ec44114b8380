"""Ranks are killed at random points of a save: the name holds the old file or the complete new one, every time.

Half of the points are calls of the system, of HDF5 and of MPI, so that every step of a save is met; the others are
moments, which also lie within such calls. One rank is killed, or all at once. What is left is then resumed, or swept by
the next save.
"""

import json
import os
import random
import re
import textwrap

import pytest
import torch
from launch import mpirun
from settings import ALL

from hpcdist import staging
from hpcdist.formats.paths import Commit
from hpcdist.staging import drivers

POINTS = 300 if ALL else 8 if drivers.missing() is None else 6
KINDS = 6  # of turns: the writer, the dim and the number of ranks
ROWS = 1000, 100  # of each rank, by dim

# The ranks save a file; those that are told a call, or a moment, kill themselves there.
PROGRAM = """
    import json, os, signal, sys, time
    import h5py, torch
    import hpcdist as hd
    from hpcdist.validation import collective as agree
    from hpcdist import staging
    from hpcdist.control import objects

    said = json.loads(sys.argv[1])
    calls = 0

    def counted(place, name):
        inner = getattr(place, name)
        def call(*args, **kwargs):
            global calls
            calls += 1
            if calls == said.get("call") and world.rank in said["victims"]:
                os.kill(os.getpid(), signal.SIGKILL)
            return inner(*args, **kwargs)
        setattr(place, name, call)

    with hd.init(device="cpu") as world:
        for place, names in {
            os: ("pwrite", "write", "fsync", "replace", "open", "close", "truncate", "unlink"), h5py: ("File",),
            objects: ("run_on_root", "run_on_all"), agree: ("exchange",),
            h5py.Group: ("create_group", "__getitem__"),
        }.items():
            for name in names:
                counted(place, name)
        for turn in said["turns"]:
            x = torch.arange(said["rows"][turn % 2] * 30).view(-1, 30)
            x += 10_000_000 * world.rank + 1_000_000_000 * turn
            world.comm.Barrier()
            calls, begin = 0, time.monotonic()
            if "moment" in said and world.rank in said["victims"]:
                signal.setitimer(signal.ITIMER_REAL, said["moment"])  # of SIGALRM a process dies, wherever it is
            writer = "posix" if turn % 3 else "auto"
            staging.save(said["path"], x, turn % 2, window=1500, writer=writer, resume=said["resume"])
            signal.setitimer(signal.ITIMER_REAL, 0)
            print(f"turn {turn}, rank {world.rank}: {calls} calls, {time.monotonic() - begin} s ")
"""


def ranks(turn):
    return 2 + turn % KINDS // 3


def save(path, *turns, **said):
    said = {"path": str(path), "turns": turns, "rows": ROWS, "resume": False, **said}
    return mpirun(ranks(turns[0]), "-c", textwrap.dedent(PROGRAM), json.dumps(said))


def expected(turn):
    numbers = torch.arange(ROWS[turn % 2] * 30).view(-1, 30) + 1_000_000_000 * turn
    return torch.cat([numbers + 10_000_000 * rank for rank in range(ranks(turn))], turn % 2)


def load(path):
    with staging.open(path) as file:
        return file.read("data", verify=True)


def calibrated(path, *turns):
    """Of saves that nobody disturbs, by turn: the calls of each rank, and the least seconds that one took."""
    job = save(path, *turns)
    assert job.status == 0, job
    found = re.findall(r"turn (\d), rank (\d): (\d+) calls, (\S+) s ", job.out)
    assert len(found) == len(turns) * ranks(turns[0])
    of = {turn: sorted(each[1:] for each in found if int(each[0]) == turn) for turn in turns}
    return {turn: ([int(calls) for _, calls, _ in of[turn]], min(float(s) for *_, s in of[turn])) for turn in turns}


@pytest.mark.timeout(3000)
@pytest.mark.both
def test_killed_at_random_points(tmp_path):
    draw, path = random.Random(3), tmp_path / "x.h5"
    measured = calibrated(path, 0, 1, 2) | calibrated(path, 3, 4, 5)
    now, killed = KINDS - 1, 0
    for turn in range(KINDS, KINDS + POINTS):
        (calls, seconds), resume = measured[turn % KINDS], draw.randrange(5) == 0
        victims = [*range(ranks(turn))] if draw.randrange(4) == 0 else [draw.randrange(ranks(turn))]
        point = {"victims": victims, "resume": resume}
        if draw.randrange(2):
            point["call"] = draw.randrange(1, calls[victims[0]] + 1)
        else:
            point["moment"] = draw.uniform(0.02, 0.8) * seconds
        job = save(path, turn, **point)
        where = f"turn {turn}: {point} of {calls} calls, {seconds} s: {job.err}"
        assert job.status != 0 or "moment" in point, where
        killed += job.status != 0
        left = sorted({entry.suffix for entry in tmp_path.iterdir()})
        assert left in ([".h5"], [".h5", ".part"]), f"{os.listdir(tmp_path)} {where}"
        assert job.status != 0 or left == [".h5"], f"{os.listdir(tmp_path)} {where}"
        got = load(path)
        new = torch.equal(got, expected(turn))
        assert new or torch.equal(got, expected(now)), f"neither the old nor the new file: {where}"
        assert new or job.status != 0, f"the old file: {where}"
        now = turn if new else now
        if not new and resume:
            job = save(path, turn, resume=True)
            assert job.status == 0, f"{job} after {where}"
            assert torch.equal(load(path), expected(turn)), f"not resumed: {where}"
            now = turn
    Commit(path).discard()
    assert os.listdir(tmp_path) == ["x.h5"]
    assert killed >= POINTS // 3  # every call does; a moment may come too late where the load has fallen meanwhile
