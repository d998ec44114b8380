"""Checkpoints of torch.distributed.checkpoint (DCP) in one HDF5 file of staging's own format.

>>> import torch.distributed.checkpoint as dcp
>>> from hpcdist.staging.dcp import HDF5Reader, HDF5Writer
>>> dcp.save(state, storage_writer=HDF5Writer("model.h5"))      # each tensor whole, under its name in the state
>>> dcp.load(state, storage_reader=HDF5Reader("model.h5"))      # on any number of ranks, in any placement

DCP plans and agrees through its own process group. These classes use neither MPI nor :func:`hpcdist.init`. Therefore
they work under any launcher, in a group of some of the ranks, and in the thread of ``dcp.async_save``. Every rank
writes its shards at their place in the file. DCP's coordinator lays out the file, and gives it its name when all have
finished.

Values that are no tensors, such as numbers and strings, are stored as torch.save writes them, and read
only if torch finds them safe, or with allow_pickle.
"""

from __future__ import annotations

import io
import json
import os
import time
import weakref
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from hpcdist import layout
from hpcdist.errors import FileError, reason, refusal
from hpcdist.formats.contents import Contents, Dataset, Identity, Stored
from hpcdist.formats.hdf5 import table_of
from hpcdist.formats.known import describe
from hpcdist.formats.paths import sync
from hpcdist.layout import Box
from hpcdist.layout.box import Ints, Listed, Shape
from hpcdist.runtime.background import join_uploads
from hpcdist.staging.arguments import flatten, hdf5_path, shape_and_dtype, window_bytes
from hpcdist.staging.drivers import PartFile
from hpcdist.staging.pieces import outgoing, piece_limit
from hpcdist.staging.reader import NAPS, OpenFiles, TensorReader, open_files
from hpcdist.staging.save import wait_for
from hpcdist.staging.writer import WINDOW, RankWriter, SaveOptions, Target, with_tables
from hpcdist.tensors.storage import written
from hpcdist.validation import local

__all__ = ["HDF5Reader", "HDF5Writer", "plan_file"]

_unfinished: dict[str, weakref.finalize[..., HDF5Writer]] = {}  # by path, the latest save of this process
_ADVICE = "HDF5Reader(..., allow_pickle=True) loads it, which can run any code: only for files that you trust"


