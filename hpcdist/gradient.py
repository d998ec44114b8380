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

__all__ = ["carried"]


def carried(
    verb: str,
    team: Team,
    needed: bool,
    x: Tensor | None,
    forward: Callable[[], Tensor],
    backward: Callable[[Tensor], Tensor | None],
) -> Tensor:
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
    anchor = x if x is not None and x.requires_grad else torch.empty(0, requires_grad=True)

    def back(grad: Tensor) -> Tensor | None:
        agree.exchange(front, Call(f"the backward pass of {verb}"))
        with abort.Transfer(verb, front.size):
            found = backward(grad.resolve_conj().resolve_neg().contiguous())
        return found.view(anchor.shape) if anchor is x and found is not None else None

    with torch.enable_grad():
        result: Tensor = _Carried.apply(anchor, forward, back)  # type: ignore[no-untyped-call]
    return result


class _Carried(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, forward: Callable[[], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return forward()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        return ctx.back(grad), None, None
