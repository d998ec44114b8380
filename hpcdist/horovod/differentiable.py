"""Horovod's operations on tensors, each for one tensor or, as "grouped", for a list; gradients as in Horovod."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from hpcdist.errors import refusal
from hpcdist.horovod.negotiation import Average, Operation, Sum, submit, synchronize
from hpcdist.horovod.process_sets import ProcessSet, global_process_set, rank

__all__ = [
    *("Adasum", "Compression", "Max", "Min", "Product", "allgather", "allgather_async", "allreduce", "allreduce_"),
    *(
        "allreduce_async",
        "allreduce_async_",
        "alltoall",
        "alltoall_async",
        "broadcast",
        "broadcast_",
        "broadcast_async",
    ),
    *("broadcast_async_", "grouped_allgather", "grouped_allgather_async", "grouped_allreduce", "grouped_allreduce_"),
    *("grouped_allreduce_async", "grouped_allreduce_async_", "grouped_reducescatter", "grouped_reducescatter_async"),
    *("reducescatter", "reducescatter_async", "sparse_allreduce_async"),
]

Min, Max, Product, Adasum = "Min", "Max", "Product", "Adasum"
_OPS = (Average, Sum, Min, Max, Product)
Tensors = Tensor | Sequence[Tensor]
_Take = Callable[[Tensors], tuple[list[Tensor], Callable[[list[Tensor]], Any]]]


class NoneCompressor:
    """Send tensors as they are."""

    dtype: torch.dtype | None = None

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, Any]:
        """Return what is sent, and what decompress() needs."""
        sent = tensor.to(cls.dtype) if cls.dtype and tensor.is_floating_point() else tensor
        return sent, tensor.dtype

    @classmethod
    def decompress(cls, tensor: Tensor, ctx: Any) -> Tensor:
        """Return a tensor of the dtype before compress()."""
        return tensor.to(ctx)


class FP16Compressor(NoneCompressor):
    """Send floating-point tensors as float16."""

    dtype = torch.float16


class BF16Compressor(NoneCompressor):
    """Send floating-point tensors as bfloat16."""

    dtype = torch.bfloat16


class Compression:
    """What tensors are sent as."""

    none, fp16, bf16 = NoneCompressor, FP16Compressor, BF16Compressor


class _Function(torch.autograd.Function):
    """Runs `run` on the tensors, and `back` on the gradients of its results."""

    @staticmethod
    def forward(ctx: Any, run: Any, back: Any, *tensors: Tensor) -> Any:
        ctx.back = back
        return tuple(run(list(tensors)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, *ctx.back([grad.contiguous() for grad in grads])


def _differentiable(tensors: Tensors, run: Any, back: Any, compression: Any = NoneCompressor) -> Any:
    """Return what `run` makes of a list of tensors: a list, or for one tensor its only result."""
    xs = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    sent, ctxs = zip(*[compression.compress(x) for x in xs], strict=True)
    found = _Function.apply(run, back, *sent)  # type: ignore[no-untyped-call]
    found = [compression.decompress(y, ctx) for y, ctx in zip(found, ctxs, strict=True)]
    return found[0] if isinstance(tensors, Tensor) else found


def _grouped(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def grouped(tensors: Sequence[Tensor], *args: Any, **options: Any) -> Any:
        return function(list(tensors), *args, **options)

    grouped.__name__ = grouped.__qualname__ = f"grouped_{function.__name__}"
    grouped.__doc__ = f"Run :func:`{function.__name__}` on a list of tensors; the result is a list."
    return grouped


def _inputs(tensors: Tensors, copy: bool) -> tuple[list[Tensor], Callable[[list[Tensor]], Any]]:
    """Return the tensors of an operation, and what makes its result of the tensors that it returns."""
    single = isinstance(tensors, Tensor)
    xs = [tensors.detach()] if isinstance(tensors, Tensor) else [x.detach() for x in tensors]
    contiguous = [x.clone(memory_format=torch.contiguous_format) if copy else x.contiguous() for x in xs]
    return contiguous, lambda found: found[0] if single else found


def _copied(tensors: Tensors) -> tuple[list[Tensor], Callable[[list[Tensor]], Any]]:
    """The same on copies, for an operation that writes them."""
    return _inputs(tensors, True)


def _in_place(tensors: Tensors) -> tuple[list[Tensor], Callable[[list[Tensor]], Any]]:
    """The same for an operation that writes the caller's tensors."""
    xs, _ = _inputs(tensors, False)
    given = [tensors] if isinstance(tensors, Tensor) else list(tensors)

    def finish(found: list[Tensor]) -> Any:
        for x, y in zip(given, found, strict=True):
            if x.data_ptr() != y.data_ptr():
                x.detach().copy_(y)
        return tensors

    return xs, finish


