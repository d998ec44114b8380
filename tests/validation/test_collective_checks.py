"""Every mistake on every single rank and on all: one error everywhere, naming who is wrong; then the job goes on."""

from __future__ import annotations

import gc
import re
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from cases import whole_of
from collective import Findings, assert_on_all_ranks, raises_on_all_ranks

import hpcdist as hd
from hpcdist.control import objects
from hpcdist.errors import HpcdistError
from hpcdist.validation import collective as agree

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:.*nested")]

ROWS = 2  # of every shard; the whole has this many a rank


@dataclass(frozen=True)
class Mistake:
    """Arguments of a verb, and what the error must say of the ranks that pass them instead of the right ones."""

    name: str
    verb: str
    wrong: Callable[[hd.World], dict[str, Any]]
    told: str  # a regular expression: what was expected, and what came
    where: Callable[[hd.World, int], bool] = field(default=lambda world, root: True)  # on which ranks it is a mistake


def _right(world: hd.World, verb: str, root: int) -> dict[str, Any]:
    shard = whole_of((ROWS, 3), torch.float32, salt=world.rank)
    if verb == "concat":
        return {"x": shard}
    if verb == "gather":
        return {"x": shard, "root": root}
    whole = whole_of((ROWS * world.world_size, 3), torch.float32)
    return {"x": whole if world.rank == root else None, "root": root}


def _call(world: hd.World, verb: str, root: int, changes: dict[str, Any]) -> object:
    return getattr(hd, verb)(**(_right(world, verb, root) | changes))


def _others_work(world: hd.World) -> None:
    """The call after a refused one."""
    expected = torch.arange(world.world_size)
    assert_on_all_ranks(world.comm, torch.equal(hd.concat(expected[world.rank]), expected), "the next call")


def _on_root(world: hd.World, root: int) -> bool:
    return world.rank == root


def _elsewhere(world: hd.World, root: int) -> bool:
    return world.rank != root


def _empty(world: hd.World, *shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    """Memory for the whole, if `shape` is right."""
    return torch.empty((ROWS * world.world_size, *shape), dtype=dtype, device=device)


# --- mistakes that a rank can see for itself -------------------------------------------------------------------------


def _shard_mistakes(verb: str) -> list[Mistake]:
    """Of the verbs to which every rank brings a shard."""
    x: dict[str, tuple[Callable[[hd.World], Any], str]] = {
        "an object": (lambda w: object(), r"x is a builtins.object, which is not sent; expected tensors, numpy"),
        "a function in a list": (lambda w: [1.0, print], r"x\[1\] is a builtins.builtin_function_or_method, which"),
        "text in a NumPy array": (lambda w: np.array(["a"]), r"x is a numpy array of dtype <U1, which no tensor can"),
        "sparse": (lambda w: torch.eye(2).to_sparse(), "x must be a dense tensor, got layout torch.sparse_coo"),
        "sparse rows": (
            lambda w: torch.eye(2).to_sparse_csr(),
            "x must be a dense tensor, got layout torch.sparse_csr",
        ),
        "for MKL-DNN": (lambda w: torch.eye(2).to_mkldnn(), "x must be a dense tensor, got layout torch._mkldnn"),
        "nested": (lambda w: torch.nested.nested_tensor([torch.zeros(2)]), "x must be a dense tensor"),
        "quantized": (
            lambda w: torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8),
            r"x must be a dense tensor, got layout torch.strided \(quantized\)",
        ),
        "nowhere": (lambda w: torch.empty(2, device="meta"), "x is on device meta; expected cpu or cuda"),
    }
    mistakes = [Mistake(f"x is {name}", verb, lambda w, v=v: {"x": v(w)}, told) for name, (v, told) in x.items()]
    for dim, told in [
        ("0", "dim must be an int, got str '0'"),
        (0.0, "dim must be an int, got float 0.0"),
        (None, "dim must be an int, got NoneType"),
        (True, "dim must be an int, got bool True"),
        (np.array([0, 1]), "dim must be an int, got ndarray"),
        (2, "dim is 2, expected -2 to 1 for a tensor of 2 dims"),
        (-3, "dim is -3, expected -2 to 1 for a tensor of 2 dims"),
    ]:
        mistakes.append(Mistake(f"dim is {dim!r}", verb, lambda w, dim=dim: {"dim": dim}, told))
    return mistakes


