"""One rank's failure ends the whole job, with its reason and its exit status.

Without this, every MPI would hang: the failing rank waits in ``MPI_Finalize`` for ranks that wait for its data. If a
step before the end fails, such as printing or removing files, the job still ends.

An uncaught exception, or a non-zero ``sys.exit``, is such a failure. ``python -m mpi4py`` (mpi4py/run.py) does the
same, but needs another command line. If the process continues, so does the job: after an exit that is caught, or is
raised in another thread, in an ``atexit`` handler or in a forked child, and after an error at an interactive prompt.

An exit that is not seen here (``raise SystemExit(n)`` outside a ``with hpcdist.init()`` block, the builtin ``exit``)
ends the program as usual: the other ranks get an error at their next verb, or the deadline of the end of the program.

From install() to uninstall(), three names are replaced, because no other way gives the same promise:

- ``sys.excepthook``: without it, an error would end the process only after its threads have ended;
- ``sys.exit``: an ``atexit`` handler does not learn the status, and a rank that ends with 0 must wait for the others;
- ``os._exit``: no handler runs. MPICH's launcher ends the job before another rank can say why, and with status 0 after
  ``os._exit(0)``.
"""

from __future__ import annotations

import atexit
import io
import json
import os
import re
import socket
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any, NoReturn, TextIO

from hpcdist.activity import callsite
from hpcdist.errors import HpcdistError, RankError, coded, reason, with_hint
from hpcdist.process.replaced import Replaced
from hpcdist.process.streams import INTERRUPTED

_FLUSH_SECONDS = 1.0  # time for the output that is left
_FORWARD_SECONDS = 0.2  # launchers lose output printed just before an abort, unless they get time to forward it
_exit_now = os._exit
_replaced: Replaced | None = None  # set from install() to uninstall()
_first_hook: Callable[..., Any] | None = None  # the one found by the first install(), which cannot call ours
_last_hook: Callable[..., Any] = sys.excepthook  # the one that ours calls
_LOST = (
    "timed out",
    "connection closed",
    "connection reset",
)  # torch's errors have these words after another rank has gone
_reporting = False  # an excepthook is running
only_this_process = False  # job() ends this process alone, and at once
_status = 0  # the exit status of the SystemExit that ends the program
end_together = False  # all ranks have agreed to stop: each exits by itself, with any status
facts: dict[str, Any] = {}  # of this rank's failure, for hpcdist.tools.restarts
_facts_folder: str | None = None  # where they are written
temp_files: set[str] = set()  # the files of calls under way, removed if the job ends meanwhile
_announce: Callable[[], object] | None = None
_explain: Callable[[], object] | None = None


def at_end(announce: Callable[[], object] | None, explain: Callable[[], object] | None) -> None:
    """Register what to call before this process ends the job, and to find dead ranks after a transfer has failed."""
    global _announce, _explain
    _announce, _explain = announce, explain


def _try(step: Callable[[], object] | None) -> None:
    """Take a step on the way to the end of the job, and continue if it fails."""
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


def job(status: int, forward: float = _FORWARD_SECONDS) -> NoReturn:
    """End every process of the MPI job with `status`. Flushes this process's output first, and leaves the launcher
    `forward` seconds to pass it on."""
    if only_this_process:
        _exit_now(status)
    from mpi4py import MPI

    try:
        _try(_announce)
        facts["status"] = status
        write_facts()
        _try(cleanup)
        if threading.current_thread() is threading.main_thread():
            flush()
        else:  # the main thread may hang in a print
            flusher = threading.Thread(target=flush, daemon=True)
            flusher.start()
            flusher.join(_FLUSH_SECONDS)
        time.sleep(forward)
    finally:  # an interruption such as Ctrl-C comes here, too
        try:
            if not MPI.Is_finalized():
                MPI.COMM_WORLD.Abort(status)
        finally:
            _exit_now(status)  # MPICH returns, and has its launcher end the processes


def report_to(folder: str | None, job: str, rank: int) -> None:
    """Write the facts of a failure to this folder; None where ``hpcdist restarts`` has not started this job."""
    global _facts_folder
    _facts_folder = folder
    facts.update(job=job, rank=rank, host=socket.gethostname())


def write_facts() -> None:
    """Write the facts of this failure to a file: all of them, or nothing."""
    if _facts_folder:
        with suppress(OSError):
            name = f"{_facts_folder}/rank-{facts['rank']}"
            with open(name, "w") as file:
                json.dump(facts, file)
            os.replace(name, f"{name}.json")


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
            with suppress(Exception):  # see print_error()
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


class InTransfer:
    """A context in which data move: an exception there cannot be agreed on, and ends the job.

    Alone (`size` 1), the exception goes to the caller; so does one of the class `agreed`, which all ranks raise alike.
    """

    __slots__ = ("size", "verb")
    agreed: type[BaseException] = RankError
    what = "failed in the middle of a transfer"

    def __init__(self, verb: str, size: int) -> None:
        self.verb = verb
        self.size = size

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.check(self.verb, self.size, error)

    @classmethod
    def check(cls, verb: str, size: int, error: BaseException) -> None:
        """End the job for an error that this rank alone has."""
        if size > 1 and not isinstance(error, cls.agreed):
            fail(error, f"{verb}() {cls.what}")


