"""Checkpoints as the commands read them: all tensors of a folder, or of a file, each of which may lie in parts in
several files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcdist.commands import checkpoints, dcp_metadata
from hpcdist.errors import FileError, InputError, reason
from hpcdist.files import safetensors
from hpcdist.files.raw import Ints, Raw, read_at
from hpcdist.files.regular import check_regular, open_regular
from hpcdist.layout import Box
from hpcdist.layout.overlaps import disjoint
from hpcdist.staging.boxes import Corners, Listed
from hpcdist.staging.catalog import Catalog, describe
from hpcdist.staging.dcp.record import Record
from hpcdist.staging.reader import DatasetReader
from hpcdist.staging.sharded_files import INDEX, PARTS, check_index, files_of, is_sharded
from hpcdist.tensors.storage import DTYPES

__all__ = ["Checkpoint", "Scattered", "find", "opened"]

_DCP, _SHARDED, _FILE, _HDF5 = "DCP folder", "safetensors folder", "safetensors file", "HDF5 file"


@dataclass(frozen=True)
class Scattered:
    """A tensor in parts.

    Attributes:
        name, shape, dtype: of the tensor.
        offsets, shapes: the boxes of its parts, a row for each.
        places: for each part the number of its file, its first byte there, and the length of the archive that holds
            it, 0 for plain bytes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offsets: Ints
    shapes: Ints
    places: Ints

    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Checkpoint:
    """What a folder, or a file, holds.

    Attributes:
        path, kind: of the folder or file.
        files: path and size of each file.
        tensors: all of them, in the order of the files' data.
        left_out: names of what is not a tensor.
        text: of .safetensors files, by name.
        catalog: of an HDF5 file, which may be stored in any way; its tensors' parts are not listed then.
    """

    path: str
    kind: str
    files: list[tuple[str, int]]
    tensors: list[Scattered]
    left_out: list[str] = field(default_factory=list)
    text: dict[str, str] = field(default_factory=dict)
    catalog: Catalog | None = None

    def nbytes(self) -> int:
        return sum(x.nbytes() for x in self.tensors)

    def fingerprint(self) -> str:
        """A text that differs once the files are changed."""
        return repr([(path, size, os.stat(path).st_mtime_ns) for path, size in self.files])


def find(path: str) -> Checkpoint:
    """Describe a checkpoint, without its data.

    Raises:
        FileError: none, damaged, incomplete, or of a kind that is not read.
    """
    if os.path.isdir(path) and (Path(path) / dcp_metadata.NAME).exists():
        return _dcp(Path(path))
    if is_sharded(path):
        return _safetensors(path, _SHARDED, *files_of(path))
    if path.endswith(safetensors.SUFFIX):
        return _safetensors(path, _FILE, [path])
    if path.endswith(".h5"):
        return _hdf5(path)
    raise FileError("HD501", f"{path}: expected a checkpoint: a folder, {INDEX}, {safetensors.SUFFIX} or .h5")


def _dcp(folder: Path) -> Checkpoint:
    found = dcp_metadata.read(folder)
    files: dict[str, int] = {}
    tensors = []
    for name, (shape, dtype, chunks) in found.tensors.items():
        parts = [(c.offset, c.shape, (files.setdefault(c.file, len(files)), c.start, c.nbytes)) for c in chunks]
        tensors.append(_scattered(str(folder), name, shape, dtype, parts))
    sizes = _sizes(str(folder / name) for name in files)
    for x in tensors:
        _check_ends(x, sizes)
    return Checkpoint(str(folder), _DCP, sizes, tensors, found.values)


