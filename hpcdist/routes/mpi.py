"""The route mpi: each operation by the algorithm that a rule of :mod:`hpcdist.comm.tuning` names.

Beyond the range of an int, MPI's own collectives cannot count: then sends and receives in pieces.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from mpi4py import MPI
from torch import Tensor

from hpcdist.comm.messages import memory, pieces, start
from hpcdist.comm.tuning import ALGORITHMS
from hpcdist.control import objects
from hpcdist.layout import limits
from hpcdist.routes import node_copy
from hpcdist.routes.route import Alltoall, Message, Method, Route, Step, Vector, cut, nothing, others
from hpcdist.tensors import accelerator
from hpcdist.tensors.storage import as_bytes

if TYPE_CHECKING:
    from hpcdist.comm.team import Team

LIMIT = 2**31 - 1  # bytes: counts, displacements and a type's extents are C ints before MPI 4.0, and in Open MPI 5.0


class Mpi(Route):
    """Messages over the team's communicator.

    Args:
        on_gpu: whether some ranks pass GPU memory, which the windows of a node would send through the host.
    """

    name = "mpi"
    table = ""

    def __init__(self, on_gpu: bool = False) -> None:
        self._on_gpu = on_gpu

    def carries(self, team: Team, gpu: bool) -> bool:
        return not gpu or _takes_gpu_memory(team)

    def method(self, team: Team, operation: str, nbytes: int, largest: int = 0) -> Method:
        found, names = super().method(team, operation, nbytes, largest), ALGORITHMS[operation]
        if nbytes > LIMIT and found.name == names["sends"]:
            why = f"{nbytes:,} bytes in all are more than the {LIMIT:,} that {names['mpi']} can count"
            return Method(found.name, why)
        return found

    def usable(self, team: Team, algorithm: str, total: int, largest: int) -> bool:
        if algorithm == "window":
            return not self._on_gpu and team.windows.problem is None
        if algorithm == "typed" and largest > limits.PIECE:  # each arrives in one piece
            return False
        return algorithm not in ("mpi", "typed") or total <= LIMIT

    def receives_boxes(self, team: Team, total: int, largest: int) -> bool:
        return not self._on_gpu and self.rule(team, "alltoallv", total, largest).algorithm == "typed"

    def allgather(self, team: Team, send: Tensor, blocks: Sequence[Tensor]) -> bool:
        counts = [block.numel() for block in blocks]
        rule = self.rule(team, "allgatherv", sum(counts), max(counts))
        if rule.algorithm == "ring":
            _pass_around(team, rule.segment, send, blocks)
            return True
        return rule.algorithm == "window" and node_copy.in_rounds(team, send, blocks)

    def start(self, team: Team, sends: list[Message], recvs: list[Message], longest: int) -> Sequence[Step]:
        return [request.Wait for request in start(team.comm, sends, recvs)]

    def gatherv_mpi(self, team: Team, what: Vector, send: Tensor, recv: Tensor | None) -> None:
        spec = None if recv is None else [memory(recv), what.counts, what.displs, MPI.BYTE]
        team.comm.Gatherv([memory(send), what.counts[team.rank], MPI.BYTE], spec, what.root)

    def scatterv_mpi(self, team: Team, what: Vector, send: Tensor | None, recv: Tensor) -> None:
        spec = None if send is None else [memory(send), what.counts, what.displs, MPI.BYTE]
        team.comm.Scatterv(spec, [memory(recv), what.counts[team.rank], MPI.BYTE], what.root)

    def allgatherv_mpi(self, team: Team, what: Vector, send: Tensor, recv: Tensor) -> None:
        in_place = send.data_ptr() == recv.data_ptr() + what.displs[team.rank]  # MPI requires it
        spec = MPI.IN_PLACE if in_place else [memory(send), what.counts[team.rank], MPI.BYTE]
        team.comm.Allgatherv(spec, [memory(recv), what.counts, what.displs, MPI.BYTE])

    def allgatherv_ring(self, team: Team, what: Vector, send: Tensor, recv: Tensor) -> None:
        _pass_around(team, what.segment, as_bytes(send), cut(recv, what.counts, what.displs))

    def allgatherv_window(self, team: Team, what: Vector, send: Tensor, recv: Tensor) -> None:
        if not node_copy.in_rounds(team, as_bytes(send), cut(recv, what.counts, what.displs)):
            self.allgatherv_sends(team, what, send, recv)

    def alltoallv_mpi(self, team: Team, what: Alltoall, send: Tensor, recv: Tensor, meanwhile: Step = nothing) -> None:
        meanwhile()
        team.comm.Alltoallv(
            [memory(send), what.sendcounts, what.sdispls, MPI.BYTE],
            [memory(recv), what.recvcounts, what.rdispls, MPI.BYTE],
        )

    def alltoallv_typed(
        self, team: Team, what: Alltoall, send: Tensor, recv: Tensor, meanwhile: Step = nothing
    ) -> None:
        if what.boxes is None:
            self.alltoallv_sends(team, what, send, recv, meanwhile)
            return
        sends = others(team, enumerate(cut(send, what.sendcounts, what.sdispls)))
        made: dict[int, MPI.Datatype] = {}
        for rank in filter(what.recvcounts.__getitem__, range(team.size)):
            [box] = what.boxes[rank]  # of bytes, so that the types of both sides match
            shape, extents, at = ([*of[:-1], of[-1] * recv.itemsize] for of in (recv.shape, box.shape, box.offset))
            made[rank] = MPI.BYTE.Create_subarray(shape, extents, at).Commit()
        try:
            requests = [team.comm.Irecv([memory(recv), 1, datatype], rank, 0) for rank, datatype in made.items()]
            requests += start(team.comm, sends, [])
            meanwhile()
            for request in requests:
                request.Wait()
        finally:
            for datatype in made.values():
                datatype.Free()


def _pass_around(team: Team, segment: int, send: Tensor, blocks: Sequence[Tensor]) -> None:
    """Send pieces around a ring, each as soon as it is there: a skewed call takes the time of its total.

    The ring passes through the ranks of a node one after the other. What a rank has for those before it on its node
    goes back to them, so that a node receives each byte of the others once, and none of its own.

    Träff and others, "A Pipelined Algorithm for Large, Irregular All-gather Problems" (2010).
    """
    rank, size, comm, nodes = team.rank, team.size, team.comm, team.node_of
    limit = min(segment or limits.PIECE, limits.PIECE)
    ring = sorted(range(size), key=nodes.__getitem__)
    place = dict(zip(ring, range(size), strict=True))
    at, sent = place[rank], []
    left, right = ring[at - 1], ring[(at + 1) % size]

    def pieces_of(owner: int) -> list[list[Any]]:
        block = send if owner == rank else blocks[owner]
        return pieces(memory(block), limit) if block.numel() else []

    def goes_back(owner: int, dest: int) -> bool:
        """Whether the data of a rank reach `dest` from its right: from a later one of its node."""
        return nodes[owner] == nodes[dest] and place[owner] > place[dest]

    def pass_on(owner: int, piece: list[Any]) -> None:
        if goes_back(owner, left):
            sent.append(comm.Isend(piece, left))
        if owner != right and not goes_back(owner, right) and not goes_back(owner, rank):
            sent.append(comm.Isend(piece, right))

    # In the order of steps: a piece takes its last step after all those that take fewer, so no rank waits in a circle.
    arriving = []
    for owner in ring[at:] + ring[:at]:
        back = goes_back(owner, rank)
        steps = place[owner] - at if back else (at - place[owner]) % size
        for i, piece in enumerate(pieces_of(owner) if steps else ()):
            arriving.append((steps, i, owner, right if back else left, piece))
    arriving.sort(key=itemgetter(0, 1))
    requests = [comm.Irecv(piece, source, 0) for *_, source, piece in arriving]
    for piece in pieces_of(rank):
        pass_on(rank, piece)
    if send.data_ptr() != blocks[rank].data_ptr():
        blocks[rank].copy_(send)  # while the others travel
    for request, (_, _, owner, _, piece) in zip(requests, arriving, strict=True):
        request.Wait()
        pass_on(owner, piece)
    for request in sent:
        request.Wait()


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
        works = team.topology.local_rank != 0 or _try(dict(team.settings.child_environ))
        team.cuda_aware = objects.everywhere(team.comm, works)
    return team.cuda_aware


def _try(environ: dict[str, str]) -> bool:
    command = [sys.executable, "-c", _TRIAL, accelerator.KIND]
    try:
        return not subprocess.run(command, env=environ, capture_output=True, timeout=_SECONDS).returncode
    except subprocess.TimeoutExpired:
        return False


MPI_ROUTE, MPI_ON_GPU = Mpi(), Mpi(on_gpu=True)
