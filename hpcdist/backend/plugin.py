"""The backend of torch 2.14 and later, where one in Python may be one of several of a group: "cpu:mpi,cuda:nccl"."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Backend

from hpcdist.backend import work_forwarding
from hpcdist.backend.communicator import Communicator
from hpcdist.backend.operations import Operations
from hpcdist.errors import refusal

__all__ = ["MpiBackend"]

work_forwarding.install()
_alive: set[MpiBackend] = set()
"""Until their shutdown: torch's wrapper for TORCH_DISTRIBUTED_DEBUG=DETAIL keeps the C++ part of a backend alone."""


class MpiBackend(Operations, Backend):
    """A backend on a communicator.

    Args:
        team: its ranks; freed by shutdown().
        name: name of the backend.
        options: torch's own, or None.
    """

    def __init__(self, team: Communicator, name: str, options: Any, timeout: timedelta) -> None:
        Backend.__init__(self, team.rank, team.size)
        self._team = team
        self._name = name
        self._options = options if isinstance(options, Backend.Options) else Backend.Options(name, timeout)
        self._options._timeout = timeout
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
        return MpiBackend(self._team.part(ranks, timeout), self._name, options, timeout)

    def perform_nocolor_split(self, device: Any) -> None:
        return None

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._options._timeout = timeout
        self._team.set_timeout(timeout)

    set_timeout = setTimeout = _set_default_timeout  # noqa: N815

    def shutdown(self) -> None:
        self._team.free()
        _alive.discard(self)

    def abort(self) -> None:
        self._team.abandon()
        _alive.discard(self)
