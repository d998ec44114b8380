"""Plans: calls that all ranks agree on once, and explain or execute many times."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from hpcdist import activity
from hpcdist.collectives import all_to_all, join, redistribute, reduce, run as driver, split
from hpcdist.collectives.kept import BEHIND_HEADERS
from hpcdist.collectives.run import Operation, Plannable
from hpcdist.comm.team import Team
from hpcdist.errors import HpcdistError, refusal
from hpcdist.layout import Box
from hpcdist.process import abort
from hpcdist.routes.route import Alltoall, Method, Vector
from hpcdist.runtime import world
from hpcdist.runtime.plan import Plan, planners
from hpcdist.tensors import pool
from hpcdist.tensors.accelerator import MemoryKind
from hpcdist.validation import collective, local
from hpcdist.validation.collective import Agreed

if TYPE_CHECKING:
    from hpcdist.comm.team import GroupLike

_OPERATIONS: dict[Any, Callable[..., Operation]] = {
    join.gather: partial(join.Join, "gather", rooted=True),
    join.concat: partial(join.Join, "concat"),
    split.split: split.Scatter,
    redistribute.redistribute: redistribute.Redistribute,
    reduce.reduce_scatter: reduce.ReduceScatter,
    reduce.reduce: reduce.operation,
    reduce.all_reduce: reduce.Reduce,
    all_to_all.all_to_all: all_to_all.AllToAll,
}
_WITHIN = Method("copies within each rank", "no rank needs data of another one")


def plan(verb: Callable[..., Any], *args: Any, group: GroupLike | None = None, **options: Any) -> Plan:
    """Plan a call on tensors, or of files, to describe it, or to execute it many times.

    Collective over `group`. The ranks agree on the call and plan it, as the verb does, but send, allocate and keep no
    data. (Data that are small enough to travel behind the headers are exchanged and dropped.)

    The plan may differ from the call if the node later has too little memory for a shared result.

    Args:
        verb: :func:`hpcdist.staging.load` or a verb of tensors itself, such as :func:`hpcdist.concat`. Must agree.
        *args: the arguments of the verb, `x` first, which is a tensor. Only its shape, dtype and device are used.
        group: a torch ProcessGroup, 1-d DeviceMesh or mpi4py communicator; None means all ranks. Must agree.
        **options: the keyword arguments of the verb. `async_op` makes no difference.

    Returns:
        On every rank, the plan. Bytes and result are this rank's; the rest is the same on all ranks.

    Raises:
        RankError: on every rank, if an argument is wrong on any rank, or arguments do not agree: as in the verb.
        TypeError, ValueError: on this rank, if `verb` is none of these, a split with root=None, which sends
            nothing, an all_to_all of a list, or a reduce of a dict; or as in the verb.

    Example, on rank 0 of 4 ranks of a node, with a tensor of 1 KiB each::

        >>> join = hd.plan(hd.concat, x)
        >>> print(join)
        concat: route mpi, MPI_Allgatherv
          this rank sends 3,072 bytes, receives 3,072 bytes; result: new memory
          because route='auto' takes mpi for data in host memory
          because the data of a rank are more than the 960 bytes that travel behind a header
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
    if verb is split.split and arguments["root"] is None:
        raise refusal(TypeError, "HD201", "plan(): split with root=None sends nothing: call it")
    if verb is all_to_all.all_to_all and isinstance(arguments["x"], list | tuple):
        raise refusal(TypeError, "HD201", "plan(): all_to_all of a list has no plan: pass one tensor and counts")
    team, op = world.team_of(group), make(**arguments)
    if not isinstance(op, Plannable):
        raise refusal(TypeError, "HD201", "plan(): reduce of a dict has no plan: pass a tensor")
    op.name, op.number = f"plan of {verb.__name__}", 0
    with activity.InCall(op.name, team), abort.InStep(op.name, team.size):
        call = local.call_of(op.name, op.validate, team)
        agreed = collective.exchange(team, call)
        op.grad = agreed.grad
        with abort.InTransfer(op.name, team.size):
            op.plan(team, call, agreed)
    return _described(verb.__name__, op, team, agreed)


