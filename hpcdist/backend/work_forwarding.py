"""What a handle can do that torch has wrapped.

From torch 2.14 the work of a backend in Python comes back to its caller in a C++ object that passes on wait() and
get_future() alone: is_completed() would be False for ever, and receiving from any rank would fail for want of the
source. The methods of `METHODS` find the work through get_future(), and ask it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.futures import Future

__all__ = ["METHODS", "findable", "install"]

METHODS = ("is_completed", "is_success", "exception", "result", "source_rank", "_source_rank", "_get_sequence_number")

_asked = threading.local()  # `found` is there while a thread asks


def findable(get_future: Callable[[Any], Future[Any]]) -> Callable[[Any], Future[Any]]:
    """Let a class of works be found behind torch's: a decorator for its get_future()."""

    @functools.wraps(get_future)
    def answer(self: Any) -> Future[Any]:
        if not hasattr(_asked, "found"):
            return get_future(self)
        _asked.found = self
        future: Future[Any] = Future()
        future.set_result(None)
        return future

    return answer


def _find(work: dist.Work) -> Any:
    """Return the work in Python that torch has wrapped; None for one of another backend."""
    _asked.found = None
    try:
        work.get_future()
        return _asked.found
    except Exception:  # there are backends without futures
        return None
    finally:
        del _asked.found


def _passing_on(name: str, base: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(base)
    def method(self: dist.Work) -> Any:
        found = _find(self) if type(self) is dist.Work else None
        return base(self) if found is None else getattr(found, name)()

    return method


def install() -> None:
    """Let the methods of torch's works pass on to those in Python; a second call does nothing."""
    for name in METHODS:
        base = getattr(dist.Work, name, None)
        if base is not None and not hasattr(base, "__wrapped__"):
            setattr(dist.Work, name, _passing_on(name, base))
