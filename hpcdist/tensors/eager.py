"""Eager calls only: exclude public functions from torch's compilers, and refuse calls inside tracers."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType

import torch
from torch._C import _functorch
from torch._C._dynamo import eval_frame
from torch.fx import _symbolic_trace
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


class _Caller(threading.local):
    recorded: str | None = None


_caller = _Caller()  # the state of the thread whose call this thread runs in the background


def recorded() -> str | None:
    """Return why a call cannot run here: a tracer would record it, or transform it, without moving data; else None.

    Tracers record only operations of torch. MPI is not one of them: the graph would return uninitialised memory.
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
    if not within:  # other modes observe operations, and run them
        return None
    return f"it cannot be traced or transformed: call it outside of {within[-1]}, which does not run MPI operations"


def _fx_traces_here() -> bool:
    """Return whether torch.fx traces this thread: its flag is global, and torch.compile sets it too."""
    frame = sys._getframe()
    while frame is not None and frame.f_code is not _symbolic_trace.Tracer.trace.__code__:
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


def not_compiled(public: Iterable[object]) -> None:
    """Exclude these functions, the methods of these classes, the public names of these modules, and all that they call
    from torch.compile.

    It breaks its graph there and runs them eagerly, as after torch.compiler.disable, which would import the compiler
    (seconds) and wrap every call.
    """
    for item in public:
        if isinstance(item, type):
            not_compiled(vars(item).values())
        elif isinstance(item, ModuleType):
            not_compiled(vars(item)[name] for name in item.__all__)
        elif isinstance(item, FunctionType):
            item._torchdynamo_disable = True  # type: ignore[attr-defined]
            item._torchdynamo_disable_msg = "hpcdist moves data between processes"  # type: ignore[attr-defined]
            skip = eval_frame._FrameAction.SKIP
            eval_frame.set_code_exec_strategy(item.__code__, eval_frame._FrameExecStrategy(skip, skip))
