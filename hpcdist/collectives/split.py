"""The operation split."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, Unpack, overload

import torch
from torch import Tensor

from hpcdist import layout
from hpcdist.collectives import repeat, results
from hpcdist.collectives.distribution import Distribution
from hpcdist.collectives.repeat import Repeatable
from hpcdist.collectives.run import Description, Parts, run
from hpcdist.comm.team import Group, Team
from hpcdist.control import objects
from hpcdist.errors import coded, refusal
from hpcdist.layout import Box, limits
from hpcdist.routes import select
from hpcdist.routes.base import Method
from hpcdist.routes.inline import BEHIND_HEADERS
from hpcdist.runtime import background, world
from hpcdist.tensors import pool
from hpcdist.tensors.accelerator import MemoryKind
from hpcdist.tensors.blocks import Blocks, blocks
from hpcdist.tensors.storage import DTYPES, copyable, overlap, row_major
from hpcdist.tensors.tree import decode, rebuild
from hpcdist.validation import collective, local
from hpcdist.validation.call import LOSES_GRADIENT, SELF_OVERLAP, Call
from hpcdist.validation.collective import Agreed

if TYPE_CHECKING:
    from hpcdist.comm.settings import GroupLike, S, SharedKeywords
    from hpcdist.runtime.background import Handle

__all__ = ["operation", "split"]

Counts: TypeAlias = str | Sequence[int] | None


# fmt: off
@overload
def split(x: Tensor | None, dim: int = 0, root: int | None = 0, counts: Counts = None, *,  # type: ignore[overload-overlap]
          async_op: Literal[False] = False, **options: Unpack[SharedKeywords]) -> Tensor: ...
@overload
def split(x: Tensor | None, dim: int = 0, root: int | None = 0, counts: Counts = None, *,  # type: ignore[overload-overlap]
          async_op: Literal[True], **options: Unpack[SharedKeywords]) -> Handle[Tensor]: ...
@overload
def split(x: S | None, dim: int = 0, root: int | None = 0, counts: Counts = None, *,
          async_op: Literal[False] = False, **options: Unpack[SharedKeywords]) -> S: ...
@overload
def split(x: S | None, dim: int = 0, root: int | None = 0, counts: Counts = None, *,
          async_op: Literal[True], **options: Unpack[SharedKeywords]) -> Handle[S]: ...
@overload
def split(x: object, dim: int = 0, root: int | None = 0, counts: Counts = None, *,
          async_op: bool = False, **options: Unpack[SharedKeywords]) -> Any: ...
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
    shared: bool = False,
    async_op: bool = False,
) -> Any:
    """Split a tensor of the root along `dim`, one part for each rank: the inverse of gather.

    Collective over `group`, unless `root` is None. Then every rank holds the whole `x`, and takes its own part without
    communication or comparison.

    Args:
        x: on the root, the whole tensor: any shape but 0-d, any dtype and strides, on the CPU or a GPU. Or a structure:
            each of its tensors, numpy arrays and lists is split, and every rank gets all single values. None on the
            other ranks.
        dim: the dimension to split; may be negative. Must be the same number on all ranks.
        root: the rank in `group` that holds `x`, or None if all do. Must agree.
        counts: the extent along `dim` of each rank's part, or the name of a rule: "block" (the default: parts differ
            by at most one row, the longer ones first) or "chunk" (as torch.chunk: the ceiling for each rank until no
            rows are left). Required on the root only; other ranks may pass None or the same.
        group: a torch ProcessGroup, 1-d DeviceMesh or mpi4py communicator; None means all ranks. Must agree.
        route: "auto", "nccl", "gloo", "mpi" or "hdf5". Must agree.
        out: memory for this rank's part, of its shape and dtype; optional on each rank. Not allowed for structures,
            or if a gradient is needed. To autograd, it is modified in place.
        allow_pickle: whether to send other objects in a structure as pickles. Must agree.
        shared: whether the parts of all ranks of a node are in one shared memory. The root copies the parts of its own
            node there. For tensors in host memory, without `out`. Must agree; no effect if `root` is None.
        async_op: whether to return a :class:`Handle` at once, and continue in the background. Must agree.

    Returns:
        On each rank, its part: `out`, on any device, or new contiguous memory on the rank's own GPU if `x` is on a GPU
        and the rank has one, else on the CPU. Along dim 0, the root sends directly from `x`; along another dim, or if
        `x` is strided, it makes one copy. With `root` None: a view of `x` (or `out`), or a structure of views. If `x`
        requires a gradient, it flows back to the root; every rank must call backward. With `shared`, the part is a
        contiguous tensor. Treat it as read-only: writes are private, as with :func:`hpcdist.concat`.

    Raises:
        RankError: on every rank, if an argument is wrong on any rank, or arguments do not agree. No data have moved,
            and the next call can succeed.
        TypeError, ValueError: on this rank, if `group` is not a group, or this rank is not in it, and for any wrong
            argument if `root` is None.

    Example, on 3 ranks::

        >>> x = torch.arange(5) if rank == 0 else None
        >>> hd.split(x)
        tensor([0, 1])   # on rank 0; tensor([2, 3]) on rank 1, tensor([4]) on rank 2
    """

    make = partial(operation, x, dim, root, counts, route, out, allow_pickle, shared)
    if root is None:
        of = world.context().group_of(group)
        return background.run_now(lambda: _local(make(), of), async_op)
    team = world.team_of(group)
    if not (async_op or shared) and allow_pickle is False and (x is None or isinstance(x, Tensor)):
        return repeat.call("split", make, team, x, dim, root, route, out, counts)
    return run(make(), team, async_op)


def operation(
    x: Any, dim: Any, root: Any, counts: Any, route: Any, out: Any, allow_pickle: Any, shared: Any
) -> Scatter:
    """Return the operation of a call of split, whose arguments are not validated."""
    return Scatter(x, dim, root, counts, route, out, allow_pickle, bool(shared))


class Scatter(Repeatable):
    """Split a tensor or structure of the root into one part for each rank."""

    name = "split"

    def __init__(
        self,
        x: Any,
        dim: int,
        root: int | None,
        counts: Any,
        route: str,
        out: Tensor | None,
        allow_pickle: bool,
        shared: bool = False,
    ) -> None:
        self.x, self.dim, self.root, self.counts, self.shared = x, dim, root, counts, shared
        self.route, self.out, self.allow_pickle = route, out, allow_pickle

    def validate(self, team: Team) -> Call:
        call = local.split_call(self, team.rank, team.size, team.settings.device.type != "cpu")
        if call.x is not None and local.may_be_inline(call):
            call.inline = _inline(team, call, call.x)
        elif team.rank != call.root:
            call.inline = ()
        return results.check_shared(call, self.shared, self.x)

    def plan(self, team: Team, call: Call, agreed: Agreed) -> None:
        came = _blocks_behind_header(team, call, agreed) if agreed.inline else None
        cut = _broadcast_blocks(team, call) if came is None else came[0]
        self._place = None if came is None else came[1]
        self._structure: Distribution | None = None
        if cut is None:
            problem = coded("HD211", "out is given, but the root has no tensor")
            ranks = [rank for rank, extent in enumerate(agreed.out_extents) if extent >= 0]
            objects.raise_problems(self.name, dict.fromkeys(ranks, problem))
            self._structure = Distribution(team, call, agreed.kinds)
            return
        extents = [box.shape[call.dim_arg] for (box,) in cut.boxes]
        collective.check_out(self.name, agreed, extents)
        self._route = select.agreed(self.name, call.route, team, agreed.kinds)
        self._blocks, self._root = cut, call.root
        on_gpu = agreed.kinds[team.rank] == MemoryKind.GPU
        own = team.settings.device if on_gpu else torch.device("cpu")
        self._device = own if call.x is None else call.x.device
        self.bind(call.x, call.out, agreed)

    def bind(self, x: Tensor | None, out: Tensor | None, agreed: Agreed) -> None:
        self._whole, self._dest, self._agreed = x, out, agreed

    def parts(self, team: Team) -> Parts:
        cut, whole = self._blocks, Box((0,) * len(self._blocks.shape), self._blocks.shape)
        sources = [whole if rank == self._root else None for rank in range(team.size)]
        return Parts(self._route, cut.shape, cut.dtype, self._device, sources, [box for (box,) in cut.boxes])

    def method(self, team: Team) -> Method:
        nbytes = self._blocks.nbytes
        inline = self.inline and self._place is not None
        found = BEHIND_HEADERS if inline else self._route.method(team, "scatterv", nbytes)
        return results.method(team, self.shared, nbytes, found)

    def describe(self, team: Team, agreed: Agreed) -> Description:
        return super().describe(team, agreed) if self._structure is None else self._structure.describe(team, agreed)

    def forward(self, team: Team) -> Any:
        if self._structure is not None:
            return self._structure.forward(team)
        cut, dest = self._blocks, self._dest
        if self.shared:
            from hpcdist.routes import window  # which imports MPI

            found = window.split(team, self._whole, [box for (box,) in cut.boxes], cut.dtype, self._root)
            if found is not None:
                return found
        place = self._place if self.inline else None  # of what has come behind the root's header

        def take() -> tuple[Tensor, Tensor, Tensor | None]:
            part = cut.empty_part(team.rank, self._device) if dest is None else dest
            buffer = part if part.is_contiguous() else pool.empty(part.shape, part.dtype, part.device)
            sends = place is None and self._whole is not None
            return part, buffer, row_major(cut.pack(self._whole), dest) if sends else None  # type: ignore[arg-type]

        part, buffer, messages = results.allocate(self.name, team, cut.counts, take, self._agreed)
        if place is not None:
            team.headers.copy((place,), buffer)  # type: ignore[union-attr]
        else:
            self._route.scatterv(team, messages, buffer, cut.counts, cut.displs, self._root)
        if buffer is not part:
            copyable(part).copy_(copyable(buffer))
        return part if self.out is None else self.out

    def keep(self, team: Team) -> int | None:
        if self._structure is not None or self._place is None or self._blocks.in_place is None:
            return None
        is_root = self._whole is not None
        del self.x, self._whole
        self.out = self._dest = None
        self._like = self._blocks.empty_part(team.rank, torch.device("cpu"))
        return _meta_nbytes(self._blocks, team) if is_root else 0

    def again(self, team: Team, out: Tensor | None) -> Tensor:
        part = torch.empty_like(self._like) if out is None else out
        team.headers.copy((self._place,), part)  # type: ignore[union-attr, arg-type]
        return part

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


def _inline(team: Team, call: Call, x: Tensor) -> Sequence[Tensor | bytes]:
    """Return what travels behind the root's header: the blocks, and the messages, one after the other, if they fit."""
    counts = layout.counts_of(call.counts, x.shape[call.dim], team.size)
    meta = array("q", [DTYPES[x.dtype], x.dim(), *x.shape, *counts]).tobytes()
    if len(meta) + x.nbytes > team.inline:
        return (meta,)
    return meta, row_major(blocks(tuple(x.shape), call.dim, tuple(counts), x.dtype).pack(x))


