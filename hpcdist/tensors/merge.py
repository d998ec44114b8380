"""Structures in gather, concat and split: merge those of all ranks into one, and cut one into many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from hpcdist import layout
from hpcdist.errors import RankError, coded, refusal
from hpcdist.tensors.tree import TENSORS, Node, Tree, node_of, rebuild

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
    return [_Cutter(tree, dim, counts, parts, rank).tree() for rank in range(parts)]


class _Cutter:
    """Cuts out the structure of one rank."""

    def __init__(self, tree: Tree, dim: int, counts: str | Sequence[int] | None, parts: int, rank: int) -> None:
        self.whole, self.dim, self.counts, self.parts, self.rank = tree, dim, counts, parts, rank
        self.tensors: list[Tensor] = []

    def tree(self) -> Tree:
        return Tree(self._cut(self.whole.spec, "x"), self.tensors)

    def _range(self, extent: int, path: str) -> tuple[int, int]:
        """Return (start, length) of this rank's part of `extent` rows or items."""
        try:
            counts = layout.counts_of(self.counts, extent, self.parts)
        except ValueError as wrong:
            raise refusal(ValueError, "HD213", f"{path}: {wrong}") from None
        return layout.displs(counts)[self.rank], counts[self.rank]

    def _cut(self, spec: Any, path: str) -> Any:
        kind = _kind(spec)
        if kind in ("x", "n"):
            x = self.whole.tensors[spec[1]]
            if not -x.dim() <= self.dim < x.dim():
                raise refusal(ValueError, "HD204", f"{path} has no dim {self.dim}: it has {x.dim()} dims")
            return self._add(kind, x.narrow(self.dim, *self._range(x.shape[self.dim], path)))
        if kind == "s":
            return self._copy(spec)
        if kind == "N" and spec[1] == _PACKED:
            raise refusal(ValueError, "HD202", f"{path} {_NOT_MERGED}")
        if kind == "l":
            start, length = self._range(len(spec) - 1, path)
            return ["l", *map(self._copy, spec[1 + start : 1 + start + length])]
        node = node_of(spec)
        assert node is not None  # a leaf is one of the above
        return node.spec([self._cut(part, path + node.label(i)) for i, part in enumerate(node.parts)])

    def _copy(self, spec: Any) -> Any:
        """Copy a part unchanged, except that its tensors get new numbers."""
        if isinstance(spec, list) and spec[0] in TENSORS:
            return self._add(spec[0], self.whole.tensors[spec[1]])
        node = node_of(spec)
        return spec if node is None else node.spec([self._copy(part) for part in node.parts])

    def _add(self, kind: str, x: Tensor) -> Any:
        self.tensors.append(x)
        return [kind, len(self.tensors) - 1]
