"""open(): a file that is read by one rank, or written by all ranks, a box at a time."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from operator import index
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from hpcdist import layout
from hpcdist.comm.team import Team
from hpcdist.control import digests, objects
from hpcdist.errors import FileError, listed, reason, refusal
from hpcdist.files import h5
from hpcdist.files.attributes import attributes
from hpcdist.files.commit import check_target
from hpcdist.files.h5 import Dataset
from hpcdist.files.raw import memory
from hpcdist.files.regular import open_regular
from hpcdist.layout import Box
from hpcdist.runtime import world
from hpcdist.staging.arguments import agreed, hdf5_path, positive, shape_and_dtype
from hpcdist.staging.catalog import Stored, describe
from hpcdist.staging.in_flight import wait_for
from hpcdist.staging.links import hard_path
from hpcdist.staging.names import check_attrs, flatten
from hpcdist.staging.pieces import PIECE
from hpcdist.staging.reader import DatasetReader
from hpcdist.staging.saving import Saving
from hpcdist.staging.target import WINDOW, SaveOptions
from hpcdist.staging.written import Written, check_complete, record_checksums, starts_of
from hpcdist.tensors import pool
from hpcdist.tensors.eager import recorded
from hpcdist.tensors.storage import row_major, written
from hpcdist.validation import local
from hpcdist.validation.shown import not_a_tensor

if TYPE_CHECKING:
    from hpcdist.comm.signatures import GroupLike

__all__ = ["ReadFile", "WriteFile", "open"]

VERB = "staging.open"
_SHARE = 2**16  # bytes: unit in which pages between ranks' boxes are divided among the ranks


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
    """Open a file for piecewise work, when not even a rank's own shard fits in memory.

    With mode "r" on this rank alone; with mode "w" collective over `group`. Waits for a save in flight to this name.

    Args:
        path: of the file.
        mode: "r" to read any HDF5 file, "w" to write a new one.
        tensors: of mode "w": (shape, dtype) by name, dicts may be nested. Must agree.
        attrs: of mode "w": HDF5 attributes by name of the tensor; "" for the file. Rank 0's are written.
        window: bytes of host memory for data in transit. Must agree with mode "w".
        group: of mode "w": the ranks that write; None for all.

    Returns:
        A :class:`ReadFile` or a :class:`WriteFile`, for a ``with`` block.

    Raises:
        FileError: of mode "r": no such regular file, not HDF5, incomplete, truncated.
        RankError: of mode "w", on every rank: arguments that are wrong or differ, a file that cannot be made.

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
            raise refusal(TypeError, "HD422", "tensors, attrs and group are for mode 'w'")
        return ReadFile(os.fsdecode(path), window)
    if mode != "w":
        raise refusal(ValueError, "HD422", f"mode is {mode!r}, expected 'r' or 'w'")
    return WriteFile(world.current().context.team_of(group), path, tensors, attrs, window)


