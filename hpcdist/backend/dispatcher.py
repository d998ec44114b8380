"""What torch's dispatcher does around the calls of a group, where this package has to do it, or to undo it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from hpcdist import torch_names
from hpcdist.backend.works import Finished
from hpcdist.tensors.storage import tensors_in
from hpcdist.watch.torch_groups import OURS

_NESTED = ("allgather_", "allgather_coalesced_", "gather_")  # the dispatcher does not look into their lists of results
_LAZY = ("Conjugate", "Negative")
_libraries: list[torch.library.Library] = []  # their kernels end with them


def _operations(kind: type) -> dict[str, str]:
    """Return the name of the dispatcher's operation of each method of a class."""
    older = torch_names.OLDER_METHODS
    found = {name: older.get(name, name) for name, it in vars(kind).items() if isinstance(it, FunctionType)}
    called = {name: [each for each in (f"{one}_", one) if hasattr(torch.ops.c10d, each)] for name, one in found.items()}
    return {name: known[0] for name, known in called.items() if known}


def give_lazy_tensors(kind: type) -> None:
    """Give lazily conjugated and negated tensors to this package's backends as they are; a second call does nothing.

    The dispatcher gives copies to a backend, and drops what the backend writes into them.

    Args:
        kind: class whose methods are the backends'.
    """
    if _libraries or torch_names.DispatchKey is None:
        return
    library: Any = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    for name in {*_operations(kind).values()}.difference(_NESTED):
        for key in _LAZY:
            library.impl(name, _as_they_are(getattr(torch.ops.c10d, name).default), key, with_keyset=True)
    _libraries.append(library)


def _as_they_are(op: Any) -> Callable[..., Any]:
    def kernel(keys: Any, *args: Any) -> Any:
        for key in _LAZY:
            keys = keys.remove(getattr(torch_names.DispatchKey, key))
        group, device = next(filter(None, map(_group, args))), tensors_in(args)[0].device
        own = torch_names.backend_of(group)(device).name() in OURS
        return op.redispatch(keys, *(args if own else _resolved(args)))

    return kernel


def _group(x: Any) -> dist.ProcessGroup | None:
    try:
        return dist.ProcessGroup.unbox(x)
    except (TypeError, RuntimeError):
        return None


def _resolved(x: Any) -> Any:
    if isinstance(x, (list, tuple)):
        return [_resolved(part) for part in x]
    return x.resolve_conj().resolve_neg() if isinstance(x, Tensor) else x


def observed(kind: type) -> dict[str, Callable[..., Any]]:
    """Return the methods of a class that torch calls without its dispatcher, as torch until 2.13 does, with what the
    dispatcher would do: torch's profiler has an event of each call, and one of fake tensors moves no data."""
    return {name: _observed(getattr(kind, name), f"c10d::{op}") for name, op in _operations(kind).items()}


def _observed(method: Callable[..., Any], event: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        if torch_names.mode_count() and any(isinstance(x, torch_names.FakeTensor) for x in tensors_in(args)):
            return Finished(args[0])
        if not torch_names.is_profiled():
            return method(self, *args, **options)
        with record_function(event):
            return method(self, *args, **options)

    return call
