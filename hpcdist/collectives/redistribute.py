"""The operation redistribute: move a tensor from one layout to another."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import torch
from torch import Tensor

from hpcdist import layout
from hpcdist.collectives import autograd, results
from hpcdist.collectives import run as driver
from hpcdist.collectives.run import Operation
from hpcdist.collectives.transfer import Transfer, make_transfer
from hpcdist.comm.team import Team
from hpcdist.control import objects
from hpcdist.errors import HpcdistError
from hpcdist.layout import Layout
from hpcdist.routes import select
from hpcdist.runtime import world
from hpcdist.tensors import pool
from hpcdist.tensors.eager import recorded
from hpcdist.tensors.storage import copyable, overlap
from hpcdist.validation import local
from hpcdist.validation.call import LOSES_GRADIENT, Call
from hpcdist.validation.collective import Agreed

if TYPE_CHECKING:
    from hpcdist.comm.signatures import GroupLike, Keywords
    from hpcdist.runtime.background import Handle

__all__ = ["Plan", "plan_redistribute", "redistribute"]

_CACHED = 64  # transfer plans per team
Shape = tuple[int, ...]


# fmt: off
@overload
def redistribute(x: Tensor, src: Layout, dst: Layout, *,
                 async_op: Literal[False] = False, **options: Unpack[Keywords]) -> Tensor: ...
@overload
def redistribute(x: Tensor, src: Layout, dst: Layout, *,
                 async_op: Literal[True], **options: Unpack[Keywords]) -> Handle[Tensor]: ...
# fmt: on
def redistribute(
    x: Tensor,
    src: Layout,
    dst: Layout,
    *,
    group: GroupLike | None = None,
    route: str = "auto",
    out: Tensor | None = None,
    async_op: bool = False,
) -> Any:
    """Redistribute a tensor from one layout to another: from each rank's part in `src` to its part in `dst`.

    Collective over `group`. Each rank sends to another only what that one needs and does not have; nothing is padded.
    Messages that are one run of memory are sent from and received into place; others are packed once.

    Args:
        x: this rank's part of the tensor in `src`: any dtype and strides, on the CPU or a GPU. Dtype and number of
            dims must agree.
        src: the layout of the parts: Split, Block, Replicate or Boxes. Without counts, they are what the ranks hold.
            Must agree.
        dst: the layout of the result. Without counts, the block rule. Must agree.
        group: a torch ProcessGroup, 1-d DeviceMesh or mpi4py communicator; None means all ranks. Must agree.
        route: "auto", "nccl", "gloo", "mpi" or "hdf5". Must agree.
        out: memory for the result, of its shape, dtype and device; optional on each rank.
        async_op: whether to return a :class:`Handle` at once, and continue in the background. Must agree.

    Returns:
        This rank's part in `dst`: new contiguous memory (or `out`), on x's device. If any rank needs a gradient, it
        flows back to the rank that sent an element (one of them, if several hold copies), as the sum over all ranks
        that received it; every rank must call backward.

    Raises:
        RankError: on every rank, if an argument is wrong on any rank, or the parts do not form a tensor in `src`. No
            data have moved, and the next call can succeed.
        TypeError, ValueError: on this rank, if `group` is not a group, or this rank is not in it.

    Example, on 2 ranks::

        >>> rows = torch.tensor([[0, 1, 2, 3]]) + 4 * rank       # row `rank` of a 2 x 4 tensor
        >>> hd.redistribute(rows, hd.Split(0), hd.Split(1))
        tensor([[0, 1],       # on rank 0; [[2, 3], [6, 7]] on rank 1
                [4, 5]])
    """

    return driver.run(Redistribute(x, src, dst, route, out), world.current().context.team_of(group), async_op)


def plan_redistribute(
    x: Tensor,
    src: Layout,
    dst: Layout,
    *,
    group: GroupLike | None = None,
    route: str = "auto",
) -> Plan:
    """Plan a redistribution once, to execute it many times: see :func:`redistribute`.

    Collective over `group`. `x` is neither sent nor kept: only its shape, dtype, device, and whether it needs a
    gradient are used.

    Returns:
        The plan: call it with tensors like `x`.

    Raises:
        RankError: as in redistribute.

    Example::

        >>> to_columns = hd.plan_redistribute(x, hd.Split(0), hd.Split(1))
        >>> for x in batches:
        ...     columns = to_columns(x)
    """

    team = world.current().context.team_of(group)
    op = Redistribute(x, src, dst, route, None, name="plan_redistribute")
    driver.plan(op, team)
    team.plans_made += 1
    return Plan(op.moves, team, team.plans_made, x.dtype, x.device, op.grad)


class Redistribute(Operation):
    """Redistribute a tensor.

    Attributes:
        moves: transfer of this rank, after plan().
    """

    moves: Transfer

    def __init__(self, x: Any, src: Any, dst: Any, route: Any, out: Any, name: str = "redistribute") -> None:
        self.x, self.src, self.dst, self.route, self.out, self.name = x, src, dst, route, out, name

    def validate(self, team: Team) -> Call:
        return local.layout_call(self)

    def plan(self, team: Team, call: Call, agreed: Agreed) -> None:
        shapes, outs = _shapes(team, call)
        assert call.x is not None
        self._shard, self._dest = call.x, call.out
        key = (self.src, self.dst, shapes, call.x.dtype, call.route, agreed.kinds)
        moves: Transfer | None = team.plans.get(key)
        if moves is None:
            route = select.agreed(self.name, call.route, team, agreed.kinds)
            moves = make_transfer(self.name, team, route, self.src, self.dst, shapes, call.x)
            team.plans[key] = moves
            if len(team.plans) > _CACHED:
                team.plans.popitem(last=False)
        self.moves = moves
        self._check_out(outs)

    def _check_out(self, outs: Sequence[Shape | None]) -> None:
        shapes = {rank: shape for rank, shape in enumerate(outs) if shape is not None}
        expected = [box.shape for box in self.moves.boxes]
        wrong = {r: f"out has shape {got}, expected {expected[r]}" for r, got in shapes.items() if got != expected[r]}
        objects.raise_problems(self.name, wrong)
        objects.raise_problems(self.name, dict.fromkeys(shapes, LOSES_GRADIENT) if self.grad else {})

    def forward(self, team: Team) -> Tensor:
        shard, dest = self._shard, self._dest
        make = lambda: pool.empty(self.moves.box.shape, shard.dtype, shard.device)  # noqa: E731
        y = results.allocate(self.name, team, self.moves.sizes, make if dest is None else lambda: dest)
        source = copyable(shard).clone() if dest is not None and overlap(dest, shard) else shard
        self.moves.run(team, source, y)
        return y if self.out is None else self.out

    def backward(self, team: Team, grad: Tensor) -> Tensor:
        return self.moves.transpose(team, grad)


class Plan:
    """A redistribution that all ranks have agreed on; made by :func:`plan_redistribute`.

    Attributes:
        shape: shape of the whole tensor.
        box: box of this rank in the new layout.
        sent, received: bytes that this rank sends to and receives from other ranks.
    """

    def __init__(
        self, moves: Transfer, team: Team, number: int, dtype: torch.dtype, device: torch.device, grad: bool
    ) -> None:
        self.shape, self.box = moves.shape, moves.box
        self.sent, self.received = moves.source.nbytes, moves.dest.nbytes
        self._moves, self._team, self._grad = moves, team, grad
        self._number = number  # among the plans of the team
        self._dtype, self._device = dtype, device

    @overload
    def __call__(self, x: Tensor, out: Tensor | None = None, *, async_op: Literal[False] = False) -> Tensor: ...
    @overload
    def __call__(self, x: Tensor, out: Tensor | None = None, *, async_op: Literal[True]) -> Handle[Tensor]: ...
    def __call__(self, x: Tensor, out: Tensor | None = None, *, async_op: bool = False) -> Any:
        """Execute the plan. Collective; one small exchange to validate the call on all ranks, then only data move.

        Args:
            x: this rank's part, of the shape, dtype and device that the plan was made for; any strides. It may need a
                gradient only if the plan was made for one.
            out, async_op: as in :func:`redistribute`.

        Returns:
            As :func:`redistribute`.

        Raises:
            RankError: on every rank, if `x` or `out` does not match the plan on any rank, or the ranks call different
                plans. No data have moved, and the next call can succeed.
            HpcdistError: if the plan's world has ended, or its group was freed.
        """

        if self._team.freed or self._team.group.ended:
            raise HpcdistError("the world of this plan has ended, or its group was freed: make a new plan")
        if (reason := recorded()) is not None:
            raise HpcdistError(f"a plan of redistribute(): {reason}")
        op = _Planned(self, x, out)
        return driver.run(op, self._team, async_op)


class _Planned(Redistribute):
    """Execute a plan: an operation that is planned already."""

    def __init__(self, plan: Plan, x: Tensor, out: Tensor | None) -> None:
        anything = layout.Replicate()  # the plan has its own layouts
        super().__init__(x, anything, anything, "auto", out, name="a plan of redistribute")
        self.moves, self._of = plan._moves, plan

    def validate(self, team: Team) -> Call:
        call = local.layout_call(self)
        problem = call.problem or self._mismatch(call)
        return Call(self.name, x=call.x, out=call.out, options=(("the plan", self._of._number),), problem=problem)

    def plan(self, team: Team, call: Call, agreed: Agreed) -> None:
        assert call.x is not None
        self._shard, self._dest = call.x, call.out
        self.grad = self._of._grad and torch.is_grad_enabled()  # agreed on when it was planned
        if self._of._grad and not self.grad:
            autograd.count(team)

    def _mismatch(self, call: Call) -> str | None:
        of = self._of
        for name, tensor, wanted in (("x", call.x, self.moves.source.shape), ("out", call.out, of.box.shape)):
            if tensor is not None:
                got, expected = (tuple(tensor.shape), tensor.dtype, tensor.device), (wanted, of._dtype, of._device)
                if got != expected:
                    return f"{name} is {_show(*got)}, but the plan was made for {_show(*expected)}"
        if call.grad and not of._grad:
            return "x requires a gradient, but the plan was made for tensors that do not"
        return None


def _shapes(team: Team, call: Call) -> tuple[tuple[Shape, ...], list[Shape | None]]:
    """Gather the shapes of all parts, and of `out` on the ranks that passed it. Collective; one small Allgather."""
    from mpi4py import MPI

    assert call.x is not None
    ndim = call.x.dim()
    out_shape = [-1] * ndim if call.out is None else call.out.shape
    mine = array("q", [call.out is not None, *call.x.shape, *out_shape])
    all_ = array("q", bytes(mine.itemsize * len(mine) * team.size))
    team.comm.Allgather([mine, MPI.INT64_T], [all_, MPI.INT64_T])
    rows = [tuple(all_[start : start + len(mine)]) for start in range(0, len(all_), len(mine))]
    return tuple(row[1 : 1 + ndim] for row in rows), [row[1 + ndim :] if row[0] else None for row in rows]


def _show(shape: Shape, dtype: torch.dtype, device: torch.device) -> str:
    return f"a {dtype} tensor of shape {tuple(shape)} on {device}"
