"""The samples of files: for each field its rows, or runs of rows, in all files, one after the other."""

from __future__ import annotations

import glob
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcdist.errors import FileError, listed, refusal
from hpcdist.formats.contents import Contents, Stored
from hpcdist.formats.hdf5 import rows_of_lengths
from hpcdist.formats.known import FORMATS, describe
from hpcdist.layout import Box
from hpcdist.layout.box import Ints, summed
from hpcdist.staging.pieces import Progress
from hpcdist.staging.reader import OpenFiles, TensorReader, open_files
from hpcdist.staging.writer import WINDOW

Name = tuple[str, str | None]
"""The names of a field's tensor, and of the one that has its offsets, if its samples differ in length."""
Column = Tensor | list[Tensor]
"""A field of some samples: a row for each, or a tensor for each if they differ in length."""
_AT_ONCE = 2**16  # samples whose offsets, or whose lengths, are read at once


def names_of(fields: Any) -> list[Name] | None:
    """The names in the argument `fields`; None for all tensors."""
    if fields is None:
        return None
    given = [fields] if isinstance(fields, str) else fields
    names = [(field, None) if isinstance(field, str) else tuple(field) for field in given]
    wrong = [name for name in names if len(name) != 2 or not all(isinstance(n, (str, type(None))) for n in name)]
    if wrong or not names:
        what = f"fields has {wrong[0]!r}" if wrong else "fields is empty"
        raise refusal(ValueError, "HD419", f"{what}, expected names, or pairs (values, offsets)")
    return names


def paths_of(files: Sequence[str]) -> list[str]:
    """The files of names, of patterns, and of folders (by name).

    Raises:
        FileError: there are none.
    """
    found: list[str] = []
    for path in files:
        if os.path.isdir(path):
            inside = sorted(name for name in os.listdir(path) if os.path.splitext(name)[1] in FORMATS)
            found += [os.path.join(path, name) for name in inside]
        elif glob.has_magic(path) and not os.path.exists(path):
            found += sorted(glob.glob(path))
        else:
            found.append(path)
    if not found:
        raise FileError("HD401", f"{listed(files)}: no such file")
    return list(map(os.path.abspath, found))  # the program may change its folder


class Part(NamedTuple):
    """A field in one file: its values, its offsets if it has some; `variable` of HDF5's variable length."""

    values: Stored
    offsets: Stored | None
    variable: bool
    samples: int


def describe_file(path: str, names: Sequence[Name] | None) -> tuple[Contents, list[Part]]:
    """Describe a file: its identity, and the parts of these fields; of all tensors for None.

    Raises:
        FileError: a field is not there, is no row of samples, or has another number of samples than another one.
    """
    with open_files(lambda: describe(path)) as files:
        contents = files.contents
    if names is None:
        names = [(name, None) for name in contents.tensors]
    parts = [_part(contents, name) for name in names]
    for name, part in zip(names, parts, strict=True):
        if part.samples != parts[0].samples:
            other = f"{names[0][0]!r} has {parts[0].samples:,}"
            raise FileError("HD408", f"{path}: {name[0]!r} has {part.samples:,} samples, where {other}")
    if not parts:
        raise FileError("HD408", f"{path}: holds no tensor")
    return Contents(contents.path, contents.kind, {}, contents.files), parts


def _part(contents: Contents, name: Name) -> Part:
    path, values = contents.path, contents.key(name[0])
    if name[1] is None and values in contents.left_out and contents.kind == "HDF5 file":
        with rows_of_lengths(path, values) as (rows, dtype, _):
            return Part(Stored(values, (rows,), dtype), None, True, rows)
    stored, offsets = (None if n is None else _rows(contents, contents.key(n)) for n in name)
    assert stored is not None
    if offsets is not None and (len(offsets.shape) != 1 or not offsets.shape[0] or offsets.dtype.is_floating_point):
        what = f"offsets {offsets.name!r} is {offsets.dtype} of shape {list(offsets.shape)}"
        raise FileError("HD408", f"{path}: {what}, expected one integer more than there are samples")
    return Part(stored, offsets, False, stored.shape[0] if offsets is None else offsets.shape[0] - 1)


