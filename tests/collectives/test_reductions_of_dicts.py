"""reduce() of dicts against plain Python on one process, which visits the ranks in order."""

import functools
import itertools
import math

import numpy as np
import pytest
import torch
from cases import same_bits
from collective import goes_on, raises_on_all_ranks, refused, several_ranks

import hpcdist as hd
from hpcdist.routes.route import Route
from hpcdist.runtime.world import team_of

STEPS = {"sum": lambda x, y: x + y, "prod": lambda x, y: x * y, "min": min, "max": max}
pytestmark = pytest.mark.mpi


def _of(rank, size):
    """The dict of a rank: a nested one, whose values encode rank and key, with keys that others lack."""
    return {
        "loss": 0.1 + rank,
        **({f"only {rank}": {"deep": -0.0}} if rank else {}),
        ("b", 1): {"n": 2**60 + rank, 7: {}, "x": {f"part {part}": part + 0.3 * rank for part in range(rank + 1)}},
        "numpy": {"f": np.float32(rank + 0.5), "i": np.int16(rank + 1), "b": np.bool_(rank == 0)},
        "yes": rank == size - 1,
        f"even {rank % 2}": rank + 1,
    }


def _reduced(dicts, op, weights):
    """The reduction of the dicts of some ranks, in rank order."""
    names = dict.fromkeys(itertools.chain(*dicts.values()))
    found = {}
    for name in names:
        values = {rank: x[name] for rank, x in dicts.items() if name in x}
        if isinstance(next(iter(values.values())), dict):
            found[name] = _reduced(values, op, weights)
        elif op == "mean":
            counted = {rank: float(x) for rank, x in values.items() if weights[rank]}
            total = functools.reduce(STEPS["sum"], [x * weights[rank] for rank, x in counted.items()], -0.0)
            weight = sum(weights[rank] for rank in counted)
            found[name] = total / weight if weight else math.nan
        else:
            found[name] = functools.reduce(STEPS[op], [x.item() if hasattr(x, "item") else x for x in values.values()])
            if isinstance(found[name], bool):
                found[name] = int(found[name])
    return found


def _shown(x):
    """A dict with the order of its keys, the kinds of its values, and the bits of its floats."""
    return repr(x) + str([*map(type, x.values())])


@pytest.mark.parametrize("op", [*STEPS, "mean"])
def test_union_of_keys(findings, rank, size, op):
    """All roots, each call twice: what is kept of the first one is not its values."""
    for root, turn in itertools.product((None, *range(size)), range(3)):
        weights = [r + turn for r in range(size)] if op == "mean" else None
        dicts = {r: _of(r, size) for r in range(size)}
        for r in dicts:
            dicts[r]["loss"] += turn
            dicts[r][("b", 1)]["n"] %= 2**60 if op == "prod" else 2**61
        got = hd.reduce(dicts[rank], root, op, weights=weights and weights[rank])
        expected = _reduced(dicts, op, weights) if root in (None, rank) else None
        right = got is expected if expected is None else _shown(got) == _shown(expected)
        findings.check(right, f"{op} to {root}: {got}, expected {expected}")


def test_keys_that_change_on_one_rank(findings, rank, size):
    """A later call with other keys, kinds or order on one rank is agreed anew, and the earlier one still works."""
    last = rank == size - 1
    for turn in range(8):
        mine = {"a": turn + rank, **({f"new {turn // 3}": 1.5} if last and turn % 2 else {}), "z": 1.0}
        expected = {"a": sum(turn + r for r in range(size)), "z": float(size)}
        if turn % 2:
            expected = {"a": expected["a"], **({} if size > 1 else {f"new {turn // 3}": 1.5}), "z": float(size)}
            expected[f"new {turn // 3}"] = 1.5
        got = hd.reduce(mine, None)
        findings.check(_shown(got) == _shown(expected), f"turn {turn}: {got}, expected {expected}")
        got = hd.reduce({} if last and turn % 2 else {"n": turn}, None, async_op=True).wait()
        ranks = size - turn % 2
        findings.check(got == ({"n": turn * ranks} if ranks else {}), f"turn {turn}: {got}")


