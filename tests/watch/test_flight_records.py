"""What torch's own analyser, torchfrtrace, finds in the records that are written at a deadline."""

import io
import logging
import pickle
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch._C._distributed_c10d as c10d
from launch import limit, mpirun
from torch.distributed.flight_recorder import fr_trace
from torch.distributed.flight_recorder.components import fr_logger

from hpcdist.activity import ANYBODY, NOBODY, Entry, ThreadStatus
from hpcdist.watch import flight_records
from hpcdist.watch.hang_table import Report

pytestmark = pytest.mark.once

WORLD, EVEN = 11, 12
PEERS = {WORLD: [0, 1, 2], EVEN: [0, 2]}


def analysed(folder):
    """What torchfrtrace prints of a folder; it raises where it cannot read one."""
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    logger = fr_logger.FlightRecorderLogger().logger
    logger.addHandler(handler)
    try:
        fr_trace.main([str(folder)])
    finally:
        logger.removeHandler(handler)
    return said.getvalue()


def call(number, text="all_reduce() at train.py:7", team=WORLD):
    return Entry(1000.5, team, number, text)


def busy(entry, tensors="", last=None):
    return ThreadStatus(1, entry, last, 0.0, 5.0, tensors)


def idle(last):
    return ThreadStatus(1, None, last, 0.0)


@pytest.fixture
def analyse(tmp_path):
    def run(*threads):
        each = [one if isinstance(one, Sequence) else [one] for one in threads]
        reports = {rank: Report(rank, "node", 1, list(own)) for rank, own in enumerate(each)}
        folder = flight_records.write(str(tmp_path), reports, lambda team: PEERS.get(team, ()))
        assert sorted(path.name for path in (folder / "calls").iterdir()) == ["rank_0", "rank_1", "rank_2"]
        return analysed(folder / "calls")

    return run


def test_a_rank_that_is_missing(analyse):
    said = analyse(busy(call(5)), idle(call(4, "barrier() at train.py:3")), busy(call(5)))
    assert "Not all ranks joining collective, sequence number: 5" in said
    assert "missing ranks: {1}" in said
    assert "all_reduce() at train.py:7" in said
    assert said.count("sequence number") == 1
    # and one whose calls are not known
    assert "missing ranks: {1}" in analyse(busy(call(5)), [], busy(call(5)))


@pytest.mark.parametrize(
    ("mine", "odd", "error"),
    [
        ("all_reduce() at x.py:1", "barrier() at x.py:2", "COLLECTIVE_TYPE"),
        ("save() at x.py:1", "load() at x.py:2", "COLLECTIVE_TYPE"),
        ("8 x torch.float32", "9 x torch.float32", "SIZE_OR_SYNTAX"),
        ("8 x torch.float32", "8 x torch.float64", "COLLECTIVE_DTYPE"),
    ],
)
def test_calls_of_one_number_that_differ(mine, odd, error, analyse):
    said = analyse(*[busy(call(5), x) if " x " in x else busy(call(5, x)) for x in (mine, odd, mine)])
    assert "Collective sequence number: 5 has errors" in said
    assert f"Error type: {error}_MISMATCH" in said  # whose fault it is depends on the file that it reads first


@pytest.mark.parametrize("verb", [*flight_records.TYPES, "save", "the backward pass of concat"])
def test_a_call_that_all_ranks_have_reached_has_no_errors(verb, analyse):
    sizes = ["8 x torch.float32, 3 x torch.int64"] * 3 if verb == "concat" else ["8 x torch.float32"] * 3
    said = analyse(*[busy(call(5, f"{verb}() at train.py:7"), size) for size in sizes])
    assert "errors" not in said
    assert "missing" not in said


def test_ranks_that_have_passed_a_call_are_not_missing(analyse):
    """Rank 0 is two calls ahead of rank 1 (a broadcast from it), and rank 2 waits in another group."""
    sub = busy(call(3, "concat() at x.py:4", EVEN))
    said = analyse(busy(call(7)), busy(call(5, "broadcast() at x.py:2")), [sub, idle(call(5, "broadcast() at x.py:2"))])
    assert re.search(r"sequence number: 7\n(?s:.*?)missing ranks: {1, 2}", said)
    assert re.search(r"sequence number: 3\n(?s:.*?)missing ranks: {0}", said)
    assert re.search(r"sequence number: 5 has errors\n(?s:.*?)COLLECTIVE_STATE_MISMATCH", said)


def test_a_collective_that_was_issued_to_a_gpu(analyse):
    issued = [idle(call(number, "all_reduce() issued to nccl at train.py:7")) for number in (8, 7, 8)]
    assert "missing ranks: {1}" in analyse(*issued)


def test_messages(analyse):
    def message(peer, text):
        return busy(call(-1 - peer, text))

    said = analyse(message(2, "recv() at x.py:1"), [], idle(call(4)))
    assert "missing ranks: {2}" in said
    assert "expected ranks: {0, 2}" in said
    assert "missing" not in analyse(message(2, "recv() at x.py:1"), [], message(0, "send() at x.py:2"))
    waits = [
        message(ANYBODY, "recv() at x.py:1"),
        message(NOBODY, "all_reduce().wait() at x.py:1"),
        busy(call(0, "init")),
    ]
    assert "missing" not in analyse(*waits)


PROGRAM = """
import os, time, torch
import torch.distributed as dist
import hpcdist as hd
world = hd.init()
if world.world_size == 2:
    dist.all_reduce(torch.ones(2), group=dist.new_group(backend="gloo"))
hd.concat(torch.ones(world.rank + 1))
one = dist.new_group([1, 2]) if world.world_size == 3 else None
if world.rank == 1:
    time.sleep(1000)
if world.rank == 2:
    dist.barrier(group=one)
dist.all_reduce(torch.ones(4))
"""


def hang(np, tmp_path, **env):
    """The folders that the message names, and the whole message."""
    job = mpirun(np, "-c", PROGRAM, cwd=tmp_path, env={"TMPDIR": str(tmp_path), **limit(3), **env})
    assert job.status != 0
    assert "HD601" in job.err, job.err
    return [Path(name) for name in dict.fromkeys(re.findall(r"flight records: torchfrtrace (\S+)", job.err))], job.err


def test_a_job_that_hangs_names_its_records(tmp_path):
    """In the folder of traces. The rank that writes is not in a group in which another one hangs."""
    (folder,), _ = hang(3, tmp_path, HPCDIST_TRACE="traces")
    assert folder.parent.parent == tmp_path / "traces"
    assert len(list((tmp_path / "traces").glob("trace-*.jsonl"))) == 3
    said = analysed(folder)
    assert re.search(r"all_reduce as all_reduce\(\)\nmissing ranks: {1, 2}", said), said
    assert re.search(r"barrier as barrier\(\)\nmissing ranks: {1}", said), said
    assert "input sizes: [[4]]" in said
    assert re.search(r"all_reduce\(\) at <string>:\d+", said)


def test_in_a_folder_of_the_users_with_what_torch_has_recorded_itself(tmp_path):
    folders, err = hang(2, tmp_path)
    assert folders[0].parent.parent == tmp_path
    assert folders[0].parent.stat().st_mode & 0o077 == 0
    assert "missing ranks: {1}" in analysed(folders[0])
    if hasattr(c10d, "_dump_fr_trace"):  # torch has a recorder for gloo
        assert [folder.name for folder in folders][:2] == ["calls", "torch"], err
        dumps = [pickle.loads((folders[1] / f"rank_{rank}").read_bytes()) for rank in (0, 1)]
        assert all(dump["entries"][0]["profiling_name"] == "gloo:all_reduce" for dump in dumps)
