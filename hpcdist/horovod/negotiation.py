"""Run named operations that ranks may submit in different orders, as Horovod does.

An operation waits on its rank until a call blocks there: :func:`synchronize`, a barrier, join(), any form without
"async". Then the ranks of its process set tell each other what they have submitted, and run what all of them have, in
the same order. A rank that takes part in such a round is blocked until its own operation is done. So if a round finds
nothing that all ranks have submitted, they would wait for each other for ever: all of them raise the same error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpcdist.collectives.join import concat
from hpcdist.errors import HpcdistError, RankError, coded, listed, refusal
from hpcdist.horovod.process_sets import ProcessSet, global_process_set, rank

__all__ = ["Average", "Operation", "Sum", "barrier", "join", "poll", "submit", "synchronize"]

Average, Sum = "Average", "Sum"
_REDUCE = {"Average": dist.ReduceOp.SUM, "Sum": dist.ReduceOp.SUM, "Min": dist.ReduceOp.MIN} | {
    "Max": dist.ReduceOp.MAX,
    "Product": dist.ReduceOp.PRODUCT,
}
_RAGGED = ("allgather", "alltoall")  # dim 0 may differ between ranks
_FUSED = 2**25  # bytes: smaller tensors are reduced in one message of about this size

Request = dict[str, Any]  # what a rank tells the others of an operation


@dataclass(eq=False)
class Operation:
    """An operation that this rank has submitted: the handle of its asynchronous form.

    Attributes:
        kind, name: such as "allreduce"; the ranks match operations by name.
        tensors: contiguous tensors: read, and by allreduce and broadcast written.
        arguments: what must agree: op, factors, root.
        splits: of alltoall, rows for each rank.
        finish: makes the result from the tensors that the operation returns.
        rows: rows of each tensor on each rank; known when it is done.
    """

    kind: str
    name: str
    tensors: list[Tensor]
    process_set: ProcessSet
    arguments: dict[str, Any]
    splits: list[int] | None
    finish: Callable[[list[Tensor]], Any]
    result: Any = None
    rows: list[list[int]] = field(default_factory=list)
    error: RankError | None = None
    done: bool = False
    polled: bool = False

    def request(self) -> Request:
        shapes = [list(x.shape) for x in self.tensors]
        kept = [shape[1:] for shape in shapes] if self.kind in _RAGGED else shapes
        dtypes = [f"{x.dtype} on {x.device.type}" for x in self.tensors]
        call = {"tensors": list(zip(dtypes, kept, strict=True)), **self.arguments}
        rows = [shape[0] for shape in shapes] if self.kind in _RAGGED else []
        return {"kind": self.kind, "call": call, "rows": rows, "splits": self.splits}


def submit(
    kind: str,
    tensors: Sequence[Tensor],
    name: str | None,
    process_set: ProcessSet,
    finish: Callable[[list[Tensor]], Any],
    splits: list[int] | None = None,
    arguments: dict[str, Any] | None = None,
) -> Operation:
    """Submit an operation; it moves nothing yet.

    Raises:
        ValueError: if this rank is not in the set, a tensor is not dense, or the name is that of one not done yet.
    """
    for x in tensors:
        if x.layout is not torch.strided:
            raise refusal(ValueError, "HD202", f"{kind}: a tensor of layout {x.layout}: use sparse_allreduce_async()")
        if not x.dim() and kind in (*_RAGGED, "reducescatter"):
            raise refusal(ValueError, "HD204", f"{kind}: a tensor without dimensions has no rows")
    if process_set.process_set_id is None:
        raise refusal(ValueError, "HD112", f"{kind}: {process_set} is not registered: call add_process_set()")
    if not process_set.included():
        raise refusal(ValueError, "HD114", f"{kind}: rank {rank()} is not in {process_set}")
    if name is None:
        process_set.submitted[kind] += 1
        name = f"{kind}.noname.{process_set.submitted[kind]}"
    if name in process_set.pending:
        raise refusal(ValueError, "HD301", f"{kind}: an operation with the name {name!r} has not been synchronized yet")
    operation = Operation(kind, name, list(tensors), process_set, arguments or {}, splits, finish)
    process_set.pending[name] = operation
    return operation


def synchronize(handle: Operation) -> Any:
    """Wait for an operation, and return its result: a tensor, or a list; of alltoall also the received splits.

    Collective over its process set: another rank may wait for another operation.

    Raises:
        RankError: on every rank that has submitted it, if the ranks' tensors or arguments differ; on every rank, if
            they wait for operations that others have not submitted.
    """
    while not handle.done:
        if handle.name not in handle.process_set.pending:
            raise HpcdistError(
                "HD112", f"{handle.kind} {handle.name!r}: its process set has been removed, or an error has ended it"
            )
        _round(handle.process_set, handle.name)
    if handle.error is not None:
        raise handle.error
    return handle.result


def poll(handle: Operation) -> bool:
    """Return whether an operation is done.

    The first poll only looks. Since nothing runs in the background, a later one does what :func:`synchronize` does.
    """
    if handle.polled and not handle.done:
        synchronize(handle)
    handle.polled = True
    return handle.done


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait for all ranks of a process set. Operations that all of them have submitted run first."""
    synchronize(submit("barrier", [], None, process_set, list))