class ReadFile:
    """An HDF5 file that is read a box at a time, on this rank alone. Made by :func:`open`; must be closed.

    Attributes:
        names: names of its tensors.
    """

    def __init__(self, path: str, window: int) -> None:
        self._window, self._fd = window, -1
        while self._fd < 0:
            self._catalog = describe(path)
            with ExitStack() as stack:
                fd = stack.enter_context(open_regular(path))
                if self._catalog.is_in(fd):  # else it was replaced in between
                    self._open, self._fd = stack.pop_all(), fd
        self.names = list(self._catalog.datasets)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return self._stored(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor, as :meth:`read` returns it."""
        return self._stored(name).dtype

    def attrs(self, name: str = "") -> dict[str, Any]:
        """The HDF5 attributes of a tensor or a group; of the file itself for ""."""
        path = self._catalog.path
        try:
            with h5.opened(path) as file:
                place = hard_path(path, file, name)
                if place is None:
                    raise FileError("HD408", f"{path}: holds no {name!r}")
                found = attributes(file[place or "/"])
        except FileError:
            raise
        except Exception as error:  # whatever h5py makes of a file that is damaged
            raise FileError("HD402", f"{path}: cannot be read: {reason(error)}") from error
        found.pop(h5.DTYPE_ATTRIBUTE, None)
        return found

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
            FileError: no such tensor, damaged, or it cannot be read.
            ValueError: a box that is not in the tensor, or does not fit `out`.
        """
        if (untraceable := recorded()) is not None:
            raise refusal(ValueError, "HD219", f"read(): {untraceable}")
        stored = self._stored(name)
        start = tuple(index(o) for o in offset) if offset is not None else (0,) * len(stored.shape)
        _check_inside(Box(start, (0,) * len(start)), stored.shape)
        rest = (extent - o for extent, o in zip(stored.shape, start, strict=True))
        box = Box(start, tuple(index(n) for n in (rest if shape is None else shape)))
        _check_inside(box, stored.shape)
        if out is None:
            target = pool.empty(box.shape, stored.dtype, "cpu" if device is None else device, fixed=True)
        else:
            try:
                local.tensor(out, 0, "out")
            except local.WrongError as error:
                raise refusal(ValueError, "HD202", str(error)) from error
            if out.dtype != stored.dtype or tuple(out.shape) != box.shape:
                what = f"{out.dtype} of shape {tuple(out.shape)}"
                raise refusal(ValueError, "HD208", f"out is {what}, expected {stored.dtype} of {box.shape}")
            target = written(out, out.detach())
        try:
            DatasetReader(self._catalog.path, self._fd, stored, verify).read(box, target, self._window)
        except OSError as error:
            raise FileError("HD402", f"{self._catalog.path}: cannot be read: {reason(error)}") from error
        return target if out is None else out

    def close(self) -> None:
        """Close the file. Closing it again does nothing."""
        if self._fd >= 0:
            self._fd = -1
            self._open.close()

    def __enter__(self) -> ReadFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stored(self, name: str) -> Stored:
        if self._fd < 0:
            raise refusal(ValueError, "HD422", "the file is closed")
        key = name.strip("/")
        if key in self._catalog.external:
            self._catalog.require(key)
        if key not in self._catalog.datasets:
            raise FileError("HD408", f"{self._catalog.path}: holds no tensor {name!r}; it has: {listed(self.names)}")
        return self._catalog.datasets[key]


class WriteFile:
    """A new file that ranks write a box at a time. Made by :func:`open`; used in a ``with`` block.

    At the end of the block, which is collective, the file appears under its name: if every element was written once,
    and no rank has failed. An exception on one rank ends the job, and the name keeps the old file.
    """

    def __init__(self, team: Team, path: Any, tensors: Any, attrs: Any, window: Any) -> None:
        def check() -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
            limit = positive("window", window)
            specs = {name: shape_and_dtype(name, spec, limit) for name, spec in flatten(tensors or {}).items()}
            check_attrs(attrs, specs)
            given = {name: dict(values) for name, values in (attrs or {}).items()}
            return {"path": hdf5_path(path), "window": limit, "tensors": specs}, given

        with agreed(team, VERB, check) as (mine, given):
            same = digests.same(team.comm, VERB, mine, mine, objects.first_difference)
            target, limit, specs = same["path"], same["window"], same["tensors"]
            nbytes = sum(layout.whole(shape).size() * dtype.itemsize for shape, dtype in specs.values())
            objects.broadcast(team.comm, VERB, lambda: check_target(target, nbytes))  # before the pieces are listed
            datasets = []
            for name, (shape, dtype) in specs.items():
                pieces = list(layout.boxes(layout.whole(shape), max(1, min(PIECE, limit) // dtype.itemsize)))
                datasets.append(Dataset(name, shape, dtype, pieces, attrs=given.get(name, {})))
            sizes = [dataset.dtype.itemsize for dataset in datasets]
            owner = lambda i, elements: elements * sizes[i] // _SHARE % team.size  # noqa: E731
            # MPI-IO and system calls must not be mixed in one file: boxes of any shape are written by system calls.
            options = SaveOptions("posix", limit, attrs=given.get("", {}))
            self._saving = Saving(team, VERB, target, datasets, owner, options)
            self._written = [Written(dataset) for dataset in datasets]
            self._index = {dataset.name: i for i, dataset in enumerate(datasets)}
            self._window, self._open = limit, True

    def write(self, name: str, x: Tensor, offset: Sequence[int]) -> None:
        """Write a box of a tensor. On this rank alone; boxes must not overlap, on this rank or between ranks.

        Args:
            name: of the tensor.
            x: the box: any strides, on the CPU or a GPU, of the tensor's dtype and number of dims.
            offset: where it begins in the whole, an entry for every dim.

        Raises:
            FileError: no such tensor; OSError: it cannot be written; ValueError: it does not fit, the file is closed;
            TypeError: `x` is not a tensor.
        """
        if not self._open:
            raise refusal(ValueError, "HD422", "the file is closed")
        if name not in self._index:
            raise FileError("HD408", f"{self._saving.map.path}: has no tensor {name!r}; it has: {listed(self._index)}")
        if not isinstance(x, Tensor):
            raise refusal(TypeError, "HD201", not_a_tensor(x, "x"))
        i = self._index[name]
        dataset = self._saving.datasets[i]
        box = Box(tuple(index(o) for o in offset), tuple(x.shape))
        _check_inside(box, dataset.shape)
        if x.dtype != dataset.dtype:
            raise refusal(ValueError, "HD422", f"x has dtype {x.dtype}, expected {dataset.dtype}, that of {name!r}")
        data = memory(row_major(local.tensor(x, 0, "x")[0].cpu()).view(x.shape))
        starts, length = starts_of(box, dataset.shape)
        self._saving.write_runs(i, starts, length * x.itemsize, data)
        self._written[i].add(box, starts, length, data)

    def __enter__(self) -> WriteFile:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        saving, self._open = self._saving, False
        if error is not None:  # the others may be anywhere: nothing collective can be done here
            saving.drop()
            return
        saving.verb = "staging.close"
        try:
            with agreed(saving.team, saving.verb, lambda: None), saving:
                check_complete(saving, self._written)
                saving.sync()
                if not any(objects.all_gather_object(saving.team.comm, saving.problem is not None)):
                    record_checksums(saving, self._written, self._window)
        except BaseException:  # also before the block
            saving.drop()
            raise


def _check_inside(box: Box, shape: Sequence[int]) -> None:
    if not box.is_in(shape):
        raise refusal(
            ValueError, "HD213", f"box (offset {box.offset}, shape {box.shape}) is not in shape {tuple(shape)}"
        )
