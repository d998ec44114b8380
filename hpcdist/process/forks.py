"""One process a rank: MPI cannot be used in a child that was forked while it ran, nor by two processes for one rank.

Either hangs, or takes data from the other one's messages; MPI itself finds neither.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
from collections.abc import Mapping

from hpcdist.errors import LaunchError

__all__ = ["claim", "refusal"]

_OWNER = struct.Struct("<q")
_owner = mmap.mmap(-1, mmap.PAGESIZE)  # the process that has called init(), seen by all that are forked from here on
_parent = 0  # the process of which this one is a child that must not use MPI
_WAYS = (
    "Call hpcdist in the process that the launcher has started, and leave to its children what needs no hpcdist; or "
    "let one child call init(), before its parent starts MPI"
)


def refusal() -> str | None:
    """Why this process cannot use MPI; None if it can."""
    if not _parent:
        return None
    return f"this is a child process (pid {os.getpid()}), forked while MPI ran in its parent (pid {_parent}). {_WAYS}"


def claim(environ: Mapping[str, str], launched: bool) -> None:
    """Find before MPI is used why this process must not be a rank.

    Args:
        environ: of this process.
        launched: a launcher started it, and has one rank for it and all its children.

    Raises:
        LaunchError: it must not.
    """
    why = refusal()
    if why is not None:
        raise LaunchError(why)
    fd = environ.get("PMI_FD", "")
    if fd.isdigit() and not _runs() and not _is_open(int(fd)):
        raise LaunchError(
            f"PMI_FD={fd}, by which this process (pid {os.getpid()}) would become a rank, is not open: the launcher "
            f"did not start it, but a process of the launcher's did (subprocess, spawn, forkserver). {_WAYS}"
        )
    (owner,) = _OWNER.unpack_from(_owner)
    if launched and owner not in (0, os.getpid()) and os.path.exists(f"/proc/{owner}"):
        raise LaunchError(
            f"process {owner}, a parent, child or sibling of this one (pid {os.getpid()}), has called hpcdist.init() "
            f"already, and the launcher has one rank for them. {_WAYS}"
        )
    _OWNER.pack_into(_owner, 0, os.getpid())


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _runs() -> bool:
    """Whether MPI was started and not yet ended in this process; without loading it."""
    if "mpi4py.MPI" not in sys.modules:
        return False
    from mpi4py import MPI

    return bool(MPI.Is_initialized() and not MPI.Is_finalized())


def _in_child() -> None:
    global _parent
    if _runs():
        _parent = os.getppid()


os.register_at_fork(after_in_child=_in_child)
