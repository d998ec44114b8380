"""gather, concat and split of structures on every route, against list + list and torch.cat on one process."""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from cases import extents_of, part, same_bits, whole_of
from collective import Findings, assert_on_all_ranks, raises_on_all_ranks
from torch import Tensor

import hpcdist as hd
from hpcdist.collectives import structures
from hpcdist.tensors import message

pytestmark = pytest.mark.mpi

ROUTES = ("mpi", "gloo", "hdf5")


class Metrics(NamedTuple):
    loss: Any
    count: Any


@dataclass
class Batch:
    tokens: Any
    ids: Any


@pytest.fixture(params=["as it is", "low"])
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """From which size on tensors travel by themselves: as it is, or so low that almost all do."""
    if request.param == "low":
        monkeypatch.setattr(message, "SMALL", 16)


def _mine(rank: int, size: int, case: str) -> dict[str, Any]:
    """What one rank brings; every rank can say it of every other."""
    extents = extents_of(case, size)
    whole = whole_of((3, sum(extents), 2), torch.float32)
    items = [whole_of((k, rank + 1), torch.int64, salt=10 * rank + k) for k in range(extents[rank])]
    return {
        "x": part(whole, 1, extents, rank),
        "items": [*items, f"rank {rank}", None, rank + 0.5, b"\0" * rank, np.arange(rank)],
        "metrics": Metrics(0.1 * rank, torch.tensor(rank)),
        "batch": Batch(part(whole_of((1, sum(extents)), torch.bfloat16), 1, extents, rank), {"k": (rank, [str(rank)])}),
        "array": np.full((2, extents[rank]), rank, np.uint8),
        "ordered": OrderedDict(b=[rank], a=2**70 + rank),
    }


def _joined(all_: list[dict[str, Any]]) -> dict[str, Any]:
    """What they are together."""
    return {
        "x": torch.cat([one["x"] for one in all_], 1),
        "items": [item for one in all_ for item in one["items"]],
        "metrics": Metrics([one["metrics"].loss for one in all_], torch.stack([one["metrics"].count for one in all_])),
        "batch": Batch(
            torch.cat([one["batch"].tokens for one in all_], 1),
            {"k": ([one["batch"].ids["k"][0] for one in all_], [s for one in all_ for s in one["batch"].ids["k"][1]])},
        ),
        "array": np.concatenate([one["array"] for one in all_], 1),
        "ordered": OrderedDict(b=[one["ordered"]["b"][0] for one in all_], a=[one["ordered"]["a"] for one in all_]),
    }


def _same(x: Any, y: Any) -> bool:
    if isinstance(x, Tensor):
        return isinstance(y, Tensor) and same_bits(x, y)
    if isinstance(x, np.ndarray):
        return isinstance(y, np.ndarray) and x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
    if type(x) is not type(y):
        return False
    if isinstance(x, dict):
        return list(x) == list(y) and all(_same(x[key], y[key]) for key in x)
    if isinstance(x, (list, tuple)):
        return len(x) == len(y) and all(map(_same, x, y))
    return _same(vars(x), vars(y)) if isinstance(x, Batch) else bool(x == y)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("route", ROUTES)
