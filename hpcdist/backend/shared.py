"""Reductions and broadcasts through memory that the ranks of a node share.

Each rank reduces a part of the data for all of them. A tensor passes through a window of the group in rounds. In each,
every rank writes its data for the others into its slot, reduces its own part from all slots, and copies the others'
parts of the result. Slots and result are small enough to stay in the caches. Of a round's two barriers, the first ends
all use of the last round's result, and the second all use of the slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpi4py import MPI
from torch import Tensor

from hpcdist import activity, layout
from hpcdist.backend.host_copies import bytes_of
from hpcdist.backend.reductions import Reduction

if TYPE_CHECKING:
    from hpcdist.backend.communicator import Communicator

__all__ = ["LEAST", "all_reduce", "broadcast"]

LEAST = 2**19  # bytes of a tensor; below, MPI's own Allreduce has less latency
SLOT = 2**20  # bytes of a rank's slot
PIPELINED = 2**23  # bytes of a tensor to broadcast; below, MPI's own Bcast is as fast, or has less latency
PIECE = 2**21  # bytes of it in a slot
_AHEAD = 4  # slots that a root fills before the first of them must have been read by all
_SIGN = [bytearray(), MPI.BYTE]  # a message without data


def all_reduce(team: Communicator, x: Tensor, out: Tensor, op: Reduction) -> bool:
    """Reduce the flat tensors of all ranks into `out`, which may be `x` itself.

    Returns:
        Whether it has; False on all ranks if they cannot share memory.
    """
    memory = team.shared_memory(SLOT * (team.size + 1))
    if memory is None:
        return False
    size, me, barrier = team.size, team.rank, team.comm.Barrier
    slots = memory[: (size + 1) * SLOT].view(size + 1, SLOT).view(x.dtype)
    result = slots[size]
    for start, length in layout.pieces(x.numel(), SLOT // x.itemsize):
        first, last = layout.block_ranges(length, size, size)[me]
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


def broadcast(team: Communicator, x: Tensor, root: int) -> bool:
    """Broadcast contiguous host memory: the root fills slots in turn, and the others copy what is in them.

    A rank waits for a message from the one that it needs, not in a barrier: where ranks share cores, each barrier of a
    piece would cost them a time slice.

    Returns:
        Whether it has; False on all ranks if they cannot share memory.
    """
    memory = team.shared_memory(PIECE * _AHEAD)
    if memory is None:
        return False
    whole, comm = bytes_of(x), team.comm
    others = [rank for rank in range(team.size) if rank != root]
    pieces = layout.pieces(x.nbytes, PIECE)
    for turn, (start, length) in enumerate(pieces):
        piece, slot = whole[start : start + length], memory[turn % _AHEAD * PIECE :][:length]
        if team.rank == root:
            for rank in others if turn >= _AHEAD else ():
                comm.Recv(_SIGN, rank)
            slot.copy_(piece)
            for rank in others:
                comm.Send(_SIGN, rank)
        else:
            comm.Recv(_SIGN, root)
            piece.copy_(slot)
            if turn + _AHEAD < len(pieces):
                comm.Send(_SIGN, root)
        activity.touch()
    comm.Barrier()  # the next call may write into the slots
    return True
