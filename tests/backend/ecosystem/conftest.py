"""Torch's own parallelism over the default process group.

HPCDIST_TEST_BACKEND=gloo in the environment runs the same tests over gloo, which is the bar.
"""

import os

import pytest
import torch.distributed as dist

DEFAULT = "mpi"


@pytest.fixture(autouse=True)
def backend(world):
    """The name of the default group's backend. Groups that a test makes stay: DTensor keeps what it has computed for a
    mesh, under the names of the groups it had then."""
    name = dist.get_backend()
    assert name == (os.environ.get("HPCDIST_TEST_BACKEND") or DEFAULT)
    return name
