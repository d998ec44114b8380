"""torch's DTensor placements <-> layouts: DTensor cuts by the ceiling rule, and knows nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import Placement, Replicate, Shard

from hpcdist.layout import Block, Box, Layout

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["layout_of", "placements_of"]


def layout_of(placements: Sequence[Placement], mesh: DeviceMesh | Sequence[int]) -> Layout:
    """The layout that a DTensor with these placements has; the inverse of :func:`placements_of`.

    Args:
        placements: Shard or Replicate, for each dimension of the mesh.
        mesh: a DeviceMesh whose ranks count along its last dimension first, or its shape.

    Raises:
        ValueError: for a mesh that numbers its ranks in another way.
        TypeError: for Partial, whose parts are summands and no parts of the tensor, and other placements.

    Example, on 4 ranks: rows cut in 2, columns in 2::

        >>> layout_of([Shard(0), Shard(1)], (2, 2))
        Block(grid=(2, 2), dims=(0, 1), counts='chunk', order='row')
        >>> hd.redistribute(x.to_local(), layout_of(x.placements, x.device_mesh), hd.Split(0))
    """
    grid = _shape(mesh)
    if len(placements) != len(grid):
        raise ValueError(
            f"there are {len(placements)} placements, expected one for each of {len(grid)} mesh dimensions"
        )
    dims: list[int | None] = []
    for placement in placements:
        if type(placement) is not Shard and type(placement) is not Replicate:
            raise TypeError(f"{placement} has no layout: expected Shard or Replicate (reduce a Partial first)")
        dims.append(placement.dim if isinstance(placement, Shard) else None)
    return Block(grid, tuple(dims), "chunk")


def placements_of(held: Layout, shape: Sequence[int], mesh: DeviceMesh | Sequence[int]) -> tuple[Placement, ...]:
    """The placements of a DTensor whose local tensors are the parts of this layout.

    Args:
        held: the layout.
        shape: of the whole tensor: it may decide, since the ceiling rule and the block rule agree on extents that the
            number of ranks divides.
        mesh: a DeviceMesh whose ranks count along its last dimension first, or its shape.

    Raises:
        ValueError: DTensor cannot have such parts: they are cut by another rule than the ceiling's, or are boxes of
            another kind. The text says how far it agrees.

    Example, on 4 ranks::

        >>> placements_of(hd.Split(0), (8, 5), (4,))
        (Shard(dim=0),)
        >>> placements_of(hd.Split(0), (10, 5), (4,))
        ValueError: no DTensor on a mesh of shape (4,) has these parts of a tensor of shape (10, 5): with
        (Shard(dim=0),) rank 2 has (3, 5) from (6, 0) on, here (2, 5) from (6, 0) on; ...
    """
    grid = _shape(mesh)
    wanted = held.boxes(shape, torch.Size(grid).numel())
    choices: list[int | None] = [None, *range(len(shape))]
    nearest, agreeing = "", -1
    for dims in product(choices, repeat=len(grid)):
        placements = tuple(Replicate() if dim is None else Shard(dim) for dim in dims)
        boxes = Block(grid, dims, "chunk").boxes(shape, len(wanted))
        odd = [rank for rank, (box, want) in enumerate(zip(boxes, wanted, strict=True)) if not _same(box, want)]
        if not odd:
            return placements
        if len(wanted) - len(odd) > agreeing:
            agreeing, rank = len(wanted) - len(odd), odd[0]
            nearest = f"with {placements} rank {rank} has {_show(boxes[rank])}, here {_show(wanted[rank])}"
    raise ValueError(
        f"no DTensor on a mesh of shape {grid} has these parts of a tensor of shape {tuple(shape)}: {nearest}; "
        'counts="chunk" is DTensor\'s rule'
    )


def _same(box: Box, other: Box) -> bool:
    """Whether they are the same part; empty ones may begin anywhere."""
    return box.shape == other.shape and (box.offset == other.offset or not box.size())


def _show(box: Box) -> str:
    return f"{box.shape} from {box.offset} on"


def _shape(mesh: DeviceMesh | Sequence[int]) -> tuple[int, ...]:
    if isinstance(mesh, Sequence):
        return tuple(mesh)
    ranks = mesh.mesh
    if ranks.flatten().tolist() != list(range(ranks.numel())):
        raise ValueError(f"the mesh has the ranks {ranks.tolist()}, expected 0 to {ranks.numel() - 1} in this order")
    return tuple(ranks.shape)
