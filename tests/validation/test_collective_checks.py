"""Every mistake on every single rank and on all: one error everywhere, naming who is wrong; then the job goes on."""

import gc
import itertools
import re
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch
from cases import whole_of
from collective import assert_on_all_ranks, goes_on, refused, several_ranks

import hpcdist as hd
from hpcdist.control import objects

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:.*nested", "ignore:.*MaskedTensor"),
]

ROWS = 2  # of every shard; the whole has this many a rank


@dataclass(frozen=True)
class Mistake:
    """A value of an argument of a verb that is wrong; what the error must say, as a regular expression; on which ranks
    it is a mistake."""

    name: str
    verb: str
    value: Any  # or a function of the world
    told: str
    where: Callable[[hd.World, int], bool]


def _right(world, verb, root):
    shard = whole_of((ROWS, 3), torch.float32, salt=world.rank)
    if verb == "concat":
        return {"x": shard}
    if verb == "gather":
        return {"x": shard, "root": root}
    whole = whole_of((ROWS * world.world_size, 3), torch.float32)
    return {"x": whole if world.rank == root else None, "root": root}


def _call(world, verb, root, changes):
    return getattr(hd, verb)(**(_right(world, verb, root) | changes))


def _everywhere(world, root):
    return True


def _on_root(world, root):
    return world.rank == root


def _elsewhere(world, root):
    return world.rank != root


def _whole(world, dtype=torch.float32):
    return torch.empty((ROWS * world.world_size, 3), dtype=dtype)


# --- mistakes that a rank can see for itself: each argument of each verb, all their kinds of concat ------------------


