"""The result of an asynchronous call, and the thread in which it is worked out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent import futures
from datetime import timedelta
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor

from hpcdist import agree
from hpcdist.call import Call
from hpcdist.errors import HpcdistError
from hpcdist.gradient import Deferred
from hpcdist.team import Team
from hpcdist.watch import record
from hpcdist.watch.limits import patience

if TYPE_CHECKING:
    from hpcdist.world import World

__all__ = ["Background", "Handle", "background", "check_threads", "everywhere", "start"]

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
        return background(team).submit(verb, step)
    with record.InCall(verb, team):
        return step(team)


class Background:
    """A thread that runs the asynchronous calls of a team, one after the other, over a communicator of its own.

    A thread, because MPI moves data only while somebody calls it; one, so that every rank works on the calls in the
    same order.
    """

    def __init__(self, team: Team) -> None:
        self.team = Team(team.comm.Dup(), team.world, front=team)
        self._steps: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="hpcdist", daemon=True)
        self._thread.start()
        self._stream: torch.cuda.Stream | None = None

    def submit(self, verb: str, step: Callable[[Team], T]) -> Handle[T]:
        what = record.where(verb)
        future: futures.Future[T] = futures.Future()
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        device = self.team.world.device
        ready = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

        def run() -> None:
            try:
                # torch's modes in this order
                with (
                    record.InCall(verb, self.team, text=what),
                    torch.inference_mode(modes[1]),
                    torch.set_grad_enabled(modes[0]),
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
        """End the thread once all that was submitted is done, and free the communicator. Collective."""
        self._steps.put(None)
        self._thread.join()
        self.team.free()


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


def background(team: Team) -> Background:
    """The background of a team. Collective over the team when first used."""
    check_threads()
    if "background" not in team.memo:
        with record.InCall("async_op", team):
            agree.exchange(team, Call("async_op"))
            team.memo["background"] = Background(team)
    found: Background = team.memo["background"]
    return found


def everywhere(world: World, step: Callable[[Team], object]) -> None:
    """Run a step in the world's team, and behind all that is under way in the backgrounds of its teams."""
    behind = [background(team).submit("finalize", step) for team in world.teams if "background" in team.memo]
    step(world.team)
    for done in behind:
        done.wait()
