"""File names with the number of a part in them: ``parts/{rank:04d}.npy``."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from string import Formatter

from hpcdist.errors import InputError

__all__ = ["check_distinct", "file_names"]

_WIDTH = re.compile(r"0?\d{0,2}d?")


def file_names(pattern: str, count: int) -> list[str]:
    """Return the name of each of `count` parts.

    Raises:
        InputError: `pattern` is not a pattern, or gives two parts the same name.

    Example::

        >>> file_names("parts/{rank:04d}.npy", 3)[2]
        'parts/0002.npy'
    """
    try:
        fields = [field[1:] for field in Formatter().parse(pattern) if field[1] is not None]
        if any(name != "rank" or change or not _WIDTH.fullmatch(how or "") for name, how, change in fields):
            raise ValueError("unsupported field")
        names = [pattern.format(rank=i) for i in range(count)]
    except ValueError as error:
        raise InputError(
            "HD506", f"{pattern}: cannot be a pattern ({error}); write the number of a part as {{rank}} or {{rank:04d}}"
        ) from error
    if len(set(names)) < count:
        raise InputError("HD506", f"{pattern}: gives parts the same name; write {{rank}} or {{rank:04d}} into it")
    return names


def check_distinct(names: Iterable[str]) -> None:
    """Find two names of one file, through links or "..".

    Raises:
        InputError: there are two.
    """
    seen: dict[str, str] = {}
    for name in names:
        other = seen.setdefault(os.path.realpath(name), name)
        if other != name:
            raise InputError("HD507", f"{name}: is the same file as {other}")
