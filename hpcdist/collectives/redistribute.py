"""The operation redistribute: move a tensor from one layout to another."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from torch import Tensor

from hpcdist.collectives import results
from hpcdist.collectives import run as driver
from hpcdist.collectives.run import Parts, Plannable
from hpcdist.collectives.transfer import Transfer, make_transfer
from hpcdist.comm.team import Team
from hpcdist.control import objects
from hpcdist.errors import coded
from hpcdist.layout import Layout
from hpcdist.routes import select
from hpcdist.routes.base import Method
from hpcdist.routes.inline import BEHIND_HEADERS
from hpcdist.runtime import world
from hpcdist.tensors import pool
from hpcdist.tensors.storage import copyable, of_bytes, overlap, row_major
from hpcdist.validation import local
from hpcdist.validation.call import LOSES_GRADIENT, Call
from hpcdist.validation.collective import Agreed

if TYPE_CHECKING:
    from hpcdist.comm.settings import GroupLike, Keywords
    from hpcdist.runtime.background import Handle

__all__ = ["Redistribute", "redistribute"]

_CACHED = 64  # transfer plans per team
Shape = tuple[int, ...]


# fmt: off
@overload
def redistribute(x: Tensor, src: Layout, dst: Layout, *,
                 async_op: Literal[False] = False, **options: Unpack[Keywords]) -> Tensor: ...
@overload
def redistribute(x: Tensor, src: Layout, dst: Layout, *,
                 async_op: Literal[True], **options: Unpack[Keywords]) -> Handle[Tensor]: ...
# fmt: on
def redistribute(
    x: Tensor,
    src: Layout,
    dst: Layout,
    *,
    group: GroupLike | None = None,
    route: str = "auto",
    out: Tensor | None = None,
    async_op: bool = False,
) -> Any:
    """Redistribute a tensor from one layout to another: from each rank's part in `src` to its part in `dst`.

    Collective over `group`. Each rank sends to another only elements that the other needs and does not have. Nothing is
    padded. Messages that are one run of memory are sent from and received into place. Others are packed once.

    Args:
        x: this rank's part of the tensor in `src`: any dtype and strides, on the CPU or a GPU. Dtype and number of
            dims must agree.
        src: the layout of the parts: Split, Block, Replicate or Boxes. Without counts, the parts' extents are used.
            Must agree.
        dst: the layout of the result. Without counts, the block rule. Must agree.
        group: a torch ProcessGroup, 1-d DeviceMesh or mpi4py communicator; None means all ranks. Must agree.
        route: "auto", "nccl", "gloo", "mpi" or "hdf5". Must agree.
        out: memory for the result, of its shape, dtype and device; optional on each rank.
        async_op: whether to return a :class:`Handle` at once, and continue in the background. Must agree.

    Returns:
        This rank's part in `dst`: new contiguous memory (or `out`), on x's device. If any rank needs a gradient, it
        flows back to the rank that sent an element (one of them, if several hold copies), as the sum over all ranks
        that received it; every rank must call backward.

    Raises:
        RankError: on every rank, if an argument is wrong on any rank, or the parts do not form a tensor in `src`. No
            data have moved, and the next call can succeed.
        TypeError, ValueError: on this rank, if `group` is not a group, or this rank is not in it.

    Example, on 2 ranks::

        >>> rows = torch.tensor([[0, 1, 2, 3]]) + 4 * rank       # row `rank` of a 2 x 4 tensor
        >>> hd.redistribute(rows, hd.Split(0), hd.Split(1))
        tensor([[0, 1],       # on rank 0; [[2, 3], [6, 7]] on rank 1
                [4, 5]])
    """

    return driver.run(Redistribute(x, src, dst, route, out), world.team_of(group), async_op)


class Redistribute(Plannable):
    """Redistribute a tensor.

    Attributes:
        moves: transfer of this rank, after plan().
    """

    moves: Transfer

    def __init__(self, x: Any, src: Any, dst: Any, route: Any, out: Any, name: str = "redistribute") -> None:
        self.x, self.src, self.dst, self.route, self.out, self.name = x, src, dst, route, out, name

    def validate(self, team: Team) -> Call:
        call = local.layout_call(self)
        if local.may_be_inline(call) and call.x is not None:
            meta = _meta(call).tobytes()
            fits = len(meta) + call.x.nbytes <= team.inline
            call.inline = (meta, row_major(call.x)) if fits else (meta,)
        return call

    def plan(self, team: Team, call: Call, agreed: Agreed) -> None:
        shapes, outs = _shapes(team, call, agreed.inline)
        assert call.x is not None
        self._parts = _parts(team, call.x, shapes, agreed) if agreed.inline else None
        self._shapes = shapes
        key = (self.src, self.dst, shapes, call.x.dtype, call.route, agreed.kinds)
        moves: Transfer | None = team.plans.get(key)
        if moves is None:
            route = select.agreed(self.name, call.route, team, agreed.kinds)
            moves = make_transfer(self.name, team, route, self.src, self.dst, shapes, call.x)
            team.plans[key] = moves
            if len(team.plans) > _CACHED:
                team.plans.popitem(last=False)
        self.moves = moves
        self.bind(call.x, call.out, agreed)
        self._check_out(outs)

    def bind(self, x: Tensor | None, out: Tensor | None, agreed: Agreed) -> None:
        assert x is not None
        self._shard, self._dest, self._agreed = x, out, agreed

    def parts(self, team: Team) -> Parts:
        moves, x = self.moves, self._shard
        _, sources = self.src.held(self._shapes)
        return Parts(moves.route, moves.shape, x.dtype, x.device, sources, moves.boxes)

    def method(self, team: Team) -> Method:
        return BEHIND_HEADERS if self.inline and self._parts is not None else self.moves.method(team)

    def _check_out(self, outs: Sequence[Shape | None]) -> None:
        shapes = {rank: shape for rank, shape in enumerate(outs) if shape is not None}
        expected = [box.shape for box in self.moves.boxes]
        odd = {r: got for r, got in shapes.items() if got != expected[r]}
        wrong = {r: coded("HD208", f"out has shape {got}, expected {expected[r]}") for r, got in odd.items()}
        objects.raise_problems(self.name, wrong)
        objects.raise_problems(self.name, dict.fromkeys(shapes, LOSES_GRADIENT) if self.grad else {})

    def forward(self, team: Team) -> Tensor:
        shard, dest = self._shard, self._dest

        def make() -> tuple[Tensor, Tensor]:
            if dest is None:
                return pool.empty(self.moves.box.shape, shard.dtype, shard.device), shard
            return dest, copyable(shard).clone() if overlap(dest, shard) else shard

        y, source = results.allocate(self.name, team, self.moves.sizes, make, self._agreed)
        if self.inline and self._parts is not None:
            self.moves.assemble(self._parts, y)
        else:
            self.moves.run(team, source, y)
        return y if self.out is None else self.out

    def backward(self, team: Team, grad: Tensor) -> Tensor:
        return self.moves.transpose(team, grad)


def _meta(call: Call) -> array[int]:
    """Return whether this rank has `out`, the shape of its part, and that of `out`."""
    assert call.x is not None
    out_shape = [-1] * call.x.dim() if call.out is None else call.out.shape
    return array("q", [call.out is not None, *call.x.shape, *out_shape])


def _parts(team: Team, x: Tensor, shapes: Sequence[Shape], agreed: Agreed) -> list[Tensor] | None:
    """Return the parts of all ranks, if all came behind the headers."""
    buffers, start = team.headers, 8 * (1 + 2 * x.dim())
    sizes = [x.itemsize * prod(shape) for shape in shapes]
    if buffers is None or any(came != start + size for came, size in zip(agreed.inlines, sizes, strict=True)):
        return None
    parts = [of_bytes(buffers.all[buffers.place(rank, start, size)]) for rank, size in enumerate(sizes)]
    return [part.view(x.dtype).view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _shapes(team: Team, call: Call, came: bool) -> tuple[tuple[Shape, ...], list[Shape | None]]:
    """Gather the shapes of all parts, and of `out` on the ranks that passed it. Collective; one small Allgather, unless
    they came behind the headers."""
    from mpi4py import MPI

    assert call.x is not None
    ndim = call.x.dim()
    mine = _meta(call)
    all_ = array("q", bytes(mine.itemsize * len(mine) * team.size))
    if came and (buffers := team.headers) is not None:
        places = buffers.places([mine.itemsize * len(mine)] * team.size)
        all_ = array("q", b"".join([buffers.all[place] for place in places]))
    else:
        team.comm.Allgather([mine, MPI.INT64_T], [all_, MPI.INT64_T])
    rows = [tuple(all_[start : start + len(mine)]) for start in range(0, len(all_), len(mine))]
    return tuple(row[1 : 1 + ndim] for row in rows), [row[1 + ndim :] if row[0] else None for row in rows]
