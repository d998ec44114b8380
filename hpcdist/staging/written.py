"""What a rank has written of a tensor, box by box: where, and the checksums of it, taken before it went to the file."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from hpcdist import layout
from hpcdist.files import h5
from hpcdist.files.h5 import Dataset
from hpcdist.files.raw import Ints
from hpcdist.layout import Box

__all__ = ["Written", "joined", "starts_of"]


class Written:
    """Of one tensor, on this rank.

    Attributes:
        checksums: of the pieces that were written from their first element to the last, in order: piece -> checksum.
    """

    def __init__(self, dataset: Dataset) -> None:
        self.checksums: dict[int, int] = {}
        self._pieces = dataset.pieces
        self._shape = dataset.shape
        self._itemsize = dataset.dtype.itemsize
        self._firsts = layout.displs([piece.size() for piece in dataset.pieces])
        self._runs: list[tuple[Ints, int]] = []
        self._boxes = array("q")  # offset and shape of each
        self._digests = array("Q")
        self._next = -1  # the element with which the piece goes on that is being written
        self._digest: Any = None

    def add(self, box: Box, starts: Ints, length: int, data: memoryview) -> None:
        """A box has been written: runs of `length` elements."""
        self._runs.append((starts, length))
        digest = h5.digest()
        digest.update(data)
        self._boxes.extend((*box.offset, *box.shape))
        self._digests.append(digest.intdigest())
        if len(starts) == 1:
            self._follow(int(starts[0]), data)

    def _follow(self, start: int, data: memoryview) -> None:
        """Take the checksums of pieces, as far as they are written in order."""
        while data:
            row = bisect_right(self._firsts, start) - 1
            if start == self._firsts[row]:
                self._digest = h5.digest()
            elif start != self._next:
                self._digest = None
            end = self._firsts[row] + self._pieces[row].size()
            part = data[: (end - start) * self._itemsize]
            if self._digest is not None:
                self._digest.update(part)
            start, data = start + len(part) // self._itemsize, data[len(part) :]
            self._next = start
            if start == end and self._digest is not None:
                self.checksums[row] = int(self._digest.intdigest())

    def runs(self) -> Ints:
        """(first element, end) of what was written, in order; neighbours are one. Frees what they are made of."""
        parts = [np.stack([starts, starts + length], axis=1) for starts, length in self._runs]
        self._runs.clear()
        return joined(np.concatenate([np.empty((0, 2), np.int64), *parts]))

    def boxes(self) -> list[tuple[Box, int]]:
        """What was written, and the checksum of each."""
        n = len(self._shape)
        rows = np.array(self._boxes, np.int64).reshape(len(self._digests), 2 * n).tolist()
        return [(Box(tuple(r[:n]), tuple(r[n:])), d) for r, d in zip(rows, self._digests, strict=True)]


def starts_of(box: Box, shape: Sequence[int]) -> tuple[Ints, int]:
    """The elements at which the runs of a box begin, counted in C order, and the elements of a run."""
    length, count, _ = layout.runs(box, shape)
    strides = [prod(shape[d + 1 :]) for d in range(len(shape))]
    starts = np.array([sum(o * stride for o, stride in zip(box.offset, strides, strict=True))], np.int64)
    for extent, stride in zip(box.shape, strides, strict=True):
        if len(starts) == count:
            break
        starts = (starts[:, None] + np.arange(extent) * stride).ravel()
    return (starts if length else starts[:0]), length


def joined(runs: Ints) -> Ints:
    """Runs (first, end) in order; those that meet are one, those that overlap stay."""
    runs = runs[np.argsort(runs[:, 0], kind="stable")]
    breaks = np.flatnonzero(runs[1:, 0] != runs[:-1, 1]) + 1
    if not len(runs):
        return runs
    firsts, lasts = np.concatenate([[0], breaks]), np.concatenate([breaks, [len(runs)]]) - 1
    return np.stack([runs[firsts, 0], runs[lasts, 1]], axis=1)
