"""Past 2**31 bytes and elements for real: one message is, the total is, and so is a displacement."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from collective import assert_on_all_ranks
from torch import Tensor

import hpcdist as hd

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.large, pytest.mark.timeout(300)]

EXTENTS = (2**31 + 12345, 2**27 + 7)
TOTAL = sum(EXTENTS)
PIECE = 64 * 2**20 - 3  # odd, so that it is not a multiple of what a route cuts into


def _pieces(start: int, stop: int) -> Iterator[tuple[int, int, Tensor]]:
    """(from, to, the values that belong there) for the bytes from `start` to `stop` of the whole."""
    index = torch.arange(PIECE, dtype=torch.int32)
    tile = (index * 37 + (index >> 8) * 11 + (index >> 16) * 5).to(torch.uint8)
    for number in range(start // PIECE, -(-stop // PIECE)):
        first = number * PIECE
        begin, end = max(start, first), min(stop, first + PIECE)
        yield begin, end, tile[begin - first : end - first] + number * 7


def _filled(start: int, stop: int) -> Tensor:
    memory = torch.empty(stop - start, dtype=torch.uint8)
    for begin, end, values in _pieces(start, stop):
        memory[begin - start : end - start] = values
    return memory


def _holds(x: Tensor, start: int, stop: int) -> bool:
    right = (torch.equal(x[begin - start : end - start], values) for begin, end, values in _pieces(start, stop))
    return x.shape == (stop - start,) and all(right)


@pytest.mark.parametrize("route", ["mpi", "gloo"])
def test_gather_split_and_concat(world: hd.World, route: str) -> None:
    mine = ((0, EXTENTS[0]), (EXTENTS[0], TOTAL))[world.rank]
    shard = _filled(*mine)

    whole = hd.gather(shard, root=1, route=route)
    good = whole is None if world.rank == 0 else whole is not None and _holds(whole, 0, TOTAL)
    assert_on_all_ranks(world.comm, good, "gather")

    part = hd.split(whole, root=1, counts=EXTENTS, route=route)
    del whole
    assert_on_all_ranks(world.comm, _holds(part, *mine), "split")
    del part

    everything = hd.concat(shard, route=route)
    assert_on_all_ranks(world.comm, _holds(everything, 0, TOTAL), "concat")
    assert_on_all_ranks(world.comm, _holds(shard, *mine), "the shard changed")
