"""Calls are run, not recorded: what torch's compilers and tracers are told, and why a call within one is refused."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType

import torch
from torch._C import _functorch
from torch._C._dynamo import eval_frame
from torch.fx import _symbolic_trace
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

__all__ = ["as_called", "not_compiled", "recorded"]


class _Caller(threading.local):
    recorded: str | None = None


_caller = _Caller()  # of a call that this thread works on in the background of another


def recorded() -> str | None:
    """Why a call cannot be made here: it would be recorded by a tracer, or transformed, without its data being moved.

    None where it can. (What tracers record are the operations of torch, and MPI is none: the graph would return memory
    that nobody has written.)
    """
    if (
        torch._C._len_torch_dispatch_stack()
        or torch._C._is_tracing()
        or _functorch.peek_interpreter_stack() is not None
        or _symbolic_trace.is_fx_symbolic_tracing()
        or _caller.recorded
    ):
        return _caller.recorded or _reason()
    return None


def _reason() -> str | None:
    within = [type(m).__name__ for m in _get_current_dispatch_mode_stack() if getattr(m, "_mode_key", None) is not None]
    if _symbolic_trace.is_fx_symbolic_tracing() and _fx_traces_here():
        within.append("a trace of torch.fx")
    if torch._C._is_tracing():
        within.append("torch.jit.trace")
    interpreter = _functorch.peek_interpreter_stack()
    if interpreter is not None:
        within.append(f"torch.func (its {interpreter.key().name.lower()})")
    if not within:  # other modes see what happens, and let it happen
        return None
    return f"it cannot be traced or transformed: call it outside of {within[-1]}, which does not run what MPI does"


def _fx_traces_here() -> bool:
    """Whether it is this thread that torch.fx traces: its flag is one for all, and torch.compile sets it, too."""
    frame = sys._getframe()
    while frame is not None and frame.f_code is not _symbolic_trace.Tracer.trace.__code__:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


@contextmanager
def as_called(reason: str | None) -> Iterator[None]:
    """To do in this thread what was called in another, where recorded() was `reason`."""
    _caller.recorded = reason
    try:
        yield
    finally:
        _caller.recorded = None


def not_compiled(public: Iterable[object]) -> None:
    """Have torch.compile leave these functions alone, the methods of these classes, and all that they call.

    It breaks its graph there and runs them as they are, as it does with what torch.compiler.disable returns. That one
    would import the compiler, which takes seconds, and put a call around each.
    """
    for item in public:
        if isinstance(item, type):
            not_compiled(vars(item).values())
        elif isinstance(item, FunctionType):
            item._torchdynamo_disable = True  # type: ignore[attr-defined]
            item._torchdynamo_disable_msg = "hpcdist moves data between processes"  # type: ignore[attr-defined]
            skip = eval_frame._FrameAction.SKIP
            eval_frame.set_code_exec_strategy(item.__code__, eval_frame._FrameExecStrategy(skip, skip))
