"""The driver: every collective call goes through the same steps, and only here in the foreground or the background."""

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
    """One collective call: what is its own in each step.

    Attributes:
        name: the operation as the user called it.
        x, out: this rank's tensor or structure, and the memory for its result if the caller gave some; unchecked.
        route: the route as the caller named it; unchecked.
        grad: whether the ranks have agreed that a gradient flows back from the result, to any of them.
        which: which of the team's results with a gradient it is, in words.
    """

    name: str
    x: Any
    out: Any = None
    route: Any = "auto"
    grad = False
    which = ""

    @abstractmethod
    def validate(self, team: Team) -> Call:
        """Check the arguments on this rank alone. Nothing raises: what is wrong is written into the call."""

    @abstractmethod
    def plan(self, team: Team, call: Call, agreed: Agreed) -> None:
        """Fix route, counts and places, from what all ranks agree on. Collective; raises the same on all ranks."""

    @abstractmethod
    def forward(self, team: Team) -> Any:
        """Move the data. Collective. An error here ends the job, but for a RankError, which all ranks raise alike."""

    def backward(self, team: Team, grad: Tensor) -> Tensor | None:
        """The transpose of forward: of the gradient of this rank's result, that of `x`. Collective."""
        raise NotImplementedError

    def finish(self, result: Any) -> Any:
        """Make of what has arrived what the caller gets. Concerns this rank alone."""
        return result


def run(op: Operation, team: Team, async_op: bool = False) -> Any:
    """Run an operation now, or in the background of the team. Collective over the team.

    Returns:
        The result; with `async_op`, a Handle for it.
    """
    result: Any
    if async_op:
        result = background(team).submit(op.name, partial(_execute, op), partial(_attached, op, team))
        team.calls[True] += 1
    else:
        team.calls[False] += 1
        with activity.InCall(op.name, team), abort.InStep(op.name, team.size):
            result = _execute(op, team)
            if op.grad:
                result = autograd.attach(op, team, result)
    return result if op.out is None else written(op.out, result)


def plan(op: Operation, team: Team) -> None:
    """Take an operation as far as its plan, and keep it there. Collective over the team."""
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


def _attached(op: Operation, team: Team, result: Any) -> Any:
    """The result as a part of the graph. In the thread that waits for it, so that all ranks make it in one order."""
    return autograd.attach(op, team, result) if op.grad else result