def _meta_nbytes(cut: Blocks, team: Team) -> int:
    return 8 * (2 + len(cut.shape) + team.size)


def _blocks_behind_header(team: Team, call: Call, agreed: Agreed) -> tuple[Blocks, slice | None]:
    """Return the blocks that came behind the root's header, and where this rank's part lies there if it came, too."""
    buffers, nbytes = team.headers, agreed.inlines[call.root]
    assert buffers is not None
    code, ndim, *rest = array("q", buffers.all[buffers.place(call.root, 0, nbytes // 8 * 8)])
    cut = _made(code, call.dim_arg % ndim, tuple(rest[:ndim]), tuple(rest[ndim : ndim + team.size]))
    start = _meta_nbytes(cut, team)
    if nbytes < start + cut.nbytes:
        return cut, None
    return cut, buffers.place(call.root, start + cut.displs[team.rank], cut.counts[team.rank])


def _made(code: int, dim: int, shape: tuple[int, ...], extents: tuple[int, ...]) -> Blocks:
    return blocks(shape, dim, extents, next(dtype for dtype, number in DTYPES.items() if number == code))


def _broadcast_blocks(team: Team, call: Call) -> Blocks | None:
    """Broadcast the blocks of the root's tensor, of which the others have no metadata; return None for a structure."""
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
    return _made(code, call.dim_arg % ndim, tuple(rest[:ndim]), tuple(rest[limits.MAX_DIMS :]))


def _local(op: Scatter, group: Group) -> Any:
    """Return this rank's part of a tensor or structure that every rank holds."""
    rank, size, out = group.rank, group.size, op.out
    call = local.split_call(Scatter(op.x, op.dim, rank, op.counts, "auto", None, True), rank, size, False)
    if call.trees and out is None:
        mine = call.trees[rank]
        return rebuild(mine.spec, lambda kind, i: decode(kind, mine.tensors[i], True))
    if call.problem is not None or call.x is None:
        raise refusal(ValueError, "HD211", f"split(): {call.problem or 'out is given, but x is not a tensor'}")
    cut = layout.counts_of(call.counts, call.extent, size)
    part: torch.Tensor = op.x.narrow(call.dim, layout.displs(cut)[rank], cut[rank])
    if out is None:
        return part
    if not isinstance(out, torch.Tensor) or out.shape != part.shape or out.dtype != part.dtype:
        raise refusal(ValueError, "HD208", f"split(): out must be a {part.dtype} tensor of shape {tuple(part.shape)}")
    if (part.requires_grad or out.requires_grad) and torch.is_grad_enabled():
        raise refusal(ValueError, "HD208", f"split(): {LOSES_GRADIENT}")
    if local.overlaps_itself(out):
        raise refusal(ValueError, "HD208", f"split(): {SELF_OVERLAP}")
    source = copyable(part)
    copyable(out.detach()).copy_(source.clone() if overlap(out, part) else source)
    return out
