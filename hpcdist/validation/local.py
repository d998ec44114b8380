"""Is this argument right on this rank? Nothing here raises: what is wrong is written into the call."""

from __future__ import annotations

from contextlib import suppress
from operator import index
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpcdist import layout
from hpcdist.comm.settings import ROUTES
from hpcdist.comm.team import Team
from hpcdist.errors import HpcdistError
from hpcdist.tensors import storage
from hpcdist.tensors.dtypes import MemoryKind
from hpcdist.tensors.eager import recorded
from hpcdist.tensors.merge import cut
from hpcdist.tensors.message import Contents, bounded, encode
from hpcdist.tensors.tree import Tree, flatten
from hpcdist.validation.call import (
    LOST,
    SHARED,
    Call,
    LayoutArgs,
    ShardArgs,
    SplitArgs,
    StructureArgs,
    others,
    show_shape,
)

__all__ = [
    "WrongError",
    "layout_call",
    "problem_of",
    "runs",
    "shard_call",
    "shares_places",
    "split_call",
    "structure_call",
    "tensor",
]


class WrongError(Exception):
    """An argument is wrong; the text becomes the call's problem."""


def runs() -> None:
    """A WrongError where a call would be recorded and not run."""
    reason = recorded()
    if reason is not None:
        raise WrongError(reason)


def problem_of(error: Exception) -> str:
    """What is wrong, as the other ranks are told it."""
    return str(error) if isinstance(error, WrongError) else f"{type(error).__name__}: {error}"


def shard_call(op: ShardArgs, team: Team) -> Call:
    """The call of an operation to which every rank brings a shard."""
    call = Call(op.name)
    try:
        runs()
        call.options = (("x", "a tensor"),)
        call.x, call.dim = tensor(op.x, op.dim, "x")
        call.dim_arg = call.dim
        call.grad = wants_grad(op.x, op.out)
        _describe(call, call.x, op.x.dim())
        if op.rooted:
            call.root = _root(op.root, team.size)
        call.route = _route(op.route)
        if op.out is not None:
            if call.root not in (-1, team.rank):
                raise WrongError(f"out is given, but only the root (rank {op.root}) receives a result")
            _out(call, op.out)
    except Exception as error:  # an argument's own methods may raise, too, and the other ranks are to hear of it
        call.problem = problem_of(error)
    return call


def structure_call(op: StructureArgs, size: int, has_cuda: bool) -> Call:
    """The call of gather or concat with a structure; its header takes the place of the extent."""
    call = Call(op.name, kind=MemoryKind.CUDA if has_cuda else MemoryKind.CPU)
    try:
        runs()
        call.options = (("x", "a structure"), ("allow_pickle", bool(op.allow_pickle)))
        call.dim = call.dim_arg = _int(op.dim, "dim")
        if op.rooted:
            call.root = _root(op.root, size)
        call.route = _route(op.route)
        if op.out is not None:
            raise WrongError(f"out is given, but x is not a tensor: {_show(op.x)}")
        call.tree, contents = _tree(op.x, op.allow_pickle)
        call.header = encode(call.tree.spec, contents)
        call.extent = len(call.header)
    except Exception as error:  # as above
        call.problem = problem_of(error)
    return call


def _tree(x: Any, allow_pickle: Any) -> tuple[Tree, Contents]:
    try:
        tree = flatten(x, bool(allow_pickle))
        contents = Contents.of(tree.tensors)
        bounded(sum(contents.nbytes))
    except (TypeError, ValueError, HpcdistError) as wrong:
        raise WrongError(str(wrong)) from None
    return tree, contents


def _cut(tree: Tree, call: Call, size: int) -> list[Tree]:
    try:
        return cut(tree, call.dim_arg, call.counts, size)
    except ValueError as wrong:
        raise WrongError(str(wrong)) from None


