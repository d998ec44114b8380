"""The verb split."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hpcdist import abort, agree, checks, gradient, handle, layout, results, structures, world
from hpcdist.buffers import DTYPES, Blocks, blocks, copyable, overlap, row_major, written
from hpcdist.call import LOST, SHARED, Call
from hpcdist.control import objects
from hpcdist.groups import Group, group_of
from hpcdist.routes import select
from hpcdist.team import Team, team_of
from hpcdist.tensors.dtypes import MemoryKind
from hpcdist.tree import finished, rebuild

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["split"]

_MAX_DIMS = 64  # torch's own limit


def split(
    x: Any,
    dim: int = 0,
    root: int | None = 0,
    counts: str | Sequence[int] | None = None,
    *,
    group: dist.ProcessGroup | MPI.Comm | None = None,
    route: str = "auto",
    out: torch.Tensor | None = None,
    allow_pickle: bool = False,
    async_op: bool = False,
) -> Any:
    """Give each rank its part, along `dim`, of a tensor that the root holds: the inverse of gather.

    Collective over `group`, unless `root` is None: then every rank holds the whole `x`, takes its part of it, and
    nothing is communicated or compared.

    Args:
        x: on the root the whole tensor: any shape but 0-d, any dtype and strides, on the CPU or a GPU. Or a structure:
            its tensors, numpy arrays and lists are cut, each by itself, and every rank gets all single values. None
            on the other ranks.
        dim: the dimension to cut; may be negative. Must be the same number on all ranks.
        root: the rank in `group` that holds `x`, or None if all do. Must agree.
        counts: the extent along `dim` of each rank's part, or the name of a rule: "block" (the default: parts differ
            by at most one row, the longer ones first) or "chunk" (torch.chunk's: the ceiling for each rank until no
            row is left). Needed on the root only; another rank may pass None or the same.
        group: a torch ProcessGroup or an mpi4py communicator; None for all ranks. Must be the same on all its ranks.
        route: "auto", "nccl", "gloo", "mpi" or "hdf5". Must agree.
        out: memory for this rank's part, of its shape and dtype; each rank is free to give it. Not for structures,
            and not where a gradient is needed. Autograd counts it as written in place.
        allow_pickle: whether other objects in a structure may travel as pickles. Must agree.
        async_op: return a :class:`Handle` at once, and go on in the background. Must agree.

    Returns:
        On each rank its part: contiguous memory that it owns (or `out`), on `out`'s device, else on the rank's own GPU
        if `x` is on one and it has one, else on the CPU. Along dim 0 the root sends straight from `x`; along another
        dim, or if `x` is strided, it makes one copy. With `root` None: a view of `x` (or `out`), or a
        structure of views. Where `x` requires a
        gradient, it flows back to the root; every rank has to call backward.

    Raises:
        RankError: on every rank, if an argument is wrong on one of them or they do not agree. Nothing has moved, and
            the next call can succeed.
        TypeError, ValueError: on this rank, for a `group` that is none or does not hold it, and for any wrong argument
            if `root` is None.

    Example, on 3 ranks::

        >>> x = torch.arange(5) if rank == 0 else None
        >>> hd.split(x)
        tensor([0, 1])   # on rank 0; tensor([2, 3]) on rank 1, tensor([4]) on rank 2
    """

    here = world.current()
    if root is None:
        return handle.at_once(lambda: _local(x, dim, counts, group_of(group, here), out), async_op)

    def step(team: Team) -> Any:
        return _split(team, x, dim, root, counts, route, out, allow_pickle)

    result = handle.start("split", team_of(group, here), step, async_op)
    return result if out is None else written(out, result)


def _split(
    team: Team,
    x: Any,
    dim: int,
    root: int,
    counts: str | Sequence[int] | None,
    route: str,
    out: torch.Tensor | None,
    allow_pickle: bool,
) -> Any:
    here = team.settings.device
    call = checks.split_call(x, dim, root, counts, route, out, team.rank, team.size, here.type == "cuda", allow_pickle)
    agreed = agree.exchange(team, call)
    cut = _describe(team, call)
    if cut is None:
        objects.raise_problems(
            "split", {r: "out is given, but the root has no tensor" for r, n in enumerate(agreed.out_extents) if n >= 0}
        )
        return structures.distribute(team, call, agreed.kinds, allow_pickle)
    agree.refuse("split", agreed, cut.extents)
    way = select.agreed("split", route, team, agreed.kinds)
    whole = call.x
    device = (
        whole.device
        if whole is not None
        else here
        if agreed.kinds[team.rank] == MemoryKind.CUDA
        else torch.device("cpu")
    )

    def forward() -> torch.Tensor:
        with abort.Transfer("split", team.size):
            given = call.out
            take = (lambda: cut.shard(team.rank, device)) if given is None else lambda: given
            part = results.allocate("split", team, cut.counts, take, agreed)
            landing = part if part.is_contiguous() else torch.empty_like(part, memory_format=torch.contiguous_format)
            messages = None if whole is None else row_major(cut.pack(whole), call.out)
            way.scatterv(team, messages, landing, cut.counts, cut.displs, root)
            if landing is not part:
                copyable(part).copy_(copyable(landing))
            return part

    def backward(grad: torch.Tensor) -> torch.Tensor | None:
        if whole is None:
            way.gatherv(team.front, grad, None, cut.counts, cut.displs, root)
            return None
        total, landing = cut.landing(None, device)
        way.gatherv(team.front, grad, landing, cut.counts, cut.displs, root)
        cut.unpack(landing, total)
        return total

    result = gradient.carried("split", team, agreed.grad, x, forward, backward)
    return result if out is None else out


def _describe(team: Team, call: Call) -> Blocks | None:
    """The root tells how its tensor is cut: one small broadcast, since the others hold nothing to know it from.

    None, if it has a structure.
    """
    from mpi4py import MPI

    header = array("q", bytes(8 * (2 + _MAX_DIMS + team.size)))
    if call.x is not None:
        shape = call.x.shape
        header[: 2 + len(shape)] = array("q", [DTYPES[call.x.dtype], len(shape), *shape])
        header[2 + _MAX_DIMS :] = array("q", layout.counts_of(call.counts, shape[call.dim], team.size))
    elif call.trees:
        header[0] = -1
    team.comm.Bcast([header, MPI.INT64_T], root=call.root)
    code, ndim, *rest = header
    if code < 0:
        return None
    dtype = next(dtype for dtype, number in DTYPES.items() if number == code)
    return blocks(tuple(rest[:ndim]), call.said_dim % ndim, tuple(rest[_MAX_DIMS:]), dtype)


def _local(x: Any, dim: int, counts: object, group: Group, out: object) -> Any:
    """This rank's part of a tensor, or of a structure, that every rank holds."""
    rank, size = group.rank, group.size
    call = checks.split_call(x, dim, rank, counts, "auto", None, rank, size, False, True)
    if call.trees and out is None:
        mine = call.trees[rank]
        return rebuild(mine.spec, lambda kind, i: finished(kind, mine.tensors[i], True))
    if call.problem is not None or call.x is None:
        raise ValueError(f"split(): {call.problem or 'out is given, but x is not a tensor'}")
    cut = layout.counts_of(call.counts, call.extent, size)
    part: torch.Tensor = x.narrow(call.dim, layout.displs(cut)[rank], cut[rank])
    if out is None:
        return part
    if not isinstance(out, torch.Tensor) or out.shape != part.shape or out.dtype != part.dtype:
        raise ValueError(f"split(): out must be a {part.dtype} tensor of shape {tuple(part.shape)}")
    if (part.requires_grad or out.requires_grad) and torch.is_grad_enabled():
        raise ValueError(f"split(): {LOST}")
    if checks.shares_places(out):
        raise ValueError(f"split(): {SHARED}")
    source = copyable(part)
    copyable(out.detach()).copy_(source.clone() if overlap(out, part) else source)
    return out
