"""The writers that can be used here, and verdicts on files."""

import os

import torch
from collective import assert_on_all_ranks

from hpcdist.staging import drivers

WRITERS = ["posix"] if drivers.missing() else ["mpio", "posix"]


def holds(folder, *names):
    """A folder holds these files, and nothing else."""
    assert_on_all_ranks(sorted(os.listdir(folder)) == sorted(names), os.listdir(folder))


def same(got, expected, what=""):
    """A tensor is right on every rank."""
    assert_on_all_ranks(torch.equal(got, expected), f"{what}: {got}")
