"""dcp.async_save beside staging's own functions on the same file: in the order of the calls, whole, and to the end."""

import threading
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from launch import mpirun

from hpcdist import staging
from hpcdist.formats.known import describe
from hpcdist.staging.dcp import HDF5Reader, HDF5Writer

mpi = pytest.mark.mpi


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Slow(HDF5Writer):
    """Plans when it is told to, as if there were very many tensors."""

    def __init__(self, path, go):
        super().__init__(path)
        self.go = go

    def prepare_local_plan(self, plan):
        assert self.go.wait(60)
        return super().prepare_local_plan(plan)


def _async_save(path, value, seconds=0.5):
    """Begin a save that goes on after some time."""
    go = threading.Event()
    threading.Timer(seconds, go.set).start()
    return dcp.async_save({"x": torch.full((3, 2), value)}, storage_writer=Slow(path, go))


@mpi
def test_a_later_save_is_not_replaced_by_an_earlier_one(findings, folder):
    path = folder / "x.h5"
    ways = {
        "staging": lambda x: staging.save(path, {"x": x}, None),
        "dcp": lambda x: dcp.save({"x": x}, storage_writer=HDF5Writer(path)),
    }
    for name, later in ways.items():
        future = _async_save(path, 1.0)
        later(torch.full((3, 2), 2.0))
        future.result(60)
        findings.check(staging.load(path, "x", dim=None).eq(2).all(), f"{name} came later")
    handle = staging.save(path, {"x": torch.full((3, 2), 5.0)}, async_op=True)
    ways["dcp"](torch.full((3, 2), 6.0))
    handle.wait()
    findings.check(staging.load(path, "x", dim=None).eq(6).all(), "dcp.save came after async_op=True")


@mpi
def test_a_load_sees_what_was_saved_before(findings, folder):
    path, x = folder / "x.h5", torch.zeros(3, 2)
    staging.save(path, {"x": x}, None)
    for value in (1.0, 2.0):
        future = _async_save(path, value)
        if value == 1:
            got = staging.load(path, "x", dim=None)
        else:
            dcp.load({"x": (got := x)}, storage_reader=HDF5Reader(path))
        findings.same(got, torch.full((3, 2), value), value)
        future.result(60)


END = """
    import sys, warnings, torch, hpcdist as hd, torch.distributed.checkpoint as dcp
    from hpcdist.staging.dcp import HDF5Writer
    warnings.simplefilter("ignore")
    state = {f"x{i}": torch.ones(10) for i in range(300)}
    world = hd.init(device="cpu")
    future = dcp.async_save(state, storage_writer=HDF5Writer("x.h5"))
    with world:
        pass
    future.result(0)
"""


def test_the_end_of_the_job_waits(tmp_path):
    """Even if nobody waits for the future; where the process group ends, too."""
    job = mpirun(2, code=END, cwd=tmp_path)
    assert job.status == 0, job
    assert [path.name for path in tmp_path.iterdir()] == ["x.h5"]
    assert len(describe(str(tmp_path / "x.h5")).tensors) == 300
