"""Read from /proc what a process does: whether it runs, is stopped, or waits for a file or a child."""

from __future__ import annotations

import os
import platform
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from types import FrameType

from hpcdist.activity.callsite import place
from hpcdist.activity.procstat import status

__all__ = ["children", "condition", "doing", "frames", "stack"]


def _numbered(text: str) -> dict[int, str]:
    words = text.split()
    return dict(zip(map(int, words[::2]), words[1::2], strict=True))


# The numbers in /proc/PID/syscall of the system calls in which a thread waits for data.
_CALLS = {
    "x86_64": _numbered(
        "0 read 1 write 17 pread 18 pwrite 19 readv 20 writev 295 preadv 296 pwritev 74 fsync 75 fdatasync 2 open "
        "257 open 73 flock 72 fcntl 5 fstat 262 stat 217 getdents 42 connect 43 accept 44 sendto 45 recvfrom "
        "47 recvmsg 61 wait"
    ),
    "aarch64": _numbered(
        "63 read 64 write 67 pread 68 pwrite 65 readv 66 writev 69 preadv 70 pwritev 82 fsync 83 fdatasync 56 open "
        "32 flock 25 fcntl 80 fstat 79 stat 61 getdents 203 connect 202 accept 206 sendto 207 recvfrom 212 recvmsg "
        "260 wait"
    ),
}
_LOADER = os.path.join("torch", "utils", "data")
_FRAMES = 6  # innermost frames of a stack that are shown
_NO_FILE = ("open", "wait", "stat")  # their first argument is not an open file


def condition(pid: int, since: int) -> str:
    """Return the state of a process of this node: "dead", "stopped", "in I/O" or "alive".

    Args:
        pid: number of the process.
        since: when it was started, see :func:`hpcdist.activity.procstat.started`; a later process of that number
            does not count.
    """
    fields = status(pid)
    if len(fields) <= 19 or fields[0] in "ZXx" or int(fields[19]) != since:
        return "dead"
    return {"T": "stopped", "t": "stopped", "D": "in I/O"}.get(fields[0], "alive")


def children(pid: int) -> list[str]:
    """Return the child processes of a process, as "PID NAME STATE"."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in task.read_text().split():
                name, _, rest = Path(f"/proc/{child}/stat").read_text().partition("(")[2].rpartition(")")
                state = {"T": "stopped", "Z": "dead", "D": "in I/O", "R": "running"}.get(rest.split()[0], "waiting")
                found.append(f"{child} {name} {state}")
    return found


def doing(thread: int, frame: FrameType) -> str:
    """Describe what a thread of this process does outside calls of this library.

    Args:
        thread: ID that the system has given the thread.
        frame: innermost frame of its stack.
    """
    walked = _walk(frame)
    user = next((f for f in walked if not _foreign(f.f_code.co_filename)), frame)
    at = f"{place(user)} in {user.f_code.co_name}"
    if any(_LOADER in f.f_code.co_filename for f in walked):
        return f"in a DataLoader, at {at}; {_children()}"
    call = _io(thread)
    if call == "wait":
        return f"waiting for a child process, at {at}; {_children()}"
    return f"in I/O, {call}, at {at}" if call else f"in Python, at {at}"


def _children() -> str:
    return f"its child processes: {', '.join(children(os.getpid())) or 'none'}"


def frames() -> dict[int, FrameType]:
    """Return the innermost frame of each thread of this process, by the ID that the system has given the thread."""
    all_, main = sys._current_frames(), threading.main_thread()
    # In a forked process, Python 3.11 still returns the parent's native_id for the main thread.
    numbers = {t: os.getpid() if t is main else t.native_id for t in threading.enumerate()}
    return {number: all_[t.ident] for t, number in numbers.items() if number and t.ident in all_}


def stack(frame: FrameType) -> list[str]:
    """Return the innermost part of a stack as a traceback shows it."""
    lines = traceback.format_list(traceback.extract_stack(frame)[-_FRAMES:])
    return [line for entry in lines for line in entry.rstrip().splitlines()]


def _walk(frame: FrameType | None) -> list[FrameType]:
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def _foreign(path: str) -> bool:
    """Whether code is a library's, and not the user's."""
    return path.startswith(("<", os.path.dirname(os.__file__))) or "-packages" in path


def _io(thread: int) -> str | None:
    """Return the input or output that a thread of this process waits for: "read of /data/x.npy"; None if none."""
    try:
        words = Path(f"/proc/self/task/{thread}/syscall").read_text().split()
        name = _CALLS.get(platform.machine(), {}).get(int(words[0]))
    except (OSError, ValueError, IndexError):
        return None
    if name is None or name in _NO_FILE:
        return name
    try:
        return f"{name} of {os.readlink(f'/proc/self/fd/{int(words[1], 16)}')}"
    except (OSError, ValueError, IndexError):
        return name
