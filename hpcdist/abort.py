"""One rank's failure ends the whole job, with its traceback and its exit status.

Left alone, every MPI hangs there: the failing rank waits in ``MPI_Finalize`` for ranks that wait for its data. The
idea is that of ``python -m mpi4py`` (mpi4py/run.py), without asking the user to launch in another way.
"""

from __future__ import annotations

import atexit
import builtins
import os
import re
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from contextlib import suppress
from opcode import opname
from types import FrameType, TracebackType
from typing import Any, NoReturn

from hpcdist.errors import HpcdistError, RankError

__all__ = [
    "LITTER",
    "InStep",
    "Transfer",
    "arm",
    "at_end",
    "at_fork",
    "check",
    "disarm",
    "fail",
    "job",
    "note",
    "say",
    "show",
    "tidy",
]

_FLUSH_SECONDS = 1.0  # for what is left to print
_FORWARD_SECONDS = 0.2  # launchers forget what was printed just before an abort, unless they get time to forward it
_exit, _exit_now = sys.exit, os._exit
_forks = False  # whether children are looked after
_first_hook = _last_hook = sys.excepthook  # those before arm() was first called, and last called
_reporting = False
_armed = False
_LOST = ("timed out", "connection closed", "connection reset")  # what torch says when another rank is gone
LITTER: set[str] = set()  # files for one call: a job that ends in it is not to leave them behind
_status: int | None = None  # the exit status of a SystemExit that nobody caught
_noted: Any = None  # the code of a SystemExit that passed by on its way out
_last: weakref.ref[_Exit] | None = None  # the latest sys.exit, for one that a reference cycle keeps alive
_outermost: FrameType | None = None  # the frame the program began in
_at_end: Callable[[], object] | None = None
_explain: Callable[[], object] | None = None


class _Exit(SystemExit):
    """What ``sys.exit`` raises while armed: a SystemExit that notices when nobody catches it.

    CPython shows an uncaught SystemExit to no hook. But it drops the exception when no Python frame is left, whereas
    one that was caught dies inside a frame: that tells the two apart.
    """

    def __del__(self) -> None:
        if sys._getframe().f_back is None:
            _uncaught(self.code)


def _uncaught(code: Any) -> None:
    global _status
    if isinstance(code, int):
        _status = code & 0xFF
    elif code is not None:
        _status = 1  # sys.exit("message") prints the message and exits with 1


def _os_exit(status: int) -> NoReturn:
    """What ``os._exit`` does while armed: this process ends at once, and the others, which may wait for it, with it."""
    from mpi4py import MPI

    if _at_end is not None and not MPI.Is_finalized():  # not after finalize()
        caller = sys._getframe(1)
        where = f"{caller.f_code.co_filename}:{caller.f_lineno}"
        say(f"hpcdist: os._exit({status}) at {where} on {_who()}, without finalize(): the job ends")
        job(status or 1)
    _exit_now(status)


def _who() -> str:
    from mpi4py import MPI

    return f"rank {MPI.COMM_WORLD.rank} ({socket.gethostname()}, pid {os.getpid()})"


def _sys_exit(code: Any = None, /) -> NoReturn:
    global _last
    error = _Exit(code)
    _last = weakref.ref(error)
    try:
        raise error
    finally:
        del error  # or this frame and the exception keep each other alive


def at_end(tell: Callable[[], object] | None, explain: Callable[[], object] | None) -> None:
    """What to call before this process ends the job, and when a transfer has failed, to find who is gone."""
    global _at_end, _explain
    _at_end, _explain = tell, explain


def job(status: int, forward: float = _FORWARD_SECONDS) -> NoReturn:
    """End every process of the MPI job with `status`. Flushes this process's output first, and leaves the launcher
    `forward` seconds to pass it on."""
    from mpi4py import MPI

    if _at_end is not None:
        _at_end()
    tidy()
    if threading.current_thread() is threading.main_thread():
        _flush()
    else:  # the main thread may be in the middle of a print that does not end
        flusher = threading.Thread(target=_flush, daemon=True)
        flusher.start()
        flusher.join(_FLUSH_SECONDS)
    time.sleep(forward)
    if not MPI.Is_finalized():
        MPI.COMM_WORLD.Abort(status)
    _exit_now(status)  # MPICH returns, and has its launcher end the processes


def say(text: str) -> None:
    """Print what nobody can be told otherwise."""
    try:
        print(text, file=sys.stderr, flush=True)
    except (OSError, ValueError):  # it is closed
        with suppress(OSError):
            os.write(2, f"{text}\n".encode(errors="backslashreplace"))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with suppress(OSError, ValueError):  # it is closed
                stream.flush()


def at_fork(step: Callable[[], object]) -> None:
    """In child processes that are forked from here on: do this, and leave them to themselves, as they would be without
    us. What is done at the first call counts."""
    global _forks
    if not _forks:
        _forks = True
        os.register_at_fork(after_in_child=step)
        os.register_at_fork(after_in_child=_release)


