"""What the GPU checks share."""

from __future__ import annotations

import pytest
import torch

import hpcdist as hd


@pytest.fixture(scope="session")
def gpu_world() -> hd.World:
    """Ranks that share a GPU do without NCCL's group; those that have their own get it."""
    from mpi4py import MPI

    shared = MPI.COMM_WORLD.size > torch.cuda.device_count()
    return hd.init(backend="gloo") if shared else hd.init()
