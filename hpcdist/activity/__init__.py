"""Record the calls of each rank in memory that all ranks of its node read: a few bytes a call, and no message."""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

from hpcdist.activity import callsite
from hpcdist.activity.procstat import started

RUNNING, FINALIZED, ENDING = 0, 1, 2  # states of a process; the last one ends the job on purpose
ANYBODY, NOBODY = 2**31, 2**31 + 1  # they stand in the place of a rank

_EPOCH = time.time() - time.perf_counter()  # times in memory are of the latter clock, which never jumps
_HEAD = struct.Struct("<qqq")  # a rank's: pid, when the system started that process, its state
_RECORD = struct.Struct("<qqdq")  # a thread's: calls begun, calls finished, when the last one finished, thread ID
_COUNT, _LAST = struct.Struct("<q"), struct.Struct("<qd")  # the first field of that; the second and third
_ENTRY = struct.Struct("<dqqH")  # a call's: when it began, the team, its number there, the text's length
_TEXT = callsite.LONGEST
_now = time.perf_counter
_THREADS = 64  # threads of a rank whose calls the other ranks see; those of more threads only have deadlines
_RECORD_SIZE = _RECORD.size + 2 * (_ENTRY.size + _TEXT)
_SLOT_SIZE = 2**16  # bytes per rank


# Text, team, number and beginning of a call; its end, thread, route and nbytes. Times are of time.perf_counter().
Row = tuple[Any, float | None, int, str, int]


class CallEntry(NamedTuple):
    """A call: when it began (seconds of the epoch), its team, its number there, and its name and place."""

    since: float
    team: int
    number: int
    text: str

    def same(self, other: CallEntry) -> bool:
        """Whether these are one call: of the same team, by the same number."""
        return (self.team, self.number) == (other.team, other.number)


@dataclass
class ThreadStatus:
    """The calls of a thread of a rank.

    Attributes:
        thread: ID that the system has given the thread.
        call: call that is under way, if any.
        last: call that finished last, if any.
        ended: time at which `last` finished (seconds of the epoch).
        waited: seconds without progress in `call`, where its own rank has reported them.
        tensors: number of elements and dtype of the tensors of `call`, where its own rank has reported them.
        peers: the world's ranks of the team of `call`, where its own rank has reported them.
    """

    thread: int
    call: CallEntry | None
    last: CallEntry | None
    ended: float
    waited: float = inf
    tensors: str = ""
    peers: list[int] = field(default_factory=list)


class Process(NamedTuple):
    """A rank's process as its record shows it."""

    pid: int
    started: int
    state: int
    threads: list[ThreadStatus]


def nbytes_of(x: Any) -> int:
    """Return the bytes of the tensors in nested lists, tuples and dicts; 0 for an object without tensors."""
    try:
        nbytes = getattr(x, "nbytes", None)
    except Exception:  # any object of the user's
        nbytes = None
    if type(nbytes) is int:
        return nbytes
    return sum(map(nbytes_of, x.values() if isinstance(x, dict) else x if isinstance(x, (list, tuple)) else ()))


