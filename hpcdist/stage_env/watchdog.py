"""A rank that makes no progress ends the job, with what it was doing."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from hpcdist.errors import HangError
from hpcdist.process import abort, exits

__all__ = ["Watchdog"]

_TICK = 5.0  # seconds between two looks at most


class Watchdog:
    """Ends the job if what this rank is doing makes no progress for `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._doing = ""
        self._touched = time.monotonic()
        self._thread = threading.Thread(target=self._watch, name="hpcdist-watch", daemon=True)
        self._over = threading.Event()

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def touch(self, _: object = None) -> None:
        """Note progress."""
        self._touched = time.monotonic()

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """A context in which this rank is expected to make progress."""
        self.touch()
        self._doing = what
        try:
            yield
        finally:
            self._doing = ""

    def _watch(self) -> None:
        while not self._over.wait(min(_TICK, self._seconds / 8)):
            doing = self._doing
            if doing and time.monotonic() - self._touched > self._seconds:
                text = f"{doing} on {socket.gethostname()} has made no progress for {self._seconds:g} s"
                exits.show(HangError("HD601", text), None)
                abort.job(1)
