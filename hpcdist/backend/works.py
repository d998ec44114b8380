"""The handles that calls of a process group return, with the methods of torch's own backends.

From torch 2.14 on, torch wraps the work of a Python backend in a C++ object that forwards only wait() and get_future().
Its is_completed() would always be False, and a receive from any rank could not return the source. The methods in
`METHODS` find the Python work through get_future(), and forward to it: see install().
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor
from torch.futures import Future

from hpcdist import activity, torch_names
from hpcdist.activity import callsite
from hpcdist.backend.host_copies import address, gpu_events, is_plain, readable, scratch
from hpcdist.comm.messages import pieces
from hpcdist.comm.team import Team
from hpcdist.comm.worker import note_failure
from hpcdist.errors import refusal
from hpcdist.tensors.storage import copyable, tensors_in

METHODS = ("is_completed", "is_success", "exception", "result", "source_rank", "_source_rank", "_get_sequence_number")
_SLEEP = 1e-4  # seconds between two looks at a message with a time limit of its own
_POLLED = 4  # messages that are looked at for each new one: thousands may be under way

_asked = threading.local()  # `found` is there while a thread asks


def _find(work: dist.Work) -> Any:
    """Return the work in Python that torch has wrapped; None for one of another backend."""
    _asked.found = None
    try:
        work.get_future()
        return _asked.found
    except Exception:  # there are backends without futures
        return None
    finally:
        del _asked.found


def passing_on(name: str, base: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of torch's works, made of its own one, that asks the work in Python of those that wrap one."""

    @functools.wraps(base)
    def method(self: dist.Work) -> Any:
        found = _find(self) if type(self) is dist.Work else None
        return base(self) if found is None else getattr(found, name)()

    return method


def _seconds(timeout: timedelta | None) -> float | None:
    """Return torch's timeout in seconds; None for none."""
    value = 0 if timeout is None else timeout.total_seconds()
    return value if value > 0 else None


def _forget(tensors: Any) -> None:
    """Remove finished work from torch's register of work in flight, as wait() of torch's own backends does."""
    if torch_names.works_registered():
        for x in tensors_in([tensors]):
            torch_names.wait_tensor(x)  # calls wait() again, of work that is in the register no longer


class Finished(dist.Work):
    """The work of a call that is done. A query about a call in progress is answered when it is done.

    Args:
        tensors: what its future holds.
    """

    number = 0  # of the collective in its group
    _error: BaseException | None = None

    def __init__(self, tensors: Any = None) -> None:
        super().__init__()
        self._tensors = tensors

    def _get_sequence_number(self) -> int:
        return self.number

    def wait(self, timeout: timedelta | None = None) -> bool:
        _forget(self._tensors)
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> Any:
        self.wait()
        return self._tensors

    def synchronize(self) -> None:
        self.wait()

    block_current_stream = synchronize

    def get_future(self) -> Future[Any]:
        future: Future[Any] = Future()
        if hasattr(_asked, "found"):
            _asked.found = self
            future.set_result(None)
            return future
        return self._filled(future, sys._getframe().f_back)

    def _filled(self, future: Future[Any], caller: FrameType | None) -> Future[Any]:
        """Return a future that has the result, now or when the call is done.

        Args:
            future: one that nobody has seen.
            caller: who asks for it.
        """
        self.wait()
        future.set_result(self._tensors)
        return future


DONE = Finished()
"""The work of a blocking call, which torch only waits for."""


