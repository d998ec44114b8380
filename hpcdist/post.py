"""What two ranks send each other: steps that wait for MPI, done at once, or by a thread that looks after many."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from concurrent import futures
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

import torch
from mpi4py import MPI

from hpcdist.errors import HpcdistError
from hpcdist.handle import Handle, check_threads
from hpcdist.team import Team
from hpcdist.watch import record

__all__ = ["Arrival", "Post", "Requests", "Steps", "post_of"]

T = TypeVar("T")

_LONGEST_NAP = 2e-4  # seconds between two looks, where nothing has happened for a while


class Waiting(Protocol):
    """Something that MPI has to do first."""

    def ready(self) -> bool: ...

    def wait(self) -> None: ...


Steps = Generator[Waiting, None, T]  # a transfer: it yields what it has to wait for, and returns its result


class Requests:
    """Until messages have been sent or received."""

    def __init__(self, requests: list[MPI.Request]) -> None:
        self._requests = requests

    def ready(self) -> bool:
        return MPI.Request.Testall(self._requests)

    def wait(self) -> None:
        MPI.Request.Waitall(self._requests)


class Arrival:
    """Until a message has come in; it is then taken out, for this receiver alone.

    Attributes:
        message: that message.
        source, nbytes: the rank that has sent it, and its length.
    """

    def __init__(self, comm: MPI.Intracomm, source: int, tag: int) -> None:
        self._comm, self._from, self._tag = comm, source, tag
        self._status = MPI.Status()
        self.message: Any = None

    def ready(self) -> bool:
        self.message = self._comm.Improbe(self._from, self._tag, self._status)
        return self.message is not None

    def wait(self) -> None:
        self.message = self._comm.Mprobe(self._from, self._tag, self._status)

    def rivals(self, other: Arrival) -> bool:
        """Whether there are messages that both could take."""
        sources, tags = {self._from, other._from}, {self._tag, other._tag}
        return (len(sources) == 1 or MPI.ANY_SOURCE in sources) and (len(tags) == 1 or MPI.ANY_TAG in tags)

    @property
    def source(self) -> int:
        return self._status.Get_source()

    @property
    def nbytes(self) -> int:
        return self._status.Get_elements(MPI.BYTE)


@dataclass
class _Job:
    steps: Steps[Any]
    future: futures.Future[Any]
    receives: bool
    waiting: Waiting | None = None


_abandoned: list[_Job] = []  # MPI may still read and write their memory


class Post:
    """The transfers between this rank and others of a team that are under way.

    What was asked for first comes first: a transfer in the foreground queues behind sends that have not begun, and
    receives that have not ended, in the background.
    """

    def __init__(self, team: Team) -> None:
        self._team = team
        self._number = 0  # of the latest message sent, by which its parts are told from others'
        self._lock = threading.Lock()
        self._arriving: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ahead = {True: 0, False: 0}  # receives that have not ended, sends that have not begun

    def number(self, most: int) -> int:
        """A number for a message, even and at most `most` - 1: an answer to it has the number behind it."""
        with self._lock:
            self._number = (self._number + 2) % (most // 2 * 2)
            return self._number

    def run(self, steps: Steps[T], receives: bool) -> T:
        """Do a transfer now."""
        if self._ahead[receives]:
            return self.submit("the transfer", steps, record.NOBODY, receives).wait()
        try:
            while True:
                next(steps).wait()
                record.touch()
        except StopIteration as done:
            result: T = done.value
            return result

    def submit(self, verb: str, steps: Steps[T], peer: int, receives: bool) -> Handle[T]:
        """Do a transfer in the background; it depends on `peer`."""
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
        return Handle(future, f"{verb}().wait", self._team, peer)

    def _passed(self, receives: bool) -> None:
        with self._lock:
            self._ahead[receives] -= 1

    def _work(self) -> None:
        if self._team.world.device.type == "cuda":
            torch.cuda.set_device(self._team.world.device)
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
                if not job.receives:
                    jobs = _advance_all(jobs)[0]  # what is sent has begun
                    self._passed(False)
            before = len(jobs)
            jobs, moved = _advance_all(jobs)
            nap = 0.0 if moved or len(jobs) < before else min(_LONGEST_NAP, nap + 2e-6)
            if jobs:
                time.sleep(nap)
        _abandoned.extend(jobs)
        for job in jobs:  # nobody is there any more to send or receive it
            job.future.set_exception(
                HpcdistError("the world, or the group, has ended before this message was sent or received")
            )

    def stop(self) -> bool:
        """End the thread. What is under way then, if anything, is for nobody."""
        if self._thread is None:
            return False
        self._arriving.put(None)
        self._thread.join()
        return bool(_abandoned)


def _advance_all(jobs: list[_Job]) -> tuple[list[_Job], bool]:
    """(those that are still under way, whether any has gone on), in the order in which they were begun."""
    moved = False
    left = []
    before: list[Arrival] = []  # what waits for a message gets it before those that were begun later
    for job in jobs:
        try:
            while job.waiting is None or _may_go_on(job.waiting, before):
                job.waiting = next(job.steps)
                moved = True
            left.append(job)
        except StopIteration as done:
            job.future.set_result(done.value)
        except BaseException as error:  # wait() raises it
            job.future.set_exception(error)
    return left, moved


def _may_go_on(waiting: Waiting, before: list[Arrival]) -> bool:
    if not isinstance(waiting, Arrival):
        return waiting.ready()
    if not any(waiting.rivals(other) for other in before) and waiting.ready():
        return True
    before.append(waiting)
    return False


def post_of(team: Team) -> Post:
    """The post of a team on this rank."""
    if "post" not in team.memo:
        team.memo["post"] = Post(team)
    found: Post = team.memo["post"]
    return found
