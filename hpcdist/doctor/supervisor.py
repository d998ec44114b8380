"""Run the examination in a child process, so that a hang or a crash is a finding, and not the end of the doctor.

The child is forked before MPI starts and takes this process's place in the job, as a program that a shell script
starts under mpirun does. A thread could not watch it: an MPI library that hangs may hold Python's lock.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from hpcdist.doctor.table import Facts, Finding, fix_of
from hpcdist.process import abort

__all__ = ["Outcome", "ProgressPipe", "watch"]

_PDEATHSIG = 1  # linux/prctl.h: set the signal that a process gets when its parent ends
_KILL_SECONDS = 2  # a process that waits for a dead file system cannot be killed


class _TerminatedError(Exception):
    """The launcher ends this process."""


def _end(*_: object) -> NoReturn:
    raise _TerminatedError


class ProgressPipe:
    """Messages from the examining process to its supervisor."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def step(self, name: str, alone: bool = False) -> None:
        """Begin a step: if the examination hangs from now on, this is the reason.

        A step in which the ranks wait for each other may take twice as long as one in which a rank is `alone`: a rank
        that hangs alone must be found first.
        """
        self.connection.send((name, 1 if alone else 2))

    def facts(self, ranks: Sequence[Facts]) -> None:
        """Report what is known of these ranks so far."""
        self.connection.send(ranks)

    def done(self) -> None:
        """Report that the examination has succeeded."""
        self.connection.send(None)


@dataclass
class Outcome:
    """What an examination has reported: the facts of each rank, or of this one alone; its last step; that it is done.

    If it failed, `end` is the finding about that, and `terminated` says whether the launcher ended this process.
    """

    facts: list[Facts]
    done: bool = False
    terminated: bool = False
    step: str = "the start"
    end: Finding | None = None

    def take(self, ranks: Sequence[Facts]) -> None:
        """Take the newer facts of these ranks."""
        new = {facts["id"]: facts for facts in ranks}  # not by the rank, which may only be known later
        self.facts = [new.pop(facts["id"], facts) for facts in self.facts] + list(new.values())


def watch(examine: Callable[[ProgressPipe], None], facts: Facts, limit: float) -> Outcome:
    """Run `examine` in a child process, which has `limit` seconds for each step, and is killed if it hangs."""
    there, here = Pipe(duplex=False)
    abort.flush()  # or both processes print what is in their buffers
    child = os.fork()
    if child == 0:
        there.close()
        _child(examine, ProgressPipe(here))
    here.close()
    outcome = Outcome([facts])
    end = None
    signal.signal(signal.SIGTERM, _end)
    try:
        if not _listen(there, outcome, limit):
            end = f"has not ended in time (--limit {limit:g})"
            os.kill(child, signal.SIGKILL)
        ended = _ended(child)
    except _TerminatedError:
        os.kill(child, signal.SIGKILL)
        outcome.terminated = True
        end = "the launcher has ended the job meanwhile; what the other ranks printed may tell why"
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if end is None and not outcome.done:
        how = f"killed its process by {signal.Signals(-ended).name}" if ended < 0 else f"ended with status {ended}"
        end = f"{how}; what it printed may tell why"
    if end is not None:
        outcome.done = False
        text = f"rank {outcome.facts[0]['rank']} on {facts['host']}: {end}"
        outcome.end = Finding(outcome.step, "broken", text, fix_of(outcome.step))
    return outcome


def _listen(there: Connection, outcome: Outcome, limit: float) -> bool:
    """Process the messages of the child until it ends; return False if it hangs."""
    late = time.monotonic() + limit
    while there.poll(max(0.0, late - time.monotonic())):
        try:
            message: Any = there.recv()
        except (EOFError, OSError):
            return True
        if isinstance(message, tuple):
            outcome.step, limits = message
            late = time.monotonic() + limit * limits
        elif message is None:
            outcome.done = True
        else:
            outcome.take(message)
    return False


def _ended(child: int) -> int:
    """Return the exit status of a process that is ending, or minus the signal that killed it."""
    end = time.monotonic() + _KILL_SECONDS
    while time.monotonic() < end:
        pid, code = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(code)
        time.sleep(0.005)
    return -signal.SIGKILL


def _child(examine: Callable[[ProgressPipe], None], pipe: ProgressPipe) -> NoReturn:
    status = 1
    leave = os._exit  # which hpcdist.init() replaces
    # MPI_Abort would end the supervisors before they can print.
    abort.job = lambda status, *_, **__: leave(status)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with suppress(AttributeError):
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)  # the launcher may end only the process that it started
    try:
        examine(pipe)
        pipe.done()
        status = 0
    except KeyboardInterrupt:  # of the doctor, too, which ends without a report
        pass
    except BaseException:  # it must not go on as the program that was forked
        traceback.print_exc()
    finally:
        abort.flush()
        if status == 0:
            pipe.connection.close()
            # MPICH 5 tells its launcher in an exit handler of C's that MPI has ended; without it, mpirun kills the
            # other supervisors at the first one's end. Python's own handlers belong to the parent.
            ctypes.CDLL(None).exit(0)
        leave(status)