def test_tensors(findings, rank, size):
    for dtype in (
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.int8,
        torch.uint16,
        torch.bool,
    ):
        real = dtype.is_floating_point
        wide = torch.float64 if real else torch.int64
        for op in ("sum", "max", "mean") if real else ("sum", "max"):
            whole = [(torch.arange(24).view(4, 6) % 11 * 0.75 + r * 7).to(dtype) for r in range(size)]
            has = [r for r in range(size) if r != 1]
            steps = [whole[r].to(wide) for r in has]
            total = functools.reduce(torch.maximum if op == "max" else torch.add, steps)
            total = (total / len(has) if op == "mean" else total).to(dtype)
            x = (
                {"n": 1.0, "t": {"strided": whole[rank][::2, 1:4], "0-d": whole[rank][1, 2]}}
                if rank in has
                else {"n": 2.0}
            )
            for _ in range(2):
                got = hd.reduce(x, None, op)["t"]
                right = same_bits(got["strided"], total[::2, 1:4].contiguous()) and same_bits(got["0-d"], total[1, 2])
                findings.check(right, f"{dtype} {op}: {got}, expected {total}")
    leaf = torch.ones(2, requires_grad=True)
    got = hd.reduce({"loss": leaf * 2}, None, "mean")["loss"]
    findings.check(not got.requires_grad and got.tolist() == [2, 2], got)
    empty = hd.reduce({"e": torch.ones(0, 3)}, None)["e"]
    findings.check(empty.shape == (0, 3), empty)


def test_integers_are_exact_and_large_dicts_too(findings, rank, size):
    """More words than travel in one message: each rank reduces a block, which may have floats and integers."""
    mine = {i: (2**55 + i + rank, i + 0.5 * rank) for i in range(10_001)}
    got = hd.reduce({i: n if i % 2 else x for i, (n, x) in mine.items()}, None)
    for i in mine:
        values = [2**55 + i + r if i % 2 else i + 0.5 * r for r in range(size)]
        findings.check(got[i] == sum(values) and type(got[i]) is type(values[0]), f"{i}: {got[i]}")
    findings.check([*got] == [*mine], "order of keys")


def test_weights(findings, rank, size):
    """What a rank of weight 0 has does not count; a key that only such ranks have is NaN."""
    last = rank == size - 1
    mine = {"a": math.nan if last else 1.0 + rank, **({"b": 1.0} if last else {"c": math.inf})}
    for weight in (torch.tensor(2.0), np.int64(2), 2):
        got = hd.reduce(mine, None, "mean", weights=0 if last else weight)
        findings.check(math.isnan(got["b"]), got)
        if size > 1:
            findings.check(got["a"] == sum(range(1, size)) / (size - 1) and got["c"] == math.inf, got)
    findings.check(hd.reduce({"n": 1}, None, "mean") == {"n": 1.0}, "a mean of ints is a float")
    findings.check(math.isnan(hd.reduce({"n": math.nan if last else 1.0}, None, "max")["n"]), "NaN")