def _described(name: str, op: Plannable, team: Team, agreed: Agreed) -> Plan:
    """Return the plan of an operation, which forgets its tensors. Collective."""
    route, parts, inline = op.chosen(team), op.parts, op.kept is not None and op.kept.inline
    shape, box = parts.shape, parts.dests[team.rank]
    traffic = [_traffic(team, *message) for message in op.messages]
    methods = [BEHIND_HEADERS if inline else _WITHIN]
    if op.messages and not inline:
        methods = [route.method(team, operation, what.total, what.longest) for operation, what in op.messages]
    if op.shared:
        methods = [_shared(team, prod(shape) * parts.dtype.itemsize, methods[0])]
    reasons = [team.routes[op.route, agreed.kinds][1], *(method.reason for method in methods if method.reason)]
    shared = methods[0].shared
    if not (inline or shared or MemoryKind.GPU in agreed.kinds) and op.route in ("auto", "mpi"):
        reasons.append(f"the data of a rank are more than the {team.inline} bytes that travel behind a header")
    if box is None:
        result = "none"
    elif op.out is not None or shared:
        result = "shared" if shared else "out"
    else:
        device = team.settings.device if agreed.kinds[team.rank] == MemoryKind.GPU else torch.device("cpu")
        result = "pool" if pool.holds(box.size() * parts.dtype.itemsize, device) else "new"
    nothing = (0,) * len(shape)
    return Plan(
        verb=name,
        route=route.name,
        methods=tuple(dict.fromkeys(method.name for method in methods)),
        sent=sum(sent for sent, _ in traffic),
        received=sum(received for _, received in traffic),
        result=result,
        reasons=tuple(reasons),
        shape=shape,
        box=box or Box(nothing, nothing),
        _call=_kept(name, op, team),
    )


def _traffic(team: Team, operation: str, what: Vector | Alltoall) -> tuple[int, int]:
    """Return the bytes that this rank sends to, and receives from, other ranks."""
    rank = team.rank
    if isinstance(what, Alltoall):
        return sum(what.sendcounts) - what.sendcounts[rank], sum(what.recvcounts) - what.recvcounts[rank]
    own = what.counts[rank]
    rest = what.total - own
    if operation == "allgatherv":
        return own * (team.size - 1), rest
    is_root = rank == what.root
    nbytes = rest if is_root else own
    return (nbytes, 0) if is_root == (operation == "scatterv") else (0, nbytes)


def _shared(team: Team, nbytes: int, otherwise: Method) -> Method:
    """Return how data of `nbytes` in all move to a result that nodes are to share, as far as is known. Collective."""
    from hpcdist.routes import node_copy  # which imports MPI

    refusal = node_copy.refusal(team, nbytes)
    if refusal is None:
        return node_copy.SHARED
    reasons = filter(None, [f"the result is not shared: {refusal}", otherwise.reason])
    return otherwise._replace(reason="; ".join(reasons))


def _kept(name: str, op: Plannable, team: Team) -> Callable[..., Any]:
    """Return the function that executes a plan."""
    team.plans_made += 1
    op.name, op.number = f"a plan of {name}", team.plans_made
    op.like = None if op.x is None else (op.x.dtype, tuple(op.x.shape), op.x.device)
    kind, kept = type(op), vars(op) | dict.fromkeys(op.own)

    def call(x: Any, out: Any = None, *, async_op: bool = False) -> Any:
        if team.freed or team.group.ended:
            raise HpcdistError("HD112", "the world of this plan has ended, or its group was freed: make a new plan")
        again: Plannable = object.__new__(kind)
        vars(again).update(kept, x=x, out=out)
        return driver.run(again, team, async_op)

    return call
