"""HDF5Writer: DCP's storage writer."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from hpcdist import layout
from hpcdist.errors import FileError, reason, refusal
from hpcdist.formats.atomic import sync
from hpcdist.formats.contents import Dataset
from hpcdist.formats.plain import write_at
from hpcdist.layout import Box
from hpcdist.layout.box_sequences import Listed
from hpcdist.staging.arguments import flatten
from hpcdist.staging.dcp.record import Item, Record, item_of, item_of_bytes
from hpcdist.staging.drivers import Posix
from hpcdist.staging.exchange import outgoing
from hpcdist.staging.in_flight import Upload, wait_for
from hpcdist.staging.pages import RootPages
from hpcdist.staging.pieces import check_pieces, check_shape, piece_limit
from hpcdist.staging.writer import WINDOW, Laid, PartFile, RankWriter, SaveOptions, Target
from hpcdist.tensors.storage import DTYPES
from hpcdist.validation import local
from hpcdist.validation.local import WrongError

__all__ = ["HDF5Writer", "plan_file"]

_NOT_ROOT = 1  # the number of every writer: the coordinator writes what is left of pages when all have finished


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
        window: int = WINDOW,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__()
        if window < 1:
            raise refusal(ValueError, "HD419", f"window is {window}, expected a number of bytes >= 1")
        self._path = os.fsdecode(path)
        self._options = SaveOptions("posix", window, resume, progress=progress)
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
            _check_item(item, self._options.window)
        return replace(plan, storage_data=_host())

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Lay out the file, on the coordinator, and tell every rank what goes where."""
        if not all(plan.usable for plan in plans):
            raise refusal(ValueError, "HD423", _CACHED)
        self._give_up()
        datasets, firsts = plan_file(plans, self._options.window)
        self._file = _File(self._path, datasets, self._options)
        self._end = weakref.finalize(self, self._file.discard)
        laid, hosts = self._file.laid, len({plan.storage_data for plan in plans})
        works = [
            _Work(
                replace(laid, map=replace(laid.map, data=[])), rank, hosts,
                {index: (i, laid.map.data[i] or 0, first) for index, (i, first) in mine.items()},
            )
            for rank, mine in enumerate(firsts)
        ]  # fmt: skip
        return [replace(plan, storage_data=work) for plan, work in zip(plans, works, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors; values, and what it has done, go to the coordinator."""
        if getattr(planner, "_enable_plan_caching", False):
            raise refusal(ValueError, "HD423", _CACHED)
        tensors = [item for item in plan.items if item.tensor_data is not None]
        results = [_value(item, planner) for item in plan.items if item.tensor_data is None]
        with _RankFile(self._path, tensors, plan.storage_data, self._options) as file:
            for k, item in enumerate(tensors):
                done = file.write(k, item, planner.resolve_data(item))
                results.append(WriteResult(item.index, file.nbytes(k), done))
        sync(Path(plan.storage_data.laid.map.path))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Give the file its name, on the coordinator, complete and on the disk."""
        assert self._file is not None
        values: dict[str, Item] = {}
        done: list[list[_Done]] = []
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


def _check_item(item: WriteItem, window: int) -> None:
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


def _limit(data: TensorWriteData, window: int) -> int:
    return piece_limit(window, data.properties.dtype.itemsize)


def _pieces(data: TensorWriteData, window: int) -> list[Box]:
    """The boxes of the whole tensor in which the data of an item are written."""
    return list(layout.boxes(Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes)), _limit(data, window)))


def plan_file(
    plans: Sequence[SavePlan], window: int
) -> tuple[list[Dataset], list[dict[MetadataIndex, tuple[int, int]]]]:
    """Plan a file for the items of all ranks.

    Returns:
        The tensors of the file; and for each rank, by item, the number of its tensor, and of its first piece there.

    Raises:
        ValueError: a name that a file cannot have; or shards that do not agree, overlap, or leave something out.
    """
    datasets: list[Dataset] = []
    pieces: list[list[Box]] = []
    numbers: dict[str, int] = {}
    firsts: list[dict[MetadataIndex, tuple[int, int]]] = []
    for plan in plans:
        firsts.append({})
        for item in plan.items:
            index, data = item.index, item.tensor_data
            if data is None:
                continue
            i = numbers.setdefault(index.fqn, len(datasets))
            if i == len(datasets):
                datasets.append(Dataset(index.fqn, tuple(data.size), data.properties.dtype))
                pieces.append([])
            dataset = datasets[i]
            if dataset.shape != tuple(data.size) or dataset.dtype != data.properties.dtype:
                what = "has different shapes or dtypes in the plans of the ranks"
                raise refusal(ValueError, "HD423", f"{index.fqn!r} {what}")
            firsts[-1][index] = i, len(pieces[i])
            pieces[i] += _pieces(data, window)
    flatten(dict.fromkeys(numbers))  # checks the names
    listed = [Listed.of(of, d.shape) for of, d in zip(pieces, datasets, strict=True)]
    for d, of in zip(datasets, listed, strict=True):
        if not of.tile():
            what = f"the shards of the ranks are not the tensor of shape {d.shape}, once"
            raise refusal(ValueError, "HD307", f"{d.name!r}: {what}")
    return [replace(d, pieces=of) for d, of in zip(datasets, listed, strict=True)], firsts


