"""Asking all ranks what they are at; and for those that do not answer, the others of their node."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from hpcdist import activity
from hpcdist.activity import AT_WORK, ENDED, ENDING, Board, Process
from hpcdist.control import objects
from hpcdist.watch import procfs
from hpcdist.watch.datagrams import KEY, Wire
from hpcdist.watch.table import WAITS, Report, Thread, of_json

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Survey"]

_SILENT = "running, but does not answer: native code that holds Python's lock, or no processor for it"
_UNSEEN = "silent: it is stopped, or in native code that holds Python's lock, or its node is down or cut off"


class Survey:
    """What this rank needs to ask the others, and to answer them.

    Collective over `comm` when it is made: all that is needed when somebody hangs is exchanged then.

    Args:
        comm: all ranks.
        local: those of this node.
        address: of this host, where there are several nodes; None on one.
        waited: the seconds for which the call of each lane of this process has not got on.

    Attributes:
        rank: of this process.
        ranks: all of them.
        mates: the rank of each seat on this node's board; empty if there is none.
        one_system: all ranks see each other's processes.
        ended, raised_by: whether another rank ends the job; which one raises.
        asked_by: why each rank has last asked, and when that was (seconds of time.monotonic).
    """

    def __init__(
        self, comm: MPI.Intracomm, local: MPI.Comm, address: str | None, waited: Callable[[], list[float]]
    ) -> None:
        self.waited = waited
        self.rank: int = comm.rank
        self._board, self._seat = _board(local)
        self.announce(AT_WORK)
        key = objects.broadcast_bytes(comm, os.urandom(KEY) if comm.rank == 0 else b"", 0)
        self.wire = Wire(key, f"hpcdist-{key[:8].hex()}-{comm.rank}", address)
        leader = int.from_bytes(objects.broadcast_bytes(local, comm.rank.to_bytes(8, "little"), 0), "little")
        me = {"address": self.wire.address, "host": socket.gethostname(), "pid": os.getpid()}
        self._ends = objects.all_gather_object(
            comm, {**me, "node": leader, "seat": self._seat, "alone": local.size == 1}
        )
        self.ranks = list(range(comm.size))
        mates = {end["seat"]: rank for rank, end in enumerate(self._ends) if end["node"] == leader}
        self.mates: dict[int, int] = mates if len(mates) == local.size else {self._seat: self.rank}
        self.one_system = len(self.mates) == comm.size
        self.asked_by: dict[int, tuple[str, float]] = {}
        self._answers: dict[int, Report] = {}
        self.ended = False
        self.raised_by: int | None = None
        self._number = 0  # of the question whose answers count
        activity.start(self._board, self._seat)

    def announce(self, state: int) -> None:
        """Let the other ranks of this node see what this process is at."""
        self._board.announce(self._seat, state)

    def neighbour(self) -> tuple[int, int] | None:
        """(seat, descriptor of its process) of the next rank on this node, for this one to look after."""
        seats = sorted(self.mates)
        seat = seats[(seats.index(self._seat) + 1) % len(seats)]
        try:
            return None if seat == self._seat else (seat, os.pidfd_open(self._board.read(seat).pid))
        except (OSError, AttributeError):  # an old kernel: the launcher will see it, or the deadline
            return None

    def died(self, seat: int) -> bool:
        """Whether the process of a seat has gone without a word."""
        process = self._board.read(seat)
        return process.state == AT_WORK and procfs.condition(process.pid, process.started) == "dead"

    def end_job(self) -> None:
        """This rank ends the job: the others are not to wonder, and to leave nothing behind."""
        self.announce(ENDING)
        self.tell("end")

    def tell(self, kind: str) -> None:
        """Tell all others that this rank is about to "raise", or to "end" the job."""
        for rank in self.ranks:
            if rank != self.rank:
                self._send(rank, {"kind": kind})

    def job_ends(self) -> bool:
        """Whether a rank is ending the job."""
        return self.ended or any(self._board.read(seat).state == ENDING for seat in self.mates)

    def dead_mates(self) -> dict[int, Report]:
        """The ranks of this node whose process has gone without a word."""
        return {rank: self._seen(rank) for seat, rank in self.mates.items() if self.died(seat)}

    def mine(self) -> Report:
        """What this rank is at."""
        process, frames = self._board.read(self._seat), procfs.frames()
        report = self._report(self.rank, process)
        for thread, waited in zip(report.threads, self.waited(), strict=False):
            thread.waited = waited
        first = process.lanes[0].thread if process.lanes else os.getpid()  # the main thread has the process's number
        main = first if first in frames else os.getpid()
        if main in frames:
            busy = any(thread.call is not None for thread in report.threads)
            report.doing = WAITS if busy else procfs.doing(main, frames[main])
            report.stack = [] if busy else procfs.stack(frames[main])
        return report

    def take(self, message: dict[str, Any]) -> None:
        """See to a message of another rank."""
        from_ = message["from"]
        if message["kind"] == "ask":
            self.asked_by[from_] = message["why"], time.monotonic()
            self._answer(from_, message["number"], self.mine())
        elif message["kind"] == "end":
            self.ended = True
        elif message["kind"] == "raise":
            self.raised_by = from_
        elif message["kind"] == "look":
            for rank in message["ranks"]:
                self._answer(from_, message["number"], self._seen(rank))
        elif message["number"] == self._number:
            report = of_json(message["report"])
            self._answers[report.rank] = report

    def ask(self, why: str, seconds: float, until: Callable[[float, Callable[[], bool]], None]) -> dict[int, Report]:
        """What every rank is at, its own words first.

        Args:
            why: for the others to know.
            seconds: for which answers are waited for.
            until: takes messages until a time, or until there is nothing to wait for.
        """
        self._number += 1
        self._answers = {self.rank: self.mine()}
        begin = time.monotonic()
        for part in (0.3, 1.0):  # those that are silent are asked again
            for rank in self._silent():
                self._send(rank, {"kind": "ask", "why": why, "number": self._number})
            until(begin + part * seconds, lambda: not self._silent())
        for rank in self._silent():  # somebody of its node can look
            if rank in self.mates.values():
                self._answers[rank] = self._seen(rank)
            else:
                node = self._ends[rank]["node"]
                witness = next((r for r in self._answers if self._ends[r]["node"] == node), None)
                if witness is not None:
                    self._send(witness, {"kind": "look", "ranks": [rank], "number": self._number})
        until(time.monotonic() + 0.3 * seconds, lambda: not self._silent())
        for rank in self._silent():  # and nobody else of its node speaks
            self._answers[rank] = self._unseen(rank, self.wire.refused(self._ends[rank]["address"]))
        return dict(sorted(self._answers.items()))

    def close(self) -> None:
        activity.start(None)
        self.wire.close()
        self._board.close()

    def _silent(self) -> list[int]:
        return [rank for rank in range(len(self._ends)) if rank not in self._answers]

    def _send(self, rank: int, message: dict[str, Any]) -> None:
        self.wire.send(self._ends[rank]["address"], {**message, "from": self.rank})

    def _answer(self, rank: int, number: int, report: Report) -> None:
        self._send(rank, {"kind": "answer", "number": number, "report": report.json()})

    def _seen(self, rank: int) -> Report:
        """A rank of this node that does not speak for itself."""
        seat = self._ends[rank]["seat"]
        if self.mates.get(seat) != rank:
            return self._unseen(rank, False)
        process = self._board.read(seat)
        report = self._report(rank, process)
        condition = procfs.condition(process.pid, process.started)
        report.doing = _SILENT if condition == "alive" else condition
        if condition == "dead" and process.state == ENDED:
            report.doing = "at its end: it has finalized"
        return report

    def _unseen(self, rank: int, dead: bool) -> Report:
        end = self._ends[rank]
        return Report(rank, end["host"], end["pid"], doing="dead" if dead else _UNSEEN)

    def _report(self, rank: int, process: Process) -> Report:
        end = self._ends[rank]
        return Report(rank, end["host"], end["pid"], [Thread(*lane[1:]) for lane in process.lanes])


def _identity(fd: int) -> list[int]:
    status = os.fstat(fd)
    return [status.st_dev, status.st_ino]


def _board(local: MPI.Comm) -> tuple[Board, int]:
    """The memory that the ranks of a node share, and this rank's seat there. Collective over `local`.

    Without a name: the others find it by the process of the first one, or, where the system does not let them, each
    has one of its own.
    """
    board = Board(local.size) if local.rank == 0 else None
    mine = [os.getpid(), board.fd, _identity(board.fd)] if board is not None else None
    pid, fd, identity = objects.all_gather_object(local, mine)[0]
    if board is None:
        with suppress(OSError):
            found = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
            if _identity(found) == identity:  # else the processes have numbers of their own, as in containers
                board = Board(local.size, found)
            else:
                os.close(found)
    shared = all(objects.all_gather_object(local, board is not None))
    if not shared:
        if board is not None:
            board.close()
        return Board(1), 0
    assert board is not None
    return board, local.rank
