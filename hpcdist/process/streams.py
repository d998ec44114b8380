"""Standard streams that nobody may read: a pipe whose reader has gone (``| head``), a stream that is closed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from hpcdist.errors import reason

__all__ = ["printing", "reserve"]

FAILED = 1  # the exit status of a command that has done its work, and could not print what it found


def reserve() -> None:
    """Open /dev/null in the place of standard streams that are closed: else the next file or socket has that number,
    and what some library prints lands in it."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free


class _Stream:
    """A standard stream; what fails there is kept, and what is printed after that is lost."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.error: Exception | None = None

    def write(self, text: str) -> int:
        if self.error is None:
            try:
                self._stream.write(text)
            except (OSError, ValueError) as error:  # ValueError: it was closed
                self.error = error
        return len(text)

    def flush(self) -> None:
        if self.error is None:
            try:
                self._stream.flush()
            except (OSError, ValueError) as error:
                self.error = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _nowhere() -> TextIO:
    return open(os.devnull, "w")


@contextmanager
def printing(name: str) -> Iterator[None]:
    """A context in which a command may print though its reader has gone: it goes on, and its exit status counts.

    Where standard output fails in another way, as on a full disk, a command that ends well ends with FAILED.

    Args:
        name: of the command.
    """
    before = sys.stdout, sys.stderr
    out, err = (_Stream(stream or _nowhere()) for stream in before)  # None: closed before Python began
    sys.stdout, sys.stderr = out, err
    try:
        try:
            yield
        except SystemExit as end:
            if end.code:
                raise
        out.flush()
        if isinstance(out.error, OSError) and not isinstance(out.error, BrokenPipeError):
            err.write(f"{name}: error: standard output: {reason(out.error)}\n")
            err.flush()
            sys.exit(FAILED)
        sys.exit()
    finally:
        if out.error is None and err.error is None:  # else Python's last flush would fail
            sys.stdout, sys.stderr = before
