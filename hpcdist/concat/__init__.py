"""The verb concat."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from hpcdist import abort, agree, checks, routes, world
from hpcdist.buffers import blocks, overlap
from hpcdist.team import team_of

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["concat"]


def concat(
    x: torch.Tensor,
    dim: int = 0,
    *,
    group: dist.ProcessGroup | MPI.Comm | None = None,
    route: str = "auto",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Bring the shards of all ranks together along `dim`, in rank order, on every rank.

    Collective over `group`. What ``torch.cat`` does with the list of all shards: extents along `dim` may differ and
    may be zero; nothing is padded, and no rank needs to know another's. The shard is not changed, and no gradient
    flows.

    Args:
        x: this rank's shard: any shape, dtype, strides, on the CPU or a GPU. Dtype, number of dims and the extents
            besides `dim` must agree on all ranks. A 0-d tensor counts as one row, so that they are stacked to a 1-d
            tensor.
        dim: the dimension to join along; may be negative. Must agree.
        group: a torch ProcessGroup or an mpi4py communicator; None for all ranks. Must be the same on all its ranks.
        route: "auto", "nccl", "gloo", "mpi" or "hdf5". Must agree.
        out: memory for the result, of its shape, dtype and device; each rank is free to give it.

    Returns:
        On every rank a contiguous tensor on x's device that the rank owns (or `out`). Along dim 0 the data arrive at
        their final place, and no memory besides the result is taken; along another dim there is one layout copy.

    Raises:
        RankError: on every rank, if an argument is wrong on one of them or they do not agree. Nothing has moved, and
            the next call can succeed.
        TypeError, ValueError: on this rank, for a `group` that is none or does not hold it.

    Example, on 3 ranks::

        >>> x = torch.full((2, rank), rank)    # rank 0 holds no column
        >>> hd.concat(x, dim=1)
        tensor([[1, 2, 2],                     # on every rank
                [1, 2, 2]])
    """
    here = world.current()
    team = team_of(group, here)
    call = checks.shard_call("concat", x, dim, None, route, out, team.rank, team.size)
    agreed = agree.exchange(team, call)
    agree.refuse("concat", agreed.out_extents, [sum(agreed.extents)] * team.size)
    way = routes.agreed("concat", route, team, agreed.kinds)

    shard = call.x
    assert shard is not None
    with abort.Transfer("concat", team.size):
        cut = blocks(shard.shape, call.dim, agreed.extents, shard.dtype)
        whole, landing = cut.landing(call.out, shard.device)
        if call.out is not None and overlap(call.out, shard):
            shard = shard.clone()
        way.allgatherv(team, shard.contiguous(), landing, cut.counts, cut.displs)
        cut.unpack(landing, whole)
        return whole if out is None else out