def _op(op: str | None, average: bool | None = None) -> str:
    if op is not None and average is not None:
        raise refusal(ValueError, "HD701", "pass `op` or `average`, not both: `average` is deprecated in Horovod")
    op = op or (Sum if average is False else Average)
    if op == Adasum:
        raise refusal(
            NotImplementedError, "HD701", "op=Adasum is not supported: use Average, and scale the learning rate"
        )
    if op not in _OPS:
        raise refusal(ValueError, "HD701", f"op is {op!r}: expected one of {', '.join(_OPS)}")
    return op


def _reduction(op: str | None, average: bool | None, prescale_factor: float, postscale_factor: float) -> dict[str, Any]:
    return {"op": _op(op, average), "prescale": float(prescale_factor), "postscale": float(postscale_factor)}


def allreduce_async(
    tensor: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    _take: _Take = _copied,
) -> Operation:
    """Submit an :func:`allreduce`. Returns a handle for synchronize()."""
    xs, finish = _take(tensor)
    arguments = _reduction(op, average, prescale_factor, postscale_factor)
    return submit("allreduce", xs, name, process_set, finish, arguments=arguments)


def allreduce_async_(tensor: Tensors, *args: Any, **options: Any) -> Operation:
    """Submit an :func:`allreduce_`; arguments and handle as those of :func:`allreduce_async`."""
    return allreduce_async(tensor, *args, **options, _take=_in_place)


def allreduce_(tensor: Tensors, *args: Any, **options: Any) -> Any:
    """Reduce a tensor over the ranks, in place; arguments as those of :func:`allreduce_async`."""
    return synchronize(allreduce_async_(tensor, *args, **options))


