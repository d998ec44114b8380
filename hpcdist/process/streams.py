"""Standard streams that fail: a pipe whose reader has gone (``| head``), a closed stream; and Ctrl-C of a command."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import StringIO, TextIOWrapper
from typing import Any, TextIO

from hpcdist.errors import coded, reason

INTERRUPTED = 130  # exit status after Ctrl-C, as shells have it
FAILED = 1  # exit status of a command that has done its work, but could not print the result


def reserve() -> None:
    """Open /dev/null in place of closed standard streams: else the next file or socket gets that descriptor, and
    whatever a library prints is written to it."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest free descriptor


def escape() -> None:
    """Let standard output, which a person reads, show what its encoding lacks as an escape: names may have any bytes.

    Before :func:`printing`.
    """
    if isinstance(sys.stdout, TextIOWrapper):  # None if it was closed
        sys.stdout.reconfigure(errors="backslashreplace")


def pass_bytes_on() -> None:
    """Let standard output, which a program reads, have names and words as the bytes that they were.

    Before :func:`printing`.
    """
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(encoding=sys.getfilesystemencoding(), errors=sys.getfilesystemencodeerrors())


class _Stream:
    """A standard stream that keeps its first error, and drops all output after that."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.error: Exception | None = None

    def write(self, text: str) -> int:
        self._try(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, step: Callable[..., object], *args: str) -> None:
        if self.error is None:
            try:
                step(*args)
            except (OSError, ValueError) as error:  # ValueError: it was closed
                self.error = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def printing(name: str) -> Iterator[None]:
    """A context in which a command goes on if the reader of its output has gone, with its own exit status.

    If standard output fails in another way, as on a full disk, or with text that it cannot encode, a command that
    succeeds exits with FAILED. One that is interrupted removes its temporary files and exits with INTERRUPTED.

    Args:
        name: name of the command.
    """
    before = sys.stdout, sys.stderr
    out, err = (_Stream(stream or StringIO()) for stream in before)  # None: closed before Python began
    sys.stdout, sys.stderr = out, err
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # set by the package, for the time of the imports
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        try:
            yield
        except KeyboardInterrupt:
            sys.exit(INTERRUPTED)
        except SystemExit as end:
            if end.code:
                raise
        out.flush()
        if isinstance(out.error, (OSError, UnicodeError)) and not isinstance(out.error, BrokenPipeError):
            text = coded("HD410", f"standard output: {reason(out.error)}")
            err.write(f"{name}: error: {text}\n")
            err.flush()
            sys.exit(FAILED)
        sys.exit()
    finally:
        if out.error is None and err.error is None:  # else Python's last flush would fail
            sys.stdout, sys.stderr = before
