"""The thread of every rank that looks whether a call has waited too long, or a neighbour has died, and then asks."""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import TYPE_CHECKING

from hpcdist import activity
from hpcdist.activity import ENDED, Entry, Lane
from hpcdist.errors import HangError
from hpcdist.process import abort, exits
from hpcdist.watch import procfs
from hpcdist.watch.status_query import Survey
from hpcdist.watch.table import GONE, Report, chain, gets_on, table, verdict

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["SIGNAL", "Watch"]

SIGNAL = signal.SIGUSR2  # prints the table, unless the program uses it for something else
_TICK, _LEAST = 5.0, 0.01  # seconds between two looks at most, and at least
_TURN = 0.02  # seconds that each rank leaves to the one before it, so that one asks for all
_TURNS = 1.0  # seconds at most
_JOIN = 0.5  # seconds in which the other ranks that wait raise, too, before the job ends
_END = 0.3  # seconds in which a job that ends has ended: nobody needs to be told of it
_PATIENCE = 5.0  # seconds for the rank that has printed the table to end the job
_ANSWERS, _HASTE = 1.0, 0.2  # seconds for which answers are waited for; where the launcher is about to end the job
_NOTHING = Entry(0.0, 0, 0, "")
ALARM, DEMAND = "alarm", "demand"  # why a rank asks the others


class Waits:
    """For how long the calls of this process have not got on."""

    def __init__(self) -> None:
        self._waited: dict[Lane, tuple[tuple[int, int], float]] = {}

    def add(self, seconds: float) -> None:
        """So much time has passed."""
        for lane in activity.lanes:
            at = (lane.begun, lane.touched)
            before, waited = self._waited.get(lane, (None, 0.0))
            busy = lane.begun > lane.finished and not lane.patient
            self._waited[lane] = at, waited + seconds if before == at and busy else 0.0

    def of(self, lane: Lane) -> float:
        return self._waited.get(lane, (None, 0.0))[1]

    def over(self, limit: float) -> list[Lane]:
        """The lanes whose call has waited for that long."""
        return [lane for lane in activity.lanes if self.of(lane) >= limit]

    def seconds(self) -> list[float]:
        """Of each lane."""
        return [self.of(lane) for lane in activity.lanes]