def split_call(op: SplitArgs, rank: int, size: int, has_cuda: bool) -> Call:
    """The call of split: the root brings the whole tensor, the others nothing, or memory for their part."""
    call = Call(op.name, kind=MemoryKind.FOLLOWS if has_cuda else MemoryKind.FOLLOWS_CPU, root_decides=True)
    try:
        runs()
        call.root = _root(op.root, size)
        call.route = _route(op.route)
        call.counts = _counts(op.counts)
        call.dim_arg = _int(op.dim, "dim")
        call.options = (("allow_pickle", bool(op.allow_pickle)),)
        if rank == call.root and not isinstance(op.x, Tensor) and op.x is not None:
            if op.out is not None:
                raise WrongError(f"out is given, but x is not a tensor: {_show(op.x)}")
            call.kind = MemoryKind.CUDA if has_cuda else MemoryKind.CPU
            call.trees = _cut(_tree(op.x, op.allow_pickle)[0], call, size)
            call.counts = "block" if call.counts is None else call.counts
        elif rank == call.root:
            if isinstance(op.x, Tensor) and op.x.dim() == 0:
                raise WrongError("x has no dimension to split along: it is 0-d")
            call.x, call.dim = tensor(op.x, op.dim, "x")
            call.grad = wants_grad(op.x, op.out)
            _describe(call, call.x, call.x.dim())
            call.counts = "block" if call.counts is None else call.counts
            _check_counts(call, size)
            if op.out is not None:
                _out(call, op.out)
        else:
            if op.x is not None:
                raise WrongError(
                    f"x is given, but split sends from the root (rank {call.root}): pass None "
                    "here, or root=None everywhere if all ranks hold the whole"
                )
            if op.out is not None:
                call.out, call.dim = tensor(op.out, op.dim, "out")
                _describe(call, call.out, call.out.dim())
                call.out_extent, call.extent = call.extent, -1
    except Exception as error:  # an argument's own methods may raise, too, and the other ranks are to hear of it
        call.problem = problem_of(error)
    return call


def layout_call(op: LayoutArgs) -> Call:
    """The call of redistribute: every rank brings a part, of a shape of its own; `out` is compared once all shapes are
    known."""
    call = Call(op.name)
    try:
        runs()
        for name, value in (("src", op.src), ("dst", op.dst)):
            if not isinstance(value, (layout.Split, layout.Block, layout.Replicate, layout.Boxes)):
                raise WrongError(f"{name} must be a layout (Split, Block, Replicate, Boxes), got {_show(value)}")
        call.x = _as_it_is(op.x, "x")
        call.options = (("src", op.src), ("dst", op.dst))
        call.grad = wants_grad(op.x, op.out)
        call.tensor = (op.x.dtype, op.x.dim(), ())
        call.kind = MemoryKind.CUDA if op.x.is_cuda else MemoryKind.CPU
        call.route = _route(op.route)
        if op.out is not None:
            if not isinstance(op.out, Tensor) or op.out.dim() != op.x.dim():
                raise WrongError(f"out must be a tensor of {op.x.dim()} dims, got {_show(op.out)}")
            call.out = _as_it_is(op.out, "out")
            _same_kind(call.out, call.x)
    except Exception as error:  # as above
        call.problem = problem_of(error)
    return call


def _as_it_is(x: Any, name: str) -> Tensor:
    """The tensor as it travels, a 0-d one too."""
    checked, _ = tensor(x, 0, name)
    return checked if x.dim() else checked.view(())


