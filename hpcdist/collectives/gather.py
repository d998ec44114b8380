"""The operation gather."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import torch
from torch import Tensor

from hpcdist.collectives import repeat, results
from hpcdist.collectives.repeat import Repeatable
from hpcdist.collectives.run import Operation, Parts, run
from hpcdist.collectives.structures import JoinStructures
from hpcdist.comm.team import Team
from hpcdist.layout import Box
from hpcdist.routes import select
from hpcdist.routes.base import Method
from hpcdist.routes.inline import BEHIND_HEADERS, INLINE
from hpcdist.runtime import world
from hpcdist.tensors.blocks import blocks
from hpcdist.tensors.storage import row_major
from hpcdist.validation import collective, local
from hpcdist.validation.call import Call
from hpcdist.validation.collective import Agreed

if TYPE_CHECKING:
    from hpcdist.comm.settings import GroupLike, S, StructureKeywords
    from hpcdist.runtime.background import Handle

__all__ = ["gather", "operation"]


# fmt: off
@overload
def gather(x: Tensor, dim: int = 0, root: int = 0, *,
           async_op: Literal[False] = False, **options: Unpack[StructureKeywords]) -> Tensor | None: ...
@overload
def gather(x: Tensor, dim: int = 0, root: int = 0, *,
           async_op: Literal[True], **options: Unpack[StructureKeywords]) -> Handle[Tensor | None]: ...
@overload
def gather(x: S, dim: int = 0, root: int = 0, *,
           async_op: Literal[False] = False, **options: Unpack[StructureKeywords]) -> S | None: ...
@overload
def gather(x: S, dim: int = 0, root: int = 0, *,
           async_op: Literal[True], **options: Unpack[StructureKeywords]) -> Handle[S | None]: ...
@overload
def gather(x: object, dim: int = 0, root: int = 0, *,
           async_op: bool = False, **options: Unpack[StructureKeywords]) -> Any: ...
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

    Collective over `group`. Extents along `dim` may differ and may be zero. Nothing is padded, and no rank needs to
    know the extents of others. The shard is not changed.

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
        On the root, a new contiguous tensor on x's device (or `out`); None on the other ranks. Along dim 0, data are
        received into the result; along another dim, the root makes one layout copy. If any rank needs a gradient, it
        flows back to the shards (of tensors, not of structures): the other ranks then get an empty tensor instead of
        None, and every rank must call backward, the others as ``result.sum().backward()``.

    Raises:
        RankError: on every rank, if an argument is wrong on any rank, or arguments do not agree. No data have moved,
            and the next call can succeed.
        TypeError, ValueError: on this rank, if `group` is not a group, or this rank is not in it.

    Example, on 3 ranks::

        >>> x = torch.full((rank,), rank)      # rank 0 holds nothing
        >>> hd.gather(x)
        tensor([1, 2, 2])                      # on rank 0; None on ranks 1 and 2
    """

    team = world.team_of(group)
    if isinstance(x, Tensor) and not async_op:
        return repeat.call("gather", lambda: Gather(x, dim, root, route, out), team, x, dim, root, route, out)
    return run(operation(x, dim, root, route, out, allow_pickle), team, async_op)


def operation(x: Any, dim: Any, root: Any, route: Any, out: Any, allow_pickle: Any) -> Operation:
    """Return the operation of a call of gather, whose arguments are not validated."""
    if isinstance(x, Tensor):
        return Gather(x, dim, root, route, out)
    return JoinStructures("gather", x, dim, root, True, route, out, allow_pickle)


class Gather(Repeatable):
    """Gather shards on the root."""

    name = "gather"
    rooted = True

    def __init__(self, x: Tensor, dim: int, root: Any, route: str, out: Tensor | None) -> None:
        self.x, self.dim, self.root, self.route, self.out = x, dim, root, route, out

    def validate(self, team: Team) -> Call:
        return local.shard_call(self, team)

    def plan(self, team: Team, call: Call, agreed: Agreed) -> None:
        collective.check_out(self.name, agreed, [sum(agreed.extents)] * team.size)
        self._route = select.agreed(self.name, call.route, team, agreed.kinds)
        assert call.x is not None
        self._root = call.root
        self._blocks = blocks(call.x.shape, call.dim, agreed.extents, call.x.dtype)
        self.bind(call.x, call.out, agreed)

    def bind(self, x: Tensor | None, out: Tensor | None, agreed: Agreed) -> None:
        assert x is not None
        self._shard, self._dest, self._agreed = x, out, agreed

    def parts(self, team: Team) -> Parts:
        cut, whole = self._blocks, Box((0,) * len(self._blocks.shape), self._blocks.shape)
        sources = [box for (box,) in cut.boxes]
        dests = [whole if self._root in (-1, rank) else None for rank in range(team.size)]
        return Parts(self._route, cut.shape, cut.dtype, self._shard.device, sources, dests)

    def method(self, team: Team) -> Method:
        if self.inline:
            return BEHIND_HEADERS
        return self._route.method(team, "gatherv" if self.rooted else "allgatherv", self._blocks.nbytes)

    def forward(self, team: Team) -> Tensor | None:
        cut, shard, is_root = self._blocks, self._shard, team.rank == self._root
        sizes = [cut.nbytes if rank == self._root else 0 for rank in range(team.size)]
        route = INLINE if self.inline else self._route

        def take() -> tuple[Tensor, Tensor, Tensor]:
            whole, buffer = cut.recv_buffer(self._dest, shard.device) if is_root else (shard, shard)
            return whole, buffer, row_major(shard, self._dest if is_root else None)

        whole, buffer, mine = results.allocate(self.name, team, sizes, take, self._agreed)
        if not is_root:
            route.gatherv(team, mine, None, cut.counts, cut.displs, self._root)
            return shard.new_empty(0) if self.grad else None
        route.gatherv(team, mine, buffer, cut.counts, cut.displs, self._root)
        cut.unpack(buffer, whole)
        return whole if self.out is None else self.out

    def keep(self, team: Team) -> int:
        del self.x, self._shard
        self.out = self._dest = None
        self._receives = not self.rooted or team.rank == self._root
        assert team.headers is not None
        self._places = team.headers.places(self._blocks.counts)
        self._like = torch.empty(self._blocks.shape, dtype=self._blocks.dtype, device="cpu")
        return 0

    def again(self, team: Team, out: Tensor | None) -> Tensor | None:
        if not self._receives:
            return None
        whole = torch.empty_like(self._like) if out is None else out
        buffer = self._blocks.buffer(whole)
        team.headers.copy(self._places, buffer)  # type: ignore[union-attr]
        if buffer is not whole:
            self._blocks.unpack(buffer, whole)
        return whole

    def backward(self, team: Team, grad: Tensor) -> Tensor:
        cut = self._blocks
        part = cut.empty_part(team.rank, self._shard.device)
        messages = cut.pack(grad) if team.rank == self._root else None
        self._route.scatterv(team, messages, part, cut.counts, cut.displs, self._root)
        return part
