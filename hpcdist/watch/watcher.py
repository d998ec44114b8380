"""The thread of every rank that detects overdue calls and dead processes, and then queries all ranks."""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue

from hpcdist import activity
from hpcdist.activity import FINALIZED, Entry, ThreadRecord, callsite, procstat, recording
from hpcdist.errors import HangError, coded, with_hint
from hpcdist.process import abort
from hpcdist.tensors import pool
from hpcdist.watch import flight_records
from hpcdist.watch.hang_table import GONE, Report, chain, made_progress, table, verdict
from hpcdist.watch.status_query import StatusQuery

SIGNAL = signal.SIGUSR2  # prints the table, unless the program uses it for something else
_TICK, _LEAST = 5.0, 0.01  # seconds between two checks at most, and at least
_SWEEP = 1.0  # seconds between two sweeps of the pool of result memory at most, while it has something to sweep
_TURN = 0.02  # seconds by which each rank waits longer than the one before it: one asks for all
_TURNS = 1.0  # seconds of all turns at most
_JOIN = 0.5  # seconds in which the other ranks that wait raise, too, before the job ends
_END = 0.3  # seconds until an ending job has ended
_PATIENCE = 5.0  # seconds for the rank that has printed the table to end the job
_ANSWERS, _HASTE = 1.0, 0.2  # seconds to wait for answers; where the launcher is about to end the job
_NOTHING = Entry(0.0, 0, 0, "")
ALARM, DEMAND = "alarm", "demand"  # reasons for a query


