"""The processes of an MPI job, however they were launched. Needs no torch."""

from __future__ import annotations

import atexit
from collections.abc import Mapping
from typing import TYPE_CHECKING

from hpcdist.comm import launcher
from hpcdist.errors import LaunchError, refusal

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["job"]


def job(comm: MPI.Intracomm | None, environ: Mapping[str, str]) -> MPI.Intracomm:
    """Return the communicator of the job: COMM_WORLD if `comm` is None. Starts MPI, unless it runs.

    Raises:
        LaunchError: if there is no MPI, it has ended, or the launcher is that of another MPI.
        TypeError: if `comm` is not a communicator, or does not hold this rank.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            "HD101", f"mpi4py finds no MPI library ({error}); pip install mpich, or load your MPI"
        ) from error
    if MPI.Is_finalized():
        raise LaunchError("HD103", "MPI has ended in this process (MPI.Finalize), and cannot be started again")
    if not MPI.Is_initialized():  # mpi4py.rc.initialize is false
        MPI.Init_thread(MPI.THREAD_MULTIPLE)  # as mpi4py does at its import
        atexit.register(_end)
    if comm is not None and (not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL):
        raise refusal(TypeError, "HD114", f"comm must be an mpi4py Intracomm that holds this rank, got {comm!r}")
    if comm is None:
        comm = MPI.COMM_WORLD
        alone = launcher.alone(environ, comm.size, MPI.Get_library_version().split("\n")[0].strip("\0 "))
        if alone is not None:
            raise LaunchError("HD106", alone)
    return comm


def _end() -> None:
    """End the MPI that job() has started, after what else runs at the end of the program, as mpi4py ends its own."""
    from mpi4py import MPI

    if not MPI.Is_finalized():
        MPI.Finalize()
