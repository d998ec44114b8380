"""Calls in the background, run by a thread of each team, and their handles."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent import futures
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch

from hpcdist import activity
from hpcdist.activity import callsite
from hpcdist.comm.team import Team
from hpcdist.comm.worker import note_failure
from hpcdist.errors import HpcdistError, refusal
from hpcdist.tensors import accelerator, eager
from hpcdist.tensors.storage import tensors_in
from hpcdist.torch_names import uploads
from hpcdist.validation.collective import LEAVE, leave
from hpcdist.watch.deadlines import patience

T = TypeVar("T")


class Handle(Generic[T]):
    """The handle of a call in the background; returned by ``async_op=True``, isend and irecv.

    Until it is done, the arguments of the call must not be changed. Several calls may be in flight: those of one group
    run in the order of the calls.

    Attributes:
        heard: not empty after wait() has returned, or raised the call's error.

    Example::

        >>> handle = hd.concat(x, async_op=True)
        >>> y = compute()                 # at the same time
        >>> whole = handle.wait()
    """

    def __init__(
        self,
        future: futures.Future[Any],
        what: str,
        team: Team | None = None,
        peer: int = activity.NOBODY,
        finish: Callable[[Any], T] | None = None,
    ) -> None:
        self._future = future
        self._what = what
        self._depends_on = team, peer  # None if something else watches over the call
        self._finish = finish  # runs once, in the thread that waits
        self._finished: list[T] = []
        self.heard: list[None] = []
        note_failure(future, what.removesuffix(".wait"), self.heard)

    def wait(self, timeout: timedelta | float | None = None) -> T:
        """Wait for the result and return it, or raise the error of the call.

        May be called again. On a GPU, the data are ready for all later work of this thread's stream.

        Args:
            timeout: a timedelta or seconds, infinity for no limit; None means that of :func:`hpcdist.init`.

        Raises:
            TimeoutError: if the call is not done in time. It continues, and can be waited for again.
            TypeError, ValueError: on this rank, if the timeout is not a time, or is negative.
        """
        seconds = patience(timeout)
        own_end = timeout is not None or self._future.done()
        team, peer = (None, activity.NOBODY) if own_end else self._depends_on
        try:
            with activity.InCall(self._what, team, peer):
                result = self._future.result(seconds)
        except futures.TimeoutError:
            if self._future.done():  # raised by the call itself
                raise
            raise refusal(
                TimeoutError, "HD609", f"not done after {seconds:g} s; it continues, and can be waited for again"
            ) from None
        finally:
            if self._future.done():
                self.heard.append(None)
        if not self._finished:
            self._finished.append(result if self._finish is None else self._finish(result))
            self._finish = None  # it may keep tensors alive
        for x in tensors_in(self._finished):
            if accelerator.holds(x):  # allocated in the background's stream, and used by this thread's from now on
                x.record_stream(torch.accelerator.current_stream(x.device))
        return self._finished[0]

    def done(self) -> bool:
        """Return whether wait() would return, or raise, at once."""
        return self._future.done()


def run_now(step: Callable[[], T], async_op: bool) -> T | Handle[T]:
    """Run a step of this rank alone; with `async_op`, return a finished handle with its result or error."""
    if not async_op:
        return step()
    future: futures.Future[T] = futures.Future()
    try:
        future.set_result(step())
    except Exception as error:  # wait() raises it
        future.set_exception(error)
    return Handle(future, "wait")


def submit(
    team: Team,
    verb: str,
    step: Callable[[Team], Any],
    finish: Callable[[Any], T] | None = None,
    watched: bool = True,
    tensors: Any = None,
) -> Handle[T]:
    """Run a step in the background of a team, after those submitted before.

    Args:
        step: takes the team in the background.
        finish: converts the result, in the thread that waits.
        watched: whether it is a call with a deadline.
        tensors: those of the call.
    """
    check_threads()
    what, background, before = callsite.where(verb), team.background, team.calls[False]
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    recorded = eager.recorded()
    device = team.settings.device
    ready = accelerator.event(device) if device.type != "cpu" else None

    def run() -> Any:
        background.calls[False] = before
        # torch requires this order of its modes
        with (
            activity.InCall(verb, background, text=what, tensors=tensors) if watched else nullcontext(),
            torch.inference_mode(modes[1]),
            torch.set_grad_enabled(modes[0]),
            eager.as_called(recorded),
        ):
            return step(background) if ready is None else _on_gpu(step, background, ready)

    return Handle(background.worker.submit(run), f"{verb}().wait", finish=finish)


def _on_gpu(step: Callable[[Team], T], team: Team, ready: torch.Event) -> T:
    """Run a step in the background's stream: after the caller's earlier work, and until it is completed."""
    if team.stream is None:
        team.stream = torch.Stream(team.settings.device)
    stream = team.stream
    with stream:
        stream.wait_event(ready)
        result = step(team)
        stream.synchronize()  # afterwards the caller may reuse its memory
    return result


def check_threads() -> None:
    """Check that several threads may call MPI at the same time.

    Raises:
        HpcdistError: if they may not.
    """
    from mpi4py import MPI

    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise HpcdistError(
            "HD113",
            "asynchronous calls need an MPI that was initialised with MPI_THREAD_MULTIPLE, which is mpi4py's default "
            "(mpi4py.rc.thread_level); this one was not, or does not support it",
        )


def prepare(team: Team) -> None:
    """Start the background of a team early, if MPI supports threads.

    At the end of the program it answers the asynchronous calls of other ranks, when no thread can be started any more.
    """
    from mpi4py import MPI

    if team.size > 1 and MPI.Query_thread() >= MPI.THREAD_MULTIPLE:
        team.background.worker.start()


def join_uploads() -> None:
    """Wait for the threads of torch's ``dcp.async_save``, each of which ends with its save; in one of them, for those
    that were started before it, so that all ranks save in the order of the calls."""
    threads, this = threading.enumerate(), threading.current_thread()  # threads are listed in the order of their start
    for thread in threads[: threads.index(this)] if uploads(this) else threads:
        if uploads(thread):
            thread.join()


def leave_all(teams: Iterable[Team]) -> list[Handle[None]]:
    """Leave the backgrounds of all teams, after their calls in progress. The caller must set a deadline."""
    join_uploads()
    return [submit(team, LEAVE, leave, watched=False) for team in teams if team.background.worker.started]
