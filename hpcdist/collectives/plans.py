"""Plans: calls that all ranks agree on once, and explain or execute many times."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hpcdist.collectives import join, redistribute, split, structures
from hpcdist.collectives import run as driver
from hpcdist.collectives.run import Operation, Plannable, is_plain_out
from hpcdist.collectives.small import BEHIND_HEADERS
from hpcdist.comm.team import Team
from hpcdist.errors import HpcdistError, refusal
from hpcdist.layout import Box
from hpcdist.runtime import world
from hpcdist.runtime.plan import Plan, planners
from hpcdist.tensors.accelerator import MemoryKind
from hpcdist.tensors.eager import recorded
from hpcdist.tensors.storage import is_plain, row_major
from hpcdist.validation import local
from hpcdist.validation.call import LOSES_GRADIENT, Call
from hpcdist.validation.collective import Agreed

if TYPE_CHECKING:
    from hpcdist.comm.settings import GroupLike

_OPERATIONS: dict[Any, Callable[..., Plannable | structures.JoinStructures]] = {
    join.gather: partial(join.joining, "gather"),
    join.concat: partial(join.joining, "concat"),
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
    make, other = (_OPERATIONS.get(verb), planners.get(verb)) if callable(verb) else (None, None)
    if make is None and other is None:
        names = ", ".join(f.__name__ for f in (*_OPERATIONS, *planners))
        raise refusal(TypeError, "HD201", f"plan(): verb is {verb!r}, expected one of {names}")
    bound = inspect.signature(verb).bind(*args, **options)
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
    found = op.describe(team)
    routes = [team.routes[op.route, kinds] for kinds in found.kinds]
    reasons = [reason for _, reason in routes]
    reasons += [method.reason for method in found.methods if method.reason]
    if not routes:
        reasons.append("all tensors are small: packed, by MPI")
    elsewhere = any(method.shared or method.name == BEHIND_HEADERS.name for method in found.methods)
    may_be_inline = MemoryKind.GPU not in agreed.kinds and op.route in ("auto", "mpi")
    if may_be_inline and not elsewhere and (name, found.result) != ("split", "structure"):
        reasons.append(f"the data of a rank are more than the {team.inline} bytes that travel behind a header")
    kept = None
    if isinstance(op, Plannable) and found.result != "structure" and not op.shared:
        kept = _Kept(op, name, team)
    return Plan(
        verb=name,
        route=" and ".join(dict.fromkeys(route.name for route, _ in routes)) or "mpi",
        methods=tuple(dict.fromkeys(method.name for method in found.methods)),
        sent=found.sent,
        received=found.received,
        result=found.result,
        reasons=tuple(dict.fromkeys(reasons)),
        shape=None if kept is None else kept.parts.shape,
        box=None if kept is None else kept.box,
        _call=again if kept is None else kept,
    )


class _Kept:
    """An operation on tensors, kept after its plan, without the tensors.

    Attributes:
        number: of the plan among those of the team, the same on all ranks.
        parts: what moves.
        source, dest: box that this rank sends, and the one that it receives; None for no tensor.
        box: the latter, of size 0 for no tensor.
        is_inline: whether the data of all ranks travel behind the headers.
        repeats: the small call, to be found again; it ends with the plan.
    """

    def __init__(self, op: Plannable, verb: str, team: Team) -> None:
        team.plans_made += 1
        self.op, self.team, self.number, self.parts = op, team, team.plans_made, op.parts(team)
        self.source, self.dest = self.parts.sources[team.rank], self.parts.dests[team.rank]
        self.repeats: dict[Hashable, Any] = {}
        nothing = (0,) * len(self.parts.shape)
        self.box = self.dest or Box(nothing, nothing)
        self.x_shape = None if self.source is None else op.x.shape
        self.kind = MemoryKind(op.agreed.kinds[team.rank])
        fit = all(box is None or box.size() * self.parts.dtype.itemsize <= team.inline for box in self.parts.sources)
        self.is_inline = fit and op.route in ("auto", "mpi") and MemoryKind.GPU not in op.agreed.kinds
        op.name, op.x, op.out, op.small = f"a plan of {verb}", None, None, None
        op.sent, op.dest = None if self.source is None else torch.empty(0, device="cpu"), None

    def __call__(self, x: Any, out: Any = None, *, async_op: bool = False) -> Any:
        if self.team.freed or self.team.group.ended:
            raise HpcdistError("HD112", "the world of this plan has ended, or its group was freed: make a new plan")
        return driver.run(_Execution(self, x, out), self.team, async_op)

    def ready(self, name: str, value: Any, shape: tuple[int, ...] | None, box: Box | None) -> Tensor | None:
        """Return a tensor of a call ready to be moved; raise an ArgumentError if the plan is for another one."""
        if box is None:
            if value is not None:
                raise local.ArgumentError("HD211", f"{name} is given, but in this plan this rank {_WITHOUT[name]}")
            return None
        x, parts = local.ready(value, name), self.parts
        if x.shape != shape or x.dtype is not parts.dtype or x.device != parts.device:
            got, planned = _show(x.shape, x.dtype, x.device), _show(shape or (), parts.dtype, parts.device)
            raise local.ArgumentError("HD303", f"{name} is {got}, but the plan was made for {planned}")
        return x if shape else x.view(box.shape)  # a shard of 0 dims is a row


_WITHOUT = {"x": "sends no tensor: pass None", "out": "receives no result"}


class _Execution(Operation):
    """One call of a plan."""

    def __init__(self, plan: _Kept, x: Any, out: Any) -> None:
        self.name, self.x, self.out, self._plan = plan.op.name, x, out, plan

    def key(self) -> Hashable:
        plan, x, out = self._plan, self.x, self.out
        dtype, source, dest = plan.parts.dtype, plan.source, plan.dest
        if not plan.is_inline or plan.op.grad or (x is None) != (source is None) or recorded() is not None:
            return None
        if x is not None and not (is_plain(x) and x.shape == plan.x_shape and x.dtype is dtype):
            return None
        if out is not None and not (dest and is_plain_out(out) and out.shape == dest.shape and out.dtype is dtype):
            return None
        return plan.number

    def repeats(self, team: Team) -> dict[Hashable, Any]:
        return self._plan.repeats

    def validate(self, team: Team, call: Call) -> None:
        plan = self._plan
        call.kind, call.options = plan.kind, (("the plan", plan.number),)
        call.grad = plan.op.grad and torch.is_grad_enabled()
        call.x = plan.ready("x", self.x, plan.x_shape, plan.source)
        call.out = None if self.out is None else plan.ready("out", self.out, plan.box.shape, plan.dest)
        call.out_extent = -1 if call.out is None else 0  # for the memory that results need
        if torch.is_grad_enabled():
            if self.x is not None and self.x.requires_grad and not plan.op.grad:
                raise local.ArgumentError(
                    "HD303", "x requires a gradient, but the plan was made for tensors that do not"
                )
            if call.out is not None and plan.op.grad:
                raise local.ArgumentError(LOSES_GRADIENT)
        if plan.is_inline:
            call.inline = () if call.x is None else (row_major(call.x),)

    def plan(self, team: Team, call: Call, agreed: Agreed) -> None:
        self._op = op = copy(self._plan.op)
        op.out, op.grad = self.out, agreed.grad
        op.bind(team, call.x, call.out, agreed)
        self.small = op.small

    def forward(self, team: Team) -> Tensor | None:
        return self._op.forward(team)

    def backward(self, team: Team, grad: Tensor) -> Tensor | None:
        return self._op.backward(team, grad)


def _show(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> str:
    return f"a {dtype} tensor of shape {tuple(shape)} on {device}"
