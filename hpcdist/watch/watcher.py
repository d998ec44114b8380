"""The thread of every rank that detects overdue calls and dead processes, and then queries all ranks."""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from datetime import timedelta
from queue import SimpleQueue
from typing import TYPE_CHECKING

from hpcdist import activity
from hpcdist.activity import ENDING, FINALIZED, CallEntry, ThreadRecord, callsite, procstat, recording
from hpcdist.errors import HangError, coded, with_hint
from hpcdist.process import abort
from hpcdist.tensors import pool
from hpcdist.watch import ras
from hpcdist.watch.datagrams import KEY, Datagrams
from hpcdist.watch.hang_table import GONE, Report, chain, made_progress, table, verdict
from hpcdist.watch.peers import ANSWERS, PATIENCE, TURNS, Peers
from hpcdist.watch.reporter import Reporter, launched_now

if TYPE_CHECKING:
    import torch
    from mpi4py import MPI

SIGNAL = signal.SIGUSR2  # prints the table, unless the program uses it for something else
_TICK, _LEAST = 5.0, 0.01  # seconds between two checks at most, and at least
_SWEEP = 1.0  # seconds between two sweeps of the pool of result memory at most, while it has something to sweep
_JOIN = 1.5  # seconds in which the other ranks that wait raise, too, before the job ends
_END = 0.3  # seconds until an ending job has ended
_RAS = 2.0  # seconds for the answer of NCCL's RAS, which waits a second for a stopped process
_HASTE = 0.2  # seconds to wait for answers where the launcher is about to end the job
_NOTHING, _COLLECTIVE = CallEntry(0.0, 0, 0, ""), CallEntry(0.0, 0, 0, "a collective on the GPU")
ALARM, DEMAND = "alarm", "demand"  # reasons for a query