def _out_mistakes(verb: str) -> list[Mistake]:
    where = _on_root if verb == "gather" else Mistake.__dataclass_fields__["where"].default
    outs: dict[str, tuple[Callable[[hd.World], Any], str]] = {
        "a list": (lambda w: [0.0], "out must be a torch.Tensor, got list"),
        "of another dtype": (
            lambda w: _empty(w, 3, dtype=torch.float64),
            "out has dtype torch.float64, expected torch.float32, that of x",
        ),
        "too wide": (lambda w: _empty(w, 4), r"out has shape \(\d+, 4\), expected \(\*, 3\)"),
        "of other dims": (lambda w: _empty(w, 3, 1), r"out has shape \(\d+, 3, 1\), expected \(\*, 3\)"),
        "too long": (
            lambda w: torch.empty(ROWS * w.world_size + 1, 3),
            r"out has extent (\d+) along dim, expected \d+",
        ),
        "elsewhere": (lambda w: _empty(w, 3, device="meta"), "out is on device meta"),
        "expanded": (lambda w: torch.empty(1, 3).expand(max(2, ROWS * w.world_size), 3), "out overlaps itself"),
        "lazily negated": (lambda w: _empty(w, 3)._neg_view(), "out is a lazily conjugated or negated view"),
    }
    made = [
        Mistake(f"out is {name}", verb, lambda w, v=v: {"out": v(w)}, told, where) for name, (v, told) in outs.items()
    ]
    if verb == "gather":
        told = r"out is given, but only the root \(rank \d+\) receives a result"
        made.append(Mistake("out is given elsewhere", verb, lambda w: {"out": _empty(w, 3)}, told, _elsewhere))
    return made


def _root_mistakes(verb: str) -> list[Mistake]:
    return [
        Mistake(f"root is {name}", verb, lambda w, v=value: {"root": v if v != "size" else w.world_size}, told)
        for name, value, told in [
            ("a str", "0", "root must be an int, got str '0'"),
            ("a bool", False, "root must be an int, got bool False"),
            ("negative", -1, r"root is -1, expected 0 to \d+ in a group of \d+ ranks"),
            ("the size", "size", r"root is \d+, expected 0 to \d+ in a group of \d+ ranks"),
        ]
    ]


def _route_mistakes(verb: str) -> list[Mistake]:
    told = "expected one of auto, nccl, gloo, mpi"
    return [
        Mistake("no such route", verb, lambda w: {"route": "tcp"}, f"route is 'tcp', {told}"),
        Mistake("route is None", verb, lambda w: {"route": None}, f"route is None, {told}"),
        Mistake("route is an array", verb, lambda w: {"route": np.array(["mpi", "gloo"])}, told),
    ]


def _split_mistakes() -> list[Mistake]:
    def counts(change: Callable[[hd.World], Any]) -> Callable[[hd.World], dict[str, Any]]:
        return lambda w: {"counts": change(w)}

    def made(name: str, wrong: Callable[[hd.World], dict[str, Any]], told: str, where: Any = _on_root) -> Mistake:
        return Mistake(name, "split", wrong, told, where)

    out = r"out has extent \d+ along dim, expected 2"
    return [
        made("no x on the root", lambda w: {"x": None}, "x must be a torch.Tensor, got NoneType"),
        made("x is an object", lambda w: {"x": object()}, "x is a builtins.object, which is not sent"),
        made(
            "x is a structure that is too short",
            lambda w: {"x": {"a": torch.zeros(1)}, "counts": [2] * w.world_size},
            r"x\['a'\]: counts add up",
        ),
        made("x is 0-d", lambda w: {"x": torch.tensor(1.0)}, "x has no dimension to split along: it is 0-d"),
        made("x is sparse", lambda w: {"x": torch.eye(2).to_sparse()}, "x must be a dense tensor"),
        made(
            "x elsewhere", lambda w: {"x": torch.zeros(2, 3)}, r"x is given, but split sends from the root", _elsewhere
        ),
        made("dim is a str", lambda w: {"dim": "0"}, "dim must be an int, got str '0'", lambda w, root: True),
        made("too few counts", counts(lambda w: [2] * (w.world_size - 1)), "entries, expected one for each of"),
        made("too many counts", counts(lambda w: [1] * 2 * w.world_size), "entries, expected one for each of"),
        made("counts add up to less", counts(lambda w: [1] * w.world_size), r"counts add up to \d+, expected \d+"),
        made("negative counts", counts(lambda w: [-1] * w.world_size), r"counts has a negative entry: \[-1"),
        made("counts of floats", counts(lambda w: [2.0] * w.world_size), "counts must be integers.*got list"),
        made("counts is an int", counts(lambda w: 2), "counts must be integers.*got int 2"),
        made("no such rule", counts(lambda w: "half"), r"expected one of \['block', 'chunk'\], got 'half'"),
        made("counts of floats elsewhere", counts(lambda w: [2.0]), "counts must be integers", _elsewhere),
        made("out too long", lambda w: {"out": torch.empty(ROWS + 1, 3)}, out, lambda w, root: True),
        made("out too short", lambda w: {"out": torch.empty(0, 3)}, out, lambda w, root: True),
        made("out is a list", lambda w: {"out": [0]}, "out must be a torch.Tensor, got list", lambda w, root: True),
        made(
            "out is expanded",
            lambda w: {"out": torch.empty(1, 3).expand(2, 3)},
            "out overlaps itself",
            lambda w, root: True,
        ),
        made(
            "out is lazily negated",
            lambda w: {"out": torch.empty(2, 3)._neg_view()},
            "out is a lazily conjugated or negated view",
            lambda w, root: True,
        ),
    ]


