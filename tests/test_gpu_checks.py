"""The checks for GPUs run without one: the CPU and gloo stand in for GPU and NCCL (see gpu/run.py)."""

import os
import subprocess
import sys

import pytest
from launch import launcher, slowness
from settings import ROOT

pytestmark = pytest.mark.timeout(1200)


def test_all_checks_of_gpus():
    command = ["bash", "tests/gpu/run.sh", "--mpirun", launcher(1)[0]]
    how = {"cwd": ROOT, "env": {**os.environ, "PYTHON": sys.executable}, "capture_output": True, "text": True}
    job = subprocess.run(command, timeout=1100 * slowness(), **how)
    assert job.returncode == 0 and "FAILED" not in job.stdout, f"{job.stdout}\n{job.stderr}"