class Watch:
    """The watching thread of this rank.

    Args:
        query: queries the other ranks.
        limit: deadline of a call.
    """

    def __init__(self, query: StatusQuery, limit: timedelta) -> None:
        self._query = query
        self._limit = limit.total_seconds()
        self._grace = 0.0  # seconds after its deadline for a slow call that makes progress
        self._peer = query.next_process()
        self._reactions: dict[int, Callable[[], None]] = {}
        self._peer_died = self._signalled = self._stopping = False
        self._demanded = 0.0  # when a signal last asked this rank for the table
        self._inquiries: SimpleQueue[threading.Event] = SimpleQueue()
        self._lock = threading.RLock()  # between those who wake the thread and the one who closes the pipe for that
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._dump, self._dumper = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._listens = signal.getsignal(SIGNAL) == signal.SIG_DFL
        if self._listens:  # a handler of Python's would not run while the main thread is in MPI
            faulthandler.register(SIGNAL, file=self._dumper, all_threads=False, chain=False)
        abort.at_end(self._announce_end, self.explain)
        activity.wake = self._look_now
        activity.lone_limit = self._limit if len(query.ranks) == 1 else None
        self._thread = threading.Thread(target=self._work, name="hpcdist-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Other ranks then neither wait for this process nor report its end."""
        with self._lock:
            if self._stopping:
                return
            self._query.announce(FINALIZED)
            self._stopping = True
            os.eventfd_write(self._wake, 1)
        self._thread.join()
        activity.wake = activity.lone_limit = None
        abort.at_end(None, None)
        if self._listens and signal.getsignal(SIGNAL) == signal.SIG_DFL:  # otherwise the program has set its own
            faulthandler.unregister(SIGNAL)
        self._query.close()
        for fd in (self._wake, self._dump, self._dumper, *(self._peer or ())[1:]):
            os.close(fd)

    def listen(self, fd: int, react: Callable[[], None]) -> None:
        """Call `react` in the watching thread whenever `fd` is readable, until stop()."""
        self._reactions[fd] = react
        self._look_now()

    def _announce_end(self) -> None:
        """Announce to all ranks that this one ends the job, and write its trace."""
        self._query.end_job()
        save_trace(finished=False)
        if recording.current is not None:
            recording.current.wait_for_others(_PATIENCE)

    def _look_now(self) -> None:
        with self._lock:
            if not self._stopping:
                os.eventfd_write(self._wake, 1)

    def explain(self) -> None:
        """Print which ranks are dead or stopped, if any: a possible reason for a transfer that has failed."""
        answered = threading.Event()
        with self._lock:
            if self._stopping or threading.current_thread() is self._thread:
                return
            self._inquiries.put(answered)
            os.eventfd_write(self._wake, 1)
        answered.wait(_PATIENCE)

    def _work(self) -> None:
        while not self._stopping:
            try:
                self._check()
            except Exception:  # without this thread there would be no deadlines
                abort.print_error(f"hpcdist: the watcher continues after an error\n{traceback.format_exc()}")
                time.sleep(1)
        self._release_inquiries()

    def _check(self) -> None:
        """Wait for events, and count how long the calls of this rank have waited."""
        last, sweeps = time.monotonic(), False
        while not self._stopping:
            tick = min(_SWEEP if sweeps else _TICK, max(_LEAST, min(self._limit, activity.shortest) / 8))
            self._poll(tick)
            now = time.monotonic()
            # After a process was stopped, that time does not count: the others may have been stopped, too.
            for record in activity.thread_records:
                record.settle()
                record.wait(min(now - last, 2 * tick))
            last = time.monotonic() if self._react() else now
            sweeps = pool.sweep()

    def _react(self) -> bool:
        """React to the most urgent event; return whether there was one."""
        overdue = [record for record in activity.thread_records if record.waited >= self._limit_of(record)]
        if not self._inquiries.empty():
            self._on_inquiries()
        elif self._peer_died:
            self._on_peer_death()
        elif self._signalled:
            self._on_signal()
        elif self._query.raised_by is not None:
            self._join(self._query.raised_by)
        elif overdue and overdue[0].waited >= self._limit_of(overdue[0]) + self._grace:
            self._on_deadline(overdue[0])
        else:
            self._grace = self._grace if overdue else 0.0
            return False
        return True

    def _limit_of(self, record: ThreadRecord) -> float:
        return self._limit if record.limit is None else record.limit

    def _poll(self, seconds: float) -> None:
        """Wait for an event; answer other ranks' questions, and note all other events."""
        poll = select.poll()
        reactions = dict(self._reactions)  # other threads may add some
        fds = [self._wake, self._dump, self._query.datagrams.fileno(), *(self._peer or ())[1:], *reactions]
        for fd in fds:
            poll.register(fd, select.POLLIN)
        if self._query.ended:  # the main thread continues until the launcher ends this process
            abort.cleanup()
            seconds = min(seconds, _LEAST)
        for fd, _ in poll.poll(max(0.0, seconds) * 1000):
            if fd == self._wake:
                os.eventfd_read(fd)
            elif fd == self._dump:
                os.read(fd, 2**16)
                self._signalled = True
            elif fd == self._query.datagrams.fileno():
                ended = self._query.ended
                for message in self._query.datagrams.receive():
                    self._query.take(message)
                if self._query.ended and not ended:
                    abort.cleanup()  # first: the launcher may end this process at any time
                    save_trace(finished=False)
            elif fd in reactions:
                reactions[fd]()
            elif self._peer is not None:
                os.close(fd)
                self._peer_died = self._query.died(self._peer[0])
                self._peer = None

    def _until(self, end: float, done: Callable[[], bool] = lambda: False) -> None:
        """Answer other ranks' questions until a time, or until `done`."""
        while (left := end - time.monotonic()) > 0 and not self._stopping and not done():
            self._poll(left)

    # One rank asks for all.

    def _asking(self, why: str, since: float) -> list[int]:
        """Return the other ranks that have asked for that reason."""
        return [rank for rank, (reason, at) in self._query.asked_by.items() if reason == why and at > since]

    def _ask_in_turn(self, why: str, seconds: float = _ANSWERS, within: float = _PATIENCE) -> dict[int, Report] | None:
        """Query the activity of all ranks; None if another rank has asked `within` seconds, or asks now.

        The ranks take turns. If several ask at once nevertheless, the lowest continues: its question arrives here
        before its answer to this rank's question.
        """
        begin = time.monotonic()
        turn = begin + min(self._query.rank * _TURN, _TURNS)
        self._until(turn, lambda: bool(self._asking(why, begin - within)))
        if self._asking(why, begin - within):
            return None
        reports = self._query.ask(why, seconds, self._until)
        return None if any(rank < self._query.rank for rank in self._asking(why, begin)) else reports

    # A call past its deadline.

    def _on_deadline(self, record: ThreadRecord) -> None:
        """Raise in the thread of an overdue call, and end the job, unless the call makes progress on some rank."""
        call, waited, limit = record.current(), record.waited, self._limit_of(record)
        if call is None:
            return
        reports = self._ask_in_turn(ALARM)
        if reports is None:
            self._until(time.monotonic() + _PATIENCE, lambda: self._query.raised_by is not None)
            return  # if that rank finds no reason to raise, or is dead itself, this one checks again
        if record.begun == record.finished or self._stopping:  # the call has ended meanwhile
            return
        absent = chain(call, lambda team: activity.peers.get(team, self._query.ranks), reports)
        if not absent and made_progress(call, reports, 0.8 * limit):
            self._grace = waited - limit + limit / 4  # a large file takes its time: check again later
            return
        folder = self._flight_records(reports)
        self._query.send_all("raise", folder)
        text = f"{call.text} has waited for {waited:.1f} s, its deadline is {limit:g} s"
        why = verdict(call, absent, reports, _peers_of)
        records = [f"flight records: torchfrtrace {path}" for path in sorted(Path(folder).iterdir() if folder else [])]
        _show(record, "\n".join([text, table(reports.values(), time.time()), why, *records]))
        abort.job(1, _JOIN)

    def _flight_records(self, reports: Mapping[int, Report]) -> str:
        """Write the calls of all ranks for torch's analyser; return the folder, "" if it cannot be."""
        try:
            trace = recording.current
            folder = flight_records.write(None if trace is None else str(trace.path.parent), reports, _peers_of)
        except Exception as error:  # the table comes first
            abort.print_error(f"hpcdist: there are no flight records: {error}")
            return ""
        self._write_own(folder)
        return str(folder)

    def _write_own(self, folder: Path) -> None:
        try:
            flight_records.write_own(folder, self._query.rank)
        except Exception as error:
            abort.print_error(f"hpcdist: there are no flight records of torch's own groups: {error}")

    def _join(self, other: int) -> None:
        """Raise in all waiting calls of this rank, because another rank does so and ends the job."""
        save_trace(finished=False)
        if self._query.folder:
            self._write_own(Path(self._query.folder))
        for record in activity.thread_records:
            call = record.current()
            if call is not None and not record.patient:
                _show(record, coded("HD601", f"{call.text} has waited; see the output of rank {other}"))
        self._until(time.monotonic() + _PATIENCE)
        abort.job(1)  # that rank has not raised

    # The death of a peer.

    def _on_peer_death(self) -> None:
        """Report a process of this node that has died, and end the job, unless it is ending already."""
        self._peer_died = False
        save_trace(finished=False)  # now, because the launcher may end this process at any time
        self._until(time.monotonic() + _END)
        dead = {} if self._query.job_ends() or self._stopping else self._query.dead_ranks()
        if not dead:
            return
        abort.print_error(with_hint("hpcdist: " + verdict(_NOTHING, list(dead), dead)))
        reports = self._ask_in_turn(ALARM, _HASTE)
        if reports is not None:
            abort.print_error(table(reports.values(), time.time()))
        abort.job(1)

    def _on_inquiries(self) -> None:
        try:
            self._report_gone()
        finally:
            self._release_inquiries()

    def _report_gone(self) -> None:
        """Print the table and which ranks are dead or stopped, if any; one rank does for all."""
        reports = self._ask_in_turn(ALARM) or {}
        gone = [rank for rank, report in reports.items() if report.doing in GONE]
        if gone:
            _print_table(f"{table(reports.values(), time.time())}\n{verdict(_NOTHING, gone, reports)}")

    def _release_inquiries(self) -> None:
        """Let the threads that have called explain() continue."""
        while not self._inquiries.empty():
            self._inquiries.get().set()

    # The signal.

    def _on_signal(self) -> None:
        """Print the table; if all ranks have got the signal, one prints.

        Two signals within a second print one table, on purpose: the stack that a signal writes to the pipe may arrive
        in several parts.
        """
        try:
            if time.monotonic() - self._demanded < _TURNS:
                return
            self._demanded = time.monotonic()
            reports = self._ask_in_turn(DEMAND, within=_TURNS)
            if reports is not None:
                _print_table(table(reports.values(), time.time()))
        finally:
            self._signalled = False


def save_trace(finished: bool) -> None:
    """Write the trace of this rank, if there is one; the program ends all the same if that fails."""
    try:
        if recording.current is not None:
            recording.current.save(finished)
    except OSError as error:
        abort.print_error(f"hpcdist: the trace of this rank is not complete: {error}")


def _peers_of(team: int) -> Sequence[int]:
    return activity.peers.get(team, ())


def _show(record: ThreadRecord, text: str) -> None:
    frame = procstat.frames().get(record.thread)
    abort.show(HangError(text), frame and callsite.outside(frame))


def _print_table(text: str) -> None:
    abort.print_error(with_hint("hpcdist: the calls of all ranks\n" + text))
