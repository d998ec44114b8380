"""No two ranks write the same page of a file, because clients of a shared file system may write back whole pages.

A rank writes the pages that its runs fill. Its bytes in other pages, the edges, are sent to the one rank that owns the
page. Pages that hold anything but the data of one array belong to rank 0, which has made the file.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from hpcdist.comm.team import Team
from hpcdist.errors import refusal
from hpcdist.layout.box import Ints, summed
from hpcdist.staging.exchange import Bytes, all_to_all

__all__ = ["Edges"]

_ROUND = 2**23  # bytes of edges that a rank sends at a time
_SHARE = 16  # consecutive pages that belong to one rank


class Edges:
    """This rank's bytes for pages that its runs do not fill, kept in memory up to `limit` bytes, then in `folder`.

    Args:
        page: size of a page in bytes; 1 if no page is shared with a process on another host.
    """

    def __init__(self, page: int, folder: Path, limit: int) -> None:
        self._page, self._limit, self._taken = page, limit, 0
        self._data = tempfile.SpooledTemporaryFile(max_size=limit, dir=str(folder))  # noqa: SIM115
        self._rows: list[Ints] = []
        self._size = 0

    def cut(self, places: Ints, nbytes: int) -> Ints:
        """Cut runs of `nbytes` each at the first and the last border between pages.

        Returns:
            For each the first byte, where the pages begin and end that it fills, and its end.
        """
        size, ends = self._page, places + nbytes
        first = np.minimum(-(-places // size) * size, ends)
        return np.stack([places, first, np.maximum(first, ends // size * size), ends], axis=1)

    def add(self, cuts: Ints, *data: memoryview) -> None:
        """Keep what runs have before and after the pages that they fill: see :meth:`cut`."""
        rows = cuts.reshape(-1, 2)
        self._data.seek(self._size)  # not behind what a write that failed has left
        for part in data:
            self._data.write(part)
        self._size = self._data.tell()
        self._rows.append(rows[rows[:, 0] < rows[:, 1]])

    def take(self) -> list[tuple[int, bytes]]:
        """Return the runs kept since the last call: (position, bytes) of each.

        Raises:
            ValueError: more than `limit` bytes were kept in all.
        """
        self._taken += self._size
        if self._taken > self._limit:
            text = "bytes of short runs lie in pages that several hosts write: more than window"
            raise refusal(ValueError, "HD419", f"{self._taken:,} {text}={self._limit:,}")
        self._data.seek(0)
        found = [(start, self._data.read(end - start)) for rows in self._rows for start, end in rows.tolist()]
        self._rows, self._size = [], 0
        return found

    def settle(
        self, team: Team, arrays: Sequence[tuple[int, int]], write: Callable[[int, memoryview], object]
    ) -> Exception | None:
        """Send everything to its owner, which writes it. Collective.

        Args:
            arrays: first byte and end of each array in the file, in any order.

        Returns:
            The error on this rank, if there was one; the others have received all of their bytes.
        """
        rows = np.concatenate([np.empty((0, 2), np.int64), *self._rows])
        owners, at = self._owners(rows[:, 0], arrays, team.size), summed(rows[:, 1] - rows[:, 0])
        self._data.seek(0)
        problem, more, first = None, True, 0
        while more:
            end = int(np.searchsorted(at, at[first] + _ROUND, "right")) - 1
            data = np.frombuffer(self._data.read(int(at[end] - at[first])), np.uint8)
            dests = owners[first:end]
            mine, data = _sorted(rows[first:end], data, dests)
            bounds = np.searchsorted(np.sort(dests), np.arange(1, team.size))
            heads, more = all_to_all(team, np.split(mine.view(np.uint8).ravel(), 16 * bounds), end < len(rows))
            blocks, _ = all_to_all(team, np.split(data, summed(mine[:, 1] - mine[:, 0])[bounds]))
            first = end
            try:
                _write(np.concatenate(heads).view(np.int64).reshape(-1, 2), np.concatenate(blocks), write)
            except Exception as error:  # reported when no rank waits for this one
                problem = problem or error
        self.close()
        return problem

    def _owners(self, places: Ints, arrays: Sequence[tuple[int, int]], size: int) -> Ints:
        """The rank of `size` that writes the page of each byte."""
        table = np.array([(0, 0), *sorted(of for of in arrays if of[0] < of[1])], np.int64)
        pages = places // self._page * self._page
        end = table[np.searchsorted(table[:, 0], pages, "right") - 1, 1]
        return np.where(pages + self._page <= end, pages // self._page // _SHARE % size, 0)

    def close(self) -> None:
        """Free all of it. Closing again does nothing."""
        self._data.close()
        self._rows = []


def _sorted(rows: Ints, data: Bytes, key: Ints) -> tuple[Ints, Bytes]:
    """Sort runs, whose bytes follow each other in `data`, by a key."""
    order, lengths = np.argsort(key, kind="stable"), rows[:, 1] - rows[:, 0]
    starts, lengths = (np.cumsum(lengths) - lengths)[order], lengths[order]
    shifts = starts - (np.cumsum(lengths) - lengths)
    return rows[order], data[np.repeat(shifts, lengths) + np.arange(len(data))]


def _write(rows: Ints, data: Bytes, write: Callable[[int, memoryview], object]) -> None:
    """Write runs in the order of the file; adjacent ones at once."""
    if not len(rows):
        return
    rows, data = _sorted(rows, data, rows[:, 0])
    breaks = np.flatnonzero(rows[1:, 0] != rows[:-1, 1]) + 1
    ends = np.cumsum(rows[:, 1] - rows[:, 0])
    for place, run in zip(rows[[0, *breaks], 0].tolist(), np.split(data, ends[breaks - 1]), strict=True):
        write(place, run.data)
