"""open(): a file that is read by one rank, or written by all ranks, a box at a time."""

from __future__ import annotations

import os
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from operator import index
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import torch
from torch import Tensor

from hpcdist.comm.team import Team
from hpcdist.control import objects
from hpcdist.errors import FileError, listed, refusal
from hpcdist.formats import hdf5, plain
from hpcdist.formats.contents import Dataset, Stored
from hpcdist.formats.known import describe
from hpcdist.formats.plain import memory
from hpcdist.layout import Box
from hpcdist.layout.box import Ints, Listed
from hpcdist.runtime import world
from hpcdist.staging.arguments import (
    agreed,
    check_attrs,
    check_inside,
    check_memory,
    check_out,
    flatten,
    hdf5_path,
    shape_and_dtype,
    window_bytes,
)
from hpcdist.staging.pieces import MOST_PIECES, PIECE
from hpcdist.staging.reader import TensorReader, open_files
from hpcdist.staging.save import wait_for
from hpcdist.staging.writer import WINDOW, FileWriter, SaveOptions
from hpcdist.tensors import pool
from hpcdist.tensors.eager import recorded
from hpcdist.tensors.storage import row_major, written
from hpcdist.validation import local
from hpcdist.validation.local import not_a_tensor

if TYPE_CHECKING:
    from hpcdist.comm.team import GroupLike

VERB = "staging.open"


@overload
def open(path: str | os.PathLike[str], mode: Literal["r"] = "r", *, window: int = WINDOW) -> ReadFile: ...
@overload
def open(
    path: str | os.PathLike[str],
    mode: Literal["w"],
    tensors: Mapping[str, Any],
    *,
    attrs: Mapping[str, Mapping[str, Any]] | None = None,
    window: int = WINDOW,
    group: GroupLike | None = None,
) -> WriteFile: ...
def open(
    path: str | os.PathLike[str],
    mode: str = "r",
    tensors: Mapping[str, Any] | None = None,
    *,
    attrs: Mapping[str, Mapping[str, Any]] | None = None,
    window: int = WINDOW,
    group: GroupLike | None = None,
) -> ReadFile | WriteFile:
    """Open a file to read or write it piece by piece, if a rank's own shard does not fit in memory.

    Mode "r" is for this rank alone. Mode "w" is collective over `group`. Waits for a save in flight to this name.

    Args:
        path: the file.
        mode: "r" to read a file of any format that load() reads, "w" to write a new HDF5 file.
        tensors: of mode "w": (shape, dtype) by name, dicts may be nested. Must agree.
        attrs: of mode "w": HDF5 attributes by name of the tensor; "" for the file. Rank 0's are written.
        window: bytes of host memory for data in transit, 256 MiB by default. Must agree with mode "w".
        group: of mode "w": the ranks that write; None for all.

    Returns:
        A :class:`ReadFile` or a :class:`WriteFile`, for a ``with`` block.

    Raises:
        FileError: with mode "r", if the file does not exist, has another format, is incomplete or truncated.
        RankError: with mode "w", on every rank, if arguments are wrong or differ, or the file cannot be made.

    Example::

        >>> with hd.staging.open("x.h5", "w", {"x": ((1000, 64), torch.float32)}) as file:
        ...     for row in range(rank, 1000, size):
        ...         file.write("x", compute(row), offset=(row, 0))     # compute(row) has shape (1, 64)
        >>> with hd.staging.open("x.h5") as file:
        ...     file.read("x", (10, 0), (2, 64)).shape
        torch.Size([2, 64])
    """
    wait_for(path)
    if mode == "r":
        if tensors is not None or attrs is not None or group is not None:
            raise refusal(TypeError, "HD419", "tensors, attrs and group are for mode 'w'")
        return ReadFile(os.fsdecode(path), window)
    if mode != "w":
        raise refusal(ValueError, "HD419", f"mode is {mode!r}, expected 'r' or 'w'")
    return WriteFile(world.team_of(group), path, tensors, attrs, window)


