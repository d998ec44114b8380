"""No two ranks write the same page of a file, because clients of a shared file system may write back whole pages.

If several ranks have bytes in a page, they send them to the rank that owns the page. Pages that hold anything
but data, such as headers and tables, belong to rank 0, which has made the file.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from hpcdist.comm.team import Team
from hpcdist.errors import refusal
from hpcdist.formats.plain import Digest
from hpcdist.layout.box import Ints
from hpcdist.staging.exchange import Bytes, all_to_all

__all__ = ["Edges", "Owner", "Pages", "RootPages"]

_ROUND = 2**23  # bytes of edges that a rank sends at a time

Owner = Callable[[int, Ints], Ints]
Write = Callable[[int, memoryview, Digest | None], object]


class Pages:
    """The rank that writes each page of a file; the same on all ranks.

    Args:
        size: of a page, in bytes.
        places: (first byte, bytes) of each array in the file, in any order.
        owner: the ranks that write the pieces of array i which hold these bytes, counted from the array's first.
    """

    def __init__(self, size: int, places: Sequence[tuple[int, int]], owner: Owner) -> None:
        self.size = size
        self._owner = owner
        self._order = sorted((i for i, (_, nbytes) in enumerate(places) if nbytes), key=lambda i: places[i][0])
        self._starts = np.array([places[i][0] for i in self._order], np.int64)
        joined: list[list[int]] = []  # first and end byte of data without a gap
        for i in self._order:
            start, nbytes = places[i]
            if joined and joined[-1][1] == start:
                joined[-1][1] += nbytes
            else:
                joined.append([start, start + nbytes])
        self._spans = np.array(joined, np.int64).reshape(-1, 2)

    def owners(self, pages: Ints) -> Ints:
        """The ranks that write the pages which begin at these bytes."""
        found = np.zeros(len(pages), np.int64)
        data = np.flatnonzero(self._all_data(pages))
        arrays = np.searchsorted(self._starts, pages[data], "right") - 1
        for k in np.unique(arrays):
            of = data[arrays == k]
            found[of] = self._owner(self._order[k], pages[of] - self._starts[k])
        return found

    def _all_data(self, pages: Ints) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Return whether each page that begins at these bytes holds only data."""
        if not len(self._spans):
            return np.zeros(len(pages), np.bool_)
        k = np.searchsorted(self._spans[:, 0], pages, "right") - 1
        found: np.ndarray[Any, np.dtype[np.bool_]] = (k >= 0) & (pages + self.size <= self._spans[k, 1])
        return found

    def cut(self, start: int, end: int) -> list[tuple[int, int, int | None]]:
        """Cut a run of the file at the first and the last border between pages, into (first byte, end, owner); the
        owner is None where the run has its pages to itself."""
        if start == end:
            return []
        first, last = -(-start // self.size) * self.size, end // self.size * self.size
        if first > last:  # within one page
            return [(start, end, int(self.owners(np.array([last]))[0]))]
        parts = [(start, first), (first, last), (last, end)]
        left, right = self.owners(np.array([first - self.size, last]))
        cut = [(*part, owner) for part, owner in zip(parts, (int(left), None, int(right)), strict=True)]
        return [part for part in cut if part[0] < part[1]]

    def divide(self, places: Ints, nbytes: int) -> Ints:
        """Divide runs of `nbytes` each, less than a page, at borders between pages: a row for each part, of its first
        byte, its bytes and its owner."""
        first = np.minimum(nbytes, (places // self.size + 1) * self.size - places)
        rows = np.stack([places, first, places + first, nbytes - first], axis=1).reshape(-1, 2)
        rows = rows[rows[:, 1] > 0]
        return np.concatenate([rows, self.owners(rows[:, 0] // self.size * self.size)[:, None]], axis=1)


class RootPages(Pages):
    """Process 0 writes all pages that a run does not fill."""

    def __init__(self, size: int) -> None:
        super().__init__(size, [], lambda i, at: at)


class Edges:
    """This rank's bytes for pages of other ranks, kept in memory up to `limit` bytes, then in `folder`."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._data = tempfile.SpooledTemporaryFile(max_size=limit, dir=str(folder))  # noqa: SIM115
        self._limit, self._kept = limit, 0
        self._tables: list[Ints] = []
        self._failed: Exception | None = None

    def add(self, rows: Ints, data: memoryview) -> None:
        """Keep runs that follow each other in `data`: a row for each, of its position, bytes and owner."""
        try:
            self._data.write(data)
        except Exception as error:  # the written part is unknown
            self._failed = self._failed or error
            raise
        self._tables.append(rows)

    def take(self) -> list[tuple[int, bytes]]:
        """Return the runs kept since the last call: (position, bytes) of each.

        Raises:
            ValueError: more than `limit` bytes were kept in all.
        """
        self._kept += self._data.tell()
        if self._kept > self._limit:
            text = "bytes of short runs lie in pages that several hosts write: more than window"
            raise refusal(ValueError, "HD419", f"{self._kept:,} {text}={self._limit:,}")
        self._data.seek(0)
        found = [(int(at), self._data.read(int(n))) for rows in self._tables for at, n, _ in rows]
        self._data.seek(0)
        self._data.truncate()
        self._tables.clear()
        return found

    def settle(self, team: Team, write: Write) -> Exception | None:
        """Send everything to its owner, which writes it. Collective.

        Returns:
            The error on this rank, if there was one; the others have received all of their bytes.
        """
        table = np.concatenate([np.empty((0, 3), np.int64), *([] if self._failed else self._tables)])
        self._data.seek(0)
        turns, problem, more = _turns(np.cumsum(table[:, 1])), self._failed, True
        while more:
            first, end = turns.pop(0) if turns else (0, 0)
            rows = table[first:end]
            data = np.frombuffer(self._data.read(int(rows[:, 1].sum())), np.uint8)
            blocks, more = all_to_all(team, _packed(team, rows, data), bool(turns))
            try:
                for place, run in _merged([_unpacked(block) for block in blocks if len(block)]):
                    write(place, run, None)
            except Exception as error:  # reported when no rank waits for this one
                problem = problem or error
        self.close()
        return problem

    def close(self) -> None:
        """Free all of it. Closing again does nothing."""
        self._data.close()
        self._tables.clear()


def _turns(ends: Ints) -> list[tuple[int, int]]:
    """Cut rows into those that are sent at a time: (first, end), of _ROUND bytes, or of one row."""
    turns, first, sent = [], 0, 0
    while first < len(ends):
        end = max(first + 1, int(np.searchsorted(ends, sent + _ROUND, "right")))
        turns.append((first, end))
        first, sent = end, int(ends[end - 1])
    return turns


def _packed(team: Team, rows: Ints, data: Bytes) -> list[Bytes]:
    """A message for each rank: how many rows it has, (position, bytes) of each, and the bytes."""
    order = np.argsort(rows[:, 2], kind="stable")
    rows, data = rows[order], _permuted(data, rows[:, 1], order)
    bounds = np.searchsorted(rows[:, 2], np.arange(team.size + 1))
    starts = np.concatenate([[0], np.cumsum(rows[:, 1])])
    messages = []
    for first, end in pairwise(bounds):
        head = np.concatenate([[end - first], rows[first:end, :2].ravel()]).astype(np.int64)
        content = data[starts[first] : starts[end]]
        messages.append(np.concatenate([head.view(np.uint8), content]) if end > first else content)
    return messages


def _unpacked(message: Bytes) -> tuple[Ints, Bytes]:
    count = int(message[:8].view(np.int64)[0])
    head = 8 + 16 * count
    return message[8:head].view(np.int64).reshape(-1, 2), message[head:]


def _merged(arrived: list[tuple[Ints, Bytes]]) -> list[tuple[int, memoryview]]:
    """The received bytes as runs of the file, in order; adjacent runs are joined."""
    if not arrived:
        return []
    rows = np.concatenate([rows for rows, _ in arrived])
    order = np.argsort(rows[:, 0], kind="stable")
    data = _permuted(np.concatenate([data for _, data in arrived]), rows[:, 1], order)
    rows = rows[order]
    ends = np.cumsum(rows[:, 1])
    breaks = np.flatnonzero(rows[1:, 0] != rows[:-1, 0] + rows[:-1, 1]) + 1
    firsts = np.concatenate([[0], breaks])
    stops = ends[np.concatenate([breaks, [len(rows)]]) - 1]
    return [
        (int(rows[first, 0]), data[int(ends[first] - rows[first, 1]) : int(stop)].data)
        for first, stop in zip(firsts, stops, strict=True)
    ]


def _permuted(data: Bytes, lengths: Ints, order: Ints) -> Bytes:
    """Runs of these lengths, which follow each other in `data`, in another order."""
    if len(order) < 2 or bool((order[1:] > order[:-1]).all()):
        return data
    starts, taken = (np.cumsum(lengths) - lengths)[order], lengths[order]
    shifts = starts - (np.cumsum(taken) - taken)
    return data[np.repeat(shifts, taken) + np.arange(len(data))]