class _OneFile:
    """The path of a file, which DCP calls checkpoint_id; and the bytes of host memory to be used."""

    def __init__(self, path: str | os.PathLike[str], window: int) -> None:
        super().__init__()
        window_bytes(window)
        self._path = os.fsdecode(path)

    @property
    def checkpoint_id(self) -> str:
        """The path of the file."""
        return self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return Path(os.fsdecode(checkpoint_id)).suffix in (".h5", ".hdf5")

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another save or load, of another file if `checkpoint_id` is given."""
        if checkpoint_id:
            self._path = os.fsdecode(checkpoint_id)

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self._path)


class HDF5Reader(_OneFile, StorageReader):
    """Read a checkpoint of ``torch.distributed.checkpoint`` from an HDF5 file, on any number of ranks.

    For ``dcp.load``. Every rank reads the boxes of its shards directly into their memory. The file may be one of
    :class:`HDF5Writer`, of :func:`hpcdist.staging.save`, or of any other program: its datasets are the tensors.

    Args:
        path: of the file, which all ranks see; ``checkpoint_id=`` of dcp.load replaces it.
        verify: True: compare the checksum of every piece that is read at least in part; None: of pieces that are read
            whole; False: of none.
        window: bytes of host memory that a rank may use besides the state.
        allow_pickle: whether to load pickles of values that torch does not consider safe. A pickle can run any code.

    Raises:
        CheckpointException: from dcp.load, on every rank. It names the ranks with an error: the file is missing,
            incomplete or damaged, or a name or shape differs from the state's.

    Example::

        >>> state = {"model": model.state_dict()}
        >>> dcp.load(state, storage_reader=HDF5Reader("model.h5"))
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        verify: bool | None = None,
        window: int = WINDOW,
        allow_pickle: bool = False,
    ) -> None:
        super().__init__(path, window)
        self._verify, self._window, self._allow_pickle = verify, window, allow_pickle
        self._contents: Contents | None = None

    def read_metadata(self) -> Metadata:
        """List the tensors and values of the file. Every tensor is one chunk, of which any box can be read."""
        wait_for(self._path)
        contents = self._contents = self._described()
        found: dict[str, Any] = {name: _metadata(stored) for name, stored in contents.tensors.items()}
        found |= dict.fromkeys(contents.checkpoint.get("values", ()), BytesStorageMetadata())
        planner_data = None
        if "planner_data" in contents.checkpoint:
            held = self._value("planner_data", contents.checkpoint["planner_data"])
            planner_data = torch.load(held, weights_only=False)  # checked there
        return Metadata(found, planner_data=planner_data, storage_meta=self.storage_meta())

    def _described(self) -> Contents:
        """Describe the file. On ranks but the first, names may be cached that are out of date: they wait for it."""
        naps = list(NAPS) if dist.is_initialized() and dist.get_rank() > 0 else []
        while True:
            try:
                return describe(self._path)
            except FileError as error:
                if not naps or "HD401" not in error.codes:
                    raise
            time.sleep(naps.pop())

    def _value(self, name: str, text: Any) -> io.BytesIO:
        """A value that is no tensor, as its planner made it; a FileError if it is a pickle that is not safe, unless
        `allow_pickle`."""
        try:
            data = io.BytesIO(b64decode(text, validate=True))
        except (ValueError, TypeError) as error:
            raise FileError("HD402", f"{self._path}: {name}: cannot be read: {reason(error)}") from error
        if not self._allow_pickle:
            try:
                torch.load(data, weights_only=True)
            except Exception as error:  # torch has several
                what = f"is stored as a pickle of more than plain values: {_ADVICE}"
                raise FileError("HD511", f"{self._path}: {name} {what}") from error
            data.seek(0)
        return data

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Tell all ranks which file the coordinator has described."""
        assert self._contents is not None
        return [replace(plan, storage_data=self._contents.files) for plan in plans]

    def _open(self, files: dict[str, Identity] | None) -> OpenFiles:
        """Open the file that the coordinator has described, which a cache may hide for some seconds."""
        planned = self._contents
        assert planned is not None
        find = lambda: planned if files in (None, planned.files) else replace(describe(self._path), files=files)  # noqa: E731
        opened = open_files(find)
        if _specs(opened.contents) != _specs(planned):
            opened.close()
            raise FileError("HD413", f"{self._path}: was another file when this rank planned what it reads")
        return opened

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's items, tensors in the order of the file."""
        tensors = [item for item in plan.items if item.type == LoadItemType.TENSOR]
        with self._open(plan.storage_data) as files:
            contents = files.contents
            for item in plan.items:
                if item.type == LoadItemType.BYTE_IO:
                    name = item.storage_index.fqn
                    planner.load_bytes(item, self._value(name, contents.checkpoint["values"][name]))
            readers = {
                name: TensorReader(files, contents.tensors[name], self._window, self._verify)
                for name in {item.storage_index.fqn for item in tensors}
            }
            for item in sorted(tensors, key=lambda item: readers[item.storage_index.fqn].place):
                target = planner.resolve_tensor(item).detach()
                reader, box = readers[item.storage_index.fqn], Box(tuple(item.storage_offsets), tuple(item.lengths))
                if tuple(target.shape) != box.shape:
                    what = f"has shape {tuple(target.shape)}, where {box.shape} was planned"
                    raise refusal(ValueError, "HD419", f"{reader.stored.name!r}: {what}")
                reader.read(box, written(target, target))
                planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future


def _specs(contents: Contents) -> object:
    specs = {name: (of.shape, of.dtype) for name, of in contents.tensors.items()}
    return specs, contents.checkpoint.get("values", {}).keys()


def _metadata(stored: Stored) -> TensorStorageMetadata:
    size = torch.Size(stored.shape)
    whole = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
    return TensorStorageMetadata(TensorProperties(dtype=stored.dtype), size, [whole])


