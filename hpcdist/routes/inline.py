"""Data that came behind the headers of a call. Nothing more is sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from hpcdist.routes.base import Ints, Method

if TYPE_CHECKING:
    from hpcdist.comm.team import Team

__all__ = ["BEHIND_HEADERS", "INLINE"]

BEHIND_HEADERS = Method("behind the headers by which the ranks agree", "the data of every rank fit there")


class _Inline:
    """The part of a route that gather and concat need. Valid until the next call of the team."""

    def gatherv(self, team: Team, send: Tensor, recv: Tensor | None, counts: Ints, displs: Ints, root: int) -> None:
        if recv is not None:
            self.allgatherv(team, send, recv, counts, displs)

    def allgatherv(self, team: Team, send: Tensor, recv: Tensor, counts: Ints, displs: Ints) -> None:
        assert team.headers is not None
        team.headers.copy(team.headers.places(counts), recv)


INLINE = _Inline()
