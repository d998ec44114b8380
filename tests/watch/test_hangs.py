"""Jobs in which a rank does not come: the deadline ends them, and the table says who is missing, and why."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
from launch import DEADLINE, launcher, limit, mpirun, python, slowness, start

PROGRAM = Path(__file__).with_name("hanging.py")

# What ranks 1, 2, ... do instead of calling concat(), and what is said of them.
REASONS = {
    "sleep": r"has not reached this call: it is in Python, at .*hanging.py:\d+ in sleep; it was after concat\(\) at",
    "busy": r"has not reached this call: it is in Python, at .*hanging.py:\d+ in busy",
    "fifo": r"has not reached this call: it is in I/O, read of .*fifo.*, at .*hanging.py:\d+ in fifo",
    "lock": r"has not reached this call: it is in I/O, flock of .*locked, at .*hanging.py:\d+ in lock",
    "loader": r"has not reached this call: it is in a DataLoader, at .*hanging.py:\d+ in loader; "
    r"its child processes: \d+ \S+ sleeping",
    "stop": r"is stopped, by a signal or a debugger \(kill -CONT \d+ resumes it\)",
    "native": r"has not reached this call: it is running, but does not answer: native code that holds Python's lock",
    "other": r"has not reached this call: it is in recv\(\) at .*hanging.py:\d+",
}


def hang(np, reasons, verbs="concat", seconds=4):
    env = {"LIMIT": limit(seconds)["HPCDIST_TIMEOUT"]}
    return mpirun(np, str(PROGRAM), reasons, verbs, env=env, quick=False)


@pytest.mark.both
def test_the_reasons_are_told_in_a_table_of_all_ranks():
    """Of all at once; each rank that waits raises."""
    np = len(REASONS) + 2
    job = hang(np, ",".join(f"{rank}:{reason}" for rank, reason in enumerate(REASONS, 1)))
    assert job.status != 0
    assert "survived" not in job.out
    assert re.search(r"HangError: concat\(\) at .*hanging.py:\d+ has waited for [\d.]+ s, its deadline is ", job.err)
    for rank, reason in enumerate(REASONS, 1):
        code = "HD604" if reason == "stop" else "HD601"
        found = re.search(rf"rank {rank} \(\S+, pid \d+\) {REASONS[reason]}.* \[{code}\]$", job.err, re.MULTILINE)
        assert found, (reason, job.err)
    assert re.search(r"^(\[rank\d\]: )?python -m hpcdist explain HD601 HD604$", job.err, re.MULTILINE), job.err
    pids = dict(re.findall(r"^rank (\d) is (\d+)$", job.out, re.MULTILINE))
    assert len(pids) == np
    doing = {1: r"no call +in Python", 6: "no call +stopped"}
    for rank in (0, 1, 6, np - 1):
        call = doing.get(rank, r"concat\(\) at \S+ +\d+.\d s +waits")
        row = rf"{rank} +\S+ +{pids[str(rank)]} +concat\(\) at .*hanging.py:\d+, \d+.\d s ago +{call}"
        assert re.search(row, job.err), (row, job.err)
    # Of the two that wait; mpirun may let the stopped one, rank 6, go on before it ends it.
    assert len(re.findall(r"^(?!\[rank6\]).*HangError: concat\(\) at", job.err, re.MULTILINE)) == 2, job.err
    assert re.search("see the output of rank [0-9]", job.err)
    assert "hpcdist/validation/collective.py" not in job.err  # the traceback is of the user's code
    stack = r"rank 1 is here:\n(.*hanging.py.*\n.*\n)+.*hanging.py.* in sleep\n.*time.sleep\(1000\)"
    assert re.search(stack, job.err), job.err


CALLS = {  # verb: as it is named
    "new_group": "the first use of a group",  # of ranks 0 and 1
    "new_comm": "the first use of a group",
    "own_group": "a new group",
    "recv": r"recv\(\)",
    "irecv": r"irecv\(\).wait\(\)",
    "split": r"split\(\)",
    "load": r"staging.load\(\)",
    "plan": "plan of redistribute",
    "backward": "the backward pass of concat",
    "finalize": r"finalize\(\)",
    "save": r"staging.save\(\)",
    "end": "the end of its program",
}


def test_every_call_has_a_deadline():
    """Each rank waits in another one for rank 1."""
    first, *verbs = CALLS
    job = hang(len(CALLS) + 1, "1:sleep", ",".join([first, "concat", *verbs]))
    assert job.status != 0
    assert re.search(r"rank 1 \(\S+, pid \d+\) has not reached this call: it is in Python", job.err), job.err
    for rank, verb in enumerate([first, "concat", *verbs]):
        if rank != 1:
            said = rf"^\[rank{rank}\]: .*HangError: {CALLS[verb]}( at .*hanging.py:\d+)? has waited"
            assert re.search(said, job.err, re.MULTILINE), (verb, job.err)


def test_a_rank_that_never_calls_init():
    job = mpirun(2, str(PROGRAM), "1:no_init", "concat", env={"HPCDIST_TIMEOUT": "1.5", "LIMIT": "1"})
    assert job.status != 0
    text = r"HangError: init\(\) at .*hanging.py:\d+ has waited for 1.5 s: the 2 ranks have not met.* \[HD601\]\n"
    assert re.search(text, job.err), job.err


@pytest.mark.parametrize(("end", "ranks"), [("end", 5), ("stop", 2)])
def test_a_rank_that_never_starts_mpi(end, ranks, tmp_path):
    """MPI_Init of the others would wait for ever, and holds Python's lock: none of their threads could tell."""
    job = mpirun(ranks, str(PROGRAM.with_name("early.py")), end, "1.5", str(tmp_path / "process"))
    assert job.status != 0
    said = rf"init\(\) at \S+early.py:\d+ has waited for 1.5 s in MPI_Init.* started {ranks} processes \(.*\[HD120\]\n"
    assert re.search(said, job.err), job.err


