"""Jobs in which a rank does not come: the deadline ends them, and the table says who is missing, and why."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from launch import DEADLINE, Job, launcher, mpirun, python, slowness

PROGRAM = Path(__file__).with_name("hanging.py")

# What rank 1 does instead of calling concat(), and what is said of it.
BOTH = ("sleep", "stop")  # are looked at under each MPI, the others under one
REASONS = {
    "busy": r"has not reached this call: it is in Python, at .*hanging.py:\d+ in busy; it was after concat\(\) at",
    "sleep": r"has not reached this call: it is in Python, at .*hanging.py:\d+ in sleep",
    "fifo": r"has not reached this call: it is in I/O, read of .*fifo.*, at .*hanging.py:\d+ in fifo",
    "lock": r"has not reached this call: it is in I/O, flock of .*locked, at .*hanging.py:\d+ in lock",
    "loader": r"has not reached this call: it is in a DataLoader, at .*hanging.py:\d+ in loader; "
    r"its child processes: \d+ \S+ sleeping",
    "stop": r"is stopped, by a signal or a debugger \(kill -CONT \d+ resumes it\)",
    "native": r"has not reached this call: it is running, but does not answer: native code that holds Python's lock",
    "other": r"has not reached this call: it is in recv\(\) at .*hanging.py:\d+",
    "in_background": r"has not reached this call: it is in concat\(\)(.wait\(\))? at .*hanging.py:\d+ "
    r"with(out)? async_op",
}


CALLS = (
    *("recv", "irecv", "split", "gather_gloo", "gather_hdf5", "save", "load", "plan", "backward", "finalize", "end"),
    *("new_comm", "new_group", "free_comm"),
)

SURVIVES = 30  # s: where nobody hangs, the deadline only has to be later than what a busy machine takes


def hang(np: int, reason: str, verb: str = "concat", limit: float = 1, quick: bool = True) -> Job:
    return mpirun(np, str(PROGRAM), reason, verb, env={"LIMIT": str(limit)}, quick=quick)


@pytest.mark.parametrize("reason", [r if r in BOTH else pytest.param(r, marks=pytest.mark.once) for r in REASONS])
def test_the_reason_is_told(reason: str) -> None:
    job = hang(2, reason)
    assert job.status != 0
    assert "survived" not in job.out
    assert re.search(r"HangError: concat\(\) at .*hanging.py:\d+ has waited for 1\.\d s, its deadline is 1 s", job.err)
    code = {"stop": "HD604", "in_background": "HD301"}.get(reason, "HD601")
    who = "[01]" if reason == "in_background" else "1"  # both wait: whose deadline passes first says it of the other
    assert re.search(rf"rank {who} \(\S+, pid \d+\) {REASONS[reason]}.* \[{code}\]$", job.err, re.MULTILINE), job.err
    assert re.search(rf"^(\[rank\d\]: )?python -m hpcdist explain ([A-Z0-9]+ )*{code}\b", job.err, re.MULTILINE), (
        job.err
    )
    assert ("they wait for each other" in job.err) == (reason == "other"), job.err


def test_the_table_has_every_rank_and_each_that_waits_raises() -> None:
    job = hang(3, "sleep", quick=False)  # whose stacks begin with the program
    pids = dict(re.findall(r"^rank (\d) is (\d+)$", job.out, re.MULTILINE))
    assert len(pids) == 3
    for rank, pid in pids.items():
        doing = r"no call +in Python" if rank == "1" else r"concat\(\) at \S+ +\d.\d s +waits"
        assert re.search(rf"{rank} +\S+ +{pid} +concat\(\) at \S+hanging.py:\d+, \d.\d s ago +{doing}", job.err), (
            job.err
        )
    assert job.err.count("HangError: concat() at") == 2
    assert re.search("see the output of rank [02]", job.err)
    assert "hpcdist/validation/collective.py" not in job.err  # the traceback is of the user's code
    stack = r"rank 1 is here:\n(.*hanging.py.*\n.*\n)+.*hanging.py.* in sleep\n.*time.sleep\(1000\)"
    assert re.search(stack, job.err), job.err


@pytest.mark.once
@pytest.mark.parametrize("verb", CALLS)
def test_every_call_has_a_deadline(verb: str) -> None:
    job = hang(2, "sleep", verb)
    assert job.status != 0
    assert "HangError" in job.err
    assert re.search(r"rank 1 \(\S+, pid \d+\) has not reached this call: it is in Python", job.err), job.err


def test_a_rank_that_never_calls_init() -> None:
    job = mpirun(2, str(PROGRAM), "no_init", "concat", env={"HPCDIST_TIMEOUT": "1.5", "LIMIT": "1"})
    assert job.status != 0
    assert re.search(
        r"HangError: init\(\) at \S+hanging.py:\d+ has waited for 1.5 s: the 2 ranks have not met.* \[HD601\]\n",
        job.err,
    ), job.err


def _said_of_a_killed_rank(pid: int) -> str:
    """The launchers of MPICH and Intel MPI end the job within some 2 ms, before any rank can say a word, and may name
    a process that they have killed themselves: MPICH's that which it finds first, Intel's each of them."""
    from mpi4py import MPI

    if MPI.get_vendor()[0] == "MPICH":
        return rf"PID {pid} RUNNING"
    if MPI.get_vendor()[0] == "Intel MPI":
        return rf"RANK 1 PID {pid} RUNNING AT .*\n.*KILLED BY SIGNAL: 9"
    return rf"rank 1 \(\S+, pid {pid}\) is dead"


@pytest.mark.parametrize(("reason", "status"), [("killed", None), ("os_exit", 5), ("os_exit_0", 1)])
def test_a_death_is_noticed_at_once(reason: str, status: int | None) -> None:
    start = time.monotonic()
    job = hang(2, reason, limit=40, quick=reason != "killed")  # the launcher names the process that it has started
    assert time.monotonic() - start < 30  # the deadline is later
    assert job.status != 0
    assert status is None or job.status == status
    if reason == "killed":
        pid = re.search(r"^rank 1 is (\d+)$", job.out, re.MULTILINE)
        assert pid is not None
        assert re.search(_said_of_a_killed_rank(int(pid[1])), job.err + job.out), job.err
    else:
        assert re.search(r"os._exit\(\d\) at \S+hanging.py:\d+ on rank 1 \(\S+, pid \d+\).* \[HD604\]\n", job.err), (
            job.err
        )


@pytest.mark.once
def test_os_exit_of_a_child_process_is_left_alone() -> None:
    assert hang(2, "child", limit=SURVIVES).out.count("survived") == 2


def test_forked_children_are_left_to_themselves() -> None:
    job = hang(2, "children", limit=SURVIVES)
    assert job.status == 0, job.err
    assert job.out.count("survived") == 2
    assert "RuntimeError: in a child" in job.err


@pytest.mark.once
def test_an_error_after_the_output_was_closed_ends_the_job_with_its_reason() -> None:
    job = hang(2, "closed")
    assert job.status == 1
    assert "RuntimeError: a mistake" in job.err
    assert "reached the end of its program" not in job.err


@pytest.mark.once
def test_many_threads_do_not_put_the_blame_on_others() -> None:
    job = hang(3, "threads")
    assert re.search(
        r"rank 1 \(\S+, pid \d+\) has not reached this call: it is in Python, at \S+hanging.py:\d+ in threads", job.err
    )
    assert not re.search(r"rank [02] \(\S+, pid \d+\) has not reached this call", job.err), job.err


@pytest.mark.once
def test_without_a_current_folder_calls_go_on() -> None:
    job = hang(2, "no_folder", limit=SURVIVES)
    assert job.status == 0, job.err
    assert job.out.count("survived") == 2


@pytest.mark.once
def test_a_call_that_gets_on_has_no_deadline_as_a_whole() -> None:
    """The ranks save for longer than the deadline, a window at a time."""
    job = hang(3, "slow_save", limit=2)
    assert job.status == 0, job.err
    assert job.out.count("survived") == 3
    assert "HangError" not in job.err


@pytest.mark.once
def test_a_job_that_is_stopped_as_a_whole_goes_on(tmp_path: Path) -> None:
    """The batch system suspends a job for longer than the deadline: nobody has waited meanwhile."""
    with _started("suspended", 4, tmp_path / "err") as job:
        pids = _pids(job, 2)
        time.sleep(1)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(6)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        out, _ = job.communicate(timeout=40)
    assert job.returncode == 0, (tmp_path / "err").read_text()
    assert out.count("survived") == 2


@pytest.mark.once
def test_a_signal_to_any_rank_prints_the_table_once_and_the_job_goes_on(tmp_path: Path) -> None:
    said, title = tmp_path / "err", "hpcdist: the calls of all ranks"
    with _started("wait_for_input", 60, said) as job:
        pids = _pids(job, 3)
        for count, told in enumerate((pids[2:], pids[:1], pids), 1):
            for pid in told:
                os.kill(pid, signal.SIGUSR2)
            end = time.monotonic() + DEADLINE * slowness()
            while said.read_text().count(title) < count and time.monotonic() < end:
                time.sleep(0.1)
            time.sleep(1.5)  # in which the other ranks would print theirs
        os.kill(pids[1], signal.SIGINT)  # rank 1 has waited for that
        out, _ = job.communicate(timeout=40)
    err = said.read_text()
    assert job.returncode == 0, err
    assert out.count("survived") == 3
    assert err.count(title) == 3, err
    assert (
        len(re.findall(r"^\d +\S+ +\d+ +concat\(\) at \S+, .* ago +(no call +in Python|concat)", err, re.MULTILINE))
        == 9
    )


@pytest.mark.once
def test_a_program_that_uses_the_signal_itself_keeps_it() -> None:
    code = """
        import os, signal, time
        import hpcdist as hd
        got = []
        if os.environ["FIRST"] == "yes": signal.signal(signal.SIGUSR2, lambda *_: got.append(1))
        world = hd.init()
        if os.environ["FIRST"] == "no": signal.signal(signal.SIGUSR2, lambda *_: got.append(1))
        os.kill(os.getpid(), signal.SIGUSR2)
        world.finalize()
        os.kill(os.getpid(), signal.SIGUSR2)
        print(f"got {len(got)}")
    """
    for first in ("yes", "no"):
        job = mpirun(2, code=code, env={"FIRST": first})
        assert job.status == 0, job.err
        assert job.out.count("got 2") == 2


@pytest.mark.once
def test_an_exit_after_finalize_is_left_alone() -> None:
    for end in ("os._exit(0)", "MPI.Finalize(); os._exit(0)"):
        job = mpirun(2, code=f"import os, hpcdist as hd\nfrom mpi4py import MPI\nhd.init().finalize(); {end}")
        assert "os._exit" not in job.err
        assert job.status == 0 or "MPI.Finalize" not in end, job.err


def _started(reason: str, limit: float, err: Path) -> subprocess.Popen[str]:
    """A job of 3 ranks (2 if suspended), which goes on meanwhile, with a file for its standard error."""
    np = 2 if reason == "suspended" else 3
    with err.open("w") as file:
        return subprocess.Popen(
            [*launcher(np), *python(), "-u", str(PROGRAM), reason, "concat"],
            env={**os.environ, "OMP_NUM_THREADS": "1", "LIMIT": str(limit)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            start_new_session=True,
        )


def _pids(job: subprocess.Popen[str], np: int) -> list[int]:
    """The processes of the ranks, once all have said that they are ready."""
    assert job.stdout is not None
    found: dict[int, int] = {}
    while len(found) < np:
        line = job.stdout.readline()
        assert line, "the job has ended"
        found |= {int(rank): int(pid) for rank, pid in re.findall(r"rank (\d) is (\d+)", line)}
    time.sleep(1)
    return [found[rank] for rank in range(np)]
