"""The arguments of a collective call: as the caller passed them, and as the ranks compare them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcdist.errors import coded
from hpcdist.tensors.accelerator import MemoryKind
from hpcdist.tensors.tree import Tree

SELF_OVERLAP = coded("HD208", "out overlaps itself: several of its elements share memory, as in an expanded tensor")
LOSES_GRADIENT = coded(
    "HD208", "out is given, but a gradient is needed, which would be lost: omit out, or use torch.no_grad()"
)


@dataclass(slots=True)
class Call:
    """The call of one rank, as the ranks compare it.

    Attributes:
        x: tensor to send from this rank, detached and at least 1-d; None if it sends none.
        out: memory for the result, if the caller passed it.
        dim: non-negative dim.
        dim_arg: dim to compare; a receiver without a tensor cannot resolve a negative one.
        tensor: (dtype, number of dims, shape except dim) of `x`, or of `out` if there is no `x`.
        extent: extent of `x` along dim, or -1.
        out_extent: extent of `out` along dim, or -1.
        kind: kind of memory that holds the data.
        counts: partition of the root's tensor: a rule's name or counts, as the caller passed it.
        root_decides: whether the others' tensors must match the root's, rather than the most common ones.
        options: (name, value) pairs of other arguments that must agree.
        grad: whether this rank's tensor needs a gradient.
        inline: what travels behind this rank's header, if it fits: bytes, and contiguous host memory.
        tree, header: flattened structure, and its encoded description, of which `extent` is the length.
        trees: structures of all ranks, on the root of split.
        problem: error in the arguments of this rank, if any.
    """

    verb: str
    route: str = "auto"
    dim: int = 0
    dim_arg: int = 0
    root: int = -1
    x: Tensor | None = None
    out: Tensor | None = None
    tensor: tuple[torch.dtype, int, tuple[int, ...]] | None = None
    extent: int = -1
    out_extent: int = -1
    kind: MemoryKind = MemoryKind.CPU
    counts: str | tuple[int, ...] | None = None
    root_decides: bool = False
    options: tuple[tuple[str, object], ...] = ()
    grad: bool = False
    inline: Sequence[Tensor | bytes] | None = None
    tree: Tree | None = None
    header: bytes = b""
    trees: Sequence[Tree] = ()
    problem: str | None = None


def show_shape(shape: Sequence[int]) -> str:
    """Format a shape, with * for -1.

    Example::

        >>> show_shape((3, -1, 4))
        '(3, *, 4)'
    """
    return "(" + ", ".join("*" if extent < 0 else str(extent) for extent in shape) + ("," * (len(shape) == 1)) + ")"


def not_a_tensor(x: Any, name: str) -> str:
    """The message for an argument that should be a tensor; of a numpy array, also how it becomes one."""
    hint = " (torch.from_numpy converts an array)" if isinstance(x, np.ndarray) else ""
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
