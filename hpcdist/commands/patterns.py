"""File names with the number of a part in them: ``parts/{rank:04d}.npy``."""

from __future__ import annotations

import os
import re
from string import Formatter

from hpcdist.errors import InputError

__all__ = ["Names"]

_WIDTH = re.compile(r"0?\d{0,2}d?")


class Names:
    """The names that a pattern stands for: ``names[i]`` for each of `count` parts.

    Raises:
        InputError: the pattern is none, or gives two parts the same name.

    Example::

        >>> Names("parts/{rank:04d}.npy", 3)[2]
        'parts/0002.npy'
    """

    def __init__(self, pattern: str, count: int) -> None:
        try:
            fields = [field[1:] for field in Formatter().parse(pattern) if field[1] is not None]
            if any(name != "rank" or change or not _WIDTH.fullmatch(how or "") for name, how, change in fields):
                raise ValueError("of another kind")
            self._names = [pattern.format(rank=i) for i in range(count)]
        except ValueError as error:
            raise InputError(
                f"{pattern}: cannot be a pattern ({error}); write the number of a part as {{rank}} or {{rank:04d}}"
            ) from error
        if len(set(self._names)) < count:
            raise InputError(f"{pattern}: gives parts the same name; write {{rank}} or {{rank:04d}} into it")

    def check(self) -> None:
        """Find names that are one file all the same: by way of links, or of "..".

        Raises:
            InputError: there are two.
        """
        seen: dict[str, str] = {}
        for name in self._names:
            other = seen.setdefault(os.path.realpath(name), name)
            if other != name:
                raise InputError(f"{name}: is the same file as {other}")

    def __getitem__(self, i: int) -> str:
        return self._names[i]

    def __len__(self) -> int:
        return len(self._names)
