"""The formats of torch: the files of torch.save, and the folders of torch.distributed.checkpoint (DCP).

torch itself finds the tensors of a file, without their data and without running code in the file.

Each dense tensor of an archive is then read from its place a box at a time. torch reads tensors with strides. Files of
torch's older format, compressed ones and those of the other byte order are refused.

A folder is ``.metadata``, a pickle, which is read without running code that is in it, and files of parts of tensors.
"""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import re
import warnings
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from math import prod
from operator import index
from pathlib import Path, PurePosixPath
from pickle import UnpicklingError
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from hpcdist import torch_names
from hpcdist.errors import FileError
from hpcdist.formats.archives import members
from hpcdist.formats.contents import Contents, FileParts, Format, Identity, Slices, Stored, identity
from hpcdist.formats.paths import file_errors, utf8_path
from hpcdist.formats.plain import Raw
from hpcdist.layout import Box
from hpcdist.layout.box import Listed
from hpcdist.process.limit import ended_at_deadline

METADATA = ".metadata"  # of a folder

_MOST_NAMES, _DEEPEST = 2**20, 100  # of what dicts hold; of dicts within each other
_ALIGNMENT = 64  # bytes, of what torch.save writes
_NUMBER = re.compile(r"/data/(\d+)$")
_SIZES = {"PUT", "BINPUT", "LONG_BINPUT", "GET", "BINGET", "LONG_BINGET", "FRAME"}
_AGAIN = ": torch.save(torch.load(FILE), FILE) makes one that can be read"


class _Pt(Format):
    def describe(self, path: str) -> Contents:
        at, held = identity(path), None
        with open(path, "rb") as file:
            places = _places(path, file)
        with suppress(FileError):  # damaged, or with a tensor that cannot be on "meta"
            held = _load(path, map_location="meta")
        found, others = _tensors(path, _mapped(path) if held is None else held)
        tensors = {}
        for key, x in found.items():
            kind = "nested" if x.is_nested else "quantized" if x.is_quantized else str(x.layout).removeprefix("torch.")
            if kind != "strided":
                others[key] = f"a {kind} tensor"
                continue
            raw = None if held is None else _raw_of(path, key, x, places)
            tensors[key] = Stored(key, tuple(x.shape), x.dtype, raw)
        return Contents(path, ".pt file", tensors, {path: at}, left_out=others)

    def by_library(self, path: str, stored: Stored) -> Slices:
        def read(box: Box) -> Tensor:  # loaded for each box, since what is mapped stays in memory
            some = _tensors(path, _mapped(path))[0][stored.name][box.slices()]
            return some.resolve_conj().resolve_neg().contiguous()

        return read


PT = _Pt()


def _load(path: str, file: IO[bytes] | None = None, **how: Any) -> Any:
    """Load a file with torch, without running code that is in it; a FileError if there is some, or it is damaged.

    Args:
        file: what is read in its place.
    """
    with file_errors(path), ended_at_deadline(), warnings.catch_warnings(), utf8_path(path) as known:
        warnings.simplefilter("ignore")  # of a pickle that torch did not write
        if file is not None:
            file.seek(0)
        try:
            return torch.load(file or known, weights_only=True, **how)
        except UnpicklingError as error:  # torch advises to run the code
            found = re.search(r"GLOBAL (\S+) (?:was not|whose)", str(error))
            what = f"it holds Python objects ({found[1]}), which are not loaded" if found else "its pickle is damaged"
            raise FileError("HD402", f"{path}: cannot be read: {what}") from error


def _mapped(path: str) -> Any:
    """Return the contents of a file, whose data are mapped."""
    return _load(path, map_location="cpu", mmap=True)


