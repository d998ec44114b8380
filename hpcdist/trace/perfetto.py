"""Write the calls of all ranks, and torch.profiler's traces beside them, as one trace for Perfetto and Chrome."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from hpcdist.errors import FileError
from hpcdist.formats.paths import file_errors
from hpcdist.trace.analysis import Header, Trace


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