def _safetensors(path: str, kind: str, files: Sequence[str], where: dict[str, str] | None = None) -> Checkpoint:
    """The tensors of several files; where there is an index, `where`, those that it names.

    What DCP has not consolidated are parts of tensors: each file says where its own belong.
    """
    parts: dict[str, list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, int, int]]]] = {}
    dtypes: dict[str, torch.dtype] = {}
    text: dict[str, str] = {}
    others: list[str] = []
    for k, file in enumerate(files):
        held, own = safetensors.tensors_in(file)
        offsets = _offsets(file, own)
        text |= own
        for name, raw in held.items():
            if where is not None and where.get(name) != file:
                others.append(name)
                continue
            if name in parts and (offsets is None or dtypes[name] != raw.dtype):
                raise FileError("HD510", f"{file}: {name} is in another file of the folder, too")
            dtypes[name] = raw.dtype
            offset = (0,) * len(raw.shape) if offsets is None else offsets[name]
            parts.setdefault(name, []).append((offset, raw.shape, (k, raw.offset, 0)))
    check_index(path, where, parts)
    tensors = []
    for name, of in parts.items():
        ends = zip(*([o + n for o, n in zip(offset, shape, strict=True)] for offset, shape, _ in of), strict=True)
        tensors.append(_scattered(path, name, tuple(map(max, ends)), dtypes[name], of))
    text.pop(PARTS, None)
    return Checkpoint(path, kind, _sizes(files), tensors, others, text)


def _offsets(file: str, text: dict[str, str]) -> dict[str, tuple[int, ...]] | None:
    """Where the parts of tensors belong that DCP has put into a file; None of a file that holds whole tensors."""
    if PARTS not in text:
        return None
    try:
        return {name: tuple(map(int, of["saved_offsets"])) for name, of in json.loads(text[PARTS]).items()}
    except Exception as error:
        raise FileError("HD402", f"{file}: cannot be read: {PARTS}: {reason(error)}") from error


def _hdf5(path: str) -> Checkpoint:
    catalog = describe(path)
    catalog.require()
    left_out = [] if catalog.checkpoint is None else [*Record.decode(path, catalog.checkpoint).values]
    tensors = [_scattered(path, s.name, s.shape, s.dtype, None) for s in catalog.datasets.values()]
    return Checkpoint(path, _HDF5, _sizes([path]), tensors, left_out, catalog=catalog)


def _scattered(path: str, name: str, shape: tuple[int, ...], dtype: torch.dtype, parts: Any) -> Scattered:
    """A tensor in these parts, (offset, shape, place); None of one that is not listed; a FileError if they are not
    the tensor."""
    if dtype not in DTYPES:
        raise FileError("HD503", f"{path}: {name}: holds {dtype}, which cannot be moved")
    boxes = [Box(offset, extents) for offset, extents, _ in parts or ()]
    filled = [box for box in boxes if box.size()]
    whole = sum(box.size() for box in filled) == prod(shape) and all(box.is_in(shape) for box in filled)
    if parts is not None and not (whole and disjoint(filled)):
        raise FileError("HD510", f"{path}: incomplete: the parts of {name} are not the tensor of shape {shape}, once")
    rows = (-1, len(shape))
    offsets, extents = (np.array([box[k] for box in boxes], np.int64).reshape(rows if shape else (len(boxes), 0))
                        for k in (0, 1))  # fmt: skip
    return Scattered(name, shape, dtype, offsets, extents, np.array([p for *_, p in parts or ()], np.int64))


def _sizes(files: Iterable[str]) -> list[tuple[str, int]]:
    return [(file, check_regular(file).st_size) for file in files]


def _check_ends(x: Scattered, files: Sequence[tuple[str, int]]) -> None:
    for k, start, nbytes in x.places.tolist():
        if start < 0 or nbytes <= 0 or start + nbytes > files[k][1]:
            raise FileError("HD404", f"{files[k][0]}: truncated: {x.name} ends after the end of the file")


Read = Callable[[int, Box, Tensor, int], None]  # fills a tensor with a box of the i-th tensor, within so many bytes


