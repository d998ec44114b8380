"""Gradients through a transfer: they go back the way the data came."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hpcdist import abort, agree
from hpcdist.call import Call

if TYPE_CHECKING:
    from hpcdist.team import Team
from hpcdist.watch import record

__all__ = ["Deferred", "carried", "skip"]


def carried(
    verb: str,
    team: Team,
    needed: bool,
    x: Tensor | None,
    forward: Callable[[], Tensor],
    backward: Callable[[Tensor], Tensor | None],
) -> Tensor | Deferred:
    """The result of `forward`; if a gradient is needed on any rank, one that carries it back to `x` on every rank.

    Args:
        verb: whose result it is.
        team: the ranks that take part. A gradient that flows back to one rank passes all of them, so that every rank
            of the team has to call backward on its result.
        needed: on some rank a gradient is to flow, as all have agreed; else no graph is kept.
        x: this rank's tensor, if it brought one.
        forward: the transfer.
        backward: its transpose: makes of the gradient of this rank's result that of `x`. Collective.
    """
    if not needed:
        return forward()
    front = team.front  # a backward pass runs in its own time, where nothing else is sent behind its back
    anchor = x if x is not None and x.requires_grad else torch.empty(0, requires_grad=True, device="cpu")
    # Which of the team's results it is: ranks that go back through different ones are told so.
    which = f"number {skip(team)}" + (" of those in the background" if team is not front else "")

    def back(grad: Tensor) -> Tensor | None:
        what = f"the backward pass of {verb}"
        with record.InCall(what, front), abort.InStep(what, front.size):
            agree.exchange(front, Call(what, options=(("the result", which),)))
            with abort.Transfer(verb, front.size):
                found = backward(grad.resolve_conj().resolve_neg().contiguous())
        return found.view(anchor.shape) if anchor is x and found is not None else None

    if team is not front:
        with torch.no_grad():
            return Deferred(anchor, forward(), back)
    return _attach(anchor, forward, back)


def skip(team: Team) -> int:
    """Count a result that carries a gradient on some rank, though it may not here; its number among the team's."""
    number: int = team.memo.get("results", 0) + 1
    team.memo["results"] = number
    return number


class Deferred:
    """A result of the background, whose place in the graph is made when it is waited for.

    torch goes back through a graph in the opposite order in which its nodes were made, and counts them thread by
    thread. Made by the thread that waits, they are in the same order on all ranks.
    """

    def __init__(self, anchor: Tensor, result: Tensor, back: Callable[[Tensor], Tensor | None]) -> None:
        self._anchor, self._result, self._back = anchor, result, back

    def attach(self) -> Tensor:
        return _attach(self._anchor, lambda: self._result, self._back)


def _attach(anchor: Tensor, forward: Callable[[], Tensor], back: Callable[[Tensor], Tensor | None]) -> Tensor:
    with torch.enable_grad():
        result: Tensor = _Carried.apply(anchor, forward, back)  # type: ignore[no-untyped-call]
    return result


class _Carried(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, forward: Callable[[], Tensor], back: Callable[[Tensor], Any]) -> Tensor:
        ctx.back = back
        return forward()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        return ctx.back(grad), None, None