def test_gather_and_concat(world: hd.World, route: str) -> None:
    findings, size = Findings(world.comm), world.world_size
    for turn, case in enumerate(("ragged", "zero in the middle", "all zero") if route != "hdf5" else ("ragged",)):
        mine, expected = _mine(world.rank, size, case), _joined([_mine(rank, size, case) for rank in range(size)])
        # The counts are 0-d: they are joined along 0 only.
        mine["metrics"], expected["metrics"] = (
            mine["metrics"]._replace(count=1),
            expected["metrics"]._replace(count=[1] * size),
        )
        for root in {turn % size, size - 1}:
            got = hd.gather(mine, 1, root, route=route)
            right = got is None if world.rank != root else _same(got, expected)
            findings.check(right, f"gather to {root}, {case}: {got}")
        findings.check(_same(hd.concat(mine, 1, route=route), expected), f"concat, {case}")
        findings.check(_same(mine["x"], _mine(world.rank, size, case)["x"]), "the input changed")
    findings.settle()


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("route", ROUTES)
def test_along_dim_0(world: hd.World, route: str) -> None:
    """Straight into the place in the joined tensor; 0-d tensors are stacked."""
    findings, size = Findings(world.comm), world.world_size
    whole = whole_of((size * (size + 1) // 2, 40), torch.float64)
    extents = tuple(range(1, size + 1))
    mine = (part(whole, 0, extents, world.rank), [torch.tensor(world.rank)], {"n": torch.tensor(float(world.rank))})
    expected = (whole, [torch.tensor(rank) for rank in range(size)], {"n": torch.arange(float(size))})
    got = hd.concat(mine, route=route)
    findings.check(_same(got, expected), got)
    findings.check(got[0].is_contiguous() and got[1][0].untyped_storage().nbytes() == 8, "memory of its own")
    findings.settle()


def test_keys_that_look_alike(world: hd.World) -> None:
    """Names as long as those of a model's state, and keys whose text is the same."""

    findings, size = Findings(world.comm), world.world_size
    name = "transformer.encoder.layers.0.self_attn.in_proj_"
    got = hd.concat({f"{name}weight": torch.ones(2), f"{name}bias": torch.zeros(2), 1: torch.full((2,), 5.0)})
    findings.check([x.sum().item() for x in got.values()] == [2 * size, 0, 10 * size], got)
    findings.settle()


def test_split_where_every_rank_has_the_whole(world: hd.World) -> None:
    findings, size = Findings(world.comm), world.world_size
    whole = {"x": whole_of((2 * size, 3), torch.int32), "l": list(range(size)), "n": "all"}
    got = hd.split(whole, root=None)
    mine = {"x": whole["x"][2 * world.rank : 2 * world.rank + 2], "l": [world.rank], "n": "all"}
    findings.check(_same(got, mine) and got["x"].data_ptr() == mine["x"].data_ptr(), got)
    findings.settle()


def test_packed_sequences(world: hd.World) -> None:
    """Joined or cut field by field they would be garbage; sent, and in lists, they stay as they are."""
    rank, size = world.rank, world.world_size
    packed = torch.nn.utils.rnn.pack_sequence([torch.full((n,), float(rank)) for n in (3, 2)])
    for step in (
        lambda: hd.concat({"p": packed}),
        lambda: hd.gather(packed),
        lambda: hd.split((1, packed) if rank == 0 else None),
    ):
        error = raises_on_all_ranks(world.comm, hd.RankError, step)
        assert "is a PackedSequence, which is not joined or cut field by field" in str(error)
    with pytest.raises(ValueError, match="is a PackedSequence"):
        hd.split(packed, root=None)
    findings = Findings(world.comm)
    handle = hd.isend(packed, (rank + 1) % size)
    got = [hd.recv((rank - 1) % size), *hd.concat([packed]), *hd.split([packed] * size if rank == 0 else None)]
    handle.wait(60)
    for one, source in zip(got, [(rank - 1) % size, *range(size), 0], strict=True):
        padded, lengths = torch.nn.utils.rnn.pad_packed_sequence(one, batch_first=True)
        expected = torch.full((2, 3), float(source))
        expected[1, 2] = 0
        findings.same(padded, expected, source)
        findings.check(lengths.tolist() == [3, 2], lengths)
    findings.settle()


@pytest.mark.filterwarnings("ignore")
def test_what_would_lose_more_than_it_keeps(world: hd.World) -> None:
    """A mask, a class: refused on all ranks, though one alone has it; and the job goes on."""
    last = world.world_size - 1
    for value in (
        {"x": np.ma.masked_array([1, 2], [True, False])},
        [torch.masked.masked_tensor(torch.ones(2), torch.tensor([True, False]))],
        torch.masked.masked_tensor(torch.ones(2), torch.tensor([True, False])),
    ):
        error = raises_on_all_ranks(
            world.comm, hd.RankError, lambda value=value: hd.concat(value if world.rank == last else [1])
        )
        assert list(error.problems) == [last] and "mask" in str(error).lower(), error
        assert hd.concat([1]) == [1] * world.world_size


def test_more_than_a_host_can_have(world: hd.World) -> None:
    """A tensor that is larger than its memory: the same error everywhere, and the job goes on."""
    huge = torch.ones(1).expand(2**46)
    for step in (
        lambda: hd.concat([huge] if world.rank == 0 else [1]),
        lambda: hd.split([huge] if world.rank == 0 else None),
    ):
        error = raises_on_all_ranks(world.comm, hd.RankError, step)
        findings = Findings(world.comm)
        findings.check(list(error.problems) == [0] and "more than the memory of this host" in str(error), error)
        findings.check(hd.concat([1]) == [1] * world.world_size, "the next call")
        findings.settle()


def test_single_values(world: hd.World) -> None:
    findings, size = Findings(world.comm), world.world_size
    for make in (lambda r: r, lambda r: f"{r}", lambda r: None, lambda r: r if r % 2 else "s", lambda r: 1j * r):
        findings.check(hd.concat(make(world.rank)) == [make(rank) for rank in range(size)], make(world.rank))
    findings.check(hd.concat([]) == [] and hd.concat(()) == () and hd.concat({}) == {}, "empty")
    got = hd.concat([[world.rank]] * world.rank)
    findings.check(got == [[rank] for rank in range(size) for _ in range(rank)], got)
    findings.settle()


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("route", ROUTES)
def test_split(world: hd.World, route: str) -> None:
    findings, size = Findings(world.comm), world.world_size
    for turn, case in enumerate(("ragged", "zero first") if route != "hdf5" else ("ragged",)):
        extents, root = extents_of(case, size), turn % size
        rows = sum(extents)
        tree = {
            "x": whole_of((2, rows), torch.complex64),
            "list": [whole_of((k,), torch.int16) for k in range(rows)],
            "name": "all",
            "one": np.arange(2 * rows).reshape(2, rows),
            "batch": Batch(whole_of((1, rows, 3), torch.float32), Metrics(None, [b"x"] * rows)),
        }
        start = sum(extents[: world.rank])
        mine = slice(start, start + extents[world.rank])
        expected = {
            "x": tree["x"][:, mine].contiguous(),
            "list": tree["list"][mine],
            "name": "all",
            "one": np.ascontiguousarray(tree["one"][:, mine]),
            "batch": Batch(tree["batch"].tokens[:, mine].contiguous(), Metrics(None, [b"x"] * extents[world.rank])),
        }
        got = hd.split(
            tree if world.rank == root else None, 1, root, extents if world.rank == root else None, route=route
        )
        findings.check(_same(got, expected), f"{case} from {root}: {got}")
        by_rule = hd.split(list(range(10)) if world.rank == root else None, 0, root, route=route)
        findings.check(by_rule == np.array_split(np.arange(10), size)[world.rank].tolist(), by_rule)
    findings.settle()


def test_in_the_background(world: hd.World) -> None:
    findings, size = Findings(world.comm), world.world_size
    mine = [world.rank, torch.full((world.rank + 1,), world.rank)]
    handles = [hd.concat(mine, async_op=True), hd.gather(mine, async_op=True)]
    expected = [item for rank in range(size) for item in (rank, torch.full((rank + 1,), rank))]
    for got in (handles[0].wait(20), handles[1].wait(20) if world.rank == 0 else expected):
        findings.check(_same(got, expected), got)
    findings.settle()


def test_pickles_if_all_allow_them(world: hd.World) -> None:
    findings, size = Findings(world.comm), world.world_size
    got = hd.concat([{world.rank}], allow_pickle=True)
    findings.check(got == [{rank} for rank in range(size)], got)
    got = hd.split([{1}] * size if world.rank == 0 else None, allow_pickle=True)
    findings.check(got == [{1}], got)
    findings.settle()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda r: [1] if r == 1 else torch.ones(1), r"x is a structure, where ranks? [\d, ]+ ha(s|ve) a tensor"),
        (lambda r: [1] if r else (1,), r"x is a list, where rank 0 has a tuple"),
        (lambda r: {"a": 1} if r else {"a": [1]}, r"x\['a'\] is a single value, where rank 0 has a list"),
        (
            lambda r: {"a": 1, "b": r} if r else {"a": 1},
            r"x has the keys \['a', 'b'\], where rank 0 has the keys \['a'\]",
        ),
        (lambda r: (1,) * (r + 1), r"x has 2 items, where rank 0 has 1 items"),
        (lambda r: Metrics(1, 2) if r else Point(1, 2), "x is of class test_structures:Metrics, where rank 0 has"),
        (lambda r: {"a": torch.ones(2, 2 + r)}, r"x\['a'\] has shape \(\*, 3\), where rank 0 has \(\*, 2\)"),
        (lambda r: (torch.ones((2,) * (r + 1)),), r"x\[0\] has number of dims 2, where rank 0 has 1"),
        (
            lambda r: Batch(torch.ones(2).to(torch.float64 if r else torch.float32), 1),
            r"x.tokens has dtype torch.float64",
        ),
        (
            lambda r: np.ones(2) if r == 1 else torch.ones(2),
            r"x is a structure, where ranks? [\d, ]+ ha(s|ve) a tensor",
        ),
        (lambda r: [print] if r else [1], r"x\[0\] is a builtins.builtin_function_or_method, which is not sent"),
    ],
)
def test_structures_that_differ(world: hd.World, make: Any, told: str) -> None:
    error = raises_on_all_ranks(world.comm, hd.RankError, lambda: hd.concat(make(world.rank)))
    findings = Findings(world.comm)
    findings.check(0 not in error.problems and re.search(told, str(error)), f"expected {told!r} in {error}")
    findings.check(hd.concat([1]) == [1] * world.world_size, "the next call")
    findings.settle()


