"""What the system says of a process: when and as what it was started, its state, and the files that it has open."""

from __future__ import annotations

import os
from collections.abc import Sequence

__all__ = ["NOT_OPENED", "identity", "opened", "started", "status"]

NOT_OPENED = "its ranks cannot open each other's memory (/proc/PID/fd): processes with pids or users of their own"


def started(pid: int) -> int:
    """Return when the system started a process, in clock ticks since boot; 0 if there is no such process.

    With its pid it distinguishes a process from a later one with the same pid.
    """
    fields = status(pid)
    return int(fields[19]) if len(fields) > 19 else 0


def status(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the process's name, its state first; none without such a process."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def identity(fd: int) -> list[int]:
    """Return what tells an open file from all others of this node."""
    status = os.fstat(fd)
    return [status.st_dev, status.st_ino]


def opened(pid: int, fd: int, expected: Sequence[int]) -> int:
    """Open a file that another process of this user has open, such as one without a name, to read and write.

    Args:
        pid, fd: process and its descriptor.
        expected: identity of the file there.

    Raises:
        OSError: if the system does not let this process, or the file is another one.
    """
    found = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    if identity(found) != list(expected):  # the processes have pids of their own, as in containers
        os.close(found)
        raise OSError(NOT_OPENED)
    return found
