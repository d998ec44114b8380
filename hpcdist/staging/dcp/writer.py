"""HDF5Writer: DCP's storage writer."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from hpcdist.errors import FileError, reason, refusal
from hpcdist.files.commit import sync
from hpcdist.files.h5 import Dataset, FileMap
from hpcdist.files.raw import write_at
from hpcdist.staging.dcp.planning import Work, check_item, divide, plan_file
from hpcdist.staging.dcp.record import Item, Record, item_of, item_of_bytes
from hpcdist.staging.dcp.writing import Done, RankPart
from hpcdist.staging.in_flight import Upload, wait_for
from hpcdist.staging.target import WINDOW, SaveOptions, Target

__all__ = ["HDF5Writer"]


class HDF5Writer(StorageWriter):
    """Write a checkpoint of ``torch.distributed.checkpoint`` to one HDF5 file, which all ranks write at once.

    For ``dcp.save`` and ``dcp.async_save``. Each tensor of the state is one ordinary dataset, whole, under its name:
    :func:`hpcdist.staging.load`, ``python -m hpcdist.staging ls|verify`` and every HDF5 program read it, and it can be
    loaded on any number of ranks. Other values (numbers, strings, lists of these) are stored as
    JSON; a pickle only of what JSON cannot hold. The file appears under its name when it is complete and on the disk:
    until then, even if the job dies, the name keeps the old file.

    Args:
        path: of the file, in a folder that all ranks see; ``checkpoint_id=`` of dcp.save replaces it. Must agree.
        resume: continue what a job that died in the same save, with `resume`, has left: pieces whose checksums prove
            that they are complete, and hold the same data, are not written again. If this save fails, what it has
            written is kept for another try. With other shards than before it begins anew. Must agree.
        align: alignment of the tensors in the file, in bytes; by default the file system's stripe, or 1 MiB.
        window: bytes of host memory that a rank may use for data in transit. Must agree.
        progress: called on each rank, from time to time, with the number of bytes just done.

    Raises:
        CheckpointException: from dcp.save, on every rank, naming the ranks on which something failed, such as a tensor
            that a file cannot hold, or a full disk; or all of them, if the planner keeps plans from one save to the
            next (``enable_plan_caching``). The old file is as it was; without `resume`, what was written is removed at
            the next save, when this writer is dropped, or at the end of the program.
        ValueError: ``use_collectives=False``: the ranks would not agree on the file.

    Example::

        >>> dcp.save({"model": model.state_dict()}, storage_writer=HDF5Writer("model.h5"))
        >>> hd.staging.load("model.h5", "model.0.weight")        # this rank's block of rows
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        resume: bool = False,
        align: int | None = None,
        window: int = WINDOW,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("window", window), ("align", align)):
            if value is not None and value < 1:
                raise refusal(ValueError, "HD419", f"{name} is {value}, expected a number of bytes >= 1")
        self._path = os.fsdecode(path)
        self._options = SaveOptions("posix", window, align, resume=resume, progress=progress)
        self._file: _File | None = None
        self._end: weakref.finalize[..., HDF5Writer] | None = None  # gives up the file if the writer is dropped
        self._upload: Upload | None = None  # of async_save

    def __getstate__(self) -> dict[str, Any]:
        """For the process of ``AsyncCheckpointerType.PROCESS``, which begins the save."""
        return {**vars(self), "_file": None, "_end": None, "_upload": None}

    @property
    def checkpoint_id(self) -> str:
        """The path of the file."""
        return self._path

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self._path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return Path(os.fsdecode(checkpoint_id)).suffix in (".h5", ".hdf5")

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another save, to another file if `checkpoint_id` is given; one that has failed is given up."""
        self._give_up()
        if checkpoint_id:
            self._path = os.fsdecode(checkpoint_id)

    # What makes it an AsyncStager, from which dcp.async_save gets the copies that it writes: so the writer knows of the
    # save on the thread of the call, before torch's own thread begins it.
    _synchronize_after_execute = False

    @property
    def should_synchronize_after_execute(self) -> bool:
        return self._synchronize_after_execute

    def stage(self, state_dict: dict[str, Any]) -> Any:
        """Copy a state to host memory, as async_save does by default; until it has been written, staging's functions
        on the same file wait for it."""
        self._upload = Upload(self._path)
        stager = DefaultStager(StagingOptions(False, False, False, False))
        try:
            return stager.stage(state_dict)
        finally:
            stager.close()

    def synchronize_staging(self) -> None:
        """Do nothing: stage() returns when all is copied."""

    def close(self) -> None:
        """Do nothing, likewise."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Let earlier saves to the same file end."""
        if Upload.is_here():
            if self._upload is None or self._upload.thread is not None:
                self._upload = Upload(self._path)
            self._upload.begin(self._path)
        wait_for(self._path)
        if not kwargs.get("use_collectives", True):
            raise refusal(
                ValueError, "HD423", "use_collectives=False is for one file a rank; one file needs all to agree"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Check this rank's tensors, and tell the coordinator on which host they are."""
        for item in plan.items:
            check_item(item, self._options.window)
        return replace(plan, storage_data=_host())

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Lay out the file, on the coordinator, and tell every rank what goes where."""
        if not all(plan.usable for plan in plans):
            raise refusal(ValueError, "HD423", _CACHED)
        self._give_up()
        datasets, numbers = plan_file(plans, self._options.window)
        self._file = _File(self._path, datasets, self._options)
        self._end = weakref.finalize(self, self._file.discard)
        hosts = len({plan.storage_data for plan in plans})
        works = divide(self._file.map, numbers, self._file.left, self._file.notes, hosts)
        return [replace(plan, storage_data=work) for plan, work in zip(plans, works, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors; values, and what it has done, go to the coordinator."""
        if getattr(planner, "_enable_plan_caching", False):
            raise refusal(ValueError, "HD423", _CACHED)
        work: Work = plan.storage_data
        tensors = [item for item in plan.items if item.tensor_data is not None]
        results = [_value(item, planner) for item in plan.items if item.tensor_data is None]
        part = RankPart(self._path, tensors, work, self._options)
        try:
            for k, item in enumerate(tensors):
                done = part.write(k, item, planner.resolve_data(item))
                results.append(WriteResult(item.index, part.nbytes(k), done))
        finally:
            part.close()
        sync(Path(work.map.path))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Give the file its name, on the coordinator, complete and on the disk."""
        assert self._file is not None
        values: dict[str, Item] = {}
        done: list[list[Done]] = []
        for mine in results:
            values |= {result.index.fqn: result.storage_data.item for result in mine if _is_value(result)}
            done.append([result.storage_data for result in mine if not _is_value(result)])
        try:
            self._file.complete(done, Record(values, item_of(metadata.planner_data)).encode())
        except FileError:
            raise
        except Exception as error:  # each library has errors of its own
            raise FileError("HD410", f"{self._path}: cannot be written: {reason(error)}") from error
        finally:
            self._give_up()
        metadata.storage_meta = self.storage_meta()

    def _give_up(self) -> None:
        """Forget the file that is being written; unless it is complete, its name keeps the old one."""
        end, self._end, self._file = self._end, None, None
        if end is not None:
            end()


def _host() -> str:
    """What all processes have in common that share the system's cache of files."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


_CACHED = (
    "HDF5Writer needs the plans of every save: not DefaultSavePlanner(enable_plan_caching=True), which keeps those of "
    "the first"
)


@dataclass(frozen=True)
class _Value:
    """A value that is not a tensor, as it is stored."""

    item: Item


def _value(item: WriteItem, planner: SavePlanner) -> WriteResult:
    data = planner.resolve_data(item).getvalue()  # type: ignore[union-attr]
    return WriteResult(item.index, len(data), _Value(item_of_bytes(data)))


def _is_value(result: WriteResult) -> bool:
    return isinstance(result.storage_data, _Value)


class _File:
    """The file of a save on the coordinator, from its layout to its name.

    DCP does not tell the coordinator that another rank has failed. What is left then is removed when the writer is used
    again or dropped, when this thread, or another after the end of this one, begins a save, or when the program ends.

    Attributes:
        map, left, notes: as :meth:`Target.lay_out` returns them.
    """

    _open: set[_File] = set()  # noqa: RUF012  # of this process

    def __init__(self, path: str, datasets: Sequence[Dataset], options: SaveOptions) -> None:
        self._path = path
        self._thread = threading.current_thread()
        self._datasets = datasets
        for other in list(_File._open):
            if other._thread is self._thread or not other._thread.is_alive():  # a thread is in one save at a time
                other.discard()
        self._target = Target(path, datasets, options)
        self.map: FileMap
        self.map, self.left, self.notes = self._target.lay_out()
        _File._open.add(self)

    def complete(self, done: Sequence[Sequence[Done]], checkpoint: bytes) -> None:
        """Write what lies in pages of several hosts, the tables and the mark, and give the file its name."""
        rows = [[piece for item in mine for piece in item.pieces] for mine in done]
        if sum(map(len, rows)) != sum(len(dataset.pieces) for dataset in self._datasets):
            raise FileError("HD423", f"{self._path}: the ranks have not written all that was planned")
        fd = os.open(self.map.path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            for place, data in (edge for mine in done for item in mine for edge in item.edges):
                write_at(fd, place, memoryview(data))
        finally:
            os.close(fd)
        written = [np.array(mine, np.uint64).astype(np.int64).reshape(-1, 3) for mine in rows]
        self._target.complete(self.map, written, checkpoint)

    def discard(self) -> None:
        """Give up, unless it is complete; again, it does nothing."""
        self._target.discard()
        _File._open.discard(self)
