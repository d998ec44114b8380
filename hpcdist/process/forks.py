"""One process a rank: refuse a child that was forked while MPI ran, and a second process for the same rank.

Either would hang or take data of the other process's messages; MPI itself detects neither.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Mapping

from hpcdist.errors import LaunchError, coded

# Pid of the process that has called init(), shared with all that are forked from here on.
_owner = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("q")
_parent = 0  # pid of the parent, in a child that must not use MPI
_ADVICE = (
    "Call hpcdist in the process that the launcher has started, and give its children work without hpcdist; or "
    "let one child call init(), before its parent starts MPI"
)


def refusal() -> str | None:
    """Return why this process cannot use MPI; None if it can."""
    if not _parent:
        return None
    text = f"this is a child process (pid {os.getpid()}), forked while MPI ran in its parent (pid {_parent}). {_ADVICE}"
    return coded("HD104", text)


def claim(environ: Mapping[str, str], launched: bool) -> None:
    """Make this process the rank, before MPI is used.

    Args:
        environ: environment of this process.
        launched: whether a launcher has one rank for this process and its relatives.

    Raises:
        LaunchError: if this process must not be a rank.
    """
    if why := refusal():
        raise LaunchError(why)
    fd = environ.get("PMI_FD", "")
    if fd.isdigit() and not mpi_runs() and not os.path.exists(f"/proc/self/fd/{fd}"):
        raise LaunchError(
            "HD104",
            f"PMI_FD={fd}, by which this process (pid {os.getpid()}) would become a rank, is not open: the launcher "
            f"did not start it, but a process of the launcher's did (subprocess, spawn, forkserver). {_ADVICE}",
        )
    owner = _owner[0]
    if launched and owner not in (0, os.getpid()) and os.path.exists(f"/proc/{owner}"):
        raise LaunchError(
            "HD104",
            f"process {owner}, a parent, child or sibling of this one (pid {os.getpid()}), has called hpcdist.init() "
            f"already, and the launcher has one rank for them. {_ADVICE}",
        )
    _owner[0] = os.getpid()


def mpi_runs() -> bool:
    """Whether MPI runs in this process; does not load it."""
    if "mpi4py.MPI" not in sys.modules:
        return False
    from mpi4py import MPI

    return bool(MPI.Is_initialized() and not MPI.Is_finalized())


def _in_child() -> None:
    global _parent
    if mpi_runs():
        _parent = os.getppid()


os.register_at_fork(after_in_child=_in_child)
