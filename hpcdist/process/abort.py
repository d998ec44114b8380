"""One rank's failure ends the whole job, with its reason and its exit status.

Left alone, every MPI hangs there: the failing rank waits in ``MPI_Finalize`` for ranks that wait for its data. No step
before the end, such as printing or removing files, can keep the job from ending.
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
from typing import NoReturn, TextIO

from hpcdist.errors import HpcdistError, RankError, coded, with_hint

__all__ = [
    *("InStep", "InTransfer", "at_end", "cleanup", "explain", "fail", "flush", "forget", "job", "print_error"),
    *("temp_files", "watched"),
]

_FLUSH_SECONDS = 1.0  # for the output that is left
_FORWARD_SECONDS = 0.2  # launchers forget what was printed just before an abort, unless they get time to forward it
_exit_now = os._exit
temp_files: set[str] = set()  # the files of calls under way, removed if the job ends meanwhile
_announce: Callable[[], object] | None = None
_explain: Callable[[], object] | None = None


def at_end(announce: Callable[[], object] | None, explain: Callable[[], object] | None) -> None:
    """Register what to call before this process ends the job, and to find dead ranks after a transfer has failed."""
    global _announce, _explain
    _announce, _explain = announce, explain


def _try(step: Callable[[], object] | None) -> None:
    """Take a step on the way to the end of the job, and go on if it fails."""
    try:
        if step is not None:
            step()
    except Exception:
        print_error(f"hpcdist: the job ends, in spite of this error\n{traceback.format_exc()}")


def watched() -> bool:
    """Whether the other ranks wait for this process, from init() to finalize()."""
    return _announce is not None


def explain() -> None:
    """Print which ranks are dead or stopped, if some are."""
    _try(_explain)


def forget() -> None:
    """Forget the world in a child process: the job belongs to its parent."""
    at_end(None, None)
    temp_files.clear()


def job(status: int, forward: float = _FORWARD_SECONDS) -> NoReturn:
    """End every process of the MPI job with `status`. Flushes this process's output first, and leaves the launcher
    `forward` seconds to pass it on."""
    from mpi4py import MPI

    try:
        _try(_announce)
        _try(cleanup)
        if threading.current_thread() is threading.main_thread():
            flush()
        else:  # the main thread may hang in a print
            flusher = threading.Thread(target=flush, daemon=True)
            flusher.start()
            flusher.join(_FLUSH_SECONDS)
        time.sleep(forward)
    finally:  # also after an interruption such as Ctrl-C
        try:
            if not MPI.Is_finalized():
                MPI.COMM_WORLD.Abort(status)
        finally:
            _exit_now(status)  # MPICH returns, and has its launcher end the processes


def print_error(text: str, stream: TextIO | None = None) -> None:
    """Print to a stream, the program's standard error by default, or else to the one that Python found at its start."""
    stream = stream or sys.stderr or sys.__stderr__
    try:
        if stream is not None:
            print(text, file=stream, flush=True)
    except Exception:  # it is closed, or an object of the program's own
        if sys.__stderr__ is not None:  # else descriptor 2 may be any file
            with suppress(OSError):
                os.write(2, f"{text}\n".encode(errors="backslashreplace"))


def flush() -> None:
    """Flush the standard streams."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with suppress(Exception):  # as in print_error()
                stream.flush()


def cleanup() -> None:
    """Remove the files that an aborted job would leave."""
    for path in (*temp_files, *_shared_memory()):
        with suppress(OSError):
            os.unlink(path)


def _shared_memory() -> set[str]:
    """Return the files of MPI's shared memory on this node, which stay when a job is aborted."""
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
    what: str  # what has happened to the call

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


class InTransfer(_Together):
    """A context in which data move: an exception there cannot be agreed on; only a RankError has been already."""

    __slots__ = ()
    agreed = RankError
    what = "failed in the middle of a transfer"


class InStep(_Together):
    """A context in which a rank agrees with others and moves data with them: an exception from elsewhere, such as a
    signal's handler, leaves this rank out of step with the others."""

    __slots__ = ()
    agreed = HpcdistError
    what = "was interrupted, which leaves this rank out of step with the others"


def fail(error: BaseException, what: str) -> NoReturn:
    """End the job for an error on this rank alone, after which it cannot go on together with the others."""
    text = coded("HD607", f"hpcdist: {what}, and the job ends")
    print_error(f"{''.join(traceback.format_exception(error))}{with_hint(text)}")
    try:
        explain()
    finally:
        job((error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 0) & 0xFF or 1)
