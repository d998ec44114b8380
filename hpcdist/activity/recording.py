"""Record the calls of this process for a trace: one row per call in memory, written to a file when the job ends.

While nothing is traced, a call tests twice whether it is.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from array import array
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hpcdist import activity
from hpcdist.activity import ANYBODY, NOBODY, Row, callsite

if TYPE_CHECKING:
    from mpi4py import MPI

FORMAT = "hpcdist trace 1"
ROWS = 2**16  # rows that are kept, about 20 MB; of more, the oldest are dropped
_PAUSE = 0.02  # seconds between two looks at the files of other ranks
_ROUNDS = 32  # a comparison of clocks; the fastest counts: a rank may have to wait for a core


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


class Recording:
    """The rows of this process, and the file for them.

    Args:
        folder: where the file is made, now, so that one that cannot be is an error at the start.
        job: a name that the ranks of this job share, and no other job has.

    Attributes:
        rows: one for each call that has ended.
        clocks: one at the start, and one at the end unless the job is ended.
    """

    def __init__(self, folder: str, job: str, rank: int, world_size: int) -> None:
        os.makedirs(folder, exist_ok=True)
        self.path = Path(folder, f"trace-{job}-rank-{rank}.jsonl").absolute()
        self.path.touch(exist_ok=False)
        self.rows: deque[Row] = deque(maxlen=ROWS)
        self.clocks: list[Clock] = []
        self._header: dict[str, Any] = {"format": FORMAT, "job": job, "rank": rank, "world_size": world_size}
        self._saving = threading.Lock()

    def compare_clocks(self, comm: MPI.Intracomm) -> None:
        """Compare the clock of this rank with that of rank 0, by messages. Collective over `comm`.

        A reply was sent between the question and its arrival: in the middle, give or take half the round trip. So
        Cristian, "Probabilistic clock synchronization" (1989).
        """
        local, epoch, answer = time.perf_counter_ns(), time.time_ns(), array("q", [0])
        clock = Clock(local, self.clocks[0].shift if self.clocks else epoch - local, 0, epoch)
        if comm.rank == 0:
            for turn in range(_ROUNDS, _ROUNDS * comm.size):
                comm.Recv(answer, turn // _ROUNDS)
                answer[0] = time.perf_counter_ns() + clock.shift
                comm.Send(answer, turn // _ROUNDS)
        else:
            trips = []
            for _ in range(_ROUNDS):
                begin = time.perf_counter_ns()
                comm.Send(answer, 0)
                comm.Recv(answer, 0)
                trip = time.perf_counter_ns() - begin
                middle = begin + trip // 2
                trips.append((trip, middle, answer[0] - middle))
            best, middle, shift = min(trips)
            clock = Clock(middle, shift, best // 2 + 1, epoch + middle - local)
        self.clocks.append(clock)

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
        records = activity.thread_records
        calls = sum(record.begun - (record.begun > record.finished) for record in records)
        if not finished:
            rows += [record.row(None) for record in records if record.call is not None]
            clocks = [clocks[0], clocks[0]._replace(local=time.perf_counter_ns(), epoch=time.time_ns())]
        names: dict[tuple[bytes, str], int] = {}
        lines = [self._line(names, row) for row in rows]
        header = self._header | {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "program": sys.argv,
            "dropped": calls - ROWS if len(self.rows) == ROWS else 0,
            "finished": finished,
            "error_ns": max(clock.error for clock in clocks),
            "clock": [(self._aligned(clock.local), clock.epoch) for clock in clocks],
            "calls": [_named(text, route) for text, route in names],
            "groups": {0: list(range(self._header["world_size"])), **activity.peers},
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

    def _line(self, names: dict[tuple[bytes, str], int], row: Row) -> str:
        """Format a row; `names` numbers the texts and routes."""
        (text, team, number, begin), end, thread, route, nbytes = row
        name = names.setdefault((text, route), len(names))
        peer, last = "null", "null" if end is None else self._aligned(round(end * 1e9))
        if number < 0:
            other, number = -1 - number, 0
            peer = "null" if other == NOBODY else "-1" if other == ANYBODY else str(activity.peers[team][other])
        return f"[{name},{team},{number},{peer},{thread},{self._aligned(round(begin * 1e9))},{last},{nbytes}]\n"

    def _aligned(self, local: int) -> int:
        """Return a time of this rank's clock by the clock of the trace: its drift is taken to be constant."""
        first, last = self.clocks[0], self.clocks[-1]
        drift = last.shift - first.shift
        return local + first.shift + (drift and drift * (local - first.local) // (last.local - first.local))


def _named(text: bytes, route: str) -> tuple[str, str, str]:
    """Return the name, place and route of a call from its text, such as "concat() at train.py:12"."""
    name, site = callsite.parts(text.decode(errors="replace"))
    return name.replace("()", ""), site, route


current: Recording | None = None


def start(folder: str, job: str, rank: int, world_size: int) -> None:
    """Record calls from the next activity.start() on.

    Raises:
        OSError: if the file cannot be made.
    """
    global current
    current = Recording(folder, job, rank, world_size)
    activity.keep = current.rows.append


def stop() -> None:
    """Record calls no longer."""
    global current
    current = activity.keep = None
