"""Nested structure <-> a description in JSON, and flat tensors; structures that are merged into one, or cut into many.

No pickle, unless it is allowed.

None, booleans, numbers and strings are described by themselves; everything else is a list that starts with a kind:

    ["x", i] a tensor          ["n", i] a numpy array      ["g", i] a numpy number
    ["b", i] bytes             ["a", i] a bytearray        ["p", i] a pickle
    ["z", re, im] a complex number                         ["i", "-ff"] an integer of more than 64 bits
    ["l", ...] a list          ["t", ...] a tuple          ["N", class, ...] a named tuple
    ["d", [key, value], ...] a dict                        ["o", [key, value], ...] an OrderedDict
    ["D", class, [name, value], ...] a dataclass

where i is the number of a tensor. Tensors carry all data but the structure itself.
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

from hpcdist import layout
from hpcdist.errors import HpcdistError, RankError, coded, reason, refusal
from hpcdist.tensors import storage

MAX_DEPTH = 100  # levels; anything deeper contains itself, or is not data
_JSON_INT = 2**63
TENSORS = ("x", "n", "g", "b", "a", "p")
CONTAINERS = ("l", "t", "N", "D", "d", "o")
_PAIRS = ("D", "d", "o")  # each part follows its name or key
_ARRAYS = (np.ndarray, np.memmap)  # other classes are more than their elements: masked arrays, matrices


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
        return [rebuild(name, _no_tensor) for name in self.names]

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
        if self.kind == "N":
            return _named_tuple(self.cls, values)
        if self.kind == "D":
            return _dataclass(self.cls, list(zip(self.names, values, strict=True)))
        pairs = zip(self.keys(), values, strict=True)
        return dict(pairs) if self.kind == "d" else OrderedDict(pairs)


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


def _no_tensor(kind: str, number: int) -> Any:
    raise refusal(ValueError, "HD901", "a key of a dict holds a tensor")


class Tree(NamedTuple):
    """A flattened structure: its description, and its tensors in the order of their numbers."""

    spec: Any
    tensors: list[Tensor]


def flatten(value: Any, allow_pickle: bool = False, name: str = "x") -> Tree:
    """Flatten a structure into its description and its tensors.

    Raises:
        TypeError: if a part cannot be sent; the text contains its path in `name`.
        ValueError: if it is nested too deeply, or contains itself.
    """
    tensors: list[Tensor] = []
    try:
        return Tree(_flatten(value, tensors, allow_pickle, 0), tensors)
    except _UnsupportedError as error:
        raise refusal(TypeError, "HD202", f"{name}{''.join(reversed(error.path))} {error}") from None
    except RecursionError:
        text = f"{name}: nested more than {MAX_DEPTH} levels deep, or it contains itself"
        raise refusal(ValueError, "HD202", text) from None


class _UnsupportedError(Exception):
    """A part that cannot be sent; its path is collected from the inside out."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.path: list[str] = []


def _flatten(value: Any, tensors: list[Tensor], allow_pickle: bool, depth: int) -> Any:
    if isinstance(value, Tensor):
        problem = storage.problem(value)
        if problem is not None:
            raise _UnsupportedError(coded("HD202", problem))
        return _tensor("x", storage.resolved(value), tensors)
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
        except _UnsupportedError:
            if not allow_pickle:
                raise
    node = _node(value, kind)
    if node is not None:
        found = []
        for i, part in enumerate(node.parts):
            if storage.is_plain(part):
                found.append(_tensor("x", part, tensors))
                continue
            try:
                found.append(_flatten(part, tensors, allow_pickle, depth + 1))
            except _UnsupportedError as error:
                fields = getattr(kind, "_fields", None)
                error.path.append(f".{fields[i]}" if fields else node.label(i))
                raise
        if node.kind in ("d", "o"):
            node = node._replace(names=[_key(key) for key in node.names])
        return node.spec(found)
    if not allow_pickle:
        raise _UnsupportedError(
            f"is a {kind.__module__}.{kind.__qualname__}, which is not sent; expected tensors, numpy arrays, "
            "numbers, strings, bytes or None, in lists, tuples, dicts, named tuples or dataclasses "
            "(or pass allow_pickle=True)"
        )
    return _tensor("p", storage.of_bytes(pickle.dumps(value, pickle.HIGHEST_PROTOCOL)), tensors)


def _node(value: Any, kind: type) -> Node | None:
    """Return the node of a container, with its keys themselves as names; None for a leaf."""
    if kind is list or kind is tuple:
        return Node("l" if kind is list else "t", "", range(len(value)), value)
    if kind is dict or kind is OrderedDict:
        return Node("d" if kind is dict else "o", "", list(value), list(value.values()))
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        _check_attributes(value, kind, ())
        return Node("N", _class_name(kind), range(len(value)), value)
    usual_new = "__new__" not in {name for base in kind.__mro__[:-1] for name in vars(base)}
    if dataclasses.is_dataclass(value) and usual_new and not isinstance(value, torch.nn.Module):
        names = [field.name for field in dataclasses.fields(value)]
        _check_attributes(value, kind, names)
        return Node("D", _class_name(kind), names, [getattr(value, name) for name in names])
    return None


