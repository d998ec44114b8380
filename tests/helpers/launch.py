"""Start jobs as a user would: mpirun in a subprocess, with a deadline, and nothing left running behind it."""

from __future__ import annotations

import atexit
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import forks

from hpcdist.launch.launcher import without_launcher


def slowness():
    """How many times as long things take now as on a quiet machine, for deadlines."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def limit(seconds):
    """Variables with a deadline of so many seconds of a quiet machine for each call of a job, its start among them."""
    return {"HPCDIST_TIMEOUT": f"{seconds * slowness():g}"}


DEADLINE = 60.0  # seconds on a quiet machine; a job that takes longer hangs
_serving = threading.Lock()
_begun = set()  # folders of tests that have had a job
_LOOK = 5.0  # seconds after which the load is looked at again


@dataclass(frozen=True)
class Job:
    """How a job ended: mpirun's exit status, and what all ranks printed."""

    status: int
    out: str
    err: str


def mpirun(
    np,
    *args,
    code="",
    cwd=None,
    env=None,
    quick=True,
):
    """Run ``python *args`` (or ``python -c code``) on `np` ranks of the MPI that this Python's mpi4py uses.

    np 0 runs it without a launcher; `quick` is false for true processes, which import torch themselves and end as
    Python ends: so does the first job of each folder of tests that has no deadline of its own, in which a busy machine
    could not import torch. An AssertionError, after the job was ended, if it hangs.
    """
    folder = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition("/")[0]
    if folder not in _begun and "HPCDIST_TIMEOUT" not in (env or {}):
        _begun.add(folder)
        quick = False
    args = ("-c", textwrap.dedent(code)) if code else args
    return run([*(launcher(np) if np else []), *(python() if quick else [sys.executable]), *args], cwd=cwd, env=env)


def finished(*args, **options):
    """As :func:`mpirun`, of a job that must end well."""
    job = mpirun(*args, **options)
    assert job.status == 0, f"{job.out}\n{job.err}"
    return job


def together(np, steps, folder, **options):
    """Run steps one after the other in one job of `np` ranks: see commands.py.

    How each would end as a job of its own, up to the one that has ended the job, if one has.
    """
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    (folder / "task.json").write_text(json.dumps(steps))
    job = mpirun(np, str(Path(__file__).with_name("commands.py")), str(folder), **options)
    done = [Job(*one) for one in json.loads(result.read_text())] if result.exists() else []
    if len(done) < len(steps):
        files = [folder / f"{len(done)}.{kind}" for kind in ("out", "err")]
        out, err = (file.read_text(errors="replace") if file.exists() else "" for file in files)
        for file in files:
            file.unlink(missing_ok=True)
        done.append(Job(job.status or 1, out, f"{err}\nthe job has ended:\n{job.out}\n{job.err}"))
    else:
        assert job.status == 0, job
    return done


def commands(np, *lines, cwd=None, env=None):
    """Run commands one after the other in one job of `np` ranks: (module, *arguments), ("-c", code, *arguments) or
    (file.py, *arguments), with variables before them: see commands.py.

    How each would end as a job of its own. An AssertionError if one ends their job.
    """
    steps = []
    for line in lines:
        words = [str(word) for word in line]
        at = next(i for i, word in enumerate(words) if not re.match(r"[A-Z_0-9]+=", word))
        if words[at] == "-c":
            words[at + 1] = textwrap.dedent(words[at + 1])
        elif not words[at].endswith(".py"):
            words.insert(at, "-m")
        steps.append({"words": words, "code": "", "fresh": False, "cwd": str(cwd or Path.cwd())})
    with tempfile.TemporaryDirectory() as folder:
        done = together(np, steps, Path(folder), cwd=cwd, env=env)
    assert len(done) == len(lines), (lines[len(done) - 1], done[-1])
    return done


def python(executable=sys.executable):
    """The words before a program's arguments: as `executable`, but torch is imported already: see forks.py."""
    with _serving:  # threads may start jobs at once
        return _serve(executable)


@cache
def _serve(executable):
    folder = tempfile.mkdtemp(prefix="hpcdist-fork-", dir="/var/tmp")  # which all hosts share
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return forks.python(executable, folder, {**without_launcher(os.environ), "OMP_NUM_THREADS": "1"})


def launcher(np):
    """The mpirun of the MPI that this Python's mpi4py uses, for `np` ranks."""
    own = Path(sys.executable).with_name("mpirun")
    return [str(own) if own.exists() else str(shutil.which("mpirun")), "-n", str(np)]


def communicate(process, seconds=DEADLINE):
    """What a process has printed when it has ended.

    Raises:
        subprocess.TimeoutExpired: it has not ended in so many seconds of a quiet machine. While it runs, the load may
            grow, and with it the deadline.
    """
    begin, slower = time.monotonic(), 1.0
    while True:
        slower = max(slower, slowness())
        try:
            return process.communicate(timeout=max(0.0, min(_LOOK, begin + seconds * slower - time.monotonic())))
        except subprocess.TimeoutExpired:  # what it has printed so far is kept
            if time.monotonic() > begin + seconds * max(slower, slowness()):
                raise


def start(command, cwd=None, env=None, stderr=subprocess.PIPE):
    """Start a command as the leader of its own session; `env` is added to our environment."""
    return subprocess.Popen(
        command,
        cwd=cwd,
        env={**without_launcher(os.environ), "OMP_NUM_THREADS": "1", **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def run(*what, **how):
    """As :func:`start`, to its end; its whole session is ended if the deadline passes."""
    with start(*what, **how) as process:
        try:
            out, err = communicate(process)
        except subprocess.TimeoutExpired as late:
            process.terminate()  # mpirun passes it on to the ranks
            try:
                out, err = process.communicate(timeout=5)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                out, err = process.communicate()
            raise AssertionError(f"the job did not end within {DEADLINE} s of a quiet machine\n{out}\n{err}") from late
        except BaseException:  # Ctrl-C
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return Job(process.returncode, out, err)