def join(device: int = -1) -> int:
    """Wait until all ranks have called join(). Until then, this rank adds zeros to allreduce of the others.

    Args:
        device: not used; the zeros are where the others' tensors are.

    Returns:
        The rank that called it last, the same on every rank.

    Raises:
        RankError: on the ranks that call another operation meanwhile.
    """
    everyone = global_process_set
    while rank() not in everyone.joined or len(everyone.joined) < len(everyone.ranks or ()):
        _round(everyone, None)
    last = list(everyone.joined)[-1]
    everyone.joined.clear()
    everyone.submitted.clear()  # ranks that joined early have submitted fewer
    return last


def _round(process_set: ProcessSet, waits: str | None) -> None:
    """Run what all ranks have submitted.

    Args:
        waits: the operation that this rank waits for; None in join().
    """
    pending, members = process_set.pending, process_set.ranks or []
    mine = {"waits": waits, "requests": {name: one.request() for name, one in pending.items()}}
    told = [json.loads(text) for text in concat([json.dumps(mine)], group=process_set.group)]
    process_set.joined |= {member: None for member, one in zip(members, told, strict=True) if one["waits"] is None}
    names = dict.fromkeys(name for one in told for name in one["requests"])
    ready = [n for n in names if all(n in one["requests"] or one["waits"] is None for one in told)]
    if not ready and any(one["waits"] for one in told):
        pending.pop(waits or "", None)
        process_set.joined.clear()
        raise RankError(
            "synchronize", {r: _waiting(one["waits"], told, members) for r, one in zip(members, told, strict=True)}
        )
    _run_all(process_set, list(_agreed(process_set, ready, [one["requests"] for one in told])))


def _waiting(name: str | None, told: list[dict[str, Any]], members: list[int]) -> str:
    if name is None:
        return coded("HD301", "it is in join()")
    missing = [
        r for r, one in zip(members, told, strict=True) if one["waits"] is not None and name not in one["requests"]
    ]
    return coded("HD301", f"it waits for {name!r}, which ranks {listed(missing)} have not submitted")


def _agreed(
    process_set: ProcessSet, ready: list[str], told: list[dict[str, Request]]
) -> Iterator[tuple[Operation, list[Request]]]:
    """Take operations from the queue. Yields those that the ranks can run; the others get an error."""
    for name in ready:
        requests = [one.get(name) for one in told]
        first = next(one for one in requests if one)
        operation = process_set.pending.pop(name, None) or _zeros(process_set, name, first)
        operation.done = True
        problems = {}
        for member, one in zip(process_set.ranks or [], requests, strict=True):
            if one is None and not (first["kind"] == "barrier" or first["call"].get("op") in (Average, Sum)):
                problems[member] = coded(
                    "HD301", "it is in join(), which allows allreduce (Sum, Average) and barrier only"
                )
            elif one is not None and (one["kind"], one["call"]) != (first["kind"], first["call"]):
                problems[member] = coded("HD303", f"{_shown(one)}, where another rank has {_shown(first)}")
        if problems:
            operation.error = RankError(f"{first['kind']} {name!r}", problems)
        else:
            yield operation, [one or first for one in requests]


def _shown(request: Request) -> str:
    tensors = ", ".join(f"{dtype} {tuple(shape)}" for dtype, shape in request["call"]["tensors"])
    rest = "".join(f", {key} {value}" for key, value in request["call"].items() if key != "tensors")
    return f"{request['kind']} of {tensors}{rest}"


