"""The explanation of a call: what it would do, and why."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hpcdist.collectives import concat, gather, redistribute, run, split
from hpcdist.errors import refusal
from hpcdist.routes import select
from hpcdist.routes.inline import BEHIND_HEADERS
from hpcdist.runtime import world
from hpcdist.runtime.explanation import Explanation, explained
from hpcdist.tensors.dtypes import MemoryKind

if TYPE_CHECKING:
    from hpcdist.comm.signatures import GroupLike

__all__ = ["Explanation", "explain"]

_OPERATIONS: dict[Any, Callable[..., run.Operation]] = {
    gather.gather: gather.operation,
    concat.concat: concat.operation,
    split.split: split.operation,
    redistribute.redistribute: redistribute.Redistribute,
}


def explain(verb: Callable[..., Any], *args: Any, group: GroupLike | None = None, **options: Any) -> Explanation:
    """Explain what a call would do, and why, without making it.

    Collective over `group`. The ranks agree on the call and plan it, as the verb does; then nothing is sent, allocated
    or changed. (Data that are small enough to travel behind the headers are exchanged with these, and dropped.)

    What only the call can find is not foreseen: a shared result, or a window for messages, for which the node has no
    memory then.

    Args:
        verb: :func:`hpcdist.gather`, :func:`hpcdist.concat`, :func:`hpcdist.split`, :func:`hpcdist.redistribute` or
            :func:`hpcdist.staging.load` itself. Must agree.
        args, group, options: the arguments of the verb, `x` first, as in the verb. `async_op` makes no difference.

    Returns:
        On every rank, the explanation: what concerns all ranks is the same on all of them; bytes and result are this
        rank's.

    Raises:
        RankError: on every rank, if an argument is wrong on any rank, or arguments do not agree: as in the verb.
        TypeError, ValueError: on this rank, if `verb` is none of these, or as in the verb.

    Example, on rank 0 of 4 ranks of a node, with a tensor of 1 KiB each::

        >>> print(hd.explain(hd.concat, x))
        concat: route mpi, MPI_Allgatherv
          this rank sends 3,072 bytes, receives 3,072 bytes; result: new memory
          because route='auto' takes mpi for data in host memory
          because the data of a rank are more than the 192 bytes that travel behind a header
    """
    try:
        make, other = _OPERATIONS.get(verb), explained.get(verb)
    except TypeError:
        make = other = None
    if make is None and other is None:
        names = ", ".join(f.__name__ for f in (*_OPERATIONS, *explained))
        raise refusal(TypeError, "HD205", f"explain(): verb is {verb!r}, expected one of {names}")
    bound = inspect.signature(verb).bind(*args, **options)
    bound.apply_defaults()
    if make is None:
        assert other is not None
        return other(**{**bound.arguments, "group": group})
    arguments = {name: value for name, value in bound.arguments.items() if name not in ("group", "async_op")}
    name = verb.__name__
    if "root" in arguments and arguments["root"] is None and name == "split":
        split.split(**{**arguments, "out": None}, group=group)
        reason = "every rank holds x: each takes its own part"
        return Explanation(
            name, "none", ("no message",), 0, 0, "view" if arguments["out"] is None else "out", (reason,)
        )
    team = world.current().context.team_of(group)
    op = make(**arguments)
    op.name = f"explain of {name}"
    agreed = run.plan(op, team)
    op.inline = agreed.inline
    found = op.describe(team, agreed)
    reasons = [select.reason(op.route, team, kinds) for kinds in found.routes]
    reasons += [method.reason for method in found.methods if method.reason]
    if not found.routes:
        reasons.append("all tensors are small: packed, by MPI")
    elsewhere = any(method.shared or method.name == BEHIND_HEADERS.name for method in found.methods)
    may_be_inline = MemoryKind.CUDA not in agreed.kinds and op.route in ("auto", "mpi")
    if may_be_inline and not elsewhere and (name, found.result) != ("split", "structure"):
        reasons.append(f"the data of a rank are more than the {team.inline} bytes that travel behind a header")
    return Explanation(
        verb=name,
        route=" and ".join(dict.fromkeys(route.name for route in found.routes.values())) or "mpi",
        methods=tuple(dict.fromkeys(method.name for method in found.methods)),
        sent=found.sent,
        received=found.received,
        result=found.result,
        reasons=tuple(dict.fromkeys(reasons)),
    )
