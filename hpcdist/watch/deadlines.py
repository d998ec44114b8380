"""Deadlines: the user's timeouts in seconds, and the deadline of init() until the ranks have met."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from math import inf
from numbers import Real
from types import FrameType

from hpcdist.activity import callsite
from hpcdist.errors import HangError, refusal
from hpcdist.process import abort

DEFAULT = 1800.0  # seconds, torch.distributed's own default
_EVER = 100 * 365.25 * 86400  # seconds: no limit, yet a number that threads, poll() and torch can handle
_LEAST = 1e-3  # seconds: torch's unit


def deadline(timeout: object, env_timeout: str | None) -> float:
    """Return the deadline of calls in seconds: at most a hundred years.

    Args:
        timeout: argument of init(), if any.
        env_timeout: value of HPCDIST_TIMEOUT, which is used without that argument; without both, torch's default.

    Raises:
        TypeError, ValueError: if it is not a positive time.
    """
    name = "timeout"
    if timeout is None:
        if not env_timeout:
            return DEFAULT
        name = "HPCDIST_TIMEOUT"
        try:
            timeout = float(env_timeout)
        except ValueError:
            raise refusal(ValueError, "HD114", f"{name} is {env_timeout!r}, expected seconds") from None
    return _seconds(name, timeout, _LEAST)


def patience(timeout: object, name: str = "timeout") -> float | None:
    """Return the timeout of a handle's wait(), or another argument of this `name`, in seconds; None for no limit.

    Raises:
        TypeError, ValueError: if it is not a time, or negative.
    """
    if timeout is None:
        return None
    seconds = _seconds(name, timeout, 0)
    return seconds if seconds < _EVER else None


def _seconds(name: str, timeout: object, least: float) -> float:
    if isinstance(timeout, timedelta):
        timeout = timeout.total_seconds()
    if not isinstance(timeout, Real) or isinstance(timeout, bool):
        raise refusal(TypeError, "HD114", f"{name} must be a timedelta or seconds, got {type(timeout).__name__}")
    try:
        seconds = float(timeout)
    except OverflowError:  # an integer
        seconds = -inf if timeout < 0 else inf
    if not seconds >= least:  # nor is nan
        text = f"{name} is {seconds:g}, expected seconds, {least:g} at least (inf for no limit)"
        raise refusal(ValueError, "HD114", text)
    return min(seconds, _EVER)


@contextmanager
def first_meeting(timeout: object, env_timeout: str | None, size: int, library: str) -> Iterator[None]:
    """A context that ends the job if the ranks have not met by the deadline; each can only report itself.

    Args:
        timeout, env_timeout: as those of :func:`deadline`, not yet checked.
        size: number of ranks that must meet.
        library: name of the MPI library.
    """
    try:
        seconds = deadline(timeout, env_timeout)
    except (TypeError, ValueError):  # raised on all ranks after they have met
        seconds = DEFAULT
    frame = callsite.outside(sys._getframe())
    waits = f"{callsite.where('init').decode()} has waited for {seconds:g} s"
    text = f"{waits}: the {size} ranks have not met, some may not have called it"
    if library.startswith("Open MPI"):  # it believes that an address of two hosts, as of docker0, leads to the other
        text += "; or Open MPI does not reach the other nodes: export OMPI_MCA_btl_tcp_if_include=NETWORK/BITS, theirs"
    with limited(seconds, text, frame) if size > 1 else nullcontext():
        yield


@contextmanager
def limited(seconds: float, text: str, frame: FrameType | None = None) -> Iterator[None]:
    """A context that ends the job with this text after so many seconds."""

    def late() -> None:
        abort.show(HangError("HD601", text), frame)
        abort.job(1)

    timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), late)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
