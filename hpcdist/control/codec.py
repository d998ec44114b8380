"""Nested values <-> JSON. No pickle: decoding runs no code, imports nothing, and makes only classes of data.

None, booleans, numbers and strings are encoded as JSON does; everything else as a list that begins with a kind:

    ["z", re, im] a complex number             ["i", "-ff"] an integer of more than 64 bits
    ["l", ...] a list                          ["t", ...] a tuple
    ["N", class, ...] a named tuple            ["D", class, [name, value], ...] a dataclass
    ["d", [key, value], ...] a dict            ["o", [key, value], ...] an OrderedDict

Other values are leaves, whose kinds the caller chooses: see :mod:`hpcdist.tensors.tree`.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from types import ModuleType
from typing import Any, NamedTuple

from hpcdist.errors import refusal

MAX_DEPTH = 100  # levels; anything deeper contains itself, or is not data
CONTAINERS = ("l", "t", "N", "D", "d", "o")
_JSON_INT = 2**63
_PAIRS = ("D", "d", "o")  # each part follows its name or key


class UnsupportedError(TypeError):
    """A part that cannot be encoded; its path is collected from the inside out."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.path: list[str] = []


class Node(NamedTuple):
    """A container in a structure, or its description.

    Attributes:
        kind: one of CONTAINERS.
        cls: class name of a named tuple or dataclass, as find_class() takes it; else empty.
        names: names of the parts: their numbers, the names of fields, or the descriptions of keys.
        parts: values of the parts, or their descriptions.
    """

    kind: str
    cls: str
    names: Sequence[Any]
    parts: Sequence[Any]

    def label(self, i: int) -> str:
        """Return the name of a part, to be appended to the path of the node."""
        if self.kind == "D":
            return f".{self.names[i]}"
        return f"[{self.keys()[i]!r:.40}]" if self.kind in _PAIRS else f"[{i}]"

    def keys(self) -> list[Any]:
        """Return the keys of a dict, decoded."""
        return [rebuild(name, _not_in_key) for name in self.names]

    def spec(self, parts: Sequence[Any]) -> list[Any]:
        """Return the description of the node with these parts."""
        head = [self.kind, self.cls] if self.cls else [self.kind]
        return head + ([[n, p] for n, p in zip(self.names, parts, strict=True)] if self.kind in _PAIRS else [*parts])

    def build(self, values: Sequence[Any]) -> Any:
        """Build the object whose parts have these values.

        Raises:
            TypeError: if its class is unknown here, or has other fields.
        """
        if self.kind == "l":
            return list(values)
        if self.kind == "t":
            return tuple(values)
        if self.cls:
            return self._object(values)
        pairs = zip(self.keys(), values, strict=True)
        return dict(pairs) if self.kind == "d" else OrderedDict(pairs)

    def _object(self, values: Sequence[Any]) -> Any:
        """Build an object with these fields as copy.copy() does: __init__ does not run."""
        kind = same_class(self.cls, *self.names)
        if self.kind == "N":
            return tuple.__new__(kind, values)
        made: Any = object.__new__(kind)
        for name, value in zip(self.names, values, strict=True):
            object.__setattr__(made, name, value)
        return made


def node_of(spec: Any) -> Node | None:
    """Parse a description into a node; return None for a leaf.

    Raises:
        ValueError, TypeError: if the description is damaged.
    """
    if not isinstance(spec, list) or spec[0] not in CONTAINERS:
        return None
    kind, *parts = spec
    cls = str(parts.pop(0)) if kind in ("N", "D") else ""
    if kind not in _PAIRS:
        return Node(kind, cls, range(len(parts)), parts)
    names = [name for name, _ in parts]
    return Node(kind, cls, names, [part for _, part in parts])


def describe(value: Any, leaf: Callable[[Any], Any], rest: Callable[[Any], Any], depth: int = 0) -> Any:
    """Describe a structure.

    Args:
        leaf: returns the description of a leaf, or NotImplemented for what may be a container.
        rest: describes what is neither, or raises an UnsupportedError.

    Raises:
        UnsupportedError: if a part cannot be described.
        RecursionError: if it is nested too deeply, or contains itself.
    """
    kind = type(value)
    if value is None or kind in (bool, str, float):
        return value
    if kind is int:
        return value if -_JSON_INT < value < _JSON_INT else ["i", format(value, "x")]
    if kind not in (list, tuple, dict) and (spec := leaf(value)) is not NotImplemented:
        return spec
    if depth > MAX_DEPTH:
        raise RecursionError
    if kind is complex:
        return ["z", value.real, value.imag]
    node = _node(value, kind)
    if node is None:
        return rest(value)
    found = []
    for i, part in enumerate(node.parts):
        try:
            found.append(describe(part, leaf, rest, depth + 1))
        except UnsupportedError as error:
            fields = getattr(kind, "_fields", None)
            error.path.append(f".{fields[i]}" if fields else node.label(i))
            raise
    if node.kind in ("d", "o"):
        node = node._replace(names=[_key(key) for key in node.names])
    return node.spec(found)


