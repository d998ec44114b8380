"""Record the calls of this process for a trace: one row per call in memory, written to a file when the job ends.

While nothing is recorded, this costs nothing: the record of calls is then made of objects that know no rows.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

from hpcdist import activity
from hpcdist.activity import ANYBODY, NOBODY, ThreadRecord

FORMAT = "hpcdist trace 1"
ROWS = 2**16  # rows that are kept, about 20 MB; of more, the oldest are dropped
_PAUSE = 0.02  # seconds between two looks at the files of other ranks


class Clock(NamedTuple):
    """A moment at which this rank's clock was compared with that of rank 0.

    Attributes:
        local: time.perf_counter_ns() of this rank.
        shift: nanoseconds to add to that for the clock of the trace: the epoch's, as rank 0 had it at the start.
        error: nanoseconds by which `shift` may be wrong.
        epoch: time.time_ns() of this rank at `local`.
    """

    local: int
    shift: int
    error: int
    epoch: int


def nbytes_of(x: Any) -> int:
    """Return the bytes of the tensors in nested lists, tuples and dicts; 0 for what does not have any."""
    if isinstance(x, (list, tuple)):
        return sum(map(nbytes_of, x))
    if isinstance(x, dict):
        return sum(map(nbytes_of, x.values()))
    try:
        found = x.nbytes
    except Exception:  # any object of the user's
        return 0
    return found if type(found) is int else 0


class Recording:
    """The rows of this process, and the file for them.

    Args:
        folder: where the file is made, now, so that one that cannot be is an error at the start.
        job: what the ranks of this job share, and no other job.

    Attributes:
        rows: (text, route, team, number, thread, begin, end, nbytes) of each call that has ended.
        groups: the world's ranks of each team in them.
        clocks: one at the start, and one at the end unless the job is ended.
    """

    def __init__(self, folder: str, job: str, rank: int, world_size: int) -> None:
        os.makedirs(folder, exist_ok=True)
        self.path = Path(folder, f"trace-{job}-rank-{rank}.jsonl").absolute()
        self.path.touch(exist_ok=False)
        self.rows: deque[tuple[Any, ...]] = deque(maxlen=ROWS)
        self.groups: dict[int, list[int]] = {0: list(range(world_size))}
        self.clocks: list[Clock] = []
        self._header = {"format": FORMAT, "job": job, "rank": rank, "world_size": world_size}
        self._records: list[_RowRecord] = []
        self._saving = threading.Lock()

    def new_record(self, memory: memoryview, at: int) -> _RowRecord:
        """Make the record of a thread."""
        self._records.append(_RowRecord(memory, at, self))
        return self._records[-1]

    def save(self, finished: bool) -> None:
        """Write the file. A second call writes it anew, unless the first one is still writing.

        Args:
            finished: whether the program ends by itself. Otherwise the calls under way are written, too.

        Raises:
            OSError: if it cannot be written.
        """
        if not self._saving.acquire(blocking=False):
            return
        try:
            self._write(finished)
        finally:
            self._saving.release()

    def _write(self, finished: bool) -> None:
        rows, clocks = list(self.rows), self.clocks
        if not finished:
            rows += [record.row(None) for record in self._records if record.began]
            clocks = [clocks[0], clocks[0]._replace(local=time.perf_counter_ns(), epoch=time.time_ns())]
        calls: dict[tuple[bytes, str], int] = {}
        lines = [self._line(calls, *row) for row in rows]
        header = self._header | {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "program": sys.argv,
            "dropped": max(0, sum(record.count for record in self._records) - len(self.rows)),
            "finished": finished,
            "error_ns": max(clock.error for clock in clocks),
            "clock": [(self._aligned(clock.local), clock.epoch) for clock in clocks],
            "calls": [_named(text, route) for text, route in calls],
            "groups": self.groups,
        }
        part = self.path.with_suffix(".part")
        part.write_text(f"{json.dumps(header)}\n{''.join(lines)}")
        part.replace(self.path)

    def wait_for_others(self, seconds: float) -> None:
        """Wait until the ranks whose files are in this folder have written them, or until that time has passed."""
        end = time.monotonic() + seconds
        files = list(self.path.parent.glob(f"trace-{self._header['job']}-rank-*.jsonl"))
        while any(file.stat().st_size == 0 for file in files) and time.monotonic() < end:
            time.sleep(_PAUSE)

    def _line(
        self,
        calls: dict[tuple[bytes, str], int],
        text: bytes,
        route: str,
        team: int,
        number: int,
        thread: int,
        begin: int,
        end: int | None,
        nbytes: int,
    ) -> str:
        """Format a row; `calls` numbers the texts and routes."""
        call = calls.setdefault((text, route), len(calls))
        peer, last = "null", "null" if end is None else self._aligned(end)
        if number < 0:
            other, number = -1 - number, 0
            ranks = self.groups[team]
            peer = "null" if other == NOBODY else "-1" if other == ANYBODY else str(ranks[other])
        return f"[{call},{team},{number},{peer},{thread},{self._aligned(begin)},{last},{nbytes}]\n"

    def _aligned(self, local: int) -> int:
        """Return a time of this rank's clock by the clock of the trace: its drift is taken to be constant."""
        first, last = self.clocks[0], self.clocks[-1]
        drift = last.shift - first.shift
        return local + first.shift + (drift and drift * (local - first.local) // (last.local - first.local))


def _named(text: bytes, route: str) -> tuple[str, str, str]:
    """Return the name, place and route of a call from its text, such as "concat() at train.py:12"."""
    name, _, site = text.decode(errors="replace").rpartition(" at ") if b" at " in text else (text.decode(), "", "")
    return name.replace("()", ""), site, route


class _RowRecord(ThreadRecord):
    """The record of a thread whose calls become rows.

    Attributes:
        began: when the call under way began, by the clock of this rank; 0 without one.
        count: number of calls that have ended.
    """

    def __init__(self, memory: memoryview, at: int, recording: Recording) -> None:
        super().__init__(memory, at)
        self._recording = recording
        self._call = b"", 0, 0
        self.began = self.count = 0

    def begin(self, team: int, number: int, text: bytes) -> None:
        super().begin(team, number, text)
        self._call = text, team, number
        self.began = time.perf_counter_ns()

    def end(self) -> None:
        if self.began:
            self._add(self.row(time.perf_counter_ns()))
            self.began, self.route = 0, ""
        super().end()

    def row(self, end: int | None) -> tuple[Any, ...]:
        """Return the row of the call under way."""
        text, team, number = self._call
        if team not in self._recording.groups:  # it may have been freed when the file is written
            self._recording.groups[team] = activity.peers.get(team, [])
        route = self.route or getattr(self.tensors, "unrouted", "")
        return text, route, team, number, self.thread, self.began, end, nbytes_of(self.tensors)

    def follow(self, work: Any) -> None:
        row = self.row(None)
        self.began, self.route = 0, ""
        super().follow(work)
        add = self._add
        work.get_future().add_done_callback(lambda _: add((*row[:6], time.perf_counter_ns(), row[7])))

    def _add(self, row: tuple[Any, ...]) -> None:
        self.count += 1
        self._recording.rows.append(row)


current: Recording | None = None


def start(folder: str, job: str, rank: int, world_size: int) -> None:
    """Record calls from the next activity.start() on.

    Raises:
        OSError: if the file cannot be made.
    """
    global current
    current = Recording(folder, job, rank, world_size)
    activity.new_record = current.new_record


def stop() -> None:
    """Record calls no longer."""
    global current
    current = None
    activity.new_record = ThreadRecord
