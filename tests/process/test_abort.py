"""One rank that raises or exits ends the whole job, with its traceback and its exit status; and only then."""

import pytest
from launch import limit, mpirun

# Rank 1 fails; what the others do differs.
JOB = """
    import argparse, atexit, sys, threading, time
    from sys import exit as leave
    import torch, torch.distributed as dist
    import hpcdist as hd

    world = hd.init()
    def fail():
        {failure}
    if world.rank == 1:
        fail()
    {others}
    print("survived", world.rank)
"""
VERB, BARRIER = "hd.concat(torch.ones(3))", "world.comm.Barrier()"


def job(np, failure, others, **env):
    return mpirun(np, code=JOB.format(failure=failure, others=others), env=env)


@pytest.mark.parametrize(
    ("failure", "status", "message"),
    [
        pytest.param(
            "raise ValueError('a mistake of mine')", 1, "ValueError: a mistake of mine", marks=pytest.mark.both
        ),
        ("sys.exit(3)", 3, ""),
    ],
    ids=["raise", "exit"],
)
def test_ends_whatever_the_others_do(failure, status, message):
    """They wait in a verb, in the user's own MPI, in torch.distributed, or do not wait."""
    others = f"[lambda: {VERB}, None, lambda: {BARRIER}, dist.barrier, lambda: time.sleep(1000)][world.rank]()"
    done = job(5, failure, others)
    assert done.status == status
    assert message in done.err
    assert "survived" not in done.out


WAYS = {  # the status of the exit that ends the program, and what is printed
    "argparse": ("argparse.ArgumentParser().parse_args(['--nonsense'])", 2, "unrecognized arguments: --nonsense"),
    "in the handling of another, after one of a thread, with a thread at work and a handler that exits": (
        "atexit.register(sys.exit, 5); t = threading.Thread(target=sys.exit, args=(5,)); t.start(); t.join()\n"
        "        threading.Timer(0.5, sys.exit, (5,)).start()\n"
        "        try: sys.exit(2)\n        except SystemExit: sys.exit(3)",
        *(3, ""),
    ),
    "raised again, in a cycle": ("try: sys.exit(4)\n        except SystemExit as e: e.me = e; raise", 4, ""),
    "raise in with": ("with world:\n            raise SystemExit(5)", 5, ""),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_fail(way):
    failure, status, message = WAYS[way]
    done = job(2, failure, BARRIER)
    assert done.status == status
    assert message in done.err


def test_ranks_that_end_early_are_named():
    """In the error of a verb, which ends the job with its text."""
    endings = "[None, 'sys.exit(0)', 'raise SystemExit(7)', 'exit(6)', 'leave(7)']"
    done = job(5, "pass", f"if world.rank: exec({endings}[world.rank])\n    {VERB}")
    assert done.status != 0
    assert "RankError: concat() was refused on all ranks" in done.err
    assert "rank 0: called concat(), where ranks 1, 2, 3, 4 called finalize(), or reached the end of" in done.err


def test_an_exit_that_is_not_seen_ends_the_job_by_the_deadline():
    """While the others wait in the user's own MPI."""
    done = job(2, "leave(7)", BARRIER, **limit(4))
    assert done.status != 0
    assert "HangError: the end of its program has waited for" in done.err
    assert "survived" not in done.out


def test_a_failure_in_the_middle_of_a_transfer_ends_the_job():
    """No memory for the result on one rank: the others are in the transfer already."""
    failure = """from hpcdist.tensors import blocks
        def fail(*args): raise MemoryError("none left")
        blocks.Blocks.recv_buffer = fail"""
    done = job(3, failure, "hd.concat(torch.ones(300))")
    assert done.status == 1
    assert "MemoryError: none left" in done.err
    assert "concat() failed in the middle of a transfer" in done.err
    assert "survived" not in done.out


def test_alone_nothing_is_touched():
    code = "import sys, hpcdist; before = sys.exit; hpcdist.init(); sys.exit(9 if sys.exit is before else 1)"
    assert mpirun(0, code=code).status == 9