class ThreadRecord:
    """The record that one thread writes: its calls, one after the other.

    Attributes:
        thread: ID that the system has given the thread; 0 before its first call.
        begun, finished: numbers of calls.
        touched: number of times that calls have made progress.
        patient: whether the call under way has no deadline.
        limit: its deadline in seconds, if it has one of its own.
        waited: seconds for which the call under way has made no progress.
        work: torch's handle of the call under way, if torch runs it in the background: it ends with that.
        tensors: those of the call under way, among nested lists and other arguments.
        route: name of the route that the call under way has taken, where it has told.
        keep: what takes the Row of each call that ends, where calls are traced.
        call: text, team, number and beginning of the call under way, where calls are traced.
    """

    def __init__(self, memory: memoryview, at: int) -> None:
        self._memory = memory
        self._at = at
        self._entries = (at + _RECORD.size, at + _RECORD.size + _ENTRY.size + _TEXT)
        self._texts = [b"", b""]  # the texts in the two entries
        self.thread = self.begun = self.finished = self.touched = 0
        self.patient = False
        self.limit: float | None = None
        self.waited = 0.0
        self.work: Any = None
        self.tensors: Any = None
        self.route = ""
        self.keep = keep
        self.call: Any = None
        self._settling = threading.Lock()
        self._seen = (0, 0)  # begun and touched at the latest wait()

    def begin(self, team: int, number: int, text: bytes) -> None:
        if self.work is not None:
            with self._settling:
                self.work = None
        self.begun = begun = self.begun + 1
        parity = begun & 1
        at = self._entries[parity]
        since = _now()
        _ENTRY.pack_into(self._memory, at, since, team, number, len(text))
        if self._texts[parity] is not text:  # a program repeats its calls
            self._texts[parity] = text
            at += _ENTRY.size
            self._memory[at : at + len(text)] = text
        _COUNT.pack_into(self._memory, self._at, begun)
        if self.keep is not None:
            self.call = text, team, number, since

    def take(self) -> None:
        """Make it the record of this thread."""
        self.thread = threading.get_native_id()
        _COUNT.pack_into(self._memory, self._at + _RECORD.size - _COUNT.size, self.thread)

    def current(self) -> CallEntry | None:
        """Return the call under way, if any."""
        return _status(self._memory, self._at).call

    def wait(self, seconds: float) -> None:
        """Count time that has passed; called by the watching thread alone."""
        seen, self._seen = self._seen, (self.begun, self.touched)
        busy = self.begun > self.finished and not self.patient
        self.waited = self.waited + seconds if seen == self._seen and busy else 0.0

    def follow(self, work: Any) -> None:
        """Let the call under way end with torch's handle of it."""
        self.work = work
        if (keep := self.keep) is not None:
            row = self.row(None)
            self.call = None
            work.get_future().add_done_callback(lambda _: keep((row[0], _now(), *row[2:])))

    def settle(self) -> None:
        """End the call under way if its `work` is done, and let that go; called by the watching thread alone."""
        with self._settling:
            if self.work is not None and self.work.is_completed():
                self.work = None
                self.end()

    def row(self, ended: float | None) -> Row:
        """Return the row of the call under way."""
        x = self.tensors
        if type(x) is list and len(x) == 1:  # most calls of torch are so
            x = x[0]
        return self.call, ended, self.thread, self.route, 0 if x is None else nbytes_of(x)

    def end(self) -> None:
        ended = _now()
        if self.call is not None and self.keep is not None:
            self.keep(self.row(ended))
            self.call = None
        self.tensors = None
        self.finished = self.begun
        _LAST.pack_into(self._memory, self._at + _COUNT.size, self.begun, ended)


class SharedRecord:
    """The records of the ranks of a node, in anonymous memory: it ends with the last process that has its `fd` open."""

    def __init__(self, ranks: int, fd: int | None = None) -> None:
        self.fd = os.memfd_create("hpcdist", os.MFD_CLOEXEC) if fd is None else fd
        os.ftruncate(self.fd, _SLOT_SIZE * ranks)
        self._memory = memoryview(mmap.mmap(self.fd, _SLOT_SIZE * ranks))

    def announce(self, local_rank: int, state: int) -> None:
        """Write the identity and state of this process."""
        _HEAD.pack_into(self._memory, local_rank * _SLOT_SIZE, os.getpid(), started(os.getpid()), state)

    def thread_records(self, local_rank: int) -> list[ThreadRecord]:
        """Return the records that this process writes."""
        first = local_rank * _SLOT_SIZE + _HEAD.size
        return [ThreadRecord(self._memory, first + i * _RECORD_SIZE) for i in range(_THREADS)]

    def read(self, local_rank: int) -> Process:
        """Return the record of a rank of this node. If the rank is writing a text, the text may be torn."""
        at = local_rank * _SLOT_SIZE
        pid, since, state = _HEAD.unpack_from(self._memory, at)
        first = at + _HEAD.size
        threads = [_status(self._memory, first + i * _RECORD_SIZE) for i in range(_THREADS)]
        return Process(pid, since, state, [thread for thread in threads if thread.thread])

    def close(self) -> None:
        os.close(self.fd)


def _status(memory: memoryview, at: int) -> ThreadStatus:
    begun, finished, ended, thread = _RECORD.unpack_from(memory, at)
    call = _entry(memory, at, begun) if begun > finished else None
    return ThreadStatus(thread, call, _entry(memory, at, finished) if finished else None, _EPOCH + ended)


def _entry(memory: memoryview, at: int, count: int) -> CallEntry:
    at += _RECORD.size + (count & 1) * (_ENTRY.size + _TEXT)
    since, team, number, length = _ENTRY.unpack_from(memory, at)
    at += _ENTRY.size
    return CallEntry(_EPOCH + since, team, number, bytes(memory[at : at + min(length, _TEXT)]).decode(errors="replace"))


