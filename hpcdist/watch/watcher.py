"""The thread of every rank that detects overdue calls and dead processes, and then queries all ranks.

If a rank does not answer, another rank of its node reads its shared record.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import socket
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from hpcdist import activity
from hpcdist.activity import (
    ENDING,
    FINALIZED,
    RUNNING,
    Entry,
    Process,
    SharedRecord,
    ThreadRecord,
    callsite,
    procstat,
    recording,
)
from hpcdist.control import objects
from hpcdist.errors import HangError, coded, with_hint
from hpcdist.process import abort
from hpcdist.tensors import accelerator, pool
from hpcdist.tensors.storage import tensors_in
from hpcdist.watch import flight_records, ras, torch_groups
from hpcdist.watch.datagrams import KEY, Datagrams
from hpcdist.watch.hang_table import GONE, WAITS, Report, chain, made_progress, table, verdict

if TYPE_CHECKING:
    import torch
    from mpi4py import MPI

SIGNAL = signal.SIGUSR2  # prints the table, unless the program uses it for something else
_TICK, _LEAST = 5.0, 0.01  # seconds between two checks at most, and at least
_SWEEP = 1.0  # seconds between two sweeps of the pool of result memory at most, while it has something to sweep
_TURN = 0.02  # seconds by which each rank waits longer than the one before it: one asks for all
_TURNS = 1.0  # seconds of all turns at most
_JOIN = 1.5  # seconds in which the other ranks that wait raise, too, before the job ends
_END = 0.3  # seconds until an ending job has ended
_PATIENCE = 5.0  # seconds for the rank that has printed the table to end the job
_RAS = 3.0  # seconds for the answer of NCCL's RAS, which waits a second for a stopped process
_ANSWERS, _HASTE = 1.0, 0.2  # seconds to wait for answers; where the launcher is about to end the job
_NOTHING, _COLLECTIVE = Entry(0.0, 0, 0, ""), Entry(0.0, 0, 0, "a collective on the GPU")
ALARM, DEMAND = "alarm", "demand"  # reasons for a query
_SILENT = "running, but does not answer: native code that holds Python's lock, no processor for it, or lost messages"
_UNSEEN = "does not answer: it is stopped, in native code that holds Python's lock, or its node is down or cut off"
_MOST_PEERS = 512  # ranks of a team that are reported: a message has 64 KiB
_SHOWN = 4  # sizes of tensors of a call


class Watch:
    """The watching thread of this rank, its messages to those of the others, and the shared record of this node.

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
        self._rank, self._size = comm.rank, comm.size
        self._meet(comm, local, node, address)
        self._next = self._next_process()
        self._asked_by: dict[int, tuple[str, float]] = {}  # reason and time of the last question of each rank
        self._answers: dict[int, Report] = {}
        self._number = 0  # of the latest question: only answers to it count
        self._ended = False  # another rank ends the job
        self._raised_by: int | None = None  # a rank that raises a HangError
        self._folder = ""  # where it has written flight records
        self._reactions: dict[int, Callable[[], None]] = {}
        self._peer_died = self._signalled = self._stopping = False
        self._gpu: tuple[torch.device, tuple[str, int] | None] | None = None
        self._launched: tuple[int, ...] = ()  # collectives in torch's groups on the GPU
        self._noted: tuple[int, ...] = ()  # those after which the other ranks were asked
        self._still = 0.0  # seconds without another one
        self._demanded = 0.0  # when a signal last asked this rank for the table
        self._inquiries: SimpleQueue[threading.Event] = SimpleQueue()
        self._lock = threading.RLock()  # between those who wake the thread and the one who closes the pipe for that
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._dump, self._dumper = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._listens = signal.getsignal(SIGNAL) == signal.SIG_DFL and not procstat.handles(SIGNAL)
        if self._listens:  # a handler of Python's would not run while the main thread is in MPI
            faulthandler.register(SIGNAL, file=self._dumper, all_threads=False, chain=False)
        activity.start(self._record, self._slot)
        abort.at_end(self._announce_end, self.explain)
        activity.wake = self._look_now
        activity.lone_limit = self._limit if self._size == 1 else None
        self._thread = threading.Thread(target=self._work, name="hpcdist-watch", daemon=True)
        self._thread.start()

    def _meet(self, comm: MPI.Intracomm, local: MPI.Comm, node: int, address: str | None) -> None:
        """Make the node's record, and exchange addresses. Collective over `comm`."""
        file = objects.node_file(local)
        self._record = SharedRecord(1 if file is None else local.size, file)  # of its own, if the node cannot share it
        self._slot = 0 if file is None else local.rank
        self._record.announce(self._slot, RUNNING)
        key = comm.bcast(os.urandom(KEY))
        self._datagrams = Datagrams(key, address)
        me = {"address": self._datagrams.address, "host": socket.gethostname(), "pid": os.getpid()}
        self._members = objects.all_gather_object(comm, {**me, "node": node, "slot": self._slot})
        slots = {member["slot"]: rank for rank, member in enumerate(self._members) if member["node"] == node}
        # The rank of each slot of the record; this rank alone where the node's processes share none.
        self._local_ranks: dict[int, int] = slots if len(slots) == local.size else {self._slot: self._rank}

    def _next_process(self) -> tuple[int, int] | None:
        """Return (slot, descriptor of its process) of the next rank on this node, which this rank watches."""
        slots = sorted(self._local_ranks)
        slot = slots[(slots.index(self._slot) + 1) % len(slots)]
        try:
            return None if slot == self._slot else (slot, os.pidfd_open(self._record.read(slot).pid))
        except (OSError, AttributeError):  # an old kernel: the launcher will notice, or the deadline
            return None

    def stop(self) -> None:
        """End the thread. Other ranks then neither wait for this process nor report its end."""
        with self._lock:
            if self._stopping:
                return
            self._record.announce(self._slot, FINALIZED)
            self._stopping = True
            os.eventfd_write(self._wake, 1)
        self._thread.join()
        activity.wake = activity.lone_limit = None
        activity.start(None)
        abort.at_end(None, None)
        if self._listens and signal.getsignal(SIGNAL) == signal.SIG_DFL:  # otherwise the program has set its own
            faulthandler.unregister(SIGNAL)
        self._datagrams.close()
        self._record.close()
        for fd in (self._wake, self._dump, self._dumper, *(self._next or ())[1:]):
            os.close(fd)

    def follow(self, device: torch.device, ras: tuple[str, int] | None) -> None:
        """Look after the collectives on this rank's GPU, too.

        Args:
            ras: where NCCL's RAS answers; None where it is off.
        """
        self._gpu = device, ras

    def listen(self, fd: int, react: Callable[[], None]) -> None:
        """Call `react` in the watching thread whenever `fd` is readable, until stop()."""
        self._reactions[fd] = react
        self._look_now()

    def _announce_end(self) -> None:
        """Announce to all ranks that this one ends the job, and write its trace."""
        self._record.announce(self._slot, ENDING)
        self._send_all("end")
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
            late = self._gpu is not None and self._on_gpu(min(now - last, 2 * tick))
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
        elif self._raised_by is not None:
            self._join(self._raised_by)
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
        fds = [self._wake, self._dump, self._datagrams.fileno(), *(self._next or ())[1:], *reactions]
        for fd in fds:
            poll.register(fd, select.POLLIN)
        if self._ended:  # the main thread continues until the launcher ends this process
            abort.cleanup()
            seconds = min(seconds, _LEAST)
        for fd, _ in poll.poll(max(0.0, seconds) * 1000):
            if fd == self._wake:
                os.eventfd_read(fd)
            elif fd == self._dump:
                os.read(fd, 2**16)
                self._signalled = True
            elif fd == self._datagrams.fileno():
                for message in self._datagrams.receive():
                    self._take(message)
            elif fd in reactions:
                reactions[fd]()
            elif self._next is not None:
                os.close(fd)
                self._peer_died = self._died(self._next[0])
                self._next = None

    def _until(self, end: float, done: Callable[[], bool] = lambda: False) -> None:
        """Answer other ranks' questions until a time, or until `done`."""
        while (left := end - time.monotonic()) > 0 and not self._stopping and not done():
            self._poll(left)

    # One rank asks for all.

    def _asking(self, why: str, since: float) -> list[int]:
        """Return the other ranks that have asked for that reason."""
        return [rank for rank, (reason, at) in self._asked_by.items() if reason == why and at > since]

    def _ask_in_turn(self, why: str, seconds: float = _ANSWERS, within: float = _PATIENCE) -> dict[int, Report] | None:
        """Query the activity of all ranks; None if another rank has asked `within` seconds, or asks now.

        The ranks take turns. If several ask at once nevertheless, the lowest continues: its question arrives here
        before its answer to this rank's question.
        """
        begin = time.monotonic()
        turn = begin + min(self._rank * _TURN, _TURNS)
        self._until(turn, lambda: bool(self._asking(why, begin - within)))
        if self._asking(why, begin - within):
            return None
        reports = self._ask(why, seconds)
        return None if any(rank < self._rank for rank in self._asking(why, begin)) else reports

    # Messages.

    def _send(self, dest: int, kind: str, **fields: Any) -> None:
        self._datagrams.send(self._members[dest]["address"], {"kind": kind, "from": self._rank, **fields})

    def _send_all(self, kind: str, folder: str = "") -> None:
        """Announce to all other ranks that this one will "raise", or "end" the job; where it has written records."""
        for rank in range(self._size):
            if rank != self._rank:
                self._send(rank, kind, folder=folder)

    def _take(self, message: dict[str, Any]) -> None:
        """Process a message of another rank."""
        kind, source = message["kind"], message["from"]
        if kind == "ask":
            self._asked_by[source] = message["why"], time.monotonic()
            self._send(source, "answer", number=message["number"], report=self._own_report())
        elif kind == "ask about":
            self._send(source, "answer", number=message["number"], report=self._seen(message["rank"]))
        elif kind == "raise":
            self._raised_by, self._folder = source, message["folder"]
        elif kind == "end":
            if not self._ended:
                self._ended = True
                abort.cleanup()  # first: the launcher may end this process at any time
                save_trace(finished=False)
        elif message["number"] == self._number:
            self._answers[message["report"].rank] = message["report"]

    def _ask(self, why: str, seconds: float) -> dict[int, Report]:
        """Return the activity of every rank, from its own report if it answers.

        Args:
            why: reason, which the other ranks see.
            seconds: time to wait for answers.
        """
        self._datagrams.expect_all()
        self._number += 1
        self._answers = {self._rank: self._own_report()}
        begin = time.monotonic()
        for part in (0.3, 1.0):  # silent ranks are asked again
            for rank in self._silent():
                self._send(rank, "ask", why=why, number=self._number)
            self._until(begin + part * seconds, lambda: not self._silent())
        for rank in self._silent():
            node = self._members[rank]["node"]
            witness = next((r for r in self._answers if self._members[r]["node"] == node), None)
            if rank in self._local_ranks.values():
                self._answers[rank] = self._seen(rank)
            elif witness is not None:
                self._send(witness, "ask about", rank=rank, number=self._number)
        self._until(time.monotonic() + 0.3 * seconds, lambda: not self._silent())
        for rank in self._silent():  # as are all other ranks of its node
            self._answers[rank] = self._unseen(rank, self._datagrams.refused(self._members[rank]["address"]))
        return dict(sorted(self._answers.items()))

    def _silent(self) -> list[int]:
        return [rank for rank in range(self._size) if rank not in self._answers]

    # Reports.

    def _died(self, slot: int) -> bool:
        """Whether the process of a slot has ended without finalize()."""
        process = self._record.read(slot)
        return process.state == RUNNING and procstat.condition(process.pid, process.started) == "dead"

    def _own_report(self) -> Report:
        """Report this rank's activity."""
        for record in activity.thread_records:
            record.settle()
        process, frames = self._record.read(self._slot), procstat.frames()
        report = self._report(self._rank, process)
        report.still = self._still if _launched()[0] == self._launched else 0.0
        for thread, record in zip(report.threads, activity.thread_records, strict=False):
            thread.waited = record.waited
            if thread.call is not None:
                thread.tensors = _described(record.tensors)
                peers = activity.peers.get(thread.call.team, [])
                thread.peers = peers if len(peers) <= _MOST_PEERS else []
        first = process.threads[0].thread if process.threads else os.getpid()  # which is the main thread's ID
        main = first if first in frames else os.getpid()
        if main in frames:
            busy = any(thread.call is not None for thread in report.threads)
            report.doing = WAITS if busy else procstat.doing(main, frames[main])
            report.stack = [] if busy else procstat.stack(frames[main])
        return report

    def _seen(self, rank: int) -> Report:
        """Report on a rank of this node from its record, and from the system's data on its process."""
        slot = self._members[rank]["slot"]
        if self._local_ranks.get(slot) != rank:
            return self._unseen(rank, False)
        process = self._record.read(slot)
        report = self._report(rank, process)
        condition = procstat.condition(process.pid, process.started)
        report.doing = _SILENT if condition == "alive" else condition
        if condition == "dead" and process.state == FINALIZED:
            report.doing = "at its end: it has finalized"
        return report

    def _unseen(self, rank: int, dead: bool) -> Report:
        report = self._report(rank, None)
        report.doing, report.known = "dead" if dead else _UNSEEN, False
        return report

    def _report(self, rank: int, process: Process | None) -> Report:
        member = self._members[rank]
        return Report(rank, member["host"], member["pid"], [] if process is None else process.threads)

    # A call past its deadline.

    def _on_deadline(self, record: ThreadRecord) -> None:
        """Raise in the thread of an overdue call, and end the job, unless the call makes progress on some rank."""
        call, waited, limit = record.current(), record.waited, self._limit_of(record)
        if call is None:
            return
        reports = self._ask_in_turn(ALARM)
        if reports is None:
            self._until(time.monotonic() + _PATIENCE, lambda: self._raised_by is not None)
            return  # if that rank finds no reason to raise, or is dead itself, this one checks again
        if record.begun == record.finished or self._stopping:  # the call has ended meanwhile
            return
        absent = chain(call, lambda team: activity.peers.get(team, range(self._size)), reports)
        if not absent and made_progress(call, reports, 0.8 * limit):
            self._grace = waited - limit + limit / 4  # a large file takes its time: check again later
            return
        text = f"{call.text} has waited for {waited:.1f} s, its deadline is {limit:g} s"
        notes = [] if self._gpu is None else self._launches(0.8 * limit)[2]
        self._raise(record.thread, text, [verdict(call, absent, reports, _peers_of), *notes], reports)

    def _raise(self, thread: int, text: str, why: list[str], reports: Mapping[int, Report]) -> None:
        """Raise in a thread, with the table, and end the job."""
        folder = self._flight_records(reports)
        self._send_all("raise", folder)
        records = [f"flight records: torchfrtrace {path}" for path in sorted(Path(folder).iterdir() if folder else [])]
        _show(thread, "\n".join([text, table(reports.values(), time.time()), *why, *records]))
        abort.job(1, _JOIN)

    # Collectives on a GPU, of which no record knows whether the GPU has done them.

    def _on_gpu(self, seconds: float) -> bool:
        """Count time that has passed without another collective on the GPU; react to one that others have not launched.

        Returns:
            Whether it has asked the other ranks.
        """
        launched, limit = _launched()
        if launched != self._launched:
            self._launched, self._still = launched, 0.0
        else:
            self._still += seconds
        if self._still < limit or launched == self._noted or self._stopping:
            return False
        if self._ask_in_turn(ALARM) is None:
            self._until(time.monotonic() + _PATIENCE, lambda: self._raised_by is not None)
            return True
        behind, silent, notes, reports = self._launches(0.8 * limit)
        assert self._gpu is not None
        busy = not accelerator.idle(self._gpu[0])
        if busy and not behind:
            behind = silent.union(rank for rank, report in reports.items() if report.doing in GONE)
        self._noted = launched
        if _launched()[0] == launched and (behind or busy):
            text = f"a collective on the GPU has waited for {self._still:.1f} s, its deadline is {limit:g} s"
            if behind:
                why = [*notes, verdict(_COLLECTIVE, sorted(behind), reports)]
                self._raise(os.getpid(), text, why, reports)
            _print_table("\n".join([text, table(reports.values(), time.time()), *notes]))
        return True

    def _launches(self, limit: float) -> tuple[set[int], set[int], list[str], dict[int, Report]]:
        """Return which ranks are behind in NCCL's collectives, which are silent, what NCCL's RAS says, and the reports.

        The reports are later than the answer of RAS: what a waiting rank has launched was old by then.

        Args:
            limit: seconds without another collective after which a rank waits.
        """
        assert self._gpu is not None
        where, nodes = self._gpu[1], defaultdict[int, dict[int, int]](dict)
        for rank, member in enumerate(self._members):
            nodes[member["node"]][member["pid"]] = rank
        found: list[ras.Communicator] = []
        problem = "" if where else "NCCL_RAS_ENABLE=0"
        try:
            found = ras.communicators(ras.ask(where, _RAS)) if where else []
        except (OSError, ValueError) as error:
            problem = str(error)
        reports = self._ask(ALARM, _ANSWERS)
        waiting = [rank for rank, report in reports.items() if report.still >= limit]
        behind, silent, notes = ras.compare(found, ras.ranks_of(found, list(nodes.values())), waiting)
        return behind, silent, [f"NCCL's RAS gives no answer: {problem}"] if problem else notes, reports

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
            flight_records.write_own(folder, self._rank)
        except Exception as error:
            abort.print_error(f"hpcdist: there are no flight records of torch's own groups: {error}")

    def _join(self, other: int) -> None:
        """Raise in all waiting calls of this rank, because another rank does so and ends the job."""
        for record in activity.thread_records:
            call = record.current()
            if call is not None and not record.patient:
                _show(record.thread, coded("HD601", f"{call.text} has waited; see the output of rank {other}"))
        save_trace(finished=False)
        if self._folder:
            self._write_own(Path(self._folder))
        self._until(time.monotonic() + _PATIENCE)
        abort.job(1)  # that rank has not raised

    # The death of a peer.

    def _on_peer_death(self) -> None:
        """Report a process of this node that has died, and end the job, unless it is ending already."""
        self._peer_died = False
        save_trace(finished=False)  # now, because the launcher may end this process at any time
        self._until(time.monotonic() + _END)
        if self._stopping or self._ended or any(self._record.read(slot).state == ENDING for slot in self._local_ranks):
            return
        dead = {rank: self._seen(rank) for slot, rank in self._local_ranks.items() if self._died(slot)}
        if not dead:
            return
        abort.print_error(with_hint("hpcdist: " + verdict(_NOTHING, list(dead), dead)))
        reports = self._ask_in_turn(ALARM, _HASTE)
        if reports is not None:
            abort.print_error(table(reports.values(), time.time()))
        abort.job(1)

    def _on_inquiries(self) -> None:
        """Print the table and which ranks are dead or stopped, if any; one rank does for all."""
        try:
            reports = self._ask_in_turn(ALARM) or {}
            gone = [rank for rank, report in reports.items() if report.doing in GONE]
            if gone:
                _print_table(f"{table(reports.values(), time.time())}\n{verdict(_NOTHING, gone, reports)}")
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
            if time.monotonic() - self._demanded < _TURNS:
                return
            self._demanded = time.monotonic()
            reports = self._ask_in_turn(DEMAND, within=_TURNS)
            if reports is not None:
                _print_table(table(reports.values(), time.time()))
        finally:
            self._signalled = False


