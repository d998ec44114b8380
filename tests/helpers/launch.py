"""Start jobs as a user would: mpirun in a subprocess, with a deadline, and nothing left running behind it."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import forks

from hpcdist.comm.launcher import without_launcher


def slowness() -> float:
    """How many times as long things take now as on a quiet machine, for deadlines."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


DEADLINE = 60.0  # seconds on a quiet machine; a job that takes longer hangs
_serving = threading.Lock()
_LOOK = 5.0  # seconds after which the load is looked at again


@dataclass(frozen=True)
class Job:
    """How a job ended: mpirun's exit status, and what all ranks printed."""

    status: int
    out: str
    err: str


def mpirun(
    np: int,
    *args: str,
    code: str = "",
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    quick: bool = True,
) -> Job:
    """Run ``python *args`` (or ``python -c code``) on `np` ranks of the MPI that this Python's mpi4py uses.

    np 0 runs it without a launcher; `quick` is false for true processes, which import torch themselves. An
    AssertionError, after the job was ended, if it hangs.
    """
    args = ("-c", textwrap.dedent(code)) if code else args
    return run([*(launcher(np) if np else []), *(python() if quick else [sys.executable]), *args], cwd=cwd, env=env)


def commands(
    np: int, *lines: Sequence[object], cwd: Path | None = None, env: dict[str, str] | None = None
) -> list[Job]:
    """Run commands, each (module, *arguments), one after the other in one job of `np` ranks: see commands.py.

    How each would end as a job of its own. An AssertionError if their job does not end well.
    """
    with tempfile.TemporaryDirectory() as folder:
        told = json.dumps([list(map(str, line)) for line in lines])
        job = mpirun(np, str(Path(__file__).with_name("commands.py")), folder, told, cwd=cwd, env=env)
        assert job.status == 0, job
        statuses = [max(of_ranks) for of_ranks in json.loads(job.out)]
        said = [
            [Path(folder, f"{i}.{kind}").read_text(errors="replace") for kind in ("out", "err")]
            for i in range(len(lines))
        ]
        return [Job(status, out, err) for status, (out, err) in zip(statuses, said, strict=True)]


def python(executable: str = sys.executable) -> list[str]:
    """The words before a program's arguments: as `executable`, but torch is imported already: see forks.py."""
    with _serving:  # threads may start jobs at once
        return _serve(executable)


@cache
def _serve(executable: str) -> list[str]:
    folder = tempfile.mkdtemp(prefix="hpcdist-fork-", dir="/var/tmp")  # which all hosts share
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return forks.python(executable, folder, {**without_launcher(os.environ), "OMP_NUM_THREADS": "1"})


def launcher(np: int) -> list[str]:
    """The mpirun of the MPI that this Python's mpi4py uses, for `np` ranks."""
    own = Path(sys.executable).with_name("mpirun")
    return [str(own) if own.exists() else str(shutil.which("mpirun")), "-n", str(np)]


def communicate(process: subprocess.Popen[str], seconds: float = DEADLINE) -> tuple[str, str]:
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


def run(command: Sequence[str], cwd: Path | None = None, env: dict[str, str] | None = None) -> Job:
    """Run a command as the leader of its own session, and end that whole session if the deadline passes."""
    with subprocess.Popen(
        command,
        cwd=cwd,
        env={**without_launcher(os.environ), "OMP_NUM_THREADS": "1", **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
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
