"""The operation all_to_all: every rank sends a part of its own to every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import torch
from torch import Tensor

from hpcdist.collectives import results
from hpcdist.collectives.run import Operation, run
from hpcdist.comm.team import Team
from hpcdist.routes import select
from hpcdist.routes.route import Alltoall, cut
from hpcdist.runtime import world
from hpcdist.tensors.blocks import Blocks, blocks
from hpcdist.tensors.storage import as_bytes, row_major
from hpcdist.validation import local
from hpcdist.validation.collective import Agreed, Call

if TYPE_CHECKING:
    from hpcdist.comm.team import GroupLike
    from hpcdist.runtime.background import Handle


# fmt: off
@overload
def all_to_all(x: Tensor, counts: str | Sequence[int] | None = None, *, dim: int = 0,
               group: GroupLike | None = None, route: str = "auto",
               async_op: Literal[False] = False) -> tuple[Tensor, list[int]]: ...
@overload
def all_to_all(x: Sequence[Tensor], *, dim: int = 0,
               group: GroupLike | None = None, route: str = "auto",
               async_op: Literal[False] = False) -> list[Tensor]: ...
@overload
def all_to_all(x: Any, counts: str | Sequence[int] | None = None, *, dim: int = 0,
               group: GroupLike | None = None, route: str = "auto",
               async_op: Literal[True]) -> Handle[Any]: ...
# fmt: on
def all_to_all(
    x: Any,
    counts: str | Sequence[int] | None = None,
    *,
    dim: int = 0,
    group: GroupLike | None = None,
    route: str = "auto",
    async_op: bool = False,
) -> Any:
    """Send a tensor to each rank of `group`, and receive one from each: no rank needs to know the sizes of others.

    Collective over `group`. Blocks until all ranks of `group` have called it; after the timeout of
    :func:`hpcdist.init` the job ends (:class:`HangError`).

    Args:
        x: a list of tensors, one for each rank. They may differ in size along `dim`, which may be zero. Or one tensor,
            which is cut along `dim`. Any dtype and strides, on the CPU or a GPU. Dtype, number of dims, and the extents
            other than `dim` must agree, also between ranks. A 0-d tensor counts as one row. Not a structure.
        counts: of one tensor, the extents of the parts for the ranks, or the name of a rule as in :func:`split`; None
            means the block rule.
        dim: the dimension along which sizes differ; may be negative. Must agree.
        group: a torch ProcessGroup, 1-d DeviceMesh or mpi4py communicator; None means all ranks. Must agree.
        route: "auto", "nccl", "gloo", "mpi" or "hdf5". Must agree.
        async_op: whether to return a :class:`Handle` at once, and continue in the background. Must agree.

    Returns:
        On x's device: of a list, the list of what the ranks sent to this one, in rank order: contiguous tensors that
        share new memory. Of one tensor, these joined along `dim`, and the list of their extents.

        If any rank needs a gradient, the gradient of a part flows back to the rank that sent it. Every rank must call
        backward.

    Raises:
        RankError: on every rank, if an argument is wrong on any rank, or arguments do not agree. No data have moved,
            and the next call can succeed.
        TypeError, ValueError: on this rank, if `group` is not a group, or this rank is not in it.

    Example, on 2 ranks::

        >>> x = torch.tensor([0, 1, 2]) + 10 * rank
        >>> hd.all_to_all([x[:1], x[1:]])                # one element to rank 0, two to rank 1
        [tensor([0]), tensor([10])]                      # on rank 0; [tensor([1, 2]), tensor([11, 12])] on rank 1
        >>> hd.all_to_all(x, [1, 2])
        (tensor([ 0, 10]), [1, 1])                       # on rank 0; (tensor([ 1,  2, 11, 12]), [2, 2]) on rank 1
    """

    team, op = world.team_of(group), AllToAll(x, counts, dim, route)
    op.call = local.call_of(op.name, op.validate, team)  # in this thread, since it may join a list for autograd
    return run(op, team, async_op)


@dataclass(eq=False)
class AllToAll(Operation):
    """Exchange tensors.

    Attributes:
        counts: what the caller passed; after validation, the extents along dim of what this rank sends, and after
            plan() of what it receives.
        sent: this rank's tensor, or its list of them, detached.
    """

    x: Any
    counts: Any
    dim: Any
    route: Any
    sent = out = None
    name = "all_to_all"
    validate = local.check_exchange

    def plan(self, team: Team, call: Call, agreed: Agreed) -> None:
        assert call.x is not None and call.tensor is not None
        (dtype, _, shape), sends, size = call.tensor, self.counts, team.size
        if agreed.inline:
            data = b"".join(team.headers.data(rank, 0, 8 * size) for rank in range(size))
            table = np.frombuffer(data, np.int64).reshape(size, size)
            self.counts = table[:, team.rank].tolist()
            rows = np.maximum(table.sum(0), table.sum(1)).tolist()
        else:
            self.counts = team.comm.alltoall(sends)
            rows = team.comm.allgather(max(sum(sends), sum(self.counts)))
        width = dtype.itemsize * abs(prod(shape))  # of a row: the shape has -1 along dim
        self._sizes = [width * n for n in rows]  # the larger one of what a rank sends and receives
        self._limits = width * max(agreed.extents), max(self._sizes)
        self._agreed, self._dim, self._device = agreed, call.dim, call.x.device
        self._sides = [blocks(shape, call.dim, tuple(of), dtype) for of in (sends, self.counts)]

    def forward(self, team: Team) -> Tensor:
        return self._exchange(team, self.sent, *self._sides)

    def backward(self, team: Team, grad: Tensor) -> Tensor:
        return self._exchange(team, grad, *reversed(self._sides))

    def _exchange(self, team: Team, x: Any, source: Blocks, dest: Blocks) -> Tensor:
        """Exchange the parts of a tensor, or a list of them; return the new parts, joined. Collective."""

        def make() -> Any:
            messages = [as_bytes(row_major(part)) for part in x] if isinstance(x, list) else source.pack(x)
            return messages, *dest.recv_buffer(None, self._device)

        y: Tensor
        messages, y, buffer = results.allocate(self.name, team, self._sizes, make, self._agreed)
        route = select.agreed(self.name, self.route, team, self._agreed.kinds)
        recvs = dest.counts, dest.displs_in(buffer, y)
        if isinstance(x, list):
            route.exchange(team, enumerate(messages), enumerate(cut(buffer, *recvs)), self._limits[0])
        else:
            what = Alltoall(source.counts, source.displs_in(messages, x), *recvs, *self._limits)
            route.prepare(team, "alltoallv", what)(messages, buffer)
        dest.unpack(buffer, y)
        return y

    def finish(self, y: Tensor) -> Any:
        several = isinstance(self.sent, list)
        return list(torch.split(y, self.counts, self._dim)) if several else (y, self.counts)
