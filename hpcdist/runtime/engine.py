"""The thread in which calls go on in the background: it advances jobs that wait for MPI, in the order they came in."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from concurrent import futures
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

from hpcdist.errors import HpcdistError

__all__ = ["Engine", "Steps", "Turn", "Waiting"]

T = TypeVar("T")

LONGEST_NAP = 2e-4  # seconds between two looks, where nothing has happened for a while


class Waiting(Protocol):
    """Something that MPI, or the file system, has to do first."""

    def ready(self) -> bool: ...

    def wait(self) -> None: ...


Steps = Generator[Waiting, None, T]
"""A job: it yields what it waits for, and returns its result. Until its first Turn has come it can be cancelled."""


class Turn:
    """The first thing that a job waits for: others that conflict with it go on in the order in which they began."""

    def ready(self) -> bool:
        raise NotImplementedError

    def wait(self) -> None:
        raise NotImplementedError

    def conflicts_with(self, other: Turn) -> bool:
        """Whether one of them has to come before the other."""
        raise NotImplementedError

    def give_back(self) -> None:
        """Undo ready(): the job was cancelled in the meantime."""


@dataclass
class _Job:
    """A job and what it waits for now; `on_begun` is called once, when its turn has come or it has failed."""

    steps: Steps[Any]
    future: futures.Future[Any]
    on_begun: Callable[[], None] | None
    waiting: Waiting | None = None

    def tell(self) -> None:
        if self.on_begun is not None and (self.future.done() or not isinstance(self.waiting, (Turn, type(None)))):
            self.on_begun()
            self.on_begun = None


class Engine:
    """A thread that advances jobs until they are done, and sleeps while there are none.

    Args:
        name: of the thread.
        prepare: what the thread does first.
    """

    def __init__(self, name: str, prepare: Callable[[], None] | None = None) -> None:
        self._name, self._prepare = name, prepare
        self._lock = threading.Lock()
        self._arriving: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._abandoned: list[_Job] = []  # MPI may still read and write their memory

    def begin(self) -> None:
        """Begin the thread now, and not with the first job."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()

    def submit(self, steps: Steps[T], on_begun: Callable[[], None] | None = None) -> futures.Future[T]:
        """Run a job. Jobs that conflict go on in the order in which they were submitted."""
        future: futures.Future[T] = futures.Future()
        self.begin()
        self._arriving.put(_Job(steps, future, on_begun))
        return future

    def _work(self) -> None:
        if self._prepare is not None:
            self._prepare()
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
                del job  # and what it holds, once it is done
            before = len(jobs)
            jobs, moved = _advance_all(jobs)
            nap = 0.0 if moved or len(jobs) < before else min(LONGEST_NAP, nap + 2e-6)
            if jobs:
                time.sleep(nap)
        self._abandoned = jobs
        for job in jobs:  # nobody is there any more to send or receive it
            job.future.set_exception(HpcdistError("the world has ended before this message was sent or received"))

    def stop(self) -> bool:
        """End the thread after the jobs that wait for nothing; whether others are left, whose memory is kept."""
        if self._thread is not None:
            self._arriving.put(None)
            self._thread.join()
        _kept.extend(self._abandoned)
        return bool(self._abandoned)


_kept: list[_Job] = []  # those of all engines that have ended


def _advance_all(jobs: list[_Job]) -> tuple[list[_Job], bool]:
    """(those that are still under way, whether any has gone on), in the order in which they were begun."""
    moved = False
    left = []
    before: list[Turn] = []  # what waits for its turn comes before later ones
    for job in jobs:
        try:
            while job.waiting is None or _may_go_on(job.waiting, before):
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
        job.tell()
    return left, moved


def _may_go_on(waiting: Waiting, before: list[Turn]) -> bool:
    if not isinstance(waiting, Turn):
        return waiting.ready()
    if not any(waiting.conflicts_with(other) for other in before) and waiting.ready():
        return True
    before.append(waiting)
    return False
