"""Plans: operations that all ranks have agreed on once, to be executed many times."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, overload

import torch
from torch import Tensor

from hpcdist.collectives import autograd
from hpcdist.collectives import run as driver
from hpcdist.collectives.concat import Concat
from hpcdist.collectives.gather import Gather
from hpcdist.collectives.inline import Inline, fits
from hpcdist.collectives.redistribute import Redistribute
from hpcdist.collectives.run import Executable, Plannable
from hpcdist.collectives.split import Counts, Scatter
from hpcdist.comm.team import Team
from hpcdist.errors import HpcdistError, coded
from hpcdist.layout import Box, Layout
from hpcdist.process import abort
from hpcdist.routes import select
from hpcdist.runtime import world
from hpcdist.tensors.dtypes import MemoryKind
from hpcdist.validation import collective, local
from hpcdist.validation.call import LOSES_GRADIENT, Call

if TYPE_CHECKING:
    from hpcdist.comm.signatures import GroupLike
    from hpcdist.runtime.background import Handle

__all__ = ["Plan", "plan_concat", "plan_gather", "plan_redistribute", "plan_split"]

X = TypeVar("X", Tensor, Tensor | None)
Y = TypeVar("Y", Tensor, Tensor | None)


def plan_gather(
    x: Tensor, dim: int = 0, root: int = 0, *, group: GroupLike | None = None, route: str = "auto"
) -> Plan[Tensor, Tensor | None]:
    """Plan a gather once, to execute it many times: see :func:`hpcdist.gather`.

    Collective over `group`. `x` is neither sent nor kept: only its shape, dtype, device, and whether it needs a
    gradient are used.

    Args:
        x: this rank's shard, a tensor; see :func:`hpcdist.gather`.
        dim, root, group, route: as in :func:`hpcdist.gather`. Must agree.

    Returns:
        The plan: call it with tensors like `x`.

    Raises:
        RankError: on every rank, as in gather.
        TypeError, ValueError: on this rank, if `group` is not a group, or this rank is not in it.

    Example, on 2 ranks::

        >>> losses_on_0 = hd.plan_gather(torch.zeros(1))
        >>> losses_on_0(torch.tensor([0.5 + rank]))
        tensor([0.5000, 1.5000])             # on rank 0; None on rank 1
    """
    return Plan(Gather(x, dim, root, route, None), group)


def plan_concat(
    x: Tensor, dim: int = 0, *, group: GroupLike | None = None, route: str = "auto"
) -> Plan[Tensor, Tensor]:
    """Plan a concat once, to execute it many times: see :func:`hpcdist.concat`.

    Collective over `group`. `x` is neither sent nor kept: only its shape, dtype, device, and whether it needs a
    gradient are used.

    Args:
        x: this rank's shard, a tensor; see :func:`hpcdist.concat`.
        dim, group, route: as in :func:`hpcdist.concat`. Must agree.

    Returns:
        The plan: call it with tensors like `x`.

    Raises:
        RankError: on every rank, as in concat.
        TypeError, ValueError: on this rank, if `group` is not a group, or this rank is not in it.

    Example, on 2 ranks::

        >>> join = hd.plan_concat(torch.empty(rank + 1))       # 1 and 2 elements
        >>> join(torch.full((rank + 1,), float(rank)))
        tensor([0., 1., 1.])                 # on both ranks
    """
    return Plan(Concat(x, dim, route, None), group)


def plan_split(
    x: Tensor | None,
    dim: int = 0,
    root: int = 0,
    counts: Counts = None,
    *,
    group: GroupLike | None = None,
    route: str = "auto",
) -> Plan[Tensor | None, Tensor]:
    """Plan a split once, to execute it many times: see :func:`hpcdist.split`.

    Collective over `group`. `x` is neither sent nor kept: only its shape, dtype, device, and whether it needs a
    gradient are used.

    Args:
        x: on the root, the whole tensor, see :func:`hpcdist.split`; None on the other ranks.
        dim, root, group, route: as in :func:`hpcdist.split`. Must agree. (If all ranks hold `x`, nothing is sent, and
            there is nothing to plan.)
        counts: as in :func:`hpcdist.split`.

    Returns:
        The plan: call it with tensors like `x` on the root, and with None on the other ranks.

    Raises:
        RankError: on every rank, as in split.
        TypeError, ValueError: on this rank, if `group` is not a group, or this rank is not in it.

    Example, on 2 ranks::

        >>> share = hd.plan_split(torch.empty(3) if rank == 0 else None)
        >>> share(torch.tensor([0., 1., 2.]) if rank == 0 else None)
        tensor([0., 1.])                     # on rank 0; tensor([2.]) on rank 1
    """
    return Plan(_TensorScatter(x, dim, root, counts, route, None, False), group)


def plan_redistribute(
    x: Tensor, src: Layout, dst: Layout, *, group: GroupLike | None = None, route: str = "auto"
) -> Plan[Tensor, Tensor]:
    """Plan a redistribution once, to execute it many times: see :func:`hpcdist.redistribute`.

    Collective over `group`. `x` is neither sent nor kept: only its shape, dtype, device, and whether it needs a
    gradient are used.

    Args:
        x: this rank's part of the tensor in `src`.
        src, dst, group, route: as in :func:`hpcdist.redistribute`. Must agree.

    Returns:
        The plan: call it with tensors like `x`.

    Raises:
        RankError: on every rank, as in redistribute.
        TypeError, ValueError: on this rank, if `group` is not a group, or this rank is not in it.

    Example::

        >>> to_columns = hd.plan_redistribute(x, hd.Split(0), hd.Split(1))
        >>> for x in batches:
        ...     columns = to_columns(x)
    """
    return Plan(Redistribute(x, src, dst, route, None), group)


class Plan(Generic[X, Y]):
    """An operation on tensors that all ranks have agreed on; made by :func:`plan_gather` and its like.

    Attributes:
        shape: shape of the whole tensor.
        box: box of the whole tensor that this rank receives; of size 0 if it receives none.
        sent, received: bytes that this rank sends to and receives from other ranks.
    """

    def __init__(self, op: Plannable, group: GroupLike | None) -> None:
        self._team = team = world.current().context.team_of(group)
        x, verb = op.x, op.name
        op.name = f"plan_{verb}"
        self._agreed = agreed = driver.plan(op, team)
        team.plans_made += 1
        self._number = team.plans_made  # the same on all ranks
        self._parts = parts = op.parts(team)
        self._source, self._dest = parts.sources[team.rank], parts.dests[team.rank]
        self._dtype, self._device = parts.dtype, parts.device
        self._x_shape = None if self._source is None else x.shape
        self._kind = MemoryKind(agreed.kinds[team.rank])
        nothing = Box((0,) * len(parts.shape), (0,) * len(parts.shape))
        self.shape, self.box = parts.shape, self._dest or nothing
        self.sent, self.received = parts.traffic(team.rank)
        on_host = all(kind == MemoryKind.CPU for kind in agreed.kinds)
        self._is_inline = on_host and isinstance(parts.route, type(select.load("mpi"))) and fits(parts, team)
        self._recvs = parts.overlaps(team.rank).recvs
        self._inline: dict[bool, Inline] = {}  # of the team, and (True) of the team in its background
        # Kept for calls, without the tensor.
        op.name, op.x = f"a plan of {verb}", None
        op.bind(None if self._source is None else torch.empty(0, device="cpu"), None, agreed)
        self._op = op

    @overload
    def __call__(self, x: X, out: Tensor | None = None, *, async_op: Literal[False] = False) -> Y: ...
    @overload
    def __call__(self, x: X, out: Tensor | None = None, *, async_op: Literal[True]) -> Handle[Y]: ...
    def __call__(self, x: X, out: Tensor | None = None, *, async_op: bool = False) -> Any:
        """Execute the plan. Collective over its group.

        Small tensors in host memory travel in the one message by which the ranks notice a wrong call; larger ones
        follow such a message.

        Args:
            x: this rank's tensor, of the shape, dtype and device that the plan was made for; any strides. None where
                the plan was made with None. It may need a gradient only if the plan was made for one on any rank.
            out: as in the planned operation, but always on the device of the plan's tensors.
            async_op: as in the planned operation.

        Returns:
            As the planned operation.

        Raises:
            RankError: on every rank, if `x` or `out` does not match the plan on any rank, or the ranks call different
                plans or operations. No data have moved, and the next call can succeed.
            HpcdistError: on this rank, if the plan's world has ended, or its group was freed.
        """
        if self._team.freed or self._team.group.ended:
            raise HpcdistError("HD115", "the world of this plan has ended, or its group was freed: make a new plan")
        return driver.run(_Execution(self, x, out), self._team, async_op)

    def _execute(self, call: _Execution, team: Team) -> Any:
        problem, x, out = self._check(call.x, call.out)
        agreed = self._agreed
        inline = self._messages(team) if self._is_inline else None
        grad = self._op.grad and torch.is_grad_enabled()
        if inline is None:
            agreed = collective.exchange(team, self._call(x, out, problem, grad))
        elif not inline.exchange(team, x, problem is None, grad):
            collective.disagree(team, self._call(x, out, problem, grad))
        if self._op.grad:
            call.which = autograd.count(team)
            # Also on a rank that calls within torch.no_grad(): the backward pass of the others needs it.
            call.grad = agreed.grad if inline is None else inline.grad
        if inline is not None and not call.grad:
            result = inline.result(out)
            return result if call.out is None else call.out
        call.op = op = copy(self._op)
        op.out, op.grad = call.out, call.grad
        op.bind(x, out, agreed)
        if inline is not None:
            result = inline.result(out)
            return torch.empty(0, dtype=self._dtype, device="cpu") if result is None else result
        with abort.InTransfer(op.name, team.size):
            return op.forward(team)

    def _messages(self, team: Team) -> Inline:
        background = team.foreground is not team
        if background not in self._inline:
            self._inline[background] = Inline(team, self._parts, self._recvs, self._op.name, self._number)
        return self._inline[background]

    def _check(self, x: Any, out: Any) -> tuple[str | None, Tensor | None, Tensor | None]:
        """Return (what is wrong with the tensors, both ready to be moved)."""
        try:
            local.runs()
            sent = self._ready("x", x, self._x_shape, self._source)
            dest = None if out is None else self._ready("out", out, self.box.shape, self._dest)
            if torch.is_grad_enabled():
                if x is not None and x.requires_grad and not self._op.grad:
                    raise local.WrongError(
                        "HD215", "x requires a gradient, but the plan was made for tensors that do not"
                    )
                if dest is not None and self._op.grad:
                    raise local.WrongError(LOSES_GRADIENT)
        except Exception as error:  # including what an argument's own methods raise: all ranks must learn of it
            return local.problem_of(error), None, None
        return None, sent, dest

    def _ready(self, name: str, value: Any, shape: tuple[int, ...] | None, box: Box | None) -> Tensor | None:
        if box is None:
            if value is not None:
                raise local.WrongError("HD211", f"{name} is given, but in this plan this rank {_WITHOUT[name]}")
            return None
        x = local.ready(value, name)
        if x.shape != shape or x.dtype is not self._dtype or x.device != self._device:
            got, planned = _show(x.shape, x.dtype, x.device), _show(shape or (), self._dtype, self._device)
            raise local.WrongError("HD215", f"{name} is {got}, but the plan was made for {planned}")
        return x if shape else x.view(box.shape)  # a shard of 0 dims is a row

    def _call(self, x: Tensor | None, out: Tensor | None, problem: str | None, grad: bool) -> Call:
        has_out = -1 if out is None else 0  # for the memory that results need
        options = (("the plan", self._number),)
        name, kind = self._op.name, self._kind
        return Call(name, x=x, out=out, out_extent=has_out, kind=kind, grad=grad, options=options, problem=problem)


_WITHOUT = {"x": "sends no tensor: pass None", "out": "receives no result"}


class _Execution(Executable):
    """One call of a plan.

    Attributes:
        op: the planned operation with the tensors of this call, if it has a gradient.
    """

    op: Plannable

    def __init__(self, plan: Plan[Any, Any], x: Any, out: Any) -> None:
        self.name, self.x, self.out, self._plan = plan._op.name, x, out, plan

    def execute(self, team: Team) -> Any:
        return self._plan._execute(self, team)

    def backward(self, team: Team, grad: Tensor) -> Tensor | None:
        return self.op.backward(team, grad)


class _TensorScatter(Scatter):
    """Split a tensor, but no structure."""

    def validate(self, team: Team) -> Call:
        call = super().validate(team)
        if call.problem is None and team.rank == call.root and call.x is None:
            call.problem = coded("HD201", f"x must be a torch.Tensor for a plan, got {type(self.x).__name__}")
        return call


def _show(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> str:
    return f"a {dtype} tensor of shape {tuple(shape)} on {device}"
