"""The classes that torch makes its groups of: one for torch 2.14 and later, one for the versions before.

From 2.14 on a backend in Python may be one of several of a group: "cpu:mpi,cuda:nccl". Until 2.13 it replaces the whole
torch.distributed.ProcessGroup: one object serves all devices there.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch._C._distributed_c10d import Backend

from hpcdist.backend.operations import Operations
from hpcdist.comm.settings import Settings
from hpcdist.comm.team import Group, Team, create_group
from hpcdist.errors import refusal


def team_of(
    whole: MPI.Intracomm, settings: Settings, peers: Sequence[int], ranks: Sequence[int] | None, tag: int = 0
) -> Team:
    """Return a team of some ranks of a communicator, or of all. Collective over these ranks alone.

    Args:
        peers: rank in the world of each rank of `whole`.
        tag: separates the groups that several threads make at once.
    """
    comm = whole.Dup() if ranks is None else create_group(whole, ranks, tag)
    return Team(comm, Group(comm.rank, peers if ranks is None else [peers[rank] for rank in ranks]), settings)


_alive: set[MpiBackend] = set()
"""Until their shutdown: torch's wrapper for TORCH_DISTRIBUTED_DEBUG=DETAIL keeps the C++ part of a backend alone."""


class MpiBackend(Operations, Backend):
    """A backend on a communicator.

    Args:
        team: its ranks; freed by shutdown().
        name: name of the backend.
        options: torch's own, or None.
    """

    def __init__(self, team: Team, name: str, options: Any, timeout: timedelta) -> None:
        Backend.__init__(self, team.rank, team.size)
        self._name = name
        self._options = options if isinstance(options, Backend.Options) else Backend.Options(name, timeout)
        self._start(team, timeout)
        _alive.add(self)

    @property
    def options(self) -> Backend.Options:
        return self._options

    def getBackendName(self) -> str:  # noqa: N802
        return self._name

    @property
    def supports_splitting(self) -> bool:
        return True

    # torch 2.14 and 2.15 ask the class in Python for what the base class would answer, which asks it again.
    supports_coalescing = supports_abort_hooks = supports_reconfigure = supports_window = False
    supports_shrinking = _supports_time_estimate = False

    def split(self, store: Any, ranks: Sequence[int], options: Any) -> MpiBackend:
        """Make a backend of some ranks, on these ranks. Collective over them alone."""
        if self._team.rank not in ranks:  # torch's PyBackend ends the process by a null pointer if it gets None
            raise refusal(
                RuntimeError,
                "HD701",
                f"split_group: rank {self._team.rank} is in none of split_ranks, which torch allows no backend in "
                "Python: give the ranks that are left a group of their own, or use new_group",
            )
        timeout = self._options._timeout if options is None else options._timeout
        return MpiBackend(
            team_of(self._team.comm, self._team.settings, self._team.peers, ranks), self._name, options, timeout
        )

    def perform_nocolor_split(self, device: Any) -> None:
        return None

    def _set_default_timeout(self, timeout: timedelta | None) -> None:
        if timeout is not None:
            self._options._timeout = timeout
        super()._set_default_timeout(timeout)

    def shutdown(self) -> None:
        super().shutdown()
        _alive.discard(self)

    def abort(self) -> None:
        super().abort()
        _alive.discard(self)


class MpiProcessGroup(Operations, dist.ProcessGroup):  # type: ignore[misc]
    """A process group on a communicator.

    Args:
        team: its ranks; freed by shutdown().
        name: name of the backend.
    """

    def __init__(self, team: Team, name: str, timeout: timedelta) -> None:
        dist.ProcessGroup.__init__(self, team.rank, team.size)  # type: ignore[call-arg]
        self._start(team, timeout)
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

    # torch.distributed.checkpoint asks whether a group is for host memory; the base class knows C++ backends alone.

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> MpiProcessGroup:  # type: ignore[override]
        return self

    def _has_hooks(self) -> bool:
        return False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._group_name!r}: rank {self._team.rank} of {self._team.size}>"
