"""Which pieces a checkpoint's tensors are written in: from the plans that DCP has made for all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem

from hpcdist import layout
from hpcdist.files.h5 import Dataset, FileMap
from hpcdist.layout import Box
from hpcdist.layout.overlaps import disjoint
from hpcdist.staging import journal
from hpcdist.staging.names import flatten
from hpcdist.staging.pieces import PIECE, check_pieces, check_shape
from hpcdist.tensors.storage import DTYPES
from hpcdist.validation.local import WrongError

__all__ = ["Numbers", "Place", "Work", "check_item", "divide", "pieces_of", "plan_file"]

Numbers = dict[MetadataIndex, tuple[int, int, int]]
"""By index of a rank's item: the number of its tensor, that of its first piece there, and how many pieces it has."""


@dataclass(frozen=True)
class Place:
    """Where the data of one write item go.

    Attributes:
        tensor: number of its tensor in the file.
        start: first byte of the tensor in the file.
        first: number of the item's first piece among those of the tensor.
    """

    tensor: int
    start: int
    first: int


@dataclass(frozen=True)
class Work:
    """What a rank needs to know of the file. It travels with DCP's plan.

    Attributes:
        map: the file; without the places of all tensors.
        places: by index, the place of each item of this rank.
        left: (index, piece of the item) -> checksum of what another run has noted as complete.
        journal, slot: the journal, "" without one, and the first byte in it of this rank's slot.
        hosts: number of hosts that write.
    """

    map: FileMap
    places: dict[MetadataIndex, Place] = field(default_factory=dict)
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
        raise ValueError(f"{name!r} is of {kind}, which cannot be stored")
    itemsize = data.properties.dtype.itemsize
    try:
        check_shape(data.size, itemsize)
        check_pieces(data.size, itemsize, _limit(data, window))
    except WrongError as error:
        raise ValueError(f"{name!r} {error}") from None


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
    numbers: list[Numbers] = []
    for plan in plans:
        numbers.append({})
        for item in plan.items:
            data = item.tensor_data
            if data is None:
                continue
            shape, dtype = tuple(data.size), data.properties.dtype
            tensor = found.setdefault(item.index.fqn, _Tensor(len(found), shape, dtype))
            if (tensor.shape, tensor.dtype) != (shape, dtype):
                raise ValueError(f"{item.index.fqn!r} has different shapes or dtypes in the plans of the ranks")
            pieces = pieces_of(data, window)
            numbers[-1][item.index] = tensor.number, len(tensor.pieces), len(pieces)
            tensor.pieces += pieces
            tensor.chunks.append(Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes)))
    flatten(dict.fromkeys(found))  # checks the names
    for name, tensor in found.items():
        if not tensor.is_whole():
            raise ValueError(f"{name!r}: the shards of the ranks are not the tensor of shape {tensor.shape}, once")
    return [Dataset(name, x.shape, x.dtype, x.pieces) for name, x in found.items()], numbers


@dataclass
class _Tensor:
    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: list[Box] = field(default_factory=list)
    chunks: list[Box] = field(default_factory=list)

    def is_whole(self) -> bool:
        filled = [chunk for chunk in self.chunks if chunk.size()]
        inside = all(chunk.is_in(self.shape) for chunk in filled)
        return inside and sum(chunk.size() for chunk in filled) == prod(self.shape) and disjoint(filled)


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
    works = []
    for mine in numbers:
        places = {index: Place(i, file_map.data[i] or 0, first) for index, (i, first, _) in mine.items()}
        noted = {
            (index, k): left[i, first + k]
            for index, (i, first, count) in (mine.items() if left else ())
            for k in range(count)
            if (i, first + k) in left
        }
        works.append(Work(replace(file_map, data=[]), places, noted, path, slot, hosts))
        slot += journal.nbytes(sum(count for _, _, count in mine.values()), file_map.page)
    return works
