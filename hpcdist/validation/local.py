"""Validate arguments on this rank alone. Errors are not raised, but recorded as the call's problem."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import index
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hpcdist import layout
from hpcdist.comm.team import ROUTES, Team
from hpcdist.errors import coded, described, hinted, labelled
from hpcdist.tensors import storage
from hpcdist.tensors.accelerator import MemoryKind
from hpcdist.tensors.eager import recorded
from hpcdist.tensors.message import MessageContents, check_memory, encode, pack
from hpcdist.tensors.tree import Tree, cut, flatten
from hpcdist.validation.collective import LOSES_GRADIENT, Call, show_shape

REDUCTIONS = {"sum": "SUM", "mean": "AVG", "min": "MIN", "max": "MAX", "prod": "PRODUCT"}  # what torch calls them
LIKE = "a {} tensor of shape {} on {}"


class ArgumentError(ValueError):
    """A wrong argument; in a collective the text becomes the call's problem. Made of a code and a message, as an
    HpcdistError."""

    def __init__(self, *args: str) -> None:
        super().__init__(*labelled(args))
        hinted(self)


def refuse_tracing() -> None:
    """Raise an ArgumentError if a tracer would record the call instead of running it."""
    reason = recorded()
    if reason is not None:
        raise ArgumentError("HD219", reason)


def problem_of(error: Exception) -> str:
    """Return the text of an error for the other ranks."""
    return coded("HD309", str(error)) if isinstance(error, ArgumentError) else described(error, "HD309")


def call_of(verb: str, check: Callable[..., None], *arguments: Any) -> Call:
    """Make the call that `check` describes, its last argument. An error is recorded in the call, not raised."""
    call = Call(verb)
    try:
        refuse_tracing()
        check(*arguments, call)
    except Exception as error:  # including errors of an argument's own methods, which all ranks must raise
        call.problem = problem_of(error)
    return call


def check_shard(op: Any, team: Team, call: Call) -> None:
    """Check an operation in which every rank passes a shard."""
    call.options = (("x", "a tensor"), ("shared", op.shared), ("allow_pickle", bool(op.allow_pickle)))
    if op.shared:
        _check_shared(op)
    call.x = describe(call, op.x, op.dim, "x")
    call.dim_arg = call.dim
    call.grad = _needs_grad(op.x, op.out)
    if op.rooted:
        call.root = _root(op.root, team.size)
    call.route = _route(op.route)
    _check_out(op, team.rank, call)
    put_inline(call, team)


def put_inline(call: Call, team: Team, *head: bytes, xs: Sequence[Tensor] = ()) -> None:
    """Put `head`, and the data of `xs` (by default of the call's tensor) behind the header of the call, if they are
    small, in host memory, and sent by MPI."""
    if not xs:
        assert call.x is not None
        xs = [call.x]
    call.inline, nbytes = head or None, sum(map(len, head)) + sum([x.nbytes for x in xs])
    if call.kind == MemoryKind.CPU and call.route in ("auto", "mpi") and nbytes <= team.inline:
        call.inline = (*head, *[x if x.is_contiguous() else storage.row_major(x) for x in xs])


def check_structure(op: Any, team: Team, call: Call) -> None:
    """Check gather or concat of a structure; the length of its header replaces the extent."""
    call.kind = MemoryKind.CPU if team.settings.device.type == "cpu" else MemoryKind.GPU
    call.options = (("x", "a structure"), ("allow_pickle", bool(op.allow_pickle)))
    call.dim = call.dim_arg = _int(op.dim, "dim")
    if op.rooted:
        call.root = _root(op.root, team.size)
    call.route = _route(op.route)
    call.tree = _tree(op)
    contents = MessageContents.of(call.tree.tensors)
    call.header = encode(call.tree.spec, contents)
    call.extent = len(call.header)
    fits = call.extent + contents.packed <= team.inline
    if fits and not (contents.large or any(meta.on_gpu for meta in contents.metas)):
        call.inline = (call.header, pack(call.tree.tensors, contents))


def _tree(op: Any) -> Tree:
    if op.out is not None:
        raise ArgumentError("HD211", f"out is given, but x is not a tensor: {show(op.x)}")
    tree = flatten(op.x, bool(op.allow_pickle))
    check_memory(sum(MessageContents.of(tree.tensors).nbytes))
    return tree


def check_split(op: Any, rank: int, size: int, on_gpu: bool, call: Call) -> None:
    """Check split: the root passes the whole tensor, the others at most memory for their part."""
    call.kind, call.root_decides = MemoryKind.FOLLOWS if on_gpu else MemoryKind.FOLLOWS_CPU, True
    call.options = (("allow_pickle", bool(op.allow_pickle)), ("shared", op.shared))
    if op.shared:
        _check_shared(op)
    call.root = _root(op.root, size)
    call.route = _route(op.route)
    call.counts = _counts(op.counts)
    call.dim_arg = _int(op.dim, "dim")
    if rank != call.root:
        if op.x is not None:
            raise ArgumentError(
                "HD211",
                f"x is given, but split sends from the root (rank {call.root}): pass None "
                "here, or root=None everywhere if all ranks hold the whole",
            )
        if op.out is not None:
            call.out = describe(call, op.out, op.dim, "out")
            call.out_extent, call.extent = call.extent, -1
        return
    is_structure = op.x is not None and not isinstance(op.x, Tensor)
    if not is_structure:
        if op.x is not None and op.x.dim() == 0:
            raise ArgumentError("HD204", "x has no dimension to split along: it is 0-d")
        call.x = describe(call, op.x, op.dim, "x")
        call.grad = _needs_grad(op.x, op.out)
        layout.counts_of(call.counts, call.extent, size)
        _check_out(op, rank, call)
    else:
        call.kind = MemoryKind.GPU if on_gpu else MemoryKind.CPU
        call.trees = cut(_tree(op), call.dim_arg, call.counts, size)
    call.counts = "block" if call.counts is None else call.counts


def check_reduction(op: Any, team: Team, call: Call) -> None:
    """Check a reduction: every rank passes a tensor of the same shape."""
    call.route = _route(op.route)
    if op.root is not None:
        call.root = _root(op.root, team.size)
    call.options = (("x", "a tensor"), ("op", _reduction(op.op)))
    rows = describe(call, op.x, op.dim, "x")
    call.x = rows.view(op.x.shape)
    dtype = rows.dtype
    if op.scatters:
        if op.x.dim() == 0:
            raise ArgumentError("HD204", "x has no dimension to split along: it is 0-d")
        counts = _counts(op.counts)
        layout.counts_of(counts, call.extent, team.size)
        call.dim_arg, call.counts = call.dim, "block" if counts is None else counts
    whole = not (dtype.is_floating_point or dtype.is_complex)
    lacks = (whole and op.op == "mean") or (dtype.is_complex and op.op in ("min", "max"))
    if lacks or dtype in storage.BARE or (dtype in storage.UNSIGNED and not rows.is_cpu):
        raise ArgumentError("HD202", f"x has dtype {dtype}, of which there is no {op.op} on {rows.device}: convert it")
    call.grad = _needs_grad(op.x, op.out)
    if call.grad and op.op not in ("sum", "mean"):
        text = f"x requires a gradient, but op {op.op!r} has none: use sum or mean, or torch.no_grad()"
        raise ArgumentError("HD208", text)
    _check_out(op, team.rank, call)
    call.tensor = (dtype, op.x.dim(), tuple(op.x.shape))
    put_inline(call, team)


def check_dict(op: Any, team: Team, call: Call) -> None:
    """Check the arguments of a reduction of dicts besides `x` and its weight."""
    call.route = _route(op.route)
    call.options = (("x", "a dict"), ("op", _reduction(op.op)))
    if op.root is not None:
        call.root = _root(op.root, team.size)
    if op.out is not None:
        raise ArgumentError("HD211", "out is given, but x is a dict")


def weight_of(weight: Any, op: Any) -> float:
    """Return the weight of this rank in a mean; 1.0 in other reductions, which have none."""
    if weight is None:
        return 1.0
    if op != "mean":
        raise ArgumentError("HD211", f"weights is given, but op is {show_repr(op)}: only a mean has weights")
    if not isinstance(weight, (int, float, np.number, Tensor)) or not 0 <= (value := float(weight)) < math.inf:
        raise ArgumentError("HD201", f"weights must be a finite number that is not negative, got {show(weight)}")
    return value


def _reduction(op: Any) -> str:
    if not (isinstance(op, str) and op in REDUCTIONS):
        raise ArgumentError("HD201", f"op is {show_repr(op)}, expected one of {', '.join(REDUCTIONS)}")
    return str.__str__(op)  # not another class that is equal, and has another digest


def check_layouts(op: Any, call: Call) -> None:
    """Check redistribute: every rank passes a part of any shape; `out` is checked later."""
    for name, value in (("src", op.src), ("dst", op.dst)):
        if not isinstance(value, (layout.Split, layout.Block, layout.Replicate, layout.Boxes)):
            raise ArgumentError("HD213", f"{name} must be a layout (Split, Block, Replicate, Boxes), got {show(value)}")
    call.x = ready(op.x, "x")
    call.options = (("src", op.src), ("dst", op.dst))
    call.grad = _needs_grad(op.x, op.out)
    call.tensor = (op.x.dtype, op.x.dim(), ())
    call.kind = MemoryKind.CPU if op.x.is_cpu else MemoryKind.GPU
    call.route = _route(op.route)
    if op.out is not None:
        if not isinstance(op.out, Tensor) or op.out.dim() != op.x.dim():
            raise ArgumentError("HD208", f"out must be a tensor of {op.x.dim()} dims, got {show(op.out)}")
        call.out = ready(op.out, "out")
        _check_like(call.out, call.x)


def check_exchange(op: Any, team: Team, call: Call) -> list[Tensor]:
    """Check all_to_all: every rank passes a list of tensors, or one tensor and counts. Return those, ready."""
    several = op.several
    call.options = (("x", "a list of tensors" if several else "a tensor"),)
    call.route = _route(op.route)
    if op.out is not None:
        raise ArgumentError("HD211", "out is given, but all_to_all returns new memory: omit it")
    if several:
        if op.counts is not None:
            raise ArgumentError("HD211", "counts is given, but x is a list, whose tensors have their sizes: omit it")
        if len(op.x) != team.size:
            raise ArgumentError("HD213", f"x has {len(op.x)} tensors, expected one for each of {team.size} ranks")
        found = [(describe(call, x, op.dim, f"x[{i}]"), call.extent, call.tensor) for i, x in enumerate(op.x)]
        xs, op.extents, tensors = map(list, zip(*found, strict=True))
        kinds = zip(xs, tensors, strict=True)
        like = {LIKE.format(dtype, show_shape(shape), x.device) for x, (dtype, _, shape) in kinds}
        if len(like) > 1:
            raise ArgumentError("HD303", f"the tensors of x differ: {', '.join(sorted(like))}")
        if torch.is_grad_enabled() and any(x.requires_grad for x in op.x):
            op.x = torch.cat([x.reshape(-1) for x in op.x])
            xs = [op.x.detach()]
        call.x = xs[0]
    else:
        call.x = describe(call, op.x, op.dim, "x")
        xs, op.extents = [call.x], layout.counts_of(_counts(op.counts), call.extent, team.size)
    call.dim_arg = call.dim
    call.grad = isinstance(op.x, Tensor) and _needs_grad(op.x, None)
    call.extent = max(op.extents)
    return xs


def _check_shared(op: Any) -> None:
    """Raise an ArgumentError if the ranks of a node cannot share the result."""
    if op.x is not None and not isinstance(op.x, Tensor):
        raise ArgumentError("HD211", "shared=True takes a tensor, not a structure: call it for each tensor")
    if op.out is not None:
        raise ArgumentError(
            "HD211", "out is given, but shared=True returns memory that the ranks of a node share: omit one of them"
        )
    if op.x is not None and not op.x.is_cpu:
        raise ArgumentError("HD211", f"x is on {op.x.device}, but shared=True is for host memory: pass x.cpu()")
    if op.route not in ("auto", "mpi"):
        raise ArgumentError("HD211", f"route is {op.route!r}, but shared=True moves data by route auto or mpi")


def _needs_grad(x: Tensor, out: Any) -> bool:
    """Return whether `x` needs a gradient; raise an ArgumentError if it would be lost."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return False
    if out is not None:
        raise ArgumentError(LOSES_GRADIENT)
    if x.dtype in storage.BARE:
        raise ArgumentError(
            "HD208", f"x requires a gradient, but torch cannot add up dtype {x.dtype}: use torch.no_grad()"
        )
    return True


def describe(call: Call, value: Any, dim: Any, name: str) -> Tensor:
    """Describe a tensor in the call; return it as ready() does, but at least 1-d. An ArgumentError if it cannot be."""
    usual = name != "out" and storage.is_plain(value) and value.dtype in storage.DTYPES  # as nearly all are
    x: Tensor = value if usual else ready(value, name)
    at, rows = dim if type(dim) is int else _int(dim, "dim"), x if x.dim() else x.view(1)
    ndim, shape = rows.dim(), rows.shape
    if not -ndim <= at < ndim:
        raise ArgumentError("HD204", f"dim is {at}, expected {-ndim} to {ndim - 1} for a tensor of {x.dim()} dims")
    call.dim = at = at % ndim
    call.extent = shape[at]
    call.tensor = (x.dtype, x.dim() if name == "x" else ndim, (*shape[:at], -1, *shape[at + 1 :]))
    call.kind = MemoryKind.CPU if x.is_cpu else MemoryKind.GPU
    return rows


def ready(x: Any, name: str, writes: bool = False) -> Tensor:
    """Return `x` ready to be sent, or to be written, as "out" always is; raise an ArgumentError if it cannot be."""
    if not isinstance(x, Tensor):
        raise ArgumentError("HD201", not_a_tensor(x, name))
    problem = storage.problem(x)
    if problem is not None:
        raise ArgumentError("HD202", f"{name} {problem}")
    return _writable(x, name) if writes or name == "out" else storage.resolved(x)


def _check_out(op: Any, rank: int, call: Call) -> None:
    """Check `out`, if there is one, against this rank's tensor; its extent is checked once all extents are known."""
    out = op.out
    if out is None:
        return
    if call.root not in (-1, rank):
        raise ArgumentError("HD211", f"out is given, but only the root (rank {op.root}) receives a result")
    assert call.tensor is not None and call.x is not None
    wanted, given = call.tensor[2], Call("")
    if not isinstance(out, Tensor) or (out.dim() or 1) == len(wanted):
        call.out = describe(given, out, call.dim, "out")
    if call.out is None or given.tensor is None or given.tensor[2] != wanted:
        raise ArgumentError("HD208", f"out has shape {tuple(out.shape)}, expected {show_shape(wanted)}")
    _check_like(call.out, call.x)
    call.out_extent = given.extent


def _check_like(out: Tensor, x: Tensor) -> None:
    if out.dtype != x.dtype:
        raise ArgumentError("HD208", f"out has dtype {out.dtype}, expected {x.dtype}, that of x")
    if out.device != x.device:
        raise ArgumentError("HD208", f"out is on {out.device}, expected {x.device}, that of x")


def _writable(out: Tensor, name: str) -> Tensor:
    """Return `out` detached; raise an ArgumentError if it cannot be written."""
    if out.is_conj() or out.is_neg():
        raise ArgumentError("HD208", f"{name} is a lazily conjugated or negated view: pass the tensor itself")
    if out.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(
            "HD208", f"{name} requires a gradient, which would be lost: pass {name}.detach(), or use torch.no_grad()"
        )
    if out.is_inference() and not torch.is_inference_mode_enabled():
        raise ArgumentError("HD208", f"{name} was created in torch.inference_mode() and can be written only there")
    if overlaps_itself(out):
        raise ArgumentError(
            "HD208", f"{name} overlaps itself: several of its elements share memory, as in an expanded tensor"
        )
    return out.detach() if out.requires_grad else out


def overlaps_itself(x: Tensor) -> bool:
    """Return whether elements of a tensor may share memory: if a stride is within the reach of the smaller ones."""
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
        raise ArgumentError("HD204", f"root is {value}, expected 0 to {size - 1} in a group of {size} ranks")
    return value


def _route(route: Any) -> str:
    if not isinstance(route, str) or route not in ROUTES:
        raise ArgumentError("HD207", f"route is {show_repr(route)}, expected one of {', '.join(ROUTES)}")
    if route in ("gloo", "nccl") and not dist.is_initialized():
        raise ArgumentError(
            "HD207", f"route {route} needs torch.distributed, but destroy_process_group() was called here"
        )
    return str.__str__(route)  # the digest of a subclass, as of numpy's, is another one


def _counts(counts: Any) -> str | tuple[int, ...] | None:
    if counts is None or isinstance(counts, str):
        return counts and str.__str__(counts)
    try:
        return tuple(int(index(c)) for c in counts)
    except TypeError:
        raise ArgumentError(
            "HD213", f"counts must be integers, the name of a rule or None, got {show(counts)}"
        ) from None


def _int(value: Any, name: str) -> int:
    if type(value) is int:
        return value
    with suppress(TypeError):
        if not isinstance(value, (bool, Tensor)):
            return int(index(value))
    hint = " (a communicator is given as group=)" if type(value).__module__.startswith("mpi4py") else ""
    raise ArgumentError("HD201", f"{name} must be an int, got {show(value)}{hint}")


def not_a_tensor(x: Any, name: str) -> str:
    """The message for an argument that should be a tensor; of a numpy array, also how it becomes one."""
    hint = " (torch.from_numpy converts an array)" if isinstance(x, np.ndarray) else ""
    return f"{name} must be a torch.Tensor, got {show(x)}{hint}"


def show(value: Any) -> str:
    """A value as a message shows it: in one line, at most 100 characters."""
    if isinstance(value, np.ndarray):
        return f"ndarray of shape {value.shape} and dtype {value.dtype}"
    return "a tensor" if isinstance(value, Tensor) else f"{type(value).__name__} {show_repr(value)}"[:100]


def show_repr(value: Any) -> str:
    """The repr of a value, also of one whose repr fails."""
    try:
        return repr(value)
    except Exception:  # not the error to report
        return "(its repr fails)"
