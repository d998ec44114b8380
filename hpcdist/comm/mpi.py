"""The route mpi: Gatherv, Scatterv, Allgatherv, Alltoallv; beyond the range of an int, sends and receives in pieces.

A large Allgatherv is replaced by sends and receives if that is faster: see DIRECT.
"""

from __future__ import annotations

import subprocess
import sys
from array import array
from typing import TYPE_CHECKING, Any

from mpi4py import MPI
from torch import Tensor

from hpcdist import layout
from hpcdist.comm.route import Alltoall, Ints, Message, Method, Route
from hpcdist.layout import limits
from hpcdist.tensors import accelerator

if TYPE_CHECKING:
    from hpcdist.comm.team import Team

LIMIT = 2**31 - 1  # bytes: counts and displacements are C ints in every MPI before 4.0, Open MPI 5.0 included
# Total bytes from which sends and receives replace an Allgatherv. MPICH pipelines it in pieces of 32 KiB around a
# ring, which at 64 MiB per rank takes 2 times as long on 2 ranks, and 10 times or more with more ranks than cores.
DIRECT = 2**23 if MPI.get_vendor()[0] == "MPICH" else LIMIT


class Mpi(Route):
    """Messages over the team's communicator."""

    name = "mpi"

    def carries(self, team: Team, gpu: bool) -> bool:
        return not gpu or _takes_gpu_memory(team)

    def method(self, team: Team, operation: str, nbytes: int) -> Method:
        if operation in ("exchange", "allgather"):
            return Method("MPI sends and receives")
        name, limit = f"MPI_{operation.capitalize()}", _limit(operation)
        if nbytes <= limit:
            return Method(name)
        why = "can count" if limit == LIMIT else "is fast for"
        return Method(
            "MPI sends and receives", f"{nbytes:,} bytes in all are more than the {limit:,} that {name} {why}"
        )

    def gatherv(self, team: Team, send: Tensor, recv: Tensor | None, counts: Ints, displs: Ints, root: int) -> None:
        if displs[-1] + counts[-1] > _limit("gatherv"):
            super().gatherv(team, send, recv, counts, displs, root)
        else:
            spec = None if recv is None else [memory(recv), counts, displs, MPI.BYTE]
            team.comm.Gatherv([memory(send), counts[team.rank], MPI.BYTE], spec, root)

    def scatterv(self, team: Team, send: Tensor | None, recv: Tensor, counts: Ints, displs: Ints, root: int) -> None:
        if displs[-1] + counts[-1] > _limit("scatterv"):
            super().scatterv(team, send, recv, counts, displs, root)
        else:
            spec = None if send is None else [memory(send), counts, displs, MPI.BYTE]
            team.comm.Scatterv(spec, [memory(recv), counts[team.rank], MPI.BYTE], root)

    def allgatherv(self, team: Team, send: Tensor, recv: Tensor, counts: Ints, displs: Ints) -> None:
        if displs[-1] + counts[-1] > _limit("allgatherv"):
            super().allgatherv(team, send, recv, counts, displs)
        else:
            in_place = send.data_ptr() == recv.data_ptr() + displs[team.rank]  # MPI requires it
            spec = MPI.IN_PLACE if in_place else [memory(send), counts[team.rank], MPI.BYTE]
            team.comm.Allgatherv(spec, [memory(recv), counts, displs, MPI.BYTE])

    def alltoallv(self, team: Team, send: Tensor, recv: Tensor, what: Alltoall) -> None:
        if what.total > _limit("alltoallv"):
            super().alltoallv(team, send, recv, what)
        else:
            team.comm.Alltoallv(
                [memory(send), what.sendcounts, what.sdispls, MPI.BYTE],
                [memory(recv), what.recvcounts, what.rdispls, MPI.BYTE],
            )

    def exchange(self, team: Team, sends: list[Message], recvs: list[Message], longest: int) -> None:
        for request in self.start(team, sends, recvs):
            request.Wait()

    def start(self, team: Team, sends: list[Message], recvs: list[Message]) -> list[MPI.Request]:
        """Start to exchange messages. A pair of ranks may exchange several, which arrive in order."""
        # MPI keeps the order of messages between two ranks: pieces need no tags.
        comm = team.comm
        requests = [comm.Irecv(piece, source) for source, block in recvs for piece in pieces(memory(block))]
        return requests + [comm.Isend(piece, dest) for dest, block in sends for piece in pieces(memory(block))]


def _limit(operation: str) -> int:
    """Return the total bytes up to which MPI's own collective is used."""
    return min(DIRECT, LIMIT) if operation == "allgatherv" else LIMIT


def memory(message: Tensor) -> Any:
    """Return the memory of a message as an mpi4py buffer; on a GPU, after pending work on it."""
    if not message.is_cpu:
        accelerator.synchronize(message.device)
    return MPI.buffer.fromaddress(message.data_ptr(), message.nbytes)


def pieces(memory: Any) -> list[list[Any]]:
    """Cut an mpi4py buffer into what one message may hold; an empty one is one piece."""
    ranges = layout.pieces(len(memory), limits.PIECE) or [(0, 0)]
    return [[memory[start : start + length], MPI.BYTE] for start, length in ranges]


_SECONDS = 60  # for a child process that imports torch, opens the GPU and sends itself a message

# A library that is not CUDA-aware reads the device pointer as a host address, and the process dies.
_TRIAL = """
import sys
import torch
from mpi4py import MPI
sent = torch.arange(1 << 20, dtype=torch.int32, device=sys.argv[1])
received = torch.zeros_like(sent)
torch.accelerator.synchronize()
memory = [MPI.buffer.fromaddress(t.data_ptr(), t.numel() * 4) for t in (sent, received)]
MPI.COMM_SELF.Sendrecv([memory[0], MPI.BYTE], 0, 0, [memory[1], MPI.BYTE], 0, 0)
torch.accelerator.synchronize()
raise SystemExit(0 if torch.equal(sent, received) else 1)
"""


def _takes_gpu_memory(team: Team) -> bool:
    """Return whether the MPI library of every rank accepts device pointers. Collective; one trial per team.

    Returns:
        The same answer on all ranks. One rank of each node runs the trial in a child process.
    """
    if team.cuda_aware is None:
        node = team.comm.Split_type(MPI.COMM_TYPE_SHARED)
        works = array("b", [node.rank != 0 or _try(dict(team.settings.child_environ))])
        node.Free()
        team.comm.Allreduce(MPI.IN_PLACE, [works, MPI.SIGNED_CHAR], op=MPI.MIN)
        team.cuda_aware = bool(works[0])
    return team.cuda_aware


def _try(environ: dict[str, str]) -> bool:
    command = [sys.executable, "-c", _TRIAL, accelerator.KIND]
    try:
        return not subprocess.run(command, env=environ, capture_output=True, timeout=_SECONDS).returncode
    except subprocess.TimeoutExpired:
        return False


MPI_ROUTE = Mpi()
