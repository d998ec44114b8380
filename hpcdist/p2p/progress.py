"""The engine of point-to-point transfers: runs their steps now, or in a thread that advances many of them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator
from concurrent import futures
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from mpi4py import MPI

from hpcdist import activity
from hpcdist.comm.context import Context
from hpcdist.comm.matching import Envelope, Unexpected, conflict
from hpcdist.comm.team import Group
from hpcdist.comm.worker import Worker
from hpcdist.errors import HpcdistError
from hpcdist.process import abort
from hpcdist.runtime.background import Handle, check_threads

__all__ = ["DONE", "RecvTurn", "Requests", "SendTurn", "Steps", "Task", "Transport", "transport"]

T = TypeVar("T")

_SPINS = 200  # polls before the first sleep
_MAX_SLEEP = 2e-4  # seconds between two polls, when nothing has happened for a while


class Waiting(Protocol):
    """A condition that MPI, or the file system, must satisfy first."""

    def ready(self) -> bool: ...

    def wait(self) -> None: ...


Steps = Generator[Waiting, None, T]
"""A transfer: yields what it waits for, and returns its result. It can be cancelled until its Turn is ready."""


class _Done:
    """The end of a transfer: nothing to wait for."""

    def ready(self) -> bool:
        return True

    def wait(self) -> None:
        return None


DONE = _Done()


class Requests:
    """Waits until messages are sent or received."""

    def __init__(self, requests: list[MPI.Request]) -> None:
        self._requests = requests

    def ready(self) -> bool:
        return MPI.Request.Testall(self._requests)

    def wait(self) -> None:
        MPI.Request.Waitall(self._requests)


class Task(Generic[T]):
    """Waits until a long step of this rank alone is done.

    ready() runs it in a thread of its own, so that other transfers can advance; wait() runs it in this thread.
    result() raises its error.
    """

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


class Turn:
    """The first condition of a transfer: those whose turns conflict advance in the order of their submission."""

    def ready(self) -> bool:
        raise NotImplementedError

    def wait(self) -> None:
        raise NotImplementedError

    def conflicts_with(self, other: Turn) -> bool:
        """Return whether the two must keep their order."""
        raise NotImplementedError

    def give_back(self) -> None:
        """Undo ready(), since the transfer was cancelled in the meantime."""


class SendTurn(Turn):
    """Waits until a message may be sent: after its task, and after the earlier messages of its queue.

    Args:
        queue: (group, receiver, tag) of the message; messages of one queue are sent in order.
        task: a task to do first, if any.
    """

    def __init__(self, queue: tuple[int, int, int], task: Task[Any] | None = None) -> None:
        self._queue, self._task = queue, task

    def ready(self) -> bool:
        return self._task is None or self._task.ready()

    def wait(self) -> None:
        if self._task is not None:
            self._task.wait()
            self._task.result()  # an error concerns this rank alone: nothing has been sent

    def conflicts_with(self, other: Turn) -> bool:
        return isinstance(other, SendTurn) and self._queue == other._queue


class RecvTurn(Turn):
    """Waits until a message arrives, and takes it for this receive alone.

    Args:
        group: the group of the message.
        source: the world rank of its sender; None means any.
        tag: the tag of the message; None means any.

    Attributes:
        matched: envelope of the message, once it has arrived.
    """

    def __init__(self, unexpected: Unexpected, group: Group, source: int | None, tag: int | None) -> None:
        self._unexpected, self._group = unexpected, group
        self._wanted = group.message_key(), source, tag
        self.matched: list[Envelope] = []

    def ready(self) -> bool:
        if self._group.ended:
            raise HpcdistError("HD112", "the group has ended before this message was received")
        return self._unexpected.take(*self._wanted, self.matched)

    def give_back(self) -> None:
        """Return the message, for another receive."""
        for envelope in self.matched:
            self._unexpected.give_back(envelope)

    def wait(self) -> None:
        """Poll instead of waiting in MPI, where Python's signal handlers (Ctrl-C) would not run."""
        for _ in range(_SPINS):
            if self.ready():
                return
            os.sched_yield()  # time.sleep(0) may take 50 us
        begin = time.monotonic()
        while not self.ready():
            time.sleep(min(_MAX_SLEEP, (time.monotonic() - begin) / 10))

    def conflicts_with(self, other: Turn) -> bool:
        return isinstance(other, RecvTurn) and conflict(self._wanted, other._wanted)


@dataclass
class _Job:
    """A transfer, and the condition it waits for; `on_begun` is called once, after its turn or its failure."""

    steps: Steps[Any]
    future: futures.Future[Any]
    on_begun: Callable[[], None] | None
    waiting: Waiting | None = None

    def notify(self) -> None:
        if self.on_begun is not None and (self.future.done() or not isinstance(self.waiting, (Turn, type(None)))):
            self.on_begun()
            self.on_begun = None


