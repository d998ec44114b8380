"""Private torch.distributed backends for each team: gloo for host memory, the accelerator's own for GPU memory.

They are not registered with torch.distributed: a registered group would change the names that torch gives to the user's
next groups, and ranks with different names hang.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]

from hpcdist import layout, torch_names
from hpcdist.layout import limits
from hpcdist.routes.route import Message, Method, Route, Step, Vector, cut
from hpcdist.tensors import accelerator
from hpcdist.tensors.storage import as_bytes

if TYPE_CHECKING:
    from hpcdist.comm.team import Team

_LATER = timedelta(minutes=1)  # torch's deadline after our own, which reports more
# NCCL's operations run on the caller's stream, as those of torch's own synchronous calls: on a stream of NCCL's own,
# with events to and from the caller's, a call takes three times as long.
_HERE = AllgatherOptions()
_HERE.asyncOp = False
_NATIVE = {torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8}


class _C10d(Route):
    name: str  # of the route, and of the torch backend

    def group(self, team: Team) -> Any:
        """Return the team's torch backend. Collective over the team at its first use."""
        group = team.torch_groups.get(self.name)
        if group is None:
            # A separate connection: a group that waits locks its connection, also for groups in other threads.
            if torch_names.default_store is None:
                raise torch_names.need("the store of the default group", f"route {self.name}")
            store = PrefixStore(f"hpcdist/{team.number}/{self.name}", torch_names.default_store().clone())
            with team.settings.making_group():
                group = self.make(store, team, team.settings.timeout + _LATER)
            team.torch_groups[self.name] = group
        return group

    @abstractmethod
    def make(self, store: Store, team: Team, timeout: timedelta) -> Any:
        """Create the torch backend. Collective over the team."""

    def start(self, team: Team, sends: list[Message], recvs: list[Message], longest: int) -> Sequence[Step]:
        # Both backends keep the order of messages between two ranks: pieces need no tags.
        if team.size == 1:
            return ()
        group = self.group(team)  # collective: also on ranks without messages
        if not sends and not recvs:
            return ()
        if group.supports_coalescing:
            if torch_names.start_coalescing(group) is None:
                raise torch_names.need("messages that are joined", "a message of route nccl")
            torch_names.start_coalescing(group)()
        works = [
            start_message([block[start : start + length]], rank, 0)
            for start_message, messages in ((group.recv, recvs), (group.send, sends))
            for rank, block in messages
            for start, length in layout.pieces(block.numel(), limits.PIECE)
        ]
        if group.supports_coalescing:
            works = [torch_names.end_coalescing(group)()]
        return [work.wait for work in works]


class _Gloo(_C10d):
    name = "gloo"

    def make(self, store: Store, team: Team, timeout: timedelta) -> Any:
        return dist.ProcessGroupGloo(store, team.rank, team.size, timeout=timeout)

    def missing(self, team: Team) -> str | None:
        return None if dist.is_gloo_available() else "this torch was built without gloo; use route mpi"


class _Nccl(_C10d):
    name = "nccl"
    table = "nccl "

    def make(self, store: Store, team: Team, timeout: timedelta) -> Any:
        kind = getattr(dist, f"ProcessGroup{accelerator.LIBRARY.upper()}")
        options = kind.Options()
        torch_names.set_timeout(options, timeout)
        options.global_ranks_in_group = team.peers
        options.group_name = dist.GroupName(f"hpcdist/{team.number}")
        # Not what torch 2.15 makes of "nccl": that takes no list of uneven sizes in all_gather.
        group = kind(store, team.rank, team.size, options)
        self.warm_up(group, team)
        return group

    def warm_up(self, group: Any, team: Team) -> None:
        """Run the first operation of a group.

        torch: "if batch_isend_irecv is the first collective call in the group, all its ranks must take part", but ranks
        without messages do not.
        """
        group.allreduce([torch.zeros(1, device=team.settings.device)]).wait()

    def missing(self, team: Team) -> str | None:
        if team.settings.own_gpus and dist.is_initialized():
            return None
        library = accelerator.LIBRARY.upper()
        return f"route nccl needs a GPU of its own for each rank and a torch with {library}; use route mpi or auto"

    def carries(self, team: Team, gpu: bool) -> bool:
        return gpu

    def method(self, team: Team, operation: str, nbytes: int, largest: int = 0) -> Method:
        found = super().method(team, operation, nbytes, largest)
        return Method(found.name.replace("NCCL", accelerator.LIBRARY.upper()), found.reason)

    def usable(self, team: Team, algorithm: str, total: int, largest: int) -> bool:
        return algorithm != "fused" or total == largest * team.size

    def allgatherv_fused(self, team: Team, what: Vector, send: Tensor, recv: Tensor) -> None:
        if send.dtype not in _NATIVE or send.dtype != recv.dtype:  # a copy of a bare dtype has another one
            send, recv = as_bytes(send), as_bytes(recv)
        _wait(torch_names.gather_blocks(self.group(team), recv, send, _HERE))

    def allgatherv_padded(self, team: Team, what: Vector, send: Tensor, recv: Tensor) -> None:
        rows = torch.empty((team.size + 1, what.longest), dtype=torch.uint8, device=recv.device)
        rows[team.size, : what.counts[team.rank]] = as_bytes(send)
        _wait(torch_names.gather_blocks(self.group(team), rows[: team.size], rows[team.size], _HERE))
        for row, block in zip(rows, cut(recv, what.counts, what.displs), strict=False):
            block.copy_(row[: block.numel()])

    def allgatherv_broadcasts(self, team: Team, what: Vector, send: Tensor, recv: Tensor) -> None:
        """Broadcast each message directly into place.

        torch makes a group of broadcasts of a list of uneven sizes (ProcessGroupNCCL::allgather), which NCCL 2.29.2 and
        later fuse into one kernel.
        """
        _wait(self.group(team).allgather([cut(recv, what.counts, what.displs)], [as_bytes(send)], _HERE))


def _wait(work: Any) -> None:
    """Let the caller's stream wait for an operation, if a stream of its own runs it: without one there is no work."""
    if work is not None:
        work.wait()


GLOO = _Gloo()
NCCL = _Nccl()
