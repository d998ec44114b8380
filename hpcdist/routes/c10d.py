"""A torch.distributed process group of the library's own: NCCL for GPU memory, gloo for host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from hpcdist import layout
from hpcdist.buffers import as_bytes
from hpcdist.routes import Ints, Message
from hpcdist.routes.exchange import Exchange

if TYPE_CHECKING:
    from hpcdist.team import Team

__all__ = ["GLOO", "NCCL", "PIECE"]

PIECE = 2**30  # bytes a message at most


class _C10d(Exchange):
    backend: str

    def group(self, team: Team) -> dist.ProcessGroup:
        """The torch group of a team. Collective over it when first used."""
        return team.torch_group(self.backend)

    def exchange(self, team: Team, sends: list[Message], recvs: list[Message], longest: int) -> None:
        # Both backends keep the order of messages between two ranks, so that pieces need no tags of their own.
        if team.size == 1:
            return
        group, peers = self.group(team), team.peers  # collective: for ranks without messages, too
        if not sends and not recvs:
            return
        ops = [
            dist.P2POp(op, block[start : start + length], peers[rank], group)
            for op, messages in ((dist.irecv, recvs), (dist.isend, sends))
            for rank, block in messages
            for start, length in layout.pieces(block.numel(), PIECE)
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()


class _Gloo(_C10d):
    backend = "gloo"

    def missing(self, team: Team) -> str | None:
        return None if dist.is_gloo_available() else "this torch was built without gloo; use route mpi"

    def carries(self, team: Team, cuda: bool) -> bool:
        return not cuda


class _Nccl(_C10d):
    backend = "nccl"

    def group(self, team: Team) -> dist.ProcessGroup:
        # torch: "if batch_isend_irecv is the first collective call in the group, all its ranks must take part", and a
        # rank without messages takes none.
        device = team.world.device
        return team.torch_group(self.backend, lambda group: dist.all_reduce(torch.zeros(1, device=device), group=group))

    def missing(self, team: Team) -> str | None:
        if team.world.own_gpus and dist.is_initialized():
            return None
        return "route nccl needs a GPU of its own for each rank and a torch with NCCL; use route mpi or auto"

    def carries(self, team: Team, cuda: bool) -> bool:
        return cuda

    def allgatherv(self, team: Team, send: Tensor, recv: Tensor, counts: Ints, displs: Ints) -> None:
        """Equal messages: one NCCL all-gather. Else torch turns the list into one group of broadcasts, each straight
        into its place (ProcessGroupNCCL::allgather), which NCCL 2.29.2 and later fuse into one kernel."""
        group = self.group(team)
        send, recv = as_bytes(send), as_bytes(recv)
        blocks = [recv.narrow(0, start, count) for start, count in zip(displs, counts, strict=True)]
        order = sorted(range(team.size), key=team.peers.__getitem__)  # torch sorts the ranks of a group
        if len(set(counts)) == 1 and order == list(range(team.size)):
            dist.all_gather_into_tensor(recv, send, group=group)
        else:
            dist.all_gather([blocks[rank] for rank in order], send, group=group)


GLOO = _Gloo()
NCCL = _Nccl()
