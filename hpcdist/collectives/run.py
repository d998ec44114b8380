"""The driver: takes every collective call through the same steps, in the foreground or the background."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from hpcdist import activity
from hpcdist.collectives import autograd
from hpcdist.comm.team import HEADER, Team
from hpcdist.process import abort
from hpcdist.runtime.background import background
from hpcdist.tensors.eager import recorded
from hpcdist.tensors.storage import is_plain, written
from hpcdist.validation import collective
from hpcdist.validation.call import Call
from hpcdist.validation.collective import Agreed

__all__ = ["Operation", "Repeat", "key_of", "plan", "repeat", "repeatable", "run"]

_REPEATS = 256  # small calls that a team remembers


class Operation(ABC):
    """One collective call: the part of each step that is specific to the operation.

    Attributes:
        name: name of the operation as the user called it.
        x, out: this rank's tensor or structure, and memory for its result if the caller passed it; unvalidated.
        route: name of the route that the caller passed; unvalidated.
        grad: whether the result has a gradient for any rank, as agreed by all ranks.
        inline: whether the data of all ranks have come with the headers of this call.
        which: number of the result among the team's results with a gradient, as text.
    """

    name: str
    x: Any
    out: Any = None
    route: Any = "auto"
    grad = inline = False
    which = ""

    @abstractmethod
    def validate(self, team: Team) -> Call:
        """Validate the arguments on this rank alone. Errors are not raised, but recorded in the call."""

    @abstractmethod
    def plan(self, team: Team, call: Call, agreed: Agreed) -> None:
        """Choose route, counts and displacements from the agreed headers. Collective; raises the same on all ranks."""

    @abstractmethod
    def forward(self, team: Team) -> Any:
        """Move the data. Collective. An error here aborts the job, except for a RankError, which all ranks raise."""

    def backward(self, team: Team, grad: Tensor) -> Tensor | None:
        """Compute the gradient of `x` from that of this rank's result: the transpose of forward. Collective."""
        raise NotImplementedError

    def keep(self, team: Team) -> int | None:
        """Drop the tensors of this call, so that it can be kept for again().

        Returns:
            How many bytes behind this rank's header are the same in every such call; after them comes `x`. None if
            the call cannot be repeated so.
        """
        raise NotImplementedError

    def again(self, team: Team) -> Any:
        """Return the result of a small call that is repeated: the data of all ranks have come with the headers."""
        raise NotImplementedError

    def finish(self, result: Any) -> Any:
        """Convert what forward returned to the caller's result, on this rank alone."""
        return result


class Repeat(NamedTuple):
    """A small call that a team has made: most programs make the same ones again and again.

    Attributes:
        op: the operation, planned.
        header: this rank's header, and the bytes after it that stay the same.
        headers: headers of all ranks, which agree.
        calls: asynchronous calls that the team had made.
    """

    op: Operation
    header: bytes
    headers: list[tuple[bytes]]
    calls: int


def key_of(name: str, x: Tensor | None, dim: Any, root: Any, route: Any, rule: Any = None) -> tuple[Any, ...] | None:
    """Return the key by which to find a call with these arguments again; None where it cannot be repeated."""
    if type(dim) is int and type(root) is int and type(route) is str and (rule is None or type(rule) is str):
        if recorded() is not None:
            return None
        if x is None:
            return name, dim, root, route, rule
        if is_plain(x):
            return name, dim, root, route, rule, x.dtype, x.shape
    return None


def repeatable(team: Team, key: tuple[Any, ...]) -> Repeat | None:
    """Return the call with these arguments that the team has made before, if its header would be the same."""
    known: Repeat | None = team.repeats.get(key)
    return None if known is None or known.calls != team.calls[True] else known


def repeat(known: Repeat, team: Team, x: Tensor | None, again: Callable[[], Operation]) -> Any:
    """Make a call again: what it computes from its arguments alone is known. Collective over the team.

    Args:
        again: makes the operation, if another rank's call is not the same as before.
    """
    op = known.op
    team.calls[False] += 1
    with activity.InCall(op.name, team), abort.InStep(op.name, team.size):
        if collective.repeat(team, known.header, x) == known.headers:
            return op.again(team)
        return _attach(op := again(), team, _execute(op, team, exchanged=True))


def run(op: Operation, team: Team, async_op: bool = False, key: tuple[Any, ...] | None = None) -> Any:
    """Run an operation in the foreground, or in the background of the team. Collective over the team.

    Args:
        key: arguments by which to find the call when it is repeated; None if it cannot be.

    Returns:
        The result; with `async_op`, a Handle for it.
    """
    result: Any
    if async_op:
        result = background(team).submit(op.name, partial(_execute_later, op), partial(_attached, team))
        team.calls[True] += 1
    else:
        team.calls[False] += 1
        with activity.InCall(op.name, team), abort.InStep(op.name, team.size):
            result = _attach(op, team, _execute(op, team))
        if key is not None and op.inline and not op.grad:
            _remember(op, team, key)
    return result if op.out is None else written(op.out, result)


def plan(op: Operation, team: Team) -> None:
    """Run an operation up to its plan, to be executed later. Collective over the team."""
    with activity.InCall(op.name, team), abort.InStep(op.name, team.size):
        _execute(op, team, planned_only=True)


def _remember(op: Operation, team: Team, key: tuple[Any, ...]) -> None:
    buffers = team.headers
    assert buffers is not None
    if len(team.repeats) >= _REPEATS:
        team.repeats.clear()
    same = op.keep(team)
    if same is not None:
        team.repeats[key] = Repeat(op, bytes(buffers.own[: HEADER + same]), buffers.last, team.calls[True])


def _attach(op: Operation, team: Team, result: Any) -> Any:
    return autograd.attach(op, team, result) if op.grad else result


def _execute(op: Operation, team: Team, planned_only: bool = False, exchanged: bool = False) -> Any:
    call = op.validate(team)
    agreed = collective.exchange(team, call, exchanged)
    op.grad = agreed.grad
    with abort.InTransfer(op.name, team.size):
        op.plan(team, call, agreed)
        if planned_only:
            return None
        op.inline = agreed.inline
        if op.grad:
            op.which = autograd.count(team)
        result = op.forward(team)
    return op.finish(result)


def _execute_later(op: Operation, team: Team) -> tuple[Any, Operation | None]:
    """(the result, the operation if it is needed for a gradient): else nothing of it outlives the call."""
    result = _execute(op, team)
    return result, op if op.grad else None


def _attached(team: Team, executed: tuple[Any, Operation | None]) -> Any:
    """Attach the result to the graph, in the thread that waits for it, so that all ranks do so in the same order."""
    result, op = executed
    return result if op is None else autograd.attach(op, team, result)
