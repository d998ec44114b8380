"""open(): a file that is read, or written, a box at a time."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from operator import index
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor

from hpcdist import agree, checks, layout, world
from hpcdist.buffers import DTYPES
from hpcdist.checks import Call
from hpcdist.errors import FileError, reason
from hpcdist.layout import Box
from hpcdist.raw import Raw
from hpcdist.staging import format
from hpcdist.staging.contents import Contents, Stored, describe
from hpcdist.staging.format import Dataset
from hpcdist.staging.names import flatten
from hpcdist.staging.pieces import PIECE, owners_of
from hpcdist.staging.reader import Reader, checksum_of, opened
from hpcdist.staging.saving import WINDOW, Options, Saving
from hpcdist.team import Team, team_of

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["ReadFile", "WriteFile", "open"]

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
    group: dist.ProcessGroup | MPI.Comm | None = None,
) -> WriteFile: ...
def open(
    path: str | os.PathLike[str],
    mode: str = "r",
    tensors: Mapping[str, Any] | None = None,
    *,
    attrs: Mapping[str, Mapping[str, Any]] | None = None,
    window: int = WINDOW,
    group: dist.ProcessGroup | MPI.Comm | None = None,
) -> ReadFile | WriteFile:
    """Open a file for piecewise work, when not even a rank's own shard fits in memory.

    With mode "r" on this rank alone; with mode "w" collective over `group`.

    Args:
        path: of the file.
        mode: "r" to read any HDF5 file, "w" to write a new one.
        tensors: of mode "w": (shape, dtype) by name, dicts may be nested. Must agree.
        attrs: of mode "w": HDF5 attributes by name of the tensor; "" for the file. Rank 0's are written.
        window: bytes of host memory for what is on its way.
        group: of mode "w": the ranks that write; None for all.

    Returns:
        A :class:`ReadFile` or a :class:`WriteFile`, for a ``with`` block.

    Raises:
        FileError: of mode "r": no such file, not HDF5, incomplete, truncated.
        RankError: of mode "w", on every rank: arguments that are wrong or differ, a file that cannot be made.

    Example::

        >>> with hd.staging.open("x.h5", "w", {"x": ((1000, 64), torch.float32)}) as file:
        ...     for row in range(rank, 1000, size):
        ...         file.write("x", compute(row), offset=(row, 0))     # compute(row) has shape (1, 64)
        >>> with hd.staging.open("x.h5") as file:
        ...     file.read("x", (10, 0), (2, 64)).shape
        torch.Size([2, 64])
    """
    if mode == "r":
        if tensors is not None or attrs is not None or group is not None:
            raise TypeError("tensors, attrs and group are for mode 'w'")
        return ReadFile(os.fspath(path), window)
    if mode != "w":
        raise ValueError(f"mode is {mode!r}, expected 'r' or 'w'")
    return WriteFile(team_of(group, world.current()), os.fspath(path), tensors, attrs, window)


class ReadFile:
    """An HDF5 file that is read a box at a time, on this rank alone. Made by :func:`open`; to be closed.

    Attributes:
        names: of its tensors.
    """

    def __init__(self, path: str, window: int) -> None:
        self._contents: Contents = describe(path)
        self._window = window
        self._open = opened(path)
        self._fd = self._open.__enter__()
        self.names = list(self._contents.datasets)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return self._stored(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor, as :meth:`read` gives it."""
        return self._stored(name).dtype

    def attrs(self, name: str = "") -> dict[str, Any]:
        """The HDF5 attributes of a tensor or a group; of the file itself for ""."""
        import h5py

        with h5py.File(self._contents.path, "r", locking="best-effort") as file:
            found = dict(file[name or "/"].attrs)
        return {key: value for key, value in found.items() if key != format.DTYPE_ATTRIBUTE}

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
            device: where the result is to be, without `out`; the CPU by default.
            verify: as in :func:`load`.

        Returns:
            The box: a tensor that the caller owns, or `out`.

        Raises:
            FileError: no such tensor, damaged, or it cannot be read.
            ValueError: a box that is not in the tensor, or does not fit `out`.
        """
        stored = self._stored(name)
        start = tuple(index(o) for o in offset) if offset is not None else (0,) * len(stored.shape)
        _inside(stored.shape, start, (0,) * len(start))
        rest = (extent - o for extent, o in zip(stored.shape, start, strict=True))
        box = Box(start, tuple(index(n) for n in (rest if shape is None else shape)))
        _inside(stored.shape, *box)
        if out is None:
            target = torch.empty(box.shape, dtype=stored.dtype, device=device)
        elif out.dtype != stored.dtype or tuple(out.shape) != box.shape:
            raise ValueError(f"out is {out.dtype} of shape {tuple(out.shape)}, expected {stored.dtype} of {box.shape}")
        else:
            target = out.detach()
        try:
            Reader(self._contents.path, self._fd, stored, self._window, verify).read(box, target)
        except OSError as error:
            raise FileError(f"{self._contents.path}: cannot be read: {reason(error)}") from error
        return target if out is None else out

    def close(self) -> None:
        """Once more does nothing."""
        if self._fd >= 0:
            self._fd = -1
            self._open.__exit__(None, None, None)

    def __enter__(self) -> ReadFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _stored(self, name: str) -> Stored:
        if self._fd < 0:
            raise ValueError("the file is closed")
        stored = self._contents.datasets.get(name.strip("/"))
        if stored is None:
            raise FileError(f"{self._contents.path}: holds no tensor {name!r}; it has: {', '.join(self.names[:6])}")
        return stored


class WriteFile:
    """A new file that ranks write a box at a time. Made by :func:`open`; used in a ``with`` block.

    At the end of the block, which is collective, the file appears under its name: if every element was written, and no
    rank has failed. An exception on one rank ends the job, and the name holds what it held.
    """

    def __init__(self, team: Team, path: str, tensors: Any, attrs: Any, window: int) -> None:
        call = Call(VERB)
        specs: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        try:
            for name, spec in flatten(tensors or {}).items():
                shape, dtype = spec
                if dtype not in DTYPES:
                    raise checks.WrongError(f"{name!r} has dtype {dtype}, which cannot be stored")
                specs[name] = (tuple(index(n) for n in shape), dtype)
        except Exception as error:  # the other ranks are to hear of it
            call.problem = checks.problem_of(error)
        agree.exchange(team, call)
        asks = team.comm.allgather((path, window, specs))
        odd = {rank: f"path, window or tensors differ from those of rank 0: {ask}" for rank, ask in enumerate(asks)}
        agree.require(VERB, {rank: text for rank, text in odd.items() if asks[rank] != asks[0]})
        self._team = team
        self._written = dict.fromkeys(specs, 0)
        datasets = []
        for name, (shape, dtype) in specs.items():
            pieces = list(layout.boxes(layout.whole(shape), max(1, min(PIECE, window) // dtype.itemsize)))
            datasets.append(Dataset(name, shape, dtype, pieces, attrs=(attrs or {}).get(name, {})))
        # MPI-IO and system calls are not to be mixed in one file: boxes of any shape go by system calls.
        options = Options("posix", window, attrs=(attrs or {}).get("", {}))
        self._saving = Saving(team, VERB, path, datasets, options)
        self._index = {dataset.name: i for i, dataset in enumerate(datasets)}
        self._fd = os.open(self._saving.layout.path, os.O_RDWR | os.O_CLOEXEC)

    def write(self, name: str, x: Tensor, offset: Sequence[int]) -> None:
        """Write a box of a tensor. On this rank alone; boxes must not overlap, on this rank or between ranks.

        Args:
            name: of the tensor.
            x: the box: any strides, on the CPU or a GPU, of the tensor's dtype and number of dims.
            offset: where it begins in the whole, an entry for every dim.

        Raises:
            FileError: no such tensor; OSError: it cannot be written; ValueError: it does not fit.
        """
        if name not in self._index:
            raise FileError(f"{self._saving.layout.path}: has no tensor {name!r}; it has: {', '.join(self._index)}")
        dataset = self._saving.datasets[self._index[name]]
        box = Box(tuple(index(o) for o in offset), tuple(x.shape))
        _inside(dataset.shape, *box)
        if x.dtype != dataset.dtype:
            raise ValueError(f"x has dtype {x.dtype}, expected {dataset.dtype}, that of {name!r}")
        self._raw(name).write(self._fd, box, checks.tensor(x, 0, "x")[0].cpu().contiguous())
        self._written[name] += box.size()

    def _raw(self, name: str) -> Raw:
        i = self._index[name]
        start = self._saving.layout.data[i]
        assert start is not None or 0 in self._saving.datasets[i].shape
        dataset = self._saving.datasets[i]
        return Raw(self._saving.layout.path, start or 0, dataset.shape, dataset.dtype)

    def __enter__(self) -> WriteFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:  # the others may be anywhere: nothing collective can be done here
            os.close(self._fd)
            self._saving.drop()
            return
        agree.exchange(self._team, Call("staging.close"))
        try:
            self._check_all_is_written()
            self._checksums()
            self._saving.finish()
        finally:
            os.close(self._fd)

    def _check_all_is_written(self) -> None:
        totals: dict[str, int] = {}
        for written in self._team.comm.allgather(self._written):
            for name, count in written.items():
                totals[name] = totals.get(name, 0) + count
        for dataset in self._saving.datasets:
            wanted = layout.whole(dataset.shape).size()
            if totals[dataset.name] != wanted:
                self._saving.fail(
                    ValueError(f"{dataset.name}: {totals[dataset.name]:,} elements were written, of {wanted:,}")
                )

    def _checksums(self) -> None:
        """Each rank takes those of its share of the pieces, whoever wrote them."""
        for i, dataset in enumerate(self._saving.datasets):
            owners = owners_of(len(dataset.pieces), self._team.size, self._team.size)
            for row in (row for row, owner in enumerate(owners) if owner == self._team.rank):
                try:
                    where = self._raw(dataset.name)
                    self._saving.record(i, row, checksum_of(self._fd, where, dataset.pieces[row]))
                except Exception as error:  # told to all in finish()
                    self._saving.fail(error)


def _inside(shape: Sequence[int], offset: Sequence[int], extent: Sequence[int]) -> None:
    right = len(offset) == len(extent) == len(shape) and all(
        o >= 0 and n >= 0 and o + n <= whole for o, n, whole in zip(offset, extent, shape, strict=True)
    )
    if not right:
        raise ValueError(f"box (offset {tuple(offset)}, shape {tuple(extent)}) is not in shape {tuple(shape)}")
