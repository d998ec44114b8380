"""The writers that can be used here, and verdicts on files."""

import os

import pytest
import torch
from collective import assert_on_all_ranks, change_settings

from hpcdist.staging import drivers

WRITERS = ["posix"] if drivers.missing() else ["mpio", "posix"]


@pytest.fixture(params=[1, 2], ids=["one node", "two nodes"])
def comm(request, world, monkeypatch):
    """All ranks, as if they were on one node or on two; of three ranks, the first and the last on the same."""
    change_settings(monkeypatch, world, node_of=tuple(rank % request.param for rank in range(world.world_size)))
    comm = world.comm.Dup()
    yield comm
    comm.Free()


def holds(folder, *names):
    """A folder holds these files, and nothing else."""
    assert_on_all_ranks(sorted(os.listdir(folder)) == sorted(names), os.listdir(folder))


def same(got, expected, what=""):
    """A tensor is right on every rank."""
    assert_on_all_ranks(torch.equal(got, expected), f"{what}: {got}")
