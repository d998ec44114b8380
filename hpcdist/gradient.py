"""Gradients through a transfer: they go back the way the data came."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C import _functorch

from hpcdist import abort, agree, eager
from hpcdist.call import Call
from hpcdist.watch import record

if TYPE_CHECKING:
    from hpcdist.team import Team

__all__ = ["Deferred", "carried", "skip"]

_Back = Callable[[Tensor, bool], Tensor | None]  # of a gradient, and whether it is to be differentiated too
_AGAIN = "a gradient of a gradient (create_graph=True) goes through no transfer between ranks"


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

    def back(grad: Tensor, again: bool, at_once: int = 1) -> Tensor | None:
        if _functorch.is_batchedtensor(grad) or _functorch.is_legacy_batchedtensor(grad):
            return _one_by_one(grad, again, back)
        what = f"the backward pass of {verb}"
        options = (("the result", which), ("gradients at once", at_once))
        with record.InCall(what, front), abort.InStep(what, front.size):
            agree.exchange(front, Call(what, options=options, problem=_AGAIN if again else None))
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


def _one_by_one(grads: Tensor, again: bool, back: Callable[[Tensor, bool, int], Tensor | None]) -> Tensor | None:
    """The gradients of a batch, which torch passes back at once: torch.vmap, and grad(..., is_grads_batched=True).

    The latter has batches of an older kind.
    """
    add: Callable[[Tensor, int, int], Tensor]
    if _functorch.is_batchedtensor(grads):
        level, add = _functorch.maybe_get_level(grads), _functorch._add_batch_dim
        each = _functorch.get_unwrapped(grads).unbind(_functorch.maybe_get_bdim(grads))
    else:
        level, add = torch._C._vmapmode_increment_nesting() - 1, torch._add_batch_dim
        torch._C._vmapmode_decrement_nesting()
        each = torch._remove_batch_dim(grads, level, 0, 0).unbind()
    found = [gradient for grad in each if (gradient := back(grad, again, len(each))) is not None]
    return add(torch.stack(found), 0, level) if found else None


class Deferred:
    """A result of the background, whose place in the graph is made when it is waited for.

    torch goes back through a graph in the opposite order in which its nodes were made, and counts them thread by
    thread. Made by the thread that waits, they are in the same order on all ranks.
    """

    def __init__(self, anchor: Tensor, result: Tensor, back: _Back) -> None:
        self._anchor, self._result, self._back = anchor, result, back

    def attach(self) -> Tensor:
        return _attach(self._anchor, lambda: self._result, self._back)


def _attach(anchor: Tensor, forward: Callable[[], Tensor], back: _Back) -> Tensor:
    with torch.enable_grad():
        result: Tensor = _Carried.apply(anchor, forward, back)  # type: ignore[no-untyped-call]
    return result


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
    # torch's once_differentiable would give zeros to autograd.grad(inputs=...): its error is not on the way to them.
    again = torch.is_grad_enabled() and grad.requires_grad
    with torch.no_grad():
        return ctx.back(grad, again), None, None


eager.not_compiled([_backward])  # torch calls it also within a compiled function that calls backward()


class _Carried(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, forward: Callable[[], Tensor], back: _Back) -> Tensor:
        ctx.back = back
        return forward()

    backward = staticmethod(_backward)
