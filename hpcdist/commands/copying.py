"""Copy tensors into files: every rank reads and writes its share, with no more than a window of host memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hpcdist.comm.team import Team
from hpcdist.commands.inputs import Inputs, path_of
from hpcdist.control import objects
from hpcdist.errors import FileError, InputError
from hpcdist.formats import safetensors
from hpcdist.formats.atomic import check_target
from hpcdist.formats.contents import Dataset
from hpcdist.formats.table import FORMATS
from hpcdist.layout import Box
from hpcdist.layout.box_sequences import Ints, Listed, grid, summed
from hpcdist.runtime.cli import meter
from hpcdist.runtime.world import World
from hpcdist.staging.pieces import piece_limit
from hpcdist.staging.writer import FileWriter, SaveOptions

__all__ = ["OUTPUTS", "Read", "Shares", "check_output", "copy", "pieces_of"]

Read = Callable[[int, Box, Tensor], object]  # fills a tensor with a box of the i-th tensor
OUTPUTS = tuple(suffix for suffix, of in FORMATS.items() if of.dtypes)


def check_output(path: str, data: Inputs, nbytes: int) -> None:
    """Check before any data move that the inputs' array can be written to `path`.

    Raises:
        InputError: unknown suffix, no such folder, not writable, no space for `nbytes`, a format without this dtype, or
            one of the inputs.
    """
    suffix = Path(path).suffix
    if suffix not in OUTPUTS:
        raise InputError("HD501", f"{path}: unknown suffix {suffix!r}; expected one of {', '.join(OUTPUTS)}")
    if data.dtype not in FORMATS[suffix].dtypes:
        others = [name for name in OUTPUTS if data.dtype in FORMATS[name].dtypes]
        what = f"a {suffix} file cannot hold {data.dtype}; use one of {', '.join(others)}"
        raise InputError("HD418", f"{path}: {what}")
    for source in data.sources:
        if os.path.exists(path) and os.path.samefile(path, path_of(source.spec)):
            raise InputError("HD507", f"{path}: is also an input, which it would replace")
    try:
        check_target(path, nbytes)
    except FileError as error:
        raise InputError("HD402", str(error)) from error


def pieces_of(shape: tuple[int, ...], dtype: torch.dtype, window: int) -> Listed:
    """The pieces of a tensor: half of the window each, since reading one may take as much again."""
    return grid(shape, piece_limit(window // 2, dtype.itemsize))


def copy(
    world: World, team: Team, verb: str, path: str, datasets: Sequence[Dataset], read: Read, options: SaveOptions
) -> tuple[int, int]:
    """Write tensors to a file, or to several and an index. Collective over `team`.

    Args:
        datasets: without pieces, or with such as are runs of the tensors, in order.
        read: raises an InputError for what cannot be read.

    Returns:
        How many pieces there are, and how many of them another run has left complete.

    Raises:
        RankError: on every rank, if anything failed on one; existing files are then as they were.
    """
    pieces = [pieces_of(d.shape, d.dtype, options.window) if d.pieces is None else d.pieces for d in datasets]
    datasets = [replace(d, pieces=of) for d, of in zip(datasets, pieces, strict=True)]
    shares = Shares(datasets, team.size)
    mine = [shares.rows(i, team.rank) for i in range(len(datasets))]
    if path.endswith(safetensors.SUFFIX):
        options = replace(options, attrs={"format": "pt", **options.attrs})
    with meter(world, verb, sum(d.nbytes() for d in datasets) // team.size) as bar:
        options = replace(options, progress=bar.update)
        with FileWriter(team, verb, path, datasets, shares.owners, options) as file:
            left = [(i, row) for i, rows in enumerate(mine) for row in rows]
            sizes = [int(pieces[i].sizes[row]) * datasets[i].dtype.itemsize for i, row in left]
            buffer = torch.empty(max(sizes, default=0), dtype=torch.uint8, device="cpu")
            try:
                for (i, row), nbytes in zip(left, sizes, strict=True):
                    if file.problem is not None:
                        break
                    x: Tensor = buffer[:nbytes].view(datasets[i].dtype).view(pieces[i][row].shape)
                    read(i, pieces[i][row], x)
                    file.put(i, row, x)
            except InputError as error:
                file.fail(error)
    return sum(map(len, pieces)), sum(objects.all_gather_object(team.comm, file.kept))


class Shares:
    """The share of each of `size` ranks in tensors whose pieces are runs of them, in order.

    A piece belongs to the rank in whose part of all bytes it begins.
    """

    def __init__(self, datasets: Sequence[Dataset], size: int) -> None:
        self._datasets = datasets
        self._first = summed([d.nbytes() for d in datasets])
        self._limits = np.array([int(self._first[-1]) * rank // size for rank in range(size + 1)], np.int64)

    def _begins(self, i: int) -> Ints:
        """Where each piece of tensor i begins, in the bytes of all tensors."""
        dataset = self._datasets[i]
        assert dataset.pieces is not None
        begins: Ints = self._first[i] + dataset.pieces.starts * dataset.dtype.itemsize
        return begins

    def rows(self, i: int, rank: int) -> range:
        """The pieces of tensor i that a rank reads and writes."""
        return range(*np.searchsorted(self._begins(i), self._limits[rank : rank + 2]).tolist())

    def owners(self, i: int, elements: Ints) -> Ints:
        """The ranks that write elements of tensor i, counted in C order."""
        begins = self._begins(i)
        at = self._first[i] + elements * self._datasets[i].dtype.itemsize
        owners: Ints = np.searchsorted(self._limits, begins[np.searchsorted(begins, at, "right") - 1], "right") - 1
        return owners
