"""Plans made by arithmetic are those that lists of all ranks' boxes would give, and boxes that meet are all found."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcdist import layout
from hpcdist.files.h5 import records
from hpcdist.files.raw import SHORT, Raw
from hpcdist.layout import Box
from hpcdist.staging import boxes, wants
from hpcdist.staging.catalog import Stored
from hpcdist.staging.pieces import PiecePlan, Sharded, block_bounds, plan_save, shard_boxes

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
FEW = st.lists(st.integers(0, 3), max_size=2).map(tuple)


def meeting(every: Sequence[Box], box: Box) -> list[int]:
    return [i for i, other in enumerate(every) if other.intersect(box).size()]


@st.composite
def a_box(draw: st.DrawFn, shape: Sequence[int]) -> Box:
    ends = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return Box(tuple(low for low, _ in ends), tuple(high - low for low, high in ends))


def check_same(found: boxes.BoxSequence, expected: Sequence[Box], box: Box) -> None:
    """They are the same boxes, and say which of them meet `box`."""
    assert list(found) == list(expected)
    assert len(found) == len(expected)
    assert found[1:-1] == list(expected[1:-1])
    if len(expected):
        assert found[-1] == expected[-1]
    with pytest.raises(IndexError):
        found[len(expected)]
    assert found.intersecting(box).tolist() == meeting(expected, box)


@settings(max_examples=100, deadline=None)
@given(st.data(), SHAPES, st.integers(1, 60))
def test_a_grid(data: st.DataObject, shape: tuple[int, ...], limit: int) -> None:
    box = data.draw(a_box(shape))
    check_same(boxes.Grid(shape, limit), list(layout.boxes(layout.whole(shape), limit)), box)
    if prod(shape):
        cell = tuple(data.draw(st.integers(1, n)) for n in shape)
        check_same(boxes.Grid(shape, limit, cell), list(layout.grid_boxes(shape, cell, limit)), box)


@settings(max_examples=100, deadline=None)
@given(st.data(), st.lists(st.integers(0, 6), min_size=1, max_size=6), FEW, FEW)
def test_shards(data: st.DataObject, extents: list[int], before: tuple[int, ...], after: tuple[int, ...]) -> None:
    shape = (*before, sum(extents), *after)
    box = data.draw(a_box(shape))
    every = shard_boxes(shape, len(before), extents)
    check_same(boxes.Shards(shape, len(before), boxes.summed(extents)), every, box)
    check_same(boxes.Copies(shape, len(extents)), [layout.whole(shape)] * len(extents), box)


@settings(max_examples=100, deadline=None)
@given(st.data(), SHAPES, st.integers(1, 60), st.booleans())
def test_listed_boxes_in_any_order(data: st.DataObject, shape: tuple[int, ...], limit: int, runs: bool) -> None:
    """Those that are runs one behind the other are looked up by bisection, all others are gone through."""
    if runs:
        every = list(layout.boxes(layout.whole(shape), limit))
        every = [box for box in every if data.draw(st.booleans())]
    else:
        every = data.draw(st.lists(a_box(shape), max_size=6))
    pair = [np.array([box[i] for box in every], np.int64).reshape(len(every), len(shape)) for i in (0, 1)]
    listed = boxes.Listed(boxes.Corners(*pair), shape)
    check_same(listed, every, data.draw(a_box(shape)))
    if runs and prod(shape):
        assert listed._runs is not None
    lengths, counts = listed.run_lengths()
    filled = [i for i, box in enumerate(every) if box.size()]
    assert [(lengths[i], counts[i]) for i in filled] == [layout.runs(every[i], shape)[:2] for i in filled]
    cover = listed.corners.cover
    assert all(box.intersect(cover) == box for box in every if box.size())
    rows = np.array(sorted(data.draw(st.sets(st.sampled_from(range(len(every)))) if every else st.just(set()))), int)
    check_same(boxes.Chosen(listed, rows), [every[row] for row in rows], data.draw(a_box(shape)))


def listed_plan(x: Sharded, window: int, writers: int) -> tuple[list[Box], list[int], bool]:
    """Pieces, owners and whether it is straight, with a box for every piece of every rank."""
    shape, itemsize, dim, extents, chunks = x.shape, x.dtype.itemsize, x.dim, x.extents, x.chunks
    held = shard_boxes(shape, dim, extents)
    filled = [rank for rank, box in enumerate(held) if box.size()]
    joined = dim is None or prod(shape[:dim]) == 1 or len(filled) < 2
    own = joined and dim is not None and chunks is None and writers == len(extents)
    straight = dim is None and chunks is None
    limit = max(1, window // itemsize)
    if not (own or straight):
        limit = max(1, min(limit, (window // len(extents)) // itemsize))
    if own:
        cut = [(piece, rank) for rank in filled for piece in layout.boxes(held[rank], limit)]
        return [piece for piece, _ in cut], [rank for _, rank in cut], True
    pieces = list(layout.boxes(layout.whole(shape), limit))
    if chunks is not None:
        pieces = list(layout.grid_boxes(shape, chunks, limit)) if prod(shape) else []
    shares = layout.block_ranges(len(pieces), len(extents), writers)
    return pieces, [rank for rank, (low, end) in enumerate(shares) for _ in range(low, end)], straight


@settings(max_examples=100, deadline=None)
@given(st.data(), st.lists(st.integers(0, 6), min_size=1, max_size=6), FEW, FEW)
def test_the_plan_of_a_save(
    data: st.DataObject, extents: list[int], before: tuple[int, ...], after: tuple[int, ...]
) -> None:
    shape, size = (*before, sum(extents), *after), len(extents)
    dim = data.draw(st.sampled_from([None, len(before)]))
    window, writers = data.draw(st.integers(1, 300)), data.draw(st.sampled_from([size, size, 1]))
    chunks = None
    if prod(shape) and data.draw(st.booleans()):
        chunks = tuple(data.draw(st.integers(1, n)) for n in shape)
    x = Sharded(shape, torch.int32, dim, extents, chunks)
    pieces, owners, straight = listed_plan(x, window, writers)
    plan = plan_save(x, window, writers)
    assert list(plan.held) == shard_boxes(shape, dim, extents)
    assert (list(plan.pieces), owners_of(plan.bounds)) == (pieces, owners)
    if prod(shape):
        assert plan.straight == straight
    check_rounds(plan, pieces, owners)


def owners_of(bounds: Any) -> list[int]:
    """The owner of each piece."""
    return [rank for rank, (low, end) in enumerate(itertools.pairwise(bounds.tolist())) for _ in range(low, end)]


def check_rounds(plan: PiecePlan, pieces: list[Box], owners: list[int]) -> None:
    """Every piece is in one round, each owner has one in a round at most, and each rank finds those that concern it."""
    size = len(plan.held)
    done: list[int] = []
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


def test_owners_are_those_of_the_shares() -> None:
    for pieces, size, takers in itertools.product((0, 1, 5, 12), (1, 3, 5), (1, 2, 3, 5)):
        if takers <= size:
            shares = layout.block_ranges(pieces, size, takers)
            expected = [rank for rank, (low, end) in enumerate(shares) for _ in range(low, end)]
            assert owners_of(block_bounds(pieces, size, takers)) == expected


def stored(shape: tuple[int, ...], table: Sequence[Box] | None) -> Stored:
    found = None if table is None else records(table, len(shape))
    return Stored("x", shape, torch.int32, Raw("x.h5", 0, shape, torch.int32), found, "")


@settings(max_examples=100, deadline=None)
@given(st.data(), SHAPES, st.integers(1, 5), st.sampled_from([None, True, False]))
def test_the_plan_of_a_load(data: st.DataObject, shape: tuple[int, ...], size: int, verify: bool | None) -> None:
    """Every rank gets all that it wants, of pieces of the table where these fit."""
    how = data.draw(st.sampled_from(["box", None, *range(len(shape))]))
    if how == "box":
        asks = [wants.Arguments({}, data.draw(a_box(shape))) for _ in range(size)]
        expected = [ask.box for ask in asks]
    else:
        counts = data.draw(st.sampled_from(["block", "chunk", None]))
        asks = [wants.Arguments({"dim": how, "counts": counts})] * size
        extent = shape[how] if how is not None else 0
        expected = shard_boxes(shape, how, layout.counts_of(counts, extent, size))
    table = list(layout.boxes(layout.whole(shape), data.draw(st.integers(1, 40))))
    one = stored(shape, data.draw(st.sampled_from([None, table, table[::-1]])))
    found, problems = wants.find_wants({"x": one}, asks)
    assert not problems and list(found["x"]) == expected
    plan, rows = wants.plan_load(one, found["x"], data.draw(st.sampled_from([1, 50, 10**6])), size, verify)
    pieces = list(plan.pieces)
    if rows is not None:
        assert [one.boxes[int(row)] for row in rows] == pieces
    check_rounds(plan, pieces, owners_of(plan.bounds))
    for want in expected:
        assert want is not None
        assert sum(piece.intersect(want).size() for piece in pieces) == want.size()
    long_runs = [layout.runs(want, shape)[:2] for want in expected if want is not None and want.size()]
    little = not verify and 2 * sum(want.size() for want in expected if want is not None) < prod(shape)
    well = all(count == 1 or little or not (verify or length * 4 < SHORT) for length, count in long_runs)
    assert wants.reads_alone(one, found["x"], verify) == well


def test_boxes_that_are_in_no_tensor() -> None:
    given = [Box((0, 0), (3, 2)), Box((0,), (3,)), Box((0, 1), (3, 2)), Box((-1, 0), (1, 1)), Box((2**70, 0), (0, 0))]
    one = stored((3, 2), None)
    _, problems = wants.find_wants({"x": one}, [wants.Arguments({}, box) for box in given])
    assert list(problems) == [1, 2, 3, 4]
    assert problems[2] == "x: box is (offset (0, 1), shape (3, 2)), which is not in shape (3, 2) [HD213]"
    _, problems = wants.find_wants(
        {"x": stored((), None)}, [wants.Arguments({}, Box((), ())), wants.Arguments({}, Box((0,), (1,)))]
    )
    assert list(problems) == [1]


def test_memory_that_does_not_fit() -> None:
    same = {"dim": 0, "counts": "block"}
    asks = [
        wants.Arguments(same),
        wants.Arguments(same, out=(torch.int32, (2, 2))),
        wants.Arguments(same, out=(torch.int64, (1, 2))),
    ]
    _, problems = wants.find_wants({"x": stored((3, 2), None)}, asks)
    assert problems == {
        1: "out has shape (2, 2), expected (1, 2) [HD208]",
        2: "out has dtype torch.int64, expected torch.int32, that of 'x' in the file [HD208]",
    }
    asks = [
        wants.Arguments({"dim": 2, "counts": None}),
        wants.Arguments({"dim": 2, "counts": None}, out=(torch.int8, ())),
    ]
    _, problems = wants.find_wants({"x": stored((3, 2), None)}, asks)
    assert problems == dict.fromkeys((0, 1), "x: dim is 2, expected -2 to 1 for 2 dims [HD204]")
