"""The verb concat."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hpcdist import abort, agree, checks, gradient, handle, results, structures, world
from hpcdist.buffers import blocks, row_major, summed_in, written
from hpcdist.routes import select
from hpcdist.routes.base import Alltoall
from hpcdist.team import Team, team_of

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["concat"]


def concat(
    x: Any,
    dim: int = 0,
    *,
    group: dist.ProcessGroup | MPI.Comm | None = None,
    route: str = "auto",
    out: torch.Tensor | None = None,
    allow_pickle: bool = False,
    async_op: bool = False,
) -> Any:
    """Bring the shards of all ranks together along `dim`, in rank order, on every rank.

    Collective over `group`. What ``torch.cat`` does with the list of all shards: extents along `dim` may differ and
    may be zero; nothing is padded, and no rank needs to know another's. The shard is not changed.

    A structure of tensors is brought together part by part. The ranks' lists are added up, ``list + list``, each item
    as it is: they may be of different lengths, and of tensors of different shapes. Of tuples, dicts, named tuples and
    dataclasses, which must be alike, the parts are: tensors and numpy arrays joined along `dim`, lists added up,
    single values (numbers, strings, bytes, None) made a list of all ranks' values. A tensor from a GPU arrives on the
    receiver's own GPU, or on the CPU if it has none. Structures travel without pickle.

    Args:
        x: this rank's shard: a tensor of any shape, dtype, strides, on the CPU or a GPU. Dtype, number of dims and the
            extents besides `dim` must agree on all ranks. A 0-d tensor counts as one row, so that they are stacked to
            a 1-d tensor. Or a structure of tensors.
        dim: the dimension to join along; may be negative. Must agree.
        group: a torch ProcessGroup or an mpi4py communicator; None for all ranks. Must be the same on all its ranks.
        route: "auto", "nccl", "gloo", "mpi" or "hdf5". Must agree.
        out: memory for the result, of its shape, dtype and device; each rank is free to give it. Not for structures,
            and not where a gradient is needed. Autograd counts it as written in place.
        allow_pickle: whether other objects in a structure may travel as pickles, which can run any code where they
            are read. Must agree.
        async_op: return a :class:`Handle` at once, and go on in the background. Must agree.

    Returns:
        On every rank a contiguous tensor on x's device that the rank owns (or `out`). Along dim 0 the data arrive at
        their final place, and no memory besides the result is taken; along another dim there is one layout copy. Where
        a gradient is needed on any rank, it flows back to the shards (of tensors, not of structures), as the sum over
        all ranks; every rank has to call backward. (Where all ranks compute the same loss from the whole, each
        counts: divide by their number. hpcdist/examples/column_parallel.py shows it.)

    Raises:
        RankError: on every rank, if an argument is wrong on one of them or they do not agree. Nothing has moved, and
            the next call can succeed.
        TypeError, ValueError: on this rank, for a `group` that is none or does not hold it.

    Example, on 3 ranks::

        >>> x = torch.full((2, rank), rank)    # rank 0 holds no column
        >>> hd.concat(x, dim=1)
        tensor([[1, 2, 2],                     # on every rank
                [1, 2, 2]])
        >>> hd.concat({"x": x[0], "names": ["a"] * rank, "loss": 0.5})
        {'x': tensor([1, 2, 2]), 'names': ['a', 'a', 'a'], 'loss': [0.5, 0.5, 0.5]}
    """

    def step(team: Team) -> Any:
        if isinstance(x, torch.Tensor):
            return _concat(team, x, dim, route, out)
        has_cuda = team.settings.device.type == "cuda"
        call = checks.structure_call("concat", x, dim, None, route, out, allow_pickle, team.size, has_cuda)
        return structures.collect("concat", team, call, allow_pickle)

    result = handle.start("concat", team_of(group, world.current()), step, async_op)
    return result if out is None else written(out, result)


def _concat(
    team: Team, x: torch.Tensor, dim: int, route: str, out: torch.Tensor | None
) -> torch.Tensor | gradient.Deferred:
    call = checks.shard_call("concat", x, dim, None, route, out, team.rank, team.size)
    agreed = agree.exchange(team, call)
    agree.refuse("concat", agreed, [sum(agreed.extents)] * team.size)
    way = select.agreed("concat", route, team, agreed.kinds)
    shard = call.x
    assert shard is not None
    cut = blocks(shard.shape, call.dim, agreed.extents, shard.dtype)

    def forward() -> torch.Tensor:
        with abort.Transfer("concat", team.size):
            sizes, take = [cut.nbytes()] * team.size, lambda: cut.landing(call.out, shard.device)
            whole, landing = results.allocate("concat", team, sizes, take, agreed)
            way.allgatherv(team, row_major(shard, call.out), landing, cut.counts, cut.displs)
            cut.unpack(landing, whole)
            return whole

    def backward(grad: torch.Tensor) -> torch.Tensor:
        # Every rank has a gradient for every shard: each brings them to their ranks, which add them up in rank order.
        size, mine = team.size, cut.counts[team.rank]
        parts = shard.new_empty((size, *shard.shape))
        longest = max(cut.counts)
        what = Alltoall(
            cut.counts,
            cut.displs,
            [mine] * size,
            [mine * rank for rank in range(size)],
            longest,
            max(cut.nbytes(), longest * size),
        )
        way.alltoallv(team.front, cut.pack(grad), parts, what)
        return parts.to(summed_in(parts.dtype)).sum(0).to(parts.dtype)

    result = gradient.carried("concat", team, agreed.grad, x, forward, backward)
    return result if out is None else out
