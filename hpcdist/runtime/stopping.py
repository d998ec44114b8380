"""Stop all ranks at the same step: after a signal to one of them, or before the time of the job is over.

A signal's handler only notes the signal. The ranks agree in :meth:`Stop.agree`, which all of them call.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, Any

from hpcdist import activity
from hpcdist.comm.team import Team
from hpcdist.control import objects
from hpcdist.errors import refusal
from hpcdist.launch import launcher
from hpcdist.process import abort
from hpcdist.validation import collective
from hpcdist.validation.collective import Call
from hpcdist.validation.local import ArgumentError, call_of, show, show_repr
from hpcdist.watch.watcher import Watch

if TYPE_CHECKING:
    from mpi4py import MPI

_DEFAULT = (signal.SIGTERM, signal.SIGUSR1)
_FATAL = {signal.SIGKILL, signal.SIGSTOP}
# Seconds in which one signal may arrive twice: Slurm sends it to mpirun, which passes it on, and to the ranks.
_TWICE = 1.0


def signals(stop_on: Any) -> list[int]:
    """Return the numbers of the signals of `stop_on`; None stands for the default.

    Raises:
        ValueError: if these are not signals that a program can handle.
    """
    numbers = _DEFAULT if stop_on is None else stop_on
    if not isinstance(numbers, (list, tuple)) or not (set(signal.Signals) - _FATAL).issuperset(numbers):
        raise refusal(
            ValueError, "HD114", f"stop_on is {show_repr(stop_on)}, expected a tuple of signals that can be handled"
        )
    return list(map(int, numbers))


class Stop:
    """The reasons of this rank to stop, and the agreement of all ranks.

    Args:
        numbers: signals.
        before: seconds before the end of the job; None if that is no reason.

    Attributes:
        reason: why all ranks stop; None before they do.
    """

    def __init__(self, watch: Watch, numbers: Sequence[int], before: float | None) -> None:
        self.reason: str | None = None
        self._watch, self._numbers, self._before = watch, numbers, before
        self._end = inf  # when the job ends (seconds of time.monotonic)
        self._noted = 0  # the first signal
        self._first = inf  # when it arrived
        self._handlers: dict[int, Any] = {}  # handlers before ours
        self._pipe: tuple[int, ...] = ()
        self._wakeup = -1  # the descriptor to which Python has written signals before
        self._every = -1  # argument of the latest agreement
        self._calls = 0  # since then
        abort.end_together = False

    def begin(self, comm: MPI.Intracomm, environ: Mapping[str, str], listen: bool) -> None:
        """Find the end of the job, and `listen`. Collective over `comm`."""
        if self._before is not None:
            left = objects.run_on_root(comm, "init", lambda: launcher.time_left(environ))
            self._end = inf if left is None else time.monotonic() + left
        with suppress(ValueError):  # this is not the main thread
            for number in self._numbers:
                if signal.getsignal(number) == signal.SIG_DFL:
                    signal.signal(number, signal.SIG_DFL)  # MPICH has set a handler of SIGUSR1, which ignores it
        if listen:
            objects.run_on_all(comm, "init", self._listen)

    @property
    def time_left(self) -> float | None:
        return None if self._end == inf else max(0.0, self._end - time.monotonic())

    def agree(self, team: Team, every: Any) -> bool:
        """Return whether all ranks stop now: see :meth:`hpcdist.World.should_stop`. Collective over the team."""
        self._calls += 1
        if self.reason is None and not (type(every) is int and every == self._every and self._calls % every):
            with activity.InCall("should_stop", team), abort.InStep("should_stop", team.size):
                self._every = -1  # if the call is refused, the next one is compared, too
                agreed = collective.exchange(team, call_of("should_stop", self._describe, every))
                self._every, self._calls = every, 0
            for rank, number in enumerate(agreed.extents):
                if number >= 0:
                    why = f"rank {rank} received {signal.Signals(number).name}" if number else None
                    self.reason = why or f"the job ends in {agreed.outs[rank]} s"
                    abort.end_together = True
                    break
        return self.reason is not None

    def _describe(self, every: Any, call: Call) -> None:
        """Describe this rank's reason: `extent` is a signal, or 0 for the time that is left, which is `out_extent`."""
        if type(every) is not int or every < 1:
            raise ArgumentError("HD204", f"every is {show(every)}, expected an int from 1 on")
        self._listen()
        call.options = (("every", every),)
        left = self.time_left
        if self._noted:
            call.extent = self._noted
        elif left is not None and self._before is not None and left <= self._before:
            call.extent, call.out_extent = 0, int(left)

    def _listen(self) -> None:
        """Handle the signals, also those for which another library has set a handler since; in the main thread."""
        for number in self._numbers:
            if (old := signal.getsignal(number)) != self._note:
                signal.signal(number, self._note)
                self._handlers.setdefault(number, old)
        if not self._pipe:
            self._pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            self._wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            self._watch.listen(self._pipe[0], self._arrived)

    def _note(self, number: int, frame: object) -> None:
        self._noted = self._noted or number

    def _arrived(self) -> None:
        """Called in the watching thread, even if the main thread is in MPI: end the process at the second signal."""
        now = time.monotonic()
        for number in os.read(self._pipe[0], 2**10):
            if number in self._numbers:
                if now - self._first > _TWICE:
                    ctypes.CDLL(None).signal(number, None)  # the default; Python's own does it in the main thread alone
                    os.kill(os.getpid(), number)
                self._first = min(self._first, now)

    def close(self) -> None:
        """Set the handlers that were found, unless the program has set others. The watch has stopped."""
        with suppress(ValueError):  # this is not the main thread
            for number, old in self._handlers.items():
                if signal.getsignal(number) == self._note:
                    signal.signal(number, old or signal.SIG_DFL)
            if self._pipe:
                current = signal.set_wakeup_fd(-1)
                with suppress(OSError, ValueError):  # the program has closed its own meanwhile
                    signal.set_wakeup_fd(self._wakeup if current == self._pipe[1] else current)
            for fd in self._pipe:
                os.close(fd)
            self._pipe = ()

    def leave_child(self) -> None:
        """Called in a forked child: its parent may end it by SIGTERM, and launchers send it the other signals, too."""
        self.close()
        for number in {*self._numbers} - {signal.SIGTERM}:
            if signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, self._note)  # SIG_IGN would be inherited by programs that the child starts
