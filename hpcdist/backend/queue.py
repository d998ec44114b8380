"""The collectives of a process group in their order: at once in the caller's thread, or one after the other in a
worker's."""

from __future__ import annotations

import threading
from collections import deque
from queue import SimpleQueue
from typing import Protocol

from hpcdist.errors import with_hint
from hpcdist.process import abort

__all__ = ["Job", "Queue"]

_KEPT = 100  # failed calls


class Job(Protocol):
    """A call that was made."""

    def run(self) -> None: ...

    def report(self) -> str | None: ...


class Queue:
    """Calls that run one after the other in a thread, which starts with the first of them.

    A thread, because MPI makes progress only inside its functions; only one for a group, so that every rank runs the
    calls in the same order.

    Attributes:
        running: held by the thread that runs a call; a program's threads may call on one group at once.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._submitted = self._finished = 0  # the first is the callers', the second the worker's
        self._lock = threading.Lock()
        self.running = threading.RLock()  # a callback of a call makes its own calls
        self._thread: threading.Thread | None = None
        self._latest: deque[Job] = deque(maxlen=_KEPT)  # of those that failed

    @property
    def idle(self) -> bool:
        """Whether all calls so far are done: the next one may run in the caller's thread."""
        return self._submitted == self._finished

    @property
    def inside(self) -> bool:
        """Whether this is the worker's thread: in a callback of a call that it has completed, it must not wait."""
        return threading.current_thread() is self._thread

    def submit(self, job: Job) -> None:
        with self._lock:
            self._submitted += 1
            self._jobs.put(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="hpcdist-backend", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            with self.running:
                job.run()
            if job.report() is not None:
                self._latest.append(job)
            self._finished += 1
            del job  # lets its tensors be freed

    def abandon(self) -> None:
        """Stop waiting for calls in progress: no more calls are expected."""
        with self._lock:
            if self._thread is not None:
                self._jobs.put(None)
                self._thread = None

    def stop(self) -> None:
        """End the thread after all calls, and print the errors of those that nobody has waited for."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            thread.join()
        while self._latest:
            text = self._latest.popleft().report()
            if text is not None:
                abort.print_error(with_hint(f"hpcdist: {text}"))