LOCAL = [
    *_shard_mistakes("gather"),
    *_shard_mistakes("concat"),
    *_out_mistakes("gather"),
    *_out_mistakes("concat"),
    *_root_mistakes("gather"),
    *_root_mistakes("split"),
    Mistake("root is None", "gather", lambda w: {"root": None}, "root must be an int, got NoneType None"),
    *(mistake for verb in ("gather", "concat", "split") for mistake in _route_mistakes(verb)),
    *_split_mistakes(),
]


@pytest.mark.parametrize("mistake", LOCAL, ids=lambda mistake: f"{mistake.verb}: {mistake.name}")
def test_a_mistake_of_one_rank_and_of_all(world: hd.World, mistake: Mistake) -> None:
    """Named are exactly the ranks at fault, with what was expected there and what came."""
    size = world.world_size
    for root in {0, size - 1}:
        for guilty in [{rank} for rank in range(size)] + [set(range(size))]:
            at_fault = world.rank in guilty and mistake.where(world, root)
            named = [rank for rank, wrong in enumerate(world.comm.allgather(at_fault)) if wrong]
            if not named:
                continue
            changes = mistake.wrong(world) if at_fault else {}
            error = raises_on_all_ranks(
                world.comm, hd.RankError, lambda c=changes, r=root: _call(world, mistake.verb, r, c)
            )
            _check_error(world, error, mistake.verb, named, mistake.told)
    _others_work(world)


def _check_error(world: hd.World, error: hd.RankError, verb: str, named: list[int], told: str) -> None:
    findings = Findings(world.comm)
    findings.check(list(error.problems) == named, f"named {list(error.problems)}, expected {named}: {error}")
    findings.check(error.verb == verb, f"verb is {error.verb}")
    findings.check(f"{verb}() was refused on all ranks" in str(error), str(error))
    for rank, problem in error.problems.items():
        findings.check(re.search(told, problem), f"expected {told!r} in {problem!r}")
        findings.check(f"rank {rank}: {problem}" in str(error), str(error))
    findings.settle()


# --- mistakes that only show between ranks ---------------------------------------------------------------------------


