"""A folder that all ranks share, and the writers that can be used here."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import hpcdist as hd
from hpcdist.staging import writers

WRITERS = [name for name in ("mpio", "posix") if writers.missing(name) is None]


@pytest.fixture
def folder(world: hd.World) -> Iterator[Path]:
    """A new folder, the same for all ranks, that is gone afterwards."""
    path = Path(world.comm.bcast(tempfile.mkdtemp(prefix="hpcdist-test-") if world.rank == 0 else None))
    yield path
    world.comm.Barrier()
    if world.rank == 0:
        shutil.rmtree(path)
