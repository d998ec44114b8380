"""reduce() of nested dicts of numbers and small tensors, such as metrics, whose keys may differ between ranks.

The ranks agree once on the union of their keys. Then each sends all its values as one message of 8-byte words.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Hashable, Iterator, Sequence
from hashlib import blake2b
from itertools import chain, islice, repeat
from operator import countOf
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcdist.collectives.kept import Kept
from hpcdist.collectives.run import Operation, Plannable
from hpcdist.comm.team import Team
from hpcdist.control import objects
from hpcdist.errors import coded
from hpcdist.tensors.eager import recorded
from hpcdist.tensors.storage import BARE
from hpcdist.validation import local
from hpcdist.validation.collective import Agreed, Call
from hpcdist.validation.local import ArgumentError, call_of, show

Path = tuple[Any, ...]  # the keys that lead to a value
_MOST = 8  # dicts with other keys that a team keeps
_INTEGERS = (int, np.integer, np.bool_)
_NEUTRAL = {  # what a rank without a key contributes: as a float, as an int
    "sum": (-0.0, 0),
    "prod": (1.0, 1),
    "min": (math.inf, 2**63 - 1),
    "max": (-math.inf, -(2**63)),
}


class Leaf(NamedTuple):
    """A value: whether its words are floats; dtype and shape of a tensor, and whether it is on a GPU."""

    real: bool
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    on_gpu: bool = False

    def __str__(self) -> str:
        number = "a float" if self.real else "an int"
        place = "a GPU" if self.on_gpu else "the CPU"
        return number if self.dtype is None else local.LIKE.format(self.dtype, self.shape, place)


_FLOAT, _INT = Leaf(True), Leaf(False)


class Node(NamedTuple):
    """A dict: its keys, and the Leaf or Node of each; no parts if all are Python's floats, as in most dicts."""

    names: tuple[Any, ...]
    parts: tuple[Any, ...] = ()

    @staticmethod
    def of(names: tuple[Any, ...], parts: list[Any]) -> Node:
        return Node(names) if parts.count(_FLOAT) == len(parts) else Node(names, tuple(parts))

    def items(self) -> Iterator[tuple[Any, Any]]:
        return zip(self.names, self.parts or repeat(_FLOAT), strict=False)

    def leaves(self, path: Path = ()) -> Iterator[tuple[Path, Leaf]]:
        for name, part in self.items():
            if isinstance(part, Node):
                yield from part.leaves((*path, name))
            else:
                yield (*path, name), part


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
            floats: list[Any] = []
            ints: list[Any] = []
            self._node = _flatten(given, "x", op == "mean", floats, ints)
            packed = struct.pack(f"{len(floats)}d", *floats), struct.pack(f"{len(ints)}q", *ints)
            self._values = {True: np.frombuffer(packed[0]), False: np.frombuffer(packed[1], np.int64)}
            self._weight = local.weight_of(weights, op)
        except Exception as error:  # which all ranks must raise
            self._problem = error

    def key(self) -> Hashable:
        given = self.root, self.op, self.route, self.out
        if self._problem or recorded() is not None or not {str, int, type(None)}.issuperset(map(type, given)):
            return None
        return "a dict", *given, self._node

    def validate(self, team: Team, call: Call) -> None:
        if self._problem is not None:
            raise self._problem
        local.check_dict(self, team, call)
        self._digest = blake2b(repr(self._node).encode(), digest_size=16).digest()

    def plan(self, team: Team, call: Call, agreed: Agreed) -> None:
        first, found = _exchange(self.name, team, self._node, self._digest)
        problems: dict[int, str] = {}
        holders: dict[Path, frozenset[int]] = {}
        self._union = _merge(found, (), holders, problems)
        wrong = {rank: coded("HD303", problems[peer]) for rank, peer in enumerate(first) if peer in problems}
        objects.raise_problems(self.name, wrong)
        mean, self._parts = self.op == "mean", []
        how = "sum" if mean else self.op
        sets = {ranks: i for i, ranks in enumerate(dict.fromkeys(holders.values()))} if mean else {}
        for real, neutral in zip((True, False), _NEUTRAL[how], strict=True):
            end, at = 0, {}
            for path, leaf in self._union.leaves():
                if leaf.real is real:
                    at[path] = range(end, end := end + math.prod(leaf.shape))
            mine = [i for path, leaf in self._node.leaves() if leaf.real is real for i in at[path]]
            # For a mean, the weight of each set of ranks that have the same keys follows.
            which = [sets[holders[path]] for path, where in at.items() for _ in where if mean]
            if not end:
                continue
            held = np.array([first[team.rank] in ranks for ranks in sets])
            words = np.full(end + len(sets), neutral, float if real else np.int64)
            x, root = torch.from_numpy(words), self.root
            inner = self._reduction("all_reduce" if root is None else "reduce", x, how, self.route, None, root=root)
            inner.plan(team, call_of(inner.name, inner.check, team), agreed)
            self._parts.append((real, inner, words, np.array(mine, int), held, np.array(which, int)))
        dicts = [key for key in team.repeats if type(key) is tuple and key[0] == "a dict"]
        for old in dicts[: 1 - _MOST]:  # they may be large
            del team.repeats[old]
        self.kept = Kept(team, None, -1, None, 0)

    def forward(self, team: Team) -> Any:
        receives, found = self.root in (None, team.rank), {True: iter(()), False: iter(())}
        for real, inner, blank, at, held, which in self._parts:
            values = self._values[real]
            words = blank.copy()
            if self._weight:
                with np.errstate(all="ignore"):
                    words[at] = values if self._weight == 1 else values * self._weight
                words[len(words) - len(held) :] = held * self._weight
            inner.sent = torch.from_numpy(words)
            total = inner.move(team)
            if total is not None:
                sums = total.numpy()
                if len(held):
                    with np.errstate(all="ignore"):
                        sums = sums[: len(which)] / sums[len(which) :][which]
                found[real] = iter(struct.unpack(f"{len(sums)}{'d' if real else 'q'}", sums.data))
        return _filled(self._union, found, team.settings.device) if receives else None


