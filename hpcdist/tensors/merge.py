"""What gather, concat and split make of structures: the structures of all ranks as one, and one cut into many."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from hpcdist import layout
from hpcdist.errors import RankError
from hpcdist.tensors.tree import TENSORS, Tree, dataclass_of, mapped, named_tuple_of, rebuild

__all__ = ["cut", "merge", "same"]

# A named tuple whose fields depend on each other.
_PACKED = "torch.nn.utils.rnn:PackedSequence"
_WHOLE = (
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
    """Bring the structures of all ranks together in one.

    Tensors in the same place, and numpy arrays, become one (`join`, which gets the kind, the path, and the number of
    the tensor on each rank); lists are added up as they are (`leaf` gets rank, kind and number for what they hold);
    single values become the list of all ranks' values; tuples, dicts and dataclasses are merged part by part.

    Raises:
        RankError: the structures are not alike; the same on all ranks.
    """
    kinds = [_kind(spec) for spec in specs]
    same(verb, path, "is", [_NAMES[kind] for kind in kinds])

    def alone(rank: int, spec: Any) -> Any:
        return rebuild(spec, lambda kind, i: leaf(rank, kind, i))

    def inner(parts: Sequence[Any], where: str) -> Any:
        return merge(verb, parts, join, leaf, path + where)

    kind = kinds[0]
    if kind in ("x", "n"):
        return join(kind, path, [spec[1] for spec in specs])
    if kind == "s":
        return [alone(rank, spec) for rank, spec in enumerate(specs)]
    if kind == "l":
        return [alone(rank, part) for rank, spec in enumerate(specs) for part in spec[1:]]
    if kind == "t":
        same(verb, path, "has", [f"{len(spec) - 1} items" for spec in specs])
        return tuple(inner([spec[1 + i] for spec in specs], f"[{i}]") for i in range(len(specs[0]) - 1))
    if kind in ("d", "o"):
        return _merge_dicts(verb, specs, inner, path)
    same(verb, path, "is of class", [spec[1] for spec in specs])
    if specs[0][1] == _PACKED:
        raise RankError(verb, dict.fromkeys(range(len(specs)), f"{path} {_WHOLE}"))
    if kind == "N":
        same(verb, path, "has", [f"{len(spec) - 2} fields" for spec in specs])
        parts = [inner([spec[2 + i] for spec in specs], f"[{i}]") for i in range(len(specs[0]) - 2)]
        return named_tuple_of(specs[0][1], parts)
    same(verb, path, "has", [f"the fields {[name for name, _ in spec[2:]]}" for spec in specs])
    names = [name for name, _ in specs[0][2:]]
    return dataclass_of(
        specs[0][1], [(name, inner([dict(spec[2:])[name] for spec in specs], f".{name}")) for name in names]
    )


def _merge_dicts(verb: str, specs: Sequence[Any], inner: Callable[[Sequence[Any], str], Any], path: str) -> Any:
    """Key by key, in the order of rank 0."""
    dicts = [{rebuild(key, _no_tensor): part for key, part in spec[1:]} for spec in specs]
    same(verb, path, "has", [f"the keys {sorted(keys, key=repr)}" for keys in dicts])
    merged = [(key, inner([parts[key] for parts in dicts], f"[{key!r:.40}]")) for key in dicts[0]]
    return dict(merged) if specs[0][0] == "d" else OrderedDict(merged)


def _no_tensor(kind: str, number: int) -> Any:
    raise ValueError("a key of a dict holds a tensor")


def _kind(spec: Any) -> str:
    kind = spec[0] if isinstance(spec, list) else "s"
    return "s" if kind in ("g", "b", "a", "p", "z", "i") else str(kind)


def same(verb: str, path: str, is_: str, values: Sequence[str]) -> None:
    """A RankError if the ranks do not have the same."""
    odd = {r: f"{path} {is_} {value}, where rank 0 has {values[0]}" for r, value in enumerate(values)}
    odd = {rank: text for rank, text in odd.items() if values[rank] != values[0]}
    if odd:
        raise RankError(verb, odd)


def cut(tree: Tree, dim: int, counts: str | Sequence[int] | None, parts: int) -> list[Tree]:
    """The structures that `parts` ranks get of one: of each tensor and array a part along `dim`, of each list some of
    its items, of a single value a copy.

    Args:
        counts: rows of a tensor and items of a list for each rank, or the name of the rule by which each is cut.

    Raises:
        ValueError: for a tensor that has no such dim, or counts that do not fit; the text says where.
    """
    return [_Cutter(tree, dim, counts, parts, rank).tree() for rank in range(parts)]


class _Cutter:
    """What one rank gets."""

    def __init__(self, tree: Tree, dim: int, counts: str | Sequence[int] | None, parts: int, rank: int) -> None:
        self.whole, self.dim, self.counts, self.parts, self.rank = tree, dim, counts, parts, rank
        self.tensors: list[Tensor] = []

    def tree(self) -> Tree:
        return Tree(self._cut(self.whole.spec, "x"), self.tensors)

    def _share(self, extent: int, path: str) -> tuple[int, int]:
        """(start, length) of this rank's share of so many rows."""
        try:
            counts = layout.counts_of(self.counts, extent, self.parts)
        except ValueError as wrong:
            raise ValueError(f"{path}: {wrong}") from None
        return layout.displs(counts)[self.rank], counts[self.rank]

    def _cut(self, spec: Any, path: str) -> Any:
        kind = _kind(spec)
        if kind in ("x", "n"):
            x = self.whole.tensors[spec[1]]
            if not -x.dim() <= self.dim < x.dim():
                raise ValueError(f"{path} has no dim {self.dim}: it has {x.dim()} dims")
            return self._take(kind, x.narrow(self.dim, *self._share(x.shape[self.dim], path)))
        if kind == "s":
            return self._all(spec)
        if kind == "N" and spec[1] == _PACKED:
            raise ValueError(f"{path} {_WHOLE}")
        if kind == "l":
            start, length = self._share(len(spec) - 1, path)
            return ["l", *map(self._all, spec[1 + start : 1 + start + length])]
        return mapped(spec, lambda part, name: self._cut(part, path + name))

    def _all(self, spec: Any, name: str = "") -> Any:
        """All of a part, with tensors numbered anew."""
        if isinstance(spec, list) and spec[0] in TENSORS:
            return self._take(spec[0], self.whole.tensors[spec[1]])
        return mapped(spec, self._all)

    def _take(self, kind: str, x: Tensor) -> Any:
        self.tensors.append(x)
        return [kind, len(self.tensors) - 1]
