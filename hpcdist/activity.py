"""What each rank is doing, in memory that all ranks of its node read: a few bytes a call, and no message."""

from __future__ import annotations

import mmap
import os
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import CodeType, FrameType
from typing import NamedTuple, Protocol

__all__ = [
    *("ANYBODY", "NOBODY", "AT_WORK", "ENDED", "ENDING", "Board", "Entry", "Lane", "Now", "Process"),
    *("Counted", "InCall", "outside", "place", "refuse", "start", "started", "status", "touch", "where"),
]

AT_WORK, ENDED, ENDING = 0, 1, 2  # what a process is at: not yet done; has finalized; ends the job on purpose
ANYBODY, NOBODY = 2**31, 2**31 + 1  # in the place of a rank

_HEAD = struct.Struct("<qqq")  # of a rank: its process, when the system started it, what it is at (as above)
_LANE = struct.Struct("<qqdq")  # of a lane: calls begun, calls finished, when the last one was, its thread
_COUNT, _LAST = struct.Struct("<q"), struct.Struct("<qd")  # parts of that
_ENTRY = struct.Struct("<dqqH")  # of a call: when it began, the team, the team's number of it, the text's length
_TEXT = 400  # bytes
_PATH = 200  # characters of a path that are shown
_LANES = 64  # threads of a rank whose calls the other ranks see; those of further ones have their deadlines here
_LANE_SIZE = _LANE.size + 2 * (_ENTRY.size + _TEXT)
_SLOT = 2**16  # bytes a rank

_TORCH = os.path.join("-packages", "torch", "")
_HOME = os.path.dirname(__file__) + os.sep


class Entry(NamedTuple):
    """A call: since when (seconds of the epoch), the team and its number there, and what and where it is."""

    since: float
    team: int
    number: int
    text: str


class Now(NamedTuple):
    """What a thread of a rank is at: the call it is in, the last one it has finished, and when; None if there is
    none."""

    thread: int
    call: Entry | None
    last: Entry | None
    ended: float


class Process(NamedTuple):
    """A rank's process as its record tells it."""

    pid: int
    started: int
    state: int
    lanes: list[Now]


class Lane:
    """The calls of one thread, one after the other."""

    def __init__(self, memory: memoryview, at: int) -> None:
        self._memory = memory
        self._at = at
        self._entries = (at + _LANE.size, at + _LANE.size + _ENTRY.size + _TEXT)
        self._texts = [b"", b""]  # what stands there
        self.thread = 0
        self.begun = 0
        self.finished = 0
        self.touched = 0  # how often the call has got on
        self.patient = False  # the call has no deadline

    def begin(self, team: int, number: int, text: bytes) -> None:
        self.begun = begun = self.begun + 1
        odd = begun & 1
        at = self._entries[odd]
        _ENTRY.pack_into(self._memory, at, time.time(), team, number, len(text))
        if self._texts[odd] is not text:  # a program repeats its calls
            self._texts[odd] = text
            at += _ENTRY.size
            self._memory[at : at + len(text)] = text
        _COUNT.pack_into(self._memory, self._at, begun)

    def take(self) -> None:
        """From now on it is this thread's."""
        self.thread = threading.get_native_id()
        _COUNT.pack_into(self._memory, self._at + _LANE.size - _COUNT.size, self.thread)

    def current(self) -> Entry | None:
        """The call it is in; None if it is in none."""
        return _now(self._memory, self._at).call

    def end(self) -> None:
        self.finished = self.begun
        _LAST.pack_into(self._memory, self._at + _COUNT.size, self.begun, time.time())


class Board:
    """The records of the ranks of a node, in memory without a name: it goes with the last process that has it.

    Attributes:
        fd: the file descriptor of the memory.
    """

    def __init__(self, ranks: int, fd: int | None = None) -> None:
        self.fd = os.memfd_create("hpcdist", os.MFD_CLOEXEC) if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, _SLOT * ranks)
        self._memory = memoryview(mmap.mmap(self.fd, _SLOT * ranks))

    def announce(self, local_rank: int, state: int) -> None:
        """Say who this process is, and what it is at."""
        _HEAD.pack_into(self._memory, local_rank * _SLOT, os.getpid(), started(os.getpid()), state)

    def lanes(self, local_rank: int) -> list[Lane]:
        """This process's own part."""
        first = local_rank * _SLOT + _HEAD.size
        return [Lane(self._memory, first + i * _LANE_SIZE) for i in range(_LANES)]

    def read(self, local_rank: int) -> Process:
        """What a rank of this node is at. It may be written meanwhile; a text that is torn is shown as it is."""
        at = local_rank * _SLOT
        pid, since, state = _HEAD.unpack_from(self._memory, at)
        first = at + _HEAD.size
        lanes = [_now(self._memory, first + i * _LANE_SIZE) for i in range(_LANES)]
        return Process(pid, since, state, [lane for lane in lanes if lane.thread])

    def close(self) -> None:
        os.close(self.fd)


def _now(memory: memoryview, at: int) -> Now:
    """What a lane's record says."""
    begun, finished, ended, thread = _LANE.unpack_from(memory, at)
    call = _entry(memory, at, begun) if begun > finished else None
    return Now(thread, call, _entry(memory, at, finished) if finished else None, ended)


def _entry(memory: memoryview, at: int, count: int) -> Entry:
    at += _LANE.size + (count & 1) * (_ENTRY.size + _TEXT)
    since, team, number, length = _ENTRY.unpack_from(memory, at)
    at += _ENTRY.size
    return Entry(since, team, number, bytes(memory[at : at + min(length, _TEXT)]).decode(errors="replace"))


