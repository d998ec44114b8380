"""A file that is read a box at a time, by one rank."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from hpcdist.errors import FileError, listed, reason
from hpcdist.files import h5
from hpcdist.layout import Box
from hpcdist.staging.contents import Contents, Stored, describe
from hpcdist.staging.links import hard_path
from hpcdist.staging.reader import Reader, opened
from hpcdist.tensors.eager import recorded
from hpcdist.tensors.storage import written
from hpcdist.validation import local

__all__ = ["ReadFile", "inside"]


class ReadFile:
    """An HDF5 file that is read a box at a time, on this rank alone. Made by :func:`open`; to be closed.

    Attributes:
        names: of its tensors.
    """

    def __init__(self, path: str, window: int) -> None:
        self._window = window
        self._fd = -1
        while True:
            self._contents: Contents = describe(path)
            self._open = opened(path)
            fd = self._open.__enter__()
            if self._contents.is_in(fd):  # else it was replaced in between
                break
            self._open.__exit__(None, None, None)
        self._fd = fd
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
            place = hard_path(self._contents.path, file, name)
            if place is None:
                raise FileError(f"{self._contents.path}: holds no {name!r}")
            found = dict(file[place or "/"].attrs)
        return {key: value for key, value in found.items() if key != h5.DTYPE_ATTRIBUTE}

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
        if (untraceable := recorded()) is not None:
            raise ValueError(f"read(): {untraceable}")
        stored = self._stored(name)
        start = tuple(index(o) for o in offset) if offset is not None else (0,) * len(stored.shape)
        inside(Box(start, (0,) * len(start)), stored.shape)
        rest = (extent - o for extent, o in zip(stored.shape, start, strict=True))
        box = Box(start, tuple(index(n) for n in (rest if shape is None else shape)))
        inside(box, stored.shape)
        if out is not None:
            try:
                local.tensor(out, 0, "out")
            except local.WrongError as error:
                raise ValueError(str(error)) from error
        if out is None:
            target = torch.empty(box.shape, dtype=stored.dtype, device="cpu" if device is None else device)
        elif out.dtype != stored.dtype or tuple(out.shape) != box.shape:
            raise ValueError(f"out is {out.dtype} of shape {tuple(out.shape)}, expected {stored.dtype} of {box.shape}")
        else:
            target = written(out, out.detach())
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
        if name.strip("/") in self._contents.elsewhere:
            self._contents.require(name.strip("/"))
        stored = self._contents.datasets.get(name.strip("/"))
        if stored is None:
            raise FileError(f"{self._contents.path}: holds no tensor {name!r}; it has: {listed(self.names)}")
        return stored


def inside(box: Box, shape: Sequence[int]) -> Box:
    """The box, if it is a part of a tensor of that shape; else a ValueError."""
    if not box.is_in(shape):
        raise ValueError(f"box (offset {box.offset}, shape {box.shape}) is not in shape {tuple(shape)}")
    return box
