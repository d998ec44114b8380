"""What one rank asks of a collective: as the caller has passed it, and as the other ranks need to know it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from hpcdist.tensors.dtypes import MemoryKind
from hpcdist.tensors.tree import Tree

__all__ = ["LOST", "SHARED", "Call", "LayoutArgs", "ShardArgs", "SplitArgs", "StructureArgs", "others", "show_shape"]

SHARED = "out is an expanded tensor, or like one: several of its elements share one place in memory"
LOST = "out is given, but a gradient is to flow, which would be lost: leave out, or use torch.no_grad()"


class Args(Protocol):
    """What the caller of a collective has passed; see :class:`hpcdist.collectives.run.Operation`."""

    name: str
    x: Any
    route: Any
    out: Any


class ShardArgs(Args, Protocol):
    """Those of gather, and of concat, which is not `rooted`: there every rank receives."""

    dim: Any
    root: Any
    rooted: bool


class StructureArgs(ShardArgs, Protocol):
    """Those of gather and concat of structures."""

    allow_pickle: Any


class SplitArgs(Args, Protocol):
    """Those of split."""

    dim: Any
    root: Any
    counts: Any
    allow_pickle: Any


class LayoutArgs(Args, Protocol):
    """Those of redistribute."""

    src: Any
    dst: Any


@dataclass(slots=True)
class Call:
    """What one rank asks of a collective, as far as the other ranks need to know it.

    Attributes:
        x: this rank's tensor as it travels: no gradient history, at least 1-d; None where it brings none.
        out: the memory that the caller gave for the result, as it is written.
        dim: made non-negative.
        dim_arg: dim as it is compared; a receiver without a tensor cannot tell what a negative one means.
        tensor: (dtype, number of dims, shape with a hole at dim), of `x`, or of `out` where there is no `x`.
        extent: of `x` along dim, or -1.
        out_extent: of `out` along dim, or -1.
        kind: where the data are.
        counts: how the root cuts the tensor: a rule's name or counts, as the caller gave it.
        root_decides: what others have must fit to the root's tensor, and not to what most ranks have.
        options: (name, value) of what must be the same on all ranks besides.
        grad: a gradient is to flow back to this rank's tensor.
        tree, header: of a structure: what it is made of, and its description as it travels; `extent` is its length.
        trees: on split's root, the structures that the ranks get.
        problem: what is wrong with the arguments on this rank.
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
