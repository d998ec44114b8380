"""Gradients through an operation: its backward pass moves them against the direction of the data."""

from __future__ import annotations

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
    needs_grad = isinstance(op.x, Tensor) and op.x.requires_grad
    graph_input = op.x if needs_grad else torch.empty(0, requires_grad=True, device="cpu")
    with torch.enable_grad():
        # In a list: torch would take the result itself for an input.
        attached: Tensor = _Attach.apply(graph_input, [result], op, team, needs_grad)  # type: ignore[no-untyped-call]
    return attached


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None, None]:
    # torch's once_differentiable would silently give zeros to autograd.grad(inputs=...).
    create_graph = torch.is_grad_enabled() and grad.requires_grad
    op, team, needs_grad = ctx.call
    with torch.no_grad():
        found = _transposed(op, team, grad, create_graph)
    return (None if found is None or not needs_grad else found.view(op.x.shape)), None, None, None, None


eager.not_compiled([_backward])  # torch also calls it inside a compiled function that calls backward()


def _transposed(op: Any, team: Team, grad: Tensor, create_graph: bool) -> Tensor | None:
    what = f"the backward pass of {op.name}"
    if team.freed:
        raise HpcdistError("HD112", f"{what}: the world of this result has ended, or its group was freed")
    batched = _functorch.is_batchedtensor(grad) or _functorch.is_legacy_batchedtensor(grad)
    problem = _NO_BATCH if batched else _NO_DOUBLE if create_graph else None
    options = (("the result", op.which),)  # compared, since ranks might pass through different results
    with activity.InCall(what, team, tensors=op.x, route=op.unrouted), abort.InStep(what, team.size):
        collective.exchange(team, Call(what, options=options, problem=problem))
        with abort.InTransfer(op.name, team.size):
            found: Tensor | None = op.backward(team, grad.resolve_conj().resolve_neg().contiguous())
    return found


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph_input: Tensor, result: list[Tensor], *call: Any) -> Tensor:
        ctx.call = call
        return result[0]

    backward = staticmethod(_backward)