def test_no_more_bytes_with_more_ranks(findings, rank, size, monkeypatch):
    """A repeated call sends a header and, of large dicts, the words to the ranks that reduce them, and back."""
    sent, prepare = [], Route.prepare

    def counted(self, *args):
        transfer = prepare(self, *args)
        return lambda send, *rest: (sent.append(send.nbytes), transfer(send, *rest))

    monkeypatch.setattr(Route, "prepare", counted)
    for turn in range(3):
        sent.clear()
        got = hd.reduce({str(i): i + rank + turn for i in range(40_000)}, None)
        findings.check(got["7"] == (7 + turn) * size + sum(range(size)), got["7"])
        findings.check(0 < sum(sent) <= 8 * (40_000 + 40_000 // size + 1), sent)


@several_ranks
def test_arguments_that_are_wrong_or_differ_on_one_rank(rank, size):
    """The same error on every rank, and the job goes on."""
    last, x = rank == size - 1, {"a": {"b": 1.0}}
    for _ in range(2):  # a call like an earlier one, too
        hd.reduce(x, None)
    for text, args, options in (
        ("x['a']['b'] is str 's'", ({"a": {"b": "s" if last else 1.0}},), {}),
        ("x['a']['b'] is NoneType None", ({"a": {"b": None if last else 1.0}},), {}),
        ("x['a'] is complex 1j", ({"a": 1j if last else 1.0},), {}),
        ("x['a']['b'] is a torch.float32 tensor of shape (2,)", ({"a": {"b": torch.ones(2) if last else 1.0}},), {}),
        ("where rank 0 has a torch.float32 tensor of shape (1,)", ({"a": torch.ones(1 + last)},), {}),
        ("where rank 0 has a torch", ({"a": torch.ones(2, dtype=torch.float64 if last else torch.float32)},), {}),
        ("x['a'] is a float, where rank 0 has an int", ({"a": 1.0 if last else 1},), {}),
        ("x['a'] is a dict, where rank 0 has a float", ({"a": {} if last else 1.0},), {}),
        ("an integer of 64 bits", ({"a": 2**63 if last else 1},), {}),
        (
            "x['a'] is int 18446744073709551615, expected",
            ({"a": torch.tensor([2**64 - last, 3][:2], dtype=torch.uint64)} if last else {"a": 1},),
            {},
        ),
        ("x['a']: int too large", ({"a": 10**400 if last else 1}, None, "mean"), {}),
        ("[HD202]", ({"a": torch.ones(2, dtype=torch.cfloat)},), {}),
        ("[HD202]", ({"a": torch.ones(2, dtype=torch.int64)}, None, "mean"), {}),
        ("[HD201]", (x, None, "median" if last else "sum"), {}),
        ("[HD201]", (x, None, "mean"), {"weights": math.nan if last else 1}),
        ("[HD201]", (x, None, "mean"), {"weights": -1 if last else 1}),
        ("[HD201]", (x, None, "mean"), {"weights": "1" if last else 1}),
        ("[HD211]", (x, None), {"weights": 1 if last else None}),
        ("[HD211]", (torch.ones(2), None, "mean"), {"weights": 1}),
        ("[HD211]", (x, None), {"out": torch.ones(1) if last else None}),
        ("[HD204]", (x, size if last else 0), {}),
        ("[HD207]", (x, None), {"route": "pigeon" if last else "auto"}),
        ("[HD303]", (x, None if last else 0), {}),
        ("[HD303]", (x, None, "max" if last else "sum"), {}),
        ("[HD303]", (torch.ones(2) if last else x, 0), {}),
        ("", (["a"] if last else x, 0), {}),
    ):
        refused(text, hd.reduce, *args, what=str(args), **options)
        assert hd.reduce(x, None) == {"a": {"b": float(size)}}
    itself = {}
    itself["a"] = itself if last else {}
    refused("RecursionError", hd.reduce, itself, None)
    deep = {"a": 1.0}
    for _ in range(450 if last else 0):
        deep = {"a": deep}
    refused("", hd.reduce, deep, None)
    assert str(hd.reduce({float("nan"): 1.0, rank: 2.0}, None)).count("nan") >= 1
    raises_on_all_ranks(hd.RankError, lambda: hd.concat(torch.ones(2)) if last else hd.reduce(x, None))
    goes_on()


def test_few_are_kept_beside_other_calls(findings, rank, size):
    """They may be large."""
    planned = hd.plan(hd.split, torch.arange(size) if rank == 0 else None)
    for turn in range(20):
        findings.same(planned(torch.arange(size) if rank == 0 else None), torch.tensor([rank]), "a plan")
        for count in (turn, 0):
            got = hd.reduce({str(i): rank for i in range(count + 1)}, None)
            findings.check(got == {str(i): sum(range(size)) for i in range(count + 1)}, got)
    kept = [key for key in team_of().repeats if type(key) is tuple and key[0] == "a dict"]
    findings.check(2 <= len(kept) <= 8, len(kept))


def test_group_and_tensors_on_every_rank(findings, world, rank, size):
    same = world.comm.Split(rank % 2)
    got = hd.reduce({"r": rank}, None, group=same)
    findings.check(got == {"r": sum(range(rank % 2, size, 2))}, got)
    with pytest.raises(TypeError, match="of a dict has no plan"):
        hd.plan(hd.reduce, {"r": rank})
    findings.same(hd.reduce(torch.tensor([rank]), None), torch.tensor([sum(range(size))]), "a tensor on every rank")
