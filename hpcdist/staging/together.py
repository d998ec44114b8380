"""Read together what several ranks want, and send it to each of them: see :mod:`hpcdist.staging.once`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from hpcdist.comm.team import Team
from hpcdist.errors import FileError, coded, reason
from hpcdist.layout import Box
from hpcdist.process import abort
from hpcdist.staging.once import Batch, Block, Plan
from hpcdist.staging.reader import DatasetReader
from hpcdist.tensors import pool
from hpcdist.tensors.storage import as_bytes, bits

__all__ = ["Source", "kept", "read_together"]

Piece = tuple[int, int]
"""(number of a tensor in the call, its piece)"""


class Source(NamedTuple):
    """A tensor of which all ranks of a plan want the same box.

    Attributes:
        reader: of the dataset.
        want: the box.
        target: memory for it on this rank, or that the ranks of its node share.
    """

    reader: DatasetReader
    want: Box
    target: Tensor


@contextmanager
def kept(problems: list[str]) -> Iterator[None]:
    """Keep an error of this rank, so that it continues with the others, which get it at the end."""
    try:
        yield
    except Exception as error:
        problems.append(coded("HD402", reason(error)))


def read_together(
    team: Team, verb: str, plan: Plan, sources: Sequence[Source], window: int, last: bool
) -> tuple[list[str], list[Piece]]:
    """Read what the plan says on this rank, and exchange it. Collective over the ranks of the plan.

    Args:
        last: whether a wrong checksum is an error; else the piece may be read again.

    Returns:
        The errors of this rank, and the pieces whose checksums are wrong.
    """
    transfer = _Transfer(team, plan, sources, window, last)
    with abort.InTransfer(verb, team.size):
        transfer.run()
    return transfer.problems, transfer.stale


class _Message:
    """A batch in the memory of this rank: in its place in the tensor, or in a buffer until it has arrived.

    Attributes:
        flat: all of it, as bytes.
        blocks: memory for each block, in contiguous host memory.
    """

    def __init__(self, batch: Batch, places: Sequence[Tensor]) -> None:
        self._places: Sequence[Tensor] = ()
        if batch.direct and places[0].is_cpu and places[0].is_contiguous():
            self.flat, self.blocks = as_bytes(places[0]), list(places)
            return
        self._places, self.blocks, at = places, [], 0
        if any(place.is_cuda for place in places):
            self.flat = torch.empty(batch.nbytes, dtype=torch.uint8, pin_memory=True, device="cpu")
        else:
            self.flat = pool.empty([batch.nbytes], torch.uint8, "cpu", fixed=True)
        for block, place in zip(batch.blocks, places, strict=True):
            self.blocks.append(self.flat[at : at + block.nbytes].view(place.dtype).view(place.shape))
            at += block.padded

    def arrived(self) -> None:
        """Copy it to its place."""
        for place, block in zip(self._places, self.blocks, strict=False):
            bits(place).copy_(bits(block))


class _Transfer:
    """One pass over a plan, on this rank."""

    def __init__(self, team: Team, plan: Plan, sources: Sequence[Source], window: int, last: bool) -> None:
        self.problems: list[str] = []
        self.stale: list[Piece] = []
        self._team, self._plan, self._sources, self._window, self._last = team, plan, sources, window, last
        self._held: dict[tuple[int, int], _Message] = {}  # by round and reader

    def run(self) -> None:
        from hpcdist.routes.mpi import MPI_ROUTE

        me, plan = self._team.rank, self._plan
        self._read(0)
        for step in plan.steps:
            sends, recvs = plan.sends(me, step), plan.recvs(me, step)
            for _, round_, reader in recvs:
                self._held[round_, reader] = self._message(plan.rounds[round_][reader])
            MPI_ROUTE.exchange_views(
                self._team,
                [(dest, self._held[round_, reader].flat) for dest, round_, reader in sends],
                [(source, self._held[round_, reader].flat) for source, round_, reader in recvs],
                partial(self._read, step + 1),
            )
            self._settle(step)

    def _message(self, batch: Batch) -> _Message:
        return _Message(batch, [self._place(block) for block in batch.blocks])

    def _place(self, block: Block) -> Tensor:
        source = self._sources[block.tensor]
        return source.target[block.box.slices(source.want.offset)]

    def _settle(self, step: int) -> None:
        """Copy what has arrived to its place, and let go what is not forwarded in the next step."""
        for round_, reader in list(self._held):
            if round_ <= step - self._plan.forwards:
                self._held.pop((round_, reader)).arrived()

    def _read(self, round_: int) -> None:
        """Read this rank's batch of a round."""
        rounds = self._plan.rounds
        batch = rounds[round_].get(self._team.rank) if round_ < len(rounds) else None
        if batch is None:
            return
        message = self._held[round_, self._team.rank] = self._message(batch)
        for block, target in zip(batch.blocks, message.blocks, strict=True):
            with kept(self.problems):
                self._fill(block, target)

    def _fill(self, block: Block, target: Tensor) -> None:
        reader = self._sources[block.tensor].reader
        for row in block.checks:
            reader.check(row, self._window)
        if block.row is None or not reader.follows(block.row):
            reader.fill(block.box, block.row, target, self._window)
        elif not reader.follow(block.row, block.box, target):
            if self._last:
                raise FileError(reader.damage(block.row))
            self.stale.append((block.tensor, block.row))
