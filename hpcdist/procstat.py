"""What the system says of a process: when it was started, and its state."""

from __future__ import annotations

__all__ = ["started", "status"]


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
