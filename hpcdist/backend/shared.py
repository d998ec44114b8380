"""Reductions through memory that the ranks of a node share: each rank reduces a part of the data for all of them.

A tensor passes through a window of the group in rounds. In each, every rank writes its data for the others into its
slot, reduces its own part from all slots, and copies the others' parts of the result. Slots and result are small
enough to stay in the caches. Of a round's two barriers, the first ends all use of the last round's result, and the
second all use of the slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from hpcdist import activity, layout
from hpcdist.backend.reductions import Reduction

if TYPE_CHECKING:
    from hpcdist.backend.communicator import Communicator

__all__ = ["LEAST", "all_reduce"]

LEAST = 2**19  # bytes of a tensor; below, MPI's own Allreduce has less latency
SLOT = 2**20  # bytes of a rank's slot


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
