"""A plan of torch's DCP for tensors that a command reads a piece at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

from hpcdist import layout
from hpcdist.commands.copying import Read, Shares
from hpcdist.formats.contents import Dataset
from hpcdist.layout import Box

__all__ = ["PiecesPlanner"]


class PiecesPlanner(SavePlanner):
    """Each rank writes its share of the pieces, each of which is read when it is written."""

    def __init__(
        self, datasets: Sequence[Dataset], read: Read, size: int, rank: int, progress: Callable[[int], object]
    ) -> None:
        self._datasets, self._read, self._progress = datasets, read, progress
        self._mine: dict[MetadataIndex, tuple[int, Box]] = {}
        shares = Shares(datasets, size)
        for i, dataset in enumerate(datasets):
            pieces = dataset.pieces
            if pieces is not None:
                self._add(i, [pieces[row] for row in shares.rows(i, rank)])
            if not dataset.nbytes() and rank == 0:
                self._add(i, [layout.whole(dataset.shape)])

    def _add(self, i: int, boxes: Sequence[Box]) -> None:
        for box in boxes:
            self._mine[MetadataIndex(self._datasets[i].name, torch.Size(box.offset))] = i, box

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Do nothing: there is no state."""

    def create_local_plan(self) -> SavePlan:
        items = []
        for index, (i, box) in self._mine.items():
            dataset = self._datasets[i]
            chunk = ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape))
            data = TensorWriteData(chunk, TensorProperties(dtype=dataset.dtype), torch.Size(dataset.shape))
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = create_default_global_save_plan(all_plans)
        return plans, replace(metadata, planner_data={d.name: (d.name,) for d in self._datasets})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        i, box = self._mine[MetadataIndex(write_item.index.fqn, write_item.index.offset)]
        x = torch.empty(box.shape, dtype=self._datasets[i].dtype, device="cpu")
        self._read(i, box, x)
        self._progress(x.nbytes)
        return x
