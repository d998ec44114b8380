"""One array in an open file, of any format, and which of several is meant."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hpcdist.errors import InputError, listed
from hpcdist.layout import Box

__all__ = ["Opened", "pick"]


@dataclass(frozen=True)
class Opened:
    """An array in an open file.

    Attributes:
        name: of the array in the file; "" in a format that holds one array without a name.
        shape, dtype: of the array.
        read: fills a CPU tensor with a box of it, in host memory of at most so many bytes: read(box, out, window).
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[Box, Tensor, int], None]


def pick(path: str, name: str | None, names: Sequence[str]) -> str:
    """The array that is meant: the one that is named, or the only one.

    Raises:
        InputError: there is no such array, or there are several, or none.
    """
    if name is not None:
        if name not in names:
            raise InputError(f"{path}: holds no array {name!r}; it has: {listed(names)}")
        return name
    if not names:
        raise InputError(f"{path}: holds no array")
    if len(names) > 1:
        raise InputError(f"{path}: holds {len(names)} arrays; name one as {path}:NAME; it has: {listed(names)}")
    return names[0]
