"""Memory of a node for what its ranks load together: one copy that all of them read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpcdist.comm.team import Team
from hpcdist.staging.loading import Load

if TYPE_CHECKING:
    from hpcdist.comm.windows import Window

__all__ = ["NodeMemory"]

_ALIGNMENT = 64  # bytes


class NodeMemory:
    """A window for all tensors that every rank wants whole. Made by taken()."""

    def __init__(self, team: Team, window: Window, places: dict[str, tuple[tuple[int, ...], torch.dtype, int]]) -> None:
        self._team, self._window, self._places = team, window, places

    @classmethod
    def taken(cls, team: Team, call: Load) -> NodeMemory | None:
        """Take a window; None on all ranks if there is no window: see ``team.unshared``. Collective."""
        from hpcdist.routes import window  # which imports MPI

        places, nbytes = {}, 0
        for key in call.together:
            stored = call.datasets[key]
            places[key] = stored.shape, stored.dtype, nbytes
            nbytes += -(-stored.nbytes() // _ALIGNMENT) * _ALIGNMENT
        found = window.take(team, nbytes, nbytes) if places else None
        return None if found is None else cls(team, found, places)

    def targets(self) -> dict[str, Tensor]:
        """Return the tensors, to be written by any rank of the node."""
        return {name: self._window.target(*place) for name, place in self._places.items()}

    def results(self) -> dict[str, Tensor]:
        """Return the tensors for the caller, once all ranks of the node have written. Collective over the node."""
        self._team.topology.comm.Barrier()
        return {name: self._window.tensor(*place) for name, place in self._places.items()}
