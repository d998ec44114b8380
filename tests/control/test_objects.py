"""What cannot be pickled on one rank is the error of all ranks."""

from functools import partial

from collective import assert_on_all_ranks, raises_on_all_ranks

import hpcdist as hd
from hpcdist.control import objects


def test_what_cannot_be_pickled_on_one_rank(world, last):
    deep = []
    for _ in range(100_000):
        deep = [deep]
    for value, problem in ((deep, "RecursionError"), (lambda: 0, "lambda")):
        for rank, call in (
            (last, lambda given: objects.all_gather_object(world.comm, given, "verb")),
            (0, lambda given: objects.run_on_root(world.comm, "verb", lambda: given)),
        ):
            given = value if world.rank == rank else 1
            error = raises_on_all_ranks(hd.RankError, partial(call, given))
            assert_on_all_ranks(problem in error.problems[rank], error.problems)
    while deep:  # deleting it at once would recurse
        deep = deep.pop()