class _Wrapper(torch.Tensor):
    """A tensor that is only a description of others, like a DTensor."""

    @staticmethod
    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(cls, (3,), dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


with torch.inference_mode():
    _FROZEN = torch.empty(4, 3)
_X = torch.zeros(2, 3)

EVERY = [
    ("dim", "0", "dim must be an int, got str '0'"),
    ("route", "tcp", "route is 'tcp', expected one of auto, nccl, gloo, mpi"),
    ("out", [0], "out must be a torch.Tensor, got list"),
]
SHARDS = [
    ("x", object(), r"x is a builtins.object, which is not sent; expected tensors, numpy"),
    ("x", [1.0, print], r"x\[1\] is a builtins.builtin_function_or_method, which"),
    ("x", torch.eye(2).to_sparse(), "x must be a dense tensor, got layout torch.sparse_coo"),
    ("x", torch.empty(2, device="meta"), "x is on device meta; expected cpu or cuda"),
    ("dim", 2, "dim is 2, expected -2 to 1 for a tensor of 2 dims"),
    ("out", lambda w: _whole(w, torch.float64), "out has dtype torch.float64, expected torch.float32, that of x"),
    ("out", lambda w: torch.cat([_whole(w)] * 2), r"out has extent (\d+) along dim, expected \d+"),
]
CONCAT = [
    *(("dim", x, "dim must be an int") for x in (1.0, None, True, [0], torch.tensor(0), np.array([0, 1]))),
    ("dim", -3, "dim is -3, expected -2 to 1 for a tensor of 2 dims"),
    ("dim", lambda w: w.comm, r"dim must be an int, got Intracomm.*\(a communicator is given as group=\)"),
    *(("route", x, "expected one of auto, nccl, gloo, mpi") for x in ("", None, ["mpi"], np.array(["mpi", "gloo"]))),
    ("x", _X.to_sparse_csr(), "got layout torch.sparse_csr"),
    ("x", _X.to_mkldnn(), "got layout torch._mkldnn"),
    ("x", lambda w: torch.masked.masked_tensor(_X, _X.bool()), "MaskedTensor"),
    ("x", torch.nested.nested_tensor([torch.zeros(2)]), "x must be a dense tensor"),
    ("x", torch.quantize_per_tensor(_X, 1.0, 0, torch.qint8), r"got layout torch.strided \(quantized\)"),
    *((name, x(), "") for name in ("x", "out") for x in (_Wrapper, lambda: torch._efficientzerotensor((3,)))),
    ("out", torch.empty(5, 4), r"out has shape \(5, 4\), expected \(\*, 3\)"),
    ("out", torch.empty(5), r"out has shape \(5,\), expected \(\*, 3\)"),
    ("out", torch.empty(5, 3, 1), r"out has shape \(5, 3, 1\), expected \(\*, 3\)"),
    ("out", torch.empty(3).expand(5, 3), "out overlaps itself"),
    *(("out", torch.empty(20).as_strided((5, 3), (n, 1)), "of its elements share memory") for n in (1, 2)),
    ("out", torch.empty(5, 3, device="meta"), "out is on device meta"),
    ("out", _X.to_sparse(), "out must be a dense tensor, got layout torch.sparse_coo"),
    ("out", _FROZEN, "inference_mode"),
    ("out", lambda w: _whole(w, torch.complex64).conj(), "out is a lazily conjugated"),
]
ROOTS = [
    ("root", False, "root must be an int, got bool False"),
    ("root", lambda w: w.world_size, r"root is \d+, expected 0 to \d+ in a group of \d+ ranks"),
]
SPLIT = [
    ("x", None, "x must be a torch.Tensor, got NoneType", _on_root),
    ("x", object(), "x is a builtins.object, which is not sent", _on_root),
    ("x", lambda w: {"a": torch.zeros(2 * w.world_size - 1)}, r"x\['a'\]: counts add up", _on_root),
    ("x", torch.tensor(1.0), "x has no dimension to split along: it is 0-d", _on_root),
    ("x", torch.zeros(2, 3), r"x is given, but split sends from the root", _elsewhere),
    ("counts", lambda w: [2] * (w.world_size - 1), "entries, expected one for each of", _on_root),
    ("counts", lambda w: [1] * w.world_size, r"counts add up to \d+, expected \d+", _on_root),
    ("counts", "half", r"expected one of \['block', 'chunk'\], got 'half'", _on_root),
    ("counts", lambda w: [-1] * w.world_size, "counts has a negative entry: .-1", _on_root),
    *(("counts", x, "counts must be integers", _everywhere) for x in ([2.0], 2)),
    ("out", _FROZEN, "inference_mode", _everywhere),
    ("out", torch.empty(ROWS + 1, 3), r"out has extent \d+ along dim, expected 2", _everywhere),
]


def _mistakes():
    for verb in ("gather", "concat", "split"):
        rows = [*EVERY, *([] if verb == "split" else SHARDS), *(CONCAT if verb == "concat" else ROOTS)]
        for name, value, told in rows:
            where = _on_root if (verb, name) == ("gather", "out") else _everywhere
            yield Mistake(name, verb, value, told, where)
    yield Mistake("root", "gather", None, "root must be an int, got NoneType None", _everywhere)
    told = r"out is given, but only the root \(rank \d+\) receives a result"
    yield Mistake("out", "gather", _whole, told, _elsewhere)
    for name, value, told, where in SPLIT:
        yield Mistake(name, "split", value, told, where)


LOCAL = list(_mistakes())


@pytest.mark.parametrize("mistake", LOCAL, ids=lambda mistake: f"{mistake.verb}: {mistake.told[:40]}")
def test_a_mistake_of_one_rank_and_of_all(world, size, mistake):
    """Named are exactly the ranks at fault, with what was expected there and what came."""
    for root in {0, 0 if mistake.verb == "concat" else size - 1}:
        for guilty in [{rank} for rank in range(size)] + [set(range(size))]:
            at_fault = world.rank in guilty and mistake.where(world, root)
            named = [rank for rank, wrong in enumerate(world.comm.allgather(at_fault)) if wrong]
            if not named:
                continue
            value = mistake.value(world) if isinstance(mistake.value, FunctionType) else mistake.value
            changes = {mistake.name: value} if at_fault else {}
            if isinstance(changes.get("x"), dict):  # without counts there is no number of rows that is too small
                changes["counts"] = [ROWS] * size
            _check(mistake.verb, named, mistake.told, _call, world, mistake.verb, root, changes)
    goes_on()


def _check(verb, named, told, call, *args):
    """A call is refused for what is `told`, a regular expression, of the ranks that are named."""
    error = refused(f"{verb}() was refused on all ranks", call, *args, ranks=named)
    right = [
        re.search(told, problem) and f"rank {rank}: {problem}" in str(error) for rank, problem in error.problems.items()
    ]
    assert_on_all_ranks(error.verb == verb and all(right), f"expected {told!r} in {error}")
    return error


# --- mistakes that only show between ranks ---------------------------------------------------------------------------


# verb, argument, its value where it is right and where it is another one, and how the message says both
DIFFERENCES = [
    ("gather", "root", (0, 1), "root is ", ("0", "1")),
    ("gather", "route", ("mpi", "gloo"), "route is ", ("mpi", "gloo")),
    ("gather", "x", (torch.zeros(2), torch.zeros(2, 3)), "number of dims is ", ("1", "2")),
    ("concat", "dim", (0, 1), "dim is ", ("0", "1")),
    ("concat", "x", (torch.zeros(2), torch.zeros(2).double()), "dtype is ", ("torch.float32", "torch.float64")),
    ("concat", "x", (torch.tensor(0), torch.tensor([0])), "number of dims is ", ("0", "1")),
    ("concat", "x", (torch.zeros(0, 5), torch.zeros(1, 6)), "shape is ", ("(*, 5)", "(*, 6)")),
    ("split", "route", ("auto", "mpi"), "route is ", ("auto", "mpi")),
    ("split", "dim", (0, 1), "dim is ", ("0", "1")),
]


@several_ranks
@pytest.mark.parametrize(
    ("verb", "name", "values", "what", "texts"),
    DIFFERENCES,
    ids=[f"{row[0]}: {row[3]}{row[4][1]}" for row in DIFFERENCES],
)
def test_ranks_that_differ(world, size, verb, name, values, what, texts):
    """Named are those that differ from most; of two equal parties, the one without the lowest rank."""
    for odd in [{rank} for rank in range(size)] + [set(range(size // 2))]:
        variants = [int(rank in odd) for rank in range(size)]
        usual = max(variants, key=lambda v: (variants.count(v), v == variants[0]))
        named = [rank for rank, variant in enumerate(variants) if variant != usual]
        changes = {name: values[variants[world.rank]]}
        where = [str(rank) for rank, variant in enumerate(variants) if variant == usual]
        expected = rf"{re.escape(what + texts[1 - usual])}, where ranks? {', '.join(where)} ha(s|ve) "
        _check(verb, named, expected + re.escape(texts[usual]), _call, world, verb, 0, changes)
        goes_on()


@several_ranks
def test_dims_that_are_the_same_in_other_words(world, rank):
    """-1 and 1 are one dim of a matrix; a rank may count from either end."""
    x = torch.full((2, 1), rank)
    result = hd.concat(x, 1 if rank % 2 else -1)
    assert_on_all_ranks(result.tolist() == [list(range(world.world_size))] * 2, result)


@several_ranks
def test_roots_of_split_that_differ(world, size):
    """Two ranks bring a tensor, or none does."""
    for believed in ([0] * (size - 1) + [size - 1], [(rank + 1) % size for rank in range(size)]):
        mine = believed[world.rank]
        x = torch.zeros(size, 3) if mine == world.rank else None
        usual = Counter(believed).most_common(1)[0][0]
        named = [rank for rank, root in enumerate(believed) if root != usual]
        _check("split", named, rf"root is \d, where ranks? [\d, ]+ ha(s|ve) {usual}", hd.split, x, 0, mine)
        goes_on()


@several_ranks
@pytest.mark.parametrize(
    ("out", "told"),
    [
        (torch.empty(ROWS, 3, dtype=torch.float64), r"torch.float64.*torch.float32"),
        (torch.empty(ROWS, 4), r"\(\*, 4\).*\(\*, 3\)"),
        (torch.empty(ROWS, 3, 1), r"3.*2"),
    ],
    ids=["dtype", "other extents", "number of dims"],
)
def test_an_out_of_split_that_does_not_fit_what_the_root_sends(world, size, out, told):
    """Named is who brings it, not the root: also where the root has a higher rank, or the outs are the majority."""
    for root in {0, size - 1}:
        others = [rank for rank in range(size) if rank != root]
        for guilty in [{rank} for rank in others] + [set(others)]:
            changes = {"out": out} if world.rank in guilty else {}
            _check("split", sorted(guilty), told, _call, world, "split", root, changes)
            goes_on()


@several_ranks
def test_counts_that_differ(world, size):
    """A rank besides the root need not pass counts; if it does, they are the root's."""
    x = torch.zeros(ROWS * size, 3) if world.rank == 0 else None
    for theirs in ([ROWS - 1] * size, [ROWS], "chunk"):
        for rank in range(1, size):
            counts = [ROWS] * size if world.rank == 0 else theirs if world.rank == rank else None
            _check("split", [rank], r"counts is .*, where rank 0 has \(2, 2", hd.split, x, 0, 0, counts)
    goes_on()


def test_counts_written_in_other_ways(rank, size):
    """Integers of any kind are the same counts, in the next call too, and the rule may be named or left out."""
    x = torch.arange(size) if rank == 0 else None
    for way in ([True] * size, np.ones(size, dtype=np.int8), torch.ones(size, dtype=torch.int64), (1,) * size, None):
        mine = hd.split(x, counts=way if rank == 0 else "block" if way is None else [1] * size)
        assert_on_all_ranks(mine.tolist() == [rank], f"{way!r}: {mine}")


@several_ranks
def test_different_verbs(world, size):
    """Each rank is told which verbs met; whoever calls another one than most is named."""
    x = torch.zeros(2)
    verbs = {
        "gather": lambda: hd.gather(x),
        "concat": lambda: hd.concat(x),
        "split": lambda: hd.split(x if world.rank == 0 else None),
    }
    for (one, other), odd in itertools.product(itertools.permutations(verbs, 2), range(size)):
        called = [other if rank == odd else one for rank in range(size)]
        usual = called[0] if size == 2 else one
        named = [rank for rank, verb in enumerate(called) if verb != usual]
        told = rf"called {other if usual == one else one}\(\), where ranks? [\d, ]+ called {usual}\(\)"
        _check(called[0], named, told, verbs[called[world.rank]])
    goes_on()


@several_ranks
def test_a_mistake_and_a_difference_at_once(world, size):
    """Each rank is told its own."""
    x = {0: [print], 1: torch.zeros(2, dtype=torch.float64)}.get(world.rank, torch.zeros(2))
    expected = [0] if size == 2 else [0, 1] if size > 3 else [0, 2]
    refused("[HD202]", hd.concat, x, ranks=expected)
    goes_on()


def test_an_error_in_a_group_is_the_groups(world, rank):
    """Ranks are counted as in the group, and the other groups never hear of it."""
    comm = world.comm.Split(rank % 2, -rank)
    x = print if rank % 2 == 0 and comm.rank == 0 else torch.zeros(1)
    caught = None
    try:
        hd.concat(x, group=comm)
    except hd.RankError as error:
        caught = list(error.problems)
    expected = [0] if rank % 2 == 0 else None
    assert_on_all_ranks(caught == expected, f"problems of {caught}, expected {expected}")
    goes_on()
    comm.Free()


# --- control.objects -------------------------------------------------------------------------------------------------


class _AwkwardError(Exception):
    """An error that a pickle cannot rebuild: its constructor takes other arguments than it keeps."""

    def __init__(self, code, text):
        super().__init__(f"{text} ({code})")
        self.unpicklable = lambda: code


@pytest.mark.parametrize("exchange", [objects.run_on_root, objects.run_on_all])
@pytest.mark.parametrize(
    ("error", "told"),
    [
        (FileNotFoundError(2, "No such file", "data.h5"), r"FileNotFoundError: .*No such file.*'data.h5'"),
        (_AwkwardError(7, "odd"), r"_AwkwardError: odd \(7\)"),
    ],
    ids=["plain", "awkward"],
)
def test_an_error_on_one_rank_is_everyones(world, error, told, exchange):
    """Also one that cannot be sent. The ranks at fault are named; without one, all have the results."""
    on_root, ran = exchange is objects.run_on_root, []

    def step(failing=False):
        ran.append(world.rank)
        if failing and world.rank == 0:
            raise error
        return 10 * world.rank + 7

    results = exchange(world.comm, "name", step)
    expected = 7 if on_root else [10 * rank + 7 for rank in range(world.world_size)]
    assert_on_all_ranks((results, len(ran)) == (expected, not on_root or world.rank == 0), (results, ran))
    caught = _check("open", [0], told, exchange, world.comm, "open", lambda: step(True))
    kept = caught.__cause__ is (error if world.rank == 0 else None)  # with its traceback
    assert_on_all_ranks(kept, caught.__cause__)


def test_what_fails_does_not_keep_what_the_caller_holds(world):
    """Neither the memory of a GPU, nor half a result: not until the garbage is collected, but at once."""

    def refused(exchange):
        x = torch.ones(5)
        with pytest.raises(hd.RankError):
            exchange(world.comm, "open", lambda: 1 // 0)
        return weakref.ref(x)

    gc.disable()
    try:
        kept = [ref() is not None for ref in map(refused, (objects.run_on_root, objects.run_on_all))]
    finally:
        gc.enable()
    assert_on_all_ranks(kept == [False, False], kept)


# --- what the functions say ------------------------------------------------------------------------------------------


def test_many_ranks_with_a_mistake_are_not_all_listed():
    error = hd.RankError("gather", dict.fromkeys(range(1000), "dtype is wrong"))
    assert len(error.problems) == 1000
    assert str(error).count("\n") == 9
    assert str(error).endswith("and 992 more ranks")