shortest = inf  # seconds of the shortest deadline of any call's own
peers: dict[int, list[int]] = {}  # the world's ranks of each team's number seen in this process
thread_records: list[ThreadRecord] = []  # this process's; empty where nothing is watched
_free: list[ThreadRecord] = []  # records of threads that have ended, then unused ones
keep: Callable[[Row], object] | None = None  # records that are made from now on have it
lone_limit: float | None = None  # seconds: the deadline of calls, where this process is the only rank
wake: Callable[[], None] | None = None  # has the watching thread look at the calls now
_refusal: Callable[[], Exception] | None = None  # makes the error that calls raise in this process
_local = threading.local()


def expect_limit(seconds: float) -> None:
    """Have the watching thread look often enough for calls with this deadline of their own."""
    global shortest
    if seconds < shortest:
        shortest = seconds
        if wake is not None:
            wake()


def forget(number: int) -> None:
    """Forget the ranks of a team that is freed, unless its calls are in a trace."""
    if keep is None:
        peers.pop(number, None)


def start(record: SharedRecord | None, local_rank: int = 0) -> None:
    """Record the calls of this process from now on, or, if `record` is None, no longer."""
    global thread_records, _free, _local
    thread_records = [] if record is None else record.thread_records(local_rank)
    _free = list(thread_records)
    _local = threading.local()


def refuse(error: Callable[[], Exception] | None) -> None:
    """Record no calls from now on; if `error` is given, calls raise the error that it returns."""
    global _refusal
    start(None)
    _refusal = error


class _ThreadCalls:
    """The record of a thread, and the depth of its calls within calls, of which only the outermost is recorded.

    It is deleted with its thread, of whatever kind (torch's threads of the backward pass are not Python's), and the
    record serves another thread then.
    """

    __slots__ = ("_free", "depth", "record")

    def __init__(self, record: ThreadRecord, free: list[ThreadRecord]) -> None:
        self.record = record
        self.depth = 0
        self._free = free

    def __del__(self) -> None:
        self._free.insert(0, self.record)


def thread_calls() -> _ThreadCalls | None:
    """Return the record of this thread; None where nothing is watched."""
    return getattr(_local, "own", None) or _own()


def _own() -> _ThreadCalls | None:
    """Give this thread, which has no record yet, one that no other thread has."""
    if _refusal is not None:
        raise _refusal()
    if not thread_records:
        return None
    free = _free
    try:
        record = free.pop(0)  # atomic: several threads may begin at once
    except IndexError:
        record = ThreadRecord(memoryview(bytearray(_RECORD_SIZE)), 0)
        thread_records.append(record)
    record.take()
    own = _local.own = _ThreadCalls(record, free)
    return own


class InCall:
    """A context in which this thread is in a call of a team.

    Args:
        verb: name of the call.
        team: ranks that the call depends on; None for all, while there is no team yet. Its `number` identifies it in
            records, and is the same on all of them; `begun` counts its calls.
        peer: the only rank of the team that the call depends on; ANYBODY for any one, None for all. NOBODY stands for
            a call without a deadline, since it ends by itself.
        text: name and place of the call; by default the verb, and where the user's code called it.
        limit: deadline in seconds, if it is not that of all calls.
        tensors: those of the call, among nested lists and other arguments; described only when a rank asks.
        route: name of the route that the call takes, if it is known.
    """

    __slots__ = ("_own",)

    def __init__(
        self,
        verb: str,
        team: Any,
        peer: int | None = None,
        text: bytes | None = None,
        limit: float | None = None,
        tensors: Any = None,
        route: str = "",
    ) -> None:
        self._own = own = getattr(_local, "own", None) or _own()  # thread_calls(), without a call
        if own is None:
            return
        if own.depth == 0:
            number = 0
            if peer is not None:
                number = -1 - peer
            elif team is not None:
                team.begun = number = team.begun + 1
            record = own.record
            record.patient, record.limit, record.tensors, record.route = peer == NOBODY, limit, tensors, route
            record.begin(0 if team is None else team.number, number, text or callsite.where(verb))
        own.depth += 1  # if a line above raises, no call has begun

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        own = self._own
        if own is not None:
            own.depth -= 1
            if not own.depth:
                own.record.end()


def touch() -> None:
    """Restart the deadline of the call that this thread is in: it has made progress."""
    own: _ThreadCalls | None = getattr(_local, "own", None)
    if own is not None:
        own.record.touched += 1


def took(route: str) -> None:
    """Note the route that the call of this thread takes."""
    own: _ThreadCalls | None = getattr(_local, "own", None)
    if own is not None:
        own.record.route = route
