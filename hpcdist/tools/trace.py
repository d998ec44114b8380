"""The command ``python -m hpcdist trace DIR``: merge the traces of a run's ranks, and report. It starts no MPI.

:func:`read` reads the files of the ranks, and computes which ranks wait for which, by their arrivals at each
collective. :func:`merge` writes all calls, and torch.profiler's traces beside them, as one trace for Perfetto and
Chrome.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from hpcdist.activity.recording import FORMAT
from hpcdist.errors import FileError, coded, listed, reason
from hpcdist.formats.paths import file_errors
from hpcdist.process.streams import escape, printing
from hpcdist.runtime.cli import Table, ranks_text, write_page
from hpcdist.runtime.commandline import Parser, path, plural, show_bytes

_CELLS = 64  # rows and columns of the picture; more ranks share them
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
    for file in tqdm(files, "read", disable=None):
        with file_errors(str(file)):
            head, *lines = file.read_bytes().split(b"\n")[:-1] or [b""]  # the last line may be cut off
            if not head:  # the rank was killed
                continue
            headers.append(header := Header(**json.loads(head)))
            if header.format != FORMAT:
                raise FileError("HD402", f"{file}: is not in {FORMAT!r}; read it with the hpcdist that wrote it")
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


def collectives(rows: Any, by: str) -> tuple[Any, Any]:
    """Return the order of the rows of collectives, call by call and within each by that column; and where in it each
    call begins."""
    order = np.flatnonzero(rows.number > 0)
    order = order[np.lexsort([rows[key][order] for key in (by, "number", "group")])]
    return order, np.flatnonzero(np.diff(rows.group[order], prepend=-1) | np.diff(rows.number[order], prepend=-1))


def _judge(trace: Trace) -> None:
    """Compare the arrivals of the ranks at each collective, whose rows have the same group and number."""
    present, rows = {header.rank for header in trace.headers}, trace.rows
    members = {int(g): present & {*ranks} for header in trace.headers for g, ranks in header.groups.items()}
    now = max(header.clock[-1][0] for header in trace.headers)
    rows.end[rows.end == _OPEN] = now
    order, first = collectives(rows, "begin")
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


def merge(folder: Path, trace: Trace) -> list[str]:
    """Write the trace, with the profiles in `folder`; return the files that are no profiles of this run.

    The trace has a process for each rank. The calls of each thread have a track of their own there.
    """
    target, left_out = folder / "perfetto.json.gz", list[str]()
    origin = int(trace.rows.begin.min())
    with gzip.open(target, "wt", compresslevel=1) as file:
        file.write('{"traceEvents":[{"ph":"M","pid":0,"name":"process_sort_index","args":{"sort_index":0}}')
        for header in tqdm(trace.headers, "write", disable=None):
            file.writelines(_calls(header, trace, origin))
        found = {*folder.glob("*.json"), *folder.glob("*.json.gz"), *folder.rglob("*.pt.trace.json*")}
        for path in sorted(found - {target}):
            try:
                with file_errors(path.name):
                    events = _profiled(path, trace.headers, origin)
                file.writelines(f",\n{json.dumps(event)}" for event in events)
            except FileError as error:
                left_out.append(str(error))
        file.write("]}")
    return left_out


def _calls(header: Header, trace: Trace, origin: int) -> Iterator[str]:
    """Yield the events of a rank's calls; times are in us."""
    rank, name = header.rank, json.dumps(f"rank {header.rank} on {header.host}")
    yield f',\n{{"ph":"M","pid":{rank},"name":"process_name","args":{{"name":{name}}}}}'
    yield f',\n{{"ph":"M","pid":{rank},"name":"process_sort_index","args":{{"sort_index":{rank}}}}}'
    names, rows = [*map(json.dumps, trace.calls)], trace.rows[trace.rows.rank == rank]
    times = (rows.begin - origin) / 1e3, (rows.end - rows.begin) / 1e3, rows.waited / 1e3
    columns = *times, rows.call, rows.thread, rows.payload, rows.last
    for begin, took, waited, call, thread, nbytes, last in zip(*(c.tolist() for c in columns), strict=True):
        yield (
            f',\n{{"ph":"X","pid":{rank},"tid":"calls of thread {thread}","ts":{begin:.3f},"dur":{took:.3f},'
            f'"name":{names[call]},"args":{{"bytes":{nbytes},"waited (us)":{waited:.3f},"last rank":{last}}}}}'
        )


def _profiled(path: Path, headers: list[Header], origin: int) -> list[dict[str, Any]]:
    """Return the events of a file of torch.profiler's, in the process of their rank, by the clock of rank 0."""
    text = path.read_bytes()
    profile = json.loads(gzip.decompress(text) if path.suffix == ".gz" else text)
    events, base = profile["traceEvents"], profile["baseTimeNanoseconds"]
    pids = {event.get("pid") for event in events}
    of = [header for header in headers if header.pid in pids and header.host == profile["host_name"]]
    if not of:
        raise FileError("HD402", f"{path.name}: is not a profile of this run")
    here, ahead = np.array([(local - base, time - local) for time, local in of[0].clock]).T / 1e3
    for event in events:
        event["ts"] += (base - origin) / 1e3 + float(np.interp(event["ts"], here, ahead))
        event["pid"] = of[0].rank if event["pid"] == of[0].pid else f"rank {of[0].rank}: {event['pid']}"
        if "id" in event:  # of an arrow, which must not end at another rank
            event["id"] = f"{path.name}.{event['id']}"
    return [event for event in events if event["name"] not in ("process_name", "process_sort_index")]