class Watch:
    """The watching thread of this rank.

    Making it is collective over `comm`. All data that are needed when a rank hangs are exchanged then.

    Args:
        comm: all ranks.
        local, node: the ranks of this node, and its number.
        address: address of this host; None on one node whose processes can open each other's files.
        limit: deadline of a call.
    """

    def __init__(self, comm: MPI.Intracomm, local: MPI.Comm, node: int, address: str | None, limit: timedelta) -> None:
        self._limit = limit.total_seconds()
        self._grace = 0.0  # seconds after its deadline for a slow call that makes progress
        self._size = comm.size
        datagrams = Datagrams(comm.bcast(os.urandom(KEY)), address)
        self._reporter = Reporter(comm, local, node, datagrams.address)
        self._peers = Peers(datagrams, self._reporter, self._until, _on_end)
        self._next = self._next_process()
        self._reactions: dict[int, Callable[[], None]] = {}
        self._peer_died = self._signalled = self._stopping = False
        self._ras: tuple[str, int] | None = None
        self._noted: dict[str, int] = {}  # collectives launched when the other ranks were last asked because of them
        self._demanded = 0.0  # when a signal last asked this rank for the table
        self._inquiries: SimpleQueue[threading.Event] = SimpleQueue()
        self._lock = threading.RLock()  # between those who wake the thread and the one who closes the pipe for that
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._dump, self._dumper = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._listens = signal.getsignal(SIGNAL) == signal.SIG_DFL and not procstat.handles(SIGNAL)
        if self._listens:  # a handler of Python's would not run while the main thread is in MPI
            faulthandler.register(SIGNAL, file=self._dumper, all_threads=False, chain=False)
        activity.start(self._reporter.record, self._reporter.slot)
        abort.at_end(self._announce_end, self.explain)
        activity.wake = self._look_now
        activity.lone_limit = self._limit if self._size == 1 else None
        self._thread = threading.Thread(target=self._work, name="hpcdist-watch", daemon=True)
        self._thread.start()

    def _next_process(self) -> tuple[int, int] | None:
        """Return (slot, descriptor of its process) of the next rank on this node, which this rank watches."""
        reporter, slots = self._reporter, sorted(self._reporter.local_ranks)
        slot = slots[(slots.index(reporter.slot) + 1) % len(slots)]
        try:
            return None if slot == reporter.slot else (slot, os.pidfd_open(reporter.record.read(slot).pid))
        except (OSError, AttributeError):  # an old kernel: the launcher will notice, or the deadline
            return None

    def stop(self) -> None:
        """End the thread. Other ranks then neither wait for this process nor report its end."""
        with self._lock:
            if self._stopping:
                return
            self._reporter.announce(FINALIZED)
            self._stopping = True
            os.eventfd_write(self._wake, 1)
        self._thread.join()
        activity.wake = activity.lone_limit = None
        activity.start(None)
        abort.at_end(None, None)
        if self._listens and signal.getsignal(SIGNAL) == signal.SIG_DFL:  # otherwise the program has set its own
            faulthandler.unregister(SIGNAL)
        self._peers.close()
        self._reporter.record.close()
        for fd in (self._wake, self._dump, self._dumper, *(self._next or ())[1:]):
            os.close(fd)

    def follow(self, device: torch.device, ras: tuple[str, int] | None) -> None:
        """Look after the collectives on this rank's GPU, too.

        Args:
            ras: where NCCL's RAS answers; None where it is off.
        """
        self._reporter.device, self._ras = device, ras

    def listen(self, fd: int, react: Callable[[], None]) -> None:
        """Call `react` in the watching thread whenever `fd` is readable, until stop()."""
        self._reactions[fd] = react
        self._look_now()

    def _announce_end(self) -> None:
        """Announce to all ranks that this one ends the job, and write its trace."""
        self._reporter.announce(ENDING)
        self._peers.send_all("end")
        save_trace(finished=False)
        if recording.current is not None:
            recording.current.wait_for_others(PATIENCE)

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
        answered.wait(PATIENCE)

    def _work(self) -> None:
        while not self._stopping:
            try:
                self._check()
            except Exception:  # this thread goes on, because there would be no deadlines
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
            late = self._reporter.device is not None and self._on_gpu(min(now - last, 2 * tick))
            last = time.monotonic() if self._react() or late else now
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
        elif self._peers.raised_by is not None:
            self._join(self._peers.raised_by)
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
        fds = [self._wake, self._dump, self._peers.fileno(), *(self._next or ())[1:], *reactions]
        for fd in fds:
            poll.register(fd, select.POLLIN)
        if self._peers.ended:  # the main thread continues until the launcher ends this process
            abort.cleanup()
            seconds = min(seconds, _LEAST)
        for fd, _ in poll.poll(max(0.0, seconds) * 1000):
            if fd == self._wake:
                os.eventfd_read(fd)
            elif fd == self._dump:
                os.read(fd, 2**16)
                self._signalled = True
            elif fd == self._peers.fileno():
                self._peers.receive()
            elif fd in reactions:
                reactions[fd]()
            elif self._next is not None:
                os.close(fd)
                self._peer_died = self._reporter.died(self._next[0])
                self._next = None

    def _until(self, end: float, done: Callable[[], bool] = lambda: False) -> None:
        """Answer other ranks' questions until a time, or until `done`."""
        while (left := end - time.monotonic()) > 0 and not self._stopping and not done():
            self._poll(left)

    # A call past its deadline.

    def _on_deadline(self, record: ThreadRecord) -> None:
        """Raise in the thread of an overdue call, and end the job, unless the call makes progress on some rank."""
        call, waited, limit = record.current(), record.waited, self._limit_of(record)
        if call is None:
            return
        reports = self._peers.ask_in_turn(ALARM)
        if reports is None:
            self._peers.wait_for_raise()
            return  # if that rank finds no reason to raise, or is dead itself, this one checks again
        notes = [] if self._reporter.device is None else self._launches(0.8 * limit)[2]
        if record.begun == record.finished or self._stopping:  # the call has ended meanwhile
            return
        absent = chain(call, lambda team: activity.peers.get(team, range(self._size)), reports)
        if not absent and made_progress(call, reports, 0.8 * limit):
            self._grace = waited - limit + limit / 4  # a large file takes its time: check again later
            return
        text = f"{call.text} has waited for {waited:.1f} s, its deadline is {limit:g} s"
        why = verdict(call, absent, reports, lambda team: activity.peers.get(team, ()))
        self._raise(record.thread, text, [why, *notes], reports)

    def _raise(self, thread: int, text: str, why: list[str], reports: Mapping[int, Report]) -> None:
        """Raise in a thread, with the table, and end the job."""
        self._peers.send_all("raise")
        _note_lost(reports)
        _show(thread, "\n".join([text, _table(reports), *why]))
        abort.job(1, _JOIN)

    # Collectives on a GPU, of which no record knows whether the GPU has done them.

    def _on_gpu(self, seconds: float) -> bool:
        """Count time that has passed without another collective on the GPU; react to one that others have not launched.

        Returns:
            Whether it has asked the other ranks.
        """
        limit, launched = self._reporter.count(seconds), self._reporter.launched
        if self._reporter.still < limit or launched == self._noted or self._stopping:
            return False
        if not self._reporter.waits_for_gpu():  # whatever it has launched is done
            self._noted = launched
            return False
        if self._peers.ask_in_turn(ALARM) is None:
            self._peers.wait_for_raise()
            return True
        self._noted = launched
        behind, silent, notes, reports = self._launches(0.8 * limit)
        if not behind:
            behind = silent.union(rank for rank, report in reports.items() if report.doing in GONE)
        if launched_now()[0] == launched:
            still = f"{self._reporter.still:.1f} s, its deadline is {limit:g} s"
            if behind:
                why = [*notes, verdict(_COLLECTIVE, sorted(behind), reports)]
                self._raise(os.getpid(), f"a collective on the GPU has waited for {still}", why, reports)
            text = f"rank {self._reporter.rank} has launched no collective, and its GPU was busy, for {still}"
            _print_table("\n".join([text, _table(reports), *notes]))
        return True

    def _launches(self, limit: float) -> tuple[set[int], set[int], list[str], dict[int, Report]]:
        """Return which ranks are behind in collectives on GPUs, which are silent, what the counts are, and the reports.

        NCCL's RAS counts by the names of collectives; where it gives no answer, torch counts those of its groups. The
        reports are later than the answer of RAS: what a waiting rank has launched was old by then.

        Args:
            limit: seconds without another collective after which a rank waits.
        """
        where, nodes = self._ras, defaultdict[int, dict[int, int]](dict)
        for rank, member in enumerate(self._reporter.members):
            nodes[member["node"]][member["pid"]] = rank
        groups: list[ras.Communicator] = []
        problem = "" if where else "NCCL_RAS_ENABLE=0"
        try:
            groups = ras.communicators(ras.ask(where, _RAS)) if where else []
        except (OSError, ValueError) as error:
            problem = str(error)
        reports = self._peers.ask(ALARM, ANSWERS)
        waiting = [rank for rank, report in reports.items() if report.still >= limit]
        ranks, source = ras.ranks_of(groups, list(nodes.values())), "NCCL's RAS"
        if not ranks or any(process not in ranks for group in groups for process in (*group.launched, *group.silent)):
            problem = problem or "it names processes of another job, or whose node is not known"
            groups = []
            ranks, source = {("", rank): rank for rank in reports}, f"torch (NCCL's RAS gives no answer: {problem})"
            for name in {name for report in reports.values() for name in report.launched}:
                launched = {
                    ("", rank): Counter({"in all": report.launched[name]})
                    for rank, report in reports.items()
                    if name in report.launched
                }
                groups.append(ras.Communicator(launched, []))
        behind, silent, notes = ras.compare(groups, ranks, waiting)
        return behind, silent, [f"by {source}: {note}" for note in notes], reports

    def _join(self, other: int) -> None:
        """Raise in all waiting calls of this rank, because another rank does so and ends the job."""
        for record in activity.thread_records:
            call = record.current()
            if call is not None and not record.patient:
                _show(record.thread, coded("HD601", f"{call.text} has waited; see the output of rank {other}"))
        save_trace(finished=False)
        self._until(time.monotonic() + PATIENCE)
        abort.job(1)  # reached if that rank has not raised

    # The death of a peer.

    def _on_peer_death(self) -> None:
        """Report a process of this node that has died, and end the job, unless it is ending already."""
        self._peer_died = False
        save_trace(finished=False)  # now, because the launcher may end this process at any time
        self._until(time.monotonic() + _END)
        dead = {} if self._stopping or self._peers.ended else self._reporter.dead()
        if not dead:
            return
        _note_lost(dead)
        abort.print_error(with_hint("hpcdist: " + verdict(_NOTHING, list(dead), dead)))
        reports = self._peers.ask_in_turn(ALARM, _HASTE)
        if reports is not None:
            abort.print_error(_table(reports))
        abort.job(1)

    def _on_inquiries(self) -> None:
        """Print the table and which ranks are dead or stopped, if any; one rank does for all."""
        try:
            reports = self._peers.ask_in_turn(ALARM) or {}
            gone = [rank for rank, report in reports.items() if report.doing in GONE]
            if gone:
                _print_table(f"{_table(reports)}\n{verdict(_NOTHING, gone, reports)}")
        finally:
            self._release_inquiries()

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
            if time.monotonic() - self._demanded < TURNS:
                return
            self._demanded = time.monotonic()
            reports = self._peers.ask_in_turn(DEMAND, within=TURNS)
            if reports is not None:
                _print_table(_table(reports))
        finally:
            self._signalled = False


def save_trace(finished: bool) -> None:
    """Write the trace of this rank, if there is one; the program ends all the same if that fails."""
    try:
        if recording.current is not None:
            recording.current.save(finished)
    except OSError as error:
        abort.print_error(f"hpcdist: the trace of this rank is not complete: {error}")


def _on_end() -> None:
    abort.cleanup()  # first: the launcher may end this process at any time
    save_trace(finished=False)


def _note_lost(reports: Mapping[int, Report]) -> None:
    """Write down which ranks are dead, stopped, or silent with their whole node: the launcher may end this process."""
    lost = [report for report in reports.values() if report.doing in GONE or not report.known]
    abort.facts["lost"] = {report.rank: report.host for report in lost}
    abort.write_facts()


def _show(thread: int, text: str) -> None:
    frame = procstat.frames().get(thread)
    abort.show(HangError(text), frame and callsite.outside(frame))


def _table(reports: Mapping[int, Report]) -> str:
    return table(reports.values(), time.time())


def _print_table(text: str) -> None:
    abort.print_error(with_hint("hpcdist: the calls of all ranks\n" + text))
