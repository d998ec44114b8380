"""How much memory one call takes at its peak, as the Linux kernel counts it."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

from mpi4py import MPI

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5): sets the peak resident set size (VmHWM) to the current one
_LEAST = 2**24


def unavailable(comm: MPI.Intracomm) -> str | None:
    """Why peaks cannot be measured here; None if they can. Collective, the same on all ranks."""
    try:
        _CLEAR.write_text(_RESET_PEAK)
        _resident("VmHWM")
        reason = None
    except (OSError, LookupError) as error:
        reason = f"the kernel does not let this process reset its peak of memory ({error})"
    return next((r for r in comm.allgather(reason) if r), None)


def too_small(nbytes: int) -> str | None:
    """Why a call that moves `nbytes` a rank is too small to measure; None if it is not."""
    return f"{nbytes} bytes a rank drown in the kernel's counters; take {_LEAST >> 20} MiB" if nbytes < _LEAST else None


def peak(comm: MPI.Intracomm, call: Callable[[], object]) -> int:
    """Bytes of resident memory that `call` takes at its peak, its result included; the most of all ranks.

    Collective. Call it once before, so that what MPI and torch set up for the first call is not counted. The kernel
    batches its counters: figures are good to some 100 KiB.
    """
    gc.collect()
    _trim()  # or memory that was freed but kept by the allocator would be taken again unseen
    _CLEAR.write_text(_RESET_PEAK)
    before = _resident("VmRSS")
    comm.Barrier()
    result = call()
    comm.Barrier()
    extra = _resident("VmHWM") - before
    del result
    return int(comm.allreduce(extra, op=MPI.MAX))


def _resident(name: str) -> int:
    """A field of /proc/self/status, in bytes."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"no {name} in {_STATUS}")


def _trim() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)
