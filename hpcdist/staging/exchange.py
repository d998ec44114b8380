"""Exchange data between the ranks on their way to a file or from it, in host memory, over MPI."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcdist.comm.team import Team
from hpcdist.process import abort
from hpcdist.staging.boxes import Copies
from hpcdist.staging.pieces import ROUND, PiecePlan
from hpcdist.tensors.pinned import Scratch
from hpcdist.tensors.storage import as_bytes, bits

__all__ = ["Bytes", "all_to_all", "collect", "deliver"]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def all_to_all(team: Team, blocks: Sequence[Bytes]) -> list[Bytes]:
    """Send `blocks[r]` to each rank r of the team; return what has arrived, by sender. Collective."""
    from mpi4py import MPI

    from hpcdist.routes.mpi import MPI_ROUTE

    lengths, arriving = array("q", map(len, blocks)), array("q", bytes(8 * team.size))
    team.comm.Alltoall([lengths, MPI.INT64_T], [arriving, MPI.INT64_T])
    got = [np.empty(n, np.uint8) for n in arriving]
    got[team.rank] = blocks[team.rank]
    others = [rank for rank in range(team.size) if rank != team.rank]
    sends = [(rank, torch.from_numpy(blocks[rank])) for rank in others if len(blocks[rank])]
    recvs = [(rank, torch.from_numpy(got[rank])) for rank in others if len(got[rank])]
    MPI_ROUTE.exchange(team, sends, recvs, 0)
    return got


def collect(team: Team, plan: PiecePlan, x: Tensor, round_: int, scratch: Scratch) -> Tensor | None:
    """Bring the pieces of one round together from the shards `x` of all ranks. Collective over the team.

    Returns:
        This rank's piece, in contiguous host memory of `scratch`; None if it has none in this round.
    """
    scratch.reset()
    me, mine, copies = team.rank, plan.held[team.rank], isinstance(plan.held, Copies)
    moves = _Moves(scratch)
    row = plan.piece(me, round_)
    piece = None if row is None else scratch.take(plan.pieces[row].shape, x.dtype)
    for owner, met in plan.met(me, round_):
        part = plan.pieces[met].intersect(mine)
        block = x[part.slices(mine.offset)]
        if owner == me and piece is not None:
            moves.copy(piece[part.slices(plan.pieces[met].offset)], scratch.on_host(block) if x.is_cuda else block)
        elif not copies:  # else the owner has all of it itself
            moves.send(block, owner)
    if row is not None and piece is not None and not copies:
        box = plan.pieces[row]
        for source in plan.held.intersecting(box).tolist():
            if source != me:
                moves.recv(piece[box.intersect(plan.held[source]).slices(box.offset)], source)
    moves.run(team, "staging.save")
    return piece


def deliver(team: Team, plan: PiecePlan, piece: Tensor | None, out: Tensor, round_: int, scratch: Scratch) -> None:
    """Send the pieces of one round, which their owners have read, to the ranks that want them. Collective.

    `piece` is this rank's, in contiguous host memory, and `out` is the box of the whole that it wants.
    """
    me, want, moves = team.rank, plan.held[team.rank], _Moves(scratch)
    row = plan.piece(me, round_)
    if row is not None and piece is not None:
        box = plan.pieces[row]
        for dest in plan.held.intersecting(box).tolist():
            part = box.intersect(plan.held[dest])
            block = piece[part.slices(box.offset)]
            if dest == me:
                moves.copy(out[part.slices(want.offset)], block)
            else:
                moves.send(block, dest)
    for owner, met in plan.met(me, round_):
        if owner != me:
            moves.recv(out[plan.pieces[met].intersect(want).slices(want.offset)], owner)
    moves.run(team, "staging.load")


class _Moves:
    """Parts of tensors that are exchanged at a time."""

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch
        self._sends: list[tuple[int, Tensor]] = []
        self._recvs: list[tuple[int, Tensor]] = []
        self._copies: list[tuple[Tensor, Tensor]] = []

    def send(self, block: Tensor, dest: int) -> None:
        self._sends.append((dest, as_bytes(self._scratch.on_host(block))))

    def recv(self, place: Tensor, source: int) -> None:
        block = place
        if place.is_cuda or not place.is_contiguous():
            block = self._scratch.take(place.shape, place.dtype)
            self.copy(place, block)
        self._recvs.append((source, as_bytes(block)))

    def copy(self, place: Tensor, block: Tensor) -> None:
        """Copy on this rank, once everything has arrived."""
        self._copies.append((place, block))

    def run(self, team: Team, verb: str) -> None:
        """Exchange with the other ranks, which also run their moves. Collective."""
        from hpcdist.routes.mpi import MPI_ROUTE

        with abort.InTransfer(verb, team.size):
            MPI_ROUTE.exchange(team, self._sends, self._recvs, ROUND)
        for place, block in self._copies:
            bits(place).copy_(bits(block))
