"""The result of an asynchronous call, and the thread in which it is worked out."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent import futures
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor

from hpcdist import abort, eager
from hpcdist.agree import LEAVE, leave
from hpcdist.errors import HpcdistError
from hpcdist.gradient import Deferred
from hpcdist.team import Team
from hpcdist.watch import record
from hpcdist.watch.limits import patience

if TYPE_CHECKING:
    from hpcdist.world import World

__all__ = [
    "Background",
    "Handle",
    "at_once",
    "background",
    "check_threads",
    "leaving",
    "prepare",
    "report_failures",
    "start",
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
        self, future: futures.Future[T], what: str, team: Team | None = None, peer: int = record.NOBODY
    ) -> None:
        self._future = future
        self._what = what
        self._from = team, peer  # that it depends on, if nothing else watches over it
        self._attached: Any = None
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
            with record.InCall(self._what, None if own_end else team, record.NOBODY if own_end else peer):
                result: Any = self._future.result(seconds)
        except futures.TimeoutError:
            if self._future.done():  # the call itself has raised it
                raise
            raise TimeoutError(f"not done after {seconds:g} s; it goes on, and can be waited for again") from None
        finally:
            if self._future.done():
                self._waited_for.set()
        if isinstance(result, Deferred):
            if self._attached is None:
                self._attached = result.attach()
            result = self._attached
        _hand_over(result)
        found: T = result
        return found

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
            abort.say(f"hpcdist: nobody waited for {what}, which failed: {error}")


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


def start(verb: str, team: Team, step: Callable[[Team], T], async_op: bool) -> T | Handle[T]:
    """Run a step of a verb: now, or in the background of the team."""
    if async_op:
        handle = background(team).submit(verb, step)
        team.calls[True] += 1
        return handle
    team.calls[False] += 1
    with record.InCall(verb, team), abort.InStep(verb, team.size):
        return step(team)


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

    A thread, because MPI moves data only while somebody calls it; one, so that every rank works on the calls in the
    same order.
    """

    def __init__(self, team: Team) -> None:
        assert team.back_comm is not None
        self.team = Team(team.back_comm, team.group, front=team)
        self._steps: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="hpcdist", daemon=True)
        self._thread.start()
        self._stream: torch.cuda.Stream | None = None

    def submit(self, verb: str, step: Callable[[Team], T], watched: bool = True) -> Handle[T]:
        """Run a step after those submitted before; as a call that has a deadline, if it is `watched`."""
        what = record.where(verb)
        before = self.team.front.calls[False]
        future: futures.Future[T] = futures.Future()
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        recorded = eager.recorded()
        device = self.team.settings.device
        ready = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

        def run() -> None:
            self.team.calls[False] = before
            try:
                # torch's modes in this order
                with (
                    record.InCall(verb, self.team, text=what) if watched else nullcontext(),
                    torch.inference_mode(modes[1]),
                    torch.set_grad_enabled(modes[0]),
                    eager.as_called(recorded),
                ):
                    result = step(self.team) if ready is None else self._on_gpu(step, device, ready)
            except BaseException as error:  # wait() raises it
                future.set_exception(error)
            else:
                future.set_result(result)

        self._steps.put(run)
        return Handle(future, f"{verb}().wait")

    def _on_gpu(self, step: Callable[[Team], T], device: torch.device, ready: torch.cuda.Event) -> T:
        """In a stream of the background's: after what the caller had under way, and until it has really happened."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            result = step(self.team)
            self._stream.synchronize()  # the caller's memory may be used again after that
        return result

    def _work(self) -> None:
        while (step := self._steps.get()) is not None:
            step()
            del step  # and what it holds

    def stop(self) -> None:
        """End the thread once all that was submitted is done; the communicator is freed with the team's own."""
        self._steps.put(None)
        self._thread.join()


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
    if "background" not in team.memo:
        team.memo["background"] = Background(team)
    found: Background = team.memo["background"]
    return found


def leaving(world: World) -> list[Handle[None]]:
    """Leave the backgrounds of all teams, after what is under way there; who waits for that has a deadline."""
    return [background(team).submit(LEAVE, leave, watched=False) for team in world.teams if "background" in team.memo]
