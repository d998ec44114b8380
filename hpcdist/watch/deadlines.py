"""Deadlines: the user's timeouts in seconds, and those of the steps that the watch of the ranks cannot see: the start
and the end of MPI, and init() until the ranks have met."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from math import inf
from numbers import Real
from types import FrameType

from hpcdist.activity import callsite
from hpcdist.errors import HangError, coded, refusal, with_hint
from hpcdist.process import abort, forks

DEFAULT = 1800.0  # seconds, torch.distributed's own default
_EVER = 100 * 365.25 * 86400  # seconds: no limit, yet a number that threads, poll() and torch can handle
_LEAST = 1e-3  # seconds: torch's unit
# A shell that ends its parent $2 with the message $1 after $0 seconds, unless its standard input is closed before.
_GUARD = """
timeout "$0" cat
if [ $? -eq 124 ] && grep -q "^PPid:.$2$" /proc/$$/status; then
    printf "%s\\n" "$1" >&2
    kill -9 "$2"
fi
"""


def deadline(timeout: object, env_timeout: str | None) -> float:
    """Return the deadline of calls in seconds: at most a hundred years.

    Args:
        timeout: argument of init(), if any.
        env_timeout: value of HPCDIST_TIMEOUT, which is used without that argument; without both, torch's default.

    Raises:
        TypeError, ValueError: if it is not a positive time.
    """
    name = "timeout"
    if timeout is None:
        if not env_timeout:
            return DEFAULT
        name = "HPCDIST_TIMEOUT"
        try:
            timeout = float(env_timeout)
        except ValueError:
            raise refusal(ValueError, "HD114", f"{name} is {env_timeout!r}, expected seconds") from None
    return _seconds(name, timeout, _LEAST)


def patience(timeout: object, name: str = "timeout") -> float | None:
    """Return the timeout of a handle's wait(), or another argument of this `name`, in seconds; None for no limit.

    Raises:
        TypeError, ValueError: if it is not a time, or negative.
    """
    if timeout is None:
        return None
    seconds = _seconds(name, timeout, 0)
    return seconds if seconds < _EVER else None


def _seconds(name: str, timeout: object, least: float) -> float:
    if isinstance(timeout, timedelta):
        timeout = timeout.total_seconds()
    if not isinstance(timeout, Real) or isinstance(timeout, bool):
        raise refusal(TypeError, "HD114", f"{name} must be a timedelta or seconds, got {type(timeout).__name__}")
    try:
        seconds = float(timeout)
    except OverflowError:  # an integer
        seconds = -inf if timeout < 0 else inf
    if not seconds >= least:  # nan fails this test, too
        text = f"{name} is {seconds:g}, expected seconds, {least:g} at least (inf for no limit)"
        raise refusal(ValueError, "HD114", text)
    return min(seconds, _EVER)


def _not_agreed(timeout: object, env_timeout: str | None) -> float:
    """Return the deadline of this rank, before it is checked on all ranks; the default if it is wrong."""
    try:
        return deadline(timeout, env_timeout)
    except (TypeError, ValueError):  # raised on all ranks after they have met
        return DEFAULT


def starting_mpi(timeout: object, env_timeout: str | None, launched: str) -> AbstractContextManager[object]:
    """A context in which MPI starts, and which ends this process if MPI has not started by the deadline.

    MPI_Init waits for ever for a process that has ended or stopped before it, unless the launcher notices. Hydra does
    not, Open MPI's mpirun does not after status 0, and srun does not without --kill-on-bad-exit.

    Args:
        timeout, env_timeout: as those of :func:`deadline`, not yet checked.
        launched: what is known of the launcher's processes; "" if there is no launcher.
    """
    if not launched or forks.mpi_runs():
        return nullcontext()
    seconds = _not_agreed(timeout, env_timeout)
    waits = f"{callsite.where('init').decode()} has waited for {seconds:g} s in MPI_Init, and this process ends"
    text = f"{waits}: {launched}, and not all of them have started MPI. One may have ended or stopped: see the output"
    if "srun" in launched:
        text += ". srun --kill-on-bad-exit=1 ends a job when one of its processes fails"
    return guard(seconds, coded("HD120", text))


def guard(seconds: float, text: str) -> AbstractContextManager[object]:
    """Return a context that ends this process with a message if it takes longer than so many seconds.

    It works while native code holds Python's lock, as mpi4py does during MPI_Init and MPI_Finalize, because a small
    child process waits. If that cannot be started, there is no deadline.
    """
    head = f"hpcdist: {socket.gethostname()}, pid {os.getpid()}: "
    words = ["sh", "-c", _GUARD, f"{seconds:.3f}", with_hint(head + text), str(os.getpid())]
    if seconds >= _EVER:
        return nullcontext()
    try:
        return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    except OSError:
        return nullcontext()


def guard_end(seconds: float, rank: int) -> None:
    """End this process with a message if it has not ended after so many seconds, in MPI_Finalize or before."""
    what = f"rank {rank} has not ended {seconds:g} s after the last call of all ranks. An exit handler, a destructor or"
    child = guard(seconds, coded("HD121", f"{what} MPI_Finalize hangs, on this rank or on another one"))
    if isinstance(child, subprocess.Popen) and child.stdin is not None:
        os.dup(child.stdin.fileno())  # Python closes its own before MPI_Finalize, the system at the end of the process
        child.returncode = 0  # it is not waited for


def first_meeting(timeout: object, env_timeout: str | None, size: int, library: str) -> AbstractContextManager[None]:
    """A context that ends the job if the ranks have not met by the deadline; each can only report itself.

    Args:
        timeout, env_timeout: as those of :func:`deadline`, not yet checked.
        size: number of ranks that must meet.
        library: name of the MPI library.
    """
    seconds = _not_agreed(timeout, env_timeout)
    frame = callsite.outside(sys._getframe())
    waits = f"{callsite.where('init').decode()} has waited for {seconds:g} s"
    text = f"{waits}: the {size} ranks have not met, some may not have called it"
    if library.startswith("Open MPI"):  # it believes that an address of two hosts, as of docker0, leads to the other
        text += "; or Open MPI does not reach the other nodes: export OMPI_MCA_btl_tcp_if_include=NETWORK/BITS, theirs"
    return limited(seconds, text, frame) if size > 1 else nullcontext()


@contextmanager
def limited(seconds: float, text: str, frame: FrameType | None = None) -> Iterator[None]:
    """A context that ends the job with this text after so many seconds."""

    def late() -> None:
        abort.show(HangError("HD601", text), frame)
        abort.job(1)

    timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), late)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