def _check_attributes(value: Any, kind: type, fields: Sequence[str]) -> None:
    """Refuse an object with attributes besides its fields, which would be lost; cached properties can be recomputed."""
    for name in getattr(value, "__dict__", ()):
        if name not in fields and not isinstance(getattr(kind, name, None), cached_property):
            raise _UnsupportedError(f"has the attribute {name!r}, which is not one of its fields and would be lost")


def _key(key: Any) -> Any:
    tensors: list[Tensor] = []
    try:
        spec = _flatten(key, tensors, False, 0)
    except _UnsupportedError:
        spec = None
        tensors = [torch.empty(0, device="cpu")]
    if tensors:
        raise _UnsupportedError(f"has the key {key!r:.40}; expected strings, numbers, None, or tuples of these")
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
        raise _UnsupportedError(f"is a numpy array of dtype {array.dtype}, which no tensor can hold") from None


def _class_name(kind: type) -> str:
    name = f"{kind.__module__}:{kind.__qualname__}"
    try:
        found = find_class(name)
    except TypeError:
        found = None
    if found is not kind:
        raise _UnsupportedError(f"is of class {name}, which no other rank can find by that name: define it in a module")
    return name


def find_class(name: str) -> type:
    """Find the dataclass or named tuple of that name in a module that this process has already imported.

    Raises:
        TypeError: if there is no such class. A name in a message never causes an import or a call.
    """
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):  # not getattr, which may run code of the module or class
        found = vars(found).get(part) if isinstance(found, (type, ModuleType)) else None
    is_tuple = isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_fields")
    if not (is_tuple or (isinstance(found, type) and dataclasses.is_dataclass(found))):
        raise refusal(TypeError, "HD303", f"{name} is not a dataclass or named tuple that this rank has imported")
    return found  # type: ignore[no-any-return]


def classes_in(spec: Any) -> set[str]:
    """Return the names of all classes in a description."""
    node = node_of(spec)
    if node is None:
        return set()
    return ({node.cls} if node.cls else set()).union(*map(classes_in, node.parts))


Leaf = Callable[[str, int], Any]  # (kind, number of the tensor) -> the value of the leaf


def rebuild(spec: Any, leaf: Leaf) -> Any:
    """Rebuild a structure from its description.

    Raises:
        TypeError: if a class is unknown here; ValueError: if the description is damaged.
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
        raise refusal(ValueError, "HD901", f"a description of a structure has the unknown kind {kind!r:.40}")
    return node.build([rebuild(part, leaf) for part in node.parts])


def _named_tuple(name: str, values: Sequence[Any]) -> Any:
    kind: Any = find_class(name)
    if len(values) != len(kind._fields):
        text = f"{name} has {len(kind._fields)} fields here, but {len(values)} on the sender"
        raise refusal(TypeError, "HD303", text)
    return tuple.__new__(kind, values)


def _dataclass(name: str, fields: Sequence[tuple[str, Any]]) -> Any:
    """Build an object with these fields as copy.copy() does: __init__ does not run."""
    kind = find_class(name)
    known = {field.name for field in dataclasses.fields(kind)}
    if {field for field, _ in fields} != known:
        text = f"{name} has the fields {sorted(known)} here, but {sorted(f for f, _ in fields)} on the sender"
        raise refusal(TypeError, "HD303", text)
    made: Any = object.__new__(kind)
    for field, value in fields:
        object.__setattr__(made, field, value)
    return made


def decode(kind: str, x: Tensor, allow_pickle: bool) -> Any:
    """Convert a received tensor to the leaf that it encodes.

    Raises:
        TypeError: if it is a pickle, and pickles are not allowed.
        HpcdistError: if it is a pickle that cannot be loaded here.
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
        text = "received a pickle, which this rank loads only with allow_pickle=True"
        raise refusal(TypeError, "HD202", text)
    try:
        return pickle.loads(array.tobytes())
    except Exception as error:
        text = f"a received pickle cannot be loaded: {type(error).__name__}: {reason(error)}"
        raise HpcdistError("HD202", text) from error


# A named tuple whose fields depend on each other
_PACKED = "torch.nn.utils.rnn:PackedSequence"
_NOT_MERGED = (
    "is a PackedSequence, which is not joined or cut field by field: pass the list of its sequences "
    "(torch.nn.utils.rnn.unpack_sequence), or a list of PackedSequences, each of which stays as it is"
)

_NAMES = {
    "x": "a tensor",
    "n": "a numpy array",
    "l": "a list",
    "t": "a tuple",
    "d": "a dict",
    "o": "an OrderedDict",
    "N": "a named tuple",
    "D": "a dataclass",
    "s": "a single value",
}


