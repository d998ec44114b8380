"""A folder that torch.distributed.checkpoint (DCP) has written: ``.metadata``, a pickle, and files of parts of tensors.

The pickle is read without running any code that is in it.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcdist.errors import FileError, reason
from hpcdist.formats import torch_files
from hpcdist.formats.contents import Contents, Format, Identity, Parts, Slices, Stored, identity
from hpcdist.formats.paths import check_regular
from hpcdist.formats.plain import Raw
from hpcdist.layout import Box

__all__ = ["DCP", "NAME", "part_of"]

NAME = ".metadata"

_METADATA = "torch.distributed.checkpoint.metadata"
_CLASSES = {
    _METADATA: {
        *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
        *("TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed._shard.sharded_tensor.metadata": {"TensorProperties", "MEM_FORMAT_ENCODING"},  # torch < 2.3
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
}


class _Dcp(Format):
    def describe(self, path: str) -> Contents:
        from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex, TensorStorageMetadata

        held, tensors, values = _metadata(Path(path) / NAME), {}, {}
        files = {os.path.join(path, NAME): identity(os.path.join(path, NAME))}
        for key, entry in held.state_dict_metadata.items():
            if isinstance(entry, BytesStorageMetadata):
                values[key] = "a value"
                continue
            if not isinstance(entry, TensorStorageMetadata):
                raise FileError("HD511", f"{path}: {key}: is stored in a way that is not known")
            places = [held.storage_data.get(MetadataIndex(key, chunk.offsets)) for chunk in entry.chunks]
            tensors[key] = _stored(path, key, entry, places, files)
        return Contents(path, "DCP folder", tensors, files, {}, values)

    def by_library(self, path: str, stored: Stored) -> Slices:
        raise NotImplementedError  # its tensors are in parts


DCP = _Dcp()


def _metadata(path: Path) -> Any:
    """The description of a folder; a FileError if it is missing or damaged."""
    from torch.distributed.checkpoint.metadata import Metadata

    check_regular(str(path))
    try:
        with path.open("rb") as file:
            held = _Unpickler(file).load()
    except Exception as error:  # whatever a damaged pickle makes of it
        raise FileError("HD402", f"{path}: cannot be read: {reason(error)}") from error
    if not isinstance(held, Metadata):
        raise FileError("HD402", f"{path}: cannot be read: a pickle that torch.distributed.checkpoint did not write")
    return held


def _stored(path: str, name: str, entry: Any, places: Sequence[Any], files: dict[str, Identity]) -> Stored:
    """A tensor of a folder; adds its files to `files`."""
    shape, used, rows = tuple(entry.size), list[str](), []
    for chunk, place in zip(entry.chunks, places, strict=True):
        if place is None:
            what = f"{NAME} does not say where its part at {tuple(chunk.offsets)} is"
            raise FileError("HD510", f"{path}: {name}: incomplete: {what}")
        if place.transform_descriptors:
            how = ", ".join(map(str, place.transform_descriptors))
            raise FileError("HD511", f"{path}: {name}: is stored through {how}, which is not read here")
        relative = PurePosixPath(place.relative_path)
        if relative.is_absolute() or ".." in relative.parts:
            raise FileError("HD511", f"{path}: {name}: its data are in {relative}, outside the folder")
        file, start, nbytes = os.path.join(path, relative), int(place.offset), int(place.length)
        if file not in files:
            files[file] = identity(file)
        if start < 0 or nbytes <= 0 or start + nbytes > files[file].size:
            raise FileError("HD404", f"{file}: truncated: {name} ends after the end of the file")
        if file not in used:
            used.append(file)
        rows.append((used.index(file), start, nbytes))
    offsets, shapes = (
        np.array(corner, np.int64).reshape(len(rows), len(shape))
        for corner in ([chunk.offsets for chunk in entry.chunks], [chunk.sizes for chunk in entry.chunks])
    )
    parts = Parts(used, offsets, shapes, np.array(rows, np.int64).reshape(-1, 3))
    found = Stored(name, shape, entry.properties.dtype, parts=parts)
    if not found.part_boxes.tile():
        raise FileError("HD510", f"{path}: incomplete: the parts of {name} are not the tensor of shape {shape}, once")
    return found


class _Unpickler(pickle.Unpickler):
    """Makes objects of the classes above alone; in place of any other, one that holds nothing and does nothing."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        return _Other


class _Other:
    """In place of an object of another class, such as what a planner keeps."""

    def __new__(cls, *args: Any, **options: Any) -> _Other:
        return object.__new__(cls)

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def _ignore(self, *args: Any) -> None:
        pass

    __setstate__ = __setitem__ = append = extend = _ignore


def part_of(path: str, fd: int, start: int, nbytes: int, box: Box, dtype: torch.dtype) -> Raw | Tensor:
    """A part of a tensor in an archive of torch.save within an open file: where its bytes lie, or the part itself.

    Args:
        path: of the file, for messages.

    Raises:
        FileError: it is not the part that is expected.
    """
    view: Any = _View(fd, start, nbytes)
    members = torch_files.members_of(path, view, fd, start, nbytes)
    x = torch_files.load(path, view if members is None else members.bare, map_location="meta")
    if not isinstance(x, Tensor):
        raise FileError("HD402", f"{path}: cannot be read: its part at {start:,} is not a tensor")
    if (tuple(x.shape), x.dtype) != (box.shape, dtype):
        what = f"{x.dtype} of shape {tuple(x.shape)}, where {dtype} of {box.shape} is expected"
        raise FileError("HD510", f"{path}: holds {what}")
    raw = None if members is None else torch_files.raw_of(path, x.detach(), members, start)
    if raw is not None:
        return raw
    whole: Tensor = torch_files.load(path, view, map_location="cpu")
    return whole.detach().resolve_conj().resolve_neg()


class _View(io.RawIOBase):
    """A part of an open file, as a file to read. (torch's own does not seek from its end.)"""

    def __init__(self, fd: int, start: int, nbytes: int) -> None:
        self._fd, self._start, self._end, self._at = fd, start, nbytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._end)[whence]
        if self._at < 0:
            raise OSError("before the beginning")
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = os.preadv(self._fd, [memoryview(buffer)[: max(0, self._end - self._at)]], self._start + self._at)
        self._at += count
        return count