def _rows(contents: Contents, name: str) -> Stored:
    stored = contents.chosen(name).tensors.get(name)
    if stored is None or not stored.with_table().shape or not prod(stored.shape[1:]):
        held = listed(contents.tensors)
        raise FileError("HD408", f"{contents.path}: {name!r} has no rows, or these no elements; it has: {held}")
    return stored


class Field:
    """A field of all samples.

    Attributes:
        name: that of its values.
        files: a description of each file, and the field's part in it.
        begins: the first sample of each file, and the end.
        ragged: whether its samples differ in length.
        dtype, shape, row: of a row; the last one in bytes.
        offsets: the first row of each sample among those of all files, and the end; None if a sample is a row.
    """

    def __init__(self, files: list[tuple[Contents, Part]], begins: Ints) -> None:
        _, first = files[0]
        self.name, self.dtype, self.shape = first.values.name, first.values.dtype, first.values.shape[1:]
        self.files, self.begins, self.row = files, begins, prod(self.shape) * self.dtype.itemsize
        self.ragged = first.variable or first.offsets is not None
        self.offsets: Ints | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "offsets": None}  # which are in shared memory

    def rows(self, samples: Any) -> Any:
        """The first row of these samples, of which the last one may be the end."""
        return samples if self.offsets is None else self.offsets[samples]

    def counts(self, samples: Ints) -> Any:
        """The rows of each of these samples."""
        return self.rows(samples + 1) - self.rows(samples)

    def column(self, data: Tensor, samples: Ints) -> Column:
        """Return the bytes of these samples as tensors."""
        rows = data.view(-1).view(self.dtype).view(-1, *self.shape)
        return list(torch.split_with_sizes(rows, self.counts(samples).tolist())) if self.ragged else rows

    def _within(self, start: int, stop: int, step: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield the file, the first and last sample in it, and the first of all, of samples; at most `step` of them."""
        while start < stop:
            k = bisect_right(self.begins, start) - 1
            end = min(stop, int(self.begins[k + 1]), start + step)
            yield k, start - int(self.begins[k]), end - int(self.begins[k]), start
            start = end

    def _variable(self, k: int, start: int, stop: int) -> list[Any]:
        """Read samples of HDF5's variable length, of the open file, even if another one has its name by now."""
        contents, _ = self.files[k]
        with OpenFiles(contents) as files:
            path = f"/proc/self/fd/{files.fd(contents.path)}"
            with rows_of_lengths(path, self.name) as (_, _, read):
                return read(start, stop)

    def read_lengths(self, out: Ints, reader: int, readers: int) -> None:
        """Write the length of each sample behind its place in `out`, which begins with 0: this reader's share of them.

        Raises:
            FileError: they cannot be read, or the offsets do not fit the values.
        """
        for i, (k, start, stop, at) in enumerate(self._within(0, int(self.begins[-1]), _AT_ONCE)):
            if i % readers != reader:
                continue
            contents, part = self.files[k]
            into = out[at + 1 : at + 1 + stop - start]
            if part.offsets is None:
                into[:] = list(map(len, self._variable(k, start, stop)))
                continue
            offsets, total = torch.empty(stop - start + 1, dtype=part.offsets.dtype, device="cpu"), part.values.shape[0]
            _read(contents, part.offsets, start, offsets, None)
            bounds = offsets.numpy().astype(np.int64)
            into[:] = np.diff(bounds)
            if into.min() < 0 or (start == 0 != bounds[0]) or (stop == part.samples and bounds[-1] != total):
                what = f"offsets {part.offsets.name!r} must rise from 0 to {total:,}, the rows of {self.name!r}"
                raise FileError("HD404", f"{contents.path}: {what}")

    def read(self, start: int, stop: int, out: Tensor, verify: bool | None, progress: Progress = None) -> None:
        """Read the rows of some samples into `out`, flat bytes in host memory.

        Raises:
            FileError: they cannot be read, have changed, or differ from their checksum.
        """
        done, variable = 0, self.files[0][1].variable
        for k, first, last, at in self._within(start, stop, _AT_ONCE if variable else stop):
            contents, part = self.files[k]
            row, begin, end = (int(self.rows(n)) for n in (at, self.begins[k], at + last - first))
            into = out[done : done + (end - row) * self.row].view(self.dtype).view(end - row, *self.shape)
            done += into.nbytes
            if not variable:
                _read(contents, part.values, row - begin, into, verify, progress)
                continue
            held = np.concatenate([into.numpy()[:0], *self._variable(k, first, last)])
            if len(held) != end - row:
                raise FileError("HD413", f"{contents.path}: has changed while it was read")
            into.copy_(torch.from_numpy(held))

    def grid(self, sample: int, coarsest: float) -> int:
        """Move a sample to the nearest that no piece with a checksum, of at most `coarsest` bytes, nor chunk of a
        compressed tensor, holds together with the one before it."""
        if self.ragged:
            return sample
        k = bisect_right(self.begins, sample) - 1
        begin, values, at = int(self.begins[k]), self.files[k][1].values, sample - int(self.begins[k])
        if values.raw is None and values.chunk > 1:
            at = (at + values.chunk // 2) // values.chunk * values.chunk
        elif len(values.boxes) and int(values.boxes.sizes.max()) * self.dtype.itemsize <= coarsest:
            edges = np.unique(values.boxes.offsets[:, 0])
            at = int(edges[abs(edges - at).argmin()])
        return min(begin + at, int(self.begins[k + 1]))


def _read(
    contents: Contents, stored: Stored, row: int, out: Tensor, verify: bool | None, progress: Progress = None
) -> None:
    box = Box((row,) + (0,) * (len(stored.shape) - 1), tuple(out.shape))
    with OpenFiles(contents) as files:
        TensorReader(files, stored, WINDOW, verify, progress).read(box, out)


def joined(described: Sequence[tuple[Contents, list[Part]]]) -> list[Field]:
    """The fields of all files, in the order given.

    Raises:
        FileError: a file has other fields than the first.
    """
    begins = summed([parts[0].samples for _, parts in described])
    (contents, own), fields = described[0], list[Field]()
    first = contents.path
    if odd := next((contents for contents, parts in described if len(parts) != len(own)), None):
        raise FileError("HD408", f"{odd.path}: holds other tensors than {first}: name fields=")
    for i in range(len(own)):
        field = Field([(contents, parts[i]) for contents, parts in described], begins)
        for contents, (values, _, variable, _) in field.files:
            dtype, shape = values.dtype, values.shape[1:]
            if (dtype, shape, variable) != (field.dtype, field.shape, field.files[0][1].variable):
                what = f"{field.name!r} is {dtype}, rows of shape {list(shape)}"
                raise FileError(
                    "HD408", f"{contents.path}: {what}, where {first} has {field.dtype}, {list(field.shape)}"
                )
        fields.append(field)
    return fields


def nbytes(fields: Sequence[Field], samples: Ints) -> Ints:
    """The bytes of all samples before these."""
    return sum((field.rows(samples) * field.row for field in fields), np.zeros(len(samples), np.int64))


def cuts(fields: Sequence[Field], count: int, coarsest: float) -> Ints:
    """Cut the samples into about `count` blocks of as many bytes: the first of each block, and the end."""
    end = fields[0].begins[-1:]
    n = int(end[0])
    wanted = [int(nbytes(fields, end)[0]) * i // count for i in range(1, count)]
    low, high = np.zeros(count - 1, np.int64), np.full(count - 1, n)
    while (low < high).any():
        middle = (low + high) // 2
        enough = nbytes(fields, middle) >= wanted
        low, high = np.where(enough, low, np.minimum(middle + 1, high)), np.where(enough, middle, high)
    largest = max(fields, key=lambda field: int(nbytes([field], end)[0]))
    found = np.unique([0, *(largest.grid(sample, coarsest) for sample in low.tolist() if sample < n), n])
    return found if n else np.zeros(2, np.int64)
