"""A file without a name that all ranks of a node open: nobody else can, and nothing is left of it."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from hpcdist.activity import procstat
from hpcdist.control import objects

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["node_file"]


def node_file(comm: MPI.Comm) -> int | None:
    """Return a descriptor of a new file in memory, the same on all ranks of a node. Collective over `comm`.

    Rank 0 makes it, and the others open it through its process; None on all ranks where the system does not let them,
    as between containers.
    """
    made: list[int] = []

    def make() -> list[int]:
        made.append(os.memfd_create("hpcdist", os.MFD_CLOEXEC))
        return [os.getpid(), made[0], *procstat.identity(made[0])]

    pid, fd, *expected = objects.run_on_root(comm, "init", make)
    with suppress(OSError):
        made = made or [procstat.opened(pid, fd, expected)]
    if all(objects.all_gather_object(comm, bool(made))):
        return made[0]
    for fd in made:
        os.close(fd)
    return None
