"""Boxes in a list, and which of them meet another one: as going through all of them would give it."""

import itertools
from math import prod

import numpy as np
from hypothesis import given, settings, strategies as st

from hpcdist import layout
from hpcdist.layout import Box, whole
from hpcdist.layout.box import Listed

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@st.composite
def a_box(draw, shape):
    ends = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return Box(tuple(low for low, _ in ends), tuple(high - low for low, high in ends))


def in_cells(shape, cell, limit):
    """Boxes of whole cells: those of the tensor of cells, each cell of as many elements as it has."""
    cells = [-(-n // size) for n, size in zip(shape, cell, strict=True)]
    found = layout.boxes(whole(cells), max(1, limit // prod(cell)))
    scaled = [Box(*(tuple(n * size for n, size in zip(part, cell, strict=True)) for part in box)) for box in found]
    return [box.intersect(whole(shape)) for box in scaled]


def check_same(found, expected, box):
    """They are the same boxes, and say which of them meet `box`."""
    assert (list(found), len(found)) == (list(expected), len(expected))
    assert found.intersecting(box).tolist() == [i for i, each in enumerate(expected) if each.intersect(box).size()]


@settings(max_examples=200, deadline=None)
@given(st.data(), SHAPES, st.integers(1, 60), st.sampled_from(["some runs", "all runs", "any", "cut"]))
def test_listed_boxes(data, shape, limit, kind):
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
    assert [(lengths[i], counts[i]) for i in filled] == [layout.runs(every[i], shape) for i in filled]
    ordered = list(itertools.chain(*elements))
    if all(elements):
        ascending = all(counts[i] == 1 for i in filled) and ordered == sorted(set(ordered))
        assert listed.are_runs == ascending
    assert listed.tile() == (sorted(ordered) == flat.ravel().tolist())
    assert all(every[i].intersect(listed.cover) == every[i] for i in filled)
