"""A stand-in for NCCL that runs on CPU tensors, over gloo, and refuses what NCCL would not bear.

The rules are those of torch.distributed's documentation (batch_isend_irecv, all_gather) and of ProcessGroupNCCL: the
first operation of a group is joined by all its ranks, memory is contiguous and on one device, and no rank sends to
itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from hpcdist.routes import c10d
from hpcdist.team import Team

__all__ = ["STAND_IN", "Rules"]


class _StandIn(c10d._Nccl):
    backend = "cpu:gloo"  # under which a team keeps a group beside that of route gloo

    def __init__(self) -> None:
        self.groups: set[dist.ProcessGroup] = set()

    def group(self, team: Team) -> dist.ProcessGroup:
        group = super().group(team)
        self.groups.add(group)
        return group

    def forget(self, team: Team) -> None:
        """Make the group of a team anew when it is next used."""
        group = team._groups.pop(self.backend, None)
        if group is not None:
            self.groups.discard(group)
            dist.destroy_process_group(group)

    def missing(self, team: Team) -> str | None:
        return None

    def carries(self, team: Team, cuda: bool) -> bool:
        return not cuda


STAND_IN = _StandIn()


class Rules:
    """Takes the place of torch.distributed in routes/c10d.py, and asserts the rules for each operation."""

    def __init__(self) -> None:
        self.joined: set[dist.ProcessGroup] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def _check(self, group: dist.ProcessGroup, tensors: Sequence[Tensor]) -> None:
        if group not in STAND_IN.groups:
            return
        assert group in self.joined, "the first operation of a group must be joined by all its ranks"
        assert all(x.is_contiguous() for x in tensors), "memory that is not contiguous"
        assert len({x.device for x in tensors}) <= 1, "tensors on several devices"

    def all_reduce(self, x: Tensor, group: dist.ProcessGroup) -> None:
        dist.all_reduce(x, group=group)
        self.joined.add(group)

    def batch_isend_irecv(self, ops: list[dist.P2POp]) -> list[dist.Work]:
        assert ops, "an empty list of operations"
        self._check(ops[0].group, [op.tensor for op in ops])
        assert all(op.peer != dist.get_rank() for op in ops), "a rank that sends to itself"
        return dist.batch_isend_irecv(ops)

    def all_gather_into_tensor(self, recv: Tensor, send: Tensor, group: dist.ProcessGroup) -> None:
        self._check(group, [recv, send])
        assert recv.numel() == send.numel() * group.size(), "sizes that differ"
        dist.all_gather(list(recv.view(group.size(), -1).unbind()), send, group=group)

    def all_gather(self, recvs: list[Tensor], send: Tensor, group: dist.ProcessGroup) -> None:
        """Of any sizes, as ProcessGroupNCCL does it: one broadcast for each rank."""
        self._check(group, [*recvs, send])
        recvs[group.rank()].copy_(send)
        for rank, recv in enumerate(recvs):
            if recv.numel():
                dist.broadcast(recv, dist.get_global_rank(group, rank), group=group)
