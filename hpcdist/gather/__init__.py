"""The verb gather, and with ``python -m hpcdist.gather`` the command."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hpcdist import abort, agree, checks, gradient, handle, results, structures, world
from hpcdist.buffers import blocks, row_major, written
from hpcdist.routes import select
from hpcdist.team import Team, team_of

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["gather"]


def gather(
    x: Any,
    dim: int = 0,
    root: int = 0,
    *,
    group: dist.ProcessGroup | MPI.Comm | None = None,
    route: str = "auto",
    out: torch.Tensor | None = None,
    allow_pickle: bool = False,
    async_op: bool = False,
) -> Any:
    """Bring the shards of all ranks together along `dim`, in rank order, on the root.

    Collective over `group`. Extents along `dim` may differ and may be zero; nothing is padded, and no rank needs to
    know another's. The shard is not changed.

    Args:
        x: this rank's shard: a tensor of any shape, dtype, strides, on the CPU or a GPU. Dtype, number of dims and the
            extents besides `dim` must agree on all ranks. A 0-d tensor counts as one row, so that they are stacked to
            a 1-d tensor. Or a structure of tensors, see :func:`hpcdist.concat`.
        dim: the dimension to join along; may be negative. Must agree.
        root: the rank in `group` that receives. Must agree.
        group: a torch ProcessGroup or an mpi4py communicator; None for all ranks. Must be the same on all its ranks.
        route: "auto", "nccl", "gloo", "mpi" or "hdf5". Must agree.
        out: on the root, memory for the result, of its shape, dtype and device; not where a gradient is needed.
            Autograd counts it as written in place.
        allow_pickle: whether other objects in a structure may travel as pickles. Must agree.
        async_op: return a :class:`Handle` at once, and go on in the background. Must agree.

    Returns:
        On the root a contiguous tensor on x's device that it owns (or `out`), elsewhere None. Along dim 0 the data
        arrive at their final place; along another dim the root makes one layout copy. Where a gradient is needed on
        any rank, it flows back to the shards (of tensors, not of structures); the other ranks then get a tensor
        without elements in place of None, and every rank has to call backward, there as ``result.sum().backward()``.

    Raises:
        RankError: on every rank, if an argument is wrong on one of them or they do not agree. Nothing has moved, and
            the next call can succeed.
        TypeError, ValueError: on this rank, for a `group` that is none or does not hold it.

    Example, on 3 ranks::

        >>> x = torch.full((rank,), rank)      # rank 0 holds nothing
        >>> hd.gather(x)
        tensor([1, 2, 2])                      # on rank 0; None on ranks 1 and 2
    """

    def step(team: Team) -> Any:
        if isinstance(x, torch.Tensor):
            return _gather(team, x, dim, root, route, out)
        has_cuda = team.settings.device.type == "cuda"
        call = checks.structure_call("gather", x, dim, root, route, out, allow_pickle, team.size, has_cuda)
        return structures.collect("gather", team, call, allow_pickle)

    result = handle.start("gather", team_of(group, world.current()), step, async_op)
    return result if out is None else written(out, result)


def _gather(
    team: Team, x: torch.Tensor, dim: int, root: int, route: str, out: torch.Tensor | None
) -> torch.Tensor | gradient.Deferred | None:
    call = checks.shard_call("gather", x, dim, root, route, out, team.rank, team.size)
    agreed = agree.exchange(team, call)
    agree.refuse("gather", agreed, [sum(agreed.extents)] * team.size)
    way = select.agreed("gather", route, team, agreed.kinds)
    shard = call.x
    assert shard is not None
    cut = blocks(shard.shape, call.dim, agreed.extents, shard.dtype)

    def forward() -> torch.Tensor:
        with abort.Transfer("gather", team.size):
            sizes = [cut.nbytes() if rank == root else 0 for rank in range(team.size)]
            take = (lambda: cut.landing(call.out, shard.device)) if team.rank == root else lambda: (shard, shard)
            whole, landing = results.allocate("gather", team, sizes, take, agreed)
            if team.rank != root:
                way.gatherv(team, row_major(shard), None, cut.counts, cut.displs, root)
                return shard.new_empty(0)
            way.gatherv(team, row_major(shard, call.out), landing, cut.counts, cut.displs, root)
            cut.unpack(landing, whole)
            return whole

    def backward(grad: torch.Tensor) -> torch.Tensor:
        part = cut.shard(team.rank, shard.device)
        messages = cut.pack(grad) if team.rank == root else None
        way.scatterv(team.front, messages, part, cut.counts, cut.displs, root)
        return part

    result = gradient.carried("gather", team, agreed.grad, x, forward, backward)
    return None if team.rank != root and not agreed.grad else result if out is None else out
