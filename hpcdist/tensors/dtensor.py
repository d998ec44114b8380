"""Convert DTensor placements to a layout. DTensor partitions by the ceiling rule only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch.distributed.tensor import Placement, Replicate, Shard

from hpcdist.errors import refusal
from hpcdist.layout import Block, Layout

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def layout_of(placements: Sequence[Placement], mesh: DeviceMesh | Sequence[int]) -> Layout:
    """Return the layout of a DTensor with these placements.

    Args:
        placements: Shard or Replicate, for each dimension of the mesh.
        mesh: a DeviceMesh whose ranks are numbered along its last dimension first, or its shape.

    Raises:
        ValueError: if the mesh numbers its ranks differently, or the number of placements is wrong.
        TypeError: for Partial, whose parts are summands rather than parts of the tensor, and for other placements.

    Example, on 4 ranks: rows and columns cut in 2::

        >>> layout_of([Shard(0), Shard(1)], (2, 2))
        Block(grid=(2, 2), dims=(0, 1), counts='chunk')
        >>> hd.redistribute(x.to_local(), layout_of(x.placements, x.device_mesh), hd.Split(0))
    """
    grid = _shape(mesh)
    if len(placements) != len(grid):
        raise refusal(
            ValueError,
            "HD213",
            f"there are {len(placements)} placements, expected one for each of {len(grid)} mesh dimensions",
        )
    dims: list[int | None] = []
    for placement in placements:
        if type(placement) not in (Shard, Replicate):
            raise refusal(
                TypeError, "HD213", f"{placement} has no layout: expected Shard or Replicate (reduce a Partial first)"
            )
        dims.append(placement.dim if isinstance(placement, Shard) else None)
    return Block(grid, tuple(dims), "chunk")


def _shape(mesh: DeviceMesh | Sequence[int]) -> tuple[int, ...]:
    if isinstance(mesh, Sequence):
        return tuple(mesh)
    ranks = mesh.mesh
    if ranks.flatten().tolist() != list(range(ranks.numel())):
        raise refusal(
            ValueError,
            "HD213",
            f"the mesh has the ranks {ranks.tolist()}, expected 0 to {ranks.numel() - 1} in this order",
        )
    return tuple(ranks.shape)
