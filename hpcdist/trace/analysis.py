"""Read the traces of a run's ranks, and compute which ranks wait for which, by their arrivals at each collective."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from hpcdist.activity.recording import FORMAT
from hpcdist.errors import FileError, listed
from hpcdist.formats.paths import file_errors

_COLUMNS = "call group number rank thread begin end payload last waited largest"
_FRAME = {"init", "init_process_group", "finalize"}  # all that is in the trace of a world that init() has replaced
_OPEN = -2  # stands for null, in `end`: the call was under way at the end of the job


@dataclass
class Header:
    """The first line of a rank's file."""

    format: str
    job: str
    rank: int
    world_size: int
    host: str
    pid: int
    program: list[str]
    dropped: int
    finished: bool
    error_ns: int
    clock: list[tuple[int, int]]
    calls: list[tuple[str, str, str]]
    groups: dict[str, list[int]]


@dataclass
class Trace:
    """The calls of all ranks of a run.

    Attributes:
        headers: of the ranks; one that was killed before it could write has none.
        calls: name, place and route of the calls.
        rows: a record per call and rank. `call` is an index into `calls`; `begin` and `end` are ns of rank 0's clock;
            `payload` is what the rank passes, in bytes, and `largest` the most that a rank passes to this call; `last`
            is the rank that arrived last, -1 if that is not known, and `waited` how many ns this rank waited for it: to
            its arrival, or to this rank's own end.
    """

    headers: list[Header]
    calls: list[str]
    rows: Any


def read(folder: Path, job: str = "*") -> Trace:
    """Read the traces of all ranks of a run; `job` names the run if the folder has several.

    Raises:
        FileError: the folder has no run, several, or not all files of one, or a file is damaged.
    """
    files = sorted(folder.glob(f"trace-{job}-rank-*.jsonl"))
    by_job = groupby(files, lambda path: path.name.partition("-")[2].rpartition("-rank-")[0])
    jobs = {job: [*paths] for job, paths in by_job}
    if len(jobs) > 1:
        jobs = {job: paths for job, paths in jobs.items() if any(map(_has_calls, paths))} or jobs
    if len(jobs) > 1:
        raise FileError("HD510", f"{folder}: several runs; choose one by --job: {listed(sorted(jobs, reverse=True))}")
    files = next(iter(jobs.values()), [])
    headers, calls, parts = list[Header](), dict[str, int](), list[Any]()
    for path in tqdm(files, "read", disable=None):
        with file_errors(str(path)):
            head, *lines = path.read_bytes().split(b"\n")[:-1] or [b""]  # the last line may be cut off
            if not head:  # the rank was killed
                continue
            headers.append(header := Header(**json.loads(head)))
            if header.format != FORMAT:
                raise FileError("HD402", f"{path}: is not in {FORMAT!r}; read it with the hpcdist that wrote it")
            table = np.array(json.loads(b"[%b]" % b",".join(lines).replace(b"null", b"%d" % _OPEN)), np.int64)
            call, group, number, _, thread, begin, end, nbytes = table.reshape(len(lines), 8).T
            names = [name + (site and f" at {site}") + (route and f" ({route})") for name, site, route in header.calls]
            call = np.array([calls.setdefault(name, len(calls)) for name in names], int)[call]
            rank, last, waited = (np.full_like(call, value) for value in (header.rank, -1, 0))
            columns = call, group, number, rank, thread, begin, end, nbytes, last, waited, nbytes
            parts.append(np.rec.fromarrays(columns, [(name, "i8") for name in _COLUMNS.split()]))
    if not any(map(len, parts)):
        raise FileError("HD401", f"{folder}: no call was traced; run the program with HPCDIST_TRACE={folder}")
    if len(files) < headers[0].world_size:
        what = f"{len(files)} files of {headers[0].world_size} ranks"
        raise FileError("HD510", f"{folder}: {what}; copy the files of all nodes into one folder")
    trace = Trace(headers, [*calls], np.concatenate(parts).view(np.recarray))
    parts.clear()  # half of the memory
    _judge(trace)
    return trace


def _has_calls(path: Path) -> bool:
    """Whether a rank's file has calls between init() and finalize(), or none since the rank was killed."""
    with file_errors(str(path)), path.open() as file:
        head = file.readline()
        return not head or any(name not in _FRAME for name, *_ in json.loads(head)["calls"])


def _judge(trace: Trace) -> None:
    """Compare the arrivals of the ranks at each collective, whose rows have the same group and number."""
    present, rows = {header.rank for header in trace.headers}, trace.rows
    members = {int(g): present & {*ranks} for header in trace.headers for g, ranks in header.groups.items()}
    now = max(header.clock[-1][0] for header in trace.headers)
    rows.end[rows.end == _OPEN] = now
    order = np.flatnonzero(rows.number > 0)
    order = order[np.lexsort([rows[key][order] for key in ("begin", "number", "group")])]  # call by call, by arrival
    first = np.flatnonzero(np.diff(rows.group[order], prepend=-1) | np.diff(rows.number[order], prepend=-1))
    count = np.diff(first, append=len(order))
    teams = [members.get(group, present) for group in rows.group[order[first]].tolist()]
    whole = count == [*map(len, teams)]
    final, known = np.repeat(order[first + count - 1], count), np.repeat(whole, count)
    rows.last[order] = np.where(known, rows.rank[final], -1)
    until = np.minimum(rows.begin[final], rows.end[order])
    rows.waited[order] = known * np.maximum(until - rows.begin[order], 0)
    rows.largest[order] = np.repeat(np.maximum.reduceat(rows.payload[order], first), count)
    for i in np.flatnonzero(~whole):  # a rank has dropped its row, or had not reached the call at the end of the job
        here = order[first[i] : first[i] + count[i]]
        missing = teams[i] - {*rows.rank[here].tolist()}
        if missing and rows.end[here].max() == now:
            rows.last[here], rows.waited[here] = min(missing), now - rows.begin[here]
