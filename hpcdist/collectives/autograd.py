"""Gradients through an operation: they go back the way the data came."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C import _functorch

from hpcdist import activity
from hpcdist.comm.team import Team
from hpcdist.process import abort
from hpcdist.tensors import eager
from hpcdist.validation import collective
from hpcdist.validation.call import Call

__all__ = ["attach", "count"]

_Back = Callable[[Tensor, bool], Tensor | None]  # of a gradient, and whether it is to be differentiated too
_AGAIN = "a gradient of a gradient (create_graph=True) goes through no transfer between ranks"


class Differentiable(Protocol):
    """What an operation must have for a gradient to flow back through it; see :class:`hpcdist.collectives.run`."""

    name: str
    x: Any
    which: str

    def backward(self, team: Team, grad: Tensor) -> Tensor | None: ...


def count(team: Team) -> str:
    """Count one more result of the team that carries a gradient on some rank, if not on this one; which it is."""
    team.results += 1
    return f"number {team.results}" + ("" if team is team.foreground else " of those in the background")


def attach(op: Differentiable, team: Team, result: Tensor) -> Tensor:
    """The result as one that carries its gradient back to ``op.x`` on every rank.

    A gradient that flows back to one rank passes all of them, so that every rank of the team has to call backward on
    its result. torch goes back through a graph in the opposite order in which its nodes were made, and counts them
    thread by thread.

    Args:
        team: the ranks that took part, in the foreground: a backward pass is not done in the background.
    """
    given = isinstance(op.x, Tensor) and op.x.requires_grad
    graph_input = op.x if given else torch.empty(0, requires_grad=True, device="cpu")

    def back(grad: Tensor, again: bool, at_once: int = 1) -> Tensor | None:
        if _functorch.is_batchedtensor(grad) or _functorch.is_legacy_batchedtensor(grad):
            return _one_by_one(grad, again, back)
        what = f"the backward pass of {op.name}"
        options = (
            ("the result", op.which),
            ("gradients at once", at_once),
        )  # else ranks may go back through different ones
        with activity.InCall(what, team), abort.InStep(what, team.size):
            collective.exchange(team, Call(what, options=options, problem=_AGAIN if again else None))
            with abort.InTransfer(op.name, team.size):
                found = op.backward(team, grad.resolve_conj().resolve_neg().contiguous())
        return found.view(graph_input.shape) if given and found is not None else None

    with torch.enable_grad():
        attached: Tensor = _Carried.apply(graph_input, lambda: result, back)  # type: ignore[no-untyped-call]
    return attached


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


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
    # torch's once_differentiable would give zeros to autograd.grad(inputs=...): its error is not on the way to them.
    again = torch.is_grad_enabled() and grad.requires_grad
    with torch.no_grad():
        return ctx.back(grad, again), None, None


eager.not_compiled([_backward])  # torch calls it also within a compiled function that calls backward()


class _Carried(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph_input: Tensor, result: Callable[[], Tensor], back: _Back) -> Tensor:
        ctx.back = back
        return result()

    backward = staticmethod(_backward)
