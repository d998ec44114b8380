"""The processes of an MPI job, however they were launched. Needs no torch."""

from __future__ import annotations

import atexit
import os
import resource
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from hpcdist.comm import launcher
from hpcdist.errors import LaunchError, reason, refusal

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["job"]

# Free descriptors that MPI and init() need, 25, and init() alone, 11, on two ranks as on four (MPICH and Open MPI), and
# eleven more: those of a group of gloo, and of connections to other hosts.
_FILES, _FILES_AFTER_MPI = 36, 22


def job(comm: MPI.Intracomm | None, environ: Mapping[str, str]) -> MPI.Intracomm:
    """Return the communicator of the job: COMM_WORLD if `comm` is None. Starts MPI, unless it runs.

    Raises:
        LaunchError: if there is no MPI, it has ended, the launcher is that of another MPI, or this process may open too
            few files.
        TypeError: if `comm` is not a communicator, or does not hold this rank.
    """
    _check_files()
    try:
        misfit = _start(environ)
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            "HD101", f"mpi4py finds no MPI library ({error}); pip install mpich, or load your MPI"
        ) from error
    if misfit is not None:
        raise LaunchError("HD106", misfit)
    if MPI.Is_finalized():
        raise LaunchError("HD112", "MPI has ended in this process (MPI.Finalize), and cannot be started again")
    if not MPI.Is_initialized():  # mpi4py.rc.initialize is false
        MPI.Init_thread(MPI.THREAD_MULTIPLE)  # as mpi4py does at its import
        atexit.register(_end)
    if comm is not None and (not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL):
        raise refusal(TypeError, "HD114", f"comm must be an mpi4py Intracomm that holds this rank, got {comm!r}")
    if comm is None:
        comm = MPI.COMM_WORLD
        alone = launcher.alone(environ, comm.size, _library(MPI.Get_library_version()))
        if alone is not None:
            raise LaunchError("HD106", alone)
    return comm


def _check_files() -> None:
    """Raise a LaunchError if MPI and init() would fail, or hang, for want of descriptors."""
    needed = _FILES_AFTER_MPI if "mpi4py.MPI" in sys.modules else _FILES
    held: list[int] = []
    try:
        held.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(needed))
    except OSError as error:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        may = f"this process may open {soft} files, and {needed} more than it has open are needed ({reason(error)})"
        most = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
        fix = f"ulimit -n $(ulimit -Hn) in the job script, which is {most} here; docker run --ulimit nofile=65536"
        raise LaunchError("HD116", f"{may}: {fix}") from None
    finally:
        for fd in held:
            os.close(fd)


def _end() -> None:
    """End the MPI that job() has started, after what else runs at the end of the program, as mpi4py ends its own."""
    from mpi4py import MPI

    if not MPI.Is_finalized():
        MPI.Finalize()


def _start(environ: Mapping[str, str]) -> str | None:
    """Start MPI as importing mpi4py does, unless MPI_Init would abort for "unsupported PMI version PMIx".

    Returns:
        What is wrong and what to do, in that case; else None.
    """
    import mpi4py

    rc = mpi4py.rc
    if "PMIX_NAMESPACE" not in environ or "mpi4py.MPI" in sys.modules or not rc.initialize or not rc.threads:
        return None
    before, rc.initialize = rc.finalize, False
    rc.finalize = before is None or before  # as None means where mpi4py itself starts MPI
    try:
        from mpi4py import MPI
    finally:
        rc.initialize, rc.finalize = True, before
    misfit = launcher.unsupported(environ, _library(MPI.Get_library_version()), _maps())
    if misfit is None and not MPI.Is_initialized():
        level = environ.get("MPI4PY_RC_THREAD_LEVEL", rc.thread_level)
        MPI.Init_thread(getattr(MPI, f"THREAD_{level.upper()}"))
    return misfit


def _library(version: str) -> str:
    return " ".join(version.split("\n")[0].strip("\0 ").split())


def _maps() -> str:
    try:
        with open("/proc/self/maps", errors="surrogateescape") as maps:
            return maps.read()
    except OSError:
        return ""
