"""Plans made by arithmetic are those that lists of all ranks' boxes would give, and boxes that meet are all found."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from importlib import import_module
from math import prod
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcdist import layout
from hpcdist.formats import hdf5
from hpcdist.formats.contents import Dataset, Stored
from hpcdist.layout import Box, whole
from hpcdist.layout.box_sequences import BoxSequence, Copies, Listed, Shards, cut_shards, grid, summed
from hpcdist.staging.pieces import PiecePlan, plan_save, shard_boxes

plan_load = import_module("hpcdist.staging.load").plan_load  # hpcdist.staging.load is the function

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
FEW = st.lists(st.integers(0, 3), max_size=2).map(tuple)
EXTENTS = st.lists(st.integers(0, 6), min_size=1, max_size=6)


@st.composite
def a_box(draw: st.DrawFn, shape: Sequence[int]) -> Box:
    ends = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return Box(tuple(low for low, _ in ends), tuple(high - low for low, high in ends))


def check_same(found: BoxSequence, expected: Sequence[Box], box: Box) -> None:
    """They are the same boxes, and say which of them meet `box`."""
    assert (list(found), len(found)) == (list(expected), len(expected))
    assert found.intersecting(box).tolist() == [i for i, each in enumerate(expected) if each.intersect(box).size()]


def in_cells(shape: Sequence[int], cell: Sequence[int], limit: int) -> list[Box]:
    """Boxes of whole cells: those of the tensor of cells, each cell of as many elements as it has."""
    cells = [-(-n // size) for n, size in zip(shape, cell, strict=True)]
    found = layout.boxes(whole(cells), max(1, limit // prod(cell)))
    scaled = [Box(*(tuple(n * size for n, size in zip(part, cell, strict=True)) for part in box)) for box in found]
    return [box.intersect(whole(shape)) for box in scaled]


@settings(max_examples=100, deadline=None)
@given(st.data(), SHAPES, st.integers(1, 60))
def test_a_grid(data: st.DataObject, shape: tuple[int, ...], limit: int) -> None:
    box = data.draw(a_box(shape))
    check_same(grid(shape, limit), list(layout.boxes(whole(shape), limit)), box)
    if prod(shape):
        cell = tuple(data.draw(st.integers(1, n)) for n in shape)
        check_same(grid(shape, limit, cell), in_cells(shape, cell, limit), box)


@settings(max_examples=100, deadline=None)
@given(st.data(), EXTENTS, FEW, FEW, st.integers(1, 4))
def test_shards(
    data: st.DataObject, extents: list[int], before: tuple[int, ...], after: tuple[int, ...], step: int
) -> None:
    shape, dim = (*before, sum(extents), *after), len(before)
    box, every = data.draw(a_box(shape)), shard_boxes(shape, dim, extents)
    shards = Shards(shape, dim, summed(extents))
    check_same(shards, every, box)
    check_same(Copies(shape, len(extents)), [whole(shape)] * len(extents), box)
    starts = [range(box.offset[dim], box.offset[dim] + box.shape[dim]) for box in every]
    cut = [[whole(shape).narrow(dim, k, min(k + step, of.stop)) for k in of[::step]] for of in starts]
    found, bounds = cut_shards(shards, step)
    check_same(found, list(itertools.chain(*cut)), box)
    assert bounds.tolist() == [0, *itertools.accumulate(map(len, cut))]


@settings(max_examples=200, deadline=None)
@given(st.data(), SHAPES, st.integers(1, 60), st.sampled_from(["some runs", "all runs", "any", "cut"]))
def test_listed_boxes(data: st.DataObject, shape: tuple[int, ...], limit: int, kind: str) -> None:
    """Those that are runs one behind the other are looked up by bisection, all others are gone through."""
    every = list(layout.boxes(whole(shape), limit))
    if kind == "some runs":
        every = [box for box in every if data.draw(st.booleans())]
    elif kind == "any":
        every = data.draw(st.lists(a_box(shape), max_size=6))
    elif kind == "cut" and prod(shape):
        every = data.draw(st.permutations(in_cells(shape, [data.draw(st.integers(1, n)) for n in shape], 1)))
    listed = Listed.of(every, shape)
    check_same(listed, every, data.draw(a_box(shape)))
    flat = np.arange(prod(shape)).reshape(shape)
    elements = [flat[box.slices()].ravel().tolist() for box in every]
    assert listed.sizes.tolist() == list(map(len, elements))
    filled = [i for i, at in enumerate(elements) if at]
    assert [listed.starts[i] for i in filled] == [elements[i][0] for i in filled]
    lengths, counts = listed.run_lengths()
    assert [(lengths[i], counts[i]) for i in filled] == [layout.runs(every[i], shape)[:2] for i in filled]
    ordered = list(itertools.chain(*elements))
    if all(elements):
        ascending = all(counts[i] == 1 for i in filled) and ordered == sorted(set(ordered))
        assert listed.are_runs == ascending
    assert listed.tile() == (sorted(ordered) == flat.ravel().tolist())
    assert all(every[i].intersect(listed.cover) == every[i] for i in filled)


@settings(max_examples=100, deadline=None)
@given(st.data(), EXTENTS, FEW, FEW)
def test_the_plan_of_a_save(
    data: st.DataObject, extents: list[int], before: tuple[int, ...], after: tuple[int, ...]
) -> None:
    shape, size = (*before, sum(extents), *after), len(extents)
    dim = data.draw(st.sampled_from([None, len(before)]))
    window, writers = data.draw(st.integers(1, 300)), data.draw(st.sampled_from([size, *range(1, size + 1)]))
    chunks = None
    if prod(shape) and data.draw(st.booleans()):
        chunks = tuple(data.draw(st.integers(1, n)) for n in shape)
    x = Dataset("x", shape, torch.int32, chunks=chunks)
    plan = plan_save(x, dim, extents, window, writers)
    held, pieces, owners = shard_boxes(shape, dim, extents), list(plan.pieces), owners_of(plan.bounds)
    assert list(plan.held) == held
    check_rounds(plan, pieces, owners)
    if prod(shape):
        assert plan.pieces.tile()
        own = dim is not None and writers == size and all(layout.runs(box, shape)[1] <= 1 for box in held)
        assert plan.straight == (chunks is None and (own or dim is None))
        assert not plan.straight or all(
            piece.intersect(held[i]) == piece for i, piece in zip(owners, pieces, strict=True)
        )
        limit = window // 4 // (1 if plan.straight else size)
        assert plan.pieces.sizes.max() <= max(limit, prod(chunks or ()))
        assert plan.pieces.are_runs if chunks is None else pieces == in_cells(shape, chunks, limit)
        shares = [end - low for low, end in layout.block_ranges(len(pieces), size, writers)]
        assert own or np.diff(plan.bounds).tolist() == shares


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


@settings(max_examples=100, deadline=None)
@given(st.data(), SHAPES, st.integers(1, 5), st.sampled_from([None, True, False]))
def test_the_plan_of_a_load(data: st.DataObject, shape: tuple[int, ...], size: int, verify: bool | None) -> None:
    """Every rank gets all that it wants, of pieces of the table where these fit."""
    kind, held = (
        data.draw(st.sampled_from(["boxes", "copies", "shards"])),
        st.lists(a_box(shape), min_size=1, max_size=5),
    )
    wants: BoxSequence = Copies(shape, size)
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
    plan, found = plan_load(one, wants, data.draw(st.sampled_from([1, 50, 10**6])), len(wants), verify)
    pieces = list(plan.pieces)
    assert found is None or [one.boxes[int(row)] for row in found] == pieces
    check_rounds(plan, pieces, owners_of(plan.bounds))
    for want in wants:
        assert sum(piece.intersect(want).size() for piece in pieces) == want.size()
