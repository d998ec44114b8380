"""Structures of tensors: a description in JSON and flat tensors; structures that are merged into one, or cut into many.

No pickle, unless it is allowed. :mod:`hpcdist.control.codec` describes all but the leaves, whose kinds are:

    ["x", i] a tensor          ["n", i] a numpy array      ["g", i] a numpy number
    ["b", i] bytes             ["a", i] a bytearray        ["p", i] a pickle

where i is the number of a tensor. Tensors carry all data but the structure itself.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcdist import layout
from hpcdist.control import objects
from hpcdist.control.codec import MAX_DEPTH, Node, UnsupportedError, describe, node_of, rebuild
from hpcdist.errors import HpcdistError, RankError, coded, reason, refusal
from hpcdist.tensors import storage

TENSORS = ("x", "n", "g", "b", "a", "p")
_ARRAYS = (np.ndarray, np.memmap)  # other classes are more than their elements: masked arrays, matrices


class Tree(NamedTuple):
    """A flattened structure: its description, and its tensors in the order of their numbers."""

    spec: Any
    tensors: list[Tensor]


def flatten(value: Any, allow_pickle: bool = False) -> Tree:
    """Flatten a structure into its description and its tensors.

    Raises:
        TypeError: if a part cannot be sent; the text contains its path in x.
        ValueError: if it is nested too deeply, or contains itself.
    """
    tensors: list[Tensor] = []

    def leaf(value: Any) -> Any:
        if storage.is_plain(value):
            return _tensor("x", value, tensors)
        kind = type(value)
        if isinstance(value, Tensor):
            problem = storage.problem(value)
            if problem is not None:
                raise UnsupportedError(coded("HD202", problem))
            return _tensor("x", storage.resolved(value), tensors)
        if kind in (bytes, bytearray):
            return _tensor("b" if kind is bytes else "a", storage.of_bytes(value), tensors)
        if kind in _ARRAYS or (isinstance(value, np.generic) and kind.__module__ == "numpy"):
            try:
                return _tensor("n" if kind in _ARRAYS else "g", _of_numpy(value), tensors)
            except UnsupportedError:
                if not allow_pickle:
                    raise
        return rest(value) if isinstance(value, torch.nn.Module) else NotImplemented  # it may be a dataclass as well

    def rest(value: Any) -> Any:
        if allow_pickle:
            return _tensor("p", storage.of_bytes(pickle.dumps(value, pickle.HIGHEST_PROTOCOL)), tensors)
        raise UnsupportedError(
            f"is a {type(value).__module__}.{type(value).__qualname__}, which is not sent; expected tensors, numpy "
            "arrays, numbers, strings, bytes or None, in lists, tuples, dicts, named tuples or dataclasses "
            "(or pass allow_pickle=True)"
        )

    try:
        return Tree(describe(value, leaf, rest), tensors)
    except UnsupportedError as error:
        raise refusal(TypeError, "HD202", f"x{''.join(reversed(error.path))} {error}") from None
    except RecursionError:
        text = f"x: nested more than {MAX_DEPTH} levels deep, or it contains itself"
        raise refusal(ValueError, "HD202", text) from None


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
        raise UnsupportedError(f"is a numpy array of dtype {array.dtype}, which no tensor can hold") from None


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


def restore(spec: Any, tensors: Sequence[Tensor] | dict[int, Tensor], allow_pickle: bool) -> Any:
    """Rebuild a structure of its description and its received tensors, by number: see decode()."""
    return rebuild(spec, lambda kind, i: decode(kind, tensors[i], allow_pickle))


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

    def single(rank: int, spec: Any) -> Any:
        return rebuild(spec, lambda kind, i: leaf(rank, kind, i))

    if kinds[0] in ("x", "n"):
        return join(kinds[0], path, [spec[1] for spec in specs])
    if kinds[0] == "s":
        return [single(rank, spec) for rank, spec in enumerate(specs)]
    nodes = [node for spec in specs if (node := node_of(spec)) is not None]
    first = nodes[0]
    if first.kind == "l":
        return [single(rank, part) for rank, node in enumerate(nodes) for part in node.parts]
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
    objects.raise_problems(
        verb,
        {
            rank: coded("HD303", f"{path} {is_} {value}, where rank 0 has {values[0]}")
            for rank, value in enumerate(values)
            if value != values[0]
        },
    )


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
            lengths = layout.counts_of(counts, extent, parts)
        except ValueError as wrong:
            raise refusal(ValueError, "HD213", f"{path}: {wrong}") from None
        return layout.displs(lengths)[rank], lengths[rank]

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
