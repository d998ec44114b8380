"""The servers from which the tests' jobs are forked, helpers/forkserver.py: how forks begin, and when they end."""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import subprocess

import forks
import pytest
from launch import DEADLINE, python, run, slowness


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


@pytest.mark.once
def test_a_fork_begins_as_a_process_of_its_caller() -> None:
    """With its scheduling policy, and the level that torch reads from the environment when it is imported."""
    code = """if True:
        import os
        import torch.distributed as dist
        forked = "forkserver.py" in open("/proc/self/cmdline").read()
        print(forked, os.sched_getscheduler(0) == os.SCHED_BATCH, dist.get_debug_level().name)
    """
    for level in ("DETAIL", "INFO"):
        job = run(["chrt", "--batch", "0", *python(), "-c", code], env={"TORCH_DISTRIBUTED_DEBUG": level})
        assert job.out == f"True True {level}\n", job


@pytest.mark.once
def test_a_caller_that_dies_while_it_asks_leaves_no_stream_open() -> None:
    """Else whoever reads the output of a killed job would wait for its end for as long as the server lives."""
    reading, writing = os.pipe()
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(f"{python()[-1]}/0")
        socket.send_fds(caller, [struct.pack("<q", 100)], [writing])
        caller.sendall(b"{")
    os.close(writing)
    assert select.select([reading], [], [], DEADLINE * slowness())[0]
    assert os.read(reading, 1) == b""
    os.close(reading)