@contextmanager
def opened(held: Checkpoint) -> Iterator[Read]:
    """Open a checkpoint on this rank, at the first read; which raises an InputError for what cannot be read."""
    with ExitStack() as stack:
        source = _HDF5Source(held, stack) if held.catalog is not None else _PartsSource(held, stack)

        def read(i: int, box: Box, out: Tensor, window: int) -> None:
            try:
                source.read(i, box, out, window)
            except InputError:
                raise
            except FileError as error:
                raise InputError("HD402", str(error)) from error
            except Exception as error:  # each library has errors of its own for a damaged file
                raise InputError(
                    "HD402", f"{held.path}: {held.tensors[i].name}: cannot be read: {reason(error)}"
                ) from error

        yield read


class _HDF5Source:
    """The datasets of an open file. Each piece that is read is compared with its checksum."""

    def __init__(self, held: Checkpoint, stack: ExitStack) -> None:
        assert held.catalog is not None
        self._held, self._stack, self._stored = held.catalog, stack, list(held.catalog.datasets.values())
        self._fd: int | None = None
        self._last: tuple[int, DatasetReader] | None = None

    def read(self, i: int, box: Box, out: Tensor, window: int) -> None:
        if self._fd is None:
            self._fd = self._stack.enter_context(open_regular(self._held.path))
            if not self._held.is_in(self._fd):
                raise InputError(
                    "HD413", f"{self._held.path}: is another file here than on rank 0: replaced, or not shared"
                )
        if self._last is None or self._last[0] != i:
            self._last = i, DatasetReader(self._held.path, self._fd, self._stored[i], verify=True)
        # Plain bytes are read straight into `out`, a piece of any size that fits there at once.
        self._last[1].read(box, out, window if self._stored[i].raw is None else max(window, 2 * out.nbytes))


class _PartsSource:
    """Files with parts of tensors, of which the last one that was read is open."""

    def __init__(self, held: Checkpoint, stack: ExitStack) -> None:
        self._held, self._stack = held, stack.enter_context(ExitStack())
        self._last: tuple[int, int] | None = None  # number and descriptor
        self._parts: tuple[int, Listed] | None = None

    def read(self, i: int, box: Box, out: Tensor, window: int) -> None:
        x = self._held.tensors[i]
        if self._parts is None or self._parts[0] != i:
            self._parts = i, Listed(Corners(x.offsets, x.shapes), x.shape)
        parts = self._parts[1]
        for row in parts.intersecting(box).tolist():
            path, part = self._held.files[int(x.places[row, 0])][0], parts[row]
            common = part.intersect(box)
            try:
                self._read_part(
                    x, row, part.shape, common.relative_to(part.offset), out[common.slices(box.offset)], window
                )
            except (InputError, FileError):
                raise
            except Exception as error:  # each library has errors of its own for a damaged file
                raise InputError("HD402", f"{path}: cannot be read: {x.name}: {reason(error)}") from error

    def _read_part(self, x: Scattered, row: int, shape: tuple[int, ...], box: Box, out: Tensor, window: int) -> None:
        """Read a box of a part of a tensor."""
        k, start, nbytes = x.places[row].tolist()
        fd, path = self._file(k), self._held.files[k][0]
        if not nbytes:
            Raw(path, start, shape, x.dtype).read(partial(read_at, fd), box, out, window)
            return
        with checkpoints.open_part(path, fd, start, nbytes) as held:
            if (held.shape, held.dtype) != (shape, x.dtype):
                what = f"{held.dtype} of shape {held.shape}"
                raise InputError("HD510", f"{path}: {x.name}: holds {what}, where {x.dtype} of {shape} is expected")
            held.read(box, out, window)

    def _file(self, k: int) -> int:
        if self._last is None or self._last[0] != k:
            self._stack.close()
            path, size = self._held.files[k]
            self._last = k, self._stack.enter_context(open_regular(path))
            if os.fstat(self._last[1]).st_size != size:
                raise InputError("HD413", f"{path}: is another file here than on rank 0: replaced, or not shared")
        return self._last[1]
