"""Eager calls only: refuse calls inside tracers and transforms of torch."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hpcdist import torch_names


class _Caller(threading.local):
    recorded: str | None = None


_caller = _Caller()  # the state of the thread whose call this thread runs in the background


def recorded() -> str | None:
    """Return why a call cannot run here: a tracer would record it, or transform it, without moving data; else None.

    Tracers record only operations of torch. MPI is not one of them: the graph would return uninitialised memory.
    """
    if (
        torch_names.mode_count()
        or torch_names.is_jit_tracing()
        or torch_names.transform() is not None
        or torch_names.is_fx_tracing()
        or _caller.recorded
    ):
        return _caller.recorded or _reason()
    return None


def _reason() -> str | None:
    within = [type(mode).__name__ for mode in torch_names.modes() if torch_names.mode_key(mode) is not None]
    if torch_names.is_fx_tracing() and _fx_traces_here():
        within.append("a trace of torch.fx")
    if torch_names.is_jit_tracing():
        within.append("torch.jit.trace")
    interpreter = torch_names.transform()
    if interpreter is not None:
        within.append(f"torch.func (its {interpreter.key().name.lower()})")
    if not within:  # other modes observe operations, and run them
        return None
    return f"it cannot be traced or transformed: call it outside of {within[-1]}, which does not run MPI operations"


def _fx_traces_here() -> bool:
    """Return whether torch.fx traces this thread: its flag is global, and torch.compile sets it too."""
    frame = sys._getframe()
    while frame is not None and frame.f_code is not torch.fx.Tracer.trace.__code__:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


@contextmanager
def as_called(reason: str | None) -> Iterator[None]:
    """Run a call of another thread, in which recorded() returned `reason`."""
    _caller.recorded = reason
    try:
        yield
    finally:
        _caller.recorded = None
