"""Hosts for the tests that want several: they are made in a moment, so that each test has its own."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from hosts import Hosts
from slurm import Slurm

sys.path.append(str(Path(__file__).parents[1] / "clients"))
# What it needs is in the environment `libraries` alone.
collect_ignore = [] if find_spec("deepspeed") else ["test_clients_hosts.py"]


@pytest.fixture
def hosts():
    """Three hosts, with useless interfaces beside the good one."""
    with Hosts(3, useless=True) as made:
        yield made


@pytest.fixture(scope="module")
def slurm():
    """Slurm on two hosts, for the jobs of all tests of a file."""
    with Hosts(2) as made, Slurm(made) as slurm:
        yield slurm
