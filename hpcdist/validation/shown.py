"""How messages show a wrong argument."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

__all__ = ["not_a_tensor", "show", "show_repr"]


def not_a_tensor(x: Any, name: str) -> str:
    """The message for an argument that should be a tensor; of a numpy array, also how it becomes one."""
    hint = ""
    if isinstance(x, np.ndarray):
        hint = " (torch.from_numpy converts an array)"
        if not x.dtype.isnative and x.dtype.names is None:  # from_numpy refuses it
            hint = f" (torch.from_numpy(a.astype({x.dtype.name!r})) converts an array of swapped bytes)"
    return f"{name} must be a torch.Tensor, got {show(x)}{hint}"


def show(value: Any) -> str:
    """A value as a message shows it: in one line, at most 100 characters."""
    if isinstance(value, np.ndarray):
        return f"ndarray of shape {value.shape} and dtype {value.dtype}"
    return "a tensor" if isinstance(value, Tensor) else f"{type(value).__name__} {show_repr(value)}"[:100]


def show_repr(value: Any) -> str:
    """The repr of a value, also of one whose repr fails."""
    try:
        return repr(value)
    except Exception:  # not the error to report
        return "(its repr fails)"
