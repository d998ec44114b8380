"""Calls in the background: a thread for each team, and the handle by which a result is waited for."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent import futures
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from hpcdist import activity
from hpcdist.comm.team import Team
from hpcdist.errors import HpcdistError
from hpcdist.process import abort
from hpcdist.runtime.engine import Engine, Steps
from hpcdist.tensors import eager
from hpcdist.validation.collective import LEAVE, leave
from hpcdist.watch.deadlines import patience

__all__ = [
    "Background",
    "Handle",
    "at_once",
    "background",
    "check_threads",
    "leaving",
    "prepare",
    "report_failures",
]

T = TypeVar("T")


class Handle(Generic[T]):
    """The result of a call that goes on in the background; from ``async_op=True``, isend and irecv.

    Until it is done, what was passed to the call must not be changed. Several may be in flight: those of one group
    are worked on in the order of the calls.

    Example::

        >>> handle = hd.concat(x, async_op=True)
        >>> y = compute()                 # meanwhile
        >>> whole = handle.wait()
    """

    def __init__(
        self,
        future: futures.Future[T],
        what: str,
        team: Team | None = None,
        peer: int = activity.NOBODY,
        finish: Callable[[T], T] | None = None,
    ) -> None:
        self._future = future
        self._what = what
        self._from = team, peer  # that it depends on, if nothing else watches over it
        self._finish = finish  # what the thread that waits makes of the result, once
        self._finished: list[T] = []
        self._waited_for = threading.Event()
        future.add_done_callback(partial(_note_failure, what, self._waited_for))

    def wait(self, timeout: timedelta | float | None = None) -> T:
        """The result, as soon as it is there; what the call has raised, if it has.

        May be called again. On a GPU, what this thread does from now on finds the data in place.

        Args:
            timeout: a timedelta or seconds, infinity for no limit; None for the deadline of all calls.

        Raises:
            TimeoutError: it is not done by then. It goes on, and can be waited for again.
            TypeError, ValueError: on this rank, for a timeout that is not a time, or negative.
        """
        seconds = patience(timeout)
        team, peer = self._from
        try:
            own_end = timeout is not None or self._future.done()
            with activity.InCall(self._what, None if own_end else team, activity.NOBODY if own_end else peer):
                result = self._future.result(seconds)
        except futures.TimeoutError:
            if self._future.done():  # the call itself has raised it
                raise
            raise TimeoutError(f"not done after {seconds:g} s; it goes on, and can be waited for again") from None
        finally:
            if self._future.done():
                self._waited_for.set()
        if not self._finished:
            self._finished.append(result if self._finish is None else self._finish(result))
        _hand_over(self._finished[0])
        return self._finished[0]

    def done(self) -> bool:
        """Whether wait() would return, or raise, at once."""
        return self._future.done()


# The latest asynchronous calls that have failed: what, whether somebody has waited for it, and the error
# as text: with its traceback it would keep tensors alive.
_failed: deque[tuple[str, threading.Event, str]] = deque(maxlen=100)


def _note_failure(what: str, waited_for: threading.Event, future: futures.Future[Any]) -> None:
    error = future.exception()
    if error is not None:
        _failed.append((what.removesuffix(".wait"), waited_for, repr(error)))


def report_failures() -> None:
    """At the end, print the errors of asynchronous calls that nobody has waited for."""
    while _failed:
        what, waited_for, error = _failed.popleft()
        if not waited_for.is_set():
            abort.print_error(f"hpcdist: nobody waited for {what}, which failed: {error}")


def _hand_over(result: object) -> None:
    """A GPU's memory that was taken in the background's stream is from now on in use by this thread's."""
    if isinstance(result, Tensor):
        if result.is_cuda:
            result.record_stream(torch.cuda.current_stream(result.device))
    elif isinstance(result, (list, tuple)):
        for item in result:
            _hand_over(item)
    elif isinstance(result, dict):
        for item in result.values():
            _hand_over(item)
    elif hasattr(result, "__dataclass_fields__"):
        for name in result.__dataclass_fields__:
            _hand_over(getattr(result, name, None))