@dataclass(frozen=True)
class _Work:
    """What a rank needs to know of the file. It travels with DCP's plan.

    Attributes:
        laid: the file; without the places of all tensors.
        number: of the rank.
        hosts: number of hosts that write.
        places: by item the number of its tensor in the file, the first byte of the tensor there, and the number of the
            item's first piece among those of the tensor.
    """

    laid: Laid
    number: int
    hosts: int
    places: dict[MetadataIndex, tuple[int, int, int]]


@dataclass
class _Done:
    """What a rank has written of one item.

    Attributes:
        pieces: number of the tensor, number of the piece, and checksum.
        edges: position and bytes of what lies in pages that other hosts write, too: the coordinator writes these.
    """

    pieces: list[tuple[int, int, int]] = field(default_factory=list)
    edges: list[tuple[int, bytes]] = field(default_factory=list)


class _RankFile:
    """This rank's items of a file, each of which is a dataset of its own here; for a ``with`` block.

    On one host, all ranks write into one cache. Clients of a shared file system may write back whole pages: of several
    hosts, only the coordinator writes pages that a run of an item does not fill.
    """

    def __init__(self, path: str, items: Sequence[WriteItem], work: _Work, options: SaveOptions) -> None:
        self._places = [work.places[item.index] for item in items]
        datasets = []
        for item in items:
            data = item.tensor_data
            assert data is not None
            pieces = Listed.of(_pieces(data, options.window), data.size)
            datasets.append(Dataset(item.index.fqn, tuple(data.size), data.properties.dtype, pieces))
        laid = work.laid
        journal = f"{laid.journal}.{work.number}" if laid.journal else ""
        pages = RootPages(laid.map.page) if work.hosts > 1 else None
        self._file = PartFile(path, replace(laid, journal=journal), Posix(laid.map), _NOT_ROOT, pages, options.window)
        where = [(self._file, start, i) for i, start, _ in self._places]
        self._rank = RankWriter([self._file], datasets, where, options, [first for _, _, first in self._places])

    def _rows(self, k: int) -> range:
        return range(len(self._pieces(k)))

    def _pieces(self, k: int) -> Listed:
        pieces = self._rank.datasets[k].pieces
        assert pieces is not None
        return pieces

    def nbytes(self, k: int) -> int:
        """The bytes of the k-th item."""
        return int(self._pieces(k).sizes.sum()) * self._rank.datasets[k].dtype.itemsize

    def write(self, k: int, item: WriteItem, x: Any) -> _Done:
        """Write the k-th item, of which `x` is the tensor.

        Raises:
            ValueError: it is not what was planned; FileError: it cannot be written.
        """
        assert item.tensor_data is not None
        rank, chunk, dataset = self._rank, item.tensor_data.chunk, self._rank.datasets[k]
        try:
            shard: Tensor = local.ready(x, repr(dataset.name))
        except local.WrongError as error:
            raise refusal(ValueError, "HD202", str(error)) from None
        if (tuple(shard.shape), shard.dtype) != (tuple(chunk.sizes), dataset.dtype):
            what = f"{shard.dtype} of shape {tuple(shard.shape)}"
            planned = f"{dataset.dtype} of {tuple(chunk.sizes)}"
            raise refusal(ValueError, "HD423", f"{dataset.name!r} is {what}, but was planned as {planned}")
        parts = [box.relative_to(tuple(chunk.offsets)) for box in self._pieces(k)]
        for row, piece in zip(self._rows(k), outgoing(shard, parts), strict=True):
            rank.put(k, row, piece)
            if rank.problem is not None:
                raise FileError(rank.problem)
        i, _, first = self._places[k]
        done = [(i, first + row, rank.written[k, row]) for row in self._rows(k)]
        return _Done(done, self._file.edges.take())

    def __enter__(self) -> _RankFile:
        try:
            self._file.open()
            self._rank.prove([self._rows(k) for k in range(len(self._places))])
        except BaseException:
            self._rank.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._rank.close()


class _File:
    """The file of a save on the coordinator, from its layout to its name.

    DCP does not tell the coordinator that another rank has failed. What is left then is removed when the writer is used
    again or dropped, when this thread, or another after the end of this one, begins a save, or when the program ends.

    Attributes:
        laid: the file as it is laid out.
    """

    _open: set[_File] = set()  # noqa: RUF012  # of this process

    def __init__(self, path: str, datasets: Sequence[Dataset], options: SaveOptions) -> None:
        self._thread = threading.current_thread()
        for other in list(_File._open):
            if other._thread is self._thread or not other._thread.is_alive():  # a thread is in one save at a time
                other.discard()
        self._target = Target(path, datasets, options)
        self.laid = self._target.lay_out()
        _File._open.add(self)

    def complete(self, done: Sequence[Sequence[_Done]], checkpoint: bytes) -> None:
        """Write what lies in pages of several hosts, the tables and the mark, and give the file its name."""
        fd = os.open(self.laid.map.path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            for place, data in (edge for mine in done for item in mine for edge in item.edges):
                write_at(fd, place, memoryview(data))
        finally:
            os.close(fd)
        rows = [[piece for item in mine for piece in item.pieces] for mine in done]
        written = [np.array(mine, np.uint64).astype(np.int64).reshape(-1, 3) for mine in rows]
        self._target.complete(written, checkpoint)

    def discard(self) -> None:
        """Give up, unless it is complete; again, it does nothing."""
        self._target.discard()
        _File._open.discard(self)