class Point(NamedTuple):
    x: Any
    y: Any


def test_wrong_arguments(world: hd.World) -> None:
    findings = Findings(world.comm)
    mine: Any = {"a": torch.ones(2)} if world.rank == 0 else None
    wrong: list[tuple[Any, str]] = [
        (lambda: hd.concat([1], out=torch.ones(1)), "out is given, but x is not a tensor"),
        (lambda: hd.concat({"a": torch.ones(2)}, 1), r"dim is 1, expected -1 to 0 for x\['a'\]"),
        (lambda: hd.split(mine, 1), r"x\['a'\] has no dim 1"),
        (lambda: hd.split(mine, counts=[7] * world.world_size), r"x\['a'\]: counts add up to"),
        (lambda: hd.split({1} if world.rank == 0 else None), "x is a builtins.set"),
        (lambda: hd.concat([1], route="tcp"), "route is 'tcp'"),
        (lambda: hd.gather([1], root=world.world_size), "root is"),
        (lambda: hd.concat([1], "0"), "dim must be an int"),  # type: ignore[arg-type]
    ]
    for step, told in wrong:
        error = raises_on_all_ranks(world.comm, hd.RankError, step)
        findings.check(re.search(told, str(error)), f"expected {told!r} in {error}")
    findings.settle()


