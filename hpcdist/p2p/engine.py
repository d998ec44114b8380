"""What two ranks send each other: steps that wait for MPI, done at once, or by a thread that looks after many."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent import futures
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from mpi4py import MPI

from hpcdist import activity
from hpcdist.comm.context import Context
from hpcdist.comm.groups import Group
from hpcdist.comm.matching import Envelope, Unexpected, conflict
from hpcdist.errors import HpcdistError
from hpcdist.process import abort
from hpcdist.runtime.background import Handle, check_threads
from hpcdist.runtime.engine import LONGEST_NAP, Engine, Steps, Turn

__all__ = ["DONE", "Arrival", "Aside", "Departure", "Requests", "Transport", "transport"]

T = TypeVar("T")

_SPINS = 200  # looks before the first nap


class _Mark:
    """A point in a transfer: there is nothing to wait for."""

    def ready(self) -> bool:
        return True

    def wait(self) -> None:
        return None


DONE = _Mark()


class Requests:
    """Until messages have been sent or received."""

    def __init__(self, requests: list[MPI.Request]) -> None:
        self._requests = requests

    def ready(self) -> bool:
        return MPI.Request.Testall(self._requests)

    def wait(self) -> None:
        MPI.Request.Waitall(self._requests)


class Aside(Generic[T]):
    """Until a step that may take long, of this rank alone, is done: in a thread of its own where other transfers wait
    meanwhile, else at once. What it raises, result() raises."""

    def __init__(self, step: Callable[[], T]) -> None:
        self._step = step
        self._future: futures.Future[T] = futures.Future()
        self._thread: threading.Thread | None = None

    def ready(self) -> bool:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hpcdist-file", daemon=True)
            self._thread.start()
        return self._future.done()

    def wait(self) -> None:
        if self._thread is None:
            self._run()
        futures.wait([self._future])

    def result(self) -> T:
        return self._future.result(0)

    def _run(self) -> None:
        try:
            self._future.set_result(self._step())
        except Exception as error:
            self._future.set_exception(error)


class Departure(Turn):
    """Until a message may be sent: what it is made of is there, and those begun before it have been sent.

    Args:
        queue: (group, receiver, tag) of the message: those of one queue are sent in their order.
        made: what has to be done first, if anything.
    """

    def __init__(self, queue: tuple[int, int, int], made: Aside[Any] | None = None) -> None:
        self._queue, self._made = queue, made

    def ready(self) -> bool:
        return self._made is None or self._made.ready()

    def wait(self) -> None:
        if self._made is not None:
            self._made.wait()
            self._made.result()  # what it raises concerns this rank alone: nothing has been sent

    def conflicts_with(self, other: Turn) -> bool:
        """Whether one of them has to be sent before the other."""
        return isinstance(other, Departure) and self._queue == other._queue


class Arrival(Turn):
    """Until a message has come in; it is then taken out, for this receiver alone.

    Args:
        group: in which it was sent.
        source: the world's rank of its sender; None for any.
        tag: None for any.

    Attributes:
        taken: its envelope, when it has come.
    """

    def __init__(self, unexpected: Unexpected, group: Group, source: int | None, tag: int | None) -> None:
        self._unexpected, self._group = unexpected, group
        self._wanted = group.message_key(), source, tag
        self.taken: list[Envelope] = []

    def ready(self) -> bool:
        if self._group.ended:
            raise HpcdistError("the group has ended before this message was received")
        return self._unexpected.take(*self._wanted, self.taken)

    def give_back(self) -> None:
        """Leave the message to another receive."""
        for envelope in self.taken:
            self._unexpected.give_back(envelope)

    def wait(self) -> None:
        """By looking again and again, and not inside MPI: there a handler of Python's, of Ctrl-C say, would not run."""
        for _ in range(_SPINS):
            if self.ready():
                return
            os.sched_yield()  # time.sleep(0) may take 50 us
        begin = time.monotonic()
        while not self.ready():
            time.sleep(min(LONGEST_NAP, (time.monotonic() - begin) / 10))

    def conflicts_with(self, other: Turn) -> bool:
        """Whether there are messages that both could take."""
        return isinstance(other, Arrival) and conflict(self._wanted, other._wanted)


class Transport(Engine):
    """The transfers between this rank and others that are under way.

    What was asked for first comes first: a transfer in the foreground queues after sends that have not begun, and
    receives that have not ended, in the background.
    """

    def __init__(self, context: Context) -> None:
        super().__init__("hpcdist-p2p", partial(_set_device, context.settings.device))
        self.context = context
        self._number = 0  # of the latest message sent, by which its parts are told from others'
        self._counting = threading.Lock()
        self._ahead = {True: 0, False: 0}  # receives that have not ended, sends that have not begun

    def number(self) -> int:
        """A number for a message, even and below the largest tag: an answer to it has the number behind it."""
        with self._counting:
            self._number = (self._number + 2) % (self.context.most_tag // 2 * 2)
            return self._number

    def run(self, verb: str, steps: Steps[T], receives: bool) -> T:
        """Do a transfer now."""
        if self._ahead[receives]:
            return self._run_behind(verb, steps, receives)
        first, begun = next(steps), False
        try:
            first.wait()
            with abort.InStep(verb, self.context.team.size):
                begun = True
                while (waiting := next(steps)) is not DONE:
                    waiting.wait()
                    activity.touch()
        except BaseException:
            if not begun and isinstance(first, Arrival):
                first.give_back()
            raise
        return _result(steps)

    def _run_behind(self, verb: str, steps: Steps[T], receives: bool) -> T:
        """Do a transfer now, behind others that are under way."""
        future: futures.Future[T] = self._queue(steps, receives)
        try:
            return Handle(future, "the transfer().wait", self.context.team, activity.NOBODY).wait()
        except BaseException as error:
            if future.cancel() or (future.done() and future.exception() is error):
                raise  # nothing has been taken or sent, or it is the transfer's own
            with abort.InStep(verb, self.context.team.size):
                raise

    def start(self, verb: str, steps: Steps[T], peer: int, receives: bool) -> Handle[T]:
        """Do a transfer in the background; it depends on `peer`, a rank of the world."""
        return Handle(self._queue(steps, receives), f"{verb}().wait", self.context.team, peer)

    def _queue(self, steps: Steps[T], receives: bool) -> futures.Future[T]:
        """Hand a transfer to the thread. Until it has got its message, or sends it, it can be cancelled."""
        check_threads()
        with self._counting:
            self._ahead[receives] += 1
        future = self.submit(steps, None if receives else lambda: self._passed(False))
        if receives:
            future.add_done_callback(lambda _: self._passed(True))
        return future

    def _passed(self, receives: bool) -> None:
        with self._counting:
            self._ahead[receives] -= 1


def transport(context: Context) -> Transport:
    """The transport of a job's ranks, begun when it is first used; nothing is communicated."""
    if context.engine is None:
        context.engine = Transport(context)
    assert isinstance(context.engine, Transport)
    return context.engine


def _set_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _result(steps: Steps[T]) -> T:
    """Of a transfer that has nothing to wait for any more."""
    try:
        while True:
            next(steps)
    except StopIteration as done:
        result: T = done.value
        return result