class Transport:
    """The transfers in progress between this rank and others.

    They run in the order of the calls: a transfer in the foreground queues after sends that have not begun, and after
    receives that have not ended, in the background.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self._worker = Worker("hpcdist-p2p")
        self._jobs: list[_Job] = []  # the callers append, the worker removes
        self._ending = False
        self._number = 0  # number of the latest message sent, the MPI tag of its parts
        self._counting = threading.Lock()
        self._queued = {True: 0, False: 0}  # receives that have not ended, sends that have not begun

    def number(self) -> int:
        """Return a number for a message: even and below the largest tag; the answer to it has the next number."""
        with self._counting:
            self._number = (self._number + 2) % (self.context.most_tag // 2 * 2)
            return self._number

    def run(self, verb: str, steps: Steps[T], receives: bool) -> T:
        """Run a transfer in the foreground."""
        if self._queued[receives]:
            return self._run_queued(verb, steps, receives)
        first, begun = next(steps), False
        try:
            first.wait()
            with abort.InStep(verb, self.context.team.size):
                begun = True
                while (waiting := next(steps)) is not DONE:
                    waiting.wait()
                    activity.touch()
        except BaseException:
            if not begun and isinstance(first, RecvTurn):
                first.give_back()
            raise
        return _result(steps)

    def _run_queued(self, verb: str, steps: Steps[T], receives: bool) -> T:
        """Run a transfer after others in the background, and wait for it."""
        future: futures.Future[T] = self._queue(steps, receives)
        try:
            return Handle(future, "the transfer().wait", self.context.team, activity.NOBODY).wait()
        except BaseException as error:
            if future.cancel() or (future.done() and future.exception() is error):
                raise  # nothing has been taken or sent, or it is the error of the transfer
            with abort.InStep(verb, self.context.team.size):
                raise

    def start(self, verb: str, steps: Steps[T], peer: int, receives: bool) -> Handle[T]:
        """Start a transfer in the background; it depends on `peer`, a world rank."""
        return Handle(self._queue(steps, receives), f"{verb}().wait", self.context.team, peer)

    def _queue(self, steps: Steps[T], receives: bool) -> futures.Future[T]:
        """Submit a transfer to the thread. It can be cancelled until it has matched a message, or starts sending."""
        check_threads()
        with self._counting:
            self._queued[receives] += 1
        future: futures.Future[T] = futures.Future()
        job = _Job(steps, future, None if receives else lambda: self._leave_queue(False))
        with self._counting:
            self._jobs.append(job)
        self._worker.submit(self._advance)
        if receives:
            future.add_done_callback(lambda _: self._leave_queue(True))
        return future

    def _leave_queue(self, receives: bool) -> None:
        with self._counting:
            self._queued[receives] -= 1

    def _advance(self) -> None:
        """Advance the transfers until none is left, in the worker's thread; it sleeps while they all wait."""
        _set_device(self.context.settings.device)
        sleep = 0.0
        while self._jobs:
            count = len(self._jobs)
            left, moved = _advance_all(self._jobs[:count])
            with self._counting:
                self._jobs[:count] = left
            if self._ending:
                break
            if self._jobs:
                sleep = 0.0 if moved or len(self._jobs) != count else min(_MAX_SLEEP, sleep + 2e-6)
                time.sleep(sleep)

    def stop(self) -> bool:
        """End the thread after the transfers that can finish; return whether others are left, whose memory is kept."""
        self._ending = True
        self._worker.stop()
        for job in self._jobs:
            job.future.set_exception(
                HpcdistError("HD112", "the world has ended before this message was sent or received")
            )
        _kept.extend(self._jobs)
        return bool(self._jobs)


_kept: list[_Job] = []  # transfers that never ended: MPI may still read and write their memory


def transport(context: Context) -> Transport:
    """Return the transport of a job, created at its first use; no communication."""
    if context.transport is None:
        context.transport = Transport(context)
    found: Transport = context.transport
    return found


def _set_device(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)


def _result(steps: Steps[T]) -> T:
    """Finish a transfer that has nothing left to wait for."""
    try:
        while True:
            next(steps)
    except StopIteration as done:
        result: T = done.value
        return result


def _advance_all(jobs: list[_Job]) -> tuple[list[_Job], bool]:
    """Advance all jobs, in order; return those still in progress, and whether any has advanced."""
    moved = False
    left = []
    before: list[Turn] = []  # turns of earlier jobs that still wait
    for job in jobs:
        try:
            while job.waiting is None or _can_advance(job.waiting, before):
                if isinstance(job.waiting, Turn) and not job.future.set_running_or_notify_cancel():
                    job.waiting.give_back()
                    break
                job.waiting = next(job.steps)
                moved = True
            if not job.future.cancelled():
                left.append(job)
        except StopIteration as done:
            job.future.set_result(done.value)
        except BaseException as error:  # wait() raises it
            if not job.future.cancelled():
                job.future.set_exception(error)
        job.notify()
    return left, moved


def _can_advance(waiting: Waiting, before: list[Turn]) -> bool:
    if not isinstance(waiting, Turn):
        return waiting.ready()
    if not any(waiting.conflicts_with(other) for other in before) and waiting.ready():
        return True
    before.append(waiting)
    return False