def _places(path: str, file: IO[bytes]) -> dict[int, int]:
    """Return the first byte of each member of an archive, and its number of bytes.

    Raises:
        FileError: not an archive of torch.save, or truncated; or its data are not stored as they are in memory, or
            torch may look for them elsewhere.
    """
    places, numbers, texts = {}, [], {}
    if file.read(2) != b"PK":
        raise FileError("HD402", f"{path}: cannot be read: not an archive of torch.save{_AGAIN}")
    with file_errors(path), zipfile.ZipFile(file) as archive:
        held = members(path, archive)
        if any("/code/" in info.filename for info, _ in held):
            what = "it holds a TorchScript module, not tensors: torch.save(torch.jit.load(FILE).state_dict(), NEW)"
            raise FileError("HD511", f"{path}: cannot be read: {what} makes one that can be read")
        if any(info.compress_type or info.flag_bits & 1 for info, _ in held):
            raise FileError("HD511", f"{path}: cannot be read: it is compressed{_AGAIN}")
        for info, start in held:
            places[start] = info.file_size
            if found := _NUMBER.search(info.filename):
                numbers.append((start, int(found[1])))
            elif "/data/" not in info.filename:
                texts[info.filename] = archive.read(info)
    ends = {name.rpartition("/")[2]: text for name, text in texts.items()}
    # With this member, torch calculates places from what torch.save writes, which is wrong if the archive was packed
    # again; it finds a wrong one, or none, only if some are not aligned, or in another order.
    order = [number for _, number in sorted(numbers)]
    if ".format_version" in ends and (order != sorted(order) or any(start % _ALIGNMENT for start, _ in numbers)):
        raise FileError("HD511", f"{path}: cannot be read: it was packed again{_AGAIN}")
    if ends.get("byteorder", b"little") != b"little":
        raise FileError("HD511", f"{path}: cannot be read: it is of the other byte order{_AGAIN}")
    return places


def _raw_of(path: str, name: str, x: Tensor, places: Mapping[int, int], base: int = 0) -> Raw | None:
    """Where the bytes of a tensor lie that was loaded on "meta" from an archive; None if only torch can read it, as one
    with strides.

    Args:
        base: first byte of the archive in the file.
    """
    storage = x.untyped_storage()
    start = torch_names.offset_in_file(storage) or 0
    if start not in places:
        return None
    first, end = int(x.storage_offset()), 0
    if x.numel():
        end = first + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) + 1
    if max(end * x.itemsize, storage.nbytes()) > places[start]:  # torch itself may read beyond the member
        raise FileError("HD404", f"{path}: cannot be read: its tensor {name or 'there'} is larger than its data")
    if not x.is_contiguous() or x.is_conj() or x.is_neg():
        return None
    return Raw(path, base + start + first * x.itemsize, tuple(x.shape), x.dtype)


def _tensors(path: str, held: object) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of nested dicts by their path: ``{"model": {"w": x}}`` -> ``{"model/w": x}``; of one alone, by "".

    Returns:
        Them; and what else the dicts hold: a description by its path.
    """
    if isinstance(held, Tensor):
        return {"": held.detach()}, {}
    if not isinstance(held, dict):
        raise FileError("HD408", f"{path}: holds {type(held).__name__}, expected a tensor or a dict of tensors")
    found: dict[str, Tensor] = {}
    others: dict[str, str] = {}
    count = 0

    def add(prefix: str, part: dict[Any, Any], above: frozenset[int]) -> None:
        nonlocal count
        count += 1 + len(part)
        if count > _MOST_NAMES or len(above) > _DEEPEST:  # a forged one: each dict twice in the one above
            raise FileError("HD402", f"{path}: cannot be read: it holds more than {_MOST_NAMES:,} dicts and tensors")
        within = above | {id(part)}
        for key, value in part.items():
            name = f"{prefix}{key}"
            if isinstance(value, Tensor):
                if name in found:
                    raise FileError("HD402", f"{path}: cannot be read: two of its tensors have the name {name!r}")
                found[name] = value.detach()
            elif not isinstance(value, dict):
                inside = isinstance(value, list | tuple | set) and any(isinstance(x, Tensor) for x in value)
                others[name] = f"a value: {type(value).__name__}" + (" of tensors" if inside else "")
            elif id(value) not in within:  # a forged one may hold itself
                add(f"{name}/", value, within)

    add("", held, frozenset())
    return found, others


_MODULE = "torch.distributed.checkpoint.metadata"
_CLASSES = {
    _MODULE: {
        *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
        *("TensorProperties", "StorageMeta"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed._shard.sharded_tensor.metadata": {"TensorProperties"},  # torch < 2.3
}


class _Dcp(Format):
    def describe(self, path: str) -> Contents:

        name, found = os.path.join(path, METADATA), dict[str, Stored | str]()
        files = {name: identity(name)}  # before it is read
        held = _metadata(name)
        for key, entry in held.state_dict_metadata.items():
            with file_errors(f"{path}: {key}"):
                found[key] = _stored(path, key, entry, held.storage_data, files)
        return Contents.of(path, "DCP folder", found, files)


DCP = _Dcp()


def _metadata(path: str) -> Any:
    """The description of a folder; a FileError if it is damaged."""
    from torch.distributed.checkpoint.metadata import Metadata

    with file_errors(path), ended_at_deadline():  # its keys can be such that their hashes take for ever
        content = Path(path).read_bytes()
        _check_pickle(content)
        held = _Unpickler(io.BytesIO(content)).load()
        if not isinstance(held, Metadata):
            raise ValueError("a pickle that torch.distributed.checkpoint did not write")
        if not isinstance(held.state_dict_metadata, dict) or not isinstance(held.storage_data, dict):
            raise ValueError("its pickle is damaged")
    return held


def _check_pickle(content: bytes) -> None:
    """Raise a ValueError for a pickle with a number in it, such as of a place in the memo, that its length cannot give:
    pickle would take memory for that, and hold Python's lock meanwhile."""
    for code, argument, _ in pickletools.genops(content):  # refuses lengths beyond the end
        if isinstance(argument, int) and code.name in _SIZES and not 0 <= argument <= len(content):
            raise ValueError(f"its pickle is damaged: {code.name} {argument:,} in {len(content):,} bytes")


