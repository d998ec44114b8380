"""Convert between DTensor placements and layouts. DTensor partitions by the ceiling rule only."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import Placement, Replicate, Shard

from hpcdist.errors import refusal
from hpcdist.layout import Block, Box, Layout

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def layout_of(placements: Sequence[Placement], mesh: DeviceMesh | Sequence[int]) -> Layout:
    """Return the layout of a DTensor with these placements; the inverse of :func:`placements_of`.

    Args:
        placements: Shard or Replicate, for each dimension of the mesh.
        mesh: a DeviceMesh whose ranks are numbered along its last dimension first, or its shape.

    Raises:
        ValueError: if the mesh numbers its ranks differently, or the number of placements is wrong.
        TypeError: for Partial, whose parts are summands rather than parts of the tensor, and for other placements.

    Example, on 4 ranks: rows and columns cut in 2::

        >>> layout_of([Shard(0), Shard(1)], (2, 2))
        Block(grid=(2, 2), dims=(0, 1), counts='chunk', order='row')
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
        if type(placement) is not Shard and type(placement) is not Replicate:
            raise refusal(
                TypeError, "HD213", f"{placement} has no layout: expected Shard or Replicate (reduce a Partial first)"
            )
        dims.append(placement.dim if isinstance(placement, Shard) else None)
    return Block(grid, tuple(dims), "chunk")


def placements_of(held: Layout, shape: Sequence[int], mesh: DeviceMesh | Sequence[int]) -> tuple[Placement, ...]:
    """Return the placements of a DTensor whose local tensors are the parts of this layout.

    Args:
        held: the layout.
        shape: the shape of the whole tensor, which matters: the ceiling rule and the block rule agree only on extents
            that are multiples of the number of ranks.
        mesh: a DeviceMesh whose ranks are numbered along its last dimension first, or its shape.

    Raises:
        ValueError: if DTensor cannot have such parts: other rules than the ceiling rule, or arbitrary boxes.

    Example, on 4 ranks::

        >>> placements_of(hd.Split(0), (8, 5), (4,))
        (Shard(dim=0),)
        >>> placements_of(hd.Split(0), (10, 5), (4,))
        ValueError: no DTensor on a mesh of shape (4,) has these parts of a tensor of shape (10, 5): ...
    """
    grid = _shape(mesh)
    wanted = held.boxes(shape, torch.Size(grid).numel())
    choices: list[int | None] = [None, *range(len(shape))]
    for dims in product(choices, repeat=len(grid)):
        if all(map(_same, Block(grid, dims, "chunk").boxes(shape, len(wanted)), wanted)):
            return tuple(Replicate() if dim is None else Shard(dim) for dim in dims)
    what = f"no DTensor on a mesh of shape {grid} has these parts of a tensor of shape {tuple(shape)}"
    raise refusal(ValueError, "HD213", f'{what}: DTensor cuts by the rule counts="chunk"')


def _same(box: Box, other: Box) -> bool:
    """Return whether two boxes are the same part; empty ones may start anywhere."""
    return box.shape == other.shape and (box.offset == other.offset or not box.size())


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