def wants_grad(x: Tensor, out: Any) -> bool:
    """Whether a gradient is to flow back to `x`; a WrongError if it cannot, because the result is to be `out`."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return False
    if out is not None:
        raise WrongError(LOST)
    if x.dtype in storage.BARE:
        raise WrongError(f"x requires a gradient, and torch adds up none of dtype {x.dtype}: use torch.no_grad()")
    return True


def _describe(call: Call, x: Tensor, ndim: int) -> None:
    shape = x.shape
    call.extent = shape[call.dim]
    call.tensor = (x.dtype, ndim, others(shape, call.dim))
    call.kind = MemoryKind.CUDA if x.is_cuda else MemoryKind.CPU


def tensor(x: Any, dim: Any, name: str) -> tuple[Tensor, int]:
    """`x` as it travels, 0-d made 1-d, and dim made non-negative; a WrongError if it cannot."""
    if not isinstance(x, Tensor):
        hint = " (torch.from_numpy makes one of an array)" if type(x).__module__ == "numpy" else ""
        raise WrongError(f"{name} must be a torch.Tensor, got {_show(x)}{hint}")
    problem = storage.problem(x)
    if problem is not None:
        raise WrongError(f"{name} {problem}")
    where, ndim = _int(dim, "dim"), x.dim() or 1
    if not -ndim <= where < ndim:
        raise WrongError(f"dim is {where}, expected {-ndim} to {ndim - 1} for a tensor of {x.dim()} dims")
    x = _writable(x) if name == "out" else storage.plain(x)
    return (x if x.dim() else x.view(1)), where % ndim


def _out(call: Call, out: Any) -> None:
    """`out` must fit the tensor of this rank's call; its extent is compared once all extents are known."""
    assert call.tensor is not None and call.x is not None
    wanted = call.tensor[2]
    if isinstance(out, Tensor) and (out.dim() or 1) != len(wanted):
        raise WrongError(f"out has shape {tuple(out.shape)}, expected {show_shape(wanted)}")
    call.out, dim = tensor(out, call.dim, "out")
    shape = call.out.shape
    if others(shape, dim) != wanted:
        raise WrongError(f"out has shape {tuple(shape)}, expected {show_shape(wanted)}")
    _same_kind(call.out, call.x)
    call.out_extent = shape[dim]


def _same_kind(out: Tensor, x: Tensor) -> None:
    if out.dtype != x.dtype:
        raise WrongError(f"out has dtype {out.dtype}, expected {x.dtype}, that of x")
    if out.device != x.device:
        raise WrongError(f"out is on {out.device}, expected {x.device}, that of x")


def _writable(out: Tensor) -> Tensor:
    """`out` as it is written: the memory itself, without gradient history."""
    if out.is_conj() or out.is_neg():
        raise WrongError("out is a lazily conjugated or negated view; pass the tensor itself")
    if out.requires_grad and torch.is_grad_enabled():
        raise WrongError("out requires a gradient, which could not flow: pass out.detach(), or use torch.no_grad()")
    if out.is_inference() and not torch.is_inference_mode_enabled():
        raise WrongError("out was made in torch.inference_mode() and can be written only there")
    if shares_places(out):
        raise WrongError(SHARED)
    return out.detach()


def shares_places(x: Tensor) -> bool:
    """Whether the elements of a tensor may lie over each other: a stride does not pass what the smaller ones reach."""
    if x.is_contiguous():
        return False
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride <= reach:
            return x.numel() > 0
        reach += stride * (size - 1)
    return False


def _root(root: Any, size: int) -> int:
    value = _int(root, "root")
    if not 0 <= value < size:
        raise WrongError(f"root is {value}, expected 0 to {size - 1} in a group of {size} ranks")
    return value


def _route(route: Any) -> str:
    if not isinstance(route, str) or route not in ROUTES:
        raise WrongError(f"route is {_repr(route)}, expected one of {', '.join(ROUTES)}")
    if route in ("gloo", "nccl") and not dist.is_initialized():
        raise WrongError(f"route {route} needs torch.distributed, which has been ended here (destroy_process_group)")
    return route


def _counts(counts: Any) -> str | tuple[int, ...] | None:
    if counts is None or isinstance(counts, str):
        return counts
    try:
        return tuple(int(index(c)) for c in counts)
    except TypeError:
        raise WrongError(f"counts must be integers, the name of a rule or None, got {_show(counts)}") from None


def _check_counts(call: Call, size: int) -> None:
    try:
        layout.counts_of(call.counts, call.extent, size)
    except ValueError as wrong:
        raise WrongError(str(wrong)) from None


def _int(value: Any, name: str) -> int:
    if type(value) is int:
        return value
    with suppress(TypeError):
        if not isinstance(value, (bool, Tensor)):
            return int(index(value))
    raise WrongError(f"{name} must be an int, got {_show(value)}")


def _show(value: Any) -> str:
    return "a tensor" if isinstance(value, Tensor) else f"{type(value).__name__} {_repr(value)}"[:100]


def _repr(value: Any) -> str:
    try:
        return repr(value)
    except Exception:  # which is not what is wrong here
        return "(its repr fails)"