def _release() -> None:
    global _at_end, _explain
    _at_end = _explain = None
    LITTER.clear()
    if _armed:
        disarm()
        sys.excepthook = _first_hook


def tidy() -> None:
    """Remove what would stay of a job that ends now."""
    for path in (*LITTER, *_shared_memory()):
        with suppress(OSError):
            os.unlink(path)


def _shared_memory() -> set[str]:
    """The names of the memory that MPI shares on this node, which stay when a job is aborted."""
    try:
        with open("/proc/self/maps") as maps:
            return set(re.findall(r"/dev/shm/(?:mpich_shm_|sm_segment|vader_segment)\S*", maps.read()))
    except OSError:
        return set()


def show(error: BaseException, frame: FrameType | None) -> None:
    """Print an error as one that nobody has caught, with the stack that ends at `frame` for its traceback."""
    trace = None
    while frame is not None:
        trace = TracebackType(trace, frame, frame.f_lasti, frame.f_lineno)
        frame = frame.f_back
    _report(type(error), error, trace)


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the traceback as it would be without us, then end the job."""
    if _reporting:  # a hook that was set after arm(), and calls on to the one it found
        _first_hook(kind, error, trace)
        return
    _report(kind, error, trace)
    if _armed and _explain is not None and any(word in str(error).lower() for word in _LOST):
        _explain()
    if _armed:
        job(1)


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    global _reporting
    _reporting = True
    _last_hook(kind, error, trace)
    _reporting = False


def check() -> None:
    """At the end of the program: end the job if this process leaves with a non-zero status that it alone knows of."""
    if _outermost is not None:
        last_instruction = opname[_outermost.f_code.co_code[_outermost.f_lasti]]
        if not last_instruction.startswith("RETURN"):  # the program did not reach its end
            alive = _last() if _last else None
            _uncaught(_noted if alive is None else alive.code)
    if _armed and _status:
        job(_status)


def note(error: BaseException | None) -> None:
    """Remember a SystemExit that leaves a ``with hpcdist.init()`` block, whoever raised it."""
    global _noted
    if isinstance(error, SystemExit):
        _noted = error.code


class Transfer:
    """A context in which ranks depend on each other: an exception there cannot be agreed on, and ends the job.

    Alone (`size` 1), the exception goes to the caller; so does a RankError, on which all ranks have agreed already.
    """

    __slots__ = ("size", "verb")

    def __init__(self, verb: str, size: int) -> None:
        self.verb = verb
        self.size = size

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self.size > 1 and not isinstance(error, RankError):
            fail(error, f"{self.verb}() failed in the middle of a transfer")


class InStep:
    """A context in which a rank agrees with others and moves data with them: what is raised there by anything but
    that, such as a signal's handler, leaves this rank out of step with the others, and ends the job.

    Alone (`size` 1), the exception goes to the caller; so does an error of the package, which all ranks raise alike.
    """

    __slots__ = ("size", "verb")

    def __init__(self, verb: str, size: int) -> None:
        self.verb = verb
        self.size = size

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self.size > 1 and not isinstance(error, HpcdistError):
            fail(error, f"{self.verb}() was interrupted, which leaves this rank out of step with the others")


def fail(error: BaseException, what: str) -> NoReturn:
    """End the job for an error on this rank alone, after which it cannot go on together with the others."""
    say("".join(traceback.format_exception(error)) + f"hpcdist: {what}, and the job ends")
    try:
        if _explain is not None:
            _explain()
    finally:  # whatever happens meanwhile
        job((error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 0) & 0xFF or 1)


def _exits() -> list[tuple[dict[str, Any], str]]:
    """Where the program finds an exit: sys, the builtins exit and quit, and what __main__ has imported of these."""
    places = [vars(sys), vars(builtins), vars(sys.modules["__main__"])]
    known = [_exit, *(vars(builtins).get(name, _exit) for name in ("exit", "quit"))]
    return [(place, name) for place in places for name, value in place.items() if any(value is k for k in known)]


def arm() -> None:
    """From now on, an uncaught exception or a non-zero ``sys.exit`` of this process ends the whole MPI job.

    To be called again when somebody else may have set ``sys.excepthook``, as torch.distributed does: its hook
    collects what the others print, which would be lost if the job ended in one of those.
    """
    global _armed, _outermost, _first_hook, _last_hook
    if not _armed:
        _armed = True
        os._exit = _os_exit
        frame = sys._getframe()
        while frame.f_back is not None:
            frame = frame.f_back
        _outermost = frame
        for place, name in _exits():
            place[name] = _sys_exit
        _first_hook = sys.excepthook
        atexit.register(check)
    if sys.excepthook is not _excepthook:
        _last_hook = sys.excepthook
        sys.excepthook = _excepthook


def disarm() -> None:
    """Back to Python's own behaviour, for an exit with a non-zero status that all ranks have agreed on."""
    global _armed
    _armed = False
    sys.exit, os._exit = _exit, _exit_now
    atexit.unregister(check)
