"""The thread of a team's asynchronous calls, and the errors of calls without wait()."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent import futures
from queue import SimpleQueue
from typing import Any, TypeVar

from hpcdist.errors import coded, with_hint
from hpcdist.process import abort

T = TypeVar("T")


Calls = SimpleQueue[tuple[Callable[[], Any], futures.Future[Any]] | None]


class Worker:
    """Calls that run one after the other in a thread, which starts with the first of them.

    A thread, because MPI makes progress only inside its functions; only one for a team, so that every rank runs the
    calls in the same order. Each thread takes from a queue of its own: one that was abandoned takes no later call.

    Args:
        name: name of the thread.

    Attributes:
        running: held by the thread that runs a call; a program's threads may call on one team at once.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: Calls = SimpleQueue()  # of the current thread
        self._submitted = self._finished = 0  # the first is the callers', the second the worker's
        self._lock = threading.RLock()
        self.running = threading.RLock()  # a callback of a call makes its own calls
        self._thread: threading.Thread | None = None

    @property
    def idle(self) -> bool:
        """Whether all calls so far are done: the next one may run in the caller's thread."""
        return self._submitted == self._finished

    @property
    def inside(self) -> bool:
        """Whether this is the worker's thread: in a callback of a call that it has completed, it must not wait."""
        return threading.current_thread() is self._thread

    @property
    def started(self) -> bool:
        return self._thread is not None

    def start(self) -> None:
        """Start the thread now, rather than with the first call."""
        with self._lock:
            if self._thread is None:
                self._calls = SimpleQueue()
                self._thread = threading.Thread(target=self._work, args=(self._calls,), name=self._name, daemon=True)
                self._thread.start()

    def submit(self, call: Callable[[], T]) -> futures.Future[T]:
        """Run a call after those submitted before."""
        future: futures.Future[T] = futures.Future()
        with self._lock:
            self.start()
            self._submitted += 1
            self._calls.put((call, future))
        return future

    def _work(self, calls: Calls) -> None:
        while (job := calls.get()) is not None:
            call, future = job
            with self.running:
                try:
                    result = call()
                except BaseException as error:  # for waiting threads
                    self._finished += 1
                    future.set_exception(error)
                else:
                    self._finished += 1
                    future.set_result(result)
                    del result
            del job, call, future  # frees their tensors

    def abandon(self) -> None:
        """Leave the thread to the calls submitted so far, after which it ends; later ones get another thread."""
        with self._lock:
            if self._thread is not None:
                self._calls.put(None)
                self._thread = None

    def stop(self) -> None:
        """End the thread after all calls; without waiting, if one of them drops what owns the worker."""
        thread = self._thread
        self.abandon()
        if thread not in (None, threading.current_thread()):
            thread.join()


# The latest asynchronous calls that failed: the call, its handle's `heard`, and its error as text, because a
# traceback would keep tensors alive.
_failed: deque[tuple[str, list[None], str]] = deque(maxlen=100)


def note_failure(future: futures.Future[Any], what: str, heard: list[None]) -> None:
    """Note the error of a call when it ends.

    Args:
        heard: of its handle; not empty after wait().
    """

    def note(done: futures.Future[Any]) -> None:
        error = done.exception()
        if error is not None:
            _failed.append((what, heard, repr(error)))

    future.add_done_callback(note)


def report_failures() -> None:
    """Print the errors of asynchronous calls without wait()."""
    while _failed:
        what, heard, error = _failed.popleft()
        if not heard:
            text = f"hpcdist: {what} failed, and wait() was not called: {error}"
            abort.print_error(with_hint(coded("HD609", text)))
