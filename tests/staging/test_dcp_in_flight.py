"""dcp.async_save beside staging's own functions on the same file: in the order of the calls, whole, and to the end."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from collective import Findings
from launch import mpirun

from hpcdist import staging
from hpcdist.formats.known import describe
from hpcdist.staging.dcp import HDF5Reader, HDF5Writer

mpi = pytest.mark.mpi


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Slow(HDF5Writer):
    """Plans when it is told to, as if there were very many tensors."""

    def __init__(self, path: Path, go: threading.Event) -> None:
        super().__init__(path)
        self.go = go

    def prepare_local_plan(self, plan: Any) -> Any:
        assert self.go.wait(60)
        return super().prepare_local_plan(plan)


def _async_save(path: Path, value: float, seconds: float = 0.5) -> Any:
    """Begin a save that goes on after some time."""
    go = threading.Event()
    threading.Timer(seconds, go.set).start()
    return dcp.async_save({"x": torch.full((3, 2), value)}, storage_writer=Slow(path, go))


@mpi
def test_a_later_save_is_not_replaced_by_an_earlier_one(findings: Findings, folder: Path) -> None:
    path = folder / "x.h5"
    by_staging = lambda value: staging.save(path, {"x": torch.full((2, 2), value)})  # noqa: E731
    by_dcp = lambda value: dcp.save({"x": torch.full((3, 2), value)}, storage_writer=HDF5Writer(path))  # noqa: E731
    for later in (by_staging, by_dcp):
        future = _async_save(path, 1.0)
        later(2.0)
        future.result(60)
        findings.check(staging.load(path, "x", dim=None).eq(2).all(), f"{later} came later")
    handle = staging.save(path, {"x": torch.full((2, 2), 5.0)}, async_op=True)
    by_dcp(6.0)
    handle.wait()
    findings.check(staging.load(path, "x", dim=None).eq(6).all(), "dcp.save came after async_op=True")


@mpi
def test_a_load_sees_what_was_saved_before(findings: Findings, folder: Path) -> None:
    path, x = folder / "x.h5", torch.zeros(3, 2)
    staging.save(path, {"x": torch.zeros(2, 2)})
    future = _async_save(path, 1.0)
    findings.same(staging.load(path, "x", dim=None), torch.full((3, 2), 1.0), "by staging")
    future.result(60)
    future = _async_save(path, 2.0)
    dcp.load({"x": x}, storage_reader=HDF5Reader(path))
    findings.same(x, torch.full((3, 2), 2.0), "by dcp")
    future.result(60)


@pytest.mark.parametrize("end", ["with", "program"])
def test_the_end_of_the_job_waits(end: str, tmp_path: Path) -> None:
    """Even if nobody waits for the future; where the process group ends, too."""
    code = f"""
        import warnings, torch, hpcdist as hd, torch.distributed.checkpoint as dcp
        from hpcdist.staging.dcp import HDF5Writer
        warnings.simplefilter("ignore")
        state = {{f"x{{i}}": torch.ones(10) for i in range(300)}}
        world = hd.init(device="cpu")
        future = dcp.async_save(state, storage_writer=HDF5Writer({str(tmp_path / "x.h5")!r}))
        if {end!r} == "with":
            with world:
                pass
            future.result(0)
    """
    job = mpirun(2, code=code)
    assert job.status == 0, job
    assert [path.name for path in tmp_path.iterdir()] == ["x.h5"]
    assert len(describe(str(tmp_path / "x.h5")).tensors) == 300
