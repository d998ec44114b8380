"""A file system without space, for real: run by tests/run.py on a small tmpfs (see on.sh), which these tests fill."""

import os
import shutil
from types import SimpleNamespace

import pytest
import torch
from collective import assert_on_all_ranks, raises_on_all_ranks
from conftest import WRITERS, holds

import hpcdist as hd
from hpcdist import staging

SMALL = 2**20  # bytes that are left


def fill(world, folder):
    """Leave SMALL bytes free."""
    if world.rank == 0:
        free = shutil.disk_usage(folder).free
        assert free < 2**25, "this is no small file system"
        with open(folder / "ballast", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, free - SMALL)
    world.comm.Barrier()


def piecewise(path, x):
    world = hd.init()
    with staging.open(path, "w", {"data": ((world.world_size * len(x),), x.dtype)}) as file:
        for first in range(0, len(x), 10_000):
            file.write("data", x[first : first + 10_000], (world.rank * len(x) + first,))


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(
    ("save", "options"),
    [*((staging.save, {"writer": name}) for name in WRITERS), (piecewise, {})],
    ids=str,
)
def test_nothing_is_lost(save, options, known, world, rank, size, folder, monkeypatch):
    """The same error on all ranks, the old file, nothing else, and with space the job goes on."""
    path, small = folder / "x.h5", torch.arange(1000) + 1000 * rank
    whole = torch.arange(1000 * size)
    staging.save(path, small)
    fill(world, folder)
    if not known:
        # Space is found when it is asked for: others may take it meanwhile, as quotas do.
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**40))
    big = torch.randint(2**60, (200_000,))  # 1.6 MB a rank
    write = lambda: save(path, big, **options)  # noqa: E731
    kind = OSError if save is piecewise and not known else hd.RankError  # a write of a piece is no collective
    error = raises_on_all_ranks(kind, write)
    assert_on_all_ranks("o space" in str(error), error)
    monkeypatch.undo()
    holds(folder, "ballast", "x.h5")
    assert_on_all_ranks(torch.equal(staging.load(path, dim=None), whole))
    world.comm.Barrier()
    if rank == 0:
        (folder / "ballast").unlink()
    world.comm.Barrier()
    write()
    found = torch.stack(torch.chunk(staging.load(path, dim=None), size))
    assert_on_all_ranks(torch.equal(found[rank], big), "the data")
