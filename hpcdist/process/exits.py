"""How this process ends: an uncaught exception, or a non-zero ``sys.exit``, of one rank ends the whole MPI job.

The idea is that of ``python -m mpi4py`` (mpi4py/run.py), without asking the user to launch in another way. What does
not end the process does not end the job: an exit that is caught, or that is raised in another thread, in an ``atexit``
handler or in a forked child, and an error at an interactive prompt.

An exit that is not seen here (``raise SystemExit(n)`` outside a ``with hpcdist.init()`` block, the builtin ``exit``)
ends the program as usual: the other ranks get an error at their next verb, or the deadline of the end of the program.
"""

from __future__ import annotations

import atexit
import io
import os
import socket
import sys
import threading
import traceback
from types import FrameType, TracebackType
from typing import Any, NoReturn

from hpcdist.errors import coded, with_hint
from hpcdist.process import abort

__all__ = ["check", "install", "replace", "show", "uninstall"]

_exit, _exit_now = sys.exit, os._exit
_first_hook = _last_hook = sys.excepthook  # those found when install() was first and last called
_LOST = ("timed out", "connection closed", "connection reset")  # in torch's errors after another rank has gone
_reporting = False  # an excepthook is running
_installed = False
_status = 0  # the exit status of the SystemExit that ends the program


class _Exit(SystemExit):
    """A SystemExit that notes its status when it ends the program.

    CPython passes an uncaught SystemExit to no hook, but it reads the exception's `code`, and does so when no Python
    frame is left; code that catches the exception reads it from a frame.
    """

    __module__, __qualname__ = "builtins", "SystemExit"  # what Python prints where it ignores an exit

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name == "code" and sys._getframe().f_back is None:
            global _status
            # sys.exit("message") prints the message and exits with 1
            _status = value & 0xFF if isinstance(value, int) else int(value is not None)
        return value

    def __reduce__(self) -> tuple[Any, ...]:
        return SystemExit, self.args


def _sys_exit(code: Any = None, /) -> NoReturn:
    raise _Exit(code)


def replace(error: BaseException | None) -> None:
    """Raise in the place of a SystemExit that somebody else has made one that is noticed when it ends the program."""
    if _installed and type(error) is SystemExit:
        raise _Exit(*error.args).with_traceback(error.__traceback__)


def _os_exit(status: int) -> NoReturn:
    """Replaces ``os._exit``: this process ends at once, and the other ranks, which may wait for it, with it."""
    from mpi4py import MPI

    if abort.watched() and not MPI.Is_finalized():  # not after finalize()
        caller = sys._getframe(1)
        where = f"{caller.f_code.co_filename}:{caller.f_lineno}"
        who = f"rank {MPI.COMM_WORLD.rank} ({socket.gethostname()}, pid {os.getpid()})"
        text = f"hpcdist: os._exit({status}) at {where} on {who}, without finalize(): the job ends"
        abort.print_error(with_hint(coded("HD604", text)))
        abort.job(status or 1)
    _exit_now(status)


def show(error: BaseException, frame: FrameType | None) -> None:
    """Print an error as an uncaught one, with the stack that ends at `frame` as its traceback."""
    trace = None
    while frame is not None:
        trace = TracebackType(trace, frame, frame.f_lasti, frame.f_lineno)
        frame = frame.f_back
    _report(type(error), error, trace)


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the traceback as Python would, then end the job if the error ends this process."""
    if _reporting:  # a hook that was set after install(), and calls the one it found
        _first_hook(kind, error, trace)
        return
    _report(kind, error, trace)
    if _installed and not _goes_on():
        if isinstance(sys.stderr, io.StringIO):  # of torch's hook, which prints it after this one: too late
            abort.print_error(sys.stderr.getvalue().rstrip(), sys.__stderr__)
        if any(word in str(error).lower() for word in _LOST):
            abort.explain()
        abort.job(1)


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    global _reporting
    _reporting = True
    try:
        _last_hook(kind, error, trace)
    except Exception:  # torch's hook raises where sys.stderr is closed or None
        abort.print_error("".join(traceback.format_exception(kind, error, trace)).rstrip())
    finally:
        _reporting = False


def _goes_on() -> bool:
    """Whether the program may go on after its hook was called: in another thread, by the program itself, as coverage
    does, or where Python has, or will have, a prompt."""
    if threading.current_thread() is not threading.main_thread() or sys.flags.inspect or hasattr(sys, "ps1"):
        return True
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
    # Python itself calls the hooks after all frames of the program have ended.
    return frame.f_code.co_name == "<module>" or "runpy" in frame.f_code.co_filename


def check() -> None:
    """Called at the end of the program: end the job if this process exits with a non-zero status."""
    if _installed and _status:
        abort.job(_status)


def install() -> None:
    """From now on, an uncaught exception or a non-zero ``sys.exit`` of this process ends the whole MPI job.

    Call it again after somebody else may have set ``sys.excepthook``, as torch.distributed does: its hook collects
    what the others print, which would be lost if one of those ended the job.
    """
    global _installed, _first_hook, _last_hook
    if not _installed:
        _installed = True
        sys.exit, os._exit = _sys_exit, _os_exit
        _first_hook = sys.excepthook
        atexit.register(check)
    if sys.excepthook is not _excepthook:
        _last_hook = sys.excepthook
        sys.excepthook = _excepthook


def uninstall() -> None:
    """Restore Python's own behaviour, for an exit with a non-zero status that all ranks have agreed on."""
    global _installed
    _installed = False
    sys.exit, os._exit = _exit, _exit_now
    atexit.unregister(check)


def _in_child() -> None:
    """Leave forked child processes to themselves: the job is their parent's."""
    abort.forget()
    if _installed:
        uninstall()
        sys.excepthook = _first_hook


os.register_at_fork(after_in_child=_in_child)
