"""What this package replaces of others while it needs it, and puts back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _read(owner: Any, name: str) -> Any:
    return owner[name] if isinstance(owner, dict) else getattr(owner, name)


def _write(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(owner, name, value)


class Replaced:
    """Attributes of modules and classes, and items of dicts, that have other values for a while."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute of a module or class, or an item of a dict."""
        self.wrap(owner, name, lambda _: value)

    def wrap(self, owner: Any, name: str, around: Callable[[Any], Any]) -> None:
        """Replace one by what `around` makes of it."""
        before = _read(owner, name)
        value = around(before)
        self._before.append((owner, name, before, value))
        _write(owner, name, value)

    def put_back(self) -> list[str]:
        """Put everything back that still has the value of set(), the last first.

        Returns:
            The names of the rest, which somebody else has replaced since then, and which stay as they are.
        """
        others = []
        while self._before:
            owner, name, before, value = self._before.pop()
            if _read(owner, name) is value:
                _write(owner, name, before)
            else:
                others.append(name)
        return others