def started(pid: int) -> int:
    """When the system started a process, in its ticks since it was booted; 0 if there is none.

    With its number it tells a process from a later one that was given the same.
    """
    fields = status(pid)
    return int(fields[19]) if len(fields) > 19 else 0


def status(pid: int) -> list[str]:
    """What /proc/PID/stat has behind the process's name, its state first; nothing if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


class Counted(Protocol):
    """Ranks whose calls are counted.

    Attributes:
        number: by which a record tells them apart from others; the same on all of them.
    """

    @property
    def number(self) -> int: ...

    def next_call(self) -> int:
        """The number of a call that begins now."""


peers: dict[int, list[int]] = {}  # the world's ranks of each number that has been seen here
lanes: list[Lane] = []  # of this process; empty where nothing is watched
_free: list[Lane] = []  # those of no thread: of threads that have ended, and then those that are new
_refusal: Callable[[], Exception] | None = None  # makes what a call raises in a process that cannot make any
_mine = threading.local()


def start(board: Board | None, local_rank: int = 0) -> None:
    """From now on this process's calls are written on a board; on none."""
    global lanes, _free, _mine
    lanes = [] if board is None else board.lanes(local_rank)
    _free = list(lanes)
    _mine = threading.local()


def refuse(error: Callable[[], Exception] | None) -> None:
    """From now on this process makes no calls: one raises what `error` makes, if it is given."""
    global _refusal
    start(None)
    _refusal = error


class _Own:
    """What a thread has: a lane, and how deep it is in calls within calls, which are not told.

    It ends with its thread, of whatever kind that is (torch's threads of the backward pass are not Python's), and the
    lane serves another one then.
    """

    __slots__ = ("_free", "depth", "lane")

    def __init__(self, lane: Lane, free: list[Lane]) -> None:
        self.lane = lane
        self.depth = 0
        self._free = free

    def __del__(self) -> None:
        self._free.insert(0, self.lane)


def _own() -> _Own | None:
    """For this thread, which has none yet: with a lane that no other thread has."""
    if _refusal is not None:
        raise _refusal()
    if not lanes:
        return None
    free = _free
    try:
        lane = free.pop(0)  # in one step: several threads may begin at once
    except IndexError:
        lane = Lane(memoryview(bytearray(_LANE_SIZE)), 0)
        lanes.append(lane)
    lane.take()
    own = _mine.own = _Own(lane, free)
    return own


class InCall:
    """A context in which this thread is in a call of a team.

    Args:
        verb: what the user has called.
        team: the ranks it depends on; None for all, while there is no team yet.
        peer: the one rank of the team it depends on, ANYBODY for any one; all of them if None. NOBODY: it has no
            deadline, since it has an end of its own.
        text: what and where it is; by default the verb, and where the user's code called it.
    """

    __slots__ = ("_own",)

    def __init__(self, verb: str, team: Counted | None, peer: int | None = None, text: bytes | None = None) -> None:
        self._own = own = getattr(_mine, "own", None) or _own()
        if own is None:
            return
        if own.depth == 0:
            number = 0 if team is None else team.next_call() if peer is None else -1 - peer
            own.lane.patient = peer == NOBODY
            own.lane.begin(0 if team is None else team.number, number, text or where(verb))
        own.depth += 1  # what raises above has begun no call

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        own = self._own
        if own is not None:
            own.depth -= 1
            if not own.depth:
                own.lane.end()


def touch() -> None:
    """The call that this thread is in gets on: its deadline counts from here."""
    own: _Own | None = getattr(_mine, "own", None)
    if own is not None:
        own.lane.touched += 1


# By the identity of code, which is kept for that: its hash takes longer than all the rest.
# What is kept for each place is bounded: a program may make its code as it runs.
_MOST_PLACES = 4096
_texts: dict[tuple[str, int, int], tuple[bytes, CodeType]] = {}
_inside: dict[int, tuple[bool, CodeType]] = {}  # whether code is the library's own, or torch's


def where(verb: str) -> bytes:
    """A call that is being made, with the file and the line in which the user's code makes it."""
    frame = outside(sys._getframe(1))
    key = (verb, id(frame.f_code), frame.f_lineno)
    known = _texts.get(key)
    if known is None:
        if len(_texts) >= _MOST_PLACES:
            _texts.clear()
        call = verb if " " in verb else f"{verb}()"
        text = f"{call} at {place(frame)}".encode(errors="backslashreplace")[:_TEXT]
        known = _texts[key] = text, frame.f_code
    return known[0]


def outside(frame: FrameType) -> FrameType:
    """The innermost frame of a stack that is the user's code; of a command of ours, the outermost one."""
    while frame.f_back is not None:
        code = frame.f_code
        known = _inside.get(id(code))
        if known is None:
            if len(_inside) >= _MOST_PLACES:
                _inside.clear()
            known = _inside[id(code)] = code.co_filename.startswith(_HOME) or _TORCH in code.co_filename, code
        if not known[0] or frame.f_back.f_code.co_filename.startswith("<frozen"):  # what `python -m` runs
            break
        frame = frame.f_back
    return frame


def place(frame: FrameType) -> str:
    """File and line that a frame is at; the file as seen from the current folder, the end of a long one."""
    path = frame.f_code.co_filename
    with suppress(OSError):  # there is no current folder any more
        path = path.removeprefix(os.getcwd() + os.sep)
    if len(path) > _PATH:
        path = "..." + path[-_PATH:]
    return f"{path}:{frame.f_lineno}"
