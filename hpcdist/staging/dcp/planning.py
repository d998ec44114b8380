"""Which pieces a checkpoint's tensors are written in: from the plans that DCP has made for all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem

from hpcdist import layout
from hpcdist.errors import refusal
from hpcdist.files.h5 import Dataset, FileMap
from hpcdist.files.raw import Ints
from hpcdist.layout import Box
from hpcdist.layout.overlaps import disjoint
from hpcdist.staging import journal
from hpcdist.staging.names import flatten
from hpcdist.staging.pieces import PIECE, check_pieces, check_shape
from hpcdist.tensors.storage import DTYPES
from hpcdist.validation.local import WrongError

__all__ = ["Numbers", "Work", "check_item", "divide", "pieces_of", "plan_file"]


class Numbers(NamedTuple):
    """The tensors of a rank's items.

    Attributes:
        indices: of the items.
        rows: for each the number of its tensor, that of its first piece there, and how many pieces it has.
    """

    indices: list[MetadataIndex]
    rows: Ints


@dataclass(frozen=True)
class Work:
    """What a rank needs to know of the file. It travels with DCP's plan.

    Attributes:
        map: the file; without the places of all tensors.
        indices: of this rank's items.
        places: for each the number of its tensor in the file, the first byte of the tensor there, and the number of the
            item's first piece among those of the tensor.
        left: (index, piece of the item) -> checksum of what another run has noted as complete.
        journal, slot: the journal, "" without one, and the first byte in it of this rank's slot.
        hosts: number of hosts that write.
    """

    map: FileMap
    indices: list[MetadataIndex]
    places: Ints
    left: dict[tuple[MetadataIndex, int], int] = field(default_factory=dict)
    journal: str = ""
    slot: int = 0
    hosts: int = 1


def check_item(item: WriteItem, window: int) -> None:
    """Raise a ValueError if a tensor cannot be stored."""
    data, name = item.tensor_data, item.index.fqn
    if data is None:
        return
    if data.properties.layout is not torch.strided or data.properties.dtype not in DTYPES:
        kind = f"{data.properties.dtype} with layout {data.properties.layout}"
        raise refusal(ValueError, "HD418", f"{name!r} is of {kind}, which cannot be stored")
    itemsize = data.properties.dtype.itemsize
    try:
        check_shape(data.size, itemsize)
        check_pieces(data.size, itemsize, _limit(data, window))
    except WrongError as error:
        raise refusal(ValueError, "HD418", f"{name!r} {error}") from None


def pieces_of(data: TensorWriteData, window: int) -> list[Box]:
    """The boxes of the whole tensor in which the data of an item are written."""
    return list(layout.boxes(Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes)), _limit(data, window)))


def _limit(data: TensorWriteData, window: int) -> int:
    return max(1, min(PIECE, window) // data.properties.dtype.itemsize)


def plan_file(plans: Sequence[SavePlan], window: int) -> tuple[list[Dataset], list[Numbers]]:
    """Plan a file for the items of all ranks.

    Returns:
        The tensors of the file, and the numbers of each rank's items.

    Raises:
        ValueError: a name that a file cannot have; or shards that do not agree, overlap, or leave something out.
    """
    found: dict[str, _Tensor] = {}
    known: dict[object, Box] = {}  # tensors of one shape mostly have the same chunks
    numbers: list[Numbers] = []
    for plan in plans:
        indices: list[MetadataIndex] = []
        rows: list[int] = []
        for item in plan.items:
            index, data = item.index, item.tensor_data
            if data is None:
                continue
            tensor = found.get(index.fqn)
            if tensor is None:
                dtype = data.properties.dtype
                tensor = found[index.fqn] = _Tensor(len(found), tuple(data.size), dtype, _limit(data, window))
            elif tensor.shape != data.size or tensor.dtype != data.properties.dtype:
                raise refusal(
                    ValueError, "HD423", f"{index.fqn!r} has different shapes or dtypes in the plans of the ranks"
                )
            chunk = known.get((data.chunk.offsets, data.chunk.sizes))
            if chunk is None:
                chunk = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
                known[chunk] = chunk
            first = len(tensor.pieces)
            tensor.add(chunk)
            indices.append(index)
            rows += (tensor.number, first, len(tensor.pieces) - first)
        numbers.append(Numbers(indices, np.array(rows, np.int64).reshape(-1, 3)))
    flatten(dict.fromkeys(found))  # checks the names
    for name, tensor in found.items():
        if not tensor.is_whole():
            raise refusal(
                ValueError,
                "HD307",
                f"{name!r}: the shards of the ranks are not the tensor of shape {tensor.shape}, once",
            )
    return [Dataset(name, x.shape, x.dtype, x.pieces) for name, x in found.items()], numbers


@dataclass
class _Tensor:
    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    limit: int
    pieces: list[Box] = field(default_factory=list)
    chunks: list[Box] = field(default_factory=list)  # those with elements

    def add(self, chunk: Box) -> None:
        size = prod(chunk.shape)
        if not size:
            return
        self.chunks.append(chunk)
        if size <= self.limit:
            self.pieces.append(chunk)
        else:
            self.pieces += layout.boxes(chunk, self.limit)

    def is_whole(self) -> bool:
        if not self.chunks or not self.shape:
            return len(self.chunks) == prod(self.shape)
        offsets, shapes = (np.array(corner, np.int64) for corner in zip(*self.chunks, strict=True))
        inside = (offsets >= 0) & (shapes >= 0) & (offsets <= np.array(self.shape) - shapes)
        if not inside.all() or int(shapes.prod(axis=1).sum()) != prod(self.shape):
            return False
        cut = np.flatnonzero((shapes != self.shape).any(axis=0))
        if len(cut) > 1:
            return disjoint(self.chunks)
        return len(cut) == 0 or _follow(offsets, shapes, int(cut[0]))


def _follow(offsets: Ints, shapes: Ints, dim: int) -> bool:
    """Check that no box begins before the one before it ends, along `dim`."""
    order = np.argsort(offsets[:, dim])
    starts, extents = offsets[order, dim], shapes[order, dim]
    return bool((starts[:-1] + extents[:-1] <= starts[1:]).all())


def divide(
    file_map: FileMap,
    numbers: Sequence[Numbers],
    left: Mapping[tuple[int, int], int],
    notes: tuple[str, int],
    hosts: int,
) -> list[Work]:
    """What each rank needs to know of a file that is laid out.

    Args:
        numbers: as plan_file() returns them.
        left, notes: as :meth:`hpcdist.staging.target.Target.lay_out` returns them.
    """
    path, slot = notes[0], -(-notes[1] // file_map.page) * file_map.page
    starts = np.array([at or 0 for at in file_map.data], np.int64)
    works = []
    for indices, rows in numbers:
        tensors, firsts, counts = rows.T
        places = np.stack([tensors, starts[tensors], firsts], axis=1)
        noted = {
            (index, k): left[i, first + k]
            for index, (i, first, count) in (zip(indices, rows.tolist(), strict=True) if left else ())
            for k in range(count)
            if (i, first + k) in left
        }
        works.append(Work(replace(file_map, data=[]), indices, places, noted, path, slot, hosts))
        slot += journal.nbytes(int(counts.sum()), file_map.page)
    return works
