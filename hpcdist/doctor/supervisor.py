"""Run the examination in a child process, so that a hang or a crash is a finding, and not the end of the doctor.

The child is forked before MPI starts and takes this process's place in the job, as a program that a shell script
starts under mpirun does. A thread could not watch it: an MPI library that hangs may hold Python's lock.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

from hpcdist.doctor.findings import Facts, Finding
from hpcdist.process import abort

__all__ = ["Line", "Outcome", "watch"]

_PDEATHSIG = 1  # linux/prctl.h: set the signal that a process gets when its parent ends
_BUG = "report it as a bug of hpcdist"
_KILL_SECONDS = 2  # a process that waits for a dead file system cannot be killed


class _TerminatedError(Exception):
    """The launcher ends this process."""


def _end(*_: object) -> NoReturn:
    raise _TerminatedError


class Line:
    """Messages from the examining process to its supervisor."""

    def __init__(self, fd: int, limit: float) -> None:
        self._fd = fd
        self._limit = limit

    def stage(self, name: str, fix: str, together: bool = False) -> None:
        """Begin a stage: if the examination hangs from now on, `name` is the reason, and `fix` may help.

        A stage in which the ranks wait for each other (`together`) may take twice as long: a rank that hangs alone must
        be found first.
        """
        self._send({"stage": [name, fix], "seconds": self._limit * (2 if together else 1)})

    def facts(self, ranks: Sequence[Facts]) -> None:
        """Report what is known of these ranks so far."""
        self._send({"facts": list(ranks)})

    def done(self) -> None:
        self._send({"done": True})

    def close(self) -> None:
        os.close(self._fd)

    def _send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message, default=str).encode() + b"\n"
        while data:
            data = data[os.write(self._fd, data) :]


@dataclass
class Outcome:
    """The messages of an examination.

    Attributes:
        facts: facts of each rank; of this one alone, if it ended before it asked the others.
        findings: one about its end, if it failed.
        done: whether it succeeded.
        terminated: whether it failed because the launcher ended this process.
    """

    facts: list[Facts]
    findings: list[Finding] = field(default_factory=list)
    done: bool = False
    terminated: bool = False
    stage: str = "the start"
    fix: str = ""
    deadline: float = 0.0

    def take(self, message: dict[str, Any]) -> None:
        """Process a message of the examining process."""
        # Not by the rank, which may only be known later.
        new = {facts["id"]: facts for facts in message.get("facts", [])}
        self.facts = [new.pop(facts["id"], facts) for facts in self.facts] + list(new.values())
        self.done = message.get("done", self.done)
        if "stage" in message:
            self.stage, self.fix = message["stage"]
            self.deadline = time.monotonic() + message["seconds"]


def watch(examine: Callable[[Line], None], facts: Facts, limit: float) -> Outcome:
    """Run `examine` in a child process, which has `limit` seconds for each stage, and is killed if it hangs."""
    there, here = os.pipe()
    abort.flush()  # or both processes print what is in their buffers
    child = os.fork()
    if child == 0:
        os.close(there)
        _child(examine, Line(here, limit))
    os.close(here)
    outcome = Outcome([facts], deadline=time.monotonic() + limit)
    end = None
    signal.signal(signal.SIGTERM, _end)
    try:
        if not _listen(there, outcome):
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
        outcome.findings.append(Finding(outcome.stage, "broken", text, outcome.fix or _BUG))
    return outcome


def _listen(fd: int, outcome: Outcome) -> bool:
    """Process the messages of the child until it ends; return False if it hangs."""
    rest = b""
    while select.select([fd], [], [], max(0.0, outcome.deadline - time.monotonic()))[0]:
        data = os.read(fd, 2**16)
        if not data:
            return True
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            outcome.take(json.loads(line))
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


def _child(examine: Callable[[Line], None], line: Line) -> NoReturn:
    status = 1
    leave = os._exit  # which hpcdist.init() replaces
    # MPI_Abort would end the supervisors before they can print.
    abort.job = lambda status, *_, **__: leave(status)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with suppress(AttributeError):
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)  # the launcher may end only the process that it started
    try:
        examine(line)
        line.done()
        status = 0
    except KeyboardInterrupt:  # of the doctor, too, which ends without a report
        pass
    except BaseException:  # it must not go on as the program that was forked
        traceback.print_exc()
    finally:
        abort.flush()
        if status == 0:
            line.close()
            # MPICH 5 tells its launcher in an exit handler of C's that MPI has ended; without it, mpirun kills the
            # other supervisors at the first one's end. Python's own handlers belong to the parent.
            ctypes.CDLL(None).exit(0)
        leave(status)
