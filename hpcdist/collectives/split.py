"""The verb split."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, Unpack, overload

import torch
from torch import Tensor

from hpcdist import layout, limits
from hpcdist.collectives import results
from hpcdist.collectives.run import Operation, run
from hpcdist.collectives.structures import Distribution
from hpcdist.comm.groups import Group
from hpcdist.comm.team import Team
from hpcdist.control import objects
from hpcdist.routes import select
from hpcdist.runtime import background, world
from hpcdist.tensors.blocks import Blocks, blocks
from hpcdist.tensors.dtypes import MemoryKind
from hpcdist.tensors.storage import DTYPES, copyable, overlap, row_major
from hpcdist.tensors.tree import finished, rebuild
from hpcdist.validation import collective, local
from hpcdist.validation.call import LOST, SHARED, Call
from hpcdist.validation.collective import Agreed

if TYPE_CHECKING:
    from hpcdist.comm.signatures import GroupLike, S, StructureOptions
    from hpcdist.runtime.background import Handle

__all__ = ["split"]

Counts: TypeAlias = str | Sequence[int] | None


# fmt: off
@overload
def split(x: Tensor | None, dim: int = 0, root: int | None = 0, counts: Counts = None, *,  # type: ignore[overload-overlap]
          async_op: Literal[False] = False, **options: Unpack[StructureOptions]) -> Tensor: ...
@overload
def split(x: Tensor | None, dim: int = 0, root: int | None = 0, counts: Counts = None, *,  # type: ignore[overload-overlap]
          async_op: Literal[True], **options: Unpack[StructureOptions]) -> Handle[Tensor]: ...
@overload
def split(x: S | None, dim: int = 0, root: int | None = 0, counts: Counts = None, *,
          async_op: Literal[False] = False, **options: Unpack[StructureOptions]) -> S: ...
@overload
def split(x: S | None, dim: int = 0, root: int | None = 0, counts: Counts = None, *,
          async_op: Literal[True], **options: Unpack[StructureOptions]) -> Handle[S]: ...
@overload
def split(x: object, dim: int = 0, root: int | None = 0, counts: Counts = None, *,
          async_op: bool = False, **options: Unpack[StructureOptions]) -> Any: ...
# fmt: on
def split(
    x: Any,
    dim: int = 0,
    root: int | None = 0,
    counts: Counts = None,
    *,
    group: GroupLike | None = None,
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
    op = Split(x, dim, root, counts, route, out, allow_pickle)
    if root is None:
        of = here.context.group_of(group)
        return background.at_once(lambda: _local(op, of), async_op)
    return run(op, here.context.team_of(group), async_op)


class Split(Operation):
    """The root's tensor, or structure, cut into one part a rank."""

    name = "split"

    def __init__(
        self, x: Any, dim: int, root: int | None, counts: Any, route: str, out: Tensor | None, allow_pickle: bool
    ) -> None:
        self.x, self.dim, self.root, self.counts = x, dim, root, counts
        self.route, self.out, self.allow_pickle = route, out, allow_pickle

    def validate(self, team: Team) -> Call:
        return local.split_call(self, team.rank, team.size, team.settings.device.type == "cuda")

    def plan(self, team: Team, call: Call, agreed: Agreed) -> None:
        cut = _describe(team, call)
        self._structure: Distribution | None = None
        if cut is None:
            problem = "out is given, but the root has no tensor"
            given = [rank for rank, extent in enumerate(agreed.out_extents) if extent >= 0]
            objects.raise_problems(self.name, dict.fromkeys(given, problem))
            self._structure = Distribution(team, call, agreed.kinds)
            return
        extents = [box.shape[call.dim_arg] for (box,) in cut.boxes]
        collective.check_out(self.name, agreed, extents)
        self._route = select.agreed(self.name, call.route, team, agreed.kinds)
        self._blocks, self._root, self._agreed = cut, call.root, agreed
        self._whole, self._dest = call.x, call.out
        on_gpu = agreed.kinds[team.rank] == MemoryKind.CUDA
        own = team.settings.device if on_gpu else torch.device("cpu")
        self._device = own if call.x is None else call.x.device

    def forward(self, team: Team) -> Any:
        if self._structure is not None:
            return self._structure.forward(team)
        cut, dest = self._blocks, self._dest
        take = (lambda: cut.part(team.rank, self._device)) if dest is None else lambda: dest
        part = results.allocate(self.name, team, cut.counts, take, self._agreed)
        buffer = part if part.is_contiguous() else torch.empty_like(part, memory_format=torch.contiguous_format)
        messages = None if self._whole is None else row_major(cut.pack(self._whole), dest)
        self._route.scatterv(team, messages, buffer, cut.counts, cut.displs, self._root)
        if buffer is not part:
            copyable(part).copy_(copyable(buffer))
        return part if self.out is None else self.out

    def backward(self, team: Team, grad: Tensor) -> Tensor | None:
        cut = self._blocks
        if self._whole is None:
            self._route.gatherv(team, grad, None, cut.counts, cut.displs, self._root)
            return None
        total, buffer = cut.recv_buffer(None, self._device)
        self._route.gatherv(team, grad, buffer, cut.counts, cut.displs, self._root)
        cut.unpack(buffer, total)
        return total

    def finish(self, result: Any) -> Any:
        return result if self._structure is None else self._structure.finish(result, self.allow_pickle)


def _describe(team: Team, call: Call) -> Blocks | None:
    """The root tells how its tensor is cut: one small broadcast, since the others hold nothing to know it from.

    None, if it has a structure.
    """
    from mpi4py import MPI

    header = array("q", bytes(8 * (2 + limits.MAX_DIMS + team.size)))
    if call.x is not None:
        shape = call.x.shape
        header[: 2 + len(shape)] = array("q", [DTYPES[call.x.dtype], len(shape), *shape])
        header[2 + limits.MAX_DIMS :] = array("q", layout.counts_of(call.counts, shape[call.dim], team.size))
    elif call.trees:
        header[0] = -1
    team.comm.Bcast([header, MPI.INT64_T], root=call.root)
    code, ndim, *rest = header
    if code < 0:
        return None
    dtype = next(dtype for dtype, number in DTYPES.items() if number == code)
    return blocks(tuple(rest[:ndim]), call.dim_arg % ndim, tuple(rest[limits.MAX_DIMS :]), dtype)


def _local(op: Split, group: Group) -> Any:
    """This rank's part of a tensor, or of a structure, that every rank holds."""
    rank, size, out = group.rank, group.size, op.out
    call = local.split_call(Split(op.x, op.dim, rank, op.counts, "auto", None, True), rank, size, False)
    if call.trees and out is None:
        mine = call.trees[rank]
        return rebuild(mine.spec, lambda kind, i: finished(kind, mine.tensors[i], True))
    if call.problem is not None or call.x is None:
        raise ValueError(f"split(): {call.problem or 'out is given, but x is not a tensor'}")
    cut = layout.counts_of(call.counts, call.extent, size)
    part: torch.Tensor = op.x.narrow(call.dim, layout.displs(cut)[rank], cut[rank])
    if out is None:
        return part
    if not isinstance(out, torch.Tensor) or out.shape != part.shape or out.dtype != part.dtype:
        raise ValueError(f"split(): out must be a {part.dtype} tensor of shape {tuple(part.shape)}")
    if (part.requires_grad or out.requires_grad) and torch.is_grad_enabled():
        raise ValueError(f"split(): {LOST}")
    if local.shares_places(out):
        raise ValueError(f"split(): {SHARED}")
    source = copyable(part)
    copyable(out.detach()).copy_(source.clone() if overlap(out, part) else source)
    return out
