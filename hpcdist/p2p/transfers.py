"""Messages between two ranks: how a structure is sent and received, now or in a thread that advances many transfers."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Generator
from concurrent import futures
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from mpi4py import MPI
from torch import Tensor

from hpcdist import activity
from hpcdist.activity import callsite
from hpcdist.comm.messages import Envelope, memory, pieces, with_envelope
from hpcdist.comm.team import Context, Group
from hpcdist.comm.worker import Worker
from hpcdist.errors import HpcdistError
from hpcdist.process import abort
from hpcdist.runtime.background import Handle, check_threads
from hpcdist.tensors import accelerator
from hpcdist.tensors.message import MessageContents, check_memory, encode, join, parse
from hpcdist.tensors.storage import Scratch, as_bytes
from hpcdist.tensors.tree import Tree, restore

T = TypeVar("T")

_SPINS = 200  # polls before the first sleep
_REMEMBERED = 16  # receives in the background
_MAX_SLEEP = 2e-4  # seconds between two polls, when nothing has happened for a while


Waiting: TypeAlias = "Requests | RecvTurn"
"""What MPI must do first."""
Steps = Generator[Waiting, None, T]
"""A transfer: yields its waits, and returns its result."""


class Requests:
    """Waits until messages are sent or received from or to `memory`."""

    def __init__(self, requests: list[MPI.Request], memory: list[Tensor]) -> None:
        self._requests, self._memory = requests, memory

    def ready(self) -> bool:
        return MPI.Request.Testall(self._requests)

    def wait(self) -> None:
        MPI.Request.Waitall(self._requests)


DONE = Requests([], [])
"""The end of a transfer: the rest of its steps concerns this rank alone."""


class RecvTurn:
    """Waits until a message arrives, and takes it for this receive alone. A receive can be cancelled until then.

    Args:
        context: the world.
        group: the group of the message.
        source: the world rank of its sender; None means any.
        tag: the tag of the message; None means any.

    Attributes:
        matched: envelope of the message, once it has arrived.
    """

    def __init__(self, context: Context, group: Group, source: int | None, tag: int | None) -> None:
        self._unexpected, self._group = context.unexpected, group
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

    def conflicts_with(self, other: RecvTurn) -> bool:
        """Return whether one message could match both, so that they must keep their order."""
        pairs = zip(self._wanted, other._wanted, strict=True)
        return all(a == b or a is None or b is None for a, b in pairs)


class Outgoing(NamedTuple):
    """A message to send: key of the group, world rank of the receiver, tag, and its parts in host memory."""

    context: Context
    key: int
    dest: int
    tag: int
    parts: list[Tensor]

    @staticmethod
    def of(context: Context, group: Group, dest: int, tag: int, tree: Tree) -> Outgoing:
        """Pack the small tensors with the header. Large ones are sent from their memory if it is contiguous."""
        contents = MessageContents.of(tree.tensors)
        parts = [join(tree.tensors, contents, encode(tree.spec, contents))]
        for x in (tree.tensors[i] for i in contents.large):
            parts.append(as_bytes(Scratch(pinned=not x.is_cpu).on_host(x)))
        return Outgoing(context, group.message_key(), group.peers[dest], tag, parts)

    def start(self, number: int) -> Requests:
        """Start sending all parts; MPI keeps the order of messages to one rank."""
        head, *rest = with_envelope(self.key, self.tag, number, self.parts[0])
        comm, dest = self.context.data_comm, self.dest
        requests = [self.context.header_comm.Isend([memory(head), MPI.BYTE], dest, 0)]
        requests += [comm.Isend(x, dest, number) for part in (*rest, *self.parts[1:]) for x in pieces(memory(part))]
        return Requests(requests, [head, *rest, *self.parts])


def receive(context: Context, group: Group, turn: RecvTurn, allow_pickle: bool, with_source: bool) -> Steps[Any]:
    """Receive the message that `turn` waits for; return its structure, and with it its source in `group` if asked."""
    yield turn
    (envelope,) = turn.matched
    source, device = group.peers.index(envelope.source), context.settings.device
    if not 0 <= envelope.number < context.most_tag:
        raise HpcdistError("HD901", f"a message of rank {source} is damaged: its number is {envelope.number}")

    def incoming(parts: list[Tensor]) -> Requests:
        comm, sender, number = context.data_comm, envelope.source, envelope.number
        return Requests([comm.Irecv(x, sender, number) for part in parts for x in pieces(memory(part))], parts)

    with abort.InTransfer("recv", group.size if envelope.content is None else 1):
        check_memory(envelope.nbytes)
        content = envelope.content
        if content is None:
            content = accelerator.host_buffer(envelope.nbytes, pinned=False)
            yield incoming([content])
    header, packed = parse(content)
    with abort.InTransfer("recv", group.size if header.large else 1):
        check_memory(sum(header.nbytes))
        to_gpu = {i for i in header.large if header.metas[i].on_gpu and device.type != "cpu"}
        large = {i: accelerator.host_buffer(header.nbytes[i], i in to_gpu) for i in header.large}
        yield incoming(list(large.values()))
    yield DONE
    tensors = header.unpack(packed, device)
    for i, x in large.items():
        x = x.view(header.metas[i].dtype).view(header.metas[i].shape)
        tensors[i] = x.to(device) if i in to_gpu else x
    structure = restore(header.spec, tensors, allow_pickle)
    return (structure, source) if with_source else structure


@dataclass
class _Job:
    """A transfer in the background, and its current wait."""

    steps: Steps[Any]
    future: futures.Future[Any]
    waiting: Waiting | None = None


class Transport:
    """The transfers in progress between this rank and others.

    Messages are sent when the call is made. Receives that may match the same message get it in the order of the calls:
    one in the foreground queues after those in the background.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self._worker = Worker("hpcdist-p2p")
        self._jobs: list[_Job] = []  # the callers append, the worker replaces: each is one step of Python
        self._ending = False
        self._numbers = count()
        self._receives: deque[tuple[int, str, list[None]]] = deque(maxlen=_REMEMBERED)

    def send(self, outgoing: Outgoing) -> None:
        """Send in the foreground."""
        with abort.InStep("send", self.context.team.size):
            outgoing.start(self._number()).wait()

    def isend(self, outgoing: Outgoing) -> Handle[None]:
        """Send, and wait for the end in the background."""
        check_threads()
        with abort.InStep("isend", self.context.team.size):
            requests = outgoing.start(self._number())
        return Handle(self._queue(_until(requests)), "isend().wait", self.context.team, outgoing.dest)

    def _number(self) -> int:
        """Return a number for a message, the MPI tag of its parts."""
        return next(self._numbers) % self.context.most_tag

    def recv(self, steps: Steps[T]) -> T:
        """Run a receive in the foreground."""
        if any(job.waiting is None or isinstance(job.waiting, RecvTurn) for job in self._jobs):
            return self._recv_queued(steps)
        turn, begun = next(steps), False
        assert isinstance(turn, RecvTurn)
        try:
            turn.wait()
            with abort.InStep("recv", self.context.team.size):
                begun = True
                while (waiting := next(steps)) is not DONE:
                    waiting.wait()
                    activity.touch()
        except BaseException:
            if not begun:
                turn.give_back()
            raise
        return _result(steps)

    def _recv_queued(self, steps: Steps[T]) -> T:
        """Run a receive after others in the background, and wait for it."""
        check_threads()
        future: futures.Future[T] = self._queue(steps)
        try:
            return Handle(future, "the transfer().wait", self.context.team, activity.NOBODY).wait()
        except BaseException as error:
            if future.cancel() or (future.done() and future.exception() is error):
                raise  # no message has been taken, or it is the error of the transfer
            with abort.InStep("recv", self.context.team.size):
                raise

    def irecv(self, steps: Steps[T], peer: int) -> Handle[T]:
        """Receive in the background from `peer`, a world rank."""
        check_threads()
        handle: Handle[T] = Handle(self._queue(steps), "irecv().wait", self.context.team, peer)
        self._receives.append((peer, callsite.where("irecv").decode(), handle.heard))
        return handle

    def behind(self, peer: int) -> bytes | None:
        """Return how a table describes a recv from `peer`, if an earlier irecv may take its message; else None."""
        for other, text, heard in self._receives:
            if other in (peer, activity.ANYBODY) and not heard:
                return f"{callsite.where('recv').decode()}, after {text}, whose wait() has not returned,".encode()
        return None

    def _queue(self, steps: Steps[T]) -> futures.Future[T]:
        """Submit a transfer to the thread."""
        future: futures.Future[T] = futures.Future()
        self._jobs.append(_Job(steps, future))
        self._worker.submit(self._advance)
        return future

    def _advance(self) -> None:
        """Advance the transfers until none is left, in the worker's thread; it sleeps while they all wait."""
        device = self.context.settings.device
        if device.type != "cpu":
            torch.accelerator.set_device_index(device)
        sleep = 0.0
        while self._jobs:
            jobs = list(self._jobs)
            left, moved = _advance_all(jobs)
            self._jobs[: len(jobs)] = left
            if self._ending:
                break
            if self._jobs:
                sleep = 0.0 if moved or len(self._jobs) != len(jobs) else min(_MAX_SLEEP, sleep + 2e-6)
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


def _until(requests: Requests) -> Steps[None]:
    yield requests


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
    before: list[RecvTurn] = []  # of earlier receives that still wait for their message
    for job in jobs:
        try:
            while job.waiting is None or _can_advance(job.waiting, before):
                if isinstance(job.waiting, RecvTurn) and not job.future.set_running_or_notify_cancel():
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


def _can_advance(waiting: Waiting, before: list[RecvTurn]) -> bool:
    if not isinstance(waiting, RecvTurn):
        return waiting.ready()
    if not any(waiting.conflicts_with(other) for other in before) and waiting.ready():
        return True
    before.append(waiting)
    return False
