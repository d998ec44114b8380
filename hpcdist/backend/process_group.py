"""The process group of torch 2.11 to 2.13, where a backend in Python replaces the whole torch.distributed.ProcessGroup.

One object serves all devices there: tensors on a GPU are for the NCCL group that it holds, if it has one.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from hpcdist.backend.communicator import Communicator
from hpcdist.backend.operations import Operations

__all__ = ["MpiProcessGroup"]


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

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._team.set_timeout(timeout)

    set_timeout = setTimeout = _set_default_timeout  # noqa: N815

    def shutdown(self) -> None:
        self._team.free()

    abort = shutdown

    def _set_sequence_number_for_group(self) -> None:
        return None

    def _has_hooks(self) -> bool:
        return False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._group_name!r}: rank {self._team.rank} of {self._team.size}>"
