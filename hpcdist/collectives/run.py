"""The driver: takes every collective call through the same steps, in the foreground or the background."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import Any

from torch import Tensor

from hpcdist import activity
from hpcdist.collectives import autograd
from hpcdist.comm.team import Team
from hpcdist.process import abort
from hpcdist.runtime.background import background
from hpcdist.tensors.storage import written
from hpcdist.validation import collective
from hpcdist.validation.call import Call
from hpcdist.validation.collective import Agreed

__all__ = ["Operation", "plan", "run"]


class Operation(ABC):
    """One collective call: the part of each step that is specific to the operation.

    Attributes:
        name: name of the operation as the user called it.
        x, out: this rank's tensor or structure, and memory for its result if the caller passed it; unvalidated.
        route: name of the route that the caller passed; unvalidated.
        grad: whether the result has a gradient for any rank, as agreed by all ranks.
        which: number of the result among the team's results with a gradient, as text.
    """

    name: str
    x: Any
    out: Any = None
    route: Any = "auto"
    grad = False
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

    def finish(self, result: Any) -> Any:
        """Convert what forward returned to the caller's result, on this rank alone."""
        return result


def run(op: Operation, team: Team, async_op: bool = False) -> Any:
    """Run an operation in the foreground, or in the background of the team. Collective over the team.

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
            result = _execute(op, team)
            if op.grad:
                result = autograd.attach(op, team, result)
    return result if op.out is None else written(op.out, result)


def plan(op: Operation, team: Team) -> None:
    """Run an operation up to its plan, to be executed later. Collective over the team."""
    with activity.InCall(op.name, team), abort.InStep(op.name, team.size):
        _execute(op, team, planned_only=True)


def _execute(op: Operation, team: Team, planned_only: bool = False) -> Any:
    call = op.validate(team)
    agreed = collective.exchange(team, call)
    op.grad = agreed.grad
    with abort.InTransfer(op.name, team.size):
        op.plan(team, call, agreed)
        if planned_only:
            return None
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
