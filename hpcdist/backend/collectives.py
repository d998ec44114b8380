"""The collectives of a process group on contiguous host memory. Each is called by all ranks in the same order.

Messages are bytes, whatever the dtype. Small data travel behind the headers by which the ranks compare their calls: see
Step. If every rank knows the counts of all ranks, MPI's own collective moves the data. If a rank knows only its own,
sends and receives do. All ranks must use the same of the two in one call.

Large reductions and broadcasts of one node go through memory that its ranks share, in rounds: in each, every rank
writes its data for the others into its slot, reduces its own part from all slots, and copies the others' parts of the
result. Slots and result are small enough to stay in the caches. Of a round's two barriers, the first ends all use of
the last round's result, and the second all use of the slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor, split

from hpcdist import activity, layout
from hpcdist.backend.agreement import Chunks, Counts, Step
from hpcdist.backend.host_copies import (
    address,
    bytes_of,
    flat,
    is_plain,
    packed,
    readable,
    scratch,
    share_memory,
    unpack,
    writable,
)
from hpcdist.backend.reductions import Reduction
from hpcdist.comm.messages import pieces
from hpcdist.comm.team import Team
from hpcdist.layout import limits
from hpcdist.routes.mpi import MPI_ROUTE
from hpcdist.routes.route import Vector
from hpcdist.tensors.storage import of_bytes, overlap

LEAST = 2**19  # bytes of a tensor to reduce through shared memory; below, MPI's own Allreduce has less latency
SLOT = 2**20  # bytes of a rank's slot
PIPELINED = 2**23  # bytes of a tensor to broadcast so; below, MPI's own Bcast is as fast, or has less latency
SLICE = 2**21  # bytes of it in a slot
_AHEAD = 4  # slots that a root fills before the first of them must have been read by all
_SIGN = [bytearray(), MPI.BYTE]  # a message without data
SMALL = 2**15  # bytes of a tensor for which each microsecond counts
FEW = 8  # ranks up to which a small tensor is reduced by the root alone
PACKED = 2**16  # bytes of all messages up to which they are copied into one piece of memory


def barrier(team: Team) -> None:
    """Do nothing more: the comparison before each call has a message from every rank."""


def _small(team: Team, *tensors: Tensor) -> list[Tensor] | None:
    """Return tensors of one size as they are sent behind the header; None if they do not fit, or differ in size."""
    nbytes = tensors[0].nbytes if tensors else 0
    for x in tensors:
        if x.nbytes != nbytes or not x.is_cpu:
            return None
    return None if nbytes * len(tensors) > team.inline else [x if is_plain(x) else readable(x) for x in tensors]


def _write(out: Tensor, data: Any) -> None:
    """Write the memory of a contiguous tensor into `out`, which has its size and dtype."""
    if is_plain(out):
        address(out)[:] = data
    else:
        copyto(out, of_bytes(data).view(out.dtype))


def _broadcast(team: Team, x: Tensor, root: int) -> None:
    with nullcontext(readable(x)) if team.rank == root else writable(x) as whole:
        memory = address(whole)
        if len(memory) < PIPELINED or not _broadcast_shared(team, whole, root):
            for piece in pieces(memory):
                team.comm.Bcast(piece, root)


def _take_broadcast(chunks: Chunks, team: Team, x: Tensor, root: int) -> None:
    if team.rank != root:
        _write(x, chunks[root][: x.nbytes])


broadcast = Step(_broadcast, lambda team, x, root: _small(team, *[x] * (team.rank == root)), _take_broadcast)


def _all_gather_single(team: Team, out: Tensor, x: Tensor) -> None:
    """Gather equal tensors into `out`, one after the other."""
    with writable(out, read=False) as whole:
        _allgather(team, flat(whole), flat(readable(x)))


def _take_all_gather_single(chunks: Chunks, team: Team, out: Tensor, x: Tensor) -> None:
    nbytes = x.nbytes
    _write(out, b"".join([chunk[:nbytes] for chunk in chunks]))


all_gather_single = Step(_all_gather_single, lambda team, out, x: _small(team, x), _take_all_gather_single)


def _allgather(team: Team, out: Tensor, x: Tensor) -> None:
    size = x.nbytes
    start = x.data_ptr() - out.data_ptr()
    if -size < start < out.nbytes and start != size * team.rank:  # FSDP sends from where this rank's part belongs
        x = x.clone()
    counts = [size] * team.size
    _gather_bytes(team, bytes_of(x), bytes_of(out), counts)


def _gather_bytes(team: Team, send: Tensor, recv: Tensor, counts: list[int]) -> None:
    MPI_ROUTE.prepare(team, "allgatherv", Vector.packed(counts))(send, recv)


def _all_gather(team: Team, outs: Sequence[Tensor], x: Tensor) -> None:
    """Gather the tensor of rank i into ``outs[i]``; their sizes may differ."""
    if sum(out.nbytes for out in outs) <= PACKED:
        whole = scratch([sum(out.numel() for out in outs)], x.dtype)
        counts = [out.nbytes for out in outs]
        _gather_bytes(team, bytes_of(readable(x)), bytes_of(whole), counts)
        unpack(whole, outs)
    else:
        exchange(team, dict.fromkeys(range(team.size), x), dict(enumerate(outs)))


def _take(chunks: Chunks, outs: Iterable[tuple[int, Tensor]], number: int) -> None:
    """Write into the tensor for each rank what that rank has sent as this `number` of its tensors of one size."""
    for source, out in outs:
        nbytes = out.nbytes
        _write(out, chunks[source][nbytes * number : nbytes * (number + 1)])


all_gather = Step(
    _all_gather,
    lambda team, outs, x: _small(team, x),
    lambda chunks, team, outs, x: _take(chunks, enumerate(outs), 0),
)


def _all_to_all_single(team: Team, out: Tensor, x: Tensor, recvs: Counts, sends: Counts) -> None:
    """Send consecutive parts of `x` to the ranks, and receive parts of `out`, given their numbers of elements."""
    with writable(out, read=False) as whole:
        send = readable(x)
        if overlap(whole, send):
            send = send.clone()
        ours, theirs = _parts(whole, recvs), _parts(send, sends)
        ours[team.rank][:] = theirs[team.rank]
        # As fast as Alltoall, which only all ranks together could use: equal parts may be given as splits, or not.
        others = [rank for rank in range(team.size) if rank != team.rank]
        requests = [team.comm.Irecv(piece, rank, 0) for rank in others for piece in pieces(ours[rank])]
        requests += [team.comm.Isend(piece, rank) for rank in others for piece in pieces(theirs[rank])]
        MPI.Request.Waitall(requests)


def _take_all_to_all_single(chunks: Chunks, team: Team, out: Tensor, x: Tensor, recvs: Counts, sends: Counts) -> None:
    lengths = [out.itemsize * recvs[source] for source in range(team.size)]
    _write(out, b"".join([chunk[n * team.rank :][:n] for chunk, n in zip(chunks, lengths, strict=True)]))


all_to_all_single = Step(
    _all_to_all_single,
    lambda team, out, x, recvs, sends: _small(team, x) if len(set(sends.values())) == 1 else None,
    _take_all_to_all_single,
)


def _parts(x: Tensor, counts: Counts) -> list[Any]:
    """Cut the memory of a tensor into the elements of each rank."""
    memory = address(x)
    lengths = [x.itemsize * count for count in counts.values()]
    return [memory[start : start + length] for start, length in zip(layout.displs(lengths), lengths, strict=True)]


def copyto(out: Tensor, x: Tensor) -> None:
    if not _same(out, x):
        out.detach().copy_(x.detach().reshape(out.shape))


def _exchange(team: Team, sends: dict[int, Tensor], recvs: dict[int, Tensor]) -> None:
    """Send and receive separate tensors, at most one for each pair of ranks and direction; copy this rank's own.

    The result is that of sends from copies, and of receives in the order of the ranks, whatever memory they share.
    """
    me, own = team.rank, recvs.get(team.rank)
    xs = {id(x): x for x in sends.values()}  # one may go to all ranks
    direct = not share_memory([*recvs.values(), *(x for x in xs.values() if own is None or not _same(own, x))])
    if not direct:
        xs = {key: x.detach().clone() for key, x in xs.items()}
    ready = {key: readable(x) for key, x in xs.items()}
    into = {
        rank: out if direct and is_plain(out) else scratch([out.numel()], out.dtype)
        for rank, out in recvs.items()
        if rank != me
    }
    MPI_ROUTE.exchange(
        team,
        [(rank, bytes_of(ready[id(x)])) for rank, x in sends.items() if rank != me],
        [(rank, bytes_of(x)) for rank, x in into.items()],
        0,
    )
    if own is not None:
        into[me] = ready[id(sends[me])]
    for rank, out in recvs.items():
        if into[rank] is not out:
            copyto(out, into[rank])


def _send_all(team: Team, sends: dict[int, Tensor], recvs: dict[int, Tensor]) -> list[Tensor] | None:
    return _small(team, *sends.values())


exchange = Step(  # each sends to all ranks, or to none
    _exchange, _send_all, lambda chunks, team, sends, recvs: _take(chunks, recvs.items(), team.rank)
)
gather = Step(  # to one
    _exchange, _send_all, lambda chunks, team, sends, recvs: _take(chunks, recvs.items(), 0)
)


def _same(out: Tensor, x: Tensor) -> bool:
    """Whether tensors of one size are the same memory; torch refuses to copy if the strides of a dim of 1 differ."""
    return out.data_ptr() == x.data_ptr() and is_plain(out) and is_plain(x)


def all_reduce(team: Team, x: Tensor, op: Reduction) -> None:
    """Reduce the tensors of all ranks into `x` on every rank: the same bits on all of them."""
    direct, size = op.direct, x.nbytes
    if direct is not None and size < SMALL and is_plain(x):
        team.comm.Allreduce(MPI.IN_PLACE, [address(x), x.numel(), direct[1]], direct[0])
        return
    with writable(x) as whole:
        out = flat(whole)
        mine = op.scaled(out)
        if size >= LEAST and _all_reduce_shared(team, mine, out, op):
            return
        if op.mpi is None:
            _reduce_with_torch(team, out, op)
            return
        if mine is not out:
            out.copy_(mine)
        for part in split(out, limits.PIECE // out.itemsize):
            team.comm.Allreduce(MPI.IN_PLACE, [address(part), part.numel(), op.mpi[1]], op.mpi[0])
        op.average(out, team.size)


def _take_reduced(chunks: Chunks, out: Tensor, op: Reduction, start: int = 0) -> None:
    """Reduce what all ranks have sent, from byte `start` on, in the order of the ranks."""
    numel, nbytes, direct = out.numel(), out.nbytes, op.direct
    if not numel:
        return
    if direct is not None and is_plain(out):
        memory = address(out)
        memory[:] = chunks[0][start : start + nbytes]
        total = [memory, numel, direct[1]]
        for chunk in chunks[1:]:
            direct[0].Reduce_local([chunk[start : start + nbytes], numel, direct[1]], total)
        return
    with writable(out, read=False) as whole:
        op.of([torch.frombuffer(x, dtype=out.dtype, count=numel, offset=start) for x in chunks], flat(whole))


def _reduce_with_torch(team: Team, x: Tensor, op: Reduction) -> None:
    """Reduce a flat tensor in place: each rank a part of it, which it sends to all; a small one whole on every rank."""
    size, numel = team.size, x.numel()
    if x.nbytes * size <= PACKED:
        whole = scratch([numel * size], x.dtype)
        _allgather(team, whole, op.scaled(x))
        op.of(whole.tensor_split(size), x)
        return
    lengths = layout.block(numel, size)
    parts, counts = list(split(x, lengths)), [length * x.itemsize for length in lengths]
    reduce_scatter(team, parts[team.rank], parts, op)
    _gather_bytes(team, bytes_of(parts[team.rank]), bytes_of(x), counts)


def _reduce(team: Team, x: Tensor, op: Reduction, root: int) -> None:
    """Reduce the tensors of all ranks into `x` on the root; those of the other ranks stay as they are."""
    mine = packed([x])
    all_reduce(team, mine, op)
    if team.rank == root:
        copyto(x, mine.view(x.shape))


def _take_reduce(chunks: Chunks, team: Team, x: Tensor, op: Reduction, root: int) -> None:
    if team.rank == root:
        _take_reduced(chunks, x, op)


reduce = Step(_reduce, lambda team, x, op, root: _small(team, op.scaled(x)) if team.size <= FEW else None, _take_reduce)


def _reduce_scatter(team: Team, out: Tensor, xs: Sequence[Tensor], op: Reduction) -> None:
    """Reduce ``xs[i]`` of all ranks into `out` of rank i; the sizes may differ from rank to rank."""
    memory = scratch([out.numel() * team.size], out.dtype)
    received = memory.tensor_split(team.size)
    sends = [op.scaled(flat(readable(x))) for x in xs]
    exchange(team, dict(enumerate(sends)), dict(enumerate(received)))
    with writable(out, read=False) as whole:
        op.of(received, flat(whole))


def _take_reduce_scatter(chunks: Chunks, team: Team, out: Tensor, xs: Any, op: Reduction) -> None:
    _take_reduced(chunks, out, op, team.rank * out.nbytes)


reduce_scatter = Step(
    _reduce_scatter, lambda team, out, xs, op: _small(team, *[op.scaled(x) for x in xs]), _take_reduce_scatter
)


def coalesced(team: Team, xs: Sequence[Tensor], op: Reduction) -> None:
    """Reduce several tensors of one dtype on every rank."""
    whole = packed(xs)
    all_reduce(team, whole, op)
    unpack(whole, xs)


def _reduce_scatter_single(team: Team, out: Tensor, x: Tensor, op: Reduction) -> None:
    """Reduce consecutive equal parts of `x`, that of rank i into `out` of rank i."""
    reduce_scatter(team, out, flat(readable(x)).tensor_split(team.size), op)


reduce_scatter_single = Step(
    _reduce_scatter_single, lambda team, out, x, op: _small(team, op.scaled(x)), _take_reduce_scatter
)


def _shared_memory(team: Team, nbytes: int) -> Tensor | None:
    """Return memory that all ranks of the team share, flat bytes; None if they are on several nodes, or cannot.

    Collective when it is first used, and for more bytes than before. Kept until the team ends.
    """
    if team.window is None or len(team.window.bytes) < nbytes:
        team.window = team.windows.take(nbytes) if len(set(team.node_of)) == 1 else None
    return None if team.window is None else team.window.bytes


def _all_reduce_shared(team: Team, x: Tensor, out: Tensor, op: Reduction) -> bool:
    """Reduce the flat tensors of all ranks into `out`, which may be `x` itself.

    Returns:
        Whether it has; False on all ranks if they cannot share memory.
    """
    memory = _shared_memory(team, SLOT * (team.size + 1))
    if memory is None:
        return False
    size, me, barrier = team.size, team.rank, team.comm.Barrier
    slots = memory[: (size + 1) * SLOT].view(size + 1, SLOT).view(x.dtype)
    result = slots[size]
    for start, length in layout.pieces(x.numel(), SLOT // x.itemsize):
        mine = layout.block_range(length, size, me)
        first, last = mine.start, mine.stop
        here = x[start : start + length]
        slots[me, :first].copy_(here[:first])
        slots[me, last:length].copy_(here[last:])
        barrier()
        if last > first:
            parts = [here[first:last] if rank == me else slots[rank, first:last] for rank in range(size)]
            op.of(parts, result[first:last])
        barrier()
        out[start : start + length].copy_(result[:length])
        activity.touch()
    return True


def _broadcast_shared(team: Team, x: Tensor, root: int) -> bool:
    """Broadcast contiguous host memory: the root fills slots in turn, and the others copy their contents.

    A rank waits for a message from the one that it needs, not in a barrier: where ranks share cores, each barrier of a
    piece would cost them a time slice.

    Returns:
        Whether it has; False on all ranks if they cannot share memory.
    """
    memory = _shared_memory(team, SLICE * _AHEAD)
    if memory is None:
        return False
    whole, comm = bytes_of(x), team.comm
    others = [rank for rank in range(team.size) if rank != root]
    pieces = layout.pieces(x.nbytes, SLICE)
    for turn, (start, length) in enumerate(pieces):
        piece, slot = whole[start : start + length], memory[turn % _AHEAD * SLICE :][:length]
        if team.rank == root:
            for rank in others if turn >= _AHEAD else ():
                comm.Recv(_SIGN, rank, 0)
            slot.copy_(piece)
            for rank in others:
                comm.Send(_SIGN, rank)
        else:
            comm.Recv(_SIGN, root, 0)
            piece.copy_(slot)
            if turn + _AHEAD < len(pieces):
                comm.Send(_SIGN, root)
        activity.touch()
    comm.Barrier()  # the next call may write into the slots
    return True


def sparse_all_reduce(team: Team, x: Tensor) -> None:
    """Sum the sparse tensors (COO) of all ranks into `x` on every rank, in rank order: the same bits on all of them.

    DDP has such gradients, of embeddings.
    """
    mine = x.detach().coalesce()
    counts = torch.empty(team.size, dtype=torch.int64, device="cpu")
    all_gather_single(team, counts, torch.tensor([len(mine.values())], device="cpu"))
    indices, values = mine.indices().t().contiguous(), mine.values().contiguous()
    whole_indices, whole_values = _gather_rows(team, indices, counts), _gather_rows(team, values, counts)
    total = torch.sparse_coo_tensor(
        whole_indices.t(), whole_values, x.shape, device=x.device, check_invariants=False
    ).coalesce()
    with torch.no_grad():
        x.copy_(total)  # not into x.detach(), which would get a memory of its own


def _gather_rows(team: Team, rows: Tensor, counts: Tensor) -> Tensor:
    """Concatenate the rows of all ranks."""
    whole = torch.empty((int(counts.sum()), *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
    all_gather(team, list(split(whole, counts.tolist())), rows)
    return whole
