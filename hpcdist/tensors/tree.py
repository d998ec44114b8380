"""Nested structure <-> a description in JSON, and flat tensors. No pickle, unless it is asked for.

A description is what JSON has for None, booleans, numbers and strings; all else is a list that begins with a kind:

    ["x", i] a tensor          ["n", i] a numpy array      ["g", i] a numpy number
    ["b", i] bytes             ["a", i] a bytearray        ["p", i] a pickle
    ["z", re, im] a complex number                         ["i", "-ff"] an integer of more than 64 bits
    ["l", ...] a list          ["t", ...] a tuple          ["N", class, ...] a named tuple
    ["d", [key, value], ...] a dict                        ["o", [key, value], ...] an OrderedDict
    ["D", class, [name, value], ...] a dataclass

where i counts the tensors, in which the bytes of all but the structure itself travel.
"""

from __future__ import annotations

import dataclasses
import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcdist.errors import HpcdistError, reason
from hpcdist.tensors import storage

__all__ = ["TENSORS", "Leaf", "Node", "Tree", "classes_in", "find_class", "finished", "flatten", "node_of", "rebuild"]

MAX_DEPTH = 100  # levels: what is deeper contains itself, or is no data
_JSON_INT = 2**63
TENSORS = ("x", "n", "g", "b", "a", "p")
CONTAINERS = ("l", "t", "N", "D", "d", "o")
_PAIRS = ("D", "d", "o")  # each part of them follows its name or key
_ARRAYS = (np.ndarray, np.memmap)  # other classes mean more than their elements: a mask, another way to multiply


class Node(NamedTuple):
    """What holds others in a structure, as its description has it.

    Attributes:
        kind: one of CONTAINERS.
        cls: the class of a named tuple or dataclass, as find_class() takes it; else empty.
        names: of the parts: their numbers, the names of fields, or the descriptions of keys.
        parts: the values, or their descriptions.
    """

    kind: str
    cls: str
    names: Sequence[Any]
    parts: Sequence[Any]

    def label(self, i: int) -> str:
        """The name of a part as it is written after that of the whole."""
        if self.kind == "D":
            return f".{self.names[i]}"
        return f"[{self.names[i]!r:.40}]" if self.kind in _PAIRS else f"[{i}]"

    def spec(self, parts: Sequence[Any]) -> list[Any]:
        """The description with these parts."""
        head = [self.kind, self.cls] if self.cls else [self.kind]
        return head + ([[n, p] for n, p in zip(self.names, parts, strict=True)] if self.kind in _PAIRS else [*parts])

    def build(self, values: Sequence[Any]) -> Any:
        """The object whose parts have these values.

        Raises:
            TypeError: its class is not known here, or has other fields.
        """
        if self.kind == "l":
            return list(values)
        if self.kind == "t":
            return tuple(values)
        if self.kind == "N":
            return _named_tuple(self.cls, values)
        if self.kind == "D":
            return _dataclass(self.cls, list(zip(self.names, values, strict=True)))
        pairs = zip([rebuild(key, _no_tensor) for key in self.names], values, strict=True)
        return dict(pairs) if self.kind == "d" else OrderedDict(pairs)


def node_of(spec: Any) -> Node | None:
    """The node that a description stands for; None for a leaf.

    Raises:
        ValueError, TypeError: the description is damaged.
    """
    if not isinstance(spec, list) or spec[0] not in CONTAINERS:
        return None
    kind, *parts = spec
    cls = str(parts.pop(0)) if kind in ("N", "D") else ""
    if kind not in _PAIRS:
        return Node(kind, cls, range(len(parts)), parts)
    names = [name for name, _ in parts]
    return Node(kind, cls, names, [part for _, part in parts])


def _no_tensor(kind: str, number: int) -> Any:
    raise ValueError("a key of a dict holds a tensor")


class Tree(NamedTuple):
    """A structure, taken apart: its description, and the tensors in the order of their numbers."""

    spec: Any
    tensors: list[Tensor]