def main(words: list[str]) -> None:
    """Print the report, and write it as a page, and the merged trace."""
    p = parser()
    args = p.parse_args(words)
    folder = Path(args.folder)
    try:
        trace = read(folder, args.job)
        left_out = merge(folder, trace)
        text = report(trace, folder / "report.html")
    except FileError as error:
        p.error(str(error))
    except OSError as error:
        p.error(coded("HD410", f"{folder}: cannot be written: {reason(error)}"))
    print("\n".join([text, "", *left_out, f"written: {folder}/report.html, {folder}/perfetto.json.gz"]))


def parser() -> Parser:
    """Return the parser of python -m hpcdist.tools.trace. It runs on login nodes, and does not ask MPI for the rank."""
    p = Parser(
        prog="hpcdist trace",
        description="Report which rank the others waited for, in a run with HPCDIST_TRACE=DIR. Write the same with "
        "pictures to DIR/report.html, and all calls to DIR/perfetto.json.gz, for ui.perfetto.dev and chrome://tracing, "
        "with the profiles of torch.profiler that are in DIR.",
        epilog="example: python -m hpcdist trace traces",
        prints=lambda: True,
    )
    p.add_argument("folder", type=path, metavar="DIR", help="folder with the traces of all ranks")
    p.add_argument("--job", default="*", metavar="NAME", help="run to report, if DIR has several")
    return p


def report(trace: Trace, page: Path) -> str:
    """Write a page in HTML that needs no other file; return the same for a terminal, without pictures."""
    world, kinds, present, rows = trace.headers[0].world_size, len(trace.calls), len(trace.headers), trace.rows
    of_rank = partial(np.bincount, rows.rank, minlength=world)
    of_call = partial(np.bincount, rows.call, minlength=kinds)
    took, waited, last = (rows.end - rows.begin) / 1e9, rows.waited / 1e9, np.maximum(rows.last, 0)  # -1: no waits
    caused = np.bincount(last * world + rows.rank, waited, world**2).reshape(world, world)
    waits = np.bincount(rows.call * world + last, waited, kinds * world).reshape(kinds, world)
    slowest, final = waits.argmax(1), rows.last == rows.rank
    share = of_call(final & (rows.rank == slowest[rows.call])) / np.maximum(of_call(final), 1)
    bounds = np.where(rows.payload, 2.0 ** np.frexp(np.maximum(rows.payload - 1, 0))[1], 0)
    up_to, count = np.unique(bounds, return_counts=True)
    by_rank = {
        "rank": range(world),
        "others wait (s)": caused.sum(1),
        "it waits (s)": caused.sum(0),
        "in calls (s)": of_rank(took),
        "data": map(show_bytes, of_rank(rows.payload)),
    }
    by_call = {
        "call": trace.calls,
        "calls": of_call(),
        "s per rank": of_call(took) / present,
        "of it waiting": waits.sum(1) / present,
        "last to arrive": (f"rank {r} in {part:.0%}" if part else "-" for r, part in zip(slowest, share, strict=True)),
        "mean size": map(show_bytes, of_call(rows.payload) / np.maximum(of_call(), 1)),
        "skew": of_call(rows.largest) / np.maximum(of_call(rows.payload), 1),
    }
    tables = [
        Table("Time that others waited for each rank", caused.sum(1), by_rank),
        Table("Time in each call", of_call(took), by_call),
        Table(
            "Data that a rank passes to a call", count, {"up to": map(show_bytes, up_to), "calls": count}, largest=False
        ),
    ]
    lines = _lines(trace, caused.sum(1), waits)
    step = -(-world // _CELLS)
    cells = np.add.reduceat(np.add.reduceat(caused, range(0, world, step), 0), range(0, world, step), 1)
    return write_page(page, lines, tables, "squares.html.j2", cells=cells, step=step, world=world)


def _lines(trace: Trace, caused: Any, waits: Any) -> list[str]:
    """Return sentences: the run, the rank for which the others waited most, and the gaps in the trace."""
    headers, one, hosts = trace.headers, trace.headers[0], {header.host for header in trace.headers}
    span = (trace.rows.end.max() - trace.rows.begin.min()) / 1e9
    error = max(header.error_ns for header in headers) / 1e3
    lines = [
        f"{' '.join(one.program)}: {plural(one.world_size, 'rank')} on {plural(len(hosts), 'node')}, {span:.3f} s, "
        f"run {one.job}; clocks agree within {error:.1f} us"
    ]
    worst = int(caused.argmax())
    site = int(waits[:, worst].argmax())
    if caused[worst]:
        lines.append(
            f"The others wait most for rank {worst}: {caused[worst]:.3f} of {caused.sum():.3f} s of waiting, "
            f"{waits[site, worst]:.3f} s of it in {trace.calls[site]}"
        )
    lacks = {
        "killed before it could write": {*range(one.world_size)} - {header.rank for header in headers},
        "the oldest calls were dropped": {header.rank for header in headers if header.dropped},
        "ended early, see the job's message": {header.rank for header in headers if not header.finished},
    }
    return lines + [f"{ranks_text(ranks)}: {what}" for what, ranks in lacks.items() if ranks]


if __name__ == "__main__":
    escape()  # names of files and hosts
    with printing("hpcdist trace"):
        main(sys.argv[1:])
