"""The files that the commands write: of any format, by all ranks of a team at once, piece by piece."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from hpcdist import layout
from hpcdist.comm.team import Team
from hpcdist.commands.formats import FORMATS
from hpcdist.control import objects
from hpcdist.errors import FileError, RankError, reason
from hpcdist.files import raw
from hpcdist.files.commit import Commit, check_target, patiently, sync
from hpcdist.files.h5 import Dataset
from hpcdist.files.raw import Ints, Raw, page_size
from hpcdist.layout import Box
from hpcdist.staging.pages import Edges, Pages
from hpcdist.staging.pieces import PIECE, owners_of
from hpcdist.staging.saving import Options, Saving

__all__ = ["Output", "create", "pieces_of"]

_EDGES = 2**24  # bytes of edges of pieces that are kept in memory


class Output(Protocol):
    """A file on its way. Pieces are given to put() in any order, each by one rank of the team.

    Attributes:
        pieces: the boxes of the array, each one run of the file.
        kept: how many of them another run has left complete.
    """

    pieces: Sequence[Box]
    kept: int

    def mine(self) -> list[int]:
        """The pieces that this rank is to write: its share of them, without those that another run has left."""

    def put(self, row: int, piece: Tensor) -> None:
        """Write a piece: contiguous host memory. On this rank alone; a failure is told by finish()."""

    def finish(self, problem: str | None = None) -> None:
        """Put the file in place. Collective; a RankError on every rank if anything failed, or if one has a problem of
        its own. Then the name holds what it held."""


def pieces_of(shape: tuple[int, ...], dtype: torch.dtype, window: int) -> list[Box]:
    """The pieces of a file: half of the window each, since reading one may take as much again."""
    return list(layout.boxes(layout.whole(shape), max(1, min(PIECE, window // 2) // dtype.itemsize)))


def create(
    team: Team,
    verb: str,
    path: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    window: int,
    resume: bool = False,
    source: str = "",
    progress: Callable[[int], None] | None = None,
) -> Output:
    """Begin a file with one array (in formats with names: "data"). Collective.

    To `resume`, what was left must come from the same `source`.

    Raises:
        RankError: on every rank, if it cannot be made.
    """
    pieces = pieces_of(shape, dtype, window)
    if Path(path).suffix == ".h5":
        options = Options(window=window, resume=resume, source=source, progress=progress)
        owners = _owners(pieces, team.size)
        dataset = Dataset("data", shape, dtype, pieces)
        return _Staged(Saving(team, verb, path, [dataset], lambda i, elements: owners(elements), options))
    return _Flat(team, verb, path, shape, dtype, pieces, progress)


class _Staged:
    def __init__(self, saving: Saving) -> None:
        self._saving = saving
        self._team = saving.team
        self.pieces = saving.datasets[0].pieces
        saving.prove([layout.block_range(len(self.pieces), self._team.size, self._team.rank)])
        self.kept = len(saving.done)

    def mine(self) -> list[int]:
        mine = layout.block_range(len(self.pieces), self._team.size, self._team.rank)
        return [row for row in mine if (0, row) not in self._saving.done]

    def put(self, row: int, piece: Tensor) -> None:
        self._saving.put(0, row, piece)

    def finish(self, problem: str | None = None) -> None:
        if problem is not None:
            self._saving.fail(FileError(problem))
        self._saving.finish()


class _Flat:
    """A format of which the array is plain bytes behind a header."""

    def __init__(
        self,
        team: Team,
        verb: str,
        path: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        pieces: Sequence[Box],
        progress: Callable[[int], None] | None,
    ) -> None:
        self.pieces = pieces
        self.kept = 0
        self._team = team
        self._verb = verb
        self._path = path
        self._progress = progress
        self._problem: str | None = None
        self._commit: Commit | None = None
        self._raw, page = objects.broadcast(team.comm, verb, lambda: self._lay_out(shape, dtype))
        opened: list[int] = []
        try:
            objects.all_gather(team.comm, verb, lambda: opened.append(_open(self._raw)))
        except RankError:
            self._give_up(opened)
            raise
        self._opened = opened
        owners, size = _owners(pieces, team.size), dtype.itemsize
        place = self._raw.offset, self._raw.nbytes()
        self._pages = Pages(page, [place], lambda i, at: owners(at // size))
        self._edges = Edges(Path(self._raw.path).parent, _EDGES)

    def _lay_out(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Raw, int]:
        """On rank 0: the file with all but the data, and the bytes of its pages."""
        target = Path(self._path)
        lay_out = FORMATS[target.suffix].lay_out
        assert lay_out is not None
        check_target(target, Raw("", 0, shape, dtype).nbytes())
        self._commit = Commit(target)
        try:
            os.truncate(self._commit.part, Raw("", 0, shape, dtype).nbytes())  # a limit on file sizes shows itself
            os.truncate(self._commit.part, 0)
            where = lay_out(self._commit.part, shape, dtype)
            sync(self._commit.part, forget=True)  # before another rank opens it, and writes there
            return where, page_size(self._commit.part.parent)
        except BaseException as error:
            self._give_up([])
            if isinstance(error, (OSError, RuntimeError)):  # torch's own way to say it
                raise FileError(f"{self._path}: cannot be written: {reason(error)}") from error
            raise

    def mine(self) -> list[int]:
        return list(layout.block_range(len(self.pieces), self._team.size, self._team.rank))

    def put(self, row: int, piece: Tensor) -> None:
        if self._problem is None:
            try:
                at, write = self._raw.place(self.pieces[row]), partial(raw.write_at, self._opened[0])
                self._pages.write(self._team.rank, at, raw.memory(piece), write, self._edges)
            except OSError as error:
                self._fail(error)
        if self._progress is not None:
            self._progress(piece.nbytes)

    def _fail(self, error: Exception) -> None:
        self._problem = self._problem or f"{self._path}: writing failed: {reason(error)}"

    def finish(self, problem: str | None = None) -> None:
        comm = self._team.comm
        failed = self._edges.settle(self._team, partial(raw.write_at, self._opened[0]))
        if failed is not None:
            self._fail(failed)
        problem = problem or self._problem
        try:
            objects.all_gather(comm, self._verb, partial(_raise, problem))
            objects.all_gather(comm, self._verb, lambda: sync(Path(self._raw.path)))
            objects.broadcast(comm, self._verb, self._complete)
        except RankError:
            self._give_up(self._opened)
            raise
        os.close(self._opened[0])

    def _complete(self) -> None:
        assert self._commit is not None  # on the root
        self._commit.finish()
        self._commit = None

    def _give_up(self, opened: list[int]) -> None:
        for fd in opened:
            os.close(fd)
        if self._commit is not None:
            self._commit.discard()
            self._commit = None


def _owners(pieces: Sequence[Box], size: int) -> Callable[[Ints], Ints]:
    """Which of `size` ranks write elements, counted in C order: each has its share of the pieces."""
    firsts = np.array(layout.displs([piece.size() for piece in pieces]))
    owners = np.array(owners_of(len(pieces), size, size))
    return lambda elements: owners[np.searchsorted(firsts, elements, "right") - 1]


def _open(where: Raw) -> int:
    if patiently(lambda: None if os.path.exists(where.path) else False) is not None:
        raise FileError(f"{where.path}: not seen by this rank: the folder is not shared by all nodes")
    try:
        return os.open(where.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise FileError(f"{where.path}: cannot be written by this rank: {reason(error)}") from error


def _raise(problem: str | None) -> None:
    if problem is not None:
        raise FileError(problem)
