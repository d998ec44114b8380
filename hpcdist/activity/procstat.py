"""The system's data on a process: its start time and command, its activity, and the files that it has open."""

from __future__ import annotations

import os
import platform
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from hpcdist.activity.callsite import place

NOT_OPENED = "its ranks cannot open each other's memory (/proc/PID/fd): processes with pids or users of their own"


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


def started(pid: int) -> int:
    """Return when the system started a process, in clock ticks since boot; 0 if there is no such process.

    With its pid it distinguishes a process from a later one with the same pid.
    """
    fields = status(pid)
    return int(fields[19]) if len(fields) > 19 else 0


def handles(number: int) -> bool:
    """Whether this process handles a signal, also in C, as faulthandler does, which signal.getsignal() does not see."""
    with open("/proc/self/status") as file:
        caught = next(line for line in file if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> number - 1 & 1)


def status(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the process's name, its state first; none without such a process."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def address(fd: int) -> list[int]:
    """Return how other processes of this node find an open file: process, descriptor, and the file's identity."""
    status = os.fstat(fd)
    return [os.getpid(), fd, status.st_dev, status.st_ino]


def opened(there: Sequence[int]) -> int:
    """Open a file that another process of this user has open, such as one without a name, to read and write.

    Args:
        there: what :func:`address` has returned in that process.

    Raises:
        OSError: if the system does not let this process, or the file is another one.
    """
    pid, fd, *identity = there
    descriptor = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    if address(descriptor)[2:] != identity:  # the processes have pids of their own, as in containers
        os.close(descriptor)
        raise OSError(NOT_OPENED)
    return descriptor


def condition(pid: int, since: int) -> str:
    """Return the state of a process of this node: "dead", "stopped", "in I/O" or "alive".

    Args:
        pid: number of the process.
        since: when it was started, see :func:`started`; a later process of that number does not count.
    """
    fields = status(pid)
    if len(fields) <= 19 or fields[0] in "ZXx" or int(fields[19]) != since:
        return "dead"
    return {"T": "stopped", "t": "stopped", "D": "in I/O"}.get(fields[0], "alive")


def doing(thread: int, frame: FrameType) -> str:
    """Describe the activity of a thread of this process outside calls of this library.

    Args:
        thread: ID that the system has given the thread.
        frame: innermost frame of its stack.
    """
    walked = [inner for inner, _ in traceback.walk_stack(frame)]
    user = next((f for f in walked if not _foreign(f.f_code.co_filename)), frame)
    at = f"{place(user)} in {user.f_code.co_name}"
    if any(_LOADER in f.f_code.co_filename for f in walked):
        return f"in a DataLoader, at {at}; {_children()}"
    call = _io(thread)
    if call == "wait":
        return f"waiting for a child process, at {at}; {_children()}"
    return f"in I/O, {call}, at {at}" if call else f"in Python, at {at}"


def _children() -> str:
    import psutil  # stage-env does not need it

    children = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            children.append(f"{child.pid} {child.name()} {child.status()}")
    return f"its child processes: {', '.join(children) or 'none'}"


def frames() -> dict[int, FrameType]:
    """Return the innermost frame of each thread of this process, by the ID that the system has given the thread."""
    all_, main = sys._current_frames(), threading.main_thread()
    # In a forked process, Python 3.11 still returns the parent's native_id for the main thread.
    numbers = {t: os.getpid() if t is main else t.native_id for t in threading.enumerate()}
    return {number: all_[t.ident] for t, number in numbers.items() if number and t.ident in all_}


def stack(frame: FrameType) -> list[str]:
    """Return the innermost part of a stack as a traceback shows it."""
    return "".join(traceback.format_stack(frame, _FRAMES)).splitlines()


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