def _launched() -> tuple[tuple[int, ...], float]:
    """Return the number of hpcdist's calls and of the collectives of torch's groups, and the deadline of the latter."""
    launched, limit = torch_groups.launched()
    return (sum(record.begun for record in activity.thread_records), *launched), limit


def save_trace(finished: bool) -> None:
    """Write the trace of this rank, if there is one; the program ends all the same if that fails."""
    try:
        if recording.current is not None:
            recording.current.save(finished)
    except OSError as error:
        abort.print_error(f"hpcdist: the trace of this rank is not complete: {error}")


def _peers_of(team: int) -> Sequence[int]:
    return activity.peers.get(team, ())


def _show(thread: int, text: str) -> None:
    frame = procstat.frames().get(thread)
    abort.show(HangError(text), frame and callsite.outside(frame))


def _print_table(text: str) -> None:
    abort.print_error(with_hint("hpcdist: the calls of all ranks\n" + text))


def _described(call: Any) -> str:
    """Describe the tensors among nested lists, "8192 x torch.float32": the number of elements and dtype of each."""
    sizes = Counter(f"{x.numel()} x {x.dtype}" for x in tensors_in([call]))
    texts = [f"{count} tensors of {size}" if count > 1 else size for size, count in sizes.items()]
    return ", ".join(texts[:_SHOWN]) + (f", and {len(texts) - _SHOWN} other sizes" if len(texts) > _SHOWN else "")
