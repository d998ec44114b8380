"""The operation all_to_all: every rank sends a part of its own to every rank."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from math import inf, prod
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import numpy as np
import torch
from torch import Tensor

from hpcdist import layout
from hpcdist.collectives import results
from hpcdist.collectives.kept import Movement, encode, prefix_of
from hpcdist.collectives.run import Described, Plannable, run
from hpcdist.collectives.split import key_of
from hpcdist.collectives.structures import check_classes, classes_of
from hpcdist.comm.team import Team
from hpcdist.control import objects
from hpcdist.control.codec import rebuild
from hpcdist.layout import Box
from hpcdist.routes.route import Alltoall, cut
from hpcdist.runtime import world
from hpcdist.tensors.blocks import Blocks, blocks
from hpcdist.tensors.message import parse, whole
from hpcdist.tensors.storage import as_bytes, row_major
from hpcdist.tensors.tree import decode, flatten
from hpcdist.validation import local
from hpcdist.validation.collective import Agreed, Call

if TYPE_CHECKING:
    from hpcdist.comm.team import GroupLike
    from hpcdist.runtime.background import Handle

T = TypeVar("T")


# fmt: off
@overload
def all_to_all(x: Tensor, counts: str | Sequence[int] | None = None, *, dim: int = 0,
               group: GroupLike | None = None, route: str = "auto",
               async_op: Literal[False] = False) -> tuple[Tensor, list[int]]: ...
@overload
def all_to_all(x: Sequence[T], *, dim: int = 0,
               group: GroupLike | None = None, route: str = "auto", allow_pickle: bool = False,
               async_op: Literal[False] = False) -> list[T]: ...
@overload
def all_to_all(x: Any, counts: str | Sequence[int] | None = None, *, dim: int = 0,
               group: GroupLike | None = None, route: str = "auto", allow_pickle: bool = False,
               async_op: Literal[True]) -> Handle[Any]: ...
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

    def arguments(self) -> Hashable:
        return key_of(self.counts, self.name, self.dim, self.route)

    def check(self, team: Team, call: Call) -> None:
        xs = local.check_exchange(self, team, call)
        local.put_inline(call, team, encode(self.extents), xs=xs)

    def plan(self, team: Team, call: Call, agreed: Agreed) -> None:
        assert call.x is not None and call.tensor is not None
        (dtype, _, shape), sends, size, rank = call.tensor, self.extents, team.size, team.rank
        if agreed.inline:
            nbytes = 8 * size
            data = b"".join([team.headers.data(peer, 0, nbytes) for peer in range(size)])
            table = np.frombuffer(data, np.int64).reshape(size, size)
            received, starts = table[:, rank].tolist(), table[:, :rank].sum(1).tolist()
            totals = list(zip(table.sum(1).tolist(), table.sum(0).tolist(), strict=True))
        else:
            received, starts = team.comm.alltoall(sends), [0] * size
            totals = team.comm.allgather((sum(sends), sum(received)))
        row, at, several = abs(prod(shape)), call.dim, isinstance(self.sent, list)  # the shape has -1 along dim
        scale, like, dim = (row, (-1,), 0) if several else (1, shape, at)

        def box(start: int, extent: int) -> Box:
            return Box(
                tuple([scale * start if i == dim else 0 for i in range(len(like))]),
                tuple([scale * extent if n < 0 else n for n in like]),
            )

        source, dest = (blocks(like, dim, tuple([scale * n for n in of]), dtype) for of in (sends, received))
        self._sides, self._device = (source, dest), call.x.device
        places = layout.displs(received)
        # In the result of this rank, the tensors of the others lie so that their parts for it are in place.
        sources = [box(place - start, sent) for place, start, (sent, _) in zip(places, starts, totals, strict=True)]
        recvs = [(peer, box(place, n)) for peer, (place, n) in enumerate(zip(places, received, strict=True))]
        dests = [box(0, n) for _, n in totals]
        sent = self.sent
        self.bind(team, call, agreed, Movement(dest.shape, dtype, sources, dests, recvs), prefix_of(size))
        self.sent = sent
        width = row * dtype.itemsize
        self.sizes = [width * max(both) for both in totals]  # in both directions
        self._limits = width * max(agreed.extents), max(self.sizes)
        self.messages = "alltoallv", Alltoall(source.counts, source.displs, dest.counts, dest.displs, *self._limits)
        shapes = [(*shape[:at], n, *shape[at + 1 :]) for n in received]
        numels = [scale * n for n in received]

        def finish(y: Tensor) -> Any:
            if several:
                return [
                    part.view(shape)
                    for part, shape in zip(torch.unsafe_split_with_sizes(y, numels), shapes, strict=True)
                ]
            return y, received.copy()

        assert self.kept is not None
        self.finish = self.kept.finish = finish

    def described(self, team: Team) -> Described:
        sent, received = (side.nbytes - side.counts[team.rank] for side in self._sides)
        return Described(sent, received, self.parts.shape, self.parts.dests[team.rank])

    def move(self, team: Team) -> Tensor:
        x, (source, dest) = self.sent, self._sides
        if isinstance(x, Tensor):
            y, send, recv = self._allocate(team, x, source, dest)
            self.carry(team, send, recv)
            dest.unpack(recv, y)
            return y

        def make() -> tuple[Tensor, list[Tensor]]:
            return dest.recv_buffer(None, self._device)[0], [as_bytes(row_major(part)) for part in x]

        y, sends = results.allocate(self.name, team, self.sizes, make, self.agreed)
        recvs = cut(y, dest.counts, dest.displs)
        self.chosen(team).exchange(team, enumerate(sends), enumerate(recvs), self._limits[0])
        return y

    def backward(self, team: Team, grad: Tensor) -> Tensor:
        source, dest = self._sides
        x, send, recv = self._allocate(team, grad, dest, source)
        what = Alltoall(dest.counts, dest.displs, source.counts, source.displs, *self._limits)
        self.chosen(team).prepare(team, "alltoallv", what)(send, recv)
        source.unpack(recv, x)
        return x

    def _allocate(self, team: Team, x: Tensor, source: Blocks, dest: Blocks) -> tuple[Tensor, Tensor, Tensor]:
        """Return the result, the messages of `x`, and memory for those of the result. Collective."""

        def make() -> tuple[Tensor, Tensor, Tensor]:
            send, (y, recv) = source.pack(x), dest.recv_buffer(None, self._device)
            return y, send, recv

        return results.allocate(self.name, team, self.sizes, make, self.agreed)


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
            tensors = header.unpack(packed, device)
            return rebuild(header.spec, lambda kind, i: decode(kind, tensors[i], self.allow_pickle))

        self.finish = lambda y: list(map(rebuilt, split(y)))
