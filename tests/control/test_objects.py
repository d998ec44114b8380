"""Values of every length around those that fit into the first message, on every rank and from every root."""

from functools import partial

import pytest
from collective import assert_on_all_ranks, raises_on_all_ranks

import hpcdist as hd
from hpcdist.control import objects

pytestmark = pytest.mark.mpi

_AROUND = (-2, -1, 0, 1, 2, 1000)


def text(rank, length):
    """Bytes that show the rank and their own place."""
    return bytes((rank * 101 + place) % 251 for place in range(length))


@pytest.mark.parametrize("longest", ["no", "one", "all"])
def test_all_gather_object(longest, world):
    """Of which no rank, one or every one needs a second message."""
    for more in _AROUND:
        border = objects._INLINE - objects._LENGTH - len('["t","",null]') + more  # of a text
        lengths = [
            border if longest == "all" or (longest == "one" and rank == 0) else rank for rank in range(world.world_size)
        ]
        want = [chr(97 + rank) * max(0, n) for rank, n in enumerate(lengths)]
        got = objects.all_gather_object(world.comm, want[world.rank])
        assert_on_all_ranks(world.comm, got == want, (more, got))


def test_broadcast_bytes(world, rank):
    border = objects._HEAD - objects._LENGTH
    for root in range(world.world_size):
        for length in (0, 1, *(border + more for more in _AROUND), 3 * border):
            got = objects.broadcast_bytes(world.comm, text(rank, length if rank == root else 7), root)
            assert_on_all_ranks(world.comm, got == text(root, length), (root, length, len(got)))


def test_what_cannot_be_encoded_on_one_rank(world, last):
    """Is the same error on all ranks, which do not wait for it."""
    deep = []
    for _ in range(100_000):
        deep = [deep]
    for value, problem in ((deep, "RecursionError"), (object(), "UnsupportedError")):
        for rank, call in (
            (last, lambda given: objects.all_gather_object(world.comm, given, "verb")),
            (0, lambda given: objects.run_on_root(world.comm, "verb", lambda: given)),
        ):
            given = value if world.rank == rank else 1
            error = raises_on_all_ranks(world.comm, hd.RankError, partial(call, given))
            assert_on_all_ranks(world.comm, problem in error.problems[rank], error.problems)
    while deep:  # deleting it at once would recurse
        deep = deep.pop()