class InStep(InTransfer):
    """A context in which a rank agrees with others and moves data with them: an exception from elsewhere, such as a
    signal's handler, leaves this rank out of step with the others."""

    __slots__ = ()
    agreed = HpcdistError
    what = "was interrupted, which leaves this rank out of step with the others"


def fail(error: BaseException, what: str) -> NoReturn:
    """End the job for an error on this rank alone, after which it cannot go on together with the others."""
    _note(error, error.__traceback__)
    text = coded("HD607", f"hpcdist: {what}, and the job ends")
    print_error(f"{''.join(traceback.format_exception(error))}{with_hint(text)}")
    try:
        explain()
    finally:
        job((error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 0) & 0xFF or 1)


class _Exit(SystemExit):
    """A SystemExit that notes its status when it ends the program.

    CPython passes an uncaught SystemExit to no hook. But it reads the exception's `code` when no Python frame is left,
    and a program that catches the exception reads it from a frame.
    """

    __module__, __qualname__ = "builtins", "SystemExit"  # Python prints this name where it ignores an exit

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
    """Replace a foreign SystemExit by one that is noticed when it ends the program."""
    if _replaced is not None and type(error) is SystemExit:
        raise _Exit(*error.args).with_traceback(error.__traceback__)


def _os_exit(status: int) -> NoReturn:
    """Replaces ``os._exit``: this process ends at once, and the other ranks, which may wait for it, with it."""
    from mpi4py import MPI

    if watched() and not MPI.Is_finalized():  # after finalize() nobody waits
        who = f"rank {MPI.COMM_WORLD.rank} ({socket.gethostname()}, pid {os.getpid()})"
        what = f"os._exit({status}) at {callsite.place(sys._getframe(1))}"
        print_error(with_hint(coded("HD604", f"hpcdist: {what} on {who}, without finalize(): the job ends")))
        job(status or 1)
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
        (_first_hook or sys.__excepthook__)(kind, error, trace)
        return
    _report(kind, error, trace)
    if _replaced is not None and not _goes_on():
        if isinstance(sys.stderr, io.StringIO):  # torch's hook prints it after this one: too late
            from mpi4py import MPI

            text, prefix = sys.stderr.getvalue().rstrip(), f"[rank{MPI.COMM_WORLD.rank}]: "
            print_error(text if text.startswith(prefix) else textwrap.indent(text, prefix), sys.__stderr__)
        if any(word in str(error).lower() for word in _LOST):
            explain()
        job(INTERRUPTED if issubclass(kind, KeyboardInterrupt) else 1)


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    global _reporting
    _reporting = True
    _note(error, trace)
    try:
        _last_hook(kind, error, trace)
    except Exception:  # torch's hook raises where sys.stderr is closed or None
        print_error("".join(traceback.format_exception(kind, error, trace)).rstrip())
    finally:
        _reporting = False


def _note(error: BaseException, trace: TracebackType | None) -> None:
    facts["error"] = f"{type(error).__name__}: {reason(error)}"
    for frame, _ in traceback.walk_tb(trace):
        facts["place"] = callsite.place(callsite.outside(frame))


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
    if _replaced is not None and _status and not end_together:
        job(_status)


def install() -> None:
    """From now on, an uncaught exception or a non-zero ``sys.exit`` of this process ends the whole MPI job."""
    global _replaced, _first_hook, _last_hook
    if _replaced is not None:
        return
    _first_hook = _first_hook or sys.excepthook
    _last_hook = sys.excepthook
    _replaced = Replaced()
    for owner, name, value in ((sys, "exit", _sys_exit), (os, "_exit", _os_exit), (sys, "excepthook", _excepthook)):
        _replaced.set(owner, name, value)
    atexit.register(check)


@contextmanager
def without_hook() -> Iterator[None]:
    """A context in which torch.distributed sets its hook, which calls the one that it finds, and which ours then calls.

    torch's hook collects the output of the one that it has found. It would be lost if that one ended the job.
    """
    global _last_hook
    if sys.excepthook is not _excepthook:
        yield
        return
    sys.excepthook = _last_hook
    try:
        yield
    finally:
        _last_hook, sys.excepthook = sys.excepthook, _excepthook


def uninstall() -> list[str]:
    """Put back what install() has replaced.

    Returns:
        The names that the program, or another library, has replaced since: they are left as they are.
    """
    global _replaced, _last_hook
    replaced, _replaced, _last_hook = _replaced, None, _first_hook or _last_hook
    atexit.unregister(check)
    return [] if replaced is None else replaced.put_back()


def _in_child() -> None:
    """Leave forked child processes to themselves: the job is their parent's."""
    at_end(None, None)
    temp_files.clear()
    uninstall()


os.register_at_fork(after_in_child=_in_child)