@pytest.mark.mpi(min_size=2)
def test_a_class_that_one_rank_does_not_know(world: hd.World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same error everywhere, before the data move."""
    mine = hd.concat([Point(1, world.rank)])
    assert mine == [Point(1, rank) for rank in range(world.world_size)]
    if world.rank == 1:

        def unknown(name: str) -> type:
            raise TypeError(f"{name} is no dataclass")

        monkeypatch.setattr(structures, "find_class", unknown)
    error = raises_on_all_ranks(world.comm, hd.RankError, lambda: hd.concat([Point(1, 2)]))
    monkeypatch.undo()
    findings = Findings(world.comm)
    findings.check(list(error.problems) == [1], error)
    findings.check(hd.concat([1]) == [1] * world.world_size, "the next call")
    findings.settle()


@pytest.mark.mpi(min_size=2)
def test_keys_are_shown_as_they_are(world: hd.World) -> None:
    x = {(1, "a"): torch.zeros(1 + world.rank, 2)}
    error = raises_on_all_ranks(world.comm, hd.RankError, lambda: hd.concat(x, 1))
    assert_on_all_ranks(world.comm, "x[(1, 'a')] has shape" in str(error), error)
    error = raises_on_all_ranks(world.comm, hd.RankError, lambda: hd.concat({(1, world.rank): 0}))
    assert_on_all_ranks(world.comm, "the keys [(1, 0)]" in str(error), error)
