"""The verb redistribute: a tensor from one layout to another."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpcdist import abort, agree, checks, gradient, handle, layout, results, world
from hpcdist.buffers import copyable, overlap, written
from hpcdist.call import LOST, Call
from hpcdist.control import objects
from hpcdist.eager import recorded
from hpcdist.errors import HpcdistError, RankError
from hpcdist.layout import Box, Layout
from hpcdist.plan import Facts, Side, Transfer, Views
from hpcdist.routes import select
from hpcdist.routes.base import Route
from hpcdist.team import Team, team_of
from hpcdist.watch import record

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Plan", "plan_redistribute", "redistribute"]

VERB = "redistribute"
PLAN = "a plan of redistribute"
_KEPT = 64  # plans that a team remembers
Shape = tuple[int, ...]


def redistribute(
    x: Tensor,
    src: Layout,
    dst: Layout,
    *,
    group: dist.ProcessGroup | MPI.Comm | None = None,
    route: str = "auto",
    out: Tensor | None = None,
    async_op: bool = False,
) -> Any:
    """Bring a tensor from one layout to another: each rank gives its part in `src` and gets its part in `dst`.

    Collective over `group`. A rank sends to another just what that one needs and does not have; nothing is padded.
    Where a message is one run of memory, it is sent from and received into its place; else it is packed once.

    Args:
        x: this rank's part of the tensor in `src`: any dtype and strides, on the CPU or a GPU. Dtype and number of
            dims must agree.
        src: the layout of the parts: Split, Block, Replicate or Boxes. Where it names no counts, they are what the
            ranks hold. Must agree.
        dst: the layout to bring it to. Where it names no counts, the block rule. Must agree.
        group: a torch ProcessGroup or an mpi4py communicator; None for all ranks. Must be the same on all its ranks.
        route: "auto", "nccl", "gloo", "mpi" or "hdf5". Must agree.
        out: memory for the result, of its shape, dtype and device; each rank is free to give it.
        async_op: return a :class:`Handle` at once, and go on in the background. Must agree.

    Returns:
        This rank's part in `dst`: contiguous memory that it owns (or `out`), on x's device. Where a gradient is
        needed on any rank, it flows back: to the rank from which an element was taken (of several that hold copies,
        to one of them), as the sum over all ranks that have got it; every rank has to call backward.

    Raises:
        RankError: on every rank, if an argument is wrong on one of them, or the parts are none of a tensor in `src`.
            Nothing has moved, and the next call can succeed.
        TypeError, ValueError: on this rank, for a `group` that is none or does not hold it.

    Example, on 2 ranks::

        >>> rows = torch.tensor([[0, 1, 2, 3]]) + 4 * rank       # row `rank` of a 2 x 4 tensor
        >>> hd.redistribute(rows, hd.Split(0), hd.Split(1))
        tensor([[0, 1],       # on rank 0; [[2, 3], [6, 7]] on rank 1
                [4, 5]])
    """

    def step(team: Team) -> Any:
        plan, call = _planned(x, src, dst, route, out, team)
        result = plan._run(team, call.x, call.out, x, plan._grad)
        return result if out is None else out

    result = handle.start(VERB, team_of(group, world.current()), step, async_op)
    return result if out is None else written(out, result)


def plan_redistribute(
    x: Tensor,
    src: Layout,
    dst: Layout,
    *,
    group: dist.ProcessGroup | MPI.Comm | None = None,
    route: str = "auto",
) -> Plan:
    """Work a redistribution out once, to execute it many times: see :func:`redistribute`.

    Collective over `group`. Nothing of `x` is sent or kept; it shows shape, dtype, device, and whether a gradient is
    needed.

    Returns:
        The plan: call it with tensors like `x`.

    Raises:
        RankError: as redistribute.

    Example::

        >>> to_columns = hd.plan_redistribute(x, hd.Split(0), hd.Split(1))
        >>> for x in batches:
        ...     columns = to_columns(x)
    """
    team = team_of(group, world.current())
    with record.InCall("plan_redistribute", team), abort.InStep("plan_redistribute", team.size):
        plan = copy(_planned(x, src, dst, route, None, team)[0])  # what the team remembers may be of another device
    plan._device = x.device
    plan._number = team.memo["made plans"] = team.memo.get("made plans", 0) + 1
    return plan


class Plan:
    """A redistribution that all ranks have agreed on; made by :func:`plan_redistribute`.

    Attributes:
        shape: of the whole tensor.
        box: this rank's part of it in the new layout.
        sent, received: bytes that this rank sends to and receives from others.
    """

    def __init__(
        self,
        team: Team,
        way: Route,
        moves: Transfer,
        shape: Shape,
        boxes: Sequence[Box],
        on_host: Sequence[bool],
        like: Tensor,
        grad: bool,
    ) -> None:
        self.shape, self.box = shape, boxes[team.rank]
        self._sizes = [box.size() * like.itemsize * host for box, host in zip(boxes, on_host, strict=True)]
        self.sent, self.received = moves.source.nbytes, moves.dest.nbytes
        self._team, self._way, self._moves = team, way, moves
        self._dtype, self._device, self._grad = like.dtype, like.device, grad
        self._number = 0  # of those that the team's ranks have made

    def __call__(self, x: Tensor, out: Tensor | None = None, *, async_op: bool = False) -> Any:
        """Execute it. Collective; the ranks agree that all are well, and then just the data move.

        Args:
            x: this rank's part, of the shape, dtype and device that the plan was made for; any strides. Whether a
                gradient is needed must agree with that, too.
            out, async_op: as for :func:`redistribute`.

        Returns:
            As :func:`redistribute`.

        Raises:
            RankError: on every rank, if `x` or `out` is not like that on one of them, or they call different plans.
                Nothing has moved, and the next call can succeed.
            HpcdistError: the plan's world has ended, or its group was freed.
        """

        if self._team.freed:
            raise HpcdistError("the world of this plan has ended, or its group was freed: make a new plan")
        if (reason := recorded()) is not None:
            raise HpcdistError(f"a plan of redistribute(): {reason}")

        def step(team: Team) -> Any:
            call = checks.layout_call(VERB, x, layout.Replicate(), layout.Replicate(), "auto", out)
            problem = call.problem or self._unlike(call)
            agree.exchange(team, Call(PLAN, options=(("the plan", self._number),), problem=problem))
            needed = self._grad and torch.is_grad_enabled()
            if self._grad and not needed:
                gradient.skip(team)
            result = self._run(team, call.x, call.out, x, needed)
            return result if out is None else out

        result = handle.start("plan", self._team, step, async_op)
        return result if out is None else written(out, result)

    def _unlike(self, call: Call) -> str | None:
        for name, tensor, shape in (("x", call.x, self._moves.source.shape), ("out", call.out, self.box.shape)):
            if tensor is not None:
                got, want = (tuple(tensor.shape), tensor.dtype, tensor.device), (shape, self._dtype, self._device)
                if got != want:
                    return f"{name} is {_show(*got)}, and the plan was made for {_show(*want)}"
        if call.grad and not self._grad:
            return "x requires a gradient, and the plan was made for tensors that do not"
        return None

    def _run(
        self, team: Team, shard: Tensor | None, out: Tensor | None, x: Tensor, needed: bool
    ) -> Tensor | gradient.Deferred:
        assert shard is not None
        own = shard

        def forward() -> Tensor:
            with abort.Transfer(VERB, team.size):
                make = lambda: torch.empty(self.box.shape, dtype=own.dtype, device=own.device)  # noqa: E731
                y = results.allocate(VERB, team, self._sizes, make if out is None else lambda: out)
                x_apart = copyable(own).clone() if out is not None and overlap(out, own) else own
                self._moves.run(team, self._way, x_apart, y)
                return y

        return gradient.carried(
            VERB, team, needed, x, forward, lambda grad: self._moves.back(team.front, self._way, grad)
        )


def _planned(x: Any, src: Any, dst: Any, route: Any, out: Any, team: Team) -> tuple[Plan, Call]:
    """The plan of a call, and the call as it was checked. Collective."""
    call = checks.layout_call(VERB, x, src, dst, route, out)
    agreed = agree.exchange(team, call)
    shapes, outs = _shapes(team, call)
    way = select.agreed(VERB, route, team, agreed.kinds)
    assert call.x is not None
    plans: OrderedDict[Any, Plan] = team.memo.setdefault("plans", OrderedDict())
    key = (src, dst, shapes, call.x.dtype, route, agreed.kinds, agreed.grad)
    if key not in plans:
        plans[key] = _make(team, way, src, dst, shapes, call.x, agreed.grad)
        if len(plans) > _KEPT:
            plans.popitem(last=False)
    plan = plans[key]
    given = {rank: shape for rank, shape in enumerate(outs) if shape is not None}
    if given:
        wanted = [box.shape for box in dst.boxes(plan.shape, team.size)]
        objects.raise_problems(
            VERB, {r: f"out has shape {got}, expected {wanted[r]}" for r, got in given.items() if got != wanted[r]}
        )
        objects.raise_problems(VERB, dict.fromkeys(given, LOST) if agreed.grad else {})
    return plan, call


def _shapes(team: Team, call: Call) -> tuple[tuple[Shape, ...], list[Shape | None]]:
    """The shapes of all parts, and of the memory for the results where it is given. Collective; one small Allgather."""
    from mpi4py import MPI

    assert call.x is not None
    ndim = call.x.dim()
    given = [-1] * ndim if call.out is None else call.out.shape
    mine = array("q", [call.out is not None, *call.x.shape, *given])
    all_ = array("q", bytes(mine.itemsize * len(mine) * team.size))
    team.comm.Allgather([mine, MPI.INT64_T], [all_, MPI.INT64_T])
    rows = [tuple(all_[start : start + len(mine)]) for start in range(0, len(all_), len(mine))]
    return tuple(row[1 : 1 + ndim] for row in rows), [row[1 + ndim :] if row[0] else None for row in rows]


def _make(team: Team, way: Route, src: Layout, dst: Layout, shapes: Sequence[Shape], x: Tensor, grad: bool) -> Plan:
    """Work out what this rank sends and receives. Collective; two small Allgathers."""
    name = "src"
    try:
        shape, source = src.held(shapes)
        name = "dst"
        dest = dst.boxes(shape, team.size)
    except ValueError as wrong:  # on all ranks alike
        raise RankError(VERB, dict.fromkeys(range(team.size), f"{name}: {wrong}")) from None
    moves = layout.overlaps(source, dest, team.rank)
    sides = (
        Side(source[team.rank], moves.sends, team.rank, team.size, x.itemsize),
        Side(dest[team.rank], moves.recvs, team.rank, team.size, x.itemsize),
    )
    longest = max(max(side.counts) for side in sides)
    total = max(max(side.nbytes, x.itemsize * layout.whole(side.shape).size()) for side in sides)
    single = all(len(boxes) <= 1 for side in sides for boxes in (*side.boxes, side.own))
    known = objects.all_gather_object(team.comm, (longest, total, single, not x.is_cuda, moves.missing))
    missing = {rank: fact[-1] for rank, fact in enumerate(known) if fact[-1]}
    text = "src: no rank holds {} of the {} elements of its new part"
    objects.raise_problems(VERB, {rank: text.format(n, dest[rank].size()) for rank, n in missing.items()})
    facts = Facts(
        longest=max(fact[0] for fact in known),
        total=max(fact[1] for fact in known),
        single=all(fact[2] for fact in known),
        views=isinstance(way, Views) and all(fact[3] for fact in known),
    )
    return Plan(team, way, Transfer(*sides, facts), shape, dest, [fact[3] for fact in known], x, grad)


def _show(shape: Shape, dtype: torch.dtype, device: torch.device) -> str:
    return f"a {dtype} tensor of shape {tuple(shape)} on {device}"