def merge(
    verb: str,
    specs: Sequence[Any],
    join: Callable[[str, str, list[int]], Any],
    leaf: Callable[[int, str, int], Any],
    path: str = "x",
) -> Any:
    """Merge the structures of all ranks into one.

    Tensors and numpy arrays with the same path are joined (`join` gets the kind, the path, and the number of the
    tensor on each rank). Lists are concatenated, their items unchanged (`leaf` gets the rank, and the kind and number
    of each leaf). Single values become the list of all ranks' values. Tuples, dicts and dataclasses are merged part by
    part.

    Raises:
        RankError: if the structures do not match; the same on all ranks.
    """
    kinds = [_kind(spec) for spec in specs]
    check_same(verb, path, "is", [_NAMES[kind] for kind in kinds])

    def one(rank: int, spec: Any) -> Any:
        return rebuild(spec, lambda kind, i: leaf(rank, kind, i))

    if kinds[0] in ("x", "n"):
        return join(kinds[0], path, [spec[1] for spec in specs])
    if kinds[0] == "s":
        return [one(rank, spec) for rank, spec in enumerate(specs)]
    nodes = [node for spec in specs if (node := node_of(spec)) is not None]
    first = nodes[0]
    if first.kind == "l":
        return [one(rank, part) for rank, node in enumerate(nodes) for part in node.parts]
    check_same(verb, path, "is of class", [node.cls for node in nodes])
    if first.cls == _PACKED:
        raise RankError(verb, dict.fromkeys(range(len(specs)), coded("HD202", f"{path} {_NOT_MERGED}")))
    check_same(verb, path, "has", [_part_names(node) for node in nodes])
    numbers = [{repr(name): i for i, name in enumerate(node.names)} for node in nodes]  # dicts may differ in order
    merged = []
    for i, name in enumerate(first.names):
        parts = [node.parts[number[repr(name)]] for node, number in zip(nodes, numbers, strict=True)]
        merged.append(merge(verb, parts, join, leaf, path + first.label(i)))
    return first.build(merged)


def _part_names(node: Node) -> str:
    """Describe the parts of a node, to compare and to show."""
    if node.kind == "D":
        return f"the fields {list(node.names)}"
    if node.kind in ("d", "o"):
        return f"the keys {sorted(node.keys(), key=repr)}"
    return f"{len(node.parts)} {'items' if node.kind == 't' else 'fields'}"


def _kind(spec: Any) -> str:
    kind = spec[0] if isinstance(spec, list) else "s"
    return "s" if kind in ("g", "b", "a", "p", "z", "i") else str(kind)


def check_same(verb: str, path: str, is_: str, values: Sequence[str]) -> None:
    """Raise a RankError if the ranks' values differ."""
    odd = {r: f"{path} {is_} {value}, where rank 0 has {values[0]}" for r, value in enumerate(values)}
    odd = {rank: text for rank, text in odd.items() if values[rank] != values[0]}
    if odd:
        raise RankError(verb, {rank: coded("HD303", text) for rank, text in odd.items()})


def cut(tree: Tree, dim: int, counts: str | Sequence[int] | None, parts: int) -> list[Tree]:
    """Cut a structure into one for each of `parts` ranks.

    Each rank gets a part of each tensor and array along `dim`, some items of each list, and a copy of single values.

    Args:
        counts: rows of tensors and items of lists for each rank, or the name of the rule by which to cut.

    Raises:
        ValueError: if a tensor has no such dim, or counts do not match; the text contains the path.
    """
    return [_part(tree, dim, counts, parts, rank) for rank in range(parts)]


def _part(whole: Tree, dim: int, counts: str | Sequence[int] | None, parts: int, rank: int) -> Tree:
    """Cut out the structure of one rank: see cut()."""
    tensors: list[Tensor] = []

    def range_of(extent: int, path: str) -> tuple[int, int]:
        """Return (start, length) of this rank's part of `extent` rows or items."""
        try:
            found = layout.counts_of(counts, extent, parts)
        except ValueError as wrong:
            raise refusal(ValueError, "HD213", f"{path}: {wrong}") from None
        return layout.displs(found)[rank], found[rank]

    def cut(spec: Any, path: str) -> Any:
        kind = _kind(spec)
        if kind in ("x", "n"):
            x = whole.tensors[spec[1]]
            if not -x.dim() <= dim < x.dim():
                raise refusal(ValueError, "HD204", f"{path} has no dim {dim}: it has {x.dim()} dims")
            return _tensor(kind, x.narrow(dim, *range_of(x.shape[dim], path)), tensors)
        if kind == "s":
            return copy(spec)
        if kind == "N" and spec[1] == _PACKED:
            raise refusal(ValueError, "HD202", f"{path} {_NOT_MERGED}")
        if kind == "l":
            start, length = range_of(len(spec) - 1, path)
            return ["l", *map(copy, spec[1 + start : 1 + start + length])]
        node = node_of(spec)
        assert node is not None  # a leaf is one of the above
        return node.spec([cut(part, path + node.label(i)) for i, part in enumerate(node.parts)])

    def copy(spec: Any) -> Any:
        """Copy a part unchanged, except that its tensors get new numbers."""
        if isinstance(spec, list) and spec[0] in TENSORS:
            return _tensor(spec[0], whole.tensors[spec[1]], tensors)
        node = node_of(spec)
        return spec if node is None else node.spec([copy(part) for part in node.parts])

    return Tree(cut(whole.spec, "x"), tensors)
