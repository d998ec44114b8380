"""Draws of shapes and boxes, and boxes of whole cells."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from hypothesis import strategies as st

from hpcdist import layout
from hpcdist.layout import Box, whole

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
FEW = st.lists(st.integers(0, 3), max_size=2).map(tuple)
EXTENTS = st.lists(st.integers(0, 6), min_size=1, max_size=6)


@st.composite
def a_box(draw: st.DrawFn, shape: Sequence[int]) -> Box:
    ends = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return Box(tuple(low for low, _ in ends), tuple(high - low for low, high in ends))


def in_cells(shape: Sequence[int], cell: Sequence[int], limit: int) -> list[Box]:
    """Boxes of whole cells: those of the tensor of cells, each cell of as many elements as it has."""
    cells = [-(-n // size) for n, size in zip(shape, cell, strict=True)]
    found = layout.boxes(whole(cells), max(1, limit // prod(cell)))
    scaled = [Box(*(tuple(n * size for n, size in zip(part, cell, strict=True)) for part in box)) for box in found]
    return [box.intersect(whole(shape)) for box in scaled]


def shard_boxes(shape: Sequence[int], dim: int | None, extents: Sequence[int]) -> list[Box]:
    """The box of each rank's shard of a tensor that is cut along `dim`; the whole for each if `dim` is None."""
    if dim is None:
        return [whole(shape)] * len(extents)
    starts = zip(layout.displs(extents), extents, strict=True)
    return [whole(shape).narrow(dim, start, start + extent) for start, extent in starts]
