"""File names with the number of a part in them: ``parts/{rank:04d}.npy``."""

from __future__ import annotations

from hpcdist.errors import InputError

__all__ = ["Names"]


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
            self._names = [pattern.format(rank=i) for i in range(count)]
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            raise InputError(
                f"{pattern}: cannot be a pattern ({error}); write the number of a part as {{rank}} or {{rank:04d}}"
            ) from error
        if len(set(self._names)) < count:
            raise InputError(f"{pattern}: gives parts the same name; write {{rank}} or {{rank:04d}} into it")

    def __getitem__(self, i: int) -> str:
        return self._names[i]

    def __len__(self) -> int:
        return len(self._names)
