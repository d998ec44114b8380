"""should_stop(): the same step on all ranks, whoever has had a signal, and whatever a rank does meanwhile."""

import re
import time
from pathlib import Path

import pytest
from launch import finished, mpirun
from settings import ALL

from hpcdist.launch import launcher

HEAD = """
import os, signal, sys, threading, time
import torch, torch.distributed as dist
import hpcdist as hd
TERM, USR1, USR2 = signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2
def me(number): os.kill(os.getpid(), number)
def say(text): os.write(1, (str(text) + "\\n").encode())  # one write a line: the ranks' lines do not mix
"""


def job(np, body):
    return mpirun(np, code=HEAD + body)


@pytest.mark.both
def test_a_signal_to_any_rank_at_any_moment(tmp_path):
    """No rank goes one step further than another, and the next run goes on from the file."""
    trials = 200 if ALL else 12
    done = finished(3, str(Path(__file__).with_name("stop_at_random.py")), str(trials), str(tmp_path / "state.h5"))
    found = re.search(rf"^{trials} trials, (\d+) steps, at most (\d+)$", done.out, re.MULTILINE)
    assert found and int(found[2]) > 1, done.out


def test_every_kth_call_and_the_exit_status():
    """Only the first call and each k-th after it have a message; each rank exits by itself, without an abort."""
    done = job(
        2,
        """
with hd.init() as world:
    answers = [world.should_stop(every=3)]
    if world.rank == 1: me(TERM)
    answers += [world.should_stop(every=3) for _ in range(4)]
    say(f"{answers} {world.stop_reason}")
    sys.exit(75)
""",
    )
    assert done.status == 75, done
    assert set(done.out.splitlines()) == {"[False, False, False, True, True] rank 1 received SIGTERM"}
    assert "abort" not in done.err.lower().replace("the job has been aborted", ""), done.err


# Whose handlers there are, and when.
HANDLERS = """
def theirs(*_): raise AssertionError
before = signal.signal(USR1, theirs)
world = hd.init()
assert signal.getsignal(TERM) == signal.SIG_DFL and signal.getsignal(USR1) is theirs  # it has not asked
assert not world.should_stop()
assert signal.getsignal(TERM) not in (signal.SIG_DFL, theirs) and signal.getsignal(USR1) is not theirs
signal.signal(TERM, theirs)  # as Lightning does, whose handler broadcasts
assert not world.should_stop()
child = os.fork()
if not child:  # such as a worker of a DataLoader, which must end by SIGTERM
    me(TERM)
    time.sleep(60)
assert os.waitpid(child, 0)[1] == TERM
me(TERM)
assert world.should_stop() and world.stop_reason == "rank 0 received SIGTERM"
world.finalize()
assert signal.getsignal(TERM) == signal.SIG_DFL and signal.getsignal(USR1) is theirs
with hd.init(stop_on=[USR2]) as world:
    me(USR2)
    assert world.should_stop() and world.stop_reason == "rank 0 received SIGUSR2"
    assert signal.getsignal(TERM) == signal.SIG_DFL
signal.signal(USR1, signal.SIG_DFL)
"""
# A signal to the process group leaves the workers of a data loader alone: Open MPI's mpirun sends it to all processes
# of a rank, and the workers are forked before the first call.
WORKERS = """
from torch.utils.data import DataLoader
if os.getpgid(0) != os.getpid(): os.setpgid(0, 0)
with hd.init() as world:
    signal.signal(USR1, signal.SIG_DFL)  # MPICH has set a handler
    for step, batch in enumerate(DataLoader(range(1000), num_workers=2)):
        if step == 5 and world.rank == 1:
            os.killpg(0, USR1)
            time.sleep(1)  # in which torch notices that a worker has ended
        if world.should_stop(): break
    assert world.stop_reason == "rank 1 received SIGUSR1", world.stop_reason
"""
# What cannot be on one rank is the error of all.
REFUSED = """
def refused(call, *texts):
    try: call()
    except hd.RankError as error: assert all(text in str(error) for text in texts), error
    else: raise AssertionError(texts)
mine = lambda wrong, right: wrong if rank else right
from mpi4py import MPI
rank = MPI.COMM_WORLD.rank
refused(lambda: hd.init(stop_on=mine([signal.SIGKILL], None)), "rank 1: ", "stop_on is [<Signals.SIGKILL", "[HD114]")
refused(lambda: hd.init(stop_on=mine(9, None)), "rank 1: ", "stop_on is 9, expected a tuple of signals", "[HD114]")
refused(lambda: hd.init(stop_on=mine([USR1], [TERM])), "rank 1: stop_on is [10], where rank 0 has [15] [HD303]")
refused(lambda: hd.init(stop_before=mine(-1, 1)), "rank 1: ", "stop_before is -1, expected seconds", "[HD114]")
refused(lambda: hd.init(stop_before=mine("1", 1)), "rank 1: ", "stop_before must be a timedelta or seconds", "[HD114]")
refused(lambda: hd.init(stop_before=mine(None, 1)), "rank 1: stop_before is None, where rank 0 has 1.0 [HD303]")
world = hd.init()
refused(lambda: world.should_stop(mine(0, 1)), "rank 1: every is int 0, expected an int from 1 on [HD204]")
refused(lambda: world.should_stop(mine(True, 1)), "rank 1: every is bool True")
refused(lambda: world.should_stop(mine(3, 2)), "rank 1: every is 3, where rank 0 has 2 [HD303]")
refused(lambda: hd.concat(torch.ones(1)) if rank else world.should_stop(), "rank 1: called concat()")
assert not world.should_stop(2)
assert rank or not world.should_stop(2)  # rank 1 is one call behind
refused(lambda: world.should_stop(mine(0, 2)), "rank 1: every is int 0")
if rank: me(USR1)
assert world.should_stop(2)  # and they are in step again
world.finalize()
try: world.should_stop()
except hd.HpcdistError as error: assert "[HD112]" in str(error)
"""
# One rank asks the scheduler once.
TIME = """
os.environ["SLURM_JOB_ID"] = "7"  # here: mpirun would look for the job, and puts its own folder first in PATH
os.environ["PATH"] = sys.argv[1] + ":" + os.environ["PATH"]
with hd.init(stop_before=1) as world:
    assert not world.should_stop() and 0 < world.time_left() <= 50
with hd.init(stop_before=3600) as world:
    assert world.should_stop() and world.should_stop()
    say(world.stop_reason)
with hd.init() as world:
    assert world.time_left() is None
"""


