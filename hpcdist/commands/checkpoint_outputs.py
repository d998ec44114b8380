"""Checkpoints as the commands write them: every rank reads and writes its share, within a window of host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hpcdist import layout
from hpcdist.commands.checkpoint_inputs import Checkpoint, Read, opened
from hpcdist.commands.dcp_output import Folder
from hpcdist.commands.shares import Shares
from hpcdist.control import objects
from hpcdist.errors import InputError
from hpcdist.files import safetensors
from hpcdist.files.h5 import Dataset
from hpcdist.files.raw import Ints
from hpcdist.layout import Box
from hpcdist.runtime.cli import meter
from hpcdist.runtime.world import World
from hpcdist.staging.boxes import BoxSequence, Grid
from hpcdist.staging.pieces import PIECE
from hpcdist.staging.replaced import remove_old_form, withdraw_index
from hpcdist.staging.saving import Saving
from hpcdist.staging.sharded_files import divide, write_index
from hpcdist.staging.target import SaveOptions

__all__ = ["Copy"]

_VERB = "gather"


@dataclass(frozen=True)
class Copy:
    """A checkpoint that the ranks of a world write as other files. Its methods are collective.

    Attributes:
        held: the checkpoint.
        output: a file, or a folder for torch's DCP.
        window: bytes of host memory that a rank may use.
        resume: whether to continue what a job that died has left.
        limit: bytes of data of a file, if there are to be several and an index.
    """

    world: World
    held: Checkpoint
    output: str
    window: int
    resume: bool
    limit: int | None

    def write_files(self) -> dict[str, Any]:
        """Write one file, or several and an index; return entries of the report. A RankError on every rank, if
        anything failed on one."""
        world, datasets = self.world, self.datasets()
        files = divide(self.output, datasets, self.limit)
        names = [path for path, _ in files]
        shares = Shares(datasets, world.world_size)
        mine = dict(shares.of(world.rank))
        with ExitStack() as stack:
            savings = []
            read = stack.enter_context(opened(self.held))
            bar = stack.enter_context(self._meter())
            for path, rows in files:
                savings.append(stack.enter_context(self._saving(path, rows, datasets, shares, bar.update)))
                savings[-1].prove([mine.get(i, range(0)) for i in rows])
                self._copy(read, savings[-1], rows, mine)
            for saving in savings:
                saving.sync()
            problem = next((saving.problem for saving in savings if saving.problem is not None), None)
            found = enumerate(objects.all_gather_object(world.team.comm, problem))
            objects.raise_problems(_VERB, {rank: text for rank, text in found if text is not None})
            objects.broadcast(world.team.comm, _VERB, lambda: withdraw_index(self.output, names))
        if len(files) > 1:
            objects.broadcast(world.team.comm, _VERB, lambda: write_index(self.output, datasets, files))
        objects.broadcast(world.team.comm, _VERB, lambda: remove_old_form(self.output, names))
        report: dict[str, Any] = {"output_files": names}
        if self.resume:
            pieces = sum(len(d.pieces) for d in datasets)
            report |= {"pieces": pieces, "pieces_kept": sum(len(saving.done) for saving in savings)}
        return report

    def write_folder(self) -> dict[str, Any]:
        """Write a folder that torch's DCP reads; as write_files()."""
        datasets = self.datasets()
        shares = Shares(datasets, self.world.world_size)
        with opened(self.held) as read, self._meter() as bar, Folder(self.world.team, _VERB, self.output) as folder:
            with folder.writing():
                for i, rows in shares.of(self.world.rank):
                    for row in rows:
                        box = datasets[i].pieces[row]
                        x = torch.empty(box.shape, dtype=datasets[i].dtype, device="cpu")
                        read(i, box, x, self.window // 2)
                        folder.put(i, row, x)
                        bar.update(x.nbytes)
            return {"output_files": folder.finish(datasets)}

    def datasets(self) -> list[Dataset]:
        """The tensors, and the pieces in which they are written: half of the window each, since reading one may take
        as much again."""
        return [Dataset(x.name, x.shape, x.dtype, self._pieces(i)) for i, x in enumerate(self.held.tensors)]

    def _pieces(self, i: int) -> Sequence[Box]:
        """Those of an HDF5 file, if they are runs of the tensor: each is then read once, with its checksum."""
        x = self.held.tensors[i]
        limit = max(1, min(PIECE, self.window // 2) // x.dtype.itemsize)
        if self.held.catalog is not None:
            stored = self.held.catalog.datasets[x.name].boxes
            if len(stored) and int(stored.corners.sizes.max()) <= limit and _are_runs(stored, x.shape):
                return list(stored)
        return Grid(x.shape, limit)

    def _saving(
        self,
        path: str,
        rows: Sequence[int],
        datasets: Sequence[Dataset],
        shares: Shares,
        progress: Callable[[int], None],
    ) -> Saving:
        def owner(k: int, elements: Ints) -> Ints:
            return shares.owners(rows[k], elements)

        source = self.held.fingerprint() if self.resume else ""
        options = SaveOptions(window=self.window, resume=self.resume, source=source, progress=progress)
        if path.endswith(safetensors.SUFFIX):
            text = {"format": "pt", **self.held.text}
            options = replace(options, writer="posix", lay_out=partial(safetensors.lay_out, metadata=text))
        return Saving(self.world.team, _VERB, path, [datasets[i] for i in rows], owner, options)

    def _copy(self, read: Read, saving: Saving, rows: Sequence[int], mine: dict[int, range]) -> None:
        """Read and write this rank's share of a file; a failure is kept."""
        parts = [(k, row) for k, i in enumerate(rows) for row in mine.get(i, ()) if (k, row) not in saving.done]
        buffer = torch.empty(
            max((_nbytes(saving.datasets[k], row) for k, row in parts), default=0), dtype=torch.uint8, device="cpu"
        )
        try:
            for k, row in parts:
                box, dtype = saving.datasets[k].pieces[row], saving.datasets[k].dtype
                x: Tensor = buffer[: box.size() * dtype.itemsize].view(dtype).view(box.shape)
                read(rows[k], box, x, self.window // 2)
                saving.put(k, row, x)
                if saving.problem is not None:
                    return
        except InputError as error:
            saving.problem = saving.problem or str(error)

    def _meter(self) -> Any:
        return meter(self.world, _VERB, self.held.nbytes() // self.world.world_size)


def _nbytes(dataset: Dataset, row: int) -> int:
    return dataset.pieces[row].size() * dataset.dtype.itemsize


def _are_runs(boxes: BoxSequence, shape: tuple[int, ...]) -> bool:
    """Check that boxes are one run of a tensor each, in order, and the whole of it."""
    end = 0
    for box in boxes:
        length, count, starts = layout.runs(box, shape)
        if count != 1 or not length or next(starts) != end:
            return False
        end += length
    return end == layout.whole(shape).size()
