"""open(): a file that is read, or written, a box at a time."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, overload

from hpcdist.runtime import world
from hpcdist.staging.readfile import ReadFile
from hpcdist.staging.saving import WINDOW
from hpcdist.staging.writefile import WriteFile

if TYPE_CHECKING:
    from hpcdist.comm.signatures import GroupLike

__all__ = ["ReadFile", "WriteFile", "open"]


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
    if mode == "r":
        if tensors is not None or attrs is not None or group is not None:
            raise TypeError("tensors, attrs and group are for mode 'w'")
        return ReadFile(os.fsdecode(path), window)
    if mode != "w":
        raise ValueError(f"mode is {mode!r}, expected 'r' or 'w'")
    return WriteFile(world.current().context.team_of(group), path, tensors, attrs, window)
