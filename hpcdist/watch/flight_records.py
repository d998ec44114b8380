"""Write the calls that are under way at a deadline as torch's flight recorder does, for its analyser, ``torchfrtrace``.

One file per rank. The rank that has asked all others writes those of all, so that a rank that is dead has one, too.
"""

from __future__ import annotations

import pickle
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcdist import torch_names
from hpcdist.activity import ANYBODY, NOBODY, Entry, ThreadStatus, callsite
from hpcdist.watch.hang_table import ISSUED, Report

VERSION = "2.10"  # of the format that the analyser of torch 2.13 reads
# The analyser knows torch's operations alone, and compares the sizes of some, which are ragged in ours, or not known.
TYPES = {
    "all_reduce": "all_reduce",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "split": "scatter",
    "concat": "_all_gather_base",
    "all_gather": "_all_gather_base",
    "all_gather_single": "_all_gather_base",
    "reduce_scatter": "REDUCE_SCATTER_coalesced",
    "reduce_scatter_single": "REDUCE_SCATTER_coalesced",
    "all_to_all": "all_to_all",
    "all_to_all_single": "all_to_all",
    "redistribute": "all_to_all",
    "barrier": "barrier",
}
_STAND_INS = ("barrier", "all_reduce_barrier", "_broadcast_oop", "_reduce_oop")  # for other calls
_SIZED = ("all_reduce", "broadcast", "reduce")  # whose tensors have one size on all ranks
_DTYPES = {"float32": "Float", "float64": "Double", "int64": "Long", "int32": "Int", "float16": "Half"}

Group = tuple[int, ...]


def records(reports: Mapping[int, Report], peers_of: Callable[[int], Sequence[int]]) -> dict[int, dict[str, Any]]:
    """Return the record of each rank: of each call that a rank is in, its state on every rank of the team.

    Args:
        peers_of: returns the world's ranks of a team; none of one that is not known.
    """
    calls: dict[tuple[str, Group, int], dict[int, tuple[Entry, str, str]]] = {}
    for rank, report in reports.items():
        for thread in report.threads:
            for entry, state in _unfinished(thread):
                name, ranks, number = _place(entry, rank, thread.peers or peers_of(entry.team))
                if len(ranks) > 1:
                    calls.setdefault((name, ranks, number), {})[rank] = entry, state, thread.tensors
    entries: dict[int, list[dict[str, Any]]] = {rank: [] for rank in reports}
    for (name, ranks, number), found in calls.items():
        some = next(iter(found.values()))[0]
        for rank in ranks:
            if rank in reports and rank not in found and _highest(reports[rank], some.team) >= number > 0:
                found[rank] = some, "completed", ""
        types = _types(_verb(entry) for entry, _, _ in found.values())
        sizes = next((tensors for _, _, tensors in found.values() if tensors), "")
        for rank, (entry, state, tensors) in found.items():
            kind = _message(entry, ranks.index(rank)) if number == 0 else types[_verb(entry)]
            entries[rank].append(_record(entry, state, kind, (name, number), tensors or sizes))
    groups = {name: {"name": name, "desc": "hpcdist", "ranks": str(list(ranks))} for name, ranks, _ in calls}
    return {rank: {"version": VERSION, "pg_config": groups, "entries": own} for rank, own in entries.items()}


def _unfinished(thread: ThreadStatus) -> Iterator[tuple[Entry, str]]:
    """The calls of a thread that others may depend on, with the state that torch would give."""
    if thread.call is not None and thread.call.number not in (0, -1 - ANYBODY, -1 - NOBODY):
        yield thread.call, "started"
    if thread.last is not None and ISSUED in thread.last.text and thread.last.number > 0:
        yield thread.last, "scheduled"


def _place(entry: Entry, rank: int, peers: Sequence[int]) -> tuple[str, Group, int]:
    """(name of the group, its ranks, number) of a call. A message is one of a group of two ranks, number 0."""
    if entry.number > 0 or not peers:
        return str(entry.team), tuple(peers), entry.number
    ranks = tuple(sorted({rank, peers[-1 - entry.number]}))
    return f"{entry.team} messages {ranks}", ranks, 0


def _highest(report: Report, team: int) -> int:
    """Return the highest number of a call of a team that a rank has reached."""
    entries = [entry for thread in report.threads for entry in (thread.call, thread.last) if entry is not None]
    return max((entry.number for entry in entries if entry.team == team), default=0)


def _verb(entry: Entry) -> str:
    return callsite.parts(entry.text)[0].partition("(")[0]


def _types(verbs: Iterator[str]) -> dict[str, str]:
    """Return a type that the analyser knows for each verb, others for different ones."""
    found: dict[str, str] = {}
    for verb in sorted(set(verbs)):
        kinds = [TYPES.get(verb, _STAND_INS[0]), *_STAND_INS]
        found[verb] = next((kind for kind in kinds if kind not in found.values()), kinds[0])
    return found


def _message(entry: Entry, own: int) -> str:
    return f"send {own}->{1 - own}" if "send" in _verb(entry) else f"recv {own}<-{1 - own}"


def _record(entry: Entry, state: str, kind: str, place: tuple[str, int], tensors: str) -> dict[str, Any]:
    name, number = place
    what, site = callsite.parts(entry.text)
    file, _, line = site.rpartition(":")
    size = re.fullmatch(r"(\d+) x torch\.(\w+)", tensors) if kind in _SIZED else None
    sizes, dtypes = ([[int(size[1])]], [_DTYPES.get(size[2], size[2])]) if size else ([[]], [])
    library, shown = "nccl" if ISSUED in entry.text else "gloo", kind if number == 0 else f"{kind} as {what}"
    return {
        "record_id": 0,  # the analyser leaves out what comes before the first one of any rank
        "pg_id": 0,
        "process_group": (name, "hpcdist"),
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": f"{library}:{shown}",  # the libraries that the analyser accepts
        "time_created_ns": int(entry.since * 1e9),
        "input_sizes": sizes,
        "input_dtypes": dtypes,
        "output_sizes": sizes,
        "output_dtypes": dtypes,
        "state": state,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": state == "completed",
        "timeout_ms": 0,
        "is_p2p": number == 0,
        "frames": [{"name": what, "filename": file, "line": int(line) if line.isdigit() else 0}],
    }


def write(folder: str | None, reports: Mapping[int, Report], peers_of: Callable[[int], Sequence[int]]) -> Path:
    """Write the records of all ranks, and return the folder with ``calls/rank_0``, ``calls/rank_1``, ...

    Args:
        folder: where to make that folder; None for that of temporary files.

    Raises:
        OSError: if they cannot be written.
    """
    made = Path(tempfile.mkdtemp(prefix="hpcdist-flight-", dir=folder))
    (made / "calls").mkdir()
    for rank, record in records(reports, peers_of).items():
        (made / "calls" / f"rank_{rank}").write_bytes(pickle.dumps(record))
    return made


def write_own(folder: Path, rank: int) -> None:
    """Write the records of torch's own flight recorders in this process, if any, to ``torch/rank_N``.

    Raises:
        OSError: if they cannot be written.
    """
    for own, record in torch_names.flight_records():
        (folder / own).mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / own / f"rank_{rank}").write_bytes(record)
