"""The driver: takes every collective call through the same steps, in the foreground or the background."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from hpcdist import activity, torch_names
from hpcdist.activity import callsite
from hpcdist.collectives import results
from hpcdist.collectives.kept import Kept, Movement
from hpcdist.comm.team import Team
from hpcdist.errors import HpcdistError, coded
from hpcdist.process import abort
from hpcdist.routes import select
from hpcdist.routes.route import Alltoall, Route, Step, Vector
from hpcdist.runtime import background
from hpcdist.tensors.accelerator import MemoryKind
from hpcdist.tensors.eager import recorded
from hpcdist.tensors.storage import copyable, is_plain, written
from hpcdist.validation import collective
from hpcdist.validation.collective import Agreed, Call
from hpcdist.validation.local import LIKE, ArgumentError, call_of, not_a_tensor

T = TypeVar("T")


class Operation(ABC):
    """One collective call: the part of each step that is specific to the operation.

    Attributes:
        name: name of the operation as the user called it.
        x, out: this rank's tensor or structure, and memory for its result if the caller passed it; unvalidated.
        route: name of the route that the caller passed; unvalidated.
        grad: whether the result has a gradient for any rank, as agreed by all ranks.
        which: number of the result among the team's results with a gradient, as text.
        kept: the call as its team keeps it; None if it is planned for every call.
        own: attributes that belong to one call, and are not kept for the next one like it.
        finish: converts what forward() returned to the caller's result, on this rank alone.
    """

    name: str
    x: Any
    out: Any
    route: Any
    grad = False
    which = ""
    kept: Kept | None = None
    own: tuple[str, ...] = ("x", "out", "sent", "dest", "kept")
    finish: Callable[[Any], Any] | None = None

    def execute(self, team: Team) -> Any:
        """Agree with the other ranks, move the data, and return the caller's result. Collective over the team."""
        key, exchanged = self.key(), False
        known = None if key is None else team.repeats.get(key)
        if known is not None and known.calls == team.calls[team.foreground is team]:
            if known.exchange(team, self.x):
                result = known.take(self.out) if known.inline else known.again(self, team)
                return result if known.finish is None else known.finish(result)
            exchanged = True  # another rank's call is not the same as before
        call = call_of(self.name, self.validate, team)
        agreed = collective.exchange(team, call, exchanged)
        self.grad = agreed.grad
        try:
            self.plan(team, call, agreed)
            if self.grad:
                team.results += 1
                kind = "" if team is team.foreground else " of those in the background"
                self.which = f"number {team.results}{kind}"
            result = self.forward(team)
        except BaseException as error:  # as in run()
            abort.InTransfer.check(self.name, team.size, error)
            raise
        if key is not None and self.kept is not None and not self.grad:
            while len(team.repeats) >= max(1, min(MOST, _HEADERS // team.size)):
                del team.repeats[next(iter(team.repeats))]  # the oldest
            team.repeats[key] = self.kept
            if not self.kept.inline:
                self.kept.keep(self)
        return result if self.finish is None or self.grad else self.finish(result)

    def key(self) -> Hashable:
        """Return the key by which to find a call with these arguments again; None if it cannot be repeated."""
        return None

    @abstractmethod
    def validate(self, team: Team, call: Call) -> None:
        """Validate the arguments on this rank alone, and describe them in the call. Errors do not leave this rank."""

    @abstractmethod
    def plan(self, team: Team, call: Call, agreed: Agreed) -> None:
        """Compute counts and boxes from the agreed headers. Collective; raises the same on all ranks."""

    @abstractmethod
    def forward(self, team: Team) -> Any:
        """Move the data. Collective. An error here aborts the job, except for a RankError, which all ranks raise."""

    def backward(self, team: Team, grad: Tensor) -> Tensor | None:
        """Compute the gradient of `x` from that of this rank's result: the transpose of the call. Collective."""
        raise NotImplementedError


class Plannable(Operation):
    """An operation on one tensor, which can be kept after its plan, to be executed with other ones.

    Attributes:
        shared: whether the ranks of a node are to share the result.
        number: of the plan that is executed, among those of the team; 0 in plan(); None without a plan.
        like: facts of the tensors for which the plan was made: dtype, shape, device.
        messages: the operations of the route that move the data, one after the other, and their messages.
        transfers: name of the route, and what carries out each of these; None before it is chosen.
        sizes: bytes of the result of each rank.
        sent, dest, agreed, parts: tensor that this rank sends, and memory for its result if there is some, validated
            and detached; headers of all ranks; what moves.
    """

    shared = False
    number: int | None = None
    like: tuple[Any, ...] | None = None
    transfers: tuple[str, list[Callable[..., None]]] | None = None
    messages: list[tuple[str, Vector | Alltoall]]
    sizes: Sequence[int]
    sent: Tensor | None
    dest: Tensor | None
    agreed: Agreed
    parts: Movement

    @abstractmethod
    def check(self, team: Team, call: Call) -> None:
        """Check the arguments of a call, as validate() does."""

    def validate(self, team: Team, call: Call) -> None:
        if self.number is None:
            self.check(team, call)
            return
        x = self.x
        if not (x is None or isinstance(x, Tensor)):
            raise ArgumentError("HD201", not_a_tensor(x, "x"))
        if x is not None and self.like is not None and (got := (x.dtype, tuple(x.shape), x.device)) != self.like:
            text = f"x is {LIKE.format(*got)}, but the plan was made for {LIKE.format(*self.like)}"
            raise ArgumentError("HD303", text)
        self.check(team, call)
        call.options = (*call.options, ("the plan", self.number))

    @abstractmethod
    def arguments(self) -> Hashable:
        """Return the arguments of the call besides `x` and `out`; None if they may change in place, or equal others."""

    @abstractmethod
    def move(self, team: Team) -> Tensor | None:
        """Move the data to this rank's result and return it, None if it receives none. Collective."""

    def in_window(self, team: Team) -> Tensor | None:
        """Move the data to a result that the ranks of a node share; None on all ranks if it cannot be. Collective."""
        raise NotImplementedError

    def key(self) -> Hashable:
        x, out, given = self.x, self.out, self.number or self.arguments()
        # Whether other routes work may change, and a tracer's tensors may have no memory to ask for.
        if (
            given is None
            or self.shared
            or type(self.route) is not str
            or self.route not in _KEPT
            or recorded() is not None
        ):
            return None
        if type(x) is list:
            return (given, *[(part.dtype, part.shape) for part in x]) if all(map(is_plain, x)) else None
        if x is not None and not is_plain(x, gpu=True):
            return None
        if out is None:
            return given if x is None else (given, x.dtype, x.shape, x.is_cpu or x.device)
        if not (is_plain(out, gpu=True) and out.dim() > 0 and not out.is_inference()):
            return None
        own = x is not None and (x.dtype, x.shape, x.is_cpu or x.device)
        return given, own, out.dtype, out.shape, out.is_cpu or out.device

    def bind(self, team: Team, call: Call, agreed: Agreed, parts: Movement, prefix: int = 0) -> None:
        """Take the tensors that forward() moves, and what of them moves, at the end of plan(); `prefix`: see Kept.

        Raises:
            RankError: on every rank, if the `out` of one does not match its result.
        """
        if agreed.outs:
            extents = [(box.shape or (1,))[call.dim_arg] if box else 0 for box in parts.dests]
            collective.check_out(self.name, agreed.outs, extents, agreed.grad)
        self.sent, self.dest, self.agreed, self.parts = call.x, call.out, agreed, parts
        self.sizes = [0 if box is None else parts.dtype.itemsize * prod(box.shape) for box in parts.dests]
        behind_headers = agreed.inline and MemoryKind.GPU not in agreed.kinds and self.route in ("auto", "mpi")
        inline = behind_headers and all(  # whether the data of all ranks arrived there
            box is None or nbytes == prefix + parts.dtype.itemsize * prod(box.shape)
            for nbytes, box in zip(agreed.inlines, parts.sources, strict=True)
        )
        behind = agreed.inlines[team.rank]
        self.kept = Kept(team, call.x, behind, parts if inline else None, prefix)

    def chosen(self, team: Team) -> Route:
        """Return the route of the data. Collective, after plan(); raises the same on all ranks."""
        return select.agreed(self.name, self.route, team, self.agreed.kinds)

    def carry(self, team: Team, send: Tensor | None, recv: Tensor | None, *meanwhile: Step, step: int = 0) -> None:
        """Carry out one of `messages` by the route, which a repeated call does not choose again. Collective."""
        if self.transfers is None:
            route = self.chosen(team)
            self.transfers = route.name, [route.prepare(team, *message) for message in self.messages]
        route_name, transfers = self.transfers
        activity.took(route_name)
        transfers[step](send, recv, *meanwhile)

    def allocate(self, team: Team, make: Callable[[], T]) -> T:
        """Call `make`, which allocates this rank's result, and copies of its data to send: see results.allocate()."""
        return results.allocate(self.name, team, self.sizes, make, self.agreed)

    def forward(self, team: Team) -> Tensor | None:
        result = None
        if self.shared:
            activity.took("window")
            result = self.in_window(team)
        if result is None and self.kept is not None and self.kept.inline:
            dest = self.dest
            if dest is None or dest.is_contiguous():
                result = self.kept.take(dest)
            elif (packed := self.kept.take(None)) is not None:
                result = copyable(dest).copy_(copyable(packed))
        elif result is None:
            result = self.move(team)
        if result is not None:
            return result if self.out is None else self.out
        if self.grad and self.sent is not None:
            return torch.empty(0, dtype=self.sent.dtype, device=self.sent.device)
        return None


_NO_DOUBLE = "transfers between ranks cannot be differentiated twice (create_graph=True)"
_NO_BATCH = coded(
    "HD219", "batches of gradients (is_grads_batched, vectorize, vmap) cannot be sent: pass one at a time"
)
_UNROUTED = "headers"  # the route that a trace shows for a call without one
_KEPT = ("auto", "mpi", "nccl")  # routes whose calls a team keeps
MOST = 256  # calls that a team keeps
_HEADERS = 2**16  # headers that it keeps with them: fewer calls in a large team


def run(op: Operation, team: Team, async_op: bool = False) -> Any:
    """Run an operation in the foreground, or in the background of the team. Collective over the team.

    Returns:
        The result; with `async_op`, a Handle for it.
    """
    result: Any
    if async_op:
        result = background.submit(team, op.name, partial(_execute_later, op), partial(_attached, team), tensors=op.x)
        team.calls[True] += 1
    else:
        team.calls[False] += 1
        text = callsite.where(op.name, frames=2)  # of where() and run(); their caller may be the outermost frame
        with activity.InCall(op.name, team, text=text, tensors=op.x, route=_UNROUTED):
            try:
                result = op.execute(team)
                if op.grad:
                    result = _attach(op, team, result)
            except BaseException as error:  # a context would cost small calls time
                abort.InStep.check(op.name, team.size, error)
                raise
    return result if op.out is None else written(op.out, result)


def _execute_later(op: Operation, team: Team) -> tuple[Any, Operation | None]:
    """(the result, the operation if it is needed for a gradient): else nothing of it outlives the call."""
    activity.took(_UNROUTED)
    result = op.execute(team)
    return result, op if op.grad else None


def _attached(team: Team, executed: tuple[Any, Operation | None]) -> Any:
    """Attach the result to the graph, in the thread that waits for it, so that all ranks do so in the same order."""
    result, op = executed
    return result if op is None else _attach(op, team, result)


def _attach(op: Operation, team: Team, result: Tensor) -> Any:
    """Attach the result to the graph, so that its gradient flows back to ``op.x`` on every rank.

    The backward pass is collective: every rank of the team must call backward on its result. torch traverses a graph
    in the reverse order of the creation of its nodes, which it numbers per thread.

    Args:
        op: see :class:`Operation`.
        team: the foreground team of the ranks that took part; backward passes never run in the background.
    """
    needs_grad = isinstance(op.x, Tensor) and op.x.requires_grad
    graph_input = op.x if needs_grad else torch.empty(0, requires_grad=True, device="cpu")
    with torch.enable_grad():
        # In a list: torch would take the result itself for an input.
        attached: Tensor = _Attach.apply(graph_input, [result], op, team, needs_grad)  # type: ignore[no-untyped-call]
        return attached if op.finish is None else op.finish(attached)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None, None]:
    # torch's once_differentiable would silently give zeros to autograd.grad(inputs=...).
    create_graph = torch.is_grad_enabled() and grad.requires_grad
    op, team, needs_grad = ctx.call
    with torch.no_grad():
        found = _transposed(op, team, grad, create_graph)
    return (None if found is None or not needs_grad else found.view(op.x.shape)), None, None, None, None


torch_names.not_compiled([_backward])  # torch also calls it inside a compiled function that calls backward()


def _transposed(op: Operation, team: Team, grad: Tensor, create_graph: bool) -> Tensor | None:
    what = f"the backward pass of {op.name}"
    if team.freed:
        raise HpcdistError("HD112", f"{what}: the world of this result has ended, or its group was freed")
    batched = torch_names.is_batched(grad) or torch_names.is_legacy_batched(grad)
    problem = _NO_BATCH if batched else _NO_DOUBLE if create_graph else None
    options = (("the result", op.which),)  # compared, since ranks might pass through different results
    with activity.InCall(what, team, tensors=op.x, route=_UNROUTED), abort.InStep(what, team.size):
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
