"""Past 2**31 bytes and elements for real: one message is, the total is, and so is a displacement."""

import pytest
import torch
from collective import assert_on_all_ranks, several_ranks

import hpcdist as hd

pytestmark = [several_ranks, pytest.mark.large, pytest.mark.timeout(300)]

EXTENTS = (2**31 + 12345, 2**27 + 7)
TOTAL = sum(EXTENTS)
PIECE = 4 * 2**20 - 3  # odd, so that it is not a multiple of what a route cuts into


def _pieces(start, stop):
    """(from, to, the values that belong there) for the bytes from `start` to `stop` of the whole."""
    index = torch.arange(PIECE, dtype=torch.int32)
    tile = (index * 37 + (index >> 8) * 11 + (index >> 16) * 5).to(torch.uint8)
    for number in range(start // PIECE, -(-stop // PIECE)):
        first = number * PIECE
        begin, end = max(start, first), min(stop, first + PIECE)
        yield begin, end, tile[begin - first : end - first] + number * 7 % 251


def _holds(x, start, stop):
    right = (torch.equal(x[begin - start : end - start], values) for begin, end, values in _pieces(start, stop))
    return x.shape == (stop - start,) and all(right)


@pytest.fixture(scope="module")
def memory(world):
    """(for a shard, for the whole): once, because the first touch of memory takes most of the time here."""
    return torch.empty(EXTENTS[world.rank], dtype=torch.uint8), torch.empty(TOTAL, dtype=torch.uint8)


@pytest.mark.parametrize("route", ["mpi", "gloo"])
def test_gather_split_and_concat(rank, memory, route):
    shard, whole = memory
    mine = ((0, EXTENTS[0]), (EXTENTS[0], TOTAL))[rank]
    for begin, end, values in _pieces(*mine):
        shard[begin - mine[0] : end - mine[0]] = values
    whole.zero_()

    result = hd.gather(shard, root=1, route=route, out=whole if rank == 1 else None)
    good = result is None if rank == 0 else result is whole and _holds(whole, 0, TOTAL)
    assert_on_all_ranks(good, "gather")
    assert_on_all_ranks(_holds(shard, *mine), "the shard changed")

    shard.zero_()
    hd.split(result, root=1, counts=EXTENTS, route=route, out=shard)
    assert_on_all_ranks(_holds(shard, *mine), "split")

    whole.zero_()
    hd.concat(shard, route=route, out=whole)
    assert_on_all_ranks(_holds(whole, 0, TOTAL), "concat")