def test_an_end_that_hangs(tmp_path):
    """Rank 0 waits in MPI_Finalize, which holds Python's lock, and no watch runs any more."""
    words = ["late", limit(4)["HPCDIST_TIMEOUT"], str(tmp_path / "process")]
    job = mpirun(2, str(PROGRAM.with_name("early.py")), *words, quick=False)
    assert job.status != 0
    assert re.search(r"rank [01] has not ended .* after the last call of all ranks.*\[HD121\]\n", job.err), job.err


def _said_of_a_killed_rank(pid):
    """The launchers of MPICH and Intel MPI end the job within some 2 ms, before any rank can say a word, and may name
    a process that they have killed themselves: MPICH's that which it finds first, Intel's each of them."""
    from mpi4py import MPI

    if MPI.get_vendor()[0] == "MPICH":
        return rf"PID {pid} RUNNING"
    if MPI.get_vendor()[0] == "Intel MPI":
        return rf"RANK 1 PID {pid} RUNNING AT .*\n.*KILLED BY SIGNAL: 9"
    return rf"rank 1 \(\S+, pid {pid}\) is dead"


@pytest.mark.parametrize(
    ("reason", "status"),
    [pytest.param("killed", None, marks=pytest.mark.both), ("os_exit", 5), ("os_exit_0", 1)],
)
def test_a_death_is_noticed_at_once(reason, status):
    job = hang(2, f"1:{reason}", seconds=40)
    assert job.status != 0
    assert "its deadline is" not in job.err, job.err  # it was not waited for
    assert status is None or job.status == status
    said = r"os._exit\(\d\) at .*hanging.py:\d+ on rank 1 \(\S+, pid \d+\).* \[HD604\]\n"
    if reason == "killed":
        said = _said_of_a_killed_rank(re.findall(r"^rank 1 is (\d+)$", job.out, re.MULTILINE)[0])
    assert re.search(said, job.err + job.out), job.err


def test_what_rank_1_does_elsewhere_is_left_alone_and_its_threads_put_no_blame_on_others():
    """Forked children, which end in every way, and a current folder that is gone; then many threads."""
    job = hang(3, "0:after,1:harmless+threads,2:after")
    assert "harmless" in job.out and "RuntimeError: in a child" in job.err
    said = r"rank 1 \(\S+, pid \d+\) has not reached this call: it is in Python, at .*hanging.py:\d+ in threads"
    assert re.search(said, job.err), job.err
    assert not re.search(r"rank [02] \(\S+, pid \d+\) has not reached this call", job.err), job.err


