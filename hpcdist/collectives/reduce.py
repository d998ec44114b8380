"""The operations reduce_scatter, reduce and all_reduce: add up tensors of one shape, each element in rank order."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack, overload

from torch import Tensor
from torch.distributed import ReduceOp

from hpcdist import layout
from hpcdist.collectives import results
from hpcdist.collectives.kept import Movement
from hpcdist.collectives.metrics import ReduceDict
from hpcdist.collectives.run import Operation, Plannable, run
from hpcdist.collectives.split import key_of
from hpcdist.comm.team import Team
from hpcdist.layout import Box
from hpcdist.routes.route import Alltoall, Vector
from hpcdist.runtime import world
from hpcdist.tensors import pool
from hpcdist.tensors.blocks import Blocks, blocks
from hpcdist.tensors.message import SMALL
from hpcdist.tensors.storage import copyable, row_major, sum_dtype
from hpcdist.validation import local
from hpcdist.validation.collective import Agreed, Call

if TYPE_CHECKING:
    from hpcdist.comm.team import GroupLike, OutOptions
    from hpcdist.runtime.background import Handle

    class _ReduceOptions(OutOptions, total=False):
        weights: float | Tensor | None


X = TypeVar("X", Tensor, dict[Any, Any])


# fmt: off
@overload
def reduce_scatter(x: Tensor, dim: int = 0, counts: Any = None, op: str = "sum", *,
                   async_op: Literal[False] = False, **options: Unpack[OutOptions]) -> Tensor: ...
@overload
def reduce_scatter(x: Tensor, dim: int = 0, counts: Any = None, op: str = "sum", *,
                   async_op: Literal[True], **options: Unpack[OutOptions]) -> Handle[Tensor]: ...
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
    return run(ReduceScatter(x, op, route, out, dim, counts), world.team_of(group), async_op)


# fmt: off
@overload
def reduce(x: X, root: int = 0, op: str = "sum", *,
           async_op: Literal[False] = False, **options: Unpack[_ReduceOptions]) -> X | None: ...
@overload
def reduce(x: X, root: None, op: str = "sum", *,
           async_op: Literal[False] = False, **options: Unpack[_ReduceOptions]) -> X: ...
@overload
def reduce(x: X, root: int = 0, op: str = "sum", *,
           async_op: Literal[True], **options: Unpack[_ReduceOptions]) -> Handle[X | None]: ...
@overload
def reduce(x: X, root: None, op: str = "sum", *,
           async_op: Literal[True], **options: Unpack[_ReduceOptions]) -> Handle[X]: ...
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
    return Reduce(x, op, route, out, root=root)


# fmt: off
@overload
def all_reduce(x: Tensor, op: str = "sum", *,
               async_op: Literal[False] = False, **options: Unpack[OutOptions]) -> Tensor: ...
@overload
def all_reduce(x: Tensor, op: str = "sum", *,
               async_op: Literal[True], **options: Unpack[OutOptions]) -> Handle[Tensor]: ...
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
    return run(Reduce(x, op, route, out), world.team_of(group), async_op)


@dataclass(eq=False)
class ReduceScatter(Plannable):
    """Reduce the tensors of all ranks into one block for each rank."""

    x: Any
    op: Any
    route: Any
    out: Any
    dim: Any = 0
    counts: Any = None
    sent: Tensor = field(init=False)
    name = "reduce_scatter"
    root = None
    scatters = True
    check = local.check_reduction

    def arguments(self) -> Hashable:
        return key_of(self.counts, self.name, self.op, self.route, self.dim)

    def plan(self, team: Team, call: Call, agreed: Agreed) -> None:
        assert call.x is not None
        extents = layout.counts_of(call.counts, call.extent, team.size)
        self._blocks = cut = blocks(call.x.shape, call.dim, tuple(extents), call.x.dtype)
        self.messages = [("alltoallv", blocks_of_all(cut, team))]
        self.bind_all(team, call, agreed, [box for (box,) in cut.boxes])

    def bind_all(self, team: Team, call: Call, agreed: Agreed, dests: Sequence[Box | None]) -> None:
        """bind() the tensors of all ranks, of each of which a rank receives the same box, if any."""
        x, mine = call.x, dests[team.rank]
        assert x is not None
        recvs = [] if mine is None else [(rank, mine) for rank in range(team.size)]
        sources = [layout.whole(x.shape)] * team.size
        self.bind(team, call, agreed, Movement(x.shape, x.dtype, sources, dests, recvs, partial(_reduced, self.op)))

    def move(self, team: Team) -> Tensor | None:
        return add_up(self.name, team, partial(self.carry, team), self._blocks, self.sent, self.op, self.dest)

    def backward(self, team: Team, grad: Tensor) -> Tensor | None:
        return self.joined(team, grad, self._blocks)

    def joined(self, team: Team, grad: Tensor, cut: Blocks) -> Tensor:
        """Join the blocks of a gradient that the ranks have, for the `x` of each rank. Collective."""
        whole, buffer = cut.recv_buffer(None, grad.device)
        self.chosen(team).prepare(team, "allgatherv", Vector(cut.counts, cut.displs))(grad, buffer)
        cut.unpack(buffer, whole)
        return whole if self.op == "sum" else (whole.to(sum_dtype(cut.dtype)) / team.size).to(cut.dtype)


@dataclass(eq=False)
class Reduce(ReduceScatter):
    """Reduce the tensors of all ranks to the root or every rank.

    The elements are cut into even blocks. Each rank reduces one of them, and the blocks are joined. Of few elements,
    the receivers reduce all: in host memory, those of all ranks are received where those of the last such call were.
    """

    root: Any = None
    scatters = False
    _stack: Tensor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.name = "all_reduce" if self.root is None else "reduce"

    def arguments(self) -> Hashable:
        return key_of(None, self.name, self.op, self.route, self.root)

    def plan(self, team: Team, call: Call, agreed: Agreed) -> None:
        x, size, root = call.x, team.size, call.root
        assert x is not None
        self._blocks = cut = blocks((0,), 0, tuple(layout.counts_of("block", x.numel(), size)), x.dtype)
        # One message of all data takes less time than two of blocks.
        self._together = agreed.inline or size * x.nbytes <= SMALL
        what = Vector.packed([x.nbytes] * size if self._together else cut.counts, max(0, root))
        join = ("allgatherv" if root < 0 else "gatherv", what)
        self.messages = [join] if self._together else [("alltoallv", blocks_of_all(cut, team)), join]
        whole = layout.whole(x.shape)
        self.bind_all(team, call, agreed, [whole if root in (-1, rank) else None for rank in range(size)])

    def move(self, team: Team) -> Tensor | None:
        x, out, receives = self.sent, self.dest, self.parts.dests[team.rank] is not None

        def take() -> tuple[Tensor, Tensor | None]:
            new = receives and (out is None or not out.is_contiguous())
            return row_major(x).view(-1), pool.empty(x.shape, x.dtype, x.device) if new else out

        send, whole = self.allocate(team, take)
        flat = None if whole is None else whole.view(-1)
        if self._together:
            if flat is not None and (self._stack is None or not flat.is_cpu):  # on a GPU, another stream may read it
                self._stack = flat.new_empty((team.size, len(flat)))
                self._parts = self._stack.unbind()
            self.carry(team, send, self._stack)
            if flat is not None:
                _reduced(self.op, self._parts, flat)
        else:
            block = add_up(self.name, team, partial(self.carry, team), self._blocks, send, self.op)
            self.carry(team, block, flat, step=1)
        if whole is None or out is None or out is whole:
            return whole
        return copyable(out).copy_(copyable(whole))

    def backward(self, team: Team, grad: Tensor) -> Tensor | None:
        if self.root is None:
            self.sent, self.transfers = grad, None  # those of the call may be the background's
            return self.move(team)
        counts = [0] * team.size  # the whole comes from the root
        counts[self.root] = sum(self._blocks.shape)
        return self.joined(team, grad, blocks((0,), 0, tuple(counts), grad.dtype))


def blocks_of_all(cut: Blocks, team: Team) -> Alltoall:
    """Return the messages by which each rank receives its block of every rank's tensor."""
    mine, longest = cut.counts[team.rank], max(cut.counts)
    places = [mine * rank for rank in range(team.size)]
    return Alltoall(cut.counts, cut.displs, [mine] * team.size, places, longest, max(cut.nbytes, longest * team.size))


def add_up(
    verb: str,
    team: Team,
    transfer: Callable[..., None],
    cut: Blocks,
    x: Tensor,
    op: str = "sum",
    out: Tensor | None = None,
) -> Tensor:
    """Exchange the blocks of `x`, and reduce those for this rank in rank order, in `out` or new memory. Collective.

    Args:
        transfer: carries out what blocks_of_all() returns.
    """

    def take() -> tuple[Tensor, Tensor]:
        return cut.pack(x), pool.empty((team.size, *cut.boxes[team.rank][0].shape), x.dtype, x.device, fixed=True)

    send, stack = results.everywhere(verb, team, team.size * max(cut.counts), take)
    transfer(send, stack)
    return _reduced(op, stack.unbind(), out)


def _reduced(op: str, parts: Sequence[Tensor], out: Tensor | None) -> Tensor:
    """Reduce the tensors of all ranks in rank order, in `out` or new memory."""
    from hpcdist.backend.reductions import reduction  # which imports MPI

    if out is None:
        out = pool.empty(parts[0].shape, parts[0].dtype, parts[0].device)
    reduction(getattr(ReduceOp, local.REDUCTIONS[op]), out.dtype).of(parts, out)
    return out
