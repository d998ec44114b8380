"""The operation all_to_all: every rank sends a part of its own to every rank."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf, prod
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack, overload

import torch
from torch import Tensor

from hpcdist import layout
from hpcdist.collectives.kept import Movement, encode, numbers_of_all, prefix_of
from hpcdist.collectives.run import Plannable, run
from hpcdist.collectives.split import key_of
from hpcdist.collectives.structures import check_classes, classes_of
from hpcdist.comm.team import Team
from hpcdist.control import objects
from hpcdist.routes.route import Alltoall, cut
from hpcdist.runtime import world
from hpcdist.tensors.blocks import Blocks, blocks
from hpcdist.tensors.message import parse, whole
from hpcdist.tensors.storage import as_bytes, row_major
from hpcdist.tensors.tree import flatten, restore
from hpcdist.validation import local
from hpcdist.validation.collective import Agreed, Call

if TYPE_CHECKING:
    from hpcdist.comm.team import GroupLike, Options
    from hpcdist.runtime.background import Handle

T = TypeVar("T")


# fmt: off
@overload
def all_to_all(x: Tensor, counts: str | Sequence[int] | None = None, *, dim: int = 0,
               async_op: Literal[False] = False, **options: Unpack[Options]) -> tuple[Tensor, list[int]]: ...
@overload
def all_to_all(x: Sequence[T], *, dim: int = 0, allow_pickle: bool = False,
               async_op: Literal[False] = False, **options: Unpack[Options]) -> list[T]: ...
@overload
def all_to_all(x: Any, counts: str | Sequence[int] | None = None, *, dim: int = 0, allow_pickle: bool = False,
               async_op: Literal[True], **options: Unpack[Options]) -> Handle[Any]: ...
# fmt: on
def all_to_all(
    x: Any,
    counts: str | Sequence[int] | None = None,
    *,
    dim: int = 0,
    group: GroupLike | None = None,
    route: str = "auto",
    allow_pickle: bool = False,
    async_op: bool = False,
) -> Any:
    """Send a tensor to each rank of `group`, and receive one from each: no rank needs to know the sizes of others.

    Collective over `group`. Blocks until all ranks of `group` have called it; after the timeout of
    :func:`hpcdist.init` the job ends (:class:`HangError`).

    Args:
        x: a list of tensors, one for each rank. They may differ in size along `dim`, which may be zero. Or one tensor,
            which is cut along `dim`. Any dtype and strides, on the CPU or a GPU. Dtype, number of dims, and the extents
            other than `dim` must agree, also between ranks. A 0-d tensor counts as one row. Or a list of
            structures (see docs/do/data.md), which travel through host memory.
        counts: of one tensor, the extents of the parts for the ranks, or the name of a rule as in :func:`split`; None
            means the block rule.
        dim: the dimension along which sizes differ; may be negative. Must agree.
        group: a torch ProcessGroup, 1-d DeviceMesh or mpi4py communicator; None means all ranks. Must agree.
        route: "auto", "nccl", "gloo", "mpi" or "hdf5". Must agree.
        allow_pickle: whether to send other objects in a structure as pickles. Must agree.
        async_op: whether to return a :class:`Handle` at once, and continue in the background. Must agree.

    Returns:
        On x's device: of a list, the list of what the ranks sent to this one, in rank order: contiguous tensors that
        share new memory, or structures. Of one tensor, these joined along `dim`, and the list of their extents.

        If any rank needs a gradient, the gradient of a part flows back to the rank that sent it. Every rank must call
        backward.

    Raises:
        RankError: on every rank, if an argument is wrong on any rank, or arguments do not agree. No data have moved,
            and the next call can succeed.
        TypeError, ValueError: on this rank, if `group` is not a group, or this rank is not in it.

    Example, on 2 ranks::

        >>> x = torch.tensor([0, 1, 2]) + 10 * rank
        >>> hd.all_to_all([x[:1], x[1:]])                # one element to rank 0, two to rank 1
        [tensor([0]), tensor([10])]                      # on rank 0; [tensor([1, 2]), tensor([11, 12])] on rank 1
        >>> hd.all_to_all(x, [1, 2])
        (tensor([ 0, 10]), [1, 1])                       # on rank 0; (tensor([ 1,  2, 11, 12]), [2, 2]) on rank 1
    """
    several = isinstance(x, (list, tuple)) and not all(isinstance(part, Tensor) for part in x)
    op = (AllToAllStructures if several else AllToAll)(x, counts, dim, route, allow_pickle)
    return run(op, world.team_of(group), async_op)


@dataclass(eq=False)
class AllToAll(Plannable):
    """Exchange tensors: the parts of one, or a list of them, which is sent and received as flat tensors.

    Attributes:
        extents: extents along dim of what this rank sends, after validation.
        several: whether the caller passed a list.
        sent: this rank's tensor, or its list of them, detached.
    """

    x: Any
    counts: Any
    dim: Any
    route: Any
    allow_pickle: Any
    sent: Any = field(default=None, init=False)
    extents: list[int] = field(default_factory=list, init=False)
    out = None
    name = "all_to_all"

    def __post_init__(self) -> None:
        self.several = isinstance(self.x, (list, tuple))

    def arguments(self) -> Hashable:
        return key_of(self.counts, self.name, self.dim, self.route)

    def check(self, team: Team, call: Call) -> None:
        xs = local.check_exchange(self, team, call)
        local.put_inline(call, team, encode(self.extents), xs=xs)

    def plan(self, team: Team, call: Call, agreed: Agreed) -> None:
        assert call.x is not None and call.tensor is not None
        (dtype, _, shape), at, several = call.tensor, call.dim, self.several
        received, starts, totals = self._counts(team, agreed)
        row = abs(prod(shape))  # the shape has -1 along dim
        scale, like, dim = (row, (0,), 0) if several else (1, shape, at)
        source, dest = (blocks(like, dim, tuple([scale * n for n in of]), dtype) for of in (self.extents, received))
        self._sides, self._device = (source, dest), call.x.device
        # In the result of this rank, the tensors of the others lie so that their parts for it are in place.
        whole, places = layout.whole(dest.shape), zip(layout.displs(received), starts, totals, strict=True)
        sources = [
            whole.narrow(dim, scale * (place - start), scale * (place - start + sent))
            for place, start, (sent, _) in places
        ]
        dests = [whole.narrow(dim, 0, scale * n) for _, n in totals]
        recvs = [(peer, box) for peer, (box,) in enumerate(dest.boxes)]
        self.bind(team, call, agreed, Movement(dest.shape, dtype, sources, dests, recvs), prefix_of(team.size))
        if isinstance(self.x, (list, tuple)):
            self.sent = [local.ready(part, "x") for part in self.x]
        width = row * dtype.itemsize
        self.sizes = [width * max(both) for both in totals]  # in both directions
        counts = source.counts, source.displs, dest.counts, dest.displs
        self.messages = [("alltoallv", Alltoall(*counts, width * max(agreed.extents), max(self.sizes)))]
        shapes = [(*shape[:at], n, *shape[at + 1 :]) for n in received]
        numels = [scale * n for n in received]

        def finish(y: Tensor) -> Any:
            if several:
                parts = torch.unsafe_split_with_sizes(y, numels)
                return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
            return y, received.copy()

        assert self.kept is not None
        self.finish = self.kept.finish = finish

    def _counts(self, team: Team, agreed: Agreed) -> tuple[list[int], Sequence[int], list[tuple[int, int]]]:
        """Exchange the extents. Collective.

        Returns:
            Those that this rank receives; where these parts start in the tensors of their ranks, if the data may have
            come behind the headers; and what each rank sends and receives in all.
        """
        size, rank = team.size, team.rank
        if agreed.inline:
            rows = numbers_of_all(team, size)
            columns = list(zip(*rows, strict=True))
            totals = list(zip(map(sum, rows), map(sum, columns), strict=True))
            return list(columns[rank]), [sum(row[:rank]) for row in rows], totals
        received = team.comm.alltoall(self.extents)
        return received, [0] * size, team.comm.allgather((sum(self.extents), sum(received)))

    def move(self, team: Team) -> Tensor:
        x, (source, dest) = self.sent, self._sides
        if isinstance(x, Tensor):
            return self._through(team, x, source, dest, partial(self.carry, team))

        def make() -> tuple[Tensor, list[Tensor]]:
            return dest.recv_buffer(None, self._device)[0], [as_bytes(row_major(part)) for part in x]

        y, sends = self.allocate(team, make)
        recvs = cut(y, dest.counts, dest.displs)
        self.chosen(team).exchange(team, enumerate(sends), enumerate(recvs), self.messages[0][1].longest)
        return y

    def backward(self, team: Team, grad: Tensor) -> Tensor:
        (source, dest), there = self._sides, self.messages[0][1]
        back = Alltoall(dest.counts, dest.displs, source.counts, source.displs, there.longest, there.total)
        return self._through(team, grad, dest, source, self.chosen(team).prepare(team, "alltoallv", back))

    def _through(self, team: Team, x: Tensor, source: Blocks, dest: Blocks, transfer: Callable[..., None]) -> Tensor:
        """Send the blocks of `x`, and return the tensor of those that arrive. Collective."""

        def make() -> tuple[Tensor, Tensor, Tensor]:
            return source.pack(x), *dest.recv_buffer(None, self._device)

        send, y, recv = self.allocate(team, make)
        transfer(send, recv)
        dest.unpack(recv, y)
        return y


@dataclass(eq=False)
class AllToAllStructures(AllToAll):
    """Exchange a list of structures, each as one message of bytes."""

    def key(self) -> Hashable:
        return None

    def check(self, team: Team, call: Call) -> None:
        self._trees = [flatten(part, bool(self.allow_pickle)) for part in self.x]
        self.x = [whole(tree) for tree in self._trees]
        super().check(team, call)
        call.options = (("x", "a list of structures"), ("allow_pickle", bool(self.allow_pickle)))

    def plan(self, team: Team, call: Call, agreed: Agreed) -> None:
        super().plan(team, call, agreed)
        classes = objects.all_gather_object(team.comm, classes_of(self._trees))
        check_classes(self.name, team, sorted(set().union(*classes), key=repr))
        split, device = self.finish, team.settings.device
        assert split is not None

        def rebuilt(message: Tensor) -> Any:
            header, packed = parse(message, inf)
            return restore(header.spec, header.unpack(packed, device), self.allow_pickle)

        self.finish = lambda y: list(map(rebuilt, split(y)))
