"""Questions of a rank to the watches of all others, and its answers to theirs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hpcdist.watch.datagrams import Datagrams
from hpcdist.watch.hang_table import Report
from hpcdist.watch.reporter import Reporter

ANSWERS = 1.0  # seconds to wait for answers
PATIENCE = 5.0  # seconds for the rank that has printed the table to end the job
TURNS = 1.0  # seconds of all turns at most
_TURN = 0.02  # seconds by which each rank waits longer than the one before it: one asks for all


class Peers:
    """The other ranks, as this rank asks and answers them. But for send_all(), only the watching thread uses it.

    If a rank does not answer, another rank of its node reads its shared record.

    Args:
        until: answers other ranks' questions until a time, or until a function returns true.
        on_end: called when the first rank announces that it ends the job.

    Attributes:
        ended: whether another rank ends the job.
        raised_by: a rank that raises a HangError, if one does.
    """

    def __init__(
        self,
        datagrams: Datagrams,
        reporter: Reporter,
        until: Callable[[float, Callable[[], bool]], None],
        on_end: Callable[[], None],
    ) -> None:
        self._datagrams, self._reporter, self._until, self._on_end = datagrams, reporter, until, on_end
        self._members, self._rank = reporter.members, reporter.rank
        self._asked_by: dict[int, tuple[str, float]] = {}  # reason and time of the last question of each rank
        self._answers: dict[int, Report] = {}
        self._number = 0  # the latest question: only answers to it count
        self.ended = False
        self.raised_by: int | None = None

    def fileno(self) -> int:
        return self._datagrams.fileno()

    def close(self) -> None:
        self._datagrams.close()
        del self._until  # the watch's own: without this cycle, the memory of the records ends at once

    def wait_for_raise(self) -> None:
        """Give the rank that has asked time to raise."""
        self._until(time.monotonic() + PATIENCE, lambda: self.raised_by is not None)

    def send_all(self, kind: str) -> None:
        """Announce to all other ranks that this one will "raise", or "end" the job."""
        for rank in range(len(self._members)):
            if rank != self._rank:
                self._send(rank, kind)

    def receive(self) -> None:
        """Process the messages that have arrived."""
        for message in self._datagrams.receive():
            self._take(message["kind"], message["from"], message)

    def ask_in_turn(self, why: str, seconds: float = ANSWERS, within: float = PATIENCE) -> dict[int, Report] | None:
        """Query the activity of all ranks; None if another rank has asked `within` seconds, or asks now.

        The ranks take turns. If several ask at once nevertheless, the lowest continues: its question arrives here
        before its answer to this rank's question.
        """
        begin = time.monotonic()
        turn = begin + min(self._rank * _TURN, TURNS)
        self._until(turn, lambda: bool(self._asking(why, begin - within)))
        if self._asking(why, begin - within):
            return None
        reports = self.ask(why, seconds)
        return None if any(rank < self._rank for rank in self._asking(why, begin)) else reports

    def ask(self, why: str, seconds: float) -> dict[int, Report]:
        """Return the activity of every rank, from its own report if it answers.

        Args:
            why: reason, which the other ranks see.
            seconds: time to wait for answers.
        """
        self._datagrams.expect_all()
        self._number += 1
        self._answers = {self._rank: self._reporter.own()}
        begin = time.monotonic()
        for part in (0.3, 1.0):  # silent ranks are asked again
            for rank in self._silent():
                self._send(rank, "ask", why=why, number=self._number)
            self._until(begin + part * seconds, lambda: not self._silent())
        for rank in self._silent():
            node = self._members[rank]["node"]
            witness = next((r for r in self._answers if self._members[r]["node"] == node), None)
            if rank in self._reporter.local_ranks.values():
                self._answers[rank] = self._reporter.seen(rank)
            elif witness is not None:
                self._send(witness, "ask about", rank=rank, number=self._number)
        self._until(time.monotonic() + 0.3 * seconds, lambda: not self._silent())
        for rank in self._silent():  # all other ranks of its node are silent, too
            refused = self._datagrams.refused(self._members[rank]["address"])
            self._answers[rank] = self._reporter.unseen(rank, refused)
        return dict(sorted(self._answers.items()))

    def _asking(self, why: str, since: float) -> list[int]:
        """Return the other ranks that have asked for that reason."""
        return [rank for rank, (reason, at) in self._asked_by.items() if reason == why and at > since]

    def _silent(self) -> list[int]:
        return [rank for rank in range(len(self._members)) if rank not in self._answers]

    def _send(self, dest: int, kind: str, **fields: Any) -> bool:
        return self._datagrams.send(self._members[dest]["address"], {"kind": kind, "from": self._rank, **fields})

    def _answer(self, dest: int, number: int, report: Report) -> None:
        """Send a report, without what makes it too long for a message."""
        alone = [replace(thread, peers=[]) for thread in report.threads]
        for shorter in (report, replace(report, launched={}), replace(report, launched={}, threads=alone, stack=[])):
            if self._send(dest, "answer", number=number, report=shorter):
                return

    def _take(self, kind: str, source: int, message: dict[str, Any]) -> None:
        """Process a message of another rank."""
        if kind == "ask":
            self._asked_by[source] = message["why"], time.monotonic()
            self._answer(source, message["number"], self._reporter.own())
        elif kind == "ask about":
            self._answer(source, message["number"], self._reporter.seen(message["rank"]))
        elif kind == "raise":
            self.raised_by = source
        elif kind == "end":
            if not self.ended:
                self.ended = True
                self._on_end()
        elif message["number"] == self._number:
            self._answers[message["report"].rank] = message["report"]
