"""Which rank reads and writes what of many tensors: consecutive pieces of about as many bytes for each rank."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np

from hpcdist import layout
from hpcdist.files.h5 import Dataset
from hpcdist.files.raw import Ints

__all__ = ["Shares"]


class Shares:
    """The share of each of `size` ranks in tensors whose pieces are runs of them, in order.

    A piece belongs to the rank in whose part of all bytes it begins.
    """

    def __init__(self, datasets: Sequence[Dataset], size: int) -> None:
        self._datasets = datasets
        self._starts = [*accumulate((d.nbytes() for d in datasets), initial=0)]
        self._limits = [self._starts[-1] * rank // size for rank in range(size + 1)]

    def of(self, rank: int) -> Iterator[tuple[int, range]]:
        """Iterate over the tensors of a rank, by number, and its pieces of each."""
        low, high = self._limits[rank : rank + 2]
        for i in range(max(0, bisect_right(self._starts, low) - 1), len(self._datasets)):
            if self._starts[i] >= high:
                return
            rows = range(self._row(i, low), self._row(i, high))
            if rows:
                yield i, rows

    def owners(self, i: int, elements: Ints) -> Ints:
        """The ranks that write elements of tensor i, counted in C order."""
        rows = [self._row(i, self._starts[i] + int(at) * self._datasets[i].dtype.itemsize + 1) - 1 for at in elements]
        return np.array([bisect_right(self._limits, self._begin(i, row)) - 1 for row in rows], np.int64)

    def _row(self, i: int, limit: int) -> int:
        """The first piece of tensor i that begins at a byte of all, or after it."""
        if limit <= self._starts[i]:
            return 0
        count = len(self._datasets[i].pieces)
        return bisect_left(range(count), limit, key=lambda row: self._begin(i, row))

    def _begin(self, i: int, row: int) -> int:
        dataset = self._datasets[i]
        return self._starts[i] + next(layout.runs(dataset.pieces[row], dataset.shape)[2]) * dataset.dtype.itemsize
