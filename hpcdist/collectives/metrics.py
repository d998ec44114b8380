"""reduce() of nested dicts of numbers and small tensors, such as metrics, whose keys may differ between ranks.

The ranks agree once on the union of their keys. Then each sends all its values as one message of 8-byte words.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Hashable, Iterator, Sequence
from hashlib import blake2b
from itertools import islice, repeat
from operator import countOf
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcdist.collectives.kept import Kept
from hpcdist.collectives.run import Operation, Plannable
from hpcdist.collectives.split import key_of
from hpcdist.comm.team import Team
from hpcdist.control import objects
from hpcdist.errors import coded
from hpcdist.tensors.eager import recorded
from hpcdist.tensors.storage import BARE
from hpcdist.validation import local
from hpcdist.validation.collective import Agreed, Call
from hpcdist.validation.local import ArgumentError, call_of, show

Path = tuple[Any, ...]  # the keys that lead to a value or a dict
Numbers = dict[type, list[Any]]  # values as floats, and as ints
_MOST = 8  # dicts with other keys that a team keeps
_INTEGERS = (int, np.integer, np.bool_)
_WORDS = {float: "d", int: "q"}
_NEUTRAL: dict[str, dict[type, float]] = {  # what a rank without a key contributes
    "sum": {float: -0.0, int: 0},
    "prod": {float: 1.0, int: 1},
    "min": {float: math.inf, int: 2**63 - 1},
    "max": {float: -math.inf, int: -(2**63)},
}


class Leaf(NamedTuple):
    """A value in a dict.

    Attributes:
        kind: float or int, as which it is reduced; dict for a dict.
        dtype, shape, on_gpu: those of a tensor.
    """

    kind: type
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    on_gpu: bool = False

    def __str__(self) -> str:
        if self.dtype is not None:
            return local.LIKE.format(self.dtype, self.shape, "a GPU" if self.on_gpu else "the CPU")
        return f"{'an' if self.kind is int else 'a'} {self.kind.__name__}"


_FLOAT = Leaf(float)


class Table(NamedTuple):
    """A dict: the keys that lead to it, its own keys, and a leaf for each; none if all are floats, as in most dicts."""

    path: Path
    names: tuple[Any, ...]
    leaves: tuple[Leaf, ...] = ()

    def items(self) -> Iterator[tuple[Any, Leaf]]:
        return zip(self.names, self.leaves or repeat(_FLOAT), strict=False)


Tables = Sequence[Table]
Dicts = dict[Path, dict[Any, Leaf]]


class ReduceDict(Operation):
    """Reduce the dicts of all ranks. Their values are read when it is made.

    Args:
        tensors: makes the operation that reduces tensors.
    """

    name = "reduce"
    x = None
    own = (*Operation.own, "_weight", "_values")
    _problem: Exception | None = None

    def __init__(
        self, tensors: Callable[..., Plannable], given: Any, root: Any, op: Any, route: Any, out: Any, weights: Any
    ) -> None:
        self._reduction, self.root, self.op, self.route, self.out = tensors, root, op, route, out
        try:
            if not isinstance(given, dict):
                raise ArgumentError("HD211", f"weights is given, but x is not a dict: {show(given)}")
            numbers: Numbers = {float: [], int: []}
            self._tables = tuple(_tables(given, (), op == "mean", numbers))
            self._values: dict[type, Any] = {
                kind: np.frombuffer(struct.pack(f"{len(of)}{_WORDS[kind]}", *of), kind) for kind, of in numbers.items()
            }
            self._weight = local.weight_of(weights, op)
        except Exception as error:  # which all ranks must raise
            self._problem = error

    def key(self) -> Hashable:
        given = key_of(self.out, "a dict", self.root, self.op, self.route)
        if given is None or self._problem is not None or recorded() is not None:
            return None
        return *given, self._tables

    def validate(self, team: Team, call: Call) -> None:
        if self._problem is not None:
            raise self._problem
        local.check_dict(self, team, call)
        self._digest = blake2b(repr(self._tables).encode(), digest_size=16).digest()

    def plan(self, team: Team, call: Call, agreed: Agreed) -> None:
        first, found = self._exchange(team)
        (union, holders, problems), (mine, *_) = _merged(found), _merged({team.rank: self._tables})
        wrong = {rank: coded("HD303", problems[peer]) for rank, peer in enumerate(first) if peer in problems}
        objects.raise_problems(self.name, wrong)
        mean, self._parts = self.op == "mean", []
        how = "sum" if mean else self.op
        # For a mean, the weight of each set of ranks that have the same keys comes first.
        sets = {ranks: i for i, ranks in enumerate(dict.fromkeys(holders.values()))} if mean else {}
        for kind, neutral in _NEUTRAL[how].items():
            places, end = {}, len(sets)
            for place, numel in _words(union, kind):
                places[place] = range(end, end := end + numel)
            if end == len(sets):
                continue
            own = [i for place, _ in _words(mine, kind) for i in places[place]]
            which = [sets[holders[place]] for place, where in places.items() for _ in where] if mean else []
            held = np.array([first[team.rank] in ranks for ranks in sets])
            words: Any = np.full(end, neutral, kind)
            inner = self._reduction(torch.from_numpy(words), how, self.route, None, root=self.root)
            inner.plan(team, call_of(inner.name, inner.check, team), agreed)
            inner.dest = torch.empty_like(inner.x) if self.root in (None, team.rank) else None
            self._parts.append((kind, inner, words, np.array(own, int), held, np.array(which, int)))
        self._result = [(path, leaves, {*leaves.values()} == {_FLOAT}) for path, leaves in union.items()]
        dicts = [key for key in team.repeats if type(key) is tuple and key[0] == "a dict"]
        for old in dicts[: 1 - _MOST]:  # they may be large
            del team.repeats[old]
        self.kept = Kept(team, None, -1, None, 0)

    def _exchange(self, team: Team) -> tuple[list[int], dict[int, Tables]]:
        """Exchange the descriptions of the dicts. Collective.

        Returns:
            For each rank the first one with the same description; and the descriptions of those.
        """
        digests, mine = team.comm.allgather(self._digest), self._tables
        first = [digests.index(digest) for digest in digests]
        if not any(first):
            return first, {0: mine}
        every = objects.all_gather_object(team.comm, mine if first[team.rank] == team.rank else None, self.name)
        # This rank's own is not a copy, which might differ: NaN is a key that equals no copy.
        return first, {rank: every[rank] for rank in dict.fromkeys(first)} | {first[team.rank]: mine}

    def forward(self, team: Team) -> Any:
        found: dict[type, Iterator[Any]] = {}
        with np.errstate(all="ignore"):
            for kind, inner, words, at, held, which in self._parts:
                values, weight, sets = self._values[kind], self._weight, len(held)
                words[:sets] = held * weight
                words[at] = values if weight == 1 else values * weight if weight else -0.0
                total = inner.move(team)
                if total is not None:
                    sums = total.numpy()
                    found[kind] = iter((sums[sets:] / sums[which] if sets else sums).tolist())
        return _filled(self._result, found, team.settings.device) if self.root in (None, team.rank) else None


def _tables(x: dict[Any, Any], path: Path, mean: bool, numbers: Numbers) -> Iterator[Table]:
    """Describe a dict and those in it, and append their values to `numbers`."""
    names, values = tuple(x), x.values()
    if countOf(map(type, values), float) == len(x):
        numbers[float] += values
        yield Table(path, names)
        return
    where = _shown(path)
    yield Table(path, names, tuple([_leaf(value, f"{where}[{name!r}]", mean, numbers) for name, value in x.items()]))
    for name, value in x.items():
        if isinstance(value, dict):
            yield from _tables(value, (*path, name), mean, numbers)


def _leaf(value: Any, where: str, mean: bool, numbers: Numbers) -> Leaf:
    """Describe a value, and append it to `numbers`."""
    if isinstance(value, dict):
        return Leaf(dict)
    leaf, found = _FLOAT, [value]
    if isinstance(value, Tensor):
        tensor = local.ready(value, where)
        dtype = tensor.dtype
        real = dtype.is_floating_point
        if dtype.is_complex or dtype in BARE or (mean and not real):
            raise ArgumentError("HD202", f"{where} has dtype {dtype}, which is not reduced so: convert it")
        leaf = Leaf(float if real else int, dtype, tuple(tensor.shape), not tensor.is_cpu)
        found = (tensor.double() if real else tensor).reshape(-1).tolist()
    elif isinstance(value, _INTEGERS) and not mean:
        leaf = Leaf(int)
    elif not isinstance(value, (float, np.floating, *_INTEGERS)):
        raise ArgumentError("HD202", f"{where} is {show(value)}, expected a number, a tensor or a dict")
    try:
        found = [*map(leaf.kind, found)]
    except OverflowError as error:
        raise ArgumentError("HD202", f"{where}: {error}") from None
    for number in found if leaf.kind is int else ():
        if not -(2**63) <= number < 2**63:
            raise ArgumentError("HD202", f"{where} is {show(number)}, expected an integer of 64 bits")
    numbers[leaf.kind] += found
    return leaf


def _shown(path: Path) -> str:
    return "x" + "".join(f"[{name!r}]" for name in path)


def _words(dicts: Dicts, kind: type) -> Iterator[tuple[Path, int]]:
    """Return the path of each value that is reduced as `kind`, and of how many words it is."""
    for path, leaves in dicts.items():
        for name, leaf in leaves.items():
            if leaf.kind is kind:
                yield (*path, name), math.prod(leaf.shape)


def _merged(found: dict[int, Tables]) -> tuple[Dicts, dict[Path, tuple[int, ...]], dict[int, str]]:
    """Return the union of the dicts of some ranks, the ranks that have each value, and what is wrong on a rank."""
    union: Dicts = {}
    holders: dict[Path, list[int]] = {}
    problems: dict[int, str] = {}
    for rank, tables in found.items():
        for table in tables:
            leaves = union.setdefault(table.path, {})
            for name, leaf in table.items():
                place, expected = (*table.path, name), leaves.setdefault(name, leaf)
                holders.setdefault(place, []).append(rank)
                if leaf != expected:
                    problems[rank] = f"{_shown(place)} is {leaf}, where rank {holders[place][0]} has {expected}"
    return union, {place: tuple(ranks) for place, ranks in holders.items()}, problems


def _filled(
    dicts: Sequence[tuple[Path, dict[Any, Leaf], bool]], values: dict[type, Iterator[Any]], device: torch.device
) -> dict[Any, Any]:
    """Build the first of the dicts of the next values, with the others in it. Those with True are of floats alone."""
    made: dict[Path, dict[Any, Any]] = {}
    for path, leaves, floats in dicts:
        parts = values[float] if floats else (_value(leaf, values, device) for leaf in leaves.values())
        made[path] = part = leaves.copy()  # faster than to make one of these keys
        part.update(zip(leaves, parts, strict=False))
        if path:
            made[path[:-1]][path[-1]] = part
    return made[()]


def _value(leaf: Leaf, values: dict[type, Iterator[Any]], device: torch.device) -> Any:
    """Return the next value, None in place of a dict."""
    if leaf.dtype is None:
        return None if leaf.kind is dict else next(values[leaf.kind])
    wide = torch.float64 if leaf.kind is float else torch.int64
    numbers = [*islice(values.get(leaf.kind, ()), math.prod(leaf.shape))]
    words = torch.tensor(numbers, dtype=wide, device="cpu")
    return words.to(device if leaf.on_gpu else "cpu", leaf.dtype).view(leaf.shape)