# Calls for longer than the deadline, which end well: a save that gets on, a window at a time; a suspended job; then
# one to which a rank comes when it is told to.
LONG = """
import contextlib, signal, sys, time
import torch, hpcdist as hd
from hanging import shorten
rank = (world := hd.init()).rank
os = __import__("os")
os.write(1, f"rank {rank} is {os.getpid()}\\n".encode())
hd.concat(torch.ones(1))
shorten(5)
slow = (lambda _: time.sleep(0.3)) if rank == 1 else None  # the others wait for it at the end
begin = time.monotonic()
hd.staging.save("x.h5", torch.ones(40, 64), window=512, progress=slow)
assert time.monotonic() - begin > 5.5
shorten(4)
os.write(1, b"saved\\n")
time.sleep(2.5 * (rank == 1))
hd.concat(torch.ones(1))
shorten(60)
os.write(1, b"resumed\\n")
with contextlib.suppress(KeyboardInterrupt):
    time.sleep(1000 * (rank == 1))
hd.concat(torch.ones(1))
os.write(1, b"survived\\n")
"""


def test_calls_that_take_long_and_a_signal_that_prints_the_table(tmp_path):
    """The batch system suspends the job for longer than the deadline: nobody has waited meanwhile. Whoever gets the
    signal, the table is printed once, and the job goes on."""
    said, title = tmp_path / "err", "hpcdist: the calls of all ranks"
    command, env = [*launcher(3), *python(), "-u", "-c", LONG], {"PYTHONPATH": str(PROGRAM.parent)}
    with said.open("w") as err, start(command, tmp_path, env, stderr=err) as job:
        pids = sorted(map(str.split, _lines(job, "rank", 3)))
        ranks = [int(words[-1]) for words in pids]
        _lines(job, "saved", 3)
        time.sleep(1)
        for number, pause in ((signal.SIGSTOP, 6), (signal.SIGCONT, 0)):
            for pid in ranks:
                os.kill(pid, number)
            time.sleep(pause)
        _lines(job, "resumed", 3)
        time.sleep(1)
        for count, told in enumerate((ranks[2:], ranks[:1], ranks), 1):
            for pid in told:
                os.kill(pid, signal.SIGUSR2)
            end = time.monotonic() + DEADLINE * slowness()
            while said.read_text().count(title) < count and time.monotonic() < end:
                time.sleep(0.1)
            time.sleep(1.5)  # in which the other ranks would print theirs
        os.kill(ranks[1], signal.SIGINT)  # rank 1 has waited for that
        out, _ = job.communicate(timeout=40)
    text = said.read_text()
    assert job.returncode == 0, text
    assert out.count("survived") == 3
    assert "HangError" not in text and text.count(title) == 3, text
    row = r"^\d +\S+ +\d+ +concat\(\) at \S+, .* ago +(no call +in Python|concat)"
    assert len(re.findall(row, text, re.MULTILINE)) == 9, text


def _lines(job, begin, count):
    """Wait until the job has printed so many lines that begin so."""
    found = []
    while len(found) < count:
        line = job.stdout.readline()
        assert line, "the job has ended"
        found += [line] * line.startswith(begin)
    return found


def test_a_program_that_uses_the_signal_itself_keeps_it_and_ends_as_it_likes_after_finalize():
    code = """
        import os, signal
        import hpcdist as hd
        from mpi4py import MPI
        got = []
        def count(*_): got.append(1)
        for first in (True, False):
            signal.signal(signal.SIGUSR2, count if first else signal.SIG_DFL)
            world = hd.init()
            signal.signal(signal.SIGUSR2, count)
            os.kill(os.getpid(), signal.SIGUSR2)
            world.finalize()
            os.kill(os.getpid(), signal.SIGUSR2)
        os.write(1, f"got {len(got)}\\n".encode())
        MPI.Finalize()
        os._exit(0)
    """
    job = mpirun(2, code=code)
    assert (job.status, job.out, "os._exit" in job.err) == (0, "got 4\n" * 2, False), job


@pytest.mark.both
def test_a_receive_behind_one_that_is_still_open():
    code = """
        import torch, hpcdist as hd
        with hd.init():
            hd.irecv(0)  # takes the message
            hd.isend(torch.ones(3), 0).wait()
            hd.recv(0)
    """
    job = mpirun(0, code=code, env={"HPCDIST_TIMEOUT": "1"})
    assert job.status != 0
    found = re.search(r"rank 0 waits for itself, in recv\(\) at \S+:6, after irecv\(\) at \S+:4, whose wait", job.err)
    assert found, job.err