class ReadFile:
    """A file that is read a box at a time, on this rank alone. Made by :func:`open`; must be closed.

    Attributes:
        names: names of its tensors.
        left_out: data that are not read as tensors, such as text: by name, why not, or what they are.
    """

    def __init__(self, path: str, window: int) -> None:
        self._window = window
        self._files = open_files(lambda: describe(path))
        self._contents, self._open = self._files.contents, True
        self.names = list(self._contents.tensors)
        self.left_out = self._contents.external | self._contents.left_out

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return self._stored(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor, as :meth:`read` returns it."""
        return self._stored(name).dtype

    def attrs(self, name: str = "") -> dict[str, Any]:
        """The HDF5 attributes of a tensor or a group; of the file itself for "", or the text of a .safetensors file."""
        if self._contents.kind == "HDF5 file":
            return hdf5.attributes(self._contents.path, name)
        return dict(self._contents.text) if not name else {}

    def read(
        self,
        name: str,
        offset: Sequence[int] | None = None,
        shape: Sequence[int] | None = None,
        *,
        out: Tensor | None = None,
        device: torch.device | str | None = None,
        verify: bool | None = None,
    ) -> Tensor:
        """Read a box of a tensor.

        Args:
            name: of the tensor.
            offset, shape: of the box, an entry for every dim; by default from the first element, and to the last.
            out: memory for it, of its shape and dtype.
            device: device of the result, without `out`; the CPU by default.
            verify: as in :func:`load`.

        Returns:
            The box: a tensor that the caller owns, or `out`.

        Raises:
            FileError: if the tensor does not exist, is damaged, or cannot be read.
            ValueError: if the box is not in the tensor, or does not fit `out`.
        """
        if (untraceable := recorded()) is not None:
            raise refusal(ValueError, "HD219", f"read(): {untraceable}")
        stored = self._stored(name)
        start = tuple(index(o) for o in offset) if offset is not None else (0,) * len(stored.shape)
        check_inside(Box(start, (0,) * len(start)), stored.shape)
        rest = (extent - o for extent, o in zip(stored.shape, start, strict=True))
        box = Box(start, tuple(index(n) for n in (rest if shape is None else shape)))
        check_inside(box, stored.shape)
        if out is None:
            check_memory(self._contents.path, box.size() * stored.dtype.itemsize)
            target = pool.empty(box.shape, stored.dtype, "cpu" if device is None else device, fixed=True)
        else:
            local.ready(out, "out")
            check_out(out, box.shape, stored.dtype, name)
            target = written(out, out.detach())
        TensorReader(self._files, stored, self._window, verify).read(box, target)
        return target if out is None else out

    def close(self) -> None:
        """Close the file. Closing it again does nothing."""
        self._files.close()
        self._open = False

    def __enter__(self) -> ReadFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stored(self, name: str) -> Stored:
        if not self._open:
            raise refusal(ValueError, "HD419", "the file is closed")
        key = self._contents.key(name)
        if key not in self._contents.tensors:
            self._contents.chosen(key)  # names other causes
            raise FileError("HD408", f"{self._contents.path}: {name!r} is a group; it has: {listed(self.names)}")
        return self._contents.tensors[key]


class WriteFile:
    """A new file that ranks write a box at a time. Made by :func:`open`; used in a ``with`` block.

    The end of the block is collective. The file then appears under its name if every element was written once and no
    rank has failed. An exception on one rank ends the job, and the name keeps the old file. Each box is a piece with
    its own checksum. Consecutive rows that a rank writes become one piece.
    """

    def __init__(self, team: Team, path: Any, tensors: Any, attrs: Any, window: Any) -> None:
        def check() -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
            limit = window_bytes(window)
            specs = {name: shape_and_dtype(name, spec, limit) for name, spec in flatten(tensors or {}).items()}
            check_attrs(attrs, specs)
            given = {name: dict(values) for name, values in (attrs or {}).items()}
            return {"path": hdf5_path(path), "window": limit, "tensors": specs}, given

        with agreed(team, VERB, check) as (mine, given):
            same = objects.same(team.comm, VERB, mine, mine, objects.first_difference)
            specs = same["tensors"]
            datasets = [
                Dataset(name, shape, dtype, attrs=given.get(name, {})) for name, (shape, dtype) in specs.items()
            ]
            # MPI-IO and system calls must not be mixed in one file: boxes of any shape are written by system calls.
            options = SaveOptions("posix", same["window"], attrs=given.get("", {}))
            self._file = FileWriter(team, VERB, same["path"], datasets, options, opens_together=True)
            self._written = [_Written(dataset) for dataset in datasets]
            self._index = {name: i for i, name in enumerate(specs)}
            self._open = True

    def write(self, name: str, x: Tensor, offset: Sequence[int]) -> None:
        """Write a box of a tensor. On this rank alone; boxes must not overlap, on this rank or between ranks.

        Args:
            name: of the tensor.
            x: the box: any strides, on the CPU or a GPU, of the tensor's dtype and number of dims.
            offset: where it begins in the whole, an entry for every dim.

        Raises:
            FileError: if the tensor does not exist; OSError: if it cannot be written; ValueError: if `x` does not fit,
            or the file is closed; TypeError: if `x` is not a tensor.
        """
        if not self._open:
            raise refusal(ValueError, "HD419", "the file is closed")
        if name not in self._index:
            raise FileError("HD408", f"{self._file.path}: has no tensor {name!r}; it has: {listed(self._index)}")
        if not isinstance(x, Tensor):
            raise refusal(TypeError, "HD201", not_a_tensor(x, "x"))
        i = self._index[name]
        dataset = self._file.datasets[i]
        box = Box(tuple(index(o) for o in offset), tuple(x.shape))
        check_inside(box, dataset.shape)
        if x.dtype != dataset.dtype:
            raise refusal(ValueError, "HD419", f"x has dtype {x.dtype}, expected {dataset.dtype}, that of {name!r}")
        data = memory(row_major(local.ready(x, "x").cpu()))
        self._file.write(i, box, data)
        self._written[i].add(box, data)

    def __enter__(self) -> WriteFile:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        file, self._open = self._file, False
        if error is not None:  # the others may be anywhere: nothing collective can be done here
            file.drop()
            return
        file.verb = "staging.close"
        try:
            with agreed(file.team, file.verb, lambda: None):
                file.add_table(self._record())
                file.commit()
        except BaseException:
            file.drop()
            raise

    def _record(self) -> list[Dataset]:
        """Make the boxes of all ranks the pieces of the file; a failure is kept, such as a missing box. Collective."""
        file, team = self._file, self._file.team
        mine = [of.table().tobytes() for of in self._written]
        found = objects.all_gather_object(team.comm, mine, file.verb)
        datasets = []
        for i, dataset in enumerate(file.datasets[:-1]):
            n = len(dataset.shape)
            tables = [np.frombuffer(tables[i], np.int64).reshape(-1, 2 * n + 1) for tables in found]
            rows, first = np.concatenate(tables), sum(map(len, tables[: team.rank]))
            count, pieces = len(rows), Listed(rows[:, :n], rows[:, n:-1], dataset.shape)
            ordered, places = pieces.ascending()
            for k in range(first, first + len(tables[team.rank])):
                file.written[i, int(places[k])] = pieces[k], int(rows[k, -1].view(np.uint64))
            if count > MOST_PIECES:
                what = f"was written in {count:,} boxes, more than the possible {MOST_PIECES:,}"
                file.fail(refusal(ValueError, "HD419", f"{dataset.name}: {what}"))
            elif dataset.nbytes() and not pieces.tile():
                what = f"{int(pieces.sizes.sum()):,} elements were written, expected {prod(dataset.shape):,}, each once"
                file.fail(refusal(ValueError, "HD419", f"{dataset.name}: {what}"))
            datasets.append(replace(dataset, count=count, runs=ordered.are_runs))
        return datasets


class _Written:
    """The boxes of one tensor that this rank has written, and their checksums, computed from memory."""

    def __init__(self, dataset: Dataset) -> None:
        self._shape, self._most = dataset.shape, PIECE // dataset.dtype.itemsize
        self._rows = array("q")  # offset, shape and bits of the checksum of each piece
        self._last: tuple[Box, Any] | None = None  # the piece that may continue, and its checksum so far

    def add(self, box: Box, data: memoryview) -> None:
        """Note a box that has been written."""
        if not box.size():
            return
        joined = self._last and _joined(self._last[0], box, self._shape)
        if self._last and joined and joined.size() <= self._most:
            self._last = joined, self._last[1]
        else:
            self._end()
            self._last = box, plain.digest()
        self._last[1].update(data)

    def _end(self) -> None:
        if self._last is not None:
            box, digest = self._last
            checksum = int.from_bytes(digest.digest(), "big", signed=True)
            self._rows.extend((*box.offset, *box.shape, checksum))
            self._last = None

    def table(self) -> Ints:
        """Offset, shape and bits of the checksum of each piece, one after the other."""
        self._end()
        return np.array(self._rows, np.int64)


def _joined(one: Box, other: Box, shape: Sequence[int]) -> Box | None:
    """The box of two that follow each other in the tensor's memory, each of whole indices of dim 0; None of others."""
    if not shape or not one.shape[1:] == other.shape[1:] == tuple(shape[1:]):
        return None
    end = one.offset[0] + one.shape[0]
    return one.narrow(0, one.offset[0], end + other.shape[0]) if other.offset[0] == end else None
