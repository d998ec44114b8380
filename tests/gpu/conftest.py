"""What the GPU checks share."""

import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from stand_in import STAND_IN, install

import hpcdist as hd


@pytest.fixture(scope="session")
def gpu_world():
    """Ranks that share a GPU do without NCCL's group; those that have their own get it."""
    from mpi4py import MPI

    install()
    shared = MPI.COMM_WORLD.size > torch.cuda.device_count()
    with hd.init(backend="gloo") if shared else hd.init() as world:
        yield world


@pytest.fixture
def folder(gpu_world):
    """A folder that all ranks see."""
    path = Path(gpu_world.comm.bcast(tempfile.mkdtemp() if gpu_world.rank == 0 else None))
    yield path
    gpu_world.comm.Barrier()
    if gpu_world.rank == 0:
        shutil.rmtree(path)


@pytest.fixture
def routes(gpu_world):
    """All that carry GPU memory here."""
    if STAND_IN:
        return ["auto", "nccl"]
    return ["auto", "mpi", "gloo", "hdf5", *(["nccl"] if gpu_world.settings.own_gpus else [])]
