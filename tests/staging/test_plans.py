"""Plans made by arithmetic are those that lists of all ranks' boxes would give, and boxes that meet are all found."""

import itertools
from importlib import import_module
from math import prod

import numpy as np
import torch
from boxes import EXTENTS, FEW, SHAPES, a_box, shard_boxes
from hypothesis import given, settings, strategies as st

from hpcdist import layout
from hpcdist.formats import hdf5
from hpcdist.formats.contents import Dataset, Stored
from hpcdist.layout import whole
from hpcdist.layout.box import Copies, Listed, Shards, summed
from hpcdist.staging.pieces import plan_save

plan_load = import_module("hpcdist.staging.load").plan_load  # hpcdist.staging.load is the function


@settings(max_examples=100, deadline=None)
@given(st.data(), EXTENTS, FEW, FEW)
def test_the_plan_of_a_save(data, extents, before, after):
    shape, size = (*before, sum(extents), *after), len(extents)
    dim = data.draw(st.sampled_from([None, len(before)]))
    window = data.draw(st.integers(1, 300))
    x = Dataset("x", shape, torch.int32)
    plan = plan_save(x, dim, extents, window)
    held, pieces, owners = shard_boxes(shape, dim, extents), list(plan.pieces), owners_of(plan.bounds)
    assert list(plan.held) == held
    check_rounds(plan, pieces, owners)
    if prod(shape):
        assert plan.pieces.tile()
        own = dim is not None and all(layout.runs(box, shape)[1] <= 1 for box in held if box.size())
        assert plan.straight == (own or dim is None)
        assert not plan.straight or all(
            piece.intersect(held[i]) == piece for i, piece in zip(owners, pieces, strict=True)
        )
        limit = window // 4 // (1 if plan.straight else size)
        assert plan.pieces.sizes.max() <= max(limit, 1)
        assert plan.pieces.are_runs
        assert own or np.diff(plan.bounds).tolist() == layout.block(len(pieces), size)


def owners_of(bounds):
    """The owner of each piece."""
    return [rank for rank, (low, end) in enumerate(itertools.pairwise(bounds.tolist())) for _ in range(low, end)]


def check_rounds(plan, pieces, owners):
    """Every piece is in one round, each owner has one in a round at most, and each rank finds those that concern it."""
    size = len(plan.held)
    done = []
    for round_ in plan.rounds:
        found = {rank: row for rank in range(size) if (row := plan.piece(rank, round_)) is not None}
        assert all(owners[row] == owner for owner, row in found.items())
        done += found.values()
        for rank in range(size):
            mine = plan.held[rank]
            expected = [(owner, row) for owner, row in found.items() if pieces[row].intersect(mine).size()]
            assert plan.met(rank, round_) == expected
    assert sorted(done) == list(range(len(pieces)))
    assert [list(plan.rows(r)) for r in range(size)] == [
        [i for i, o in enumerate(owners) if o == r] for r in range(size)
    ]


@settings(max_examples=100, deadline=None)
@given(st.data(), SHAPES, st.integers(1, 5), st.sampled_from([None, True, False]))
def test_the_plan_of_a_load(data, shape, size, verify):
    """Every rank gets all that it wants, of pieces of the table where these fit."""
    kind, held = (
        data.draw(st.sampled_from(["boxes", "copies", "shards"])),
        st.lists(a_box(shape), min_size=1, max_size=5),
    )
    wants = Copies(shape, size)
    if kind == "boxes":
        wants = Listed.of(data.draw(held), shape)
    elif kind == "shards" and shape:
        dim = data.draw(st.integers(0, len(shape) - 1))
        wants = Shards(shape, dim, summed(layout.counts_of("block", shape[dim], size)))
    table = data.draw(st.permutations(list(layout.boxes(whole(shape), data.draw(st.integers(1, 40))))))
    rows = np.zeros(len(table), hdf5.record_dtype(len(shape)))
    for row, box in zip(rows, table, strict=True):
        row["offset"], row["shape"] = box if shape else ((0,), (1,))
    one = Stored("x", shape, torch.int32, pieces=data.draw(st.sampled_from([None, rows])))
    plan, found = plan_load(one, wants, data.draw(st.sampled_from([1, 50, 10**6])), verify)
    pieces = list(plan.pieces)
    assert found is None or [one.boxes[int(row)] for row in found] == pieces
    check_rounds(plan, pieces, owners_of(plan.bounds))
    for want in wants:
        assert sum(piece.intersect(want).size() for piece in pieces) == want.size()
