"""The process group of torch 2.11 to 2.13, where a backend in Python replaces the whole torch.distributed.ProcessGroup.

One object serves all devices there: tensors on a GPU are for the NCCL group that it holds, if it has one.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from hpcdist.backend.agreement import Call
from hpcdist.backend.communicator import Communicator
from hpcdist.backend.operations import Operations
from hpcdist.tensors import eager

__all__ = ["MpiProcessGroup"]


def _own(x: Any) -> Any:
    """Return tensors that have memory: a functional collective's result stands for one that it waits for first.

    torch's dispatcher does so for C++ groups, and calls one in Python without.
    """
    if isinstance(x, list):
        return [_own(part) for part in x] if any(isinstance(part, AsyncCollectiveTensor) for part in x) else x
    return x.trigger_wait() if isinstance(x, AsyncCollectiveTensor) else x  # type: ignore[no-untyped-call]


class MpiProcessGroup(Operations, dist.ProcessGroup):  # type: ignore[misc]
    """A process group on a communicator.

    Args:
        team: its ranks; freed by shutdown().
        name: name of the backend.
    """

    def __init__(self, team: Communicator, name: str) -> None:
        dist.ProcessGroup.__init__(self, team.rank, team.size)  # type: ignore[call-arg]
        self._team = team
        self._backend_name = name
        self._group_name = self._group_desc = ""

    def _run(
        self, call: Call, opts: Any, tensors: Any, step: Callable[..., None], *args: Any, writes: bool = True
    ) -> dist.Work:
        return super()._run(call, opts, tensors, step, *map(_own, args), writes=writes)

    def send(self, tensors: list[Tensor], dest: int, tag: int = 0) -> dist.Work:
        return super().send(_own(tensors), dest, tag)

    def rank(self) -> int:
        return self._team.rank

    def size(self) -> int:
        return self._team.size

    def name(self) -> str:
        return self._backend_name

    getRank, getSize, getBackendName, _get_backend_name = rank, size, name, name  # noqa: N815

    # torch.distributed names a group, but the base class keeps the name in its backends only.

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._group_name = name

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        self._group_desc = desc

    def getGroupName(self) -> str:  # noqa: N802
        return self._group_name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._group_desc

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    # torch.distributed.checkpoint asks whether a group is for host memory; the base class knows C++ backends alone.

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> MpiProcessGroup:  # type: ignore[override]
        return self

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._team.set_timeout(timeout)

    set_timeout = setTimeout = _set_default_timeout  # noqa: N815

    def shutdown(self) -> None:
        self._team.free()

    def abort(self) -> None:
        self._team.abandon()

    def _has_hooks(self) -> bool:
        return False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._group_name!r}: rank {self._team.rank} of {self._team.size}>"


eager.not_compiled([MpiProcessGroup._run, MpiProcessGroup.send])  # not the names, which a graph may ask for
