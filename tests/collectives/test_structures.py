"""gather, concat and split of structures: what test_property.py does not draw, and what is refused."""

import re
import sys
from dataclasses import dataclass, make_dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from cases import same_bits, whole_of
from collective import assert_on_all_ranks, goes_on, refused, several_ranks

import hpcdist as hd
from hpcdist.collectives import structures


class Metrics(NamedTuple):
    loss: Any
    count: Any


@dataclass
class Batch:
    tokens: Any
    ids: Any


def test_keys_that_look_alike(world):
    """Names as long as those of a model's state, and keys whose text is the same."""
    name = "transformer.encoder.layers.0.self_attn.in_proj_"
    keys = [f"{name}weight", f"{name}bias", 1, "1"]
    got = hd.concat({key: torch.full((2,), i) for i, key in enumerate(keys)})
    assert_on_all_ranks([x[-1] for x in got.values()] == [0, 1, 2, 3], got)


def test_split_where_every_rank_has_the_whole(rank, size):
    x = whole_of((2 * size, 3), torch.int32)
    got = hd.split({"x": x, "l": list(range(size)), "n": "all"}, root=None)
    right = same_bits(got["x"], x[2 * rank :][:2]) and (got["l"], got["n"]) == ([rank], "all")
    assert_on_all_ranks(right and got["x"].data_ptr() == x[2 * rank :].data_ptr(), got)


def test_packed_sequences(findings, rank, size):
    """Joined or cut field by field they would be garbage; sent, and in lists, they stay as they are."""
    parts = [torch.full((n,), float(rank)) for n in (2, 3)]
    packed = torch.nn.utils.rnn.pack_sequence(parts, enforce_sorted=False)
    for step in (
        lambda: hd.concat({"p": packed}),
        lambda: hd.gather(packed),
        lambda: hd.split((1, packed) if rank == 0 else None),
    ):
        refused("[HD202]", step)
    with pytest.raises(ValueError, match="is a PackedSequence"):
        hd.split(packed, root=None)
    handle = hd.isend(packed, (rank + 1) % size)
    got = [hd.recv((rank - 1) % size), *hd.concat([packed]), *hd.split([packed] * size if rank == 0 else None)]
    handle.wait(60)
    for one, source in zip(got, [(rank - 1) % size, *range(size), 0], strict=True):
        padded, lengths = torch.nn.utils.rnn.pad_packed_sequence(one, batch_first=True)
        expected = torch.full((2, 3), float(source))
        expected[0, 2] = 0
        findings.same(padded, expected, source)
        findings.check(lengths.tolist() == [2, 3], lengths)


def test_more_than_a_host_can_have(rank):
    """A tensor that is larger than its memory: the same error everywhere, and the job goes on."""
    huge = torch.ones(1).expand(2**46)
    for step in (
        lambda: hd.concat([huge] if rank == 0 else [1]),
        lambda: hd.split([huge] if rank == 0 else None),
    ):
        refused("[HD310]", step, ranks=[0])
        goes_on()


def test_pickles_if_all_allow_them(world, size):
    got = hd.concat([{world.rank}], allow_pickle=True)
    mine = hd.split([{1}] * size if world.rank == 0 else None, allow_pickle=True)
    assert_on_all_ranks((got, mine) == ([{rank} for rank in range(size)], [{1}]), (got, mine))


@several_ranks
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
        (lambda r: {(1, "a"): torch.zeros(1, 2 + r)}, r"x\[\(1, 'a'\)\] has shape"),
        (lambda r: {(1, r): 0}, r"the keys \[\(1, 0\)\]"),
    ],
)
def test_structures_that_differ(findings, world, make, told):
    error = refused("", hd.concat, make(world.rank))
    findings.check(0 not in error.problems and re.search(told, str(error)), f"expected {told!r} in {error}")
    goes_on()


class Point(NamedTuple):
    x: Any
    y: Any


def test_wrong_arguments(findings, rank, size):
    mine = {"a": torch.ones(2)} if rank == 0 else None
    wrong = [
        (lambda: hd.concat([1], out=torch.ones(1)), "out is given, but x is not a tensor"),
        (lambda: hd.concat({"a": torch.ones(2)}, 1), r"dim is 1, expected -1 to 0 for x\['a'\]"),
        (lambda: hd.split(mine, 1), r"x\['a'\] has no dim 1"),
        (lambda: hd.split(mine, counts=[7] * size), r"x\['a'\]: counts add up to"),
        (lambda: hd.split({1} if rank == 0 else None), "x is a builtins.set"),
        (lambda: hd.concat([1], route="tcp"), "route is 'tcp'"),
        (lambda: hd.gather([1], root=size), "root is"),
        (lambda: hd.concat([1], "0"), "dim must be an int"),
    ]
    for step, told in wrong:
        error = refused("", step)
        findings.check(re.search(told, str(error)), f"expected {told!r} in {error}")


@several_ranks
def test_a_class_that_one_rank_does_not_know(world, size, monkeypatch):
    """The same error everywhere, before the data move."""
    mine = hd.concat([Point(1, world.rank)])
    assert mine == [Point(1, rank) for rank in range(size)]
    if world.rank == 1:

        def unknown(name, *fields):
            raise TypeError(f"{name} is no dataclass")

        monkeypatch.setattr(structures, "same_class", unknown)
    refused("", hd.concat, [Point(1, 2)], ranks=[1])
    monkeypatch.undo()
    kind = make_dataclass("Odd", ["a", "b"] if world.rank else ["a"], namespace={"__module__": __name__})
    monkeypatch.setattr(sys.modules[__name__], "Odd", kind, raising=False)
    odd = kind(*range(1 + bool(world.rank)))
    for call, x in ((hd.concat, [odd]), (hd.gather, [odd]), (hd.split, None if world.rank else [odd] * size)):
        refused("[HD303]", call, x)
    goes_on()
