"""What one rank asks of a collective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from hpcdist.tensors.dtypes import MemoryKind
from hpcdist.tree import Tree

__all__ = ["LOST", "SHARED", "Call", "others", "show_shape"]

SHARED = "out is an expanded tensor, or like one: several of its elements share one place in memory"
LOST = "out is given, but a gradient is to flow, which would be lost: leave out, or use torch.no_grad()"


@dataclass(slots=True)
class Call:
    """What one rank asks of a collective, as far as the other ranks need to know it.

    Attributes:
        x: this rank's tensor as it travels: no gradient history, at least 1-d; None where it brings none.
        out: the memory that the caller gave for the result, as it is written.
        dim: made non-negative.
        said_dim: dim as it is compared; a receiver without a tensor cannot tell what a negative one means.
        tensor: (dtype, number of dims, shape with a hole at dim), of `x`, or of `out` where there is no `x`.
        extent: of `x` along dim, or -1.
        out_extent: of `out` along dim, or -1.
        kind: where the data are.
        counts: how the root cuts the tensor: a rule's name or counts, as the caller gave it.
        options: (name, value) of what must be the same on all ranks besides.
        grad: a gradient is to flow back to this rank's tensor.
        tree, header: of a structure: what it is made of, and its description as it travels; `extent` is its length.
        trees: on split's root, the structures that the ranks get.
        problem: what is wrong with the arguments on this rank.
    """

    verb: str
    route: str = "auto"
    dim: int = 0
    said_dim: int = 0
    root: int = -1
    x: Tensor | None = None
    out: Tensor | None = None
    tensor: tuple[torch.dtype, int, tuple[int, ...]] | None = None
    extent: int = -1
    out_extent: int = -1
    kind: MemoryKind = MemoryKind.CPU
    counts: str | tuple[int, ...] | None = None
    options: tuple[tuple[str, object], ...] = ()
    grad: bool = False
    tree: Tree | None = None
    header: bytes = b""
    trees: Sequence[Tree] = ()
    problem: str | None = None


@lru_cache(maxsize=1024)
def others(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    """A shape with a hole at `dim`."""
    return (*shape[:dim], -1, *shape[dim + 1 :])


def show_shape(others: Sequence[int]) -> str:
    """A shape with a hole, as users write it.

    Example::

        >>> show_shape((3, -1, 4))
        '(3, *, 4)'
    """
    return "(" + ", ".join("*" if extent < 0 else str(extent) for extent in others) + ("," * (len(others) == 1)) + ")"
