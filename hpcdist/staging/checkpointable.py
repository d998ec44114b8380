"""checkpointable(): a rank's part of a tensor in any layout, for torch.distributed.checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hpcdist import layout as layouts
from hpcdist.control import objects
from hpcdist.errors import coded, refusal
from hpcdist.layout import Box, Layout
from hpcdist.layout.box import Listed
from hpcdist.runtime import world
from hpcdist.staging.arguments import agreed
from hpcdist.validation import local

if TYPE_CHECKING:
    from hpcdist.comm.settings import GroupLike

VERB = "checkpointable"
_LAYOUTS = (layouts.Split, layouts.Block, layouts.Replicate, layouts.Boxes)


def checkpointable(x: Tensor, layout: Layout, *, group: GroupLike | None = None) -> Tensor:
    """Describe this rank's part of a tensor to torch's ``dcp.save`` and ``dcp.load``, which then save the whole tensor,
    and load it in any other layout, on any number of ranks.

    Collective over `group`. Nothing is copied: the result is a tensor on the memory of `x`, without gradient, with
    torch's CheckpointableTensor protocol. Put it into the state in place of `x`. ``dcp.load`` fills `x`.
    ``dcp.async_save`` to torch's own ``FileSystemWriter`` needs ``async_stager=DefaultStager()``, because that writer's
    own stager copies the tensor and loses the layout. A checkpoint_id or HDF5Writer needs nothing.

    Args:
        x: this rank's part: any shape, dtype and strides, on the CPU or a GPU. Dtype and number of dims must agree.
        layout: the layout of the parts: Split, Block, Replicate or Boxes, the latter without gaps, and without
            overlaps of different boxes. Without counts, the parts' extents are used, which may be ragged or zero. Must
            agree.
        group: a torch ProcessGroup, 1-d DeviceMesh or mpi4py communicator; None for all ranks. The ranks that save.

    Raises:
        RankError: on every rank, if an argument is wrong on one, they do not agree, or the parts are not a tensor in
            this layout.
        NotImplementedError: torch is older than 2.14, and has no such protocol.

    Example, on 3 ranks, which hold 1, 0 and 4 rows::

        >>> x = torch.full(((1, 0, 4)[rank], 2), rank)
        >>> dcp.save({"x": hd.checkpointable(x, hd.Split(0))}, checkpoint_id="folder")
        >>> y = torch.empty(5, (1, 0, 1)[rank], dtype=x.dtype)
        >>> dcp.load({"x": hd.checkpointable(y, hd.Split(1))}, checkpoint_id="folder")  # now rank 2 holds column 1
    """
    if find_spec("torch.distributed.checkpoint.protocol") is None:
        raise refusal(
            NotImplementedError,
            "HD419",
            f"checkpointable() needs torch 2.14 or later, whose dcp takes parts of any layout, and this is "
            f"{torch.__version__}: hpcdist.staging.save and load take them with every torch",
        )
    team = world.team_of(group)

    def check() -> tuple[Any, ...]:
        if not isinstance(layout, _LAYOUTS):
            raise local.ArgumentError(
                "HD213", f"layout must be one of Split, Block, Replicate and Boxes, got {layout!r}"
            )
        if local.ready(x, "x").data_ptr() != x.data_ptr():
            raise local.ArgumentError(
                "HD202", "x is conjugate or negative only by a bit of torch's: it has no memory of its own"
            )
        return layout, x.dtype, tuple(x.shape)

    with agreed(team, VERB, check) as (same, dtype, shape):
        options = {"layout": same, "dtype": dtype}
        objects.same(team.comm, VERB, options, options, objects.first_difference)
        shapes = objects.all_gather_object(team.comm, shape, VERB)
        try:
            whole, boxes = _held(same, shapes)
        except ValueError as error:
            objects.raise_problems(VERB, {0: coded("HD213", str(error))})
        own = boxes[team.rank]
        made: Any = x.detach()
        parts = [own] if own.size() or not prod(whole) else []  # none is empty, unless the tensor is
        made.global_shape = whole
        made.global_offsets = tuple(part.offset for part in parts)
        made.local_offsets = tuple((0,) * len(whole) for _ in parts)
        made.local_sizes = tuple(part.shape for part in parts)
        described: Tensor = made
        return described


def _held(layout: Layout, shapes: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], list[Box]]:
    """The whole tensor's shape and each rank's box; a ValueError if the parts are not a tensor in this layout."""
    if len({len(shape) for shape in shapes}) > 1:
        raise refusal(
            ValueError,
            "HD213",
            f"the parts of the ranks have different numbers of dims: {sorted(set(map(len, shapes)))}",
        )
    whole, boxes = layout.held(shapes)
    filled = [box for box in set(boxes) if box.size()]  # dcp saves once what several ranks hold at the same offset
    if not Listed.of(filled, whole).tile():
        what = "overlap, or leave gaps: those of different ranks must be the same or have no overlap"
        raise refusal(ValueError, "HD419", f"boxes of a tensor of shape {whole} {what}")
    return whole, boxes
