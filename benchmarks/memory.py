"""Measure the memory of one call with the counters of the Linux kernel: its peak, and that of a node."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

from mpi4py import MPI

import hpcdist as hd

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_ROLLUP = Path("/proc/self/smaps_rollup")
_RESET_PEAK = "5"  # proc(5): sets the peak resident set size (VmHWM) to the current one
_LEAST = 2**24


def unavailable(comm: MPI.Intracomm) -> str | None:
    """Return why peaks cannot be measured here, else None. Collective, the same on all ranks."""
    try:
        _CLEAR.write_text(_RESET_PEAK)
        _resident("VmHWM")
        reason = None
    except (OSError, LookupError) as error:
        reason = f"the kernel does not let this process reset its peak memory ({error})"
    return next((r for r in comm.allgather(reason) if r), None)


def too_small(nbytes: int) -> str | None:
    """Return why a call that moves `nbytes` per rank is too small to measure, else None."""
    return f"{nbytes} bytes a rank are too few for the counters; use {_LEAST >> 20} MiB" if nbytes < _LEAST else None


def peak(comm: MPI.Intracomm, call: Callable[[], object]) -> int:
    """Measure the resident memory of `call` at its peak, including its result: the maximum over all ranks, in bytes.

    Collective. Run the call once before, to exclude what MPI and torch allocate for the first call. The kernel batches
    its counters: figures are accurate to about 100 KiB.
    """
    gc.collect()
    _trim()  # otherwise memory that the allocator keeps would be reused unnoticed
    _CLEAR.write_text(_RESET_PEAK)
    before = _resident("VmRSS")
    comm.Barrier()
    result = call()
    comm.Barrier()
    extra = _resident("VmHWM") - before
    del result
    return int(comm.allreduce(extra, op=MPI.MAX))


def node(comm: MPI.Intracomm, call: Callable[[], object]) -> int:
    """Measure the memory that all ranks together have more while they hold the results of `call`, in bytes.

    Collective; all ranks are on one node. What several of them map is counted once (the proportional set size of
    memory that is not of files).
    """
    gc.collect()
    hd.memory.empty_cache()
    hd.current()._context.team.leave_node()  # its windows would be used again unnoticed
    _trim()
    comm.Barrier()
    before = _proportional()
    comm.Barrier()  # since what others map counts
    result = call()
    comm.Barrier()
    extra = _proportional() - before
    comm.Barrier()
    del result
    return int(comm.allreduce(extra, op=MPI.SUM))


def _proportional() -> int:
    """Return this process's part of anonymous memory and of memory shared by memfd or /dev/shm, in bytes."""
    fields = dict(line.split(":") for line in _ROLLUP.read_text().splitlines()[1:])
    return sum(int(fields[name].split()[0]) * 1024 for name in ("Pss_Anon", "Pss_Shmem"))


def _resident(name: str) -> int:
    """Read a field of /proc/self/status, in bytes."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"no {name} in {_STATUS}")


def _trim() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)