def flatten(value: Any, allow_pickle: bool = False, name: str = "x") -> Tree:
    """Take a structure apart.

    Raises:
        TypeError: something in it cannot travel; the text says what, and where in `name`.
        ValueError: it is nested too deeply, or contains itself.
    """
    tensors: list[Tensor] = []
    try:
        return Tree(_flatten(value, tensors, allow_pickle, 0), tensors)
    except _RefusedError as refused:
        raise TypeError(f"{name}{''.join(reversed(refused.path))} {refused}") from None
    except RecursionError:
        raise ValueError(f"{name}: nested more than {MAX_DEPTH} levels deep, or it contains itself") from None


class _RefusedError(Exception):
    """What cannot travel; on its way out it learns where it was, from the inside."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.path: list[str] = []


def _flatten(value: Any, tensors: list[Tensor], allow_pickle: bool, depth: int) -> Any:
    if isinstance(value, Tensor):
        problem = storage.problem(value)
        if problem is not None:
            raise _RefusedError(problem)
        return _tensor("x", storage.plain(value), tensors)
    kind = type(value)
    if value is None or kind in (bool, str, float):
        return value
    if kind is int:
        return value if -_JSON_INT < value < _JSON_INT else ["i", format(value, "x")]
    if depth > MAX_DEPTH:
        raise RecursionError
    if kind is complex:
        return ["z", value.real, value.imag]
    if kind in (bytes, bytearray):
        return _tensor("b" if kind is bytes else "a", storage.of_bytes(value), tensors)
    if kind in _ARRAYS or (isinstance(value, np.generic) and kind.__module__ == "numpy"):
        try:
            return _tensor("n" if kind in _ARRAYS else "g", _of_numpy(value), tensors)
        except _RefusedError:
            if not allow_pickle:
                raise
    node = _node(value, kind)
    if node is not None:
        found = []
        for i, part in enumerate(node.parts):
            try:
                found.append(_flatten(part, tensors, allow_pickle, depth + 1))
            except _RefusedError as refused:
                fields = getattr(kind, "_fields", None)
                refused.path.append(f".{fields[i]}" if fields else node.label(i))
                raise
        if node.kind in ("d", "o"):
            node = node._replace(names=[_key(key) for key in node.names])
        return node.spec(found)
    if not allow_pickle:
        raise _RefusedError(
            f"is a {kind.__module__}.{kind.__qualname__}, which is not sent; expected tensors, numpy arrays, "
            "numbers, strings, bytes or None, in lists, tuples, dicts, named tuples or dataclasses "
            "(or pass allow_pickle=True)"
        )
    return _tensor("p", storage.of_bytes(pickle.dumps(value, pickle.HIGHEST_PROTOCOL)), tensors)


def _node(value: Any, kind: type) -> Node | None:
    """What holds others, with its keys themselves as names; None for a leaf."""
    if kind is list or kind is tuple:
        return Node("l" if kind is list else "t", "", range(len(value)), value)
    if kind is dict or kind is OrderedDict:
        return Node("d" if kind is dict else "o", "", list(value), list(value.values()))
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        _nothing_beside(value, kind, ())
        return Node("N", _class_name(kind), range(len(value)), value)
    plain = "__new__" not in {name for base in kind.__mro__[:-1] for name in vars(base)}
    if dataclasses.is_dataclass(value) and plain and not isinstance(value, torch.nn.Module):
        names = [field.name for field in dataclasses.fields(value)]
        _nothing_beside(value, kind, names)
        return Node("D", _class_name(kind), names, [getattr(value, name) for name in names])
    return None


def _nothing_beside(value: Any, kind: type, fields: Sequence[str]) -> None:
    """Refuse what has attributes besides its fields: they would be lost. (Those that can be computed again may be.)"""
    for name in getattr(value, "__dict__", ()):
        if name not in fields and not isinstance(getattr(kind, name, None), cached_property):
            raise _RefusedError(f"has the attribute {name!r}, which is none of its fields and would be lost")


def _key(key: Any) -> Any:
    tensors: list[Tensor] = []
    try:
        spec = _flatten(key, tensors, False, 0)
    except _RefusedError:
        spec = None
        tensors = [torch.empty(0, device="cpu")]
    if tensors:
        raise _RefusedError(f"has the key {key!r:.40}; expected strings, numbers, None, or tuples of these")
    return spec


def _tensor(kind: str, x: Tensor, tensors: list[Tensor]) -> list[Any]:
    tensors.append(x)
    return [kind, len(tensors) - 1]


def _of_numpy(value: np.ndarray[Any, Any] | np.generic) -> Tensor:
    array = np.asarray(value)
    stepped = any(stride < 0 or stride % array.itemsize for stride in array.strides if array.itemsize)
    cannot_be_shared = not array.flags.writeable or not array.flags.aligned or stepped
    array = array.astype(array.dtype.newbyteorder("="), copy=cannot_be_shared)
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError):
        raise _RefusedError(f"is a numpy array of dtype {array.dtype}, which no tensor can hold") from None


def _class_name(kind: type) -> str:
    name = f"{kind.__module__}:{kind.__qualname__}"
    try:
        found = find_class(name)
    except TypeError:
        found = None
    if found is not kind:
        raise _RefusedError(f"is of class {name}, which no other rank can find by that name: define it in a module")
    return name


def find_class(name: str) -> type:
    """The dataclass or named tuple of that name, in a module that this process has imported itself.

    Raises:
        TypeError: there is none; nothing is imported, or called, because a message names it.
    """
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):  # not getattr, which may run code of the module or the class
        found = vars(found).get(part) if isinstance(found, (type, ModuleType)) else None
    is_tuple = isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_fields")
    if not (is_tuple or (isinstance(found, type) and dataclasses.is_dataclass(found))):
        raise TypeError(f"{name} is no dataclass or named tuple that this rank has imported")
    return found  # type: ignore[no-any-return]


def classes_in(spec: Any) -> set[str]:
    """The names of all classes in a description."""
    node = node_of(spec)
    if node is None:
        return set()
    return ({node.cls} if node.cls else set()).union(*map(classes_in, node.parts))


Leaf = Callable[[str, int], Any]  # (kind, number of the tensor) -> what takes its place


def rebuild(spec: Any, leaf: Leaf) -> Any:
    """Put a structure together again.

    Raises:
        TypeError: a class is not known here; ValueError: the description is none.
    """
    if not isinstance(spec, list):
        return spec
    kind = spec[0]
    if kind in TENSORS:
        return leaf(kind, spec[1])
    if kind == "z":
        return complex(spec[1], spec[2])
    if kind == "i":
        return int(spec[1], 16)
    node = node_of(spec)
    if node is None:
        raise ValueError(f"a description of a structure has the unknown kind {kind!r:.40}")
    return node.build([rebuild(part, leaf) for part in node.parts])


def _named_tuple(name: str, values: Sequence[Any]) -> Any:
    kind: Any = find_class(name)
    if len(values) != len(kind._fields):
        raise TypeError(f"{name} has {len(kind._fields)} fields here, and {len(values)} elsewhere")
    return tuple.__new__(kind, values)


def _dataclass(name: str, fields: Sequence[tuple[str, Any]]) -> Any:
    """An object with these fields, as copying makes one: its __init__ does not run."""
    kind = find_class(name)
    known = {field.name for field in dataclasses.fields(kind)}
    if {field for field, _ in fields} != known:
        raise TypeError(f"{name} has the fields {sorted(known)} here, and {sorted(f for f, _ in fields)} elsewhere")
    made: Any = object.__new__(kind)
    for field, value in fields:
        object.__setattr__(made, field, value)
    return made


def finished(kind: str, x: Tensor, allow_pickle: bool) -> Any:
    """What a tensor that has arrived stands for.

    Raises:
        TypeError: it is a pickle, and they are not allowed.
        HpcdistError: it is one that cannot be read here.
    """
    if kind == "x":
        return x
    array = x.numpy()
    if kind == "n":
        return array
    if kind == "g":
        return array[()]
    if kind == "b":
        return array.tobytes()
    if kind == "a":
        return bytearray(array)
    if not allow_pickle:
        raise TypeError("a pickle has come, which is not read unless allow_pickle=True is passed here too")
    try:
        return pickle.loads(array.tobytes())
    except Exception as error:
        raise HpcdistError(f"a pickle that has come cannot be read: {type(error).__name__}: {reason(error)}") from error
