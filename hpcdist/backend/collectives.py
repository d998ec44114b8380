"""The collectives of a process group on contiguous host memory. Each is called by all ranks in the same order.

Messages are bytes, whatever the dtype. Where the counts of all ranks are known to every rank, MPI's own collective
moves them; where a rank knows its own alone, sends and receives do, since no two ways may meet in one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from mpi4py import MPI
from torch import Tensor, split

from hpcdist import layout
from hpcdist.backend import shared
from hpcdist.backend.host_copies import (
    Spans,
    address,
    bytes_of,
    flat,
    is_plain,
    nbytes,
    packed,
    pieces,
    readable,
    scratch,
    share_memory,
    unpack,
    writable,
)
from hpcdist.backend.reductions import Reduction
from hpcdist.layout import limits
from hpcdist.routes.mpi import MPI_ROUTE
from hpcdist.tensors.storage import overlap

if TYPE_CHECKING:
    from hpcdist.backend.communicator import Communicator

__all__ = [
    *("all_gather", "all_gather_single", "all_reduce", "all_to_all", "all_to_all_single", "barrier", "broadcast"),
    *("gather", "reduce", "reduce_scatter", "scatter"),
]

_route: Any = MPI_ROUTE  # which needs comm, rank and size of a team
SMALL = 2**15  # bytes of a tensor for which each microsecond counts
PACKED = 2**16  # bytes of all messages up to which they are copied into one piece of memory


def barrier(team: Communicator) -> None:
    """Do nothing more: the comparison before each call has a message from every rank."""


def broadcast(team: Communicator, x: Tensor, root: int) -> None:
    with nullcontext(readable(x)) if team.rank == root else writable(x) as whole:
        memory = address(whole)
        if len(memory) < shared.PIPELINED or not shared.broadcast(team, whole, root):
            for piece in pieces(memory):
                team.comm.Bcast([piece, MPI.BYTE], root)


def all_gather_single(team: Communicator, out: Tensor, x: Tensor) -> None:
    """Gather equal tensors into `out`, one after the other."""
    with writable(out, read=False) as whole:
        _allgather(team, flat(whole), flat(readable(x)))


def _allgather(team: Communicator, out: Tensor, x: Tensor) -> None:
    size = x.nbytes
    start = x.data_ptr() - out.data_ptr()
    if -size < start < out.nbytes and start != size * team.rank:  # FSDP sends from where this rank's part belongs
        x = x.clone()
    counts = [size] * team.size
    _route.allgatherv(team, bytes_of(x), bytes_of(out), counts, [size * i for i in range(team.size)])


def all_gather(team: Communicator, outs: Sequence[Tensor], x: Tensor) -> None:
    """Gather the tensor of rank i into ``outs[i]``; their sizes may differ."""
    if nbytes(outs) <= PACKED:
        whole = scratch(sum(out.numel() for out in outs), x.dtype)
        counts = [out.nbytes for out in outs]
        _route.allgatherv(team, bytes_of(readable(x)), bytes_of(whole), counts, layout.displs(counts))
        unpack(whole, outs)
    else:
        sends = [x] * team.size
        all_to_all(team, outs, sends)


def gather(team: Communicator, outs: Sequence[Tensor], x: Tensor, root: int) -> None:
    """Gather the tensor of rank i into ``outs[i]`` of the root; `outs` is empty elsewhere."""
    exchange(team, {root: x}, dict(enumerate(outs)))


def scatter(team: Communicator, out: Tensor, xs: Sequence[Tensor], root: int) -> None:
    """Scatter ``xs[i]`` of the root into `out` of rank i; `xs` is empty elsewhere."""
    exchange(team, dict(enumerate(xs)), {root: out})


def all_to_all(team: Communicator, outs: Sequence[Tensor], xs: Sequence[Tensor]) -> None:
    """Send ``xs[i]`` to rank i, into its ``outs`` at this rank."""
    exchange(team, dict(enumerate(xs)), dict(enumerate(outs)))


def all_to_all_single(
    team: Communicator, out: Tensor, x: Tensor, out_splits: Sequence[int], splits: Sequence[int]
) -> None:
    """Send consecutive rows of `x` to the ranks, and receive rows of `out`; equal parts without splits."""
    with writable(out, read=False) as whole:
        send = readable(x)
        if overlap(whole, send):
            send = send.clone()
        sends, recvs = _parts(send, splits, team.size), _parts(whole, out_splits, team.size)
        recvs[team.rank][:] = sends[team.rank]
        # As fast as Alltoall, which only all ranks together could use: equal parts may be given as splits, or not.
        others = [rank for rank in range(team.size) if rank != team.rank]
        requests = [team.comm.Irecv([piece, MPI.BYTE], rank) for rank in others for piece in pieces(recvs[rank])]
        requests += [team.comm.Isend([piece, MPI.BYTE], rank) for rank in others for piece in pieces(sends[rank])]
        MPI.Request.Waitall(requests)


def _parts(x: Tensor, splits: Sequence[int], size: int) -> list[Any]:
    """Cut the memory of a tensor into the rows of each rank."""
    memory = address(x)
    row = x.nbytes // max(1, x.shape[0])
    counts = [row * split for split in splits] if splits else [x.nbytes // size] * size
    return [memory[start : start + count] for start, count in zip(layout.displs(counts), counts, strict=True)]


def copyto(out: Tensor, x: Tensor) -> None:
    if not _same(out, x):
        out.detach().copy_(x.detach().view(out.shape) if x.is_contiguous() else x.detach().reshape(out.shape))


def exchange(team: Communicator, sends: dict[int, Tensor], recvs: dict[int, Tensor]) -> None:
    """Send and receive separate tensors, at most one for each pair of ranks and direction; copy this rank's own.

    The result is that of sends from copies, and of receives in the order of the ranks, whatever memory they share.
    """
    me, own, direct = team.rank, recvs.get(team.rank), True
    xs = {id(x): x for x in sends.values()}  # one may go to all ranks
    if share_memory([*recvs.values(), *xs.values()]):
        written = Spans(out for rank, out in recvs.items() if rank != me)  # while tensors may still be sent
        direct = written.disjoint and (own is None or not written.meet(own))
        xs = {
            key: x.detach().clone() if written.meet(x) or (own is not None and _clash(own, x)) else x
            for key, x in xs.items()
        }
    ready = {key: readable(x) for key, x in xs.items()}
    into = {
        rank: out if direct and is_plain(out) else scratch(out.numel(), out.dtype)
        for rank, out in recvs.items()
        if rank != me
    }
    _route.exchange(
        team,
        [(rank, bytes_of(ready[id(x)])) for rank, x in sends.items() if rank != me and x.numel()],
        [(rank, bytes_of(x)) for rank, x in into.items() if x.numel()],
        0,
    )
    if own is not None:
        into[me] = ready[id(sends[me])]
    for rank, out in recvs.items():
        if into[rank] is not out:
            copyto(out, into[rank])


def _same(out: Tensor, x: Tensor) -> bool:
    """Whether tensors of one size are the same memory; torch refuses to copy if the strides of a dim of 1 differ."""
    return out.data_ptr() == x.data_ptr() and is_plain(out) and is_plain(x)


def _clash(out: Tensor, x: Tensor) -> bool:
    """Whether tensors of one size share memory, but are not the same."""
    return not _same(out, x) and overlap(out, x)


def all_reduce(team: Communicator, x: Tensor, op: Reduction) -> None:
    """Reduce the tensors of all ranks into `x` on every rank: the same bits on all of them."""
    direct, size = op.direct, x.nbytes
    if direct is not None and size < SMALL and is_plain(x):
        team.comm.Allreduce(MPI.IN_PLACE, [address(x), x.numel(), direct[1]], direct[0])
        return
    with writable(x) as whole:
        out = flat(whole)
        mine = op.scaled(out)
        if size >= shared.LEAST and shared.all_reduce(team, mine, out, op):
            return
        if op.mpi is None:
            _reduce_with_torch(team, mine, out, op)
            return
        if mine is not out:
            out.copy_(mine)
        _allreduce(team, out, *op.mpi)
        op.average(out, team.size)


def _allreduce(team: Communicator, x: Tensor, op: MPI.Op, kind: MPI.Datatype) -> None:
    """Reduce a flat tensor in place by MPI's own operation."""
    memory, itemsize = address(x), x.itemsize
    for start, length in layout.pieces(x.numel(), limits.PIECE // itemsize):
        piece = memory[start * itemsize : (start + length) * itemsize]
        team.comm.Allreduce(MPI.IN_PLACE, [piece, length, kind], op)


def _reduce_with_torch(team: Communicator, x: Tensor, out: Tensor, op: Reduction) -> None:
    """Reduce flat tensors: each rank a part of them, which it sends to all; small ones whole on every rank."""
    size, numel = team.size, x.numel()
    if x.nbytes * size <= PACKED:
        whole = scratch(numel * size, x.dtype)
        _allgather(team, whole, x)
        op.of(list(split(whole, numel)) if numel else [whole], out)
        return
    ranges = layout.block_ranges(numel, size, size)
    lengths = [end - start for start, end in ranges]
    mine = scratch(lengths[team.rank] * size, x.dtype)
    received = list(split(mine, lengths[team.rank])) if lengths[team.rank] else [mine] * size
    all_to_all(team, received, list(split(x, lengths)))
    op.of(received, received[0])
    outs = list(split(out, lengths))
    copyto(outs[team.rank], received[0])
    _route.allgatherv(
        team,
        bytes_of(received[0]),
        bytes_of(out),
        [length * out.itemsize for length in lengths],
        [start * out.itemsize for start, _ in ranges],
    )


def reduce(team: Communicator, x: Tensor, op: Reduction, root: int) -> None:
    """Reduce the tensors of all ranks into `x` on the root; those of the other ranks stay as they are."""
    mine = packed([x])
    all_reduce(team, mine, op)
    if team.rank == root:
        copyto(x, mine.view(x.shape))


def reduce_scatter(team: Communicator, out: Tensor, xs: Sequence[Tensor], op: Reduction) -> None:
    """Reduce ``xs[i]`` of all ranks into `out` of rank i; the sizes may differ from rank to rank."""
    numel = out.numel()
    memory = scratch(numel * team.size, out.dtype)
    received = list(split(memory, numel)) if numel else [memory] * team.size
    all_to_all(team, received, [op.scaled(flat(readable(x))) for x in xs])
    with writable(out, read=False) as whole:
        op.of(received, flat(whole))


def coalesced(team: Communicator, xs: Sequence[Tensor], op: Reduction) -> None:
    """Reduce several tensors of one dtype on every rank."""
    if len(xs) == 1:
        all_reduce(team, xs[0], op)
        return
    whole = packed(xs)
    all_reduce(team, whole, op)
    unpack(whole, xs)


def reduce_scatter_single(team: Communicator, out: Tensor, x: Tensor, op: Reduction) -> None:
    """Reduce consecutive equal parts of `x`, that of rank i into `out` of rank i."""
    whole = flat(readable(x))
    reduce_scatter(team, out, list(split(whole, out.numel())) if out.numel() else [whole] * team.size, op)
