"""What two ranks send each other: steps that wait for MPI, done at once, or by a thread that looks after many."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator
from concurrent import futures
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch
from mpi4py import MPI

from hpcdist import abort
from hpcdist.control import objects
from hpcdist.errors import HpcdistError
from hpcdist.groups import Group
from hpcdist.handle import Handle, check_threads
from hpcdist.matching import Envelope, Unexpected, conflict
from hpcdist.watch import record

if TYPE_CHECKING:
    from hpcdist.world import World

__all__ = ["DONE", "Arrival", "Aside", "Departure", "Engine", "Requests", "Steps"]

T = TypeVar("T")

_LONGEST_NAP = 2e-4  # seconds between two looks, where nothing has happened for a while
_SPINS = 200  # looks before the first nap


class Waiting(Protocol):
    """Something that MPI, or the file system, has to do first."""

    def ready(self) -> bool: ...

    def wait(self) -> None: ...


Steps = Generator[Waiting, None, T]
"""A transfer: it yields what it has to wait for, and returns its result. Until the first has come, an Arrival or a
Departure, it can be called off; after DONE all has moved, and what is left concerns this rank alone."""


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


class Departure:
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

    def conflicts_with(self, other: Arrival | Departure) -> bool:
        """Whether one of them has to be sent before the other."""
        return isinstance(other, Departure) and self._queue == other._queue


class Arrival:
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
            time.sleep(min(_LONGEST_NAP, (time.monotonic() - begin) / 10))

    def conflicts_with(self, other: Arrival | Departure) -> bool:
        """Whether there are messages that both could take."""
        return isinstance(other, Arrival) and conflict(self._wanted, other._wanted)


@dataclass
class _Job:
    steps: Steps[Any]
    future: futures.Future[Any]
    receives: bool
    waiting: Waiting | None = None
    passed: bool = False  # what comes after it needs not queue behind it any more

    def begun(self) -> bool:
        """Whether it has got its message, or sent it, or failed."""
        return self.future.done() or not (self.waiting is None or isinstance(self.waiting, (Arrival, Departure)))


_abandoned: list[_Job] = []  # MPI may still read and write their memory


class Engine:
    """The transfers between this rank and others that are under way. Collective over the world when it is made.

    What was asked for first comes first: a transfer in the foreground queues behind sends that have not begun, and
    receives that have not ended, in the background.

    Attributes:
        header_comm, data_comm: communicators for what is sent first of a message, and for what follows.
        unexpected: what has come, and was not asked for yet.
    """

    def __init__(self, world: World) -> None:
        self.header_comm, self.data_comm = world.team.comm.Dup(), world.team.comm.Dup()
        self.unexpected = Unexpected(self.header_comm)
        self.most_tag = int(self.data_comm.Get_attr(MPI.TAG_UB) or 32767)
        self._world = world
        self._number = 0  # of the latest message sent, by which its parts are told from others'
        self._lock = threading.Lock()
        self._arriving: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ahead = {True: 0, False: 0}  # receives that have not ended, sends that have not begun

    def number(self) -> int:
        """A number for a message, even and below `most_tag`: an answer to it has the number behind it."""
        with self._lock:
            self._number = (self._number + 2) % (self.most_tag // 2 * 2)
            return self._number

    def run(self, verb: str, steps: Steps[T], receives: bool) -> T:
        """Do a transfer now."""
        if self._ahead[receives]:
            return self._run_behind(verb, steps, receives)
        first, begun = next(steps), False
        try:
            first.wait()
            with abort.InStep(verb, self._world.world_size):
                begun = True
                while (waiting := next(steps)) is not DONE:
                    waiting.wait()
                    record.touch()
        except BaseException:
            if not begun and isinstance(first, Arrival):
                first.give_back()
            raise
        return _result(steps)

    def _run_behind(self, verb: str, steps: Steps[T], receives: bool) -> T:
        """Do a transfer now, behind others that are under way."""
        future: futures.Future[T] = self._queue(steps, receives)
        try:
            return Handle(future, "the transfer().wait", self._world.team, record.NOBODY).wait()
        except BaseException as error:
            if future.cancel() or (future.done() and future.exception() is error):
                raise  # nothing has been taken or sent, or it is the transfer's own
            with abort.InStep(verb, self._world.world_size):
                raise

    def submit(self, verb: str, steps: Steps[T], peer: int, receives: bool) -> Handle[T]:
        """Do a transfer in the background; it depends on `peer`, a rank of the world."""
        return Handle(self._queue(steps, receives), f"{verb}().wait", self._world.team, peer)

    def _queue(self, steps: Steps[T], receives: bool) -> futures.Future[T]:
        """Hand a transfer to the thread. Until it has got its message, or sends it, it can be cancelled."""
        check_threads()
        future: futures.Future[T] = futures.Future()
        if receives:
            future.add_done_callback(lambda _: self._passed(True))
        with self._lock:
            self._ahead[receives] += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="hpcdist-post", daemon=True)
                self._thread.start()
            self._arriving.put(_Job(steps, future, receives))
        return future

    def _passed(self, receives: bool) -> None:
        with self._lock:
            self._ahead[receives] -= 1

    def _work(self) -> None:
        if self._world.device.type == "cuda":
            torch.cuda.set_device(self._world.device)
        jobs: list[_Job] = []
        nap = 0.0
        while True:
            try:
                job = self._arriving.get(block=not jobs)
            except Empty:
                pass
            else:
                if job is None:
                    break
                nap = 0.0
                jobs.append(job)
            before, all_ = len(jobs), jobs
            jobs, moved = _advance_all(jobs)
            for job in all_:
                if not (job.receives or job.passed) and job.begun():
                    job.passed = True
                    self._passed(False)
            nap = 0.0 if moved or len(jobs) < before else min(_LONGEST_NAP, nap + 2e-6)
            if jobs:
                time.sleep(nap)
        _abandoned.extend(jobs)
        for job in jobs:  # nobody is there any more to send or receive it
            job.future.set_exception(HpcdistError("the world has ended before this message was sent or received"))

    def stop(self) -> None:
        """End the thread. What is under way then, if anything, is for nobody. Collective over the world."""
        if self._thread is not None:
            self._arriving.put(None)
            self._thread.join()
        abandoned = objects.all_gather_object(self._world.team.comm, bool(_abandoned))
        if not any(abandoned):  # else a new one could meet what still comes
            self.header_comm.Free()
            self.data_comm.Free()


def _result(steps: Steps[T]) -> T:
    """Of a transfer that has nothing to wait for any more."""
    try:
        while True:
            next(steps)
    except StopIteration as done:
        result: T = done.value
        return result


def _advance_all(jobs: list[_Job]) -> tuple[list[_Job], bool]:
    """(those that are still under way, whether any has gone on), in the order in which they were begun."""
    moved = False
    left = []
    before: list[Arrival | Departure] = []  # what waits for a message, or to send one, does so before later ones
    for job in jobs:
        try:
            while job.waiting is None or _may_go_on(job.waiting, before):
                if isinstance(job.waiting, (Arrival, Departure)) and not job.future.set_running_or_notify_cancel():
                    if isinstance(job.waiting, Arrival):
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
    return left, moved


def _may_go_on(waiting: Waiting, before: list[Arrival | Departure]) -> bool:
    if not isinstance(waiting, (Arrival, Departure)):
        return waiting.ready()
    if not any(waiting.conflicts_with(other) for other in before) and waiting.ready():
        return True
    before.append(waiting)
    return False
