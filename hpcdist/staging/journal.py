"""A record of what the ranks of a save have written so far, for one that resumes it: a file beside the part.

Each rank has a slot, and appends to its own pages only.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Journal", "read"]

_RECORD = np.dtype([("tensor", "<i8"), ("row", "<i8"), ("xxh3_64", "<u8"), ("check", "<u8")])
_SALT = 0x9E3779B97F4A7C15  # so that zeros are not a record


class Journal:
    """This rank's slot, open for appending.

    Args:
        start: the first byte of the slot.
    """

    def __init__(self, path: Path, start: int) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        self._place = start

    def note(self, tensor: int, row: int, checksum: int) -> None:
        """Note that a piece is complete."""
        record = np.array([(tensor, row, checksum, _check(tensor, row, checksum))], _RECORD)
        self._place += os.pwrite(self._fd, record.tobytes(), self._place)

    def close(self) -> None:
        os.close(self._fd)


def nbytes(records: int, page: int) -> int:
    """The size of a slot for so many records: whole pages."""
    return -(-records * _RECORD.itemsize // page) * page


def read(path: Path) -> dict[tuple[int, int], int]:
    """(tensor, row) -> checksum of the pieces that were noted; empty if there is no journal."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return {}
    table: Any = np.frombuffer(content[: len(content) // _RECORD.itemsize * _RECORD.itemsize], _RECORD)
    found = {}
    for tensor, row, checksum, check in table[table["check"] != 0].tolist():
        if check == _check(tensor, row, checksum):  # else its writer died while it wrote the record
            found[tensor, row] = checksum
    return found


def _check(tensor: int, row: int, checksum: int) -> int:
    return (checksum ^ (tensor * 0x1_0000_0001 + row + _SALT)) & (2**64 - 1)
