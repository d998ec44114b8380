"""Jobs that call torch.distributed with backend "mpi": how they begin, hang and end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launch import Job, mpirun

PROGRAM = str(Path(__file__).with_name("process_groups.py"))


def run(case: str, np: int, **env: str) -> Job:
    return mpirun(np, PROGRAM, case, str(max(1, np)), env=env)


@pytest.mark.parametrize("np", [0, 1, 2, 3])
@pytest.mark.parametrize("case", ["alone", "init", "gloo", "destroyed"])
def test_a_job_begins_and_ends(case: str, np: int) -> None:
    job = run(case, np)
    assert (job.status, job.out.count("survived")) == (0, max(1, np)), job.err


def test_a_hung_step_is_named_with_the_line_of_the_program() -> None:
    job = run("hung", 2, LIMIT="1.5")
    assert job.status != 0
    assert "survived" not in job.out
    assert re.search(
        r"HangError: \S+\(\) at .*process_groups.py:\d+ has waited for \d\.\d s, its deadline is 1.5 s", job.err
    )
    assert re.search(r"rank 1 \(\S+, pid \d+\) has not come: it is in Python, at .*process_groups.py:\d+", job.err), (
        job.err
    )


def test_a_group_has_its_own_deadline() -> None:
    job = run("group_timeout", 2)
    assert job.status != 0
    assert re.search(
        r"HangError: all_reduce\(\) at .*process_groups.py:\d+ has waited for .* its deadline is 1 s", job.err
    )


@pytest.mark.once
def test_a_group_without_a_deadline_has_that_of_the_world() -> None:
    job = run("world_timeout", 2, LIMIT="1.5")
    assert job.status != 0
    assert re.search(r"HangError: all_reduce\(\) at .* its deadline is 1.5 s", job.err), job.err


@pytest.mark.once
def test_an_aborted_group_waits_for_nobody() -> None:
    job = run("aborted", 2)
    assert job.out.count("survived") == 2, job.err


@pytest.mark.once
@pytest.mark.parametrize("async_op", "01")
def test_a_call_has_its_own_deadline(async_op: str) -> None:
    job = run("call_timeout", 2, ASYNC=async_op)
    assert job.status != 0
    assert re.search(
        r"HangError: all_reduce\(\) at .*process_groups.py:\d+ has waited for .* its deadline is 1 s", job.err
    ), job.err


@pytest.mark.once
def test_ranks_in_different_calls_are_told_so() -> None:
    job = run("different", 2, LIMIT="1.5")
    assert job.status != 0
    assert re.search(r"rank \d is in \w+\(\) at .*py:\d+, not in \w+\(\) at .*: all ranks of a group", job.err), job.err


@pytest.mark.once
def test_a_message_that_does_not_come() -> None:
    job = run("recv", 2, LIMIT="1")
    assert re.search(r"HangError: recv\(\) at .*process_groups.py:\d+ has waited", job.err), job.err
    assert re.search(r"rank 1 \(\S+, pid \d+\) has not come", job.err), job.err


@pytest.mark.once
def test_a_dead_rank_is_named() -> None:
    """Under Open MPI: MPICH's launcher ends the job before a rank can say a word, see tests/watch/test_hangs.py."""
    job = run("killed", 2)
    assert job.status != 0
    assert re.search(r"rank 1 \(\S+, pid \d+\) is dead", job.err), job.err


def test_an_uncaught_error_ends_the_job_and_is_printed() -> None:
    job = run("raises", 2)
    assert job.status != 0
    assert "a mistake of rank 1" in job.err
    assert "survived" not in job.out


@pytest.mark.once
def test_monitored_barrier_names_who_is_missing() -> None:
    job = run("monitored", 3)
    assert job.status == 0, job.err
    assert "rank 0: Rank 1 failed to pass monitoredBarrier in 500 ms" in job.out
    assert "rank 2: Rank 2 successfully reached monitoredBarrier, but received errors" in job.out


@pytest.mark.once
@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}, "rank 0 of 3"),
        ({"RANK": "0"}, "WORLD_SIZE expected"),
    ],
)
def test_what_the_environment_says_must_agree_with_mpi(env: dict[str, str], text: str) -> None:
    store = "store=dist.HashStore(), rank=0, world_size=3" if "WORLD_SIZE" in env else ""
    code = f"""
        import hpcdist, torch.distributed as dist
        dist.init_process_group("mpi", {store})
    """
    job = mpirun(1, code=code, env={} if store else env)
    assert job.status != 0
    assert text in job.err, job.err


@pytest.mark.once
@pytest.mark.parametrize(("size", "text"), [("dist_size", "as told"), ("7", "rank 0 of 7, and MPI says rank 0 of 2")])
def test_rank_and_size_may_be_given_without_an_address(size: str, text: str) -> None:
    """As scripts do that read them from variables of the launcher."""
    code = f"""
        import hpcdist, torch.distributed as dist
        from mpi4py import MPI
        dist_size = MPI.COMM_WORLD.size
        dist.init_process_group("mpi", rank=MPI.COMM_WORLD.rank, world_size={size})
        dist.barrier()
        print("as told")
    """
    job = mpirun(2, code=code)
    assert (job.status == 0) == (size == "dist_size")
    assert text in job.out + job.err, job.err