def memory_of(state: dict[str, Tensor], tensors: Mapping[str, Stored]) -> dict[str, list[tuple[Box, Tensor]]]:
    """The boxes that this rank holds of each tensor of a file, and their memory, by name."""
    found: dict[str, list[tuple[Box, Tensor]]] = {key: [] for key in state}
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    detached = {key: x.detach() for key, x in state.items()}
    planner.set_up_planner(detached, Metadata({key: _metadata(tensors[key]) for key in state}))
    for item in planner.create_local_plan().items:
        box = Box(tuple(item.storage_offsets), tuple(item.lengths))
        x = planner.resolve_tensor(item)
        found[item.storage_index.fqn].append((box, local.ready(written(x, x), item.storage_index.fqn, writes=True)))
    return found


class HDF5Writer(_OneFile, StorageWriter):
    """Write a checkpoint of ``torch.distributed.checkpoint`` to one HDF5 file, which all ranks write at once.

    For ``dcp.save`` and ``dcp.async_save``. Each tensor of the state is one ordinary dataset under its name.
    :func:`hpcdist.staging.load`, ``python -m hpcdist ls|verify`` and every HDF5 program read it. Any number of ranks
    can load it. The file appears under its name when it is complete and on the disk. Until then, even if the job dies,
    the name refers to the old file.

    DCP plans a save on one rank, from what all ranks send. With ``DefaultSavePlanner(enable_plan_caching=True)`` and
    one HDF5Writer for all saves, ranks send only what has changed since the last save. Loads cannot do so.

    Args:
        path: the file to write, in a folder that all ranks share. ``checkpoint_id=`` of dcp.save replaces it. Must
            agree.
        resume: continue the unfinished file of a job that died: pieces that it holds already are not written
            again. If this save fails, it keeps its unfinished file. Must agree.
        window: bytes of host memory that a rank may use for data in transit, 256 MiB by default. Must agree.
        progress: called on each rank, from time to time, with the number of bytes just done.

    Raises:
        CheckpointException: from dcp.save, on every rank. It names the ranks with an error, such as a tensor that a
            file cannot hold, or a full disk. The old file is unchanged. Without `resume`, the unfinished file is
            removed at the next save to its name, when this writer is dropped, or at the end of the program.
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
        super().__init__(path, window)
        self._options = SaveOptions("posix", window, resume, progress=progress)
        self._target: Target | None = None
        self._own: tuple[SavePlan | None, SavePlan | None] = None, None  # written last; of a save that has begun
        self._plans: list[SavePlan] = []  # on the coordinator, of the latest save, with what was planned from them
        self._planned: tuple[list[Dataset], list[dict[MetadataIndex, Ints]]] | None = None
        self._places: list[int] = []
        self._kept = False  # whether some are of earlier saves
        self._mine: tuple[list[WriteItem], dict[MetadataIndex, tuple[int, int, Ints]]] | None = None
        self._end: weakref.finalize[..., HDF5Writer] | None = None  # gives up the file if the writer is dropped

    def __getstate__(self) -> dict[str, Any]:
        """For the process of ``AsyncCheckpointerType.PROCESS``, which begins the save after the earlier ones."""
        join_uploads()
        return {**vars(self), "_target": None, "_end": None}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another save, to another file if `checkpoint_id` is given, after the earlier ones of this process;
        discard a save that failed."""
        join_uploads()
        self._give_up()
        super().reset(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Check the name of the file, and wait for earlier saves to it."""
        wait_for(hdf5_path(self._path))
        if not kwargs.get("use_collectives", True):
            raise refusal(
                ValueError, "HD419", "use_collectives=False is for one file per rank; one file needs all to agree"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Check this rank's tensors, and report their host to the coordinator.

        If the last save ended before anything was written, the planner's plan of all ranks is not that of what it keeps
        here, to which it compares: the rank sends its plan again. Until torch 2.12, it compares to that of the save
        that has failed, of which not all ranks may know.
        """
        done, begun = self._own
        if not plan.usable and begun is not None:
            if torch.__version__ < "2.13":
                raise refusal(ValueError, "HD419", _CACHED)
            plan = done or plan
        self._own = done, plan if plan.usable else done
        for item in plan.items:
            if (data := item.tensor_data) is not None:
                name, properties = item.index.fqn, data.properties
                if properties.layout is not torch.strided:
                    kind = f"{properties.dtype} with layout {properties.layout}"
                    raise refusal(ValueError, "HD418", f"{name!r} is of {kind}, which cannot be stored")
                shape_and_dtype(name, (data.size, properties.dtype), self._options.window)
        return replace(plan, storage_data=host_identity())

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Lay out the file, on the coordinator, and return the place of each rank's data, unless it is as before.

        DCP does not tell the coordinator that another rank has failed. An unfinished file is removed when the writer is
        used again or dropped, at the next save to this name, which waits for this one, or when the program ends.
        """
        self._give_up()
        if any(plan.usable for plan in plans):  # else a planner keeps plans, and sends those that have changed
            kept = self._plans if len(self._plans) == len(plans) else plans
            self._plans = [new if new.usable else old for new, old in zip(plans, kept, strict=True)]
            self._planned, self._places = None, []
        self._kept = not all(plan.usable for plan in plans)
        if len(self._plans) != len(plans) or not all(plan.usable for plan in self._plans):
            raise refusal(ValueError, "HD419", _CACHED)
        if (earlier := _unfinished.pop(self._path, None)) is not None:
            earlier()
        if self._planned is None:
            self._planned = plan_file(self._plans, self._options.window)
        datasets, rows = self._planned
        self._target = Target(self._path, [*datasets, table_of(datasets)], self._options)
        laid = self._target.lay_out()
        self._end = _unfinished[self._path] = weakref.finalize(self, self._target.discard)
        places = with_tables(laid.data, self._target.datasets)
        starts = dict(zip((d.name for d in datasets), places, strict=False))
        # On one host, all ranks write into one cache. Clients of a shared file system may write back whole pages: of
        # several hosts, only the coordinator writes pages that a run of an item does not fill.
        page = laid.page if len({plan.storage_data for plan in self._plans}) > 1 else 1
        again, self._places = laid.data == self._places, laid.data
        laid = replace(laid, data=[], page=page)
        if again:
            return [replace(plan, storage_data=(laid, rank, None), usable=True) for rank, plan in enumerate(plans)]
        works = [
            (laid, rank, {index: (*starts[index.fqn], numbers) for index, numbers in mine.items()})
            for rank, mine in enumerate(rows)
        ]
        return [replace(plan, storage_data=work) for plan, work in zip(self._plans, works, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors and its rows of the tables; send values, and what is left of pages that other hosts
        write, too, to the coordinator."""
        laid, number, work = plan.storage_data
        self._own = self._own[1], None
        self._mine = self._mine if work is None else (plan.items, work)
        if self._mine is None:
            raise refusal(ValueError, "HD419", _CACHED)
        items, work = self._mine
        tensors, datasets, results, nbytes = list[WriteItem](), list[Dataset](), list[WriteResult](), 0
        for item in items:
            if (data := item.tensor_data) is not None:
                tensors.append(item)
                datasets.append(Dataset(item.index.fqn, tuple(data.size), data.properties.dtype))
            else:
                value = planner.resolve_data(item).getvalue()  # type: ignore[union-attr]
                results.append(WriteResult(item.index, len(value), b64encode(value).decode()))
        file = PartFile(self._path, laid, self._options.window)
        places = [(file, *work[item.index][:2]) for item in tensors]
        rank = RankWriter([file], datasets, places, self._options, number)
        with closing(rank):
            file.open()
            for k, item in enumerate(tensors):
                assert item.tensor_data is not None
                shard = _shard(item, planner.resolve_data(item))
                boxes = _pieces(item.tensor_data, self._options.window)
                parts = outgoing(shard, [box.relative_to(tuple(item.tensor_data.chunk.offsets)) for box in boxes])
                for row, box, piece in zip(work[item.index][2].tolist(), boxes, parts, strict=True):
                    rank.put(k, row, box, piece)
                    if rank.problem is not None:
                        raise FileError(rank.problem)
                nbytes += shard.nbytes
            if tensors:  # one result for all of them
                results.append(WriteResult(tensors[0].index, nbytes, (rank.write_table(), file.edges.take())))
        sync(Path(laid.path))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Give the file its name, on the coordinator, complete and on the disk."""
        assert self._target is not None
        buffer, values = io.BytesIO(), {}
        torch.save(metadata.planner_data, buffer)
        written, edges = [], []
        for of in (of for mine in results for of in mine):
            if isinstance(of.storage_data, str):
                values[of.index.fqn] = of.storage_data
            else:
                written.append(of.storage_data[0])
                edges += of.storage_data[1]
        checkpoint = json.dumps({"values": values, "planner_data": b64encode(buffer.getbuffer()).decode()})
        try:
            listed = {name: getattr(of, "chunks", []) for name, of in metadata.state_dict_metadata.items()}
            if self._kept and listed != _chunks(self._plans):
                raise refusal(ValueError, "HD419", _CACHED)
            self._target.complete(written, checkpoint.encode(), edges)
        finally:
            self._give_up()
        metadata.storage_meta = self.storage_meta()

    def _give_up(self) -> None:
        """Discard the file that is being written, unless it is complete; its name keeps the old one."""
        end, self._end, self._target = self._end, None, None
        if end is not None:
            _unfinished.pop(self._path, None)
            end()


def host_identity() -> str:
    """Return the identity of this host, which all processes share that use its cache of files."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


_CACHED = (
    "the planner keeps plans (enable_plan_caching=True) of a save by another writer, or by another class of planners; "
    "with each class of planners, use one HDF5Writer for all saves, with checkpoint_id="
)


def _chunks(plans: Sequence[SavePlan]) -> dict[str, list[ChunkStorageMetadata]]:
    """By name, the chunks of the items of all ranks, as torch lists them in its metadata; none for a value."""
    found: dict[str, list[ChunkStorageMetadata]] = {}
    for item in (item for plan in plans for item in plan.items):
        found.setdefault(item.index.fqn, []).extend([] if item.tensor_data is None else [item.tensor_data.chunk])
    return found


def _pieces(data: TensorWriteData, window: int) -> list[Box]:
    """The boxes of the whole tensor in which the data of an item are written."""
    limit = piece_limit(window, data.properties.dtype.itemsize)
    return list(layout.boxes(Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes)), limit))


