"""Operations without communication: the local part of a tensor, and counts for rows of unequal weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from hpcdist import layout as layouts
from hpcdist.layout import Layout
from hpcdist.runtime import world

if TYPE_CHECKING:
    from hpcdist.comm.settings import GroupLike

__all__ = ["balance", "local"]


def balance(weights: Sequence[float], parts: int | None = None, *, group: GroupLike | None = None) -> list[int]:
    """Balance rows of unequal weight: return a count of rows for each rank so that all have about the same weight.

    The counts are for consecutive rows, as Split and split take them. No rank gets more than the heaviest part of the
    best partition plus the largest weight: see :func:`hpcdist.layout.balance`.

    Args:
        weights: the weight of each row, a number >= 0; the same on all ranks.
        parts: the number of parts; None means the number of ranks in `group`.

    Raises:
        ValueError: if a weight is negative or not a number.

    Example, on 2 ranks, for sequences of these lengths::

        >>> hd.balance([8, 1, 1, 1, 1, 4])
        [1, 5]
    """
    return layouts.balance(weights, world.context().group_of(group).size if parts is None else parts)


def local(x: Tensor, layout: Layout, *, group: GroupLike | None = None) -> Tensor:
    """Return this rank's part of a tensor that every rank holds: a view, without communication.

    Args:
        x: the whole tensor.
        layout: the layout of the ranks' parts.
        group: the group of ranks; None means all ranks.

    Raises:
        ValueError: on this rank, if a tensor of this shape cannot have this layout.

    Example, on rank 1 of 2::

        >>> hd.local(torch.arange(8).view(2, 4), hd.Split(1))
        tensor([[2, 3],
                [6, 7]])
    """
    ranks = world.context().group_of(group)
    return x[layout.boxes(x.shape, ranks.size)[ranks.rank].slices()]
