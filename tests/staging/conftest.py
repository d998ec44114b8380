"""The writers that can be used here, and verdicts on calls that must fail."""

import os

import pytest
import torch
from collective import Findings, assert_on_all_ranks, change_settings, raises_on_all_ranks

import hpcdist as hd
from hpcdist.staging import drivers

WRITERS = [name for name in ("mpio", "posix") if drivers.missing(name) is None]


@pytest.fixture
def findings(world):
    """What a test finds wrong, told when it has ended: the verdict is that of all ranks."""
    found = Findings(world.comm)
    yield found
    found.settle()


@pytest.fixture(params=[1, 2], ids=["one node", "two nodes"])
def comm(request, world, monkeypatch):
    """All ranks, as if they were on one node or on two; of three ranks, the first and the last on the same."""
    change_settings(monkeypatch, world, node_of=tuple(rank % request.param for rank in range(world.world_size)))
    comm = world.comm.Dup()
    yield comm
    comm.Free()


def refused(
    world,
    text,
    call,
    *args,
    ranks=None,
    what="",
    **options,
):
    """The error of a call, the same on every rank, with this text in it, and from these ranks."""
    error = raises_on_all_ranks(world.comm, hd.RankError, lambda: call(*args, **options))
    right = text in str(error) and (ranks is None or sorted(error.problems) == list(ranks))
    assert_on_all_ranks(world.comm, right, f"{what}: {error}")
    return error


def holds(world, folder, *names):
    """A folder holds these files, and nothing else."""
    assert_on_all_ranks(world.comm, sorted(os.listdir(folder)) == sorted(names), os.listdir(folder))


def same(world, got, expected, what=""):
    """A tensor is right on every rank."""
    assert_on_all_ranks(world.comm, torch.equal(got, expected), f"{what}: {got}")