class Watch:
    """Deadlines for the calls of this rank.

    Args:
        survey: what the ranks know of each other.
        limit: the deadline of a call, in seconds.
    """

    @classmethod
    def over(cls, comm: MPI.Intracomm, local: MPI.Comm, limit: timedelta, address: str | None) -> Watch:
        """The watch over all ranks, those of this node being `local`; see :class:`Survey`. Collective over `comm`."""
        waits = Waits()
        return cls(Survey(comm, local, address, waits.seconds), waits, limit.total_seconds())

    def __init__(self, survey: Survey, waits: Waits, limit: float) -> None:
        self._survey = survey
        self._limit = limit
        self._waits = waits
        self._patience = limit  # of the call that is overdue, all of whose ranks have come and some get on
        self._neighbour = survey.neighbour()
        self._bereaved = self._signalled = self._stopping = False
        self._demanded = 0.0  # when a signal last asked this rank for the table
        self._inquiries: SimpleQueue[threading.Event] = SimpleQueue()
        self._lock = threading.RLock()  # between those who wake the thread and the one who closes what it is woken by
        self._wake, self._waker = _pipe()
        self._dump, self._dumper = _pipe()
        self._listens = signal.getsignal(SIGNAL) == signal.SIG_DFL
        if self._listens:  # a handler of Python's would not run while the main thread is in MPI
            faulthandler.register(SIGNAL, file=self._dumper, all_threads=False, chain=False)
        abort.at_end(survey.end_job, self.explain)
        self._thread = threading.Thread(target=self._work, name="hpcdist-watch", daemon=True)
        self._thread.start()

    @property
    def one_system(self) -> bool:
        """Whether all ranks see each other's processes: one node, and no containers with their own process numbers."""
        return self._survey.one_system

    def stop(self) -> None:
        """This process is done with the library: nobody waits for it, or wonders that it ends."""
        with self._lock:
            if self._stopping:
                return
            self._survey.announce(ENDED)
            self._stopping = True
            os.write(self._waker, b"s")
        self._thread.join()
        abort.at_end(None, None)
        if self._listens and signal.getsignal(SIGNAL) == signal.SIG_DFL:  # else the program has its own by now
            faulthandler.unregister(SIGNAL)
        self._survey.close()
        for fd in (self._wake, self._waker, self._dump, self._dumper):
            os.close(fd)
        if self._neighbour is not None:
            os.close(self._neighbour[1])

    def explain(self) -> None:
        """Print which ranks are dead or stopped, if some are: a transfer has failed, perhaps for that."""
        answered = threading.Event()
        with self._lock:
            if self._stopping or threading.current_thread() is self._thread:
                return
            self._inquiries.put(answered)
            os.write(self._waker, b"i")
        answered.wait(_PATIENCE)

    def _work(self) -> None:
        while not self._stopping:
            try:
                self._look()
            except Exception:  # whatever it is: without this thread there would be no deadlines
                abort.print_error(f"hpcdist: watching goes on after an error\n{traceback.format_exc()}")
                time.sleep(1)
        self._answered()

    def _look(self) -> None:
        last = time.monotonic()
        while not self._stopping:
            tick = min(_TICK, max(_LEAST, self._limit / 8))
            self._pump(tick)
            now = time.monotonic()
            # A process that was itself stopped has not waited meanwhile: the others may have been stopped, too.
            step, last = min(now - last, 2 * tick), now
            self._waits.add(step)
            overdue = self._waits.over(self._limit)
            late = overdue if overdue and self._waits.of(overdue[0]) >= self._patience else []
            if not self._inquiries.empty():
                try:
                    self._tell_gone()
                finally:
                    self._answered()
            elif self._bereaved:
                self._bereaved = False
                self._mourn()
            elif self._signalled:
                try:
                    self._on_demand()
                finally:
                    self._signalled = False
            elif self._survey.raised_by is not None:
                self._join_in(self._survey.raised_by)
            elif late:
                self._raise(late[0])
            else:
                self._patience = self._patience if overdue else self._limit
                continue
            last = time.monotonic()

    def _pump(self, seconds: float) -> None:
        """Wait so long for something to happen; answer what is asked, and note what is to be done."""
        poll = select.poll()
        fds = [self._wake, self._dump, self._survey.wire.fileno()]
        if self._neighbour is not None:
            fds.append(self._neighbour[1])
        for fd in fds:
            poll.register(fd, select.POLLIN)
        if self._survey.ended:  # the main thread goes on until the launcher ends this process
            abort.cleanup()
            seconds = min(seconds, _LEAST)
        for fd, _ in poll.poll(max(0.0, seconds) * 1000):
            if fd == self._wake:
                os.read(fd, 64)
            elif fd == self._dump:
                os.read(fd, 2**16)
                self._signalled = True
            elif fd == self._survey.wire.fileno():
                for message in self._survey.wire.receive():
                    self._survey.take(message)
            elif self._neighbour is not None:
                os.close(fd)
                self._bereaved = self._survey.died(self._neighbour[0])
                self._neighbour = None

    def _until(self, end: float, done: Callable[[], bool] = lambda: False) -> None:
        """Answer what is asked until then."""
        while (left := end - time.monotonic()) > 0 and not self._stopping and not done():
            self._pump(left)

    def _ask(self, why: str, seconds: float = _ANSWERS) -> dict[int, Report]:
        return self._survey.ask(why, seconds, self._until)

    def _asking(self, why: str, since: float) -> list[int]:
        """The other ranks that have asked for that reason."""
        return [rank for rank, (reason, at) in self._survey.asked_by.items() if reason == why and at > since]

    def _other(self, why: str, within: float = _PATIENCE) -> int | None:
        """The rank that asks for all, if another one does, or did; those before this one have their turn first."""
        begin = time.monotonic()

        def first() -> int | None:
            return next(iter(self._asking(why, begin - within)), None)

        self._until(begin + min(self._survey.rank * _TURN, _TURNS), lambda: first() is not None)
        return first()

    def _raise(self, lane: Lane) -> None:
        """The call of a lane has waited too long: raise, and end the job."""
        call, waited = lane.current(), self._waits.of(lane)
        if call is None:
            return
        if self._other(ALARM) is not None:
            self._until(time.monotonic() + _PATIENCE, lambda: self._survey.raised_by is not None)
            return  # if that rank finds no reason to raise, or is dead itself, this one looks again
        reports = self._ask(ALARM)
        if lane.begun == lane.finished or self._stopping:  # it has come after all
            return
        absent = chain(call, self._peers, reports)
        if not absent and gets_on(call, reports, 0.8 * self._limit):
            self._patience = waited + self._limit / 4  # a large file takes its time: look again later
            return
        self._survey.tell("raise")
        text = f"{call.text} has waited for {waited:.1f} s, its deadline is {self._limit:g} s"
        self._show(lane, f"{text}\n{table(reports.values(), time.time())}\n{verdict(call, absent, reports)}")
        abort.job(1, _JOIN)

    def _join_in(self, other: int) -> None:
        """Another rank raises, and ends the job: what waits here raises with it."""
        for lane in activity.lanes:
            call = lane.current()
            if call is not None and not lane.patient:
                self._show(lane, f"{call.text} has waited, see what rank {other} says")
        self._until(time.monotonic() + _PATIENCE)
        abort.job(1)  # it has not

    def _peers(self, number: int) -> list[int]:
        """The world's ranks of a team; of one that this rank is not in, those of all."""
        return activity.peers.get(number, self._survey.ranks)

    def _show(self, lane: Lane, text: str) -> None:
        frame = procfs.frames().get(lane.thread)
        exits.show(HangError(text), frame and activity.outside(frame))

    def _mourn(self) -> None:
        """A neighbour has died: unless the whole job ends, tell of it, and end it."""
        self._until(time.monotonic() + _END)
        if self._survey.job_ends() or self._stopping:
            return
        dead = self._survey.dead_mates()
        if not dead:
            return
        abort.print_error("hpcdist: " + verdict(_NOTHING, list(dead), dead))
        if self._other(ALARM) is None:
            abort.print_error(table(self._ask(ALARM, _HASTE).values(), time.time()))
        abort.job(1)

    def _answered(self) -> None:
        """Let the threads go on that have asked by now."""
        while not self._inquiries.empty():
            self._inquiries.get().set()

    def _tell_gone(self) -> None:
        """Print who is dead or stopped, if somebody is, and what the ranks are at. Of several ranks, one does."""
        if self._other(ALARM) is not None:
            return
        reports = self._ask(ALARM)
        gone = [rank for rank, report in reports.items() if report.doing in GONE]
        if gone:
            _say(f"{table(reports.values(), time.time())}\n{verdict(_NOTHING, gone, reports)}")

    def _on_demand(self) -> None:
        """A signal asks for the table. If all ranks have got it, one prints: of those that ask at once, the lowest. Its
        question has come here before its answer to ours."""
        begin = time.monotonic() - _TURNS
        if self._demanded > begin:  # what a signal writes to the pipe may come in several parts
            return
        self._demanded = time.monotonic()
        if self._other(DEMAND, _TURNS) is None:
            reports = self._ask(DEMAND)
            if not any(rank < self._survey.rank for rank in self._asking(DEMAND, begin)):
                _say(table(reports.values(), time.time()))


def _say(text: str) -> None:
    abort.print_error("hpcdist: what the ranks are at\n" + text)


def _pipe() -> tuple[int, int]:
    """(reading end, writing end), which never wait."""
    return os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
