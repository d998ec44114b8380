"""Pages of host memory: in huge pages where that is faster, and given to the kernel lazily where they lie idle."""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

__all__ = ["Populated", "free_lazily"]

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14 and later; not in Python's mmap
_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_HUGE = 2**21  # bytes of a huge page; where it has another size, the trial decides all the same
_TRIAL = 2**22  # bytes that are populated in each kind of pages to compare them: 4 ms in all
_STEPS = 2**21, 2**23  # bytes that are populated at a time: at first, and at most
_PATIENCE = 0.002  # seconds that populating a block may take beyond twice what it would take in ordinary pages
_MOST_SKIPPED = 64  # blocks that are made in ordinary pages after huge ones were slow

_madvise: Callable[[int, int, int], int] | None = None
with suppress(AttributeError, OSError, TypeError):  # not Linux
    _madvise = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)(
        ("madvise", ctypes.CDLL(None))
    )


def _advise(address: int, nbytes: int, advice: int) -> bool:
    """Advise the kernel on the whole pages of a range; return whether it complied. Other threads run meanwhile."""
    begin, end = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    return _madvise is not None and begin < end and not _madvise(begin, end - begin, advice)


def free_lazily(address: int, nbytes: int) -> bool:
    """Let the kernel take the whole pages of a range of memory that nobody uses; return whether it may.

    It takes them when memory is short, also that of a control group, and what was in them is lost; until then they are
    written again without page faults. Pages that a device or another process has pinned stay.
    """
    return sys.platform == "linux" and _advise(address, nbytes, mmap.MADV_FREE)


class Populated:
    """New memory in huge pages, where the kernel has these for programs that ask, and as long as they are faster.

    The kernel clears 64 MiB in 3.5 ms in huge pages, and in 23 ms in ordinary ones (measured); but if the free memory
    is in small pieces, it moves others' pages first, which has taken 160 ms. Therefore it is tried once, and every
    block is populated here, step by step: a slow one continues in ordinary pages, and the next ones are made in these.

    Attributes:
        count: number of blocks made in huge pages.
    """

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()
        self._plain: float | None = None  # seconds a byte in ordinary pages; 0 where these are at least as fast
        self._slow = self._skipped = 0  # slow blocks less fast ones; blocks still to make without

    def prepare(self, address: int, nbytes: int) -> None:
        """Populate new memory in huge pages, or leave it as it is."""
        with self._lock:
            if self._plain is None:
                self._plain = _trial()
            if not self._plain or nbytes < 2 * _HUGE:
                return
            skipped = self._skipped > 0
            self._skipped -= skipped
        if skipped:
            _populate_plain(address, nbytes)
            return
        fast = _advise(address, nbytes, mmap.MADV_HUGEPAGE) and self._populate(address, nbytes, self._plain)
        with self._lock:
            self.count += fast
            self._slow = max(0, self._slow + (-1 if fast else 1))
            if not fast:
                self._skipped = min(2**self._slow, _MOST_SKIPPED)

    def _populate(self, address: int, nbytes: int, plain: float) -> bool:
        """Populate memory step by step; return whether that was fast."""
        begin, done, step = time.thread_time(), 0, _STEPS[0]  # what else runs on this core does not count
        while done < nbytes:
            part = min(step, nbytes - done)
            if not _advise(address + done, part, _POPULATE_WRITE):
                return True  # memory is short: whoever writes to it will see
            done, step = done + part, min(2 * step, _STEPS[1])
            if time.thread_time() - begin > _PATIENCE + 2 * plain * done:
                _populate_plain(address + done, nbytes - done)
                return False
        return True


def _populate_plain(address: int, nbytes: int) -> None:
    """Populate memory in ordinary pages. The kernel may join them to huge ones later, in the background."""
    for advice in (mmap.MADV_NOHUGEPAGE, _POPULATE_WRITE, mmap.MADV_HUGEPAGE):
        _advise(address, nbytes, advice)


def _trial() -> float:
    """Return the seconds that populating a byte in ordinary pages takes; 0 if huge pages are not to be asked for."""
    with suppress(OSError, AttributeError, ValueError):
        if "[madvise]" not in _ENABLED.read_text():  # "always" needs no advice, "never" takes none
            return 0.0
        plain = _time(mmap.MADV_NOHUGEPAGE)
        if min(_time(mmap.MADV_HUGEPAGE) for _ in range(2)) < plain:
            return plain / _TRIAL
    return 0.0


def _time(advice: int) -> float:
    """Return the seconds that populating memory takes with some advice; OSError if it cannot be populated."""
    with mmap.mmap(-1, _TRIAL + _HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        view = (ctypes.c_char * len(memory)).from_buffer(memory)
        first = -(-ctypes.addressof(view) // _HUGE) * _HUGE
        del view  # else the memory could not be unmapped
        _advise(first, _TRIAL, advice)
        begin = time.thread_time()
        if not _advise(first, _TRIAL, _POPULATE_WRITE):
            raise OSError("memory cannot be populated")
        return time.thread_time() - begin
