"""What a call of a process group returns: handles that wait for it, as torch's own backends have them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _get_work_registry_size as _registered
from torch.futures import Future

from hpcdist import activity
from hpcdist.activity import Counted, callsite
from hpcdist.backend import agreement
from hpcdist.backend.work_forwarding import findable
from hpcdist.errors import coded, refusal

__all__ = ["DONE", "Finished", "Queued", "Waiting", "seconds"]


class Team(Counted, Protocol):
    """The ranks of a call."""

    size: int


def seconds(timeout: timedelta | None) -> float | None:
    """Return torch's timeout in seconds; None for none."""
    if timeout is None:
        return None
    value = timeout.total_seconds()
    return value if value > 0 else None


def _forget(tensors: Any) -> None:
    """Remove finished work from torch's register of work in flight, as wait() of torch's own backends does."""
    if not _registered():
        return
    if isinstance(tensors, torch.Tensor):
        torch.ops._c10d_functional.wait_tensor(tensors)  # calls wait() again, of work that is in the register no longer
    elif isinstance(tensors, (list, tuple)):
        for part in tensors:
            _forget(part)


class Finished(dist.Work):
    """The work of a call that is done.

    Args:
        tensors: what its future holds.
    """

    def __init__(self, tensors: Any = None) -> None:
        super().__init__()
        self._tensors = tensors

    number = 0  # of the collective in its group

    def _get_sequence_number(self) -> int:
        return self.number

    def wait(self, timeout: timedelta | None = None) -> bool:
        _forget(self._tensors)
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def result(self) -> Any:
        return self._tensors

    def synchronize(self) -> None:
        return None

    def block_current_stream(self) -> None:
        return None

    @findable
    def get_future(self) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(self._tensors)
        return future


DONE = Finished()
"""The work of a blocking call, which torch only waits for."""


class Waiting(dist.Work):
    """Work that may not be done: what torch asks of it is answered when it is."""

    _tensors: Any

    def result(self) -> Any:
        self.wait()
        return self._tensors

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()


class Queued(Waiting):
    """The work of an asynchronous collective: the worker of a queue runs it.

    Args:
        verb: name of the call.
        team: ranks of the call, for the record.
        limit: deadline of the call in seconds.
        step, args: what to run, and with which arguments.
        tensors: what the future holds when it is done.
    """

    def __init__(
        self, verb: str, team: Team, limit: float | None, step: Callable[..., object], args: Any, tensors: Any
    ) -> None:
        super().__init__()
        self.verb = verb
        self.where = callsite.where(verb)
        self.waited_for = False
        self._team, self._limit, self._step, self._args = team, limit, step, args
        self._tensors = tensors
        self._error: BaseException | None = None
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._future: Future[Any] | None = None

    number = 0  # of the collective in its group

    def _get_sequence_number(self) -> int:
        return self.number

    def report(self) -> str | None:
        """Return its error as text, if nobody has waited for it."""
        if self._error is None or self.waited_for:
            return None
        return coded("HD609", f"{self.where.decode()} failed, but was never waited for: {self._error!r}")

    def run(self) -> None:
        """Run the step; called once, by one thread."""
        try:
            with activity.InCall(self.verb, self._team, text=self.where, limit=self._limit, tensors=self._args):
                self._step(self._team, *self._args)
        except BaseException as error:  # wait() raises it
            agreement.fail(error, self.verb, self._team.size)
            self._error = error
        del self._step, self._args
        with self._lock:
            self._done.set()
            future = self._future
        if future is not None:
            self._complete(future)

    def _complete(self, future: Future[Any]) -> None:
        if self._error is None:
            future.set_result(self._tensors)
        else:
            future.set_exception(self._error)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the call is done; raise its error.

        Raises:
            TimeoutError: if it is not done in time; it continues, and can be waited for again.
        """
        self.waited_for = True
        if not self._done.is_set():
            limit = seconds(timeout)
            # Without a deadline: the worker's call has one.
            with activity.InCall(f"{self.verb}().wait", self._team, activity.NOBODY):
                if not self._done.wait(limit):
                    raise refusal(TimeoutError, "HD609", f"{self.where.decode()}: wait() timed out after {limit:g} s")
        _forget(self._tensors)
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._done.is_set()

    def is_success(self) -> bool:
        return self._done.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    @findable
    def get_future(self) -> Future[Any]:
        self.waited_for = True
        with self._lock:
            if self._future is not None:
                return self._future
            future: Future[Any] = Future()
            self._future = future
            if not self._done.is_set():
                return future
        self._complete(future)
        return future