class Queued(Finished):
    """The work of an asynchronous collective, which the team's worker runs.

    Args:
        verb: name of the call.
        team: ranks of the call.
        run: the call, given its name and place.
        result: the value of the future when it is done.
    """

    def __init__(self, verb: str, team: Team, run: Callable[[bytes], None], result: Any) -> None:
        super().__init__(result)
        self._verb, self._team, self._where = verb, team, callsite.where(verb)
        self._heard: list[None] = []
        self._done = team.worker.submit(functools.partial(run, self._where))
        note_failure(self._done, self._where.decode(), self._heard)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the call is done; raise its error.

        Raises:
            TimeoutError: if it is not done in time; it continues, and can be waited for again.
        """
        self._heard.append(None)
        if not self._done.done():
            limit = _seconds(timeout)
            # Without a deadline: the worker's call has one.
            with activity.InCall(f"{self._verb}().wait", self._team, activity.NOBODY):
                try:
                    self._done.exception(limit)
                except TimeoutError:
                    text = f"{self._where.decode()}: wait() timed out after {limit:g} s"
                    raise refusal(TimeoutError, "HD609", text) from None
        _forget(self._tensors)
        self._done.result()
        return True

    def is_completed(self) -> bool:
        return self._done.done()

    def exception(self) -> BaseException | None:
        return self._done.exception() if self._done.done() else None

    def _filled(self, future: Future[Any], caller: FrameType | None) -> Future[Any]:
        self._heard.append(None)
        done, tensors = self._done, self._tensors
        # DDP's reducer asks from the engine of gradients, in C++, whose thread on a GPU has no frame of Python.
        reduces = caller is None or caller.f_globals.get("__name__") == "torch.autograd.graph"

        def result(_: Any) -> Any:
            error = done.exception()
            if error is None:
                return tensors
            if reduces:
                refused = torch.empty(0, device="cpu").as_subclass(_Refused)
                refused.error = error
                return [refused]
            raise error

        # Not by set_exception(), which stores the error as a value, and C++ takes a value for tensors.
        outcome = future.then(result)
        done.add_done_callback(lambda _: future.set_result(None))
        return outcome


class _Refused(Tensor):
    """What DDP's reducer gets of a failed call: a tensor that raises the call's error wherever it is used.

    From a future that holds an error, the reducer would raise a RuntimeError that only quotes it.
    """

    error: BaseException

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise next(x.error for x in tensors_in([args, kwargs]) if isinstance(x, cls))


class Transfer(Finished):
    """A message between two ranks: MPI's own requests, which wait() completes in the thread that waits.

    Args:
        verb: name of the call.
        peer: the other rank, or activity.ANYBODY.
        limit: deadline of the call in seconds.
        requests: MPI's requests of the message.
        memory: contiguous host memory of the message, which is kept alive.
        out: where a message that was received into other memory belongs; None for nothing.
        later: pieces to receive from the same rank, after the first has told which one that is.
    """

    def __init__(
        self,
        team: Team,
        verb: str,
        peer: int,
        limit: float | None,
        requests: list[MPI.Request],
        memory: Tensor,
        out: Tensor | None = None,
        later: Sequence[Any] = (),
    ) -> None:
        super().__init__([memory if out is None else out])
        self._team, self._verb, self._peer, self._limit = team, verb, peer, limit
        self._requests, self._memory, self._out, self._later = requests, memory, out, later
        # Of the stream of recv(), if wait() has another; what is received in place needs none.
        self._events = [] if out is None or out is memory else gpu_events([out])
        self._status = MPI.Status()
        self._received = 0
        self._completed = False
        self._lock = threading.Lock()
        forget_done(_POLLED)
        _unfinished.append(self)

    def _advance(self, block: bool) -> bool:
        """Complete the requests, as far as they are done or (`block`) all of them; return whether all are done.

        One thread at a time: a request that a thread waits for cannot be looked at by another one.
        """
        if not self._lock.acquire(blocking=block):
            return False
        try:
            return self._completed or self._complete(block)
        finally:
            self._lock.release()

    def _complete(self, block: bool) -> bool:
        while self._requests:
            request = self._requests[0]
            try:
                if block:
                    request.Wait(self._status)
                elif not request.Test(self._status):
                    return False
            except MPI.Exception as error:  # kept for wait(): another call may have looked at this message
                why = MPI.Get_error_string(error.Get_error_class())
                self._error = refusal(RuntimeError, "HD301", f"{self._verb} of {self._memory.nbytes} bytes: {why}")
            self._requests.pop(0)
            if self._out is not None:
                self._received += self._status.Get_count(MPI.BYTE)
            if self._later:
                comm, source, tag = self._team.side_comm, self._status.Get_source(), self._status.Get_tag()
                self._requests = [comm.Irecv(piece, source, tag) for piece in self._later]
                self._later = ()
        if self._out is not None and self._error is None:
            self._finish(self._out)
        self._completed = True
        return True

    def _finish(self, out: Tensor) -> None:
        if self._received != self._memory.nbytes:
            self._error = refusal(
                RuntimeError,
                "HD301",
                f"{self._verb}: rank {self._status.Get_source()} has sent {self._received} bytes, where the tensor has "
                f"{self._memory.nbytes}",
            )
        elif out is not self._memory:
            for event in self._events:
                event.wait()
            with torch.inference_mode(out.is_inference()):
                out = copyable(out.detach())
                out.copy_(copyable(self._memory).view(out.shape))

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the memory of the message can be used again.

        Raises:
            TimeoutError: if it is not done in time; it can be waited for again.
        """
        limit = _seconds(timeout)
        if not self._completed:
            with activity.InCall(
                self._verb, self._team, self._peer, limit=self._limit, tensors=self._tensors, route="mpi"
            ):
                end = None if limit is None else time.monotonic() + limit
                while not self._advance(block=end is None):
                    if end is not None and time.monotonic() > end:
                        raise refusal(TimeoutError, "HD609", f"{self._verb}: wait() timed out after {limit:g} s")
                    time.sleep(_SLEEP)
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._advance(block=False)

    def source_rank(self) -> int:
        """Return the rank of the group from which the message came."""
        return int(self._status.Get_source())

    _source_rank = source_rank


_unfinished: deque[Transfer] = deque()  # MPI may use their memory, whatever becomes of their handles and groups
_keeping = threading.Lock()


def forget_done(most: int | None = None) -> None:
    """Forget messages that are done; of `most`, the oldest, if it is given."""
    with _keeping:
        for _ in range(len(_unfinished) if most is None else min(most, len(_unfinished))):
            oldest = _unfinished.popleft()
            if not oldest.is_completed():
                _unfinished.append(oldest)


def send(team: Team, x: Tensor, dest: int, tag: int, limit: float | None) -> Transfer:
    """Begin to send a tensor to a rank of the group. Tag 0 of MPI is that of messages within collectives."""
    memory = readable(x)
    requests = [team.side_comm.Isend(piece, dest, tag + 1) for piece in pieces(address(memory))]
    return Transfer(team, "send", dest, limit, requests, memory)


def recv(team: Team, x: Tensor, source: int | None, tag: int, limit: float | None) -> Transfer:
    """Begin to receive a tensor from a rank of the group; None for any one."""
    memory = x if is_plain(x) else scratch(x.shape, x.dtype)
    blocks = pieces(address(memory))
    if source is None:
        requests = [team.side_comm.Irecv(blocks[0], MPI.ANY_SOURCE, tag + 1)]
        return Transfer(team, "recv from any rank", activity.ANYBODY, limit, requests, memory, x, blocks[1:])
    requests = [team.side_comm.Irecv(piece, source, tag + 1) for piece in blocks]
    return Transfer(team, "recv", source, limit, requests, memory, x)