def plan_file(plans: Sequence[SavePlan], window: int) -> tuple[list[Dataset], list[dict[MetadataIndex, Ints]]]:
    """Plan a file for the items of all ranks.

    Returns:
        The tensors of the file; and for each rank, by item, the rows of its pieces in the table of the tensor.

    Raises:
        ValueError: a name that a file cannot have; or shards that do not agree, overlap, or leave something out.
    """
    specs: dict[str, tuple[Shape, torch.dtype]] = {}
    pieces: dict[str, list[Box]] = {}
    items: list[tuple[int, MetadataIndex, int, int]] = []
    for rank, plan in enumerate(plans):
        for item in plan.items:
            if (data := item.tensor_data) is None:
                continue
            name, spec = item.index.fqn, (tuple(data.size), data.properties.dtype)
            if specs.setdefault(name, spec) != spec:
                raise refusal(ValueError, "HD419", f"{name!r} has different shapes or dtypes in the plans of the ranks")
            held = pieces.setdefault(name, [])
            first = len(held)
            held += _pieces(data, window)
            items.append((rank, item.index, first, len(held)))
    flatten(dict.fromkeys(specs))  # checks the names
    datasets, rows = [], dict[str, Ints]()
    for name, (shape, dtype) in specs.items():
        listed = Listed.of(pieces[name], shape)
        if not listed.tile():
            what = f"the shards of the ranks are not the tensor of shape {shape}, once"
            raise refusal(ValueError, "HD213", f"{name!r}: {what}")
        ordered, rows[name] = listed.ascending()
        datasets.append(Dataset(name, shape, dtype, len(listed), ordered.are_runs))
    found: list[dict[MetadataIndex, Ints]] = [{} for _ in plans]
    for rank, index, first, end in items:
        found[rank][index] = rows[index.fqn][first:end]
    return datasets, found


def _shard(item: WriteItem, x: Any) -> Tensor:
    """The tensor of an item, contiguous or not; a ValueError if it is not what was planned."""
    assert item.tensor_data is not None
    name, sizes, dtype = item.index.fqn, tuple(item.tensor_data.chunk.sizes), item.tensor_data.properties.dtype
    shard = local.ready(x, repr(name))
    if (tuple(shard.shape), shard.dtype) != (sizes, dtype):
        what = f"{shard.dtype} of shape {tuple(shard.shape)}, but was planned as {dtype} of {sizes}"
        raise refusal(ValueError, "HD419", f"{name!r} is {what}")
    return shard