def allreduce(
    tensor: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce a tensor over the ranks of a process set, which all get the result. The tensor is not changed.

    Args:
        average: deprecated in Horovod: True for op=Average, False for op=Sum.
        name: the ranks match operations by it; without one, by their order.
        compression: Compression.none, fp16 or bf16.
        op: Average (the default), Sum, Min, Max or Product.
        prescale_factor, postscale_factor: multiply the tensor before, and the result after.

    Raises:
        RankError: on every rank, if shape, dtype or arguments differ.
    """
    options: Any = {"op": _op(op, average), "process_set": process_set}
    options |= {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    return _differentiable(
        tensor,
        lambda xs: synchronize(allreduce_async(xs, name=name, **options)),
        lambda grads: allreduce(grads, **options),
        compression,
    )


def allgather_async(
    tensor: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Operation:
    """Submit an :func:`allgather`. Returns a handle for synchronize()."""
    xs, finish = _inputs(tensor, False)
    return submit("allgather", xs, name, process_set, finish)


def allgather(tensor: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Concatenate the tensors of all ranks along dim 0, where they may differ, on every rank."""
    rows: list[list[int]] = []

    def run(xs: list[Tensor]) -> Any:
        handle = allgather_async(xs, name, process_set)
        found = synchronize(handle)
        rows.extend(handle.rows)
        return found

    def back(grads: list[Tensor]) -> list[Tensor]:
        me, reduced = process_set.rank() or 0, allreduce(grads, process_set=process_set)
        return [grad[sum(n[:me]) : sum(n[: me + 1])] for grad, n in zip(reduced, rows, strict=True)]

    return _differentiable(tensor, run, back)


def _root(root_rank: int, process_set: ProcessSet) -> int:
    if root_rank not in (process_set.ranks or ()):
        raise refusal(ValueError, "HD204", f"broadcast: root_rank {root_rank} is not in {process_set}")
    return int(root_rank)


def broadcast_async(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    _take: _Take = _copied,
) -> Operation:
    """Submit a :func:`broadcast`. Returns a handle for synchronize()."""
    xs, finish = _take(tensor)
    return submit("broadcast", xs, name, process_set, finish, arguments={"root": _root(root_rank, process_set)})


def broadcast_async_(*args: Any, **options: Any) -> Operation:
    """Submit a :func:`broadcast_`; arguments and handle as those of :func:`broadcast_async`."""
    return broadcast_async(*args, **options, _take=_in_place)


def broadcast_(*args: Any, **options: Any) -> Any:
    """Write the root's tensor into the tensor of every rank; arguments as those of :func:`broadcast`."""
    return synchronize(broadcast_async_(*args, **options))


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the root's tensor on every rank. `root_rank` is a rank of the world, also in a process set."""

    def back(grads: list[Tensor]) -> list[Tensor]:
        reduced = allreduce(grads, process_set=process_set)
        return [grad if rank() == root_rank else torch.zeros_like(grad) for grad in reduced]

    return _differentiable(tensor, lambda xs: [synchronize(broadcast_async(xs[0], root_rank, name, process_set))], back)


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Operation:
    """Submit an :func:`alltoall`. synchronize() returns the tensor and the received splits."""
    ranks, rows = process_set.size() or 1, len(tensor) if tensor.dim() else 0
    if splits is None and rows % ranks:
        raise refusal(ValueError, "HD701", f"alltoall: {rows} rows cannot be divided by {ranks} ranks: pass `splits`")
    given = torch.as_tensor(
        [rows // ranks] * ranks if splits is None else splits, device=getattr(splits, "device", "cpu")
    )
    if given.is_floating_point() or given.shape != (ranks,) or given.sum() > rows or (given < 0).any():
        raise refusal(
            ValueError, "HD701", f"alltoall: splits {given.tolist()} do not fit {ranks} ranks and {rows} rows"
        )

    def finish(found: list[Tensor]) -> tuple[Tensor, Tensor]:
        return found[0], found[1].to(given if isinstance(splits, Tensor) else found[1])

    return submit("alltoall", _inputs(tensor, False)[0], name, process_set, finish, given.tolist())


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows of a tensor to every rank, and concatenate those that are received.

    Args:
        splits: the number of rows for each rank; without them, equal numbers.

    Returns:
        The rows, in the order of the ranks; with `splits`, also the number of rows from each rank.
    """
    received: list[Tensor] = []

    def run(xs: list[Tensor]) -> Any:
        received[:] = synchronize(alltoall_async(xs[0], splits, name, process_set))
        return received

    def back(grads: list[Tensor]) -> Any:
        return alltoall(grads[0], received[1], process_set=process_set)[:1]

    found = _Function.apply(run, back, tensor)  # type: ignore[no-untyped-call]
    return found[0] if splits is None else found


def reducescatter_async(
    tensor: Tensors,
    name: str | None = None,
    op: str = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Operation:
    """Submit a :func:`reducescatter`. Returns a handle for synchronize()."""
    xs, finish = _inputs(tensor, prescale_factor != 1)
    arguments = _reduction(op, None, prescale_factor, postscale_factor)
    return submit("reducescatter", xs, name, process_set, finish, arguments=arguments)


def reducescatter(
    tensor: Tensors,
    name: str | None = None,
    compression: Any = Compression.none,
    op: str = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce a tensor, and give each rank its rows; the first ranks get one more, if they cannot be divided."""
    options: Any = {
        "process_set": process_set,
        "prescale_factor": prescale_factor,
        "postscale_factor": postscale_factor,
    }
    factor = prescale_factor * postscale_factor * ((process_set.size() or 1) if op == Sum else 1)
    return _differentiable(
        tensor,
        lambda xs: synchronize(reducescatter_async(xs, name, op, **options)),
        lambda grads: [grad * factor for grad in allgather(grads, process_set=process_set)],
        compression,
    )


grouped_allreduce, grouped_allreduce_ = _grouped(allreduce), _grouped(allreduce_)
grouped_allreduce_async, grouped_allreduce_async_ = _grouped(allreduce_async), _grouped(allreduce_async_)
grouped_allgather, grouped_allgather_async = _grouped(allgather), _grouped(allgather_async)
grouped_reducescatter, grouped_reducescatter_async = _grouped(reducescatter), _grouped(reducescatter_async)


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: str, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Submit an allreduce of a sparse tensor, by allgather of indices and values. Returns a function that
    waits for the result and returns it."""
    if _op(op) not in (Average, Sum):
        raise refusal(ValueError, "HD701", f"sparse_allreduce_async: op is {op}: expected Average or Sum")
    handle = allgather_async([tensor._indices().t(), tensor._values()], name, process_set)

    def result() -> Tensor:
        indices, values = synchronize(handle)
        values = values / (process_set.size() or 1) if op == Average else values
        return torch.sparse_coo_tensor(indices.t(), values, tensor.shape, device=tensor.device, check_invariants=False)

    return result
