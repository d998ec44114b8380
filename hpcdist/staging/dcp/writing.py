"""What one rank writes of a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.checkpoint.planner import WriteItem

from hpcdist.errors import FileError, refusal
from hpcdist.files import h5
from hpcdist.files.h5 import Dataset
from hpcdist.staging.dcp.planning import Work, pieces_of
from hpcdist.staging.drivers import write_ahead
from hpcdist.staging.host import outgoing
from hpcdist.staging.journal import Journal
from hpcdist.staging.part import Part
from hpcdist.staging.target import SaveOptions
from hpcdist.validation import local

__all__ = ["Done", "RankPart"]


@dataclass
class Done:
    """What a rank has written of one item.

    Attributes:
        pieces: number of the tensor, number of the piece, and checksum.
        edges: position and bytes of what lies in pages that other hosts write, too: the coordinator writes these.
    """

    pieces: list[tuple[int, int, int]] = field(default_factory=list)
    edges: list[tuple[int, bytes]] = field(default_factory=list)


class _Place(NamedTuple):
    """Where the data of an item go: see :class:`hpcdist.staging.dcp.planning.Work`."""

    tensor: int
    start: int
    first: int


class RankPart(Part):
    """This rank's items of a file, each of which it sees as a dataset of its own. Must be closed.

    On one host, all ranks write into one cache. Clients of a shared file system may write back whole pages: of several
    hosts, only the coordinator writes pages that a run of an item does not fill.

    Args:
        items: those that are tensors.
    """

    def __init__(self, path: str, items: Sequence[WriteItem], work: Work, options: SaveOptions) -> None:
        places = dict(zip(work.indices, work.places.tolist(), strict=True))
        self._places = [_Place(*places[item.index]) for item in items]
        datasets = [_dataset(item, options.window) for item in items]
        super().__init__(path, datasets, options)
        self.map = replace(work.map, data=[place.start for place in self._places])
        self._several_hosts = work.hosts > 1
        self._edges: list[tuple[int, bytes]] = []
        self._kept = 0  # bytes of all edges so far
        h5.check_visible(self.map)
        self._fd = os.open(self.map.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            self._resume(items, work)
        except BaseException:
            self.close()
            raise

    def _resume(self, items: Sequence[WriteItem], work: Work) -> None:
        """Find what is complete already, by reading it, and open the journal."""
        if work.journal:
            self._left = {(k, n): work.left[item.index, n] for k, item in enumerate(items) for n in self._rows(k)
                          if (item.index, n) in work.left}  # fmt: skip
            proven = list(self._proven([self._rows(k) for k in range(len(items))]))
            self.done = {key: self._left[key] for key in proven}
            self._open_journal(Path(work.journal), work.slot)

    def _rows(self, k: int) -> range:
        return range(len(self.datasets[k].pieces))

    def nbytes(self, k: int) -> int:
        """The bytes of the k-th item."""
        return sum(box.size() for box in self.datasets[k].pieces) * self.datasets[k].dtype.itemsize

    def write(self, k: int, item: WriteItem, x: Any) -> Done:
        """Write the k-th item, of which `x` is the tensor.

        Raises:
            ValueError: it is not what was planned; FileError: it cannot be written.
        """
        assert item.tensor_data is not None
        chunk, dataset = item.tensor_data.chunk, self.datasets[k]
        try:
            shard: Tensor = local.ready(x, repr(dataset.name))
        except local.WrongError as error:
            raise refusal(ValueError, "HD202", str(error)) from None
        if (tuple(shard.shape), shard.dtype) != (tuple(chunk.sizes), dataset.dtype):
            what = f"{shard.dtype} of shape {tuple(shard.shape)}"
            raise refusal(
                ValueError,
                "HD423",
                f"{dataset.name!r} is {what}, but was planned as {dataset.dtype} of {tuple(chunk.sizes)}",
            )
        offset = tuple(chunk.offsets)
        parts = [box.relative_to(offset) for box in dataset.pieces]
        for row, piece in zip(self._rows(k), outgoing(shard, parts), strict=True):
            self.put(k, row, piece)
            if self.problem is not None:
                raise FileError(self.problem)
        place = self._places[k]
        edges, self._edges = self._edges, []
        return Done([(place.tensor, place.first + row, self._written[k, row]) for row in self._rows(k)], edges)

    def _note(self, journal: Journal, i: int, row: int, checksum: int) -> None:
        journal.note(self._places[i].tensor, self._places[i].first + row, checksum)

    def _write(self, place: int, data: memoryview, digest: Any = None) -> None:
        if not self._several_hosts:
            write_ahead(self._fd, place, data, digest)
            return
        page, end = self.map.page, place + len(data)
        first, last = -(-place // page) * page, end // page * page
        if first >= last:  # no page is filled
            first = last = end
        self._keep(place, data[: first - place])
        if digest is not None:
            digest.update(data[: first - place])
        if first < last:
            write_ahead(self._fd, first, data[first - place : last - place], digest)
        self._keep(last, data[last - place :])
        if digest is not None:
            digest.update(data[last - place :])

    def _keep(self, place: int, data: memoryview) -> None:
        """Keep what the coordinator must write."""
        self._kept += len(data)
        if self._kept > self._options.window:
            text = "bytes of short runs lie in pages that several hosts write: more than window"
            raise refusal(ValueError, "HD423", f"{self._kept:,} {text}={self._options.window:,}")
        if data:
            self._edges.append((place, bytes(data)))

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)
        self._close_journal()


def _dataset(item: WriteItem, window: int) -> Dataset:
    data = item.tensor_data
    assert data is not None
    return Dataset(item.index.fqn, tuple(data.size), data.properties.dtype, pieces_of(data, window))
