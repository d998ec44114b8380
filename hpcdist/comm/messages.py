"""Messages of MPI: the memory of tensors as mpi4py takes it, in pieces that one message may hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpi4py import MPI
from torch import Tensor

from hpcdist import layout
from hpcdist.comm.route import Message
from hpcdist.layout import limits
from hpcdist.tensors import accelerator

if TYPE_CHECKING:
    from hpcdist.comm.team import Team


def start(team: Team, sends: list[Message], recvs: list[Message]) -> list[MPI.Request]:
    """Start to exchange messages. A pair of ranks may exchange several, which arrive in order."""
    # MPI keeps the order of messages between two ranks: pieces need no tags.
    comm = team.comm
    requests = [comm.Irecv(piece, source) for source, block in recvs for piece in pieces(memory(block))]
    return requests + [comm.Isend(piece, dest) for dest, block in sends for piece in pieces(memory(block))]


def memory(message: Tensor) -> Any:
    """Return the memory of a message as an mpi4py buffer; on a GPU, after pending work on it."""
    if not message.is_cpu:
        accelerator.synchronize(message.device)
    return MPI.buffer.fromaddress(message.data_ptr(), message.nbytes)


def pieces(memory: Any, most: int | None = None) -> list[list[Any]]:
    """Cut an mpi4py buffer into what one message may hold, or into `most` bytes each; an empty one is one piece."""
    ranges = layout.pieces(len(memory), most or limits.PIECE) or [(0, 0)]
    return [[memory[start : start + length], MPI.BYTE] for start, length in ranges]
