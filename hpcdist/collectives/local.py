"""What a rank works out by itself: its part of a tensor that every rank holds, and how to share unequal rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from hpcdist import layout as layouts
from hpcdist.layout import Layout
from hpcdist.runtime import world

if TYPE_CHECKING:
    from hpcdist.comm.signatures import GroupLike

__all__ = ["balance", "local"]


def balance(weights: Sequence[float], parts: int | None = None, *, group: GroupLike | None = None) -> list[int]:
    """How many of a list of unequal rows each rank should take so that all have about the same weight.

    The counts are for consecutive rows, as Split and split take them. No rank gets more than the heaviest one of the
    best way to cut plus the largest weight: see :func:`hpcdist.layout.balance`.

    Args:
        weights: of each row, numbers >= 0; the same on all ranks.
        parts: among how many; None for the ranks of `group`.

    Raises:
        ValueError: a weight is negative, or not a number.

    Example, on 2 ranks, of sequences of these lengths::

        >>> hd.balance([8, 1, 1, 1, 1, 4])
        [1, 5]
    """
    return layouts.balance(weights, world.current().context.group_of(group).size if parts is None else parts)


def local(x: Tensor, layout: Layout, *, group: GroupLike | None = None) -> Tensor:
    """This rank's part of a tensor that every rank holds: a view, and nothing is communicated.

    Args:
        x: the whole tensor.
        layout: which part of it each rank takes.
        group: whose ranks they are; None for all.

    Raises:
        ValueError: on this rank, if a tensor of this shape cannot be laid out like this.

    Example, on rank 1 of 2::

        >>> hd.local(torch.arange(8).view(2, 4), hd.Split(1))
        tensor([[2, 3],
                [6, 7]])
    """
    of = world.current().context.group_of(group)
    return x[layout.boxes(x.shape, of.size)[of.rank].slices()]
