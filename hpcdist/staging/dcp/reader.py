"""HDF5Reader: DCP's storage reader."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from hpcdist import layout
from hpcdist.errors import FileError, reason, refusal
from hpcdist.formats.contents import Contents, Stored
from hpcdist.formats.hdf5 import HDF5
from hpcdist.layout import Box
from hpcdist.staging.dcp.record import Record, bytes_of, value_of
from hpcdist.staging.in_flight import wait_for
from hpcdist.staging.reader import OpenFiles, TensorReader
from hpcdist.staging.writer import WINDOW
from hpcdist.tensors.storage import written

__all__ = ["HDF5Reader"]

_NO_PLANNER = ["json", None]


class HDF5Reader(StorageReader):
    """Read a checkpoint of ``torch.distributed.checkpoint`` from an HDF5 file, on any number of ranks.

    For ``dcp.load``. Every rank reads the boxes of its own shards straight into their memory. The file may be one of
    :class:`HDF5Writer`, of :func:`hpcdist.staging.save`, or of any other program: its datasets are the tensors.

    Args:
        path: of the file, seen by all ranks; ``checkpoint_id=`` of dcp.load replaces it.
        verify: True: check every piece of which something is read against its checksum; None: those that are read
            whole; False: none.
        window: bytes of host memory that a rank may use besides the state.
        allow_pickle: whether to load values that are stored as pickles of more than what torch considers safe. A pickle
            can run any code.

    Raises:
        CheckpointException: from dcp.load, on every rank, naming the ranks on which something failed: no such file,
            incomplete, damaged, a name or shape that differs from the state's.

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
        super().__init__()
        if window < 1:
            raise refusal(ValueError, "HD419", f"window is {window}, expected a number of bytes >= 1")
        self._path = os.fsdecode(path)
        self._verify, self._window, self._allow_pickle = verify, window, allow_pickle
        self._contents: Contents | None = None
        self._record = Record({}, _NO_PLANNER)

    @property
    def checkpoint_id(self) -> str:
        """The path of the file."""
        return self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return Path(os.fsdecode(checkpoint_id)).suffix in (".h5", ".hdf5")

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._contents = None
        if checkpoint_id:
            self._path = os.fsdecode(checkpoint_id)

    def read_metadata(self) -> Metadata:
        """List what the file holds. Every tensor is one chunk, of which any box can be read."""
        wait_for(self._path)
        contents = self._contents = HDF5.describe(self._path)
        text = contents.checkpoint
        self._record = Record({}, _NO_PLANNER) if text is None else Record.decode(self._path, text)
        found: dict[str, Any] = {name: _metadata(stored) for name, stored in contents.tensors.items()}
        found |= dict.fromkeys(self._record.values, BytesStorageMetadata())
        planner_data = value_of(self._path, "planner_data", self._record.planner_data, self._allow_pickle)
        return Metadata(found, planner_data=planner_data, storage_meta=StorageMeta(checkpoint_id=self._path))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's items, tensors in the order of the file."""
        contents = self._contents
        assert contents is not None
        tensors = [item for item in plan.items if item.type == LoadItemType.TENSOR]
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                name = item.storage_index.fqn
                value = bytes_of(self._path, name, self._record.values[name], self._allow_pickle)
                planner.load_bytes(item, value)
        with self._opened(contents) as files:
            readers = {
                name: TensorReader(files, contents.tensors[name], self._verify)
                for name in {item.storage_index.fqn for item in tensors}
            }
            for item in sorted(tensors, key=lambda item: _place(readers[item.storage_index.fqn].stored)):
                target = planner.resolve_tensor(item).detach()
                self._read(readers[item.storage_index.fqn], item, target)
                planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @contextmanager
    def _opened(self, contents: Contents) -> Iterator[OpenFiles]:
        with OpenFiles(contents) as files:
            try:
                files.fd(self._path)
                yield files
            except OSError as error:
                raise FileError("HD402", f"{self._path}: cannot be read: {reason(error)}") from error

    def _read(self, reader: TensorReader, item: ReadItem, target: Tensor) -> None:
        """Read a box into a tensor of its shape, on any device and of any dtype."""
        stored, box = reader.stored, Box(tuple(item.storage_offsets), tuple(item.lengths))
        if tuple(target.shape) != box.shape:
            raise refusal(
                ValueError, "HD423", f"{stored.name!r}: has shape {tuple(target.shape)}, where {box.shape} was planned"
            )
        lazy = target.is_conj() or target.is_neg()  # its memory holds other values than it shows
        if target.dtype == stored.dtype and (target.is_cpu or target.is_cuda) and not lazy:
            written(target, None)
            reader.read(box, target, self._window)
            return
        for part in layout.boxes(box, max(1, self._window // 2 // stored.dtype.itemsize)):
            x = torch.empty(part.shape, dtype=stored.dtype, device="cpu")
            reader.read(part, x, self._window // 2)
            target[part.slices(box.offset)].copy_(x)


def _metadata(stored: Stored) -> TensorStorageMetadata:
    size = torch.Size(stored.shape)
    whole = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
    return TensorStorageMetadata(TensorProperties(dtype=stored.dtype), size, [whole])


def _place(stored: Stored) -> int:
    return 0 if stored.raw is None else stored.raw.offset