@pytest.mark.both
def test_handlers_workers_refusals_and_the_time_of_the_job(tmp_path):
    fake(tmp_path, "squeue", "0:50")
    done = finished(2, "-c", HEAD + HANDLERS + WORKERS + REFUSED + TIME, str(tmp_path))
    said = done.out.splitlines()
    assert len(said) == 2 and said[0] == said[1] and re.fullmatch(r"the job ends in \d+ s", said[0]), said
    assert (tmp_path / "calls").read_text().split() == ["call", "call"]  # one for each world


def test_a_program_that_never_asks_ends_by_the_signal():
    done = job(2, "world = hd.init()\nif world.rank: me(TERM)\nhd.concat(torch.ones(1))\nsay('survived')")
    assert done.status != 0 and "survived" not in done.out


def test_a_second_signal_ends_a_rank_that_waits_in_mpi():
    """One that arrives twice does not: Slurm and mpirun may both send it."""
    done = job(
        2,
        """
world = hd.init()
world.should_stop()
def send():
    me(TERM); time.sleep(0.1); me(TERM); time.sleep(1)
    say("twice"); time.sleep(0.5)
    me(TERM); time.sleep(30)
    say("survived")
if world.rank == 0:
    threading.Thread(target=send, daemon=True).start()
    hd.concat(torch.ones(1))
time.sleep(60)
""",
    )
    assert done.status in (15, 128 + 15) and done.out.startswith("twice") and "survived" not in done.out, done


QSTAT = """Job Id: 7.head
    resources_used.walltime = 00:00:10
    {start}
    Resource_List.walltime = 01:00:00
    Variable_List = PBS_O_HOME=/home/me,PBS_O_LANG=C"""
SCHEDULERS = {  # variable, command, its words, what it prints
    "Slurm": ("SLURM_JOB_ID", "squeue", "--noheader --format=%L --jobs 7", "1-00:58:20", 24 * 3600 + 3500),
    "Slurm, minutes": ("SLURM_JOB_ID", "squeue", "--noheader --format=%L --jobs 7", "58:20", 3500),
    "OpenPBS": ("PBS_JOBID", "qstat", "-f 7", QSTAT.replace("{start}", "stime = {started}"), 3500),
    "Torque": ("PBS_JOBID", "qstat", "-f 7", QSTAT.replace("{start}", "start_time = {started}"), 3500),
    "LSF": ("LSB_BATCH_JID", "bjobs", "-noheader -o time_left 7", "0:58 L", 3480),
    "Flux": ("FLUX_JOB_ID", "flux", "job timeleft 7", "3500", 3500),
    "Flux, no limit": ("FLUX_JOB_ID", "flux", "job timeleft 7", "4294967295", None),
    "Slurm, no limit": ("SLURM_JOB_ID", "squeue", "--noheader --format=%L --jobs 7", "UNLIMITED", None),
    "Slurm, an error": ("SLURM_JOB_ID", "false", "", "", None),
}


def fake(folder, command, prints, words="*"):
    """A command of a scheduler, which counts its calls."""
    folder.mkdir(exist_ok=True)
    check = "" if words == "*" else f'[ "$*" = "{words}" ] || exit 1'
    lines = ["#!/bin/sh", check, f"echo call >> {folder}/calls", "/bin/cat <<'END'", prints, "END\n"]
    folder.joinpath(command).write_text("\n".join(lines))
    folder.joinpath(command).chmod(0o755)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_time_that_a_scheduler_tells(name, tmp_path, monkeypatch, capsys):
    variable, command, words, prints, expected = SCHEDULERS[name]
    fake(tmp_path, command, prints.replace("{started}", time.ctime(time.time() - 100)), words)
    monkeypatch.setenv("PATH", str(tmp_path))
    left = launcher.time_left({variable: "7"})
    assert left == (None if expected is None else pytest.approx(expected, abs=60)), left
    said = capsys.readouterr().err
    assert ("stop_before has no effect [HD114]" in said) == (name in ("Slurm, no limit", "Slurm, an error")), said


def test_the_time_of_no_job_of_the_variable_and_of_a_job_in_a_job(tmp_path, monkeypatch):
    assert launcher.time_left({}) is None
    end = {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": str(int(time.time()) + 500)}
    assert launcher.time_left(end) == pytest.approx(500, abs=60)
    fake(tmp_path, "flux", "100")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert launcher.time_left({**end, "FLUX_JOB_ID": "f1"}) == 100
