"""What is long and the same on every rank does not travel; what differs is named on all."""

import pytest
from collective import assert_on_all_ranks, raises_on_all_ranks, several_ranks

import hpcdist as hd
from hpcdist.control import objects

pytestmark = pytest.mark.mpi


def odd(first, other):
    return None if sorted(first) == sorted(other) else f"has {other}, where rank 0 has {first}"


def test_what_is_the_same_does_not_travel(world, monkeypatch):
    def refuse(*arguments):
        raise AssertionError("something travels")

    monkeypatch.setattr(objects, "all_gather_object", refuse)
    monkeypatch.setattr(objects, "run_on_root", refuse)
    value = [world.rank] * 3
    for count in (0, 3, 9):  # a few integers of each rank travel with the digest, and more on their own
        found, rows = objects.same(
            world.comm, "save", ["key"], value, odd, lambda value, count=count: (value * 3)[:count]
        )
        expected = [[rank] * count for rank in range(world.world_size)]
        assert_on_all_ranks(world.comm, found is value and rows.tolist() == expected, rows)


@several_ranks
def test_what_differs_without_being_odd_is_that_of_rank_0(world):
    value = [1, 2] if world.rank == 0 else [2, 1]
    found, rows = objects.same(
        world.comm, "save", value, value, odd, lambda value: [10 * i + world.rank for i in value]
    )
    expected = [[10 + rank, 20 + rank] for rank in range(world.world_size)]
    assert_on_all_ranks(world.comm, found == [1, 2] and rows.tolist() == expected, (found, rows))


@several_ranks
def test_the_ranks_that_are_odd_are_named(world):
    value = [1, 2] if world.rank != 1 else [1, 3]
    call = lambda: objects.same(world.comm, "save", value, value, odd)  # noqa: E731
    error = raises_on_all_ranks(world.comm, hd.RankError, call)
    assert_on_all_ranks(world.comm, error.problems == {1: "has [1, 3], where rank 0 has [1, 2]"}, error)
