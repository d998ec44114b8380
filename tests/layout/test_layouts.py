"""The layouts, and what two of them have in common: against torch.chunk, numpy and counting of places."""

import itertools
import random
from math import prod

import numpy as np
import pytest
import torch

from hpcdist.layout import Block, Box, Boxes, Replicate, Split, balance, overlaps
from hpcdist.tensors.dtensor import layout_of


def _places(shape):
    return np.arange(prod(shape)).reshape(shape)


def _of(box, shape):
    return _places(shape)[box.slices()].ravel().tolist()


def test_held_takes_the_extents_that_there_are():
    """Rows and columns of a grid may be of any height and width, if each is of one."""
    heights, widths = (3, 0, 2), (1, 4)
    shapes = [(h, w) for h in heights for w in widths]
    shape, boxes = Block((3, 2), (0, 1)).held(shapes)
    assert shape == (5, 5)
    assert sorted(place for box in boxes for place in _of(box, shape)) == list(range(25))
    shapes[3] = (0, 3)
    with pytest.raises(ValueError, match=r"rank 3 holds a part of shape \(0, 3\), expected \(0, 4\) in this layout"):
        Block((3, 2), (0, 1)).held(shapes)
    with pytest.raises(ValueError, match="rank 1 holds"):
        Replicate().held([(2, 2), (2, 3)])


def test_boxes_of_any_kind():
    made = Boxes([((1, 0), (2, 2)), Box((0, 1), (3, 3))])
    assert made.held([(2, 2), (3, 3)]) == ((3, 4), [Box((1, 0), (2, 2)), Box((0, 1), (3, 3))])
    assert made == Boxes([[(1, 0), (2, 2)], [(0, 1), (3, 3)]])
    for shapes in ([(2, 2), (3, 2)], [(2,), (3,)]):
        with pytest.raises(ValueError, match=r"rank 1 holds|do not all have 1 dims"):
            made.held(shapes)
    with pytest.raises(ValueError, match="there are 2 boxes, but 3 ranks"):
        made.boxes((3, 4), 3)
    with pytest.raises(ValueError, match=r"the box of rank 1, .* is not within a tensor of shape"):
        made.boxes((3, 3), 2)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Split(0, "half"), "counts is not a known rule"),
        (lambda: Block((2, 2), (0,)), "dims has 1 entries"),
        (lambda: Block((0, 2), (0, 1)), "expected at least one rank along each dimension"),
        (lambda: Block((2,), (0,), ("block", "block")), "counts has 2 entries"),
        (lambda: Split(2).boxes((3, 3), 2), "dim 2 cannot be cut: the tensor has 2 dims"),
        (lambda: Split(0, (1, 1)).boxes((3,), 2), "counts add up to 2, expected 3"),
        (lambda: Block((2, 2), (0, 1)).boxes((4, 4), 3), "has 4 ranks, but there are 3"),
    ],
)
def test_mistakes(make, told):
    with pytest.raises(ValueError, match=told):
        make()


@pytest.mark.parametrize("wrong", [lambda: Split("0"), lambda: Split(0, [1.5]), lambda: Block((2.0,), (0,))])
def test_mistakes_of_type(wrong):
    with pytest.raises(TypeError):
        wrong()


def test_copies_are_shared_among_their_holders():
    source = Block((2, 2), (0, None)).boxes((4, 4), 4)  # two copies of each half
    dest = Split(1).boxes((4, 4), 4)
    sources = [sender for rank in range(4) for sender, _ in overlaps(source, dest, rank).recvs if sender != rank]
    assert sorted(sources) == [0, 1, 2, 3]


def test_balance_is_near_the_best():
    """Within the largest weight of the best contiguous way, which is found by trying all."""
    draw = random.Random(11)
    for _ in range(300):
        weights = [draw.choice([0, 1, 2, 5, 9, 0.5]) for _ in range(draw.randrange(0, 9))]
        parts = draw.randrange(1, 5)
        counts = balance(weights, parts)
        assert len(counts) == parts and sum(counts) == len(weights) and min(counts) >= 0

        def heaviest(cuts, weights=weights):
            return max(sum(weights[a:b]) for a, b in itertools.pairwise([0, *cuts, len(weights)]))

        best = min(
            heaviest(cuts) for cuts in itertools.combinations_with_replacement(range(len(weights) + 1), parts - 1)
        )
        got = heaviest(tuple(itertools.accumulate(counts))[:-1])
        assert got <= best + max(weights, default=0)
    assert max(balance([1] * 10**5, 7)) == 14286
    assert balance([2**70, 1, 2**70], 2) in ([1, 2], [2, 1])
    for dtype in (np.uint8, np.int16, np.int32):
        assert balance(np.array([100, 120, 90, 110], dtype), 2) == [2, 2]
    assert balance(torch.tensor([200, 100, 100], dtype=torch.uint8), 2) == [1, 2]
    for weights, parts in [([-1], 2), ([float("nan")], 2), ([float("inf")], 2), ([1], 0)]:
        with pytest.raises(ValueError, match=r"weights must|parts is"):
            balance(weights, parts)


# --- DTensor ---------------------------------------------------------------------------------------------------------


def test_placements():
    from torch.distributed.tensor import Partial, Shard

    assert layout_of((Shard(0), Shard(1)), (2, 2)) == Block((2, 2), (0, 1), "chunk")
    with pytest.raises(TypeError, match="Partial"):
        layout_of((Partial(),), (4,))
    with pytest.raises(ValueError, match="there are 1 placements"):
        layout_of((Shard(0),), (2, 2))
