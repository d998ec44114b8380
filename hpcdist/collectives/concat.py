"""The operation concat."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import torch
from torch import Tensor

from hpcdist.collectives import repeat, results
from hpcdist.collectives.gather import Gather
from hpcdist.collectives.run import Operation, run
from hpcdist.collectives.structures import JoinStructures
from hpcdist.comm.team import Team
from hpcdist.routes.base import Alltoall, Method
from hpcdist.routes.inline import INLINE
from hpcdist.runtime import world
from hpcdist.tensors import pool
from hpcdist.tensors.storage import row_major, sum_dtype
from hpcdist.validation.call import Call
from hpcdist.validation.collective import Agreed

if TYPE_CHECKING:
    from hpcdist.comm.settings import GroupLike, S, SharedKeywords
    from hpcdist.runtime.background import Handle

__all__ = ["concat", "operation"]


# fmt: off
@overload
def concat(x: Tensor, dim: int = 0, *,
           async_op: Literal[False] = False, **options: Unpack[SharedKeywords]) -> Tensor: ...
@overload
def concat(x: Tensor, dim: int = 0, *,
           async_op: Literal[True], **options: Unpack[SharedKeywords]) -> Handle[Tensor]: ...
@overload
def concat(x: S, dim: int = 0, *,
           async_op: Literal[False] = False, **options: Unpack[SharedKeywords]) -> S: ...
@overload
def concat(x: S, dim: int = 0, *,
           async_op: Literal[True], **options: Unpack[SharedKeywords]) -> Handle[S]: ...
@overload
def concat(x: object, dim: int = 0, *,
           async_op: bool = False, **options: Unpack[SharedKeywords]) -> Any: ...
# fmt: on
def concat(
    x: Any,
    dim: int = 0,
    *,
    group: GroupLike | None = None,
    route: str = "auto",
    out: torch.Tensor | None = None,
    allow_pickle: bool = False,
    shared: bool = False,
    async_op: bool = False,
) -> Any:
    """Concatenate the shards of all ranks along `dim`, in rank order, on every rank.

    Collective over `group`. Equivalent to ``torch.cat`` of all shards. Extents along `dim` may differ and may be zero.
    Nothing is padded, and no rank needs to know the extents of others. The shard is not changed.

    Structures of tensors are joined part by part. Lists are concatenated, ``list + list``. They may have different
    lengths, and tensors of different shapes. Tuples, dicts, named tuples and dataclasses must match on all ranks. Their
    parts are joined: tensors and numpy arrays along `dim`, lists as above, and single values (numbers, strings, bytes,
    None) to a list of all ranks' values. A tensor from a GPU is received on the receiver's own GPU, or on the CPU if it
    has none. Structures are sent without pickle.

    Args:
        x: this rank's shard: a tensor of any shape, dtype and strides, on the CPU or a GPU. Dtype, number of dims, and
            the extents other than `dim` must agree on all ranks. A 0-d tensor counts as one row: 0-d tensors are
            stacked to a 1-d tensor. Or a structure of tensors.
        dim: the dimension to join along; may be negative. Must agree.
        group: a torch ProcessGroup, 1-d DeviceMesh or mpi4py communicator; None means all ranks. Must agree.
        route: "auto", "nccl", "gloo", "mpi" or "hdf5". Must agree.
        out: memory for the result, of its shape, dtype and device; optional on each rank. Not allowed for structures,
            or if a gradient is needed. To autograd, it is modified in place.
        allow_pickle: whether to send other objects in a structure as pickles, which can run any code when
            loaded. Must agree.
        shared: whether the ranks of a node share one copy of the result, which takes less memory and time. For tensors
            in host memory, without `out`. Must agree.
        async_op: whether to return a :class:`Handle` at once, and continue in the background. Must agree.

    Returns:
        On every rank, a new contiguous tensor on x's device (or `out`). Along dim 0, data are received into the result,
        and no other memory is allocated; along another dim, there is one layout copy. If any rank needs a gradient, it
        flows back to the shards (of tensors, not of structures), as the sum over all ranks; every rank must call
        backward. (If all ranks compute the same loss from the whole, each one counts: divide by their number, as in
        hpcdist/examples/column_parallel.py.)

        With `shared`, the ranks of a node read the same memory. Treat it as read-only: writes are private to the rank
        (copy-on-write). The memory is reused when no rank has a tensor on it. Each rank gets memory of its own if
        shared memory is short, the result is below 64 KiB, a group holds 64 of them, or the processes of a node cannot
        open each other's memory.

    Raises:
        RankError: on every rank, if an argument is wrong on any rank, or arguments do not agree. No data have moved,
            and the next call can succeed.
        TypeError, ValueError: on this rank, if `group` is not a group, or this rank is not in it.

    Example, on 3 ranks::

        >>> x = torch.full((2, rank), rank)    # rank 0 holds no column
        >>> hd.concat(x, dim=1)
        tensor([[1, 2, 2],                     # on every rank
                [1, 2, 2]])
        >>> hd.concat({"x": x[0], "names": ["a"] * rank, "loss": 0.5})
        {'x': tensor([1, 2, 2]), 'names': ['a', 'a', 'a'], 'loss': [0.5, 0.5, 0.5]}
    """

    team = world.team_of(group)
    if isinstance(x, Tensor) and not (async_op or shared):
        return repeat.call("concat", lambda: Concat(x, dim, route, out), team, x, dim, 0, route, out)
    return run(operation(x, dim, route, out, allow_pickle, shared), team, async_op)


def operation(x: Any, dim: Any, route: Any, out: Any, allow_pickle: Any, shared: Any) -> Operation:
    """Return the operation of a call of concat, whose arguments are not validated."""
    if isinstance(x, Tensor) or shared:
        return Concat(x, dim, route, out, bool(shared))
    return JoinStructures("concat", x, dim, None, False, route, out, allow_pickle)


class Concat(Gather):
    """Gather shards on every rank."""

    name = "concat"
    rooted = False

    def __init__(self, x: Tensor, dim: int, route: str, out: Tensor | None, shared: bool = False) -> None:
        super().__init__(x, dim, None, route, out)
        self.shared = shared

    def validate(self, team: Team) -> Call:
        return results.check_shared(super().validate(team), self.shared, self.x)

    def plan(self, team: Team, call: Call, agreed: Agreed) -> None:
        super().plan(team, call, agreed)
        self._dim = call.dim

    def method(self, team: Team) -> Method:
        return results.method(team, self.shared, self._blocks.nbytes, super().method(team))

    def forward(self, team: Team) -> Tensor:
        if self.shared:
            from hpcdist.routes import window  # which imports MPI

            cut = self._blocks
            found = window.concat(team, self._shard, [box for (box,) in cut.boxes], cut.shape, self._dim)
            if found is not None:
                return found
        cut, shard = self._blocks, self._shard
        take = lambda: (*cut.recv_buffer(self._dest, shard.device), row_major(shard, self._dest))  # noqa: E731
        whole, buffer, mine = results.allocate(self.name, team, [cut.nbytes] * team.size, take, self._agreed)
        route = INLINE if self.inline else self._route
        route.allgatherv(team, mine, buffer, cut.counts, cut.displs)
        cut.unpack(buffer, whole)
        return whole if self.out is None else self.out

    def backward(self, team: Team, grad: Tensor) -> Tensor:
        # Every rank has a gradient for every shard: exchange them, and add them up in rank order.
        cut, size = self._blocks, team.size
        mine, longest = cut.counts[team.rank], max(cut.counts)
        parts = pool.empty((size, *self._shard.shape), self._shard.dtype, self._shard.device, fixed=True)
        recvcounts, rdispls = [mine] * size, [mine * rank for rank in range(size)]
        total = max(cut.nbytes, longest * size)
        what = Alltoall(cut.counts, cut.displs, recvcounts, rdispls, longest, total)
        self._route.alltoallv(team, cut.pack(grad), parts, what)
        parts = parts.to(sum_dtype(parts.dtype))
        added = pool.empty(self._shard.shape, parts.dtype, parts.device)
        torch.sum(parts, 0, out=added)
        return added.to(self._shard.dtype)
