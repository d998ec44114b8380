"""The driver: takes every collective call through the same steps, in the foreground or the background."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpcdist import activity, layout
from hpcdist.activity import callsite
from hpcdist.collectives import autograd
from hpcdist.comm.team import Team
from hpcdist.layout import Box
from hpcdist.process import abort
from hpcdist.routes.base import Method, Route
from hpcdist.runtime import background
from hpcdist.tensors import pool
from hpcdist.tensors.storage import written
from hpcdist.validation import collective
from hpcdist.validation.call import Call
from hpcdist.validation.collective import Agreed

__all__ = ["Description", "Executable", "Operation", "Parts", "Plannable", "plan", "run"]


class Executable(ABC):
    """One collective call.

    Attributes:
        name: name of the operation as the user called it.
        x, out: this rank's tensor or structure, and memory for its result if the caller passed it; unvalidated.
        grad: whether the result has a gradient for any rank, as agreed by all ranks.
        inline: whether the data of all ranks have come with the headers of this call.
        which: number of the result among the team's results with a gradient, as text.
    """

    name: str
    x: Any
    out: Any = None
    grad = inline = False
    which = ""

    @abstractmethod
    def execute(self, team: Team) -> Any:
        """Agree with the other ranks, move the data, and return the caller's result. Collective over the team."""

    def backward(self, team: Team, grad: Tensor) -> Tensor | None:
        """Compute the gradient of `x` from that of this rank's result: the transpose of the call. Collective."""
        raise NotImplementedError


class Description(NamedTuple):
    """The actions of a planned operation on this rank: see :class:`hpcdist.runtime.plan.Plan`.

    Attributes:
        routes: route of the data, for the kinds of memory of all ranks for which it was selected. Structures may have
            several, or none if all their tensors are small. The same on all ranks.
        methods: how data move; the same on all ranks.
    """

    routes: Mapping[tuple[int, ...], Route]
    methods: Sequence[Method]
    sent: int
    received: int | None
    result: str


class Operation(Executable):
    """One call of a verb: the part of each step that is specific to the operation.

    Attributes:
        route: name of the route that the caller passed; unvalidated.
    """

    route: Any = "auto"

    def execute(self, team: Team, exchanged: bool = False) -> Any:
        call, agreed = _agree(self, team, exchanged)
        with abort.InTransfer(self.name, team.size):
            self.plan(team, call, agreed)
            self.inline = agreed.inline
            if self.grad:
                self.which = autograd.count(team)
            result = self.forward(team)
        return self.finish(result)

    @abstractmethod
    def validate(self, team: Team) -> Call:
        """Validate the arguments on this rank alone. Errors are not raised, but recorded in the call."""

    @abstractmethod
    def plan(self, team: Team, call: Call, agreed: Agreed) -> None:
        """Choose route, counts and displacements from the agreed headers. Collective; raises the same on all ranks."""

    @abstractmethod
    def forward(self, team: Team) -> Any:
        """Move the data. Collective. An error here aborts the job, except for a RankError, which all ranks raise."""

    @abstractmethod
    def describe(self, team: Team, agreed: Agreed) -> Description:
        """Describe what forward() would do. Collective, after plan()."""

    def finish(self, result: Any) -> Any:
        """Convert what forward returned to the caller's result, on this rank alone."""
        return result


class Parts(NamedTuple):
    """The data that move in a planned operation: the parts of one tensor, in rank order.

    Attributes:
        route: route that moves them.
        shape, dtype, device: those of the whole tensor; the device is that of this rank's parts.
        sources, dests: box that each rank sends, and box that it receives; None for a rank that sends or receives none.
    """

    route: Route
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    sources: Sequence[Box | None]
    dests: Sequence[Box | None]

    def overlaps(self, rank: int) -> layout.Overlaps:
        """Return the boxes that a rank sends to each rank and receives from it."""
        nothing = Box((0,) * len(self.shape), (0,) * len(self.shape))
        sources, dests = ([box or nothing for box in boxes] for boxes in (self.sources, self.dests))
        return layout.overlaps(sources, dests, rank)

    def traffic(self, rank: int) -> tuple[int, int]:
        """Return the bytes that a rank sends to, and receives from, other ranks."""
        moves = self.overlaps(rank)
        sent, received = (sum(box.size() for peer, box in of if peer != rank) for of in (moves.sends, moves.recvs))
        return self.dtype.itemsize * sent, self.dtype.itemsize * received


class Plannable(Operation):
    """An operation on tensors that can be kept after its plan, to be executed with other ones."""

    @abstractmethod
    def parts(self, team: Team) -> Parts:
        """Return the parts that move, after plan()."""

    @abstractmethod
    def method(self, team: Team) -> Method:
        """Return how forward() would move the data. Collective, after plan()."""

    def describe(self, team: Team, agreed: Agreed) -> Description:
        parts, method = self.parts(team), self.method(team)
        box = parts.dests[team.rank]
        if box is None:
            result = "none"
        elif self.out is not None:
            result = "out"
        elif method.shared:
            result = "shared"
        else:
            result = "pool" if pool.holds(box.size() * parts.dtype.itemsize, parts.device) else "new"
        return Description({agreed.kinds: parts.route}, [method], *parts.traffic(team.rank), result)

    @abstractmethod
    def bind(self, x: Tensor | None, out: Tensor | None, agreed: Agreed) -> None:
        """Take other tensors of the same shape, dtype and device, validated and detached, for forward()."""


def run(op: Executable, team: Team, async_op: bool = False) -> Any:
    """Run an operation in the foreground, or in the background of the team. Collective over the team.

    Returns:
        The result; with `async_op`, a Handle for it.
    """
    result: Any
    if async_op:
        result = background.submit(team, op.name, partial(_execute_later, op), partial(_attached, team))
        team.calls[True] += 1
    else:
        team.calls[False] += 1
        text = callsite.where(op.name, frames=2)  # of where() and run(); their caller may be the outermost frame
        with activity.InCall(op.name, team, text=text), abort.InStep(op.name, team.size):
            result = op.execute(team)
            if op.grad:
                result = autograd.attach(op, team, result)
    return result if op.out is None else written(op.out, result)


def plan(op: Operation, team: Team) -> Agreed:
    """Run an operation up to its plan, to be executed later. Collective over the team."""
    with activity.InCall(op.name, team), abort.InStep(op.name, team.size):
        call, agreed = _agree(op, team)
        with abort.InTransfer(op.name, team.size):
            op.plan(team, call, agreed)
    return agreed


def _agree(op: Operation, team: Team, exchanged: bool = False) -> tuple[Call, Agreed]:
    call = op.validate(team)
    agreed = collective.exchange(team, call, exchanged)
    op.grad = agreed.grad
    return call, agreed


def _execute_later(op: Executable, team: Team) -> tuple[Any, Executable | None]:
    """(the result, the operation if it is needed for a gradient): else nothing of it outlives the call."""
    result = op.execute(team)
    return result, op if op.grad else None


def _attached(team: Team, executed: tuple[Any, Executable | None]) -> Any:
    """Attach the result to the graph, in the thread that waits for it, so that all ranks do so in the same order."""
    result, op = executed
    return result if op is None else autograd.attach(op, team, result)
