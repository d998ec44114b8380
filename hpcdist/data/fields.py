"""The samples of files: for each field its rows, or runs of rows, in all files, one after the other."""

from __future__ import annotations

import glob
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
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
from hpcdist.layout.box import Ints
from hpcdist.staging.reader import OpenFiles, TensorReader, open_files
from hpcdist.staging.writer import WINDOW

Name = tuple[str, str | None]
"""The names of a field's tensor, and of the one that has its offsets, if its samples differ in length."""
Progress = Callable[[int], None] | None
_AT_ONCE = 2**16  # samples whose offsets, or whose lengths, are read at once


def names_of(fields: Any) -> list[Name] | None:
    """The names in the argument `fields`; None for all tensors."""
    if fields is None:
        return None
    given = [fields] if isinstance(fields, str) else list(fields)
    names = [(field, None) if isinstance(field, str) else tuple(field) for field in given]
    odd = next(
        (name for name in names if len(name) != 2 or not all(isinstance(n, (str, type(None))) for n in name)), None
    )
    if odd is not None or not names:
        what = f"fields has {odd!r}" if names else "fields is empty"
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

    @property
    def samples(self) -> int:
        return self.values.shape[0] if self.offsets is None else self.offsets.shape[0] - 1


def describe_file(path: str, names: Sequence[Name] | None) -> tuple[Contents, list[Part]]:
    """Describe a file: its identity, and the parts of these fields; of all tensors for None.

    Raises:
        FileError: a field is not there, is no row of samples, or has another number of samples than another one.
    """
    with open_files(lambda: describe(path), lambda sees: [sees()]) as files:
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
    return replace(contents, tensors={}, external={}, left_out={}, text={}, checkpoint={}), parts


def _part(contents: Contents, name: Name) -> Part:
    path, values = contents.path, contents.key(name[0])
    if name[1] is None and values in contents.left_out and contents.kind == "HDF5 file":
        with rows_of_lengths(path, values) as (rows, dtype, _):
            return Part(Stored(values, (rows,), dtype), None, True)
    stored, offsets = (None if n is None else _rows(contents, contents.key(n)) for n in name)
    assert stored is not None
    if offsets is not None and (len(offsets.shape) != 1 or not offsets.shape[0] or offsets.dtype.is_floating_point):
        what = f"offsets {offsets.name!r} is {offsets.dtype} of shape {list(offsets.shape)}"
        raise FileError("HD408", f"{path}: {what}, expected one integer more than there are samples")
    return Part(stored, offsets, False)


def _rows(contents: Contents, name: str) -> Stored:
    stored = contents.chosen(name).tensors.get(name)
    if stored is None or not stored.with_table().shape or not prod(stored.shape[1:]):
        held = listed(contents.tensors)
        raise FileError("HD408", f"{contents.path}: {name!r} has no rows, or these no elements; it has: {held}")
    return stored


