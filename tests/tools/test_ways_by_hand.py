"""Compare: wrong data of one rank end it on all; the rounds. Every way to write a call: test_compare_command.py."""

import time

import torch
from collective import assert_on_all_ranks, raises_on_all_ranks

from hpcdist.errors import HpcdistError
from hpcdist.tools.compare import Case
from hpcdist.tools.timing import Contender, check, measure


def test_wrong_data_on_one_rank_end_it_on_all(world, size):
    """Wrong results, none, and changed inputs: on the last rank alone."""
    last = world.rank == size - 1

    def late(case):
        return case.expected.roll(int(last))

    def nothing(case):
        return None if last else case.expected

    def changes(case):
        case.x += int(last)
        return case.expected

    for call in (late, nothing, changes):
        case = Case(world.comm, "concat", torch.float32, [[4]] * size)
        error = raises_on_all_ranks(HpcdistError, lambda c=call, of=case: check(Contender("x", c), of))
        found = f"'x' gave wrong data, or changed its input, on rank {size - 1} [HD901]"
        assert_on_all_ranks(found in str(error), error)


def test_rounds_are_interleaved_alike_on_all_ranks(world, size):
    """The cost is the slowest rank's; a slow contender has fewer rounds; what is not supported is not called."""
    order = list[str]()

    def call(name, ms):
        def step(case):
            order.append(name)
            if world.rank == 0:
                time.sleep(ms / 1e3)
            return case.expected

        return Contender(name, step)

    ways = [call("a", 5), call("b", 5), call("c", 40), Contender("d", lambda case: 1 / 0, lambda case: "not here")]
    case = Case(world.comm, "concat", torch.float32, [[4]] * size)
    timings = measure(ways, case, 20, 0.8)
    assert_on_all_ranks(world.comm.allgather(order) == [order] * size, "order")
    assert_on_all_ranks(world.comm.allgather(timings) == [timings] * size, "timings")
    a, b, c, d = timings
    assert_on_all_ranks(d.skipped == "not here" and d.rounds == 0, d)
    assert_on_all_ranks(c.seconds.median >= 0.04 and a.seconds.median >= 0.005, timings)
    assert_on_all_ranks(c.rounds <= b.rounds and a.rounds >= 5, timings)
    mixed = "".join(order)
    assert_on_all_ranks("ab" in mixed and "ba" in mixed, mixed)