def _node(value: Any, kind: type) -> Node | None:
    """Return the node of a container, with its keys themselves as names; None for a leaf."""
    if kind is list or kind is tuple:
        return Node("l" if kind is list else "t", "", range(len(value)), value)
    if kind is dict or kind is OrderedDict:
        return Node("d" if kind is dict else "o", "", list(value), list(value.values()))
    cls, fields = _class_of(kind)
    if fields is None:
        return None
    is_tuple = issubclass(kind, tuple)
    _check_attributes(value, kind, () if is_tuple else fields)
    if is_tuple and len(value) != len(fields):
        raise UnsupportedError(f"has {len(value)} items, but its class {cls} has the fields {fields}")
    if is_tuple:
        return Node("N", cls, range(len(value)), value)
    return Node("D", cls, fields, [getattr(value, name) for name in fields])


@lru_cache(maxsize=1024)
def _class_of(kind: type) -> tuple[str, Sequence[str] | None]:
    """Return name and fields of a dataclass or named tuple; no fields of any other class."""
    fields: Any = getattr(kind, "_fields", None)
    if not (issubclass(kind, tuple) and isinstance(fields, tuple)):
        if not dataclasses.is_dataclass(kind) or any("__new__" in vars(base) for base in kind.__mro__[:-1]):
            return "", None  # one with a __new__ of its own is more than its fields
        fields = [field.name for field in dataclasses.fields(kind)]
    name = f"{kind.__module__}:{kind.__qualname__}"
    try:
        found = find_class(name)
    except TypeError:
        found = None
    if found is not kind:
        raise UnsupportedError(f"is of class {name}, which no other rank can find by that name: define it in a module")
    return name, fields


def _check_attributes(value: Any, kind: type, fields: Sequence[str]) -> None:
    """Refuse an object with attributes besides its fields, which would be lost; cached properties can be recomputed."""
    for name in (*getattr(value, "__dict__", ()), *(name for name in _slots(kind) if hasattr(value, name))):
        if name not in fields and not isinstance(getattr(kind, name, None), cached_property):
            raise UnsupportedError(f"has the attribute {name!r}, which is not one of its fields and would be lost")


@lru_cache(maxsize=1024)
def _slots(kind: type) -> list[str]:
    slots = [vars(base).get("__slots__", ()) for base in kind.__mro__]
    names = [name for of in slots for name in ([of] if isinstance(of, str) else of)]
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _key(key: Any) -> Any:
    try:
        return describe(key, lambda value: NotImplemented, _not_in_key)
    except UnsupportedError:
        text = f"has the key {key!r:.40}; expected strings, numbers, None, or tuples of these"
        raise UnsupportedError(text) from None


def _not_in_key(*leaf: Any) -> Any:
    raise UnsupportedError("a key of a dict holds something other than strings and numbers")


def find_class(name: str) -> type:
    """Find the dataclass or named tuple of that name in a module that this process has already imported.

    Raises:
        TypeError: if there is no such class. A name in a message never causes an import or a call.
    """
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):  # not getattr, which may run code of the module or class
        found = vars(found).get(part) if isinstance(found, (type, ModuleType)) else None
    is_tuple = isinstance(found, type) and issubclass(found, tuple) and isinstance(getattr(found, "_fields", 0), tuple)
    if not (is_tuple or (isinstance(found, type) and dataclasses.is_dataclass(found))):
        raise refusal(TypeError, "HD303", f"{name} is not a dataclass or named tuple that this rank has imported")
    return found  # type: ignore[no-any-return]


def same_class(name: str, *parts: str | int) -> type:
    """Find a class as find_class() does, and compare its fields: by name, or by number for a named tuple.

    Raises:
        TypeError: if it is unknown here, or has other fields.
    """
    kind = find_class(name)
    fields = tuple(_class_of(kind)[1] or ())
    if parts != (tuple(range(len(fields))) if issubclass(kind, tuple) else fields):
        raise refusal(TypeError, "HD303", f"{name} has the fields {list(fields)} here, and others on the sender")
    return kind


def classes_in(spec: Any) -> set[tuple[Any, ...]]:
    """Return the arguments of same_class() for all classes in a description."""
    node = node_of(spec)
    if node is None:
        return set()
    return ({(node.cls, *node.names)} if node.cls else set()).union(*map(classes_in, node.parts))


def rebuild(spec: Any, leaf: Callable[..., Any]) -> Any:
    """Rebuild a structure from its description.

    Args:
        leaf: takes the kind of a leaf and what follows it in its description, and returns its value.

    Raises:
        TypeError: if a class is unknown here; ValueError: if the description is damaged.
    """
    if not isinstance(spec, list):
        return spec
    if spec[0] == "z":
        return complex(spec[1], spec[2])
    if spec[0] == "i":
        return int(spec[1], 16)
    node = node_of(spec)
    return leaf(*spec) if node is None else node.build([rebuild(part, leaf) for part in node.parts])
