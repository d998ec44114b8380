"""The verb gather, and with ``python -m hpcdist.gather`` the command."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from hpcdist import abort, agree, checks, routes, world
from hpcdist.buffers import blocks, overlap
from hpcdist.team import team_of

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["gather"]


def gather(
    x: torch.Tensor,
    dim: int = 0,
    root: int = 0,
    *,
    group: dist.ProcessGroup | MPI.Comm | None = None,
    route: str = "auto",
    out: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Bring the shards of all ranks together along `dim`, in rank order, on the root.

    Collective over `group`. Extents along `dim` may differ and may be zero; nothing is padded, and no rank needs to
    know another's. The shard is not changed, and no gradient flows.

    Args:
        x: this rank's shard: any shape, dtype, strides, on the CPU or a GPU. Dtype, number of dims and the extents
            besides `dim` must agree on all ranks. A 0-d tensor counts as one row, so that they are stacked to a 1-d
            tensor.
        dim: the dimension to join along; may be negative. Must agree.
        root: the rank in `group` that receives. Must agree.
        group: a torch ProcessGroup or an mpi4py communicator; None for all ranks. Must be the same on all its ranks.
        route: "auto", "nccl", "gloo", "mpi" or "hdf5". Must agree.
        out: on the root, memory for the result, of its shape, dtype and device.

    Returns:
        On the root a contiguous tensor on x's device that it owns (or `out`), elsewhere None. Along dim 0 the data
        arrive at their final place; along another dim the root makes one layout copy.

    Raises:
        RankError: on every rank, if an argument is wrong on one of them or they do not agree. Nothing has moved, and
            the next call can succeed.
        TypeError, ValueError: on this rank, for a `group` that is none or does not hold it.

    Example, on 3 ranks::

        >>> x = torch.full((rank,), rank)      # rank 0 holds nothing
        >>> hd.gather(x)
        tensor([1, 2, 2])                      # on rank 0; None on ranks 1 and 2
    """
    here = world.current()
    team = team_of(group, here)
    call = checks.shard_call("gather", x, dim, root, route, out, team.rank, team.size)
    agreed = agree.exchange(team, call)
    agree.refuse("gather", agreed.out_extents, [sum(agreed.extents)] * team.size)
    way = routes.agreed("gather", route, team, agreed.kinds)

    shard = call.x
    assert shard is not None
    with abort.Transfer("gather", team.size):
        cut = blocks(shard.shape, call.dim, agreed.extents, shard.dtype)
        if team.rank != root:
            way.gatherv(team, shard.contiguous(), None, cut.counts, cut.displs, root)
            return None
        whole, landing = cut.landing(call.out, shard.device)
        if call.out is not None and overlap(call.out, shard):
            shard = shard.clone()
        way.gatherv(team, shard.contiguous(), landing, cut.counts, cut.displs, root)
        cut.unpack(landing, whole)
        return whole if out is None else out
