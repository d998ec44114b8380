"""dcp.async_save beside staging's own functions on the same file: in the order of the calls, whole, and to the end."""

import threading

import pytest
import torch
import torch.distributed.checkpoint as dcp
from launch import finished

from hpcdist import staging
from hpcdist.formats.known import describe
from hpcdist.staging.dcp import HDF5Reader, HDF5Writer

pytestmark = pytest.mark.filterwarnings("ignore")


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


def test_later_calls_on_the_same_file(findings, folder):
    """A later save is not replaced by an earlier one, and a load sees what was saved before."""
    path, x = folder / "x.h5", torch.zeros(3, 2)
    saves = {
        "staging": lambda x: staging.save(path, {"x": x}, None),
        "dcp": lambda x: dcp.save({"x": x}, storage_writer=HDF5Writer(path)),
        "neither": lambda x: None,
    }
    for value, (name, later) in enumerate(saves.items()):
        future = _async_save(path, value + 0.5)
        later(x + value)
        dcp.load({"x": (got := torch.zeros(3, 2))}, storage_reader=HDF5Reader(path))
        expected = x + value + 0.5 * (name == "neither")
        findings.same(got, expected, f"dcp.load after {name}")
        findings.same(staging.load(path, "x", dim=None), expected, f"staging.load after {name}")
        future.result(60)
        findings.same(staging.load(path, "x", dim=None), expected, f"{name} came later")
    future = _async_save(path, 4.0)
    findings.same(staging.load(path, "x", dim=None), x + 4, "staging.load of an asynchronous save")
    future.result(60)
    handle = staging.save(path, {"x": x + 5}, async_op=True)
    saves["dcp"](x + 6)
    handle.wait()
    findings.check(staging.load(path, "x", dim=None).eq(6).all(), "dcp.save came after async_op=True")


def test_saves_that_nobody_waits_for(findings, folder):
    """They run in the order of the calls: the newest stays. Also to several files, and by one writer."""
    paths, writer = (folder / "x.h5", folder / "y.h5"), HDF5Writer(folder / "x.h5")
    futures = [_async_save(paths[0], 0.0)]
    for value in range(1, 5):
        futures.append(dcp.async_save({"x": torch.full((3, 2), value)}, storage_writer=HDF5Writer(paths[value % 2])))
    for value, path in ((5, *paths[:1]), (6, *paths[1:])):
        futures.append(dcp.async_save({"x": torch.full((3, 2), value)}, checkpoint_id=path, storage_writer=writer))
    for future in futures:
        future.result(60)
    for value, path in zip((5, 6), paths, strict=True):
        findings.same(staging.load(path, "x", dim=None), torch.full((3, 2), value), path.name)


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


@pytest.mark.both
def test_the_end_of_the_job_waits(tmp_path):
    """Even if nobody waits for the future; where the process group ends, too."""
    finished(2, code=END, cwd=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["x.h5"]
    assert len(describe(str(tmp_path / "x.h5")).tensors) == 300