def _flatten(x: dict[Any, Any], path: str, mean: bool, floats: list[Any], ints: list[Any]) -> Node:
    """Describe a dict, and append its values to `floats` and `ints`."""
    names, values = tuple(x), x.values()
    if countOf(map(type, values), float) == len(x):
        floats += values
        return Node(names)
    parts: list[Any] = []
    for name, value in x.items():
        where, first = f"{path}[{name!r}]", len(ints)
        if isinstance(value, dict):
            parts.append(_flatten(value, where, mean, floats, ints))
        elif isinstance(value, Tensor):
            tensor = local.ready(value, where)
            dtype = tensor.dtype
            real = dtype.is_floating_point
            if dtype.is_complex or dtype in BARE or (mean and not real):
                raise ArgumentError("HD202", f"{where} has dtype {dtype}, which is not reduced so: convert it")
            parts.append(Leaf(real, dtype, tuple(tensor.shape), not tensor.is_cpu))
            (floats if real else ints).extend((tensor.double() if real else tensor).reshape(-1).tolist())
        elif isinstance(value, (float, np.floating)) or (mean and isinstance(value, _INTEGERS)):
            parts.append(_FLOAT)
            try:
                floats.append(float(value))
            except OverflowError as error:
                raise ArgumentError("HD202", f"{where}: {error}") from None
        elif isinstance(value, _INTEGERS):
            parts.append(_INT)
            ints.append(int(value))
        else:
            raise ArgumentError("HD202", f"{where} is {show(value)}, expected a number, a tensor or a dict")
        for number in ints[first:]:
            if not -(2**63) <= number < 2**63:
                raise ArgumentError("HD202", f"{where} is {show(number)}, expected an integer of 64 bits")
    return Node.of(names, parts)


def _exchange(verb: str, team: Team, node: Node, digest: bytes) -> tuple[list[int], dict[int, Node]]:
    """Exchange the descriptions of the dicts. Collective.

    Returns:
        For each rank the first one with the same description; and the descriptions of those.
    """
    digests = team.comm.allgather(digest)
    first = [digests.index(digest) for digest in digests]
    nodes: Sequence[Any] = [node]
    if any(first):
        nodes = objects.all_gather_object(team.comm, node if first[team.rank] == team.rank else None, verb)
    # This rank's own is not a copy, which might differ: NaN is a key that equals no copy.
    return first, {rank: nodes[rank] for rank in dict.fromkeys(first)} | {first[team.rank]: node}


def _merge(found: dict[int, Node], path: Path, holders: dict[Path, frozenset[int]], problems: dict[int, str]) -> Node:
    """Return the union of the dicts of some ranks; `holders` gets the ranks that have each leaf."""
    tables = {rank: dict(node.items()) for rank, node in found.items()}
    names, parts = tuple(dict.fromkeys(chain.from_iterable(tables.values()))), []
    for name in names:
        mine, place = {rank: table[name] for rank, table in tables.items() if name in table}, (*path, name)
        kinds = {rank: "a dict" if isinstance(part, Node) else str(part) for rank, part in mine.items()}
        first, *_ = mine
        where = "x" + "".join(f"[{key!r}]" for key in place)
        for rank, kind in kinds.items():
            if kind != kinds[first]:
                problems[rank] = f"{where} is {kind}, where rank {first} has {kinds[first]}"
        if {*kinds.values()} == {"a dict"}:
            parts.append(_merge(mine, place, holders, problems))
        else:
            parts.append(mine[first])
            holders[place] = frozenset(mine)
    return Node.of(names, parts)


def _filled(node: Node, values: dict[bool, Iterator[Any]], device: torch.device) -> dict[Any, Any]:
    """Build the dict that `node` describes, of the next values."""
    if not node.parts:
        return dict(zip(node.names, values[True], strict=False))
    return {name: _value(part, values, device) for name, part in node.items()}


def _value(part: Any, values: dict[bool, Iterator[Any]], device: torch.device) -> Any:
    if isinstance(part, Node):
        return _filled(part, values, device)
    source = values[part.real]
    if part.dtype is None:
        return next(source)
    wide = torch.float64 if part.real else torch.int64
    words = torch.tensor([*islice(source, math.prod(part.shape))], dtype=wide, device="cpu")
    return words.to(device if part.on_gpu else "cpu", part.dtype).view(part.shape)
