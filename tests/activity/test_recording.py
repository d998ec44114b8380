"""What a trace holds: the files that jobs leave, which are read as docs say that they are."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from launch import finished, limit, mpirun

from hpcdist import activity
from hpcdist.activity import InCall, SharedRecord, recording

PROGRAM = Path(__file__).with_name("recorded.py")


class Row(NamedTuple):
    name: str
    site: str
    route: str
    group: int
    number: int
    peer: int | None
    thread: int
    begin: int
    end: int | None
    nbytes: int


class Trace(NamedTuple):
    header: dict[str, Any]
    rows: list[Row]

    def named(self, name):
        return [row for row in self.rows if row.name == name]


def read(path):
    header, *rows = map(json.loads, path.read_text().splitlines())
    return Trace(header, [Row(*header["calls"][call], *rest) for call, *rest in rows])


def traces(folder):
    """By job, in the order in which they began, and rank."""
    found = [read(path) for path in folder.glob("*.jsonl") if path.stat().st_size]
    began = {}
    for trace in found:
        began[trace.header["job"]] = min(trace.rows[0].begin, began.get(trace.header["job"], trace.rows[0].begin))
    return sorted(found, key=lambda trace: (began[trace.header["job"]], trace.header["rank"]))


@pytest.mark.parametrize("np", [1, pytest.param(3, marks=pytest.mark.both)])
def test_each_call_is_a_row_that_all_ranks_find_again(np, tmp_path):
    """Of several worlds in one folder, and of one whose folder is lost, which does not hold up the end."""
    job = finished(np, str(PROGRAM), "worlds", str(tmp_path / "new" / "folder"))
    assert job.err.count("the trace of this rank is not complete") == np, job.err
    every = traces(tmp_path / "new" / "folder")
    assert [trace.header["rank"] for trace in every] == 2 * list(range(np))
    assert len({trace.header["job"] for trace in every}) == 2
    found, others = every[:np], every[np:]
    for rank, trace in enumerate(found):
        header, concat = trace.header, trace.named("concat")
        said = [header[name] for name in ("format", "world_size", "dropped", "finished")]
        assert said == [recording.FORMAT, np, 0, True] and len(header["clock"]) == 2
        assert header["error_ns"] > 0 if rank else header["error_ns"] == 0
        assert [row.nbytes for row in concat[:4]] == [8 * (rank + 1)] * 3 + [400_000]
        assert [row.route for row in concat[:4]] == ["headers"] * 3 + ["mpi"]
        assert [row.number for row in concat[:4]] == [1, 2, 3, 4]
        assert concat[4].group == concat[0].group + 1  # in the background
        assert concat[4].thread != concat[0].thread or np == 1
        assert [(row.nbytes, row.route) for row in trace.named("all_reduce")] == [(40, "mpi"), (40_000, "mpi")]
        (wait,), asynchronous = trace.named("all_reduce.wait") or [None], trace.named("all_reduce")[1]
        assert asynchronous.end - asynchronous.begin < 0.2e9 or wait is not None
        assert len(trace.named("the backward pass of concat")) == 1
        assert all(row.site.rpartition(":")[0].endswith("recorded.py") for row in concat)
        ends = [row.end for row in trace.rows]
        assert ends == sorted(ends, key=lambda end: end or 0)
        assert trace.rows[-1].name == "finalize"
    # One collective is one pair (group, number), on exactly the ranks of the group; its calls overlap on the clock.
    everywhere = {}
    for rank, trace in enumerate(found):
        for row in trace.rows:
            if row.number > 0:
                assert rank not in everywhere.setdefault((row.group, row.number), {})
                everywhere[row.group, row.number][rank] = row
    error = sum(trace.header["error_ns"] for trace in found)
    for (group, _), rows in everywhere.items():
        assert sorted(rows) == found[0].header["groups"].get(str(group), sorted(rows))
        assert len({row.name for row in rows.values()}) == 1
        assert max(row.begin for row in rows.values()) <= min(row.end or 0 for row in rows.values()) + error
    assert any(len(rows) < np for rows in everywhere.values()) == (np > 1)  # the group of even ranks
    if np > 1:
        assert [(row.peer, row.nbytes) for row in found[1].named("send")] == [(0, 28), (0, 24)]
        assert [row.peer for row in found[0].named("recv")] == [1]
        assert [row.peer for row in found[0].named("recv from any rank")] == [-1]
        # A rank that arrives late is seen on the common clock.
        begins = [trace.named("concat")[1].begin for trace in others]
        assert begins[2] - begins[0] > 1.9e9
        assert begins[1] - begins[0] > 0.9e9
    else:  # of too many calls the last are kept
        (trace,) = others
        assert len(trace.rows) == recording.ROWS
        assert trace.header["dropped"] == 100 + 3  # init, the end, finalize
        last = trace.named("concat")[-1]
        assert (last.nbytes, last.number) == (8, recording.ROWS + 100)


@pytest.mark.parametrize("what", ["hang", "error", "dead"])
def test_a_job_that_is_ended_leaves_its_traces(what, tmp_path):
    """In the folder that a variable names."""
    job = mpirun(2, str(PROGRAM), what, cwd=tmp_path, env=limit(3) | {"HPCDIST_TRACE": "here"})
    assert job.status != 0
    assert len(list((tmp_path / "here").glob("*.jsonl"))) == 2
    found = {trace.header["rank"]: trace for trace in traces(tmp_path / "here")}
    if what == "dead" and not found:
        return  # the launcher was faster
    assert set(found) == ({0} if what == "dead" else {0, 1})
    assert not any(trace.header["finished"] for trace in found.values())
    assert [row.end is None for row in found[0].named("concat")] == [False, True]
    assert found[0].named("concat")[1].nbytes == 8
    if what != "dead":
        assert [row.end is None for row in found[1].named("concat")] == [False]


def test_folders_that_are_refused_or_lost(tmp_path):
    """The table of a hang is printed still."""
    (tmp_path / "file").touch()
    job = mpirun(2, str(PROGRAM), "lost in a hang", str(tmp_path / "trace"), cwd=tmp_path, env=limit(3))
    assert job.status != 0 and job.out.count("refused\n") == 2, job
    assert "has waited for" in job.err and "the trace of this rank is not complete" in job.err, job.err


class Work:
    """A handle of torch that is done when told."""

    def __init__(self):
        self.future = torch.futures.Future()

    def get_future(self):
        return self.future

    def is_completed(self):
        return self.future.done()


def test_a_call_that_torch_runs_in_the_background_ends_with_its_work(tmp_path, monkeypatch):
    recording.start(os.fspath(tmp_path), "job", 0, 1)
    activity.start(SharedRecord(1))
    monkeypatch.setattr(activity, "peers", {2: [0]})
    rows = recording.current.rows
    try:
        work = Work()
        own = activity.thread_calls()
        own.record.tensors = [torch.ones(3)]
        own.record.begin(2, 1, b"all_reduce() of gloo at x.py:1")
        own.record.follow(work)
        with InCall("concat", None):
            assert not rows
        with InCall("split", None):
            work.future.set_result(None)
        (first, first_end, *_), (call, end, _, _, nbytes), (last, *_) = rows
        assert [row[0][:6] for row in (first, call, last)] == [b"concat", b"all_re", b"split("]
        assert (call[1:3], nbytes) == ((2, 1), 12)
        assert call[3] < first[3] < first_end < end
    finally:
        recording.stop()
        activity.start(None)


def test_drift_between_the_start_and_the_end_is_divided_evenly(tmp_path):
    """The clock of this rank loses 100 ns of each 1000: in the middle it is half of that behind."""
    made = recording.Recording(os.fspath(tmp_path), "job", 1, 2)
    made.clocks = [recording.Clock(1000, 5000, 7, 40_000), recording.Clock(2000, 5100, 9, 41_000)]
    rows = [
        ((b"concat() at x.py:1", 11, i, begin / 1e9), (begin + 100) / 1e9, 4, "mpi", 8)
        for i, begin in enumerate((1000, 1500), 1)
    ]
    made.rows.extend(rows)
    made.save(finished=True)
    (trace,) = traces(tmp_path)
    assert [(row.begin, row.end) for row in trace.rows] == [(6000, 6110), (6550, 6660)]
    assert trace.header["clock"] == [[6000, 40_000], [7100, 41_000]]
    assert trace.header["error_ns"] == 9
