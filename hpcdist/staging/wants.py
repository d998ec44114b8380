"""Which box of each tensor of a file each rank wants, and how they are read: computed from integers; no rank lists
what all others want."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import torch

from hpcdist import layout
from hpcdist.errors import coded, listed, refusal
from hpcdist.files.raw import SHORT, Ints
from hpcdist.layout import Box
from hpcdist.staging.boxes import BoxSequence, Chosen, Copies, Corners, Grid, Listed, Shards, summed
from hpcdist.staging.catalog import Stored
from hpcdist.staging.pieces import PIECE, PiecePlan, block_bounds

__all__ = ["Arguments", "alike", "find_wants", "plan_load", "reads_alone"]

_MOST = 2**61  # elements: no tensor of a file is larger, and the sum of two such numbers is an int64


@dataclass(frozen=True)
class Arguments:
    """What one rank wants to load.

    Attributes:
        same: options that must be the same on all ranks, by name.
        box: box that this rank wants, if the caller gives one.
        out: dtype and shape of the memory for it, if the caller gives that.
        direct: whether this rank has contiguous host memory for what it gets.
    """

    same: dict[str, Any] = field(default_factory=dict)
    box: Box | None = None
    out: tuple[torch.dtype, tuple[int, ...]] | None = None
    direct: bool = True


def find_wants(
    datasets: Mapping[str, Stored], asks: Sequence[Arguments]
) -> tuple[dict[str, BoxSequence], dict[int, str]]:
    """Find the box of each tensor for each rank; and by rank, why it cannot be read, or does not fit `out`."""
    wants: dict[str, BoxSequence] = {}
    problems: dict[int, str] = {}
    given = _Given(asks) if asks[0].box is not None else None
    for key, stored in datasets.items():
        try:
            if given is None:
                wants[key] = _along_dim(stored, asks[0].same, len(asks))
            else:
                wants[key] = given.boxes(stored.shape)
                for rank in given.outside(stored.shape):
                    text = f"box is {_show(asks[rank].box)}, which is not in shape {stored.shape}"
                    problems.setdefault(rank, coded("HD213", f"{key}: {text}"))
        except ValueError as error:
            for rank in range(len(asks)):
                problems.setdefault(rank, coded("HD212", f"{key}: {error}"))
    for rank, ask in enumerate(asks):
        if ask.out is not None and rank not in problems:
            unfit = _unfit(datasets, ask.out, wants, rank)
            if unfit is not None:
                problems[rank] = unfit
    return wants, problems


def _show(box: Box | None) -> str:
    assert box is not None
    return f"(offset {box.offset}, shape {box.shape})"


class _Given:
    """The boxes that the ranks give, by their number of dims; those with another one are in no tensor."""

    def __init__(self, asks: Sequence[Arguments]) -> None:
        self._given = [ask.box for ask in asks if ask.box is not None]
        self._corners: dict[int, Corners] = {}

    def boxes(self, shape: tuple[int, ...]) -> Listed:
        return Listed(self._of(len(shape)), shape)

    def _of(self, ndim: int) -> Corners:
        if ndim not in self._corners:
            nowhere = Box((-1,) * ndim, (0,) * ndim)
            fit = [box if len(box.offset) == len(box.shape) == ndim else nowhere for box in self._given]
            offsets, shapes = (
                np.array([[max(-1, min(n, _MOST)) for n in part] for part in parts], np.int64).reshape(len(fit), ndim)
                for parts in ([box.offset for box in fit], [box.shape for box in fit])
            )
            self._corners[ndim] = Corners(offsets, shapes)
        return self._corners[ndim]

    def outside(self, shape: tuple[int, ...]) -> list[int]:
        """The ranks whose box is not in a tensor of this shape."""
        if not shape:
            return [rank for rank, box in enumerate(self._given) if not box.is_in(shape)]
        offsets, shapes = self._of(len(shape)).offsets, self._of(len(shape)).shapes
        wrong = (offsets < 0) | (shapes < 0) | (offsets + shapes > np.array(shape))
        return np.flatnonzero(wrong.any(axis=1)).tolist()


def _along_dim(stored: Stored, same: Mapping[str, Any], size: int) -> BoxSequence:
    """The boxes of a tensor along the dim that was given; a ValueError if it has no such dim or counts."""
    shape, dim = stored.shape, same["dim"]
    if isinstance(dim, dict):
        dim = dim.get(stored.name, 0)
    if dim is None or not shape:
        return Copies(shape, size)
    if not -len(shape) <= dim < len(shape):
        raise refusal(
            ValueError, "HD204", f"dim is {dim}, expected {-len(shape)} to {len(shape) - 1} for {len(shape)} dims"
        )
    dim %= len(shape)
    return Shards(shape, dim, _displs(same["counts"], shape[dim], size))


@lru_cache(maxsize=256)
def _displs(counts: str | tuple[int, ...] | None, extent: int, size: int) -> Ints:
    found = summed(layout.counts_of(counts, extent, size))
    found.setflags(write=False)  # tensors of the same extent have the same
    return found


def _unfit(
    datasets: Mapping[str, Stored],
    out: tuple[torch.dtype, tuple[int, ...]],
    wants: Mapping[str, BoxSequence],
    rank: int,
) -> str | None:
    """Explain why `out` does not fit what a rank gets; None if it does."""
    if len(wants) != 1:
        return coded("HD208", f"out is given for one tensor, but {len(wants)} are read: {listed(wants)}")
    ((key, boxes),) = wants.items()
    dtype, shape = out
    if dtype != datasets[key].dtype:
        return coded("HD208", f"out has dtype {dtype}, expected {datasets[key].dtype}, that of {key!r} in the file")
    if shape == boxes[rank].shape:
        return None
    return coded("HD208", f"out has shape {shape}, expected {boxes[rank].shape}")


def reads_alone(stored: Stored, wants: BoxSequence, verify: bool | None) -> bool:
    """Decide whether every rank reads on its own: long runs, or little in all; and whole pieces, if verified."""
    size = stored.dtype.itemsize
    if isinstance(wants, Listed):
        if not verify and 2 * wants.corners.sizes.sum(dtype=float) < prod(stored.shape):
            return True
        lengths, counts = wants.run_lengths()
        lengths = lengths[(counts > 1) & (wants.corners.sizes > 0)]
        return not len(lengths) or not (verify or int(lengths.min()) * size < SHORT)
    if not isinstance(wants, Shards):
        return True  # the whole
    extents = np.diff(wants.displs)
    filled = extents[extents > 0]
    if not len(filled) or not prod(stored.shape):
        return True
    length, count, _ = layout.runs(wants[int(np.flatnonzero(extents == filled.min())[0])], stored.shape)
    return count == 1 or not (verify or length * size < SHORT)


def alike(wants: BoxSequence, rank: int) -> list[int]:
    """Return the ranks that want the same box as this one, which has elements; itself included."""
    if isinstance(wants, Copies):
        return list(range(len(wants)))
    if not isinstance(wants, Listed):
        return [rank]
    offsets, shapes = wants.corners.offsets, wants.corners.shapes
    same = (offsets == offsets[rank]).all(axis=1) & (shapes == shapes[rank]).all(axis=1)
    return np.flatnonzero(same).tolist()


def plan_load(
    stored: Stored, wants: BoxSequence, window: int, readers: int, verify: bool | None
) -> tuple[PiecePlan, Sequence[int] | Ints | None]:
    """Plan which rank reads what; and if the pieces of the file's table are read, the number of each."""
    size, itemsize = len(wants), stored.dtype.itemsize
    table, workers = stored.boxes, readers
    largest = int(table.corners.sizes.max()) * itemsize if len(table) else 0
    rows: Sequence[int] | Ints | None = None
    pieces: BoxSequence
    if largest and 2 * largest <= window:
        pieces, rows = table, range(len(table))
        workers = max(1, min(readers, window // (2 * largest)))
    else:
        pieces = Grid(stored.shape, max(1, min(PIECE, window // (2 * readers)) // itemsize))
    if isinstance(wants, Listed) and not (verify and rows is not None):
        chosen = pieces.intersecting(wants.corners.cover)  # no rank may want some of the pieces within these
        if len(chosen) < len(pieces):
            pieces, rows = Chosen(pieces, chosen), None if rows is None else chosen
    return PiecePlan(pieces, block_bounds(len(pieces), size, workers), wants, straight=False), rows