DIFFERENCES: dict[str, tuple[str, Callable[[int], dict[str, Any]], Callable[[int], str]]] = {
    # verb, the arguments of variant 0 (right) and 1 (another), and how the message says them
    "gather: root": ("gather", lambda v: {"root": v}, lambda v: f"root is {v}"),
    "gather: route": ("gather", lambda v: {"route": ("mpi", "gloo")[v]}, lambda v: f"route is {('mpi', 'gloo')[v]}"),
    "concat: dim": ("concat", lambda v: {"dim": v, "x": torch.zeros(3, 3)}, lambda v: f"dim is {v}"),
    "concat: dtype": (
        "concat",
        lambda v: {"x": torch.zeros(2, dtype=(torch.float32, torch.float64)[v])},
        lambda v: f"dtype is torch.float{(32, 64)[v]}",
    ),
    "gather: number of dims": (
        "gather",
        lambda v: {"x": torch.zeros((2, 3, 4)[: v + 1])},
        lambda v: f"number of dims is {v + 1}",
    ),
    "concat: 0-d and 1-d": ("concat", lambda v: {"x": torch.zeros((1,) * v)}, lambda v: f"number of dims is {v}"),
    "concat: other extents": ("concat", lambda v: {"x": torch.zeros(v, 5 + v)}, lambda v: rf"shape is (*, {5 + v})"),
    "split: route": ("split", lambda v: {"route": ("auto", "mpi")[v]}, lambda v: f"route is {('auto', 'mpi')[v]}"),
    "split: dim": ("split", lambda v: {"dim": v}, lambda v: f"dim is {v}"),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", DIFFERENCES)
def test_ranks_that_differ(world: hd.World, name: str) -> None:
    """Named are those that differ from most; of two equal parties, the one without the lowest rank."""
    verb, arguments, text = DIFFERENCES[name]
    size = world.world_size
    for odd in [{rank} for rank in range(size)] + [set(range(size // 2))]:
        variants = [int(rank in odd) for rank in range(size)]
        usual = max(variants, key=lambda v: (variants.count(v), v == variants[0]))
        named = [rank for rank, variant in enumerate(variants) if variant != usual]
        changes = arguments(variants[world.rank])
        error = raises_on_all_ranks(world.comm, hd.RankError, lambda c=changes: _call(world, verb, 0, c))
        where = [str(rank) for rank, variant in enumerate(variants) if variant == usual]
        expected = rf"{re.escape(text(1 - usual))}, where ranks? {', '.join(where)} ha(s|ve) "
        expected += re.escape(text(usual).split(" is ")[1])
        _check_error(world, error, verb, named, expected)
        _others_work(world)


@pytest.mark.mpi(min_size=2)
def test_dims_that_are_the_same_in_other_words(world: hd.World) -> None:
    """-1 and 1 are one dim of a matrix; a rank may count from either end."""
    x = torch.full((2, 1), world.rank)
    result = hd.concat(x, 1 if world.rank % 2 else -1)
    assert_on_all_ranks(world.comm, result.tolist() == [list(range(world.world_size))] * 2, result)


@pytest.mark.mpi(min_size=2)
def test_roots_of_split_that_differ(world: hd.World) -> None:
    """Two ranks bring a tensor, or none does."""
    size = world.world_size
    for believed in ([0] * (size - 1) + [size - 1], [(rank + 1) % size for rank in range(size)]):
        mine = believed[world.rank]
        x = torch.zeros(size, 3) if mine == world.rank else None
        usual = Counter(believed).most_common(1)[0][0]
        named = [rank for rank, root in enumerate(believed) if root != usual]
        error = raises_on_all_ranks(world.comm, hd.RankError, lambda x=x, mine=mine: hd.split(x, root=mine))
        _check_error(world, error, "split", named, rf"root is \d, where ranks? [\d, ]+ ha(s|ve) {usual}")
        _others_work(world)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("out", "told"),
    [
        (torch.empty(ROWS, 3, dtype=torch.float64), r"torch.float64.*torch.float32"),
        (torch.empty(ROWS, 4), r"\(\*, 4\).*\(\*, 3\)"),
        (torch.empty(ROWS, 3, 1), r"3.*2"),
    ],
    ids=["dtype", "other extents", "number of dims"],
)
def test_an_out_of_split_that_does_not_fit_what_the_root_sends(world: hd.World, out: torch.Tensor, told: str) -> None:
    """Named is who brings it, not the root: also where the root has a higher rank, or the outs are the majority."""
    size = world.world_size
    for root in {0, size - 1}:
        others = [rank for rank in range(size) if rank != root]
        for guilty in [{rank} for rank in others] + [set(others)]:
            changes = {"out": out} if world.rank in guilty else {}
            error = raises_on_all_ranks(world.comm, hd.RankError, lambda c=changes, r=root: _call(world, "split", r, c))
            _check_error(world, error, "split", sorted(guilty), told)
            _others_work(world)


@pytest.mark.mpi(min_size=2)
def test_counts_that_differ(world: hd.World) -> None:
    """A rank besides the root need not pass counts; if it does, they are the root's."""
    size = world.world_size
    x = torch.zeros(ROWS * size, 3) if world.rank == 0 else None
    for theirs in ([ROWS - 1] * size, [ROWS], "chunk"):
        for rank in range(1, size):
            counts = [ROWS] * size if world.rank == 0 else theirs if world.rank == rank else None
            error = raises_on_all_ranks(world.comm, hd.RankError, lambda counts=counts: hd.split(x, counts=counts))
            _check_error(world, error, "split", [rank], r"counts is .*, where rank 0 has \(2, 2")
    _others_work(world)


def test_counts_written_in_other_ways(world: hd.World) -> None:
    """Integers of any kind are the same counts, in the next call too, and the rule may be named or left out."""
    size = world.world_size
    x = torch.arange(size) if world.rank == 0 else None
    findings = Findings(world.comm)
    ways = ([True] * size, np.ones(size, dtype=np.int8), torch.ones(size, dtype=torch.int64), (1,) * size)
    for way in ways:
        mine = hd.split(x, counts=way if world.rank == 0 else [1] * size)
        findings.check(mine.tolist() == [world.rank], f"{way!r}: {mine}")
    mine = hd.split(x, counts=None if world.rank == 0 else "block")
    findings.check(mine.tolist() == [world.rank], f"None and 'block': {mine}")
    findings.settle()


@pytest.mark.mpi(min_size=2)
def test_different_verbs(world: hd.World) -> None:
    """Each rank is told which verbs met; whoever calls another one than most is named."""
    x = torch.zeros(2)
    verbs: dict[str, Callable[[], object]] = {
        "gather": lambda: hd.gather(x),
        "concat": lambda: hd.concat(x),
        "split": lambda: hd.split(x if world.rank == 0 else None),
    }
    for one in verbs:
        for other in [verb for verb in verbs if verb != one]:
            for odd in range(world.world_size):
                called = [other if rank == odd else one for rank in range(world.world_size)]
                error = raises_on_all_ranks(world.comm, hd.RankError, verbs[called[world.rank]])
                usual = called[0] if world.world_size == 2 else one
                named = [rank for rank, verb in enumerate(called) if verb != usual]
                strange = other if usual == one else one
                told = rf"called {strange}\(\), where ranks? [\d, ]+ called {usual}\(\)"
                _check_error(world, error, called[0], named, told)
    _others_work(world)


@pytest.mark.mpi(min_size=2)
def test_a_mistake_and_a_difference_at_once(world: hd.World) -> None:
    """Each rank is told its own."""
    x: Any = {0: [print], 1: torch.zeros(2, dtype=torch.float64)}.get(world.rank, torch.zeros(2))
    error = raises_on_all_ranks(world.comm, hd.RankError, lambda: hd.concat(x))
    expected = [0] if world.world_size == 2 else [0, 1] if world.world_size > 3 else [0, 2]
    assert_on_all_ranks(world.comm, list(error.problems) == expected, error)
    assert_on_all_ranks(world.comm, "x[0] is a builtins.builtin_function" in error.problems[0], error)
    _others_work(world)


def test_an_error_in_a_group_is_the_groups(world: hd.World) -> None:
    """Ranks are counted as in the group, and the other groups never hear of it."""
    comm = world.comm.Split(world.rank % 2, -world.rank)
    x: Any = print if world.rank % 2 == 0 and comm.rank == 0 else torch.zeros(1)
    caught = None
    try:
        hd.concat(x, group=comm)
    except hd.RankError as error:
        caught = list(error.problems)
    expected = [0] if world.rank % 2 == 0 else None
    assert_on_all_ranks(world.comm, caught == expected, f"problems of {caught}, expected {expected}")
    _others_work(world)
    comm.Free()


def test_a_refused_call_after_one_that_was_agreed(world: hd.World) -> None:
    """What is remembered of a call that repeats is not taken for another one."""
    findings = Findings(world.comm)
    for turn in range(3):
        for extent in (2, 3, 2):
            result = hd.concat(torch.full((extent + world.rank,), turn))
            findings.check(result.numel() == sum(extent + rank for rank in range(world.world_size)), f"{extent}")
        raises_on_all_ranks(world.comm, hd.RankError, lambda: hd.concat(print))
    findings.settle()


def test_without_a_world(world: hd.World, monkeypatch: pytest.MonkeyPatch) -> None:
    from hpcdist.runtime import world as worlds

    with monkeypatch.context() as patch:
        patch.setattr(worlds, "_world", None)
        caught = []
        for verb in (hd.gather, hd.concat, hd.split):
            try:
                verb(torch.zeros(1))
            except HpcdistError as error:
                caught.append("call hpcdist.init() first" in str(error))
    assert_on_all_ranks(world.comm, caught == [True] * 3, caught)


# --- control.objects -------------------------------------------------------------------------------------------------


def test_broadcast(world: hd.World) -> None:
    """Rank 0 runs it, all have its result."""
    ran: list[int] = []

    def step() -> str:
        ran.append(world.rank)
        return f"from rank {world.rank}"

    result = objects.run_on_root(world.comm, "name", step)
    assert_on_all_ranks(world.comm, result == "from rank 0", result)
    assert_on_all_ranks(world.comm, ran == [0] * (world.rank == 0), ran)


class _AwkwardError(Exception):
    """An error that a pickle cannot rebuild: its constructor takes other arguments than it keeps."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{text} ({code})")
        self.unpicklable = lambda: code


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (FileNotFoundError(2, "No such file", "data.h5"), r"FileNotFoundError: .*No such file.*'data.h5'"),
        (_AwkwardError(7, "odd"), r"_AwkwardError: odd \(7\)"),
    ],
    ids=["plain", "awkward"],
)
def test_an_error_on_the_root_is_everyones(world: hd.World, error: Exception, told: str) -> None:
    """Also one that cannot be sent."""

    def fail() -> None:
        raise error

    caught = raises_on_all_ranks(world.comm, hd.RankError, lambda: objects.run_on_root(world.comm, "open", fail))
    _check_error(world, caught, "open", [0], told)
    kept = caught.__cause__ is (error if world.rank == 0 else None)  # with its traceback
    assert_on_all_ranks(world.comm, kept, caught.__cause__)


def test_what_fails_does_not_keep_what_the_caller_holds(world: hd.World) -> None:
    """Neither the memory of a GPU, nor half a result: not until the garbage is collected, but at once."""

    def refused(exchange: Callable[..., Any]) -> weakref.ref[torch.Tensor]:
        x = torch.ones(5)
        with pytest.raises(hd.RankError):
            exchange(world.comm, "open", lambda: 1 // 0)
        return weakref.ref(x)

    gc.disable()
    try:
        kept = [ref() is not None for ref in map(refused, (objects.run_on_root, objects.run_on_all))]
    finally:
        gc.enable()
    assert_on_all_ranks(world.comm, kept == [False, False], kept)


def test_all_gather(world: hd.World) -> None:
    results = objects.run_on_all(world.comm, "count", lambda: world.rank * 10)
    assert_on_all_ranks(world.comm, results == [rank * 10 for rank in range(world.world_size)], results)


def test_all_gather_tells_who_failed(world: hd.World) -> None:
    def step() -> int:
        if world.rank == world.world_size - 1:
            raise KeyError("missing")
        return world.rank

    error = raises_on_all_ranks(world.comm, hd.RankError, lambda: objects.run_on_all(world.comm, "count", step))
    _check_error(world, error, "count", [world.world_size - 1], "KeyError: 'missing'")


# --- what the functions say ------------------------------------------------------------------------------------------


def test_refuse_an_out_of_another_extent() -> None:
    agree.check_out("gather", {1: 5}, (5, 5, 5), False)
    with pytest.raises(hd.RankError) as caught:
        agree.check_out("gather", {0: 4, 1: 5}, (5, 5, 5), False)
    assert caught.value.problems == {0: "out has extent 4 along dim, expected 5 [HD208]"}
    with pytest.raises(hd.RankError, match="a gradient is needed"):
        agree.check_out("gather", {1: 5}, (5, 5), True)


def test_many_ranks_with_a_mistake_are_not_all_listed() -> None:
    error = hd.RankError("gather", dict.fromkeys(range(1000), "dtype is wrong"))
    assert len(error.problems) == 1000
    assert str(error).count("\n") == 9
    assert str(error).endswith("and 992 more ranks")