@dataclass(eq=False)
class Field:
    """A field of all samples.

    Attributes:
        name: that of its values.
        files: a description of each file, and the field's part in it.
        begins: the first sample of each file, and the end.
        offsets: the first row of each sample among those of all files, and the end; None if a sample is a row.
    """

    name: str
    files: list[tuple[Contents, Part]]
    begins: Ints
    offsets: Ints | None = None

    @property
    def ragged(self) -> bool:
        return self.files[0][1].variable or self.files[0][1].offsets is not None

    @property
    def dtype(self) -> torch.dtype:
        return self.files[0][1].values.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a row."""
        return self.files[0][1].values.shape[1:]

    @property
    def row(self) -> int:
        """The bytes of a row."""
        return prod(self.shape) * self.dtype.itemsize

    def rows(self, samples: Ints) -> Ints:
        """The first row of these samples, of which the last one may be the end."""
        return samples if self.offsets is None else self.offsets[samples]

    def check(self) -> None:
        """Raise a FileError if a file has another dtype or shape than the first."""
        for contents, part in self.files:
            got = part.values.dtype, part.values.shape[1:]
            if got != (self.dtype, self.shape) or part.variable != self.files[0][1].variable:
                what = f"{self.name!r} is {got[0]}, rows of shape {list(got[1])}"
                first = f"{self.files[0][0].path} has {self.dtype}, {list(self.shape)}"
                raise FileError("HD408", f"{contents.path}: {what}, where {first}")

    def _within(self, start: int, stop: int, step: int | None = None) -> Iterator[tuple[int, int, int, int]]:
        """Yield the file, the first and last sample in it, and the first of all, of samples; at most `step` of them."""
        while start < stop:
            k = bisect_right(self.begins, start) - 1
            end = min(stop, int(self.begins[k + 1]), start + (step or stop))
            yield k, start - int(self.begins[k]), end - int(self.begins[k]), start
            start = end

    def read_lengths(self, out: Ints, reader: int, readers: int) -> None:
        """Write the length of each sample behind its place in `out`, which begins with 0: this reader's share of them.

        Raises:
            FileError: they cannot be read, or the offsets do not fit the values.
        """
        for i, (k, start, stop, at) in enumerate(self._within(0, int(self.begins[-1]), _AT_ONCE)):
            if i % readers != reader:
                continue
            contents, part = self.files[k]
            if part.offsets is None:
                with OpenFiles(contents) as files, rows_of_lengths(_path(files), self.name) as (_, _, read):
                    lengths = np.fromiter(map(len, read(start, stop)), np.int64, stop - start)
            else:
                offsets = torch.empty(stop - start + 1, dtype=part.offsets.dtype, device="cpu")
                _read(contents, part.offsets, start, offsets, None)
                bounds = offsets.numpy().astype(np.int64)
                ends = (int(bounds[0]) if start == 0 else 0, int(bounds[-1]) if stop == part.samples else None)
                lengths, total = np.diff(bounds), part.values.shape[0]
                if ends[0] or ends[1] not in (None, total) or (lengths < 0).any():
                    what = f"offsets {part.offsets.name!r} must rise from 0 to {total:,}, the rows of {self.name!r}"
                    raise FileError("HD404", f"{contents.path}: {what}")
            out[at + 1 : at + 1 + len(lengths)] = lengths

    def read(self, start: int, stop: int, out: Tensor, verify: bool | None, progress: Progress = None) -> None:
        """Read the rows of some samples into `out`, flat bytes in host memory.

        Raises:
            FileError: they cannot be read, have changed, or differ from their checksum.
        """
        done = 0
        for k, first, last, at in self._within(start, stop):
            contents, part = self.files[k]
            end = at + last - first
            bounds = self.rows(np.array([self.begins[k], at, end]))
            count = int(bounds[2] - bounds[1])
            into = out[done : done + count * self.row].view(self.dtype).view(count, *self.shape)
            done += count * self.row
            if not part.variable:
                _read(contents, part.values, int(bounds[1] - bounds[0]), into, verify, progress)
                continue
            with OpenFiles(contents) as files, rows_of_lengths(_path(files), self.name) as (_, _, read):
                rows = [row for a in range(first, last, _AT_ONCE) for row in read(a, min(last, a + _AT_ONCE))]
            held = np.concatenate([into.numpy()[:0], *rows])
            if len(held) != count:
                raise FileError("HD413", f"{contents.path}: has changed while it was read")
            into.copy_(torch.from_numpy(held))

    def grid(self, coarsest: float) -> Callable[[int], int]:
        """Return what moves a sample to the nearest that no piece with a checksum, of at most `coarsest` bytes, nor
        chunk of a compressed tensor, holds together with the one before it."""

        def snap(sample: int) -> int:
            k = min(bisect_right(self.begins, sample), len(self.files)) - 1
            begin, end, values = int(self.begins[k]), int(self.begins[k + 1]), self.files[k][1].values
            at = sample - begin
            if values.raw is None and values.chunk > 1:
                at = (at + values.chunk // 2) // values.chunk * values.chunk
            elif len(values.boxes) and int(values.boxes.sizes.max()) * self.dtype.itemsize <= coarsest:
                edges = np.unique(values.boxes.offsets[:, 0])
                at = int(edges[abs(edges - at).argmin()])
            return min(begin + at, end)

        return (lambda sample: sample) if self.ragged else snap


def _path(files: OpenFiles) -> str:
    """The path of the open file, even if another one has its name by now."""
    return f"/proc/self/fd/{files.fd(files.contents.path)}"


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
    begins = np.cumsum([0, *(parts[0].samples for _, parts in described)])
    count = len(described[0][1])
    if odd := next((contents for contents, parts in described if len(parts) != count), None):
        raise FileError("HD408", f"{odd.path}: holds other tensors than {described[0][0].path}: name fields=")
    fields = [
        Field(part.values.name, [(contents, parts[i]) for contents, parts in described], begins)
        for i, part in enumerate(described[0][1])
    ]
    for field in fields:
        field.check()
    return fields


def cuts(fields: Sequence[Field], count: int, coarsest: float) -> Ints:
    """Cut the samples into about `count` blocks of as many bytes: the first of each block, and the end."""
    n = int(fields[0].begins[-1])

    def nbytes(samples: Ints) -> Ints:
        return sum((field.rows(samples) * field.row for field in fields), np.zeros(len(samples), np.int64))

    total = int(nbytes(np.array([n]))[0])
    wanted = np.array([total * i // count for i in range(count + 1)])
    low, high = np.zeros(count + 1, np.int64), np.full(count + 1, n)
    while (low < high).any():
        middle = (low + high) // 2
        enough = nbytes(middle) >= wanted
        low, high = np.where(enough, low, np.minimum(middle + 1, high)), np.where(enough, middle, high)
    low[-1] = n
    snap = max(fields, key=lambda field: int(field.rows(np.array([n]))[0]) * field.row).grid(coarsest)
    found = np.unique([0, *map(snap, low[1:-1].tolist()), n])
    return found if n else np.zeros(2, np.int64)
