"""The boxes of a tensor that a rank has written: where, and their checksums, computed before they went to the file."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch

from hpcdist import layout
from hpcdist.comm.team import Team
from hpcdist.control import objects
from hpcdist.errors import FileError, refusal
from hpcdist.files import h5
from hpcdist.files.h5 import Dataset
from hpcdist.files.raw import Ints, Raw, forget, memory, read_at
from hpcdist.layout import Box
from hpcdist.staging.exchange import all_to_all
from hpcdist.staging.reader import checksum_of
from hpcdist.staging.saving import Saving

__all__ = ["Written", "check_complete", "record_checksums", "starts_of"]


class Written:
    """What this rank has written of one tensor.

    Attributes:
        checksums: piece -> checksum, of the pieces that were written from their first element to the last, in order.
    """

    def __init__(self, dataset: Dataset) -> None:
        self.checksums: dict[int, int] = {}
        self._name = dataset.name
        self._pieces = dataset.pieces
        self._shape = dataset.shape
        self._itemsize = dataset.dtype.itemsize
        self._firsts = layout.displs([piece.size() for piece in dataset.pieces])
        self._runs: list[tuple[Ints, int]] = []
        self._boxes = array("q")  # offset and shape of each
        self._digests = array("Q")
        self._next = -1  # the element that continues the piece being written
        self._digest: Any = None

    def add(self, box: Box, starts: Ints, length: int, data: memoryview) -> None:
        """Note a box that has been written: runs of `length` elements."""
        self._runs.append((starts, length))
        self._boxes.extend((*box.offset, *box.shape))
        self._digests.append(h5.checksum(data))
        if len(starts) == 1:
            self._follow(int(starts[0]), data)

    def _follow(self, start: int, data: memoryview) -> None:
        """Compute the checksums of pieces, as far as they are written in order."""
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
        """(first element, end) of what was written, in order; adjacent runs are joined. Frees the parts."""
        parts = [np.stack([starts, starts + length], axis=1) for starts, length in self._runs]
        self._runs.clear()
        return _joined(np.concatenate([np.empty((0, 2), np.int64), *parts]))

    def _checksums_of_boxes(self) -> list[tuple[Box, int]]:
        n = len(self._shape)
        rows = np.array(self._boxes, np.int64).reshape(len(self._digests), 2 * n).tolist()
        return [(Box(tuple(r[:n]), tuple(r[n:])), d) for r, d in zip(rows, self._digests, strict=True)]

    def compare(self, where: Raw, fd: int, pieces: Sequence[Box], window: int) -> None:
        """Check that the file holds what was written of these pieces; a FileError if it does not."""
        for box, expected in self._checksums_of_boxes():
            if not any(box.intersect(piece).size() for piece in pieces):
                continue
            digest = h5.digest()
            for part in layout.boxes(box, max(1, window // where.dtype.itemsize)):
                got = torch.empty(part.shape, dtype=where.dtype, device="cpu")
                where.read(partial(read_at, fd), part, got, window)
                digest.update(memory(got))
            if digest.intdigest() != expected:
                raise FileError("HD404", f"{self._name}: what was written at {box.offset} is not in the file")


def starts_of(box: Box, shape: Sequence[int]) -> tuple[Ints, int]:
    """The elements at which the runs of a box begin, counted in C order, and the length of a run."""
    length, count, _ = layout.runs(box, shape)
    strides = [prod(shape[d + 1 :]) for d in range(len(shape))]
    starts = np.array([sum(o * stride for o, stride in zip(box.offset, strides, strict=True))], np.int64)
    for extent, stride in zip(box.shape, strides, strict=True):
        if len(starts) == count:
            break
        starts = (starts[:, None] + np.arange(extent) * stride).ravel()
    return (starts if length else starts[:0]), length


def _joined(runs: Ints) -> Ints:
    """Runs (first, end) in order; adjacent ones are joined, overlapping ones stay."""
    runs = runs[np.argsort(runs[:, 0], kind="stable")]
    breaks = np.flatnonzero(runs[1:, 0] != runs[:-1, 1]) + 1
    if not len(runs):
        return runs
    firsts, lasts = np.concatenate([[0], breaks]), np.concatenate([breaks, [len(runs)]]) - 1
    return np.stack([runs[firsts, 0], runs[lasts, 1]], axis=1)


def check_complete(saving: Saving, tensors: Sequence[Written]) -> None:
    """Check that every element was written once: each rank looks at its share of them. Collective."""
    team = saving.team
    for dataset, written in zip(saving.datasets, tensors, strict=True):
        n = layout.whole(dataset.shape).size()
        share = layout.block_range(n, team.size, team.rank)
        runs = _joined(_of_share(team, written.runs(), n))
        ends, starts = [share.start, *runs[:, 1].tolist()], [*runs[:, 0].tolist(), share.stop]
        for end, start in zip(ends, starts, strict=True):
            if end != start:
                what = "were not written" if end < start else "were written twice"
                first, last = sorted((end, start))
                saving.fail(refusal(ValueError, "HD422", f"{dataset.name}: elements {first}:{last} {what}"))
                break


def _of_share(team: Team, runs: Ints, elements: int) -> Ints:
    """The runs of all ranks in this rank's share of the elements. Collective."""
    blocks = []
    for rank in range(team.size):
        share = layout.block_range(elements, team.size, rank)
        first = np.searchsorted(runs[:, 1], share.start, "right")
        end = np.searchsorted(runs[:, 0], share.stop, "left")
        blocks.append(np.clip(runs[first:end], share.start, share.stop).ravel().view(np.uint8))
    return np.concatenate(all_to_all(team, blocks)).view(np.int64).reshape(-1, 2)


def record_checksums(saving: Saving, tensors: Sequence[Written], window: int) -> None:
    """Record the checksums of all pieces: of those that one rank has written in order, they are known; others are read
    again, from the disk if the system can, where every rank compares what it has written. Collective."""
    team = saving.team
    known: list[list[list[int]]] = objects.all_gather_object(team.comm, [sorted(w.checksums) for w in tensors])
    for i, (dataset, written) in enumerate(zip(saving.datasets, tensors, strict=True)):
        for row, checksum in written.checksums.items():
            saving.record(i, row, checksum)
        left = sorted(set(range(len(dataset.pieces))).difference(*(rank[i] for rank in known)))
        if not left:
            continue
        try:
            with open(saving.map.path, "rb", buffering=0) as file:
                forget(file.fileno())
                written.compare(saving.raw(i), file.fileno(), [dataset.pieces[row] for row in left], window)
                for row in left[team.rank :: team.size]:
                    saving.record(i, row, checksum_of(file.fileno(), saving.raw(i), dataset.pieces[row]))
        except Exception as error:  # reported to all when the file is committed
            saving.fail(error)