def at_once(step: Callable[[], T], async_op: bool) -> T | Handle[T]:
    """Run a step that concerns this rank alone; with `async_op`, its result or error comes out of a handle."""
    if not async_op:
        return step()
    future: futures.Future[T] = futures.Future()
    try:
        future.set_result(step())
    except Exception as error:  # wait() raises it
        future.set_exception(error)
    return Handle(future, "wait")


class Background:
    """A thread that runs the asynchronous calls of a team, one after the other, over a communicator of its own.

    A thread, because MPI makes progress only while somebody calls it; one, so that every rank works on the calls in
    the same order.
    """

    def __init__(self, team: Team) -> None:
        assert team.background_comm is not None
        self.team = Team(team.background_comm, team.group, team.settings, foreground=team)
        self._engine = Engine("hpcdist")
        self._engine.begin()
        self._stream: torch.cuda.Stream | None = None

    def submit(
        self,
        verb: str,
        step: Callable[[Team], T],
        finish: Callable[[T], T] | None = None,
        watched: bool = True,
    ) -> Handle[T]:
        """Run a step after those submitted before; as a call that has a deadline, if it is `watched`.

        Args:
            finish: what the thread that waits makes of the result.
        """
        what = activity.where(verb)
        before = self.team.foreground.calls[False]
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        recorded = eager.recorded()
        device = self.team.settings.device
        ready = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

        def run() -> T:
            self.team.calls[False] = before
            # torch's modes in this order
            with (
                activity.InCall(verb, self.team, text=what) if watched else nullcontext(),
                torch.inference_mode(modes[1]),
                torch.set_grad_enabled(modes[0]),
                eager.as_called(recorded),
            ):
                return step(self.team) if ready is None else self._on_gpu(step, device, ready)

        return Handle(self._engine.submit(_at_once(run)), f"{verb}().wait", finish=finish)

    def _on_gpu(self, step: Callable[[Team], T], device: torch.device, ready: torch.cuda.Event) -> T:
        """In a stream of the background's: after what the caller had under way, and until it has really happened."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            result = step(self.team)
            self._stream.synchronize()  # the caller's memory may be used again after that
        return result

    def stop(self) -> bool:
        """End the thread once all that was submitted is done; the communicator is freed with the team's own."""
        return self._engine.stop()


def _at_once(step: Callable[[], T]) -> Steps[T]:
    """A job that waits for nothing but what it calls."""
    return step()
    yield  # which makes it a generator


def check_threads() -> None:
    """Whether a thread may call MPI while another one does.

    Raises:
        HpcdistError: it may not.
    """
    from mpi4py import MPI

    if _threads() < MPI.THREAD_MULTIPLE:
        raise HpcdistError(
            "asynchronous calls need an MPI that was initialised with MPI_THREAD_MULTIPLE, which is mpi4py's default "
            "(mpi4py.rc.thread_level); this one was not, or cannot"
        )


def _threads() -> int:
    """The level of threads that MPI was initialised with."""
    from mpi4py import MPI

    return MPI.Query_thread()


def prepare(team: Team) -> None:
    """Begin the background of a team, if threads may: at the end of the program it answers the asynchronous calls of
    other ranks, and no thread can be begun then."""
    from mpi4py import MPI

    if team.size > 1 and _threads() >= MPI.THREAD_MULTIPLE:
        background(team)


def background(team: Team) -> Background:
    """The background of a team; nothing is communicated."""
    check_threads()
    if team.background is None:
        team.background = Background(team)
    assert isinstance(team.background, Background)
    return team.background


def leaving(teams: Iterable[Team]) -> list[Handle[None]]:
    """Leave the backgrounds of all teams, after what is under way there; who waits for that has a deadline."""
    return [background(team).submit(LEAVE, leave, watched=False) for team in teams if team.background is not None]
