"""The thread of calls in the background: advances jobs that wait for MPI, in the order of their submission."""

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

MAX_SLEEP = 2e-4  # seconds between two polls, when nothing has happened for a while


class Waiting(Protocol):
    """A condition that MPI, or the file system, must satisfy first."""

    def ready(self) -> bool: ...

    def wait(self) -> None: ...


Steps = Generator[Waiting, None, T]
"""A job: yields the conditions it waits for, and returns its result. It can be cancelled until its Turn is ready."""


class Turn:
    """The first condition of a job: jobs whose turns conflict advance in the order of their submission."""

    def ready(self) -> bool:
        raise NotImplementedError

    def wait(self) -> None:
        raise NotImplementedError

    def conflicts_with(self, other: Turn) -> bool:
        """Return whether the two must keep their order."""
        raise NotImplementedError

    def give_back(self) -> None:
        """Undo ready(), since the job was cancelled in the meantime."""


@dataclass
class _Job:
    """A job, and the condition it waits for; `on_begun` is called once, after its turn or its failure."""

    steps: Steps[Any]
    future: futures.Future[Any]
    on_begun: Callable[[], None] | None
    waiting: Waiting | None = None

    def notify(self) -> None:
        if self.on_begun is not None and (self.future.done() or not isinstance(self.waiting, (Turn, type(None)))):
            self.on_begun()
            self.on_begun = None


class Engine:
    """A thread that advances jobs until they are done, and sleeps while there are none.

    Args:
        name: name of the thread.
        prepare: function that the thread calls first.
    """

    def __init__(self, name: str, prepare: Callable[[], None] | None = None) -> None:
        self._name, self._prepare = name, prepare
        self._lock = threading.Lock()
        self._submitted: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._abandoned: list[_Job] = []  # MPI may still read and write their memory

    def start_thread(self) -> None:
        """Start the thread now, rather than with the first job."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()

    def submit(self, steps: Steps[T], on_begun: Callable[[], None] | None = None) -> futures.Future[T]:
        """Run a job. Jobs that conflict advance in the order of their submission."""
        future: futures.Future[T] = futures.Future()
        self.start_thread()
        self._submitted.put(_Job(steps, future, on_begun))
        return future

    def _work(self) -> None:
        if self._prepare is not None:
            self._prepare()
        jobs: list[_Job] = []
        sleep = 0.0
        while True:
            try:
                job = self._submitted.get(block=not jobs)
            except Empty:
                pass
            else:
                if job is None:
                    break
                sleep = 0.0
                jobs.append(job)
                del job  # lets its memory be freed once it is done
            before = len(jobs)
            jobs, moved = _advance_all(jobs)
            sleep = 0.0 if moved or len(jobs) < before else min(MAX_SLEEP, sleep + 2e-6)
            if jobs:
                time.sleep(sleep)
        self._abandoned = jobs
        for job in jobs:
            job.future.set_exception(
                HpcdistError("HD112", "the world has ended before this message was sent or received")
            )

    def stop(self) -> bool:
        """Stop the thread after the jobs that can finish; return whether others are left, whose memory is kept."""
        if self._thread is not None:
            self._submitted.put(None)
            self._thread.join()
        _kept.extend(self._abandoned)
        return bool(self._abandoned)


_kept: list[_Job] = []  # unfinished jobs of all stopped engines


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
