"""One rank's failure ends the whole job, with its reason and its exit status.

Left alone, every MPI hangs there: the failing rank waits in ``MPI_Finalize`` for ranks that wait for its data. Nothing
that is done on the way to that end keeps the job from ending.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import NoReturn

from hpcdist.errors import HpcdistError, RankError

__all__ = [
    *("LITTER", "InStep", "Transfer", "at_end", "explain", "fail", "flush", "forget", "job", "say", "tidy", "watched"),
]

_FLUSH_SECONDS = 1.0  # for what is left to print
_FORWARD_SECONDS = 0.2  # launchers forget what was printed just before an abort, unless they get time to forward it
_exit_now = os._exit
LITTER: set[str] = set()  # files for one call: a job that ends in it is not to leave them behind
_at_end: Callable[[], object] | None = None
_explain: Callable[[], object] | None = None


def at_end(tell: Callable[[], object] | None, explain: Callable[[], object] | None) -> None:
    """What to call before this process ends the job, and when a transfer has failed, to find who is gone."""
    global _at_end, _explain
    _at_end, _explain = tell and _harmless(tell), explain and _harmless(explain)


def _harmless(step: Callable[[], object]) -> Callable[[], None]:
    """A step on the way to the end of the job, which nothing must keep from ending."""

    def run() -> None:
        try:
            step()
        except Exception:
            say(f"hpcdist: the job ends, in spite of this error\n{traceback.format_exc()}")

    return run


def watched() -> bool:
    """Whether the other ranks wait for this process, from init() to finalize()."""
    return _at_end is not None


def explain() -> None:
    """Print which ranks are dead or stopped, if some are."""
    if _explain is not None:
        _explain()


def forget() -> None:
    """In a child process: the job is its parent's."""
    global _at_end, _explain
    _at_end = _explain = None
    LITTER.clear()


def job(status: int, forward: float = _FORWARD_SECONDS) -> NoReturn:
    """End every process of the MPI job with `status`. Flushes this process's output first, and leaves the launcher
    `forward` seconds to pass it on."""
    from mpi4py import MPI

    try:
        if _at_end is not None:
            _at_end()
        _harmless(tidy)()
        if threading.current_thread() is threading.main_thread():
            flush()
        else:  # the main thread may be in the middle of a print that does not end
            flusher = threading.Thread(target=flush, daemon=True)
            flusher.start()
            flusher.join(_FLUSH_SECONDS)
        time.sleep(forward)
    finally:  # whatever comes between, such as Ctrl-C
        try:
            if not MPI.Is_finalized():
                MPI.COMM_WORLD.Abort(status)
        finally:
            _exit_now(status)  # MPICH returns, and has its launcher end the processes


def say(text: str) -> None:
    """Print what nobody can be told otherwise: where the program prints its errors, else where Python has found
    standard error when it began."""
    stream = sys.stderr or sys.__stderr__
    try:
        if stream is not None:
            print(text, file=stream, flush=True)
    except Exception:  # it is closed, or something of the program's own
        if sys.__stderr__ is not None:  # else 2 is whatever was opened first
            with suppress(OSError):
                os.write(2, f"{text}\n".encode(errors="backslashreplace"))


def flush() -> None:
    """Pass on what this process has printed."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with suppress(Exception):  # it is closed, or something of the program's own
                stream.flush()


def tidy() -> None:
    """Remove what would stay of a job that ends now."""
    for path in (*LITTER, *_shared_memory()):
        with suppress(OSError):
            os.unlink(path)


def _shared_memory() -> set[str]:
    """The names of the memory that MPI shares on this node, which stay when a job is aborted."""
    try:
        with open("/proc/self/maps", errors="surrogateescape") as maps:
            return set(re.findall(r"/dev/shm/(?:mpich_shm_|sm_segment|vader_segment)\S*", maps.read()))
    except OSError:
        return set()


class _Together:
    """A context in which the ranks of a call depend on each other: an exception there ends the job.

    Alone (`size` 1), the exception goes to the caller; so does one of the class `agreed`, which all ranks raise alike.
    """

    __slots__ = ("size", "verb")
    agreed: type[BaseException]
    what: str  # has happened to the call

    def __init__(self, verb: str, size: int) -> None:
        self.verb = verb
        self.size = size

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self.size > 1 and not isinstance(error, self.agreed):
            fail(error, f"{self.verb}() {self.what}")


class Transfer(_Together):
    """A context in which data move: an exception there cannot be agreed on; only a RankError has been already."""

    __slots__ = ()
    agreed = RankError
    what = "failed in the middle of a transfer"


class InStep(_Together):
    """A context in which a rank agrees with others and moves data with them: what is raised there by anything but
    that, such as a signal's handler, leaves this rank out of step with the others."""

    __slots__ = ()
    agreed = HpcdistError
    what = "was interrupted, which leaves this rank out of step with the others"


def fail(error: BaseException, what: str) -> NoReturn:
    """End the job for an error on this rank alone, after which it cannot go on together with the others."""
    say("".join(traceback.format_exception(error)) + f"hpcdist: {what}, and the job ends")
    try:
        explain()
    finally:  # whatever happens meanwhile
        job((error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 0) & 0xFF or 1)
