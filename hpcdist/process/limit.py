"""A time limit that holds while native code keeps Python's lock, and no thread of Python's can run."""

from __future__ import annotations

import ctypes
import faulthandler
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from hpcdist import activity
from hpcdist.activity import procstat


class _Event(ctypes.Structure):
    """struct sigevent of Linux: asm-generic/siginfo.h; notify 0 sends a signal."""

    _fields_ = (
        *(("value", ctypes.c_void_p), ("number", ctypes.c_int), ("notify", ctypes.c_int)),
        ("rest", 48 * ctypes.c_char),
    )


def _function(name: str) -> Any:
    """Return a function of the C library; before glibc 2.34 it is in a library of its own."""
    libc: Any = ctypes.CDLL(None)
    return getattr(libc if hasattr(libc, name) else ctypes.CDLL("librt.so.1"), name)


@contextmanager
def ended_after(seconds: float) -> Iterator[None]:
    """A context in which the process ends after so many seconds, and prints the lines where its threads are.

    The timer is one of the kernel's, so the program's own, of faulthandler or signal.setitimer(), go on.
    """
    number = signal.SIGRTMAX if procstat.handles(signal.SIGALRM) else signal.SIGALRM
    timer = ctypes.c_void_p()
    _function("timer_create")(1, ctypes.byref(_Event(number=number)), ctypes.byref(timer))  # CLOCK_MONOTONIC
    faulthandler.register(number, file=2, chain=True)  # a handler in C; then the signal ends the process
    _function("timer_settime")(timer, 0, (ctypes.c_long * 4)(0, 0, int(seconds), int(seconds % 1 * 1e9)), None)
    try:
        yield
    finally:
        _function("timer_delete")(timer)
        faulthandler.unregister(number)


def ended_at_deadline() -> AbstractContextManager[None]:
    """A context in which a rank without others ends itself at the deadline of calls. Other ranks would see that it is
    stuck."""
    limit = activity.lone_limit
    return nullcontext() if limit is None else ended_after(limit)
