"""The operations reduce_scatter, reduce and all_reduce: add up tensors of one shape, each element in rank order."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from torch import Tensor
from torch.distributed import ReduceOp

from hpcdist import layout
from hpcdist.collectives import results
from hpcdist.collectives.kept import Kept, Movement
from hpcdist.collectives.metrics import ReduceDict
from hpcdist.collectives.run import Described, Operation, Plannable, run
from hpcdist.collectives.split import key_of
from hpcdist.comm.team import Team
from hpcdist.layout import Box
from hpcdist.routes.route import Alltoall, Method, Route, Vector
from hpcdist.runtime import world
from hpcdist.tensors import pool
from hpcdist.tensors.blocks import Blocks, blocks
from hpcdist.tensors.message import SMALL
from hpcdist.tensors.storage import sum_dtype
from hpcdist.validation import collective, local
from hpcdist.validation.collective import Agreed, Call

if TYPE_CHECKING:
    from hpcdist.comm.team import GroupLike
    from hpcdist.runtime.background import Handle

X = TypeVar("X", Tensor, dict[Any, Any])


# fmt: off
@overload
def reduce_scatter(x: Tensor, dim: int = 0, counts: Any = None, op: str = "sum", *,
                   group: GroupLike | None = None, route: str = "auto", out: Tensor | None = None,
                   async_op: Literal[False] = False) -> Tensor: ...
@overload
def reduce_scatter(x: Tensor, dim: int = 0, counts: Any = None, op: str = "sum", *,
                   group: GroupLike | None = None, route: str = "auto", out: Tensor | None = None,
                   async_op: Literal[True]) -> Handle[Tensor]: ...
# fmt: on
def reduce_scatter(
    x: Tensor,
    dim: int = 0,
    counts: Any = None,
    op: str = "sum",
    *,
    group: GroupLike | None = None,
    route: str = "auto",
    out: Tensor | None = None,
    async_op: bool = False,
) -> Any:
    """Reduce the tensors of all ranks element by element, and give each rank its block of the result.

    Collective over `group`. Blocks until all ranks of `group` have called it; after the timeout of
    :func:`hpcdist.init` the job ends (:class:`HangError`).

    Blocks may differ in extent along `dim`, and may be empty. Nothing is padded. `x` is not changed.

    Each element is reduced in rank order: the results of two runs on as many ranks are equal bit for bit. Dtypes of 8
    and 16 bits (bfloat16, float16, float8) are added in float32, and rounded once. Integers wrap around. Of bools, the
    sum and the maximum are "or", the product and the minimum "and". A NaN on any rank gives NaN.

    Args:
        x: a tensor of any strides, on the CPU or a GPU. Its shape and dtype must agree.
        dim: the dimension to cut along; may be negative. Must agree.
        counts: extents of the blocks along `dim`: a rule or integers, as in :func:`hpcdist.split`. Must agree.
        op: "sum", "mean" (not of integers), "min", "max" (not of complex numbers) or "prod". Must agree.
        group: a torch ProcessGroup, 1-d DeviceMesh or mpi4py communicator; None means all ranks. Must agree.
        route: "auto", "nccl", "gloo", "mpi" or "hdf5". Must agree.
        out: memory for the result, of its shape, dtype and device; may be `x`'s. Optional on each rank. Not allowed if
            a gradient is needed. To autograd, it is modified in place.
        async_op: whether to return a :class:`Handle` at once, and continue in the background. Must agree.

    Returns:
        On every rank, its block, in new contiguous memory on x's device (or `out`).

        If any rank needs a gradient, every rank must call backward: the gradient of `x` on every rank is the gradients
        of all blocks, joined; for a mean, divided by the number of ranks. Other ops have no gradient.

    Raises:
        RankError: on every rank, if an argument is wrong on any rank, or arguments do not agree. No data have moved,
            and the next call can succeed.
        TypeError, ValueError: on this rank, if `group` is not a group, or this rank is not in it.

    Example, on 3 ranks::

        >>> hd.reduce_scatter(torch.arange(4) + rank, counts=[0, 1, 3])
        tensor([], dtype=torch.int64)   # on rank 0; tensor([3]) on rank 1, tensor([6, 9, 12]) on rank 2
    """
    return run(Reduce("reduce_scatter", x, op, route, out, dim, counts), world.team_of(group), async_op)


# fmt: off
@overload
def reduce(x: X, root: int = 0, op: str = "sum", *, weights: float | Tensor | None = None,
           group: GroupLike | None = None, route: str = "auto", out: Tensor | None = None,
           async_op: Literal[False] = False) -> X | None: ...
@overload
def reduce(x: X, root: None, op: str = "sum", *, weights: float | Tensor | None = None,
           group: GroupLike | None = None, route: str = "auto", out: Tensor | None = None,
           async_op: Literal[False] = False) -> X: ...
@overload
def reduce(x: X, root: int = 0, op: str = "sum", *, weights: float | Tensor | None = None,
           group: GroupLike | None = None, route: str = "auto", out: Tensor | None = None,
           async_op: Literal[True]) -> Handle[X | None]: ...
@overload
def reduce(x: X, root: None, op: str = "sum", *, weights: float | Tensor | None = None,
           group: GroupLike | None = None, route: str = "auto", out: Tensor | None = None,
           async_op: Literal[True]) -> Handle[X]: ...
# fmt: on
def reduce(
    x: Any,
    root: int | None = 0,
    op: str = "sum",
    *,
    weights: float | Tensor | None = None,
    group: GroupLike | None = None,
    route: str = "auto",
    out: Tensor | None = None,
    async_op: bool = False,
) -> Any:
    """Reduce the tensors of all ranks element by element, or their dicts key by key, on `root` or on every rank.

    Arguments, order of additions and errors are those of :func:`hpcdist.reduce_scatter`; `x` may be 0-d, too.

    A dict holds numbers (Python's or numpy's), small tensors, and dicts. A key is reduced over the ranks that have it,
    where it must be a float, an int (or bool), any of these for a mean, or a tensor of the same shape and dtype.
    Floats are computed in float64 on the host, and rounded at the end; integers in 64 bits, which wrap around. Ranks
    exchange keys in the first call, and when any change.

    Args:
        x: a tensor, or a dict on all ranks.
        root: the rank in `group` that receives; None: every rank. Must agree.
        weights: this rank's weight in a mean of dicts, by default 1. The values of a rank with weight 0 do not count,
            even NaN; where no rank has a weight, the mean is NaN.
        out: as there; not for dicts.

    Returns:
        On receivers, a new contiguous tensor of x's shape (or `out`, given there alone); None on other ranks.
        Of dicts, a dict of all keys, those of rank 0 first. Numbers are Python's; tensors have no gradient, and are on
        the GPU if they were.

        If any rank needs a gradient, every rank must call backward, as after :func:`hpcdist.gather`: the gradient of
        `x` on every rank is that of the root's result; for a mean, divided by the number of ranks.

    Examples, on 3 ranks::

        >>> hd.reduce(torch.tensor([1, rank]))
        tensor([3, 3])   # on rank 0; None on ranks 1 and 2
        >>> mine = {"loss": 0.5 * rank} if rank else {"loss": 0.0, "best": {"epoch": 7}}
        >>> hd.reduce(mine, root=None, op="mean", weights=1 + rank)
        {'loss': 0.6666666666666666, 'best': {'epoch': 7.0}}   # on every rank
    """
    return run(operation(x, root, op, weights, route, out), world.team_of(group), async_op)


def operation(x: Any, root: Any, op: Any, weights: Any, route: Any, out: Any) -> Operation:
    """Return the operation of a call of reduce()."""
    if isinstance(x, dict) or weights is not None:
        return ReduceDict(Reduce, x, root, op, route, out, weights)
    name, at = ("all_reduce", -1) if root is None else ("reduce", root)
    return Reduce(name, x, op, route, out, root=at)


# fmt: off
@overload
def all_reduce(x: Tensor, op: str = "sum", *,
               group: GroupLike | None = None, route: str = "auto", out: Tensor | None = None,
               async_op: Literal[False] = False) -> Tensor: ...
@overload
def all_reduce(x: Tensor, op: str = "sum", *,
               group: GroupLike | None = None, route: str = "auto", out: Tensor | None = None,
               async_op: Literal[True]) -> Handle[Tensor]: ...
# fmt: on
def all_reduce(
    x: Tensor,
    op: str = "sum",
    *,
    group: GroupLike | None = None,
    route: str = "auto",
    out: Tensor | None = None,
    async_op: bool = False,
) -> Any:
    """Reduce the tensors of all ranks element by element, on every rank.

    Arguments, order of additions and errors are those of :func:`hpcdist.reduce_scatter`; `x` may be 0-d, too. Unlike
    torch's all_reduce, it leaves `x` as it is: pass ``out=x`` to reduce in place.

    Returns:
        On every rank, a new contiguous tensor of x's shape (or `out`), with the same bits.

        If any rank needs a gradient, every rank must call backward: the gradient of `x` on every rank is the sum (for a
        mean, the mean) of the gradients of all ranks' results.

    Example, on 3 ranks::

        >>> hd.all_reduce(torch.tensor([1.0, rank]), "mean")
        tensor([1., 1.])   # on every rank
    """
    return run(Reduce("all_reduce", x, op, route, out), world.team_of(group), async_op)


class KeptReduction(Kept):
    """A kept reduction: the parts of all ranks come behind the headers, and every rank that has a result reduces them.

    Attributes:
        how: name of the reduction.
    """

    how: str

    def take(self, out: Tensor | None) -> Tensor | None:
        parts = super().take(None)
        return None if parts is None else _reduced(parts, self.how, out)


@dataclass(eq=False)
class Reduce(Plannable):
    """Reduce the tensors of all ranks: into one block for each rank, or to the root or every rank.

    For reduce and all_reduce, the elements are cut into even blocks. Each rank reduces one of them, and the blocks are
    joined.
    """

    verb: str
    x: Any
    op: Any
    route: Any
    out: Any
    dim: Any = 0
    counts: Any = None
    root: Any = -1
    keeper = KeptReduction
    check = local.check_reduction

    def __post_init__(self) -> None:
        self.name = self.verb  # a plan has another name

    def arguments(self) -> Hashable:
        return key_of(self.counts, self.verb, self.op, self.route, self.dim, self.root)

    def plan(self, team: Team, call: Call, agreed: Agreed) -> None:
        x, size, self._root, self._scatters = call.x, team.size, call.root, self.verb == "reduce_scatter"
        assert x is not None
        shape, dim, cut = (x.shape, call.dim, call.extent) if self._scatters else ((0,), 0, x.numel())
        extents = layout.counts_of(call.counts, cut, size)
        self._blocks = blocks(tuple(shape), dim, tuple(extents), x.dtype)
        # One message of all data takes less time than two of blocks.
        self._together = size * self._blocks.nbytes <= SMALL and not self._scatters
        what = Vector.packed([self._blocks.nbytes] * size if self._together else self._blocks.counts, max(0, call.root))
        self.messages = "allgatherv" if call.root < 0 else "gatherv", what
        self._flat = Blocks(x.shape, [[layout.whole(x.shape)]], x.dtype)
        if agreed.outs:
            expected = extents if self._scatters else [call.extent] * size
            collective.check_out(self.name, agreed.outs, expected, agreed.grad)
        # The tensors of all ranks are parts of one stack.
        boxes = [box if self._scatters else layout.whole(x.shape) for (box,) in self._blocks.boxes]
        sources = [Box((rank, *(0,) * x.dim()), (1, *x.shape)) for rank in range(size)]
        dests = [
            Box((0, *box.offset), (size, *box.shape)) if call.root in (-1, rank) else None
            for rank, box in enumerate(boxes)
        ]
        mine = boxes[team.rank]
        recvs = [(rank, Box((rank, *mine.offset), (1, *mine.shape))) for rank in range(size)]
        self.bind(team, call, agreed, Movement((size, *x.shape), x.dtype, sources, dests, recvs))
        assert isinstance(self.kept, KeptReduction)
        self.kept.how = self.op

    def methods(self, team: Team) -> list[Method]:
        blocks = [self.chosen(team).method(team, "alltoallv", *_sizes(self._blocks, team.size))]
        return ([] if self._together else blocks) + ([] if self._scatters else super().methods(team))

    def described(self, team: Team) -> Described:
        sent, received, shape, box = super().described(team)
        if not (
            self._scatters or self._together or (self.kept is not None and self.kept.inline)
        ):  # the blocks, and then their sums
            cut, own = self._blocks, self._blocks.counts[team.rank]
            receives = self._root in (-1, team.rank)
            sent = cut.nbytes - own + own * ((team.size if self._root < 0 else 1) - receives)
            received = own * (team.size - 1) + (cut.nbytes - own) * receives
        return Described(sent, received, shape[1:], box and Box(box.offset[1:], box.shape[1:]))

    def move(self, team: Team) -> Tensor | None:
        return self._move(team, self.sent, self.dest)

    def _move(self, team: Team, x: Any, out: Tensor | None) -> Tensor | None:
        if self._scatters:
            return add_up(self.name, team, self.chosen(team), self._blocks, x, self.op, out)
        flat, receives = self._flat, [self._root in (-1, rank) for rank in range(team.size)]

        def take() -> tuple[Tensor, Any, Any]:
            return flat.pack(x).view(-1), *(flat.recv_buffer(out, x.device) if receives[team.rank] else (None, None))

        sizes = [x.nbytes * int(receives_it) for receives_it in receives]
        whole: Tensor | None
        send, whole, buffer = results.allocate(self.name, team, sizes, take, self.agreed)
        joined = None if buffer is None else buffer.view(-1)
        if self._together:
            parts = None if joined is None else joined.new_empty((team.size, len(joined)))
            self.carry(team, send, parts)
            if parts is not None:
                _reduced(parts, self.op, joined)
        else:
            self.carry(team, add_up(self.name, team, self.chosen(team), self._blocks, send, self.op), joined)
        if whole is not None:
            flat.unpack(buffer, whole)
        return whole

    def backward(self, team: Team, grad: Tensor) -> Tensor | None:
        if self.verb == "all_reduce":
            self.transfer = None  # that of the call may be the background's
            return self._move(team, grad, None)
        cut = self._blocks
        if not self._scatters:  # the whole comes from the root
            extents = [cut.shape[0] if rank == self._root else 0 for rank in range(team.size)]
            cut = blocks((0,), 0, tuple(extents), cut.dtype)
        whole, buffer = cut.recv_buffer(None, grad.device)
        self.chosen(team).prepare(team, "allgatherv", Vector(cut.counts, cut.displs))(grad, buffer)
        cut.unpack(buffer, whole)
        return whole if self.op == "sum" else (whole.to(sum_dtype(cut.dtype)) / team.size).to(cut.dtype)


def add_up(
    verb: str, team: Team, route: Route, cut: Blocks, x: Tensor, op: str = "sum", out: Tensor | None = None
) -> Tensor:
    """Exchange the blocks of `x`, and reduce those for this rank in rank order, in `out` or new memory. Collective."""
    size, mine = team.size, cut.counts[team.rank]
    total, longest = _sizes(cut, size)

    def take() -> tuple[Tensor, Tensor]:
        return cut.pack(x), pool.empty((size, *cut.boxes[team.rank][0].shape), x.dtype, x.device, fixed=True)

    send, parts = results.everywhere(verb, team, size * longest, take)
    places = [mine * rank for rank in range(size)]
    what = Alltoall(cut.counts, cut.displs, [mine] * size, places, longest, total)
    route.prepare(team, "alltoallv", what)(send, parts)
    return _reduced(parts, op, out)


def _sizes(cut: Blocks, size: int) -> tuple[int, int]:
    """Return the bytes of all messages of a rank, and of the longest one: see Alltoall."""
    longest = max(cut.counts)
    return max(cut.nbytes, longest * size), longest


def _reduced(parts: Tensor, op: str, out: Tensor | None) -> Tensor:
    from hpcdist.backend.reductions import reduction  # which imports MPI

    if out is None:
        out = pool.empty(parts.shape[1:], parts.dtype, parts.device)
    reduction(getattr(ReduceOp, local.REDUCTIONS[op]), parts.dtype).of(parts.unbind(), out)
    return out
