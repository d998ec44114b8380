"""The servers from which the tests' jobs are forked, helpers/forkserver.py, end what they have started."""

from __future__ import annotations

import os
import signal
import subprocess

import forks
import pytest
from launch import DEADLINE, python, slowness


@pytest.mark.once
def test_a_fork_ends_with_the_tests_that_have_started_it() -> None:
    """Though the server goes on, and forks for other tests."""
    code = "import os, time; print(os.getppid(), flush=True); time.sleep(600)"
    with subprocess.Popen(["sleep", "600"]) as owner:
        environ = {**os.environ, "OMP_NUM_THREADS": "1", forks.OWNER: str(owner.pid)}
        with subprocess.Popen([*python(), "-c", code], env=environ, stdout=subprocess.PIPE, text=True) as job:
            assert job.stdout is not None
            server = int(job.stdout.readline())
            owner.kill()
            assert job.wait(DEADLINE * slowness()) == -signal.SIGKILL
    with open(f"/proc/{server}/cmdline") as command:
        assert "forkserver.py" in command.read()
