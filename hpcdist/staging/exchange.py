"""Data in transit to or from a file: exchanged between ranks over MPI in host memory, and copied from and to GPUs."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcdist.comm.team import Team
from hpcdist.layout import Box
from hpcdist.layout.box import Copies
from hpcdist.process import abort
from hpcdist.staging.pieces import ROUND, PiecePlan
from hpcdist.tensors import accelerator
from hpcdist.tensors.storage import Scratch, as_bytes, bits

__all__ = ["Bytes", "all_to_all", "collect", "deliver", "incoming", "outgoing"]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def all_to_all(team: Team, blocks: Sequence[Bytes], more: bool = False) -> tuple[list[Bytes], bool]:
    """Send `blocks[r]` to each rank r of the team; return the received blocks, by sender. Collective.

    Args:
        more: whether this rank will send more; the second result is whether any rank will.
    """
    from mpi4py import MPI

    from hpcdist.routes.mpi import MPI_ROUTE

    lengths, arriving = array("q", (2 * len(block) + more for block in blocks)), array("q", bytes(8 * team.size))
    team.comm.Alltoall([lengths, MPI.INT64_T], [arriving, MPI.INT64_T])
    got = [np.empty(n // 2, np.uint8) for n in arriving]
    got[team.rank] = blocks[team.rank]
    others = [rank for rank in range(team.size) if rank != team.rank]
    sends = [(rank, torch.from_numpy(blocks[rank])) for rank in others if len(blocks[rank])]
    recvs = [(rank, torch.from_numpy(got[rank])) for rank in others if len(got[rank])]
    MPI_ROUTE.exchange(team, sends, recvs, 0)
    return got, any(n % 2 for n in arriving)


def collect(team: Team, plan: PiecePlan, x: Tensor, round_: int, scratch: Scratch) -> Tensor | None:
    """Collect the pieces of one round from the shards `x` of all ranks. Collective over the team.

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
            moves.copy(piece[part.slices(plan.pieces[met].offset)], scratch.on_host(block) if not x.is_cpu else block)
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
    """Send the pieces of one round from their owners to the ranks that need them. Collective.

    `piece` is this rank's, in contiguous host memory, and `out` is the box of the whole that it wants.
    """
    if isinstance(plan.held, Copies) and _through_windows(team, plan, piece, out, round_, scratch):
        return
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


def _through_windows(
    team: Team, plan: PiecePlan, piece: Tensor | None, out: Tensor, round_: int, scratch: Scratch
) -> bool:
    """As deliver(), where all ranks want all of it: through memory that the ranks of a node share, so that each byte
    comes to a node once. False on all ranks if that does not help, or cannot be had. Collective."""
    from hpcdist.routes import window  # which imports MPI

    if not window.helps(team):
        return False
    rows = [plan.piece(rank, round_) for rank in range(team.size)]
    places = [out[plan.pieces[row].slices()] for row in rows if row is not None]
    direct = [place.is_cpu and place.is_contiguous() for place in places]
    blocks = [place if ok else scratch.take(place.shape, place.dtype) for place, ok in zip(places, direct, strict=True)]
    given = iter(blocks)
    nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
    recvs = [nothing if row is None else as_bytes(next(given)) for row in rows]
    if not window.WINDOW_ROUTE.allgather(team, nothing if piece is None else as_bytes(piece), recvs):
        return False
    for place, block, ok in zip(places, blocks, direct, strict=True):
        if not ok:
            bits(place).copy_(bits(block))
    return True


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
        if not place.is_cpu or not place.is_contiguous():
            block = self._scratch.take(place.shape, place.dtype)
            self.copy(place, block)
        self._recvs.append((source, as_bytes(block)))

    def copy(self, place: Tensor, block: Tensor) -> None:
        """Copy on this rank, after all data have arrived."""
        self._copies.append((place, block))

    def run(self, team: Team, verb: str) -> None:
        """Exchange with the other ranks, which also run their moves. Collective."""
        from hpcdist.routes.mpi import MPI_ROUTE

        with abort.InTransfer(verb, team.size):
            MPI_ROUTE.exchange(team, self._sends, self._recvs, ROUND)
        for place, block in self._copies:
            bits(place).copy_(bits(block))


def outgoing(x: Tensor, parts: Sequence[Box]) -> Iterator[Tensor]:
    """Yield each part of `x` in contiguous host memory, valid until the next one is requested.

    Views of a CPU tensor where they are contiguous, else one copy. Of a GPU tensor, the next part is copied while the
    caller works on this one.
    """
    if x.is_cpu:
        scratch = Scratch(pinned=False)
        for part in parts:
            scratch.reset()
            yield scratch.on_host(x[part.slices()])
        return
    buffers = _Pinned(x, parts)
    ready: list[torch.Event] = []
    for i in range(len(parts) + 1):
        if i < len(parts):
            bits(buffers.part(i)).copy_(bits(x[parts[i].slices()]).contiguous(), non_blocking=True)
            ready.append(accelerator.event(x.device))
        if i > 0:
            ready[i - 1].synchronize()
            yield buffers.part(i - 1)


def incoming(out: Tensor, parts: Sequence[Box]) -> Iterator[Tensor]:
    """Yield contiguous host memory for each part of `out`, which is copied there when the caller, having filled it,
    asks for the next. All copies are complete when the iterator ends.

    Views of a CPU tensor where they are contiguous, else one copy. Of a GPU tensor, a part is copied while the caller
    fills the next.
    """
    if out.is_cpu:
        scratch = Scratch(pinned=False)
        for part in parts:
            scratch.reset()
            target = out[part.slices()]
            buffer = target if target.is_contiguous() else scratch.take(part.shape, out.dtype)
            yield buffer
            if buffer is not target:
                bits(target).copy_(bits(buffer))
        return
    buffers = _Pinned(out, parts)
    free: list[torch.Event] = []
    for i, part in enumerate(parts):
        if i > 1:
            free[i - 2].synchronize()
        yield buffers.part(i)
        bits(out[part.slices()]).copy_(bits(buffers.part(i)), non_blocking=True)
        free.append(accelerator.event(out.device))
    accelerator.synchronize(out.device)


class _Pinned:
    """Two pinned buffers that the parts of a tensor use in turn."""

    def __init__(self, x: Tensor, parts: Sequence[Box]) -> None:
        self._dtype = x.dtype
        self._parts = parts
        size = max((part.size() for part in parts), default=0)
        buffers = min(2, len(parts))
        memory = accelerator.host_buffer(buffers * size * x.itemsize, pinned=True)
        self._memory = memory.view(x.dtype).view(buffers, size)

    def part(self, i: int) -> Tensor:
        """The buffer of part i, in its shape."""
        shape = self._parts[i].shape
        return self._memory[i % 2][: self._parts[i].size()].view(shape)
