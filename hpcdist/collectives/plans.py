"""Plans: calls that all ranks agree on once, and explain or execute many times."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hpcdist.collectives import autograd, join, redistribute, split
from hpcdist.collectives import run as driver
from hpcdist.collectives.run import Operation, Plannable, Steps
from hpcdist.collectives.small import BEHIND_HEADERS, Small, came
from hpcdist.comm.team import Team
from hpcdist.errors import HpcdistError, refusal
from hpcdist.layout import Box
from hpcdist.process import abort
from hpcdist.routes import select
from hpcdist.runtime import world
from hpcdist.runtime.plan import Plan, planners
from hpcdist.tensors.accelerator import MemoryKind
from hpcdist.tensors.storage import row_major
from hpcdist.validation import collective, local
from hpcdist.validation.call import LOSES_GRADIENT, Call
from hpcdist.validation.collective import Agreed

if TYPE_CHECKING:
    from hpcdist.comm.settings import GroupLike

__all__ = ["plan"]

_OPERATIONS: dict[Any, Callable[..., Steps]] = {
    join.gather: join.gathering,
    join.concat: join.concatenation,
    split.split: split.Scatter,
    redistribute.redistribute: redistribute.Redistribute,
}


def plan(verb: Callable[..., Any], *args: Any, group: GroupLike | None = None, **options: Any) -> Plan:
    """Plan a call once, to describe it, or to execute it many times.

    Collective over `group`. The ranks agree on the call and plan it, as the verb does, but send, allocate and keep no
    data. (Data that are small enough to travel behind the headers are exchanged and dropped.) Calls of a plan of
    tensors skip this agreement. A plan of structures, of ``shared=True`` and of files calls the verb.

    A plan does not foresee that the node will have no memory for a shared result or for a window.

    Args:
        verb: :func:`hpcdist.gather`, :func:`hpcdist.concat`, :func:`hpcdist.split`, :func:`hpcdist.redistribute`,
            :func:`hpcdist.staging.load` or :func:`hpcdist.staging.save` itself. Must agree.
        args, group, options: the arguments of the verb, `x` first, as in the verb. Of tensors, only shape, dtype,
            device, and whether they need a gradient are used. `async_op` makes no difference.

    Returns:
        On every rank, the plan. Bytes and result are this rank's; the rest is the same on all ranks.

    Raises:
        RankError: on every rank, if an argument is wrong on any rank, or arguments do not agree: as in the verb.
        TypeError, ValueError: on this rank, if `verb` is none of these, or as in the verb.

    Example, on rank 0 of 4 ranks of a node, with a tensor of 1 KiB each::

        >>> join = hd.plan(hd.concat, x)
        >>> print(join)
        concat: route mpi, MPI_Allgatherv
          this rank sends 3,072 bytes, receives 3,072 bytes; result: new memory
          because route='auto' takes mpi for data in host memory
          because the data of a rank are more than the 192 bytes that travel behind a header
        >>> join(x).shape
        torch.Size([1024])
    """
    try:
        make, other = _OPERATIONS.get(verb), planners.get(verb)
    except TypeError:
        make = other = None
    bound = None if make is None and other is None else inspect.signature(verb).bind(*args, **options)
    if bound is None:
        names = ", ".join(f.__name__ for f in (*_OPERATIONS, *planners))
        raise refusal(TypeError, "HD201", f"plan(): verb is {verb!r}, expected one of {names}")
    bound.apply_defaults()
    arguments = {name: value for name, value in bound.arguments.items() if name not in ("group", "async_op")}
    if make is None:
        assert other is not None
        return other(**arguments, group=group)
    again = partial(verb, **{name: value for name, value in arguments.items() if name not in ("x", "out")}, group=group)
    name = verb.__name__
    if "root" in arguments and arguments["root"] is None and name == "split":
        split.split(**arguments, group=group)
        reason = "every rank holds x: each takes its own part"
        return Plan(name, "none", ("no message",), 0, 0, "view", (reason,), _call=again)
    team = world.team_of(group)
    op = make(**arguments)
    op.name = f"plan of {name}"
    agreed = driver.plan(op, team)
    found = op.describe(team, agreed)
    reasons = [select.reason(op.route, team, kinds) for kinds in found.routes]
    reasons += [method.reason for method in found.methods if method.reason]
    if not found.routes:
        reasons.append("all tensors are small: packed, by MPI")
    elsewhere = any(method.shared or method.name == BEHIND_HEADERS.name for method in found.methods)
    may_be_inline = MemoryKind.GPU not in agreed.kinds and op.route in ("auto", "mpi")
    if may_be_inline and not elsewhere and (name, found.result) != ("split", "structure"):
        reasons.append(f"the data of a rank are more than the {team.inline} bytes that travel behind a header")
    kept = None
    if isinstance(op, Plannable) and found.result != "structure" and not arguments.get("shared"):
        kept = _Kept(op, name, team, agreed)
    return Plan(
        verb=name,
        route=" and ".join(dict.fromkeys(route.name for route in found.routes.values())) or "mpi",
        methods=tuple(dict.fromkeys(method.name for method in found.methods)),
        sent=found.sent,
        received=found.received,
        result=found.result,
        reasons=tuple(dict.fromkeys(reasons)),
        shape=None if kept is None else kept.shape,
        box=None if kept is None else kept.box,
        _call=again if kept is None else kept,
    )


class _Kept:
    """An operation on tensors, kept after its plan.

    Attributes:
        shape: shape of the whole tensor.
        box: box of the whole tensor that this rank receives; of size 0 if it receives none.
    """

    def __init__(self, op: Plannable, verb: str, team: Team, agreed: Agreed) -> None:
        self._team, self._agreed = team, agreed
        team.plans_made += 1
        self._number = team.plans_made  # the same on all ranks
        self._parts = parts = op.parts(team)
        self._source, self._dest = parts.sources[team.rank], parts.dests[team.rank]
        self._dtype, self._device = parts.dtype, parts.device
        self._x_shape = None if self._source is None else op.x.shape
        self._kind = MemoryKind(agreed.kinds[team.rank])
        nothing = Box((0,) * len(parts.shape), (0,) * len(parts.shape))
        self.shape, self.box = parts.shape, self._dest or nothing
        on_host = all(kind == MemoryKind.CPU for kind in agreed.kinds)
        fits = max(parts.sizes()) <= team.inline
        self._is_inline = on_host and fits and isinstance(parts.route, type(select.load("mpi")))
        self._small: dict[bool, Small] = {}  # of the team, and (True) of the team in its background
        # Kept for calls, without the tensors.
        op.name, op.x, op.out, op.small = f"a plan of {verb}", None, None, None
        op.bind(None if self._source is None else torch.empty(0, device="cpu"), None, agreed)
        self._op = op

    def __call__(self, x: Any, out: Any = None, *, async_op: bool = False) -> Any:
        if self._team.freed or self._team.group.ended:
            raise HpcdistError("HD112", "the world of this plan has ended, or its group was freed: make a new plan")
        return driver.run(_Execution(self, x, out), self._team, async_op)

    def _execute(self, call: _Execution, team: Team) -> Any:
        problem, x, out = self._check(call.x, call.out)
        grad, background = self._op.grad and torch.is_grad_enabled(), team.foreground is not team
        small, exchanged = self._small.get(background), False
        if small is not None and not (problem or grad) and small.calls == team.calls[not background]:
            if small.exchange(team, x if x is None else row_major(x)) and not self._op.grad:
                result = small.take(out)
                return result if call.out is None else call.out
            exchanged = True
        agreed = collective.exchange(team, self._call(x, out, problem, grad), exchanged)
        if self._op.grad:
            call.which = autograd.count(team)
            # Also on a rank that calls within torch.no_grad(): the backward pass of the others needs it.
            call.grad = agreed.grad
        call.op = op = copy(self._op)
        op.out, op.grad = call.out, call.grad
        op.bind(x, out, agreed)
        if self._is_inline and came(self._parts, agreed, 0):
            op.small = Small(team, self._parts)
            if not agreed.grad:
                self._small[background] = op.small
        with abort.InTransfer(op.name, team.size):
            return op.forward(team)

    def _check(self, x: Any, out: Any) -> tuple[str | None, Tensor | None, Tensor | None]:
        """Return (the problem of the tensors, both tensors ready to be moved)."""
        try:
            local.refuse_tracing()
            sent = self._ready("x", x, self._x_shape, self._source)
            dest = None if out is None else self._ready("out", out, self.box.shape, self._dest)
            if torch.is_grad_enabled():
                if x is not None and x.requires_grad and not self._op.grad:
                    raise local.ArgumentError(
                        "HD303", "x requires a gradient, but the plan was made for tensors that do not"
                    )
                if dest is not None and self._op.grad:
                    raise local.ArgumentError(LOSES_GRADIENT)
        except Exception as error:  # including errors of an argument's own methods, which all ranks must raise
            return local.problem_of(error), None, None
        return None, sent, dest

    def _ready(self, name: str, value: Any, shape: tuple[int, ...] | None, box: Box | None) -> Tensor | None:
        if box is None:
            if value is not None:
                raise local.ArgumentError("HD211", f"{name} is given, but in this plan this rank {_WITHOUT[name]}")
            return None
        x = local.ready(value, name)
        if x.shape != shape or x.dtype is not self._dtype or x.device != self._device:
            got, planned = _show(x.shape, x.dtype, x.device), _show(shape or (), self._dtype, self._device)
            raise local.ArgumentError("HD303", f"{name} is {got}, but the plan was made for {planned}")
        return x if shape else x.view(box.shape)  # a shard of 0 dims is a row

    def _call(self, x: Tensor | None, out: Tensor | None, problem: str | None, grad: bool) -> Call:
        has_out = -1 if out is None else 0  # for the memory that results need
        inline = () if x is None else (row_major(x),)
        options = (("the plan", self._number),)
        name, kind = self._op.name, self._kind
        return Call(
            name,
            x=x,
            out=out,
            out_extent=has_out,
            kind=kind,
            grad=grad,
            options=options,
            problem=problem,
            inline=inline if self._is_inline else None,
        )


_WITHOUT = {"x": "sends no tensor: pass None", "out": "receives no result"}


class _Execution(Operation):
    """One call of a plan.

    Attributes:
        op: the planned operation with the tensors of this call, if it has a gradient.
    """

    op: Plannable

    def __init__(self, plan: _Kept, x: Any, out: Any) -> None:
        self.name, self.x, self.out, self._plan = plan._op.name, x, out, plan

    def execute(self, team: Team) -> Any:
        return self._plan._execute(self, team)

    def backward(self, team: Team, grad: Tensor) -> Tensor | None:
        return self.op.backward(team, grad)


def _show(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> str:
    return f"a {dtype} tensor of shape {tuple(shape)} on {device}"
