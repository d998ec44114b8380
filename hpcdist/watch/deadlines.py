"""How long a call may wait: what the user says, in seconds; and the limit of init(), while the ranks do not know each
other yet."""

from __future__ import annotations

import sys
import threading
from datetime import timedelta
from math import inf
from numbers import Real

from hpcdist import activity
from hpcdist.errors import HangError
from hpcdist.process import abort, exits

__all__ = ["DEFAULT", "FirstMeeting", "deadline", "patience"]

DEFAULT = 1800.0  # seconds, torch.distributed's own default
_EVER = 100 * 365.25 * 86400  # seconds: no limit, in what threads, poll() and torch can count
_LEAST = 1e-3  # seconds: torch counts them


def deadline(timeout: object, said: str | None) -> float:
    """The deadline of calls in seconds: what init() was given, else what HPCDIST_TIMEOUT says, else torch's default.
    A hundred years stand for whatever is longer.

    Raises:
        TypeError, ValueError: it is none.
    """
    name = "timeout"
    if timeout is None:
        if not said:
            return DEFAULT
        name = "HPCDIST_TIMEOUT"
        try:
            timeout = float(said)
        except ValueError:
            raise ValueError(f"{name} is {said!r}, expected seconds") from None
    seconds = _seconds(name, timeout)
    if not seconds >= _LEAST:  # nor for nan
        raise ValueError(f"{name} is {seconds:g}, expected seconds, {_LEAST:g} at least (inf for no limit)")
    return min(seconds, _EVER)


def patience(timeout: object) -> float | None:
    """For how many seconds a handle is waited for; None for no limit.

    Raises:
        TypeError, ValueError: it is not a time.
    """
    if timeout is None:
        return None
    seconds = _seconds("timeout", timeout)
    if not seconds >= 0:  # nor for nan
        raise ValueError(f"timeout is {seconds:g}, expected seconds, 0 at least (inf for no limit)")
    return seconds if seconds < _EVER else None


def _seconds(name: str, timeout: object) -> float:
    if isinstance(timeout, timedelta):
        return timeout.total_seconds()
    if not isinstance(timeout, Real) or isinstance(timeout, bool):
        raise TypeError(f"{name} must be a timedelta or seconds, got {type(timeout).__name__}")
    try:
        return float(timeout)
    except OverflowError:  # an integer
        return -inf if timeout < 0 else inf


class FirstMeeting:
    """A context in which the ranks do not know each other yet: past the deadline, this one can only tell of itself.

    Args:
        timeout, said: the deadline as the user gave it, which nobody has looked at yet; see :func:`deadline`.
        size: how many ranks are to meet.
    """

    def __init__(self, timeout: object, said: str | None, size: int) -> None:
        try:
            seconds = deadline(timeout, said)
        except (TypeError, ValueError):  # which will be told when all are there
            seconds = DEFAULT
        waits = f"{activity.where('init').decode()} has waited for {seconds:g} s"
        self._text = f"{waits}: the {size} ranks have not met, some may not have called it"
        self._frame = activity.outside(sys._getframe())
        self._timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), self._late)
        self._timer.daemon = True
        self._alone = size == 1

    def _late(self) -> None:
        exits.show(HangError(self._text), self._frame)
        abort.job(1)

    def __enter__(self) -> None:
        if not self._alone:
            self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        del self._frame
