"""The files that the commands write: of any format, by all ranks of a team at once, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from hpcdist import layout
from hpcdist.comm.team import Team
from hpcdist.commands.formats import FORMATS
from hpcdist.files.h5 import Dataset
from hpcdist.layout import Box
from hpcdist.staging.boxes import Copies
from hpcdist.staging.pieces import PIECE, PiecePlan, block_bounds
from hpcdist.staging.saving import Saving
from hpcdist.staging.target import SaveOptions

__all__ = ["Array", "Output", "pieces_of"]


@dataclass(frozen=True)
class Array:
    """An array to be written to a file.

    Attributes:
        path: of the file.
        shape, dtype: of the array.
    """

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class Output:
    """A file with one array (in formats with names: "data") that a team writes. Making one is collective.

    Pieces are given to put() in any order, each by one rank of the team.

    Args:
        verb: the call that writes the file, for messages.
        options: window, progress, and, for .h5, resume and source.

    Attributes:
        pieces: boxes of the array, each one run of the file.
        kept: number of pieces that another run has left complete.

    Raises:
        RankError: on every rank, if the file cannot be made.
    """

    def __init__(self, team: Team, verb: str, array: Array, options: SaveOptions) -> None:
        self.pieces: Sequence[Box] = pieces_of(array.shape, array.dtype, options.window)
        copies = Copies(array.shape, team.size)
        plan = PiecePlan(self.pieces, block_bounds(len(self.pieces), team.size, team.size), copies, straight=True)
        lay_out = FORMATS[Path(array.path).suffix].lay_out
        options = replace(options, lay_out=lay_out, writer="posix" if lay_out else options.writer)
        dataset = Dataset("data", array.shape, array.dtype, self.pieces)
        owner = lambda i, elements: plan.owners_at(array.shape, elements)  # noqa: E731
        self._saving = Saving(team, verb, array.path, [dataset], owner, options)
        self._share = plan.rows(team.rank)
        self._saving.prove([self._share])
        self.kept = len(self._saving.done)

    def mine(self) -> list[int]:
        """The pieces that this rank must write: its share, without those that another run has left."""
        return [row for row in self._share if (0, row) not in self._saving.done]

    def put(self, row: int, piece: Tensor) -> None:
        """Write a piece: contiguous host memory. On this rank alone; finish() reports a failure."""
        self._saving.put(0, row, piece)

    def finish(self, problem: str | None = None) -> None:
        """Put the file in place. Collective; a RankError on every rank if anything failed, or if one has a problem of
        its own. Then the name keeps the old file."""
        self._saving.problem = self._saving.problem or problem
        self._saving.commit()


def pieces_of(shape: tuple[int, ...], dtype: torch.dtype, window: int) -> list[Box]:
    """The pieces of a file: half of the window each, since reading one may take as much again."""
    return list(layout.boxes(layout.whole(shape), max(1, min(PIECE, window // 2) // dtype.itemsize)))
