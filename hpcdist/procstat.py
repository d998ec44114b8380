"""What the system says of a process: when and as what it was started, and its state."""

from __future__ import annotations

import sys

__all__ = ["started", "started_module", "status"]


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


def started_module() -> str:
    """Return the module that ``python -m`` is about to run, while the packages that it lies in are imported; else "".

    Until it runs, sys.argv[0] is "-m"; what else is in sys.argv follows the module's name on the command line.
    """
    argv = getattr(sys, "argv", [])  # absent where a program embeds Python
    if argv[:1] != ["-m"] or len(sys.orig_argv) < len(argv):
        return ""
    word = sys.orig_argv[-len(argv)]
    return word[word.find("m") + 1 :] if word.startswith("-") else word  # -mNAME, -ImNAME
