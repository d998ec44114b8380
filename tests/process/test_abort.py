"""One rank that raises or exits ends the whole job, with its traceback and its exit status; and only then."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from launch import mpirun

# Rank 1 fails while the others wait for it in a verb, in the user's own MPI, in torch.distributed, or do not wait.
JOB = """
    import argparse, sys, time
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

FAILURES = {
    "raise": ("raise ValueError('a mistake of mine')", 1, "ValueError: a mistake of mine"),
    "exit": ("sys.exit(3)", 3, ""),
    "exit-with-message": ("sys.exit('no such thing')", 1, "no such thing"),
    "exit-reraised": ("try: sys.exit(4)\n        except SystemExit as e:\n            kept = e; raise", 4, ""),
    "argparse": ("argparse.ArgumentParser().parse_args(['--nonsense'])", 2, "unrecognized arguments: --nonsense"),
    "exit-builtin-in-with": ("with world: exit(6)", 6, ""),
    "raise-SystemExit-in-with": ("with world:\n            raise SystemExit(5)", 5, ""),
}
OTHERS = {
    "verb": "hd.concat(torch.ones(3))",
    "mpi": "world.comm.Barrier()",
    "torch": "dist.barrier()",
    "sleep": "time.sleep(50)",
}


@pytest.mark.parametrize("others", OTHERS)
@pytest.mark.parametrize("failure", ["raise", "exit"])
def test_ends_whatever_the_others_do(failure: str, others: str) -> None:
    statement, status, message = FAILURES[failure]
    start = time.monotonic()
    job = mpirun(2, code=JOB.format(failure=statement, others=OTHERS[others]))
    assert job.status == status
    assert message in job.err
    assert "survived" not in job.out
    assert time.monotonic() - start < 40  # the others would sleep for 50 s


@pytest.mark.parametrize("failure", [name for name in FAILURES if name not in ("raise", "exit")])
def test_every_way_to_fail(failure: str) -> None:
    statement, status, message = FAILURES[failure]
    job = mpirun(2, code=JOB.format(failure=statement, others=OTHERS["mpi"]))
    assert job.status == status
    assert message in job.err


def test_the_error_of_a_verb_ends_the_job_with_its_text() -> None:
    job = mpirun(2, code=JOB.format(failure="pass", others="hd.concat(torch.ones(2, 2 + world.rank))"))
    assert job.status == 1
    assert "rank 1: shape is (*, 3), where rank 0 has (*, 2)" in job.err


@pytest.mark.parametrize("ending", ["sys.exit(0)", "raise SystemExit(7)", "exit(6)", "leave(7)"])
def test_a_rank_that_ends_early_is_named(ending: str) -> None:
    job = mpirun(3, code=JOB.format(failure=ending, others=OTHERS["verb"]))
    assert job.status != 0
    assert "rank 1: called finalize(), or reached the end of its program" in job.err


@pytest.mark.once
@pytest.mark.parametrize("ending", ["raise SystemExit(7)", "leave(7)"])
def test_an_exit_that_is_not_seen_ends_the_job_by_the_deadline(ending: str) -> None:
    """While the others wait in the user's own MPI."""
    job = mpirun(2, code=JOB.format(failure=ending, others=OTHERS["mpi"]), env={"HPCDIST_TIMEOUT": "4"})
    assert job.status != 0
    assert "HangError: the end of its program has waited for" in job.err
    assert "survived" not in job.out


def test_the_others_may_go_on_without_a_rank_that_has_ended() -> None:
    others = "\n    ".join(
        [
            "for _ in range(3):",
            "    try: hd.concat(torch.ones(3))",
            "    except hd.RankError: pass",
            "if world.rank == 1: sys.exit(0)",
        ]
    )
    job = mpirun(3, code=JOB.format(failure="sys.exit()", others=others))
    assert job.status == 0, job.err
    assert job.out.count("survived") == 2


CAUGHT = """
    import contextlib, sys, hpcdist as hd
    world = hd.init()
    kept = []
    for code in (1, "text", None):
        try:
            sys.exit(code)
        except SystemExit as error:
            assert error.code == code
            kept.append(error)
    del kept[1:]
    with contextlib.suppress(SystemExit), world:
        raise SystemExit(9)
    print("fine", flush=True)
    {end}
"""


@pytest.mark.parametrize("end", ["pass", "sys.exit(0)", "sys.exit(None)"])
def test_an_exit_that_was_caught_changes_nothing(end: str) -> None:
    job = mpirun(2, code=CAUGHT.format(end=end))
    assert job.status == 0, job.err
    assert job.out.count("fine") == 2


def test_a_failure_in_the_middle_of_a_transfer_ends_the_job() -> None:
    """No memory for the result on one rank: the others are in the transfer already."""
    code = """
        import torch, hpcdist as hd
        from hpcdist.tensors import blocks
        world = hd.init()
        if world.rank == 1:
            def fail(*args): raise MemoryError("none left")
            blocks.Blocks.recv_buffer = fail
        hd.concat(torch.ones(300))
        print("survived")
    """
    job = mpirun(3, code=code)
    assert job.status == 1
    assert "MemoryError: none left" in job.err
    assert "concat() failed in the middle of a transfer" in job.err
    assert "survived" not in job.out


def test_alone_nothing_is_touched() -> None:
    code = "import sys, hpcdist; before = sys.exit; hpcdist.init(); sys.exit(9 if sys.exit is before else 1)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 9
