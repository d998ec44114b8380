"""The operation split."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, Unpack, overload

import torch
from torch import Tensor

from hpcdist import layout
from hpcdist.collectives.kept import Movement, encode, prefix_of
from hpcdist.collectives.run import Plannable, run
from hpcdist.collectives.structures import Distribution
from hpcdist.comm.team import Group, Team
from hpcdist.control import objects
from hpcdist.errors import coded, refusal
from hpcdist.routes.route import Vector
from hpcdist.runtime import background, world
from hpcdist.tensors import pool
from hpcdist.tensors.accelerator import MemoryKind
from hpcdist.tensors.blocks import Blocks, blocks
from hpcdist.tensors.storage import DTYPES, copyable, row_major
from hpcdist.tensors.tree import restore
from hpcdist.validation import local
from hpcdist.validation.collective import Agreed, Call

if TYPE_CHECKING:
    from hpcdist.comm.team import GroupLike, S, SharedOptions
    from hpcdist.runtime.background import Handle

Counts: TypeAlias = str | Sequence[int] | None


# fmt: off
@overload
def split(x: S | None, dim: int = 0, root: int | None = 0, counts: Counts = None, *,
          async_op: Literal[False] = False, **options: Unpack[SharedOptions]) -> S: ...
@overload
def split(x: S | None, dim: int = 0, root: int | None = 0, counts: Counts = None, *,
          async_op: Literal[True], **options: Unpack[SharedOptions]) -> Handle[S]: ...
@overload
def split(x: object, dim: int = 0, root: int | None = 0, counts: Counts = None, *,
          async_op: bool = False, **options: Unpack[SharedOptions]) -> Any: ...
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

    Collective over `group`, unless `root` is None. Blocks until all ranks of `group` have called it; after the timeout
    of :func:`hpcdist.init` the job ends (:class:`HangError`).

    With ``root=None`` every rank holds the whole `x`, and takes its own part without communication or comparison.

    Args:
        x: on the root, the whole tensor: any shape but 0-d, any dtype and strides, on the CPU or a GPU. Or a structure:
            each of its tensors, numpy arrays and lists is split, and every rank gets all single values. None on the
            other ranks.
        dim: the dimension to split; may be negative. Must be the same number on all ranks.
        root: the rank in `group` that holds `x`, or None if all do. Must agree.
        counts: the extent along `dim` of each rank's part, or the name of a rule. By "block", the default, parts differ
            by at most one row, and the first ones are longer. "chunk" is torch.chunk's rule: each rank gets the ceiling
            until no rows are left. Required on the root only; other ranks may pass None or the same.
        group: a torch ProcessGroup, 1-d DeviceMesh or mpi4py communicator; None means all ranks. Must agree.
        route: "auto", "nccl", "gloo", "mpi" or "hdf5". Must agree.
        out: memory for this rank's part, of its shape and dtype; optional on each rank. Not allowed for structures,
            if a gradient is needed, or if `root` is None. To autograd, it is modified in place.
        allow_pickle: whether to send other objects in a structure as pickles. Must agree.
        shared: whether the parts of all ranks of a node are in one shared memory. The root copies the parts of its own
            node there. For tensors in host memory, without `out`. Must agree; no effect if `root` is None.
        async_op: whether to return a :class:`Handle` at once, and continue in the background. Must agree.

    Returns:
        This rank's part: `out` if given, else a new contiguous tensor, on this rank's GPU if `x` is on a GPU and the
        rank has one, otherwise on the CPU. For ``dim=0`` its shape is ``(counts[rank], *x.shape[1:])``. Along dim 0,
        the root sends directly from `x`; along another dim, or if `x` is strided, it makes one copy. With
        ``root=None``: a view of `x`, or a structure of views.

        If `x` requires a gradient, it flows back to the root; every rank must call backward. With `shared`, treat the
        part as read-only: writes are private, as with :func:`hpcdist.concat`.

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

    op = Scatter(x, dim, root, counts, route, out, allow_pickle, bool(shared))
    if root is None:
        ranks = world.context().group_of(group)
        return background.run_now(lambda: _local(op, ranks), async_op)
    return run(op, world.team_of(group), async_op)


@dataclass(eq=False)
class Scatter(Plannable):
    """Split a tensor or structure of the root into one part for each rank."""

    x: Any
    dim: Any
    root: Any
    counts: Any
    route: Any
    out: Any
    allow_pickle: Any
    shared: bool = False
    _structure: Distribution | None = field(default=None, init=False)
    name = "split"

    def arguments(self) -> Hashable:
        known = key_of(self.counts, self.dim, self.root, self.route)
        return None if known is None or type(self.allow_pickle) is not bool else (self.allow_pickle, *known)

    def check(self, team: Team, call: Call) -> None:
        local.check_split(self, team.rank, team.size, team.settings.device.type != "cpu", call)
        if team.rank != call.root:
            call.inline = ()
        elif call.x is not None:
            local.put_inline(call, team, _encoded(call, team.size))

    def plan(self, team: Team, call: Call, agreed: Agreed) -> None:
        if agreed.inline:
            header = team.headers.data(call.root, 0, agreed.inlines[call.root] // 8 * 8)
        else:
            header = team.comm.bcast(_encoded(call, team.size), call.root)
        if not header:
            problem = coded("HD211", "out is given, but the root has no tensor")
            objects.raise_problems(self.name, dict.fromkeys(agreed.outs, problem))
            self._structure = Distribution(team, call, agreed.kinds, self.allow_pickle)
            self.finish = self._structure.finish
            return
        self._blocks = cut = _decoded(header, call.dim_arg, team.size)
        self._root = call.root
        sources = [layout.whole(cut.shape) if rank == call.root else None for rank in range(team.size)]
        dests = [box for (box,) in cut.boxes]
        on_gpu = agreed.kinds[team.rank] == MemoryKind.GPU
        own = team.settings.device if on_gpu else torch.device("cpu")
        self._device = own if call.x is None else call.x.device
        parts = Movement(cut.shape, cut.dtype, sources, dests, [(call.root, dests[team.rank])])
        self.messages = [("scatterv", Vector(cut.counts, cut.displs, call.root))]
        self.bind(team, call, agreed, parts, prefix_of(2 + len(cut.shape) + team.size))

    def in_window(self, team: Team) -> Tensor | None:
        from hpcdist.routes import node_copy  # which imports MPI

        return node_copy.split(team, self.sent, [box for (box,) in self._blocks.boxes], self._blocks.dtype, self._root)

    def forward(self, team: Team) -> Any:
        return super().forward(team) if self._structure is None else self._structure.forward(team)

    def move(self, team: Team) -> Tensor:
        cut, dest = self._blocks, self.dest

        def take() -> tuple[Tensor, Tensor, Tensor | None]:
            part = pool.empty(cut.boxes[team.rank][0].shape, cut.dtype, self._device) if dest is None else dest
            buffer = part if part.is_contiguous() else pool.empty(part.shape, part.dtype, part.device)
            return part, buffer, None if self.sent is None else row_major(cut.pack(self.sent), dest)

        part, buffer, messages = self.allocate(team, take)
        self.carry(team, messages, buffer)
        if buffer is not part:
            copyable(part).copy_(copyable(buffer))
        return part

    def backward(self, team: Team, grad: Tensor) -> Tensor | None:
        cut, total, buffer = self._blocks, None, None
        if self.sent is not None:
            total, buffer = cut.recv_buffer(None, self._device)
        self.chosen(team).prepare(team, "gatherv", self.messages[0][1])(grad, buffer)
        if total is not None and buffer is not None:
            cut.unpack(buffer, total)
        return total


def key_of(counts: Any, *given: Any) -> tuple[Hashable, ...] | None:
    """Return these arguments of a call as ``arguments()`` does; None if they may change in place, or equal others."""
    if type(counts) in (list, tuple) and {int}.issuperset(map(type, counts)):
        counts = tuple(counts)
    elif not (counts is None or type(counts) is str):
        return None
    return (*given, counts) if {int, str, type(None)}.issuperset(map(type, given)) else None


def _encoded(call: Call, size: int) -> bytes:
    """Encode the blocks of the root's tensor, of which the others have no metadata; nothing if it has none."""
    if call.x is None:
        return b""
    counts = layout.counts_of(call.counts, call.x.shape[call.dim], size)
    return encode([DTYPES[call.x.dtype], call.x.dim(), *call.x.shape, *counts])


def _decoded(header: bytes, dim: int, size: int) -> Blocks:
    code, ndim, *rest = array("q", header)
    dtype = next(dtype for dtype, number in DTYPES.items() if number == code)
    return blocks(tuple(rest[:ndim]), dim % ndim, tuple(rest[ndim : ndim + size]), dtype)


def _local(op: Scatter, group: Group) -> Any:
    """Return this rank's part of a tensor or structure that every rank holds: views."""
    rank, size = group.rank, group.size
    own = Scatter(op.x, op.dim, rank, op.counts, "auto", None, True)
    call = local.call_of("split", local.check_split, own, rank, size, False)
    if call.problem is None and op.out is not None:
        call.problem = coded("HD211", "out is given, but with root=None each part is a view of x: copy it with copy_()")
    if call.problem is not None:
        raise refusal(ValueError, "HD211", f"split(): {call.problem}")
    if call.trees:
        mine = call.trees[rank]
        return restore(mine.spec, mine.tensors, True)
    counts = layout.counts_of(call.counts, call.extent, size)
    return op.x.narrow(call.dim, layout.displs(counts)[rank], counts[rank])
