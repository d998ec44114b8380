"""The operations gather and concat: join the shards of all ranks, on one of them or on all."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import torch
from torch import Tensor

from hpcdist import layout
from hpcdist.collectives.kept import Movement
from hpcdist.collectives.reduce import add_up, blocks_of_all
from hpcdist.collectives.run import Plannable, run
from hpcdist.collectives.structures import Joining, JoinStructures
from hpcdist.comm.team import Team
from hpcdist.routes.route import Vector
from hpcdist.runtime import world
from hpcdist.tensors import pool
from hpcdist.tensors.blocks import blocks
from hpcdist.tensors.storage import row_major
from hpcdist.validation import local
from hpcdist.validation.collective import Agreed, Call

if TYPE_CHECKING:
    from hpcdist.comm.team import GroupLike, S, SharedOptions, StructureOptions
    from hpcdist.runtime.background import Handle


# fmt: off
@overload
def gather(x: S, dim: int = 0, root: int = 0, *,
           async_op: Literal[False] = False, **options: Unpack[StructureOptions]) -> S | None: ...
@overload
def gather(x: S, dim: int = 0, root: int = 0, *,
           async_op: Literal[True], **options: Unpack[StructureOptions]) -> Handle[S | None]: ...
@overload
def gather(x: object, dim: int = 0, root: int = 0, *,
           async_op: bool = False, **options: Unpack[StructureOptions]) -> Any: ...
# fmt: on
def gather(
    x: Any,
    dim: int = 0,
    root: int = 0,
    *,
    group: GroupLike | None = None,
    route: str = "auto",
    out: torch.Tensor | None = None,
    allow_pickle: bool = False,
    async_op: bool = False,
) -> Any:
    """Gather the shards of all ranks on `root`, joined along `dim` in rank order.

    Collective over `group`. Blocks until all ranks of `group` have called it; after the timeout of
    :func:`hpcdist.init` the job ends (:class:`HangError`).

    Extents along `dim` may differ and may be zero. Nothing is padded, and no rank needs to know the extents of others.
    The shard is not changed.

    Args:
        x: this rank's shard: a tensor of any shape, dtype and strides, on the CPU or a GPU. Dtype, number of dims, and
            the extents other than `dim` must agree on all ranks. A 0-d tensor counts as one row: 0-d tensors are
            stacked to a 1-d tensor. Or a structure of tensors, see :func:`hpcdist.concat`.
        dim: the dimension to join along; may be negative. Must agree.
        root: the rank in `group` that receives. Must agree.
        group: a torch ProcessGroup, 1-d DeviceMesh or mpi4py communicator; None means all ranks. Must agree.
        route: "auto", "nccl", "gloo", "mpi" or "hdf5". Must agree.
        out: on the root, memory for the result, of its shape, dtype and device. Not allowed if a gradient is needed.
            To autograd, it is modified in place.
        allow_pickle: whether to send other objects in a structure as pickles. Must agree.
        async_op: whether to return a :class:`Handle` at once, and continue in the background. Must agree.

    Returns:
        On the root, a new contiguous tensor on x's device (or `out`); None on the other ranks. For ``dim=0`` its shape
        is ``(sum of x.shape[0] over ranks, *x.shape[1:])``. For another dim, the sum stands there. Along dim 0, data
        are received into the result; along another dim, the root makes one layout copy.

        If any rank needs a gradient, it flows back to the shards (of tensors, not of structures). The other ranks then
        get an empty tensor instead of None, and must call ``result.sum().backward()`` on it.

    Raises:
        RankError: on every rank, if an argument is wrong on any rank, or arguments do not agree. No data have moved,
            and the next call can succeed.
        TypeError, ValueError: on this rank, if `group` is not a group, or this rank is not in it.

    Example, on 3 ranks::

        >>> x = torch.full((rank,), rank)      # rank 0 holds nothing
        >>> hd.gather(x)
        tensor([1, 2, 2])                      # on rank 0; None on ranks 1 and 2
    """

    kind = Join if isinstance(x, Tensor) else JoinStructures
    return run(kind("gather", x, dim, route, out, allow_pickle, root, True), world.team_of(group), async_op)


# fmt: off
@overload
def concat(x: S, dim: int = 0, *, async_op: Literal[False] = False, **options: Unpack[SharedOptions]) -> S: ...
@overload
def concat(x: S, dim: int = 0, *, async_op: Literal[True], **options: Unpack[SharedOptions]) -> Handle[S]: ...
@overload
def concat(x: object, dim: int = 0, *, async_op: bool = False, **options: Unpack[SharedOptions]) -> Any: ...
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

    Collective over `group`. Blocks until all ranks of `group` have called it; after the timeout of
    :func:`hpcdist.init` the job ends (:class:`HangError`).

    Equivalent to ``torch.cat`` of all shards. Extents along `dim` may differ and may be zero. Nothing is padded, and no
    rank needs to know the extents of others. The shard is not changed.

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
        On every rank, a new contiguous tensor on x's device (or `out`). For ``dim=0`` its shape is
        ``(sum of x.shape[0] over ranks, *x.shape[1:])``. For another dim, the sum stands there. Along dim 0, data are
        received into the result, and no other memory is allocated; along another dim, there is one layout copy.

        If any rank needs a gradient, it flows back to the shards (of tensors, not of structures), as the sum over all
        ranks. Every rank must call backward. If all ranks compute the same loss from the whole, divide it by their
        number, because each one counts: see docs/do/verbs.md.

        With `shared`, the ranks of a node read the same memory. Treat it as read-only: writes are private to the rank
        (copy-on-write). The memory is reused when no rank has a tensor on it. Each rank gets memory of its own if the
        result is below 64 KiB, or the group holds 64 shared results. It also does if the node has too little shared
        memory, or its processes cannot open each other's memory.

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

    kind = Join if isinstance(x, Tensor) or shared else JoinStructures
    op = kind("concat", x, dim, route, out, allow_pickle, shared=bool(shared))
    return run(op, world.team_of(group), async_op)


class Join(Joining, Plannable):
    """Join shards on the root, or on every rank in a concat."""

    sent: Tensor
    check = local.check_shard

    def arguments(self) -> Hashable:
        dim, root = self.dim, self.root
        if type(dim) is type(root) is int and type(self.allow_pickle) is bool:
            return self.rooted, dim, root, self.route, self.allow_pickle
        return None

    def plan(self, team: Team, call: Call, agreed: Agreed) -> None:
        assert call.x is not None
        self._root, self._dim = call.root, call.dim
        cut = self._blocks = blocks(call.x.shape, call.dim, agreed.extents, call.x.dtype)
        sources, whole = [box for (box,) in cut.boxes], layout.whole(cut.shape)
        dests = [whole if call.root in (-1, rank) else None for rank in range(team.size)]
        recvs = list(enumerate(sources)) if dests[team.rank] is not None else []
        what = Vector(cut.counts, cut.displs, max(0, call.root))
        self.messages = [("gatherv" if self.rooted else "allgatherv", what)]
        self.bind(team, call, agreed, Movement(cut.shape, cut.dtype, sources, dests, recvs))

    def in_window(self, team: Team) -> Tensor | None:
        from hpcdist.routes import node_copy  # which imports MPI

        return node_copy.concat(team, self.sent, [box for (box,) in self._blocks.boxes], self._blocks.shape, self._dim)

    def move(self, team: Team) -> Tensor | None:
        cut, shard, receives = self._blocks, self.sent, self._root in (-1, team.rank)

        def take() -> tuple[Tensor, Tensor, Tensor]:
            whole, buffer = cut.recv_buffer(self.dest, shard.device) if receives else (shard, shard)
            return whole, buffer, row_major(shard, self.dest if receives else None)

        whole, buffer, mine = self.allocate(team, take)
        self.carry(team, mine, buffer if receives else None)
        if not receives:
            return None
        cut.unpack(buffer, whole)
        return whole

    def backward(self, team: Team, grad: Tensor) -> Tensor:
        cut, x, route = self._blocks, self.sent, self.chosen(team)
        if self.rooted:
            part = pool.empty(x.shape, x.dtype, x.device)
            messages = cut.pack(grad) if team.rank == self._root else None
            route.prepare(team, "scatterv", self.messages[0][1])(messages, part)
            return part
        # Every rank has a gradient for every shard.
        return add_up(self.name, team, route.prepare(team, "alltoallv", blocks_of_all(cut, team)), cut, grad)