def _stored(path: str, name: str, entry: Any, where: Mapping[Any, Any], files: dict[str, Identity]) -> Stored | str:
    """A tensor of a folder, whose files are added to `files`; or what a value is."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex, TensorStorageMetadata

    if isinstance(entry, BytesStorageMetadata):
        return "a value"
    if not isinstance(entry, TensorStorageMetadata) or not isinstance(entry.properties.dtype, torch.dtype):
        raise FileError("HD511", f"{path}: {name}: is stored in a way that is not known")
    shape, dtype, used, rows = tuple(map(index, entry.size)), entry.properties.dtype, list[str](), []
    for chunk in entry.chunks:
        corner, place = tuple(chunk.offsets), where.get(_sealed(MetadataIndex)(name, chunk.offsets))
        if place is None:
            what = f"{METADATA} does not say where its part at {corner} is"
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
        if prod(map(index, chunk.sizes)) * dtype.itemsize > nbytes:
            raise FileError("HD404", f"{path}: {name}: is damaged: its part at {corner} is larger than its data")
        if file not in used:
            used.append(file)
        rows.append((used.index(file), start, nbytes))
    boxes = Listed.of([Box(chunk.offsets, chunk.sizes) for chunk in entry.chunks], shape)
    if not boxes.tile():
        raise FileError("HD510", f"{path}: incomplete: the parts of {name} are not the tensor of shape {shape}, once")
    return Stored(name, shape, dtype, parts=FileParts(used, boxes, np.array(rows, np.int64).reshape(-1, 3)))


class _Unpickler(pickle.Unpickler):
    """Makes objects of the classes above alone; in place of any other, one that holds nothing and does nothing."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _CLASSES.get(module, ()):
            return _sealed(super().find_class(module, name))
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        return _Other


@cache
def _sealed(of: type[Any]) -> type[Any]:
    """A subclass that is restored as pickle would, except that its method keeps a pickle from changing the class."""

    def restore(self: Any, state: Any) -> None:
        vars(self).update(state if isinstance(state, dict) else {"dtype": state[0]})  # a tuple is of TensorProperties

    return type(of.__name__, (of,), {"__setstate__": restore})


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
    places = _places(path, view)
    x = _load(path, view, map_location="meta")
    if not isinstance(x, Tensor):
        raise FileError("HD402", f"{path}: cannot be read: its part at {start:,} is not a tensor")
    if (tuple(x.shape), x.dtype) != (box.shape, dtype):
        what = f"{x.dtype} of shape {tuple(x.shape)}, where {dtype} of {box.shape} is expected"
        raise FileError("HD510", f"{path}: holds {what}")
    raw = _raw_of(path, "", x.detach(), places, start)
    if raw is not None:
        return raw
    whole: Tensor = _load(path, view, map_location="cpu")
    return whole.detach().resolve_conj().resolve_neg()


class _View(io.RawIOBase):
    """A part of an open file, as a file to read. (torch's own does not seek from its end.)"""

    def __init__(self, fd: int, start: int, nbytes: int) -> None:
        self._fd, self._start, self._end, self._at = fd, start, nbytes, 0

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._end)[whence]
        if self._at < 0:
            raise OSError("before the beginning")
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = os.preadv(self._fd, [memoryview(buffer)[: max(0, self._end - self._at)]], self._start + self._at)
        self._at += count
        return count
