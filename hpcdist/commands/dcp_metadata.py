"""The file ``.metadata`` of a folder that torch.distributed.checkpoint (DCP) has written: a pickle, read without
running any code that is in it."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from hpcdist.errors import FileError, reason
from hpcdist.files.regular import check_regular

__all__ = ["NAME", "Chunk", "Described", "read"]

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


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor: an archive of torch.save within a file.

    Attributes:
        offset, shape: the box of the tensor.
        file: its name in the folder.
        start, nbytes: of the archive.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    start: int
    nbytes: int


@dataclass(frozen=True)
class Described:
    """What a folder holds.

    Attributes:
        tensors: by name, the shape, the dtype, and the chunks.
        values: names of what is not a tensor.
    """

    tensors: dict[str, tuple[tuple[int, ...], torch.dtype, list[Chunk]]]
    values: list[str]


def read(folder: Path) -> Described:
    """Read what a folder holds, without the data.

    Raises:
        FileError: no such file, damaged, or stored in a way that is not known.
    """
    path = folder / NAME
    check_regular(str(path))
    try:
        with path.open("rb") as file:
            held = _Unpickler(file).load()
        if not isinstance(held, Metadata):
            raise FileError(
                "HD402", f"{path}: cannot be read: a pickle that torch.distributed.checkpoint did not write"
            )
        return _described(str(folder), held.state_dict_metadata, held.storage_data)
    except FileError:
        raise
    except Exception as error:  # whatever a damaged pickle makes of it
        raise FileError("HD402", f"{path}: cannot be read: {reason(error)}") from error


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

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, item: Any) -> None:
        pass

    def extend(self, items: Any) -> None:
        pass


def _described(folder: str, entries: dict[str, Any], places: dict[MetadataIndex, Any]) -> Described:
    tensors, values = {}, []
    for name, entry in entries.items():
        if isinstance(entry, BytesStorageMetadata):
            values.append(name)
            continue
        if not isinstance(entry, TensorStorageMetadata):
            raise FileError("HD511", f"{folder}: {name}: is stored in a way that is not known")
        chunks = [
            _chunk(folder, name, chunk.offsets, chunk.sizes, places.get(MetadataIndex(name, chunk.offsets)))
            for chunk in entry.chunks
        ]
        tensors[name] = tuple(entry.size), entry.properties.dtype, chunks
    return Described(tensors, values)


def _chunk(folder: str, name: str, offset: Sequence[int], shape: Sequence[int], place: Any) -> Chunk:
    if place is None:
        raise FileError(
            "HD510", f"{folder}: {name}: incomplete: {NAME} does not say where its part at {tuple(offset)} is"
        )
    if place.transform_descriptors:
        how = ", ".join(map(str, place.transform_descriptors))
        raise FileError("HD511", f"{folder}: {name}: is stored through {how}, which is not read here")
    file = PurePosixPath(place.relative_path)
    if file.is_absolute() or ".." in file.parts:
        raise FileError("HD511", f"{folder}: {name}: its data are in {file}, outside the folder")
    return Chunk(tuple(offset), tuple(shape), str(file), int(place.offset), int(place.length))