def _zeros(process_set: ProcessSet, name: str, request: Request) -> Operation:
    """Return what a rank in join() takes part with."""
    tensors = []
    for text, shape in request["call"]["tensors"]:
        dtype, _, device = text.removeprefix("torch.").partition(" on ")
        tensors.append(torch.zeros(shape, dtype=getattr(torch, dtype), device=device))
    arguments = {key: value for key, value in request["call"].items() if key != "tensors"}
    return Operation(request["kind"], name, tensors, process_set, arguments, None, list)


def _run_all(process_set: ProcessSet, agreed: list[tuple[Operation, list[Request]]]) -> None:
    """Run operations that the ranks have agreed on. Neighbours that reduce in the same way are fused."""
    step: Any = {
        "allgather": _allgather,
        "alltoall": _alltoall,
        "reducescatter": _reducescatter,
        "broadcast": _broadcast,
    }
    for (kind, _), group in groupby(agreed, lambda pair: (pair[0].kind, json.dumps(pair[0].arguments))):
        together = list(group)
        if kind == "allreduce":
            _allreduce([x for one, _ in together for x in one.tensors], together[0][0].arguments, process_set)
        for one, requests in together:
            tensors = step[kind](one, requests) if kind in step else one.tensors
            one.result = one.finish(tensors)
            one.tensors = []


def _allreduce(tensors: list[Tensor], arguments: dict[str, Any], process_set: ProcessSet) -> None:
    """Reduce tensors in place."""
    op, group = arguments["op"], process_set.group
    for x in tensors:
        _scale(x, arguments["prescale"])
    for few in _fusible(tensors):
        flat = few[0] if len(few) == 1 else torch.cat([x.view(-1) for x in few])
        dist.all_reduce(flat, _REDUCE[op], group)
        if len(few) > 1:
            for x, part in zip(few, torch.split(flat, [x.numel() for x in few]), strict=True):
                x.copy_(part.view_as(x))
    for x in tensors:
        _average(x, arguments, process_set)


def _fusible(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Divide tensors into lists of one dtype and device, of about _FUSED bytes."""
    few: list[Tensor] = []
    nbytes = 0
    for x in sorted(tensors, key=lambda x: (str(x.dtype), str(x.device))):
        nbytes += x.nbytes
        if few and ((x.dtype, x.device) != (few[0].dtype, few[0].device) or nbytes > _FUSED):
            yield few
            few, nbytes = [], x.nbytes
        few.append(x)
    if few:
        yield few


def _scale(x: Tensor, factor: float) -> None:
    """Multiply in place; integers in float64, rounded towards zero."""
    if factor != 1:
        x.copy_(x * factor if x.is_floating_point() or x.is_complex() else x.double() * factor)


def _average(x: Tensor, arguments: dict[str, Any], process_set: ProcessSet) -> None:
    """Make the result of a sum."""
    if arguments["op"] == Average:
        whole = x.is_floating_point() or x.is_complex()
        x.copy_(x.div(process_set.size() or 1, rounding_mode=None if whole else "trunc"))
    _scale(x, arguments["postscale"])


def _allgather(one: Operation, requests: list[Request]) -> list[Tensor]:
    one.rows = [list(rows) for rows in zip(*(request["rows"] for request in requests), strict=True)]
    return [concat(x, group=one.process_set.group) for x in one.tensors]


def _broadcast(one: Operation, requests: list[Request]) -> list[Tensor]:
    for x in one.tensors:
        dist.broadcast(x, one.arguments["root"], one.process_set.group)
    return one.tensors


def _alltoall(one: Operation, requests: list[Request]) -> list[Tensor]:
    me, x = one.process_set.rank() or 0, one.tensors[0]
    sends, recvs = one.splits or [], [request["splits"][me] for request in requests]
    out = x.new_empty((sum(recvs), *x.shape[1:]))
    dist.all_to_all_single(out, x[: sum(sends)], recvs, sends, group=one.process_set.group)
    return [out, torch.tensor(recvs, dtype=torch.int32, device="cpu")]


def _reducescatter(one: Operation, requests: list[Request]) -> list[Tensor]:
    outs, ranks = [], one.process_set.size() or 1
    for x in one.tensors:
        least, more = divmod(len(x), ranks)
        parts = list(torch.split(x, [least + (r < more) for r in range(ranks)]))
        outs.append(torch.empty_like(parts[one.process_set.rank() or 0]))
        _scale(x, one.arguments["prescale"])
        dist.reduce_scatter(outs[-1], parts, _REDUCE[one.arguments["op"]], one.process_set.group)
        _average(outs[-1], one.arguments, one.process_set)
    return outs
