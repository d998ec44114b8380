"""How this process ends: an uncaught exception, or a non-zero ``sys.exit``, of one rank ends the whole MPI job.

The idea is that of ``python -m mpi4py`` (mpi4py/run.py), without asking the user to launch in another way. What does
not end the process does not end the job: an exit that somebody catches, in another thread, in an ``atexit`` handler, in
a forked child, or an error at an interactive prompt.
"""

from __future__ import annotations

import atexit
import builtins
import os
import socket
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from contextlib import suppress
from opcode import opname
from types import FrameType, TracebackType
from typing import Any, NoReturn

from hpcdist.process import abort

__all__ = ["arm", "at_fork", "check", "disarm", "note", "show"]

_exit, _exit_now = sys.exit, os._exit
_forks = False  # whether children are looked after
_first_hook = _last_hook = sys.excepthook  # those before arm() was first called, and last called
_reporting = False
_armed = False
_LOST = ("timed out", "connection closed", "connection reset")  # what torch says when another rank is gone
_CHAIN = 100  # errors that were raised in handling each other
_PROMPTS = ("<stdin>", "<python-input", "<console>", "<input>")  # the files of what is typed
_status: int | None = None  # the exit status of a SystemExit that nobody caught
_noted: Any = None  # the code of a SystemExit that passed by on its way out
_last: weakref.ref[_Exit] | None = None  # the latest sys.exit, for one that a reference cycle keeps alive
_outermost: FrameType | None = None  # the frame the program began in


class _Exit(SystemExit):
    """What ``sys.exit`` raises while armed: a SystemExit that notices when nobody catches it.

    CPython shows an uncaught SystemExit to no hook. But it drops the exception when no Python frame is left, whereas
    one that was caught dies inside a frame: that tells the two apart.
    """

    over = False  # it was caught, and another one was raised meanwhile; or the interpreter goes on at a prompt

    def __del__(self) -> None:
        if sys._getframe().f_back is not None or self.over:
            return
        _settle(self)
        _uncaught(self.code)

    def __reduce__(self) -> tuple[Any, ...]:
        return SystemExit, self.args


_Exit.__name__ = _Exit.__qualname__ = "SystemExit"  # as it is shown where Python shows one
_Exit.__module__ = "builtins"


def _settle(error: BaseException | None) -> None:
    """Neither this error nor those in whose handling it was raised say any more how this process ends."""
    for _ in range(_CHAIN):
        if isinstance(error, _Exit):
            error.over = True
        error = error and error.__context__


def _uncaught(code: Any) -> None:
    global _status
    if isinstance(code, int):
        _status = code & 0xFF
    elif code is not None:
        _status = 1  # sys.exit("message") prints the message and exits with 1


def _os_exit(status: int) -> NoReturn:
    """What ``os._exit`` does while armed: this process ends at once, and the others, which may wait for it, with it."""
    from mpi4py import MPI

    if abort.watched() and not MPI.Is_finalized():  # not after finalize()
        caller = sys._getframe(1)
        where = f"{caller.f_code.co_filename}:{caller.f_lineno}"
        abort.say(f"hpcdist: os._exit({status}) at {where} on {_who()}, without finalize(): the job ends")
        abort.job(status or 1)
    _exit_now(status)


def _who() -> str:
    from mpi4py import MPI

    return f"rank {MPI.COMM_WORLD.rank} ({socket.gethostname()}, pid {os.getpid()})"


def _sys_exit(code: Any = None, /) -> NoReturn:
    global _last
    main = threading.main_thread()
    if threading.current_thread() is not main or not main.is_alive():  # ends that thread, or an atexit handler
        _exit(code)
    error = _Exit(code)
    _last = weakref.ref(error)
    try:
        raise error
    finally:
        del error  # or this frame and the exception keep each other alive


def at_fork(step: Callable[[], object]) -> None:
    """In child processes that are forked from here on: do this, and leave them to themselves, as they would be without
    us. What is done at the first call counts."""
    global _forks
    if not _forks:
        _forks = True
        os.register_at_fork(after_in_child=step)
        os.register_at_fork(after_in_child=_release)


def _release() -> None:
    abort.forget()
    if _armed:
        disarm()
        sys.excepthook = _first_hook


def show(error: BaseException, frame: FrameType | None) -> None:
    """Print an error as one that nobody has caught, with the stack that ends at `frame` for its traceback."""
    trace = None
    while frame is not None:
        trace = TracebackType(trace, frame, frame.f_lasti, frame.f_lineno)
        frame = frame.f_back
    _report(type(error), error, trace)


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the traceback as it would be without us, then end the job, if this process ends by it."""
    if _reporting:  # a hook that was set after arm(), and calls on to the one it found
        _first_hook(kind, error, trace)
        return
    _report(kind, error, trace)
    _settle(error)
    if not _armed or _goes_on(trace):
        return
    if any(word in str(error).lower() for word in _LOST):
        abort.explain()
    abort.job(1)


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    global _reporting
    _reporting = True
    try:
        _last_hook(kind, error, trace)
    except Exception:  # torch's does not print where sys.stderr is closed, or None
        abort.say("".join(traceback.format_exception(kind, error, trace)).rstrip())
    finally:
        _reporting = False


def _goes_on(trace: TracebackType | None) -> bool:
    """Whether the program goes on after its hook was called: the hook of another thread, of a program that calls it
    itself, as code.interact() and coverage do, or at a prompt, or before one (``python -i``)."""
    if threading.current_thread() is not threading.main_thread() or _runs(sys._getframe()) or _prompt_follows():
        return True
    return hasattr(sys, "ps1") and (trace is None or _typed(trace.tb_frame))


def _runs(frame: FrameType) -> bool:
    """Whether a stack has the program's own code at its bottom, and not only hooks, which Python calls when all is
    left."""
    while frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_name == "<module>" or "runpy" in frame.f_code.co_filename


def _prompt_follows() -> bool:
    """Whether Python was told to go on at a prompt when the program has ended in whatever way."""
    if sys.flags.interactive:
        return True
    with suppress(OSError):  # it is closed
        return bool(sys.flags.inspect) and os.isatty(0)
    return False


def _typed(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_PROMPTS)


def check() -> None:
    """At the end of the program: end the job if this process leaves with a non-zero status that it alone knows of."""
    prompt = _prompt_follows() or (hasattr(sys, "ps1") and _outermost is not None and _typed(_outermost))
    if _outermost is not None and not prompt and _raised(_outermost):  # the program did not reach its end
        alive = _last() if _last else None
        trace = alive.__traceback__ if alive else None
        # Else the frame that has caught it went on, and it is kept by somebody.
        left = trace is not None and _raised(trace.tb_frame)
        _uncaught(alive.code if alive is not None and left else _noted)
    if _armed and _status:
        abort.job(_status)


def _raised(frame: FrameType) -> bool:
    """Whether the last thing that a frame did was to raise."""
    last_instruction = opname[frame.f_code.co_code[frame.f_lasti]]
    return not last_instruction.startswith(("RETURN", "YIELD", "RESUME", "SEND"))


def note(error: BaseException | None) -> None:
    """Remember a SystemExit that leaves a ``with hpcdist.init()`` block, whoever raised it."""
    global _noted
    if isinstance(error, SystemExit):
        _noted = error.code


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
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        while frame is not None and frame.f_back is not None:
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
