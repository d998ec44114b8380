"""Gradients through an operation: its backward pass moves them against the direction of the data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch

from hpcdist import activity
from hpcdist.comm.team import Team
from hpcdist.errors import HpcdistError, coded
from hpcdist.process import abort
from hpcdist.tensors import eager
from hpcdist.validation import collective
from hpcdist.validation.call import Call

_NO_DOUBLE = "transfers between ranks cannot be differentiated twice (create_graph=True)"
_NO_BATCH = coded(
    "HD219", "batches of gradients (is_grads_batched, vectorize, vmap) cannot be sent: pass one at a time"
)


def count(team: Team) -> str:
    """Count a result of the team that has a gradient on any rank; return its number as text."""
    team.results += 1
    return f"number {team.results}" + ("" if team is team.foreground else " of those in the background")


def attach(op: Any, team: Team, result: Tensor) -> Tensor:
    """Attach the result to the graph, so that its gradient flows back to ``op.x`` on every rank.

    The backward pass is collective: every rank of the team must call backward on its result. torch traverses a graph
    in the reverse order of the creation of its nodes, which it numbers per thread.

    Args:
        op: see :class:`hpcdist.collectives.run.Operation`.
        team: the foreground team of the ranks that took part; backward passes never run in the background.
    """
    backward = _Backward(op, team)
    with torch.enable_grad():
        attached: Tensor = _Attach.apply(backward.graph_input, lambda: result, backward)  # type: ignore[no-untyped-call]
    return attached


class _Backward:
    """The backward pass of a result.

    Attributes:
        graph_input: tensor to which the gradient flows: ``op.x``, or an empty one if that needs no gradient.
    """

    def __init__(self, op: Any, team: Team) -> None:
        self._op, self._team = op, team
        self._needs_grad = isinstance(op.x, Tensor) and op.x.requires_grad
        self.graph_input = op.x if self._needs_grad else torch.empty(0, requires_grad=True, device="cpu")

    def __call__(self, grad: Tensor, create_graph: bool) -> Tensor | None:
        op, team = self._op, self._team
        what = f"the backward pass of {op.name}"
        if team.freed:
            raise HpcdistError("HD112", f"{what}: the world of this result has ended, or its group was freed")
        batched = _functorch.is_batchedtensor(grad) or _functorch.is_legacy_batchedtensor(grad)
        problem = _NO_BATCH if batched else _NO_DOUBLE if create_graph else None
        options = (("the result", op.which),)  # compared, since ranks might pass through different results
        with activity.InCall(what, team, tensors=op), abort.InStep(what, team.size):
            collective.exchange(team, Call(what, options=options, problem=problem))
            with abort.InTransfer(op.name, team.size):
                found: Tensor | None = op.backward(team, grad.resolve_conj().resolve_neg().contiguous())
        return found.view(self.graph_input.shape) if self._needs_grad and found is not None else None


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
    # torch's once_differentiable would silently give zeros to autograd.grad(inputs=...).
    create_graph = torch.is_grad_enabled() and grad.requires_grad
    with torch.no_grad():
        return ctx.run_backward(grad, create_graph), None, None


eager.not_compiled([_backward])  # torch also calls it inside a compiled function that calls backward()


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph_input: Tensor, result: Callable[[], Tensor], backward: _Backward) -> Tensor:
        ctx.run_backward = backward
        return result()

    backward = staticmethod(_backward)
