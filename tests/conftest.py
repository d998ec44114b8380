"""How the tests run under mpirun: what is selected, who prints, and that the ranks stay together after a failure.

python -m pytest -m "not mpi"
python -m pytest -m cluster
mpirun -n N python -m pytest --with-mpi -m mpi
"""

import gc
import os
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch
from collective import Findings, change_settings, failures_elsewhere
from launch import slowness

import hpcdist
from hpcdist.control import objects

_LARGE_NEEDS = 2  # ranks: more would not fit in the memory of a small machine

_comm = None  # the tests' own duplicate of COMM_WORLD, if this is a run with --with-mpi


@pytest.hookimpl(tryfirst=True)  # before the terminal reporter takes sys.stdout
def pytest_configure(config):
    """Only rank 0 prints; what the others have to say is in build/test-logs."""
    global _comm
    if not config.getoption("--with-mpi"):
        return
    from mpi4py import MPI

    _comm = MPI.COMM_WORLD.Dup()
    if _comm.rank > 0:
        base = config.rootpath if os.access(config.rootpath, os.W_OK) else Path(tempfile.gettempdir())
        log = base / "build" / "test-logs" / f"rank-{_comm.rank}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        sys.stdout = log.open("w", buffering=1)


def pytest_itemcollected(item):
    """A test that asks for the world is one of ranks, and one that asks for that of GPUs is one of those."""
    asked = getattr(item, "fixturenames", ())
    for mark in ("mpi",) * ("world" in asked) + ("mpi", "gpu") * ("gpu_world" in asked):
        item.add_marker(mark)


def pytest_collection_modifyitems(config, items):
    """Deselect what cannot run in this job; nothing is skipped."""
    size = 0 if _comm is None else _comm.size
    asked = "cluster" in config.getoption("markexpr")
    kept = [item for item in items if _can_run(item, size) and (asked or not item.get_closest_marker("cluster"))]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def pytest_collection_finish():
    """What is there by now stays: no collection of a test goes through all of torch, which takes 0.3 s each time."""
    gc.collect()
    gc.freeze()


def _can_run(item, size):
    marks = list(item.iter_markers("mpi"))
    if marks and size < max(mark.kwargs.get("min_size", 1) for mark in marks):
        return False
    if item.get_closest_marker("large") and size != _LARGE_NEEDS:
        return False
    return item.get_closest_marker("gpu") is None or torch.cuda.is_available() or "HPCDIST_TEST_GPU" in os.environ


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before pytest-timeout looks
def pytest_runtest_protocol(item):
    """The deadlines are those of a quiet machine."""
    own = item.get_closest_marker("timeout")
    seconds = own.args[0] if own else float(item.config.getoption("timeout") or item.config.getini("timeout"))
    item.add_marker(pytest.mark.timeout(seconds * slowness()), append=False)
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item):
    return (yield from _together(item))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item):
    return (yield from _together(item))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item):
    try:
        return (yield from _together(item))
    finally:
        item.config.get_terminal_writer().flush()  # what is printed survives an abort of the job


def _together(item):
    """A phase of a test that fails on one rank fails on all, and all go on to the next one together."""
    if _comm is None or item.get_closest_marker("mpi") is None:
        return (yield)
    error = None
    result = None
    try:
        result = yield
    except (Exception, pytest.fail.Exception, pytest.skip.Exception) as caught:
        error = caught
    elsewhere = failures_elsewhere(_comm, error)
    if error is not None:
        if elsewhere is not None:
            error.add_note(f"and on the other ranks:\n{elsewhere}")
        raise error
    if elsewhere is not None:
        pytest.fail(f"failed on another rank (its traceback is in build/test-logs)\n{elsewhere}", pytrace=False)
    return result


@pytest.fixture(scope="session")
def world():
    """The world of all ranks, over torch's backend HPCDIST_TEST_BACKEND if that is set; it is left at the end of the
    program, as a user's is."""
    return hpcdist.init(backend=os.environ.get("HPCDIST_TEST_BACKEND"))


@pytest.fixture(params=[1, 2], ids=["one node", "two nodes"])
def comm(request, world, monkeypatch):
    """All ranks, as if they were on one node or on two; of three ranks, the first and the last on the same."""
    change_settings(monkeypatch, world, node_of=tuple(rank % request.param for rank in range(world.world_size)))
    comm = world.comm.Dup()
    yield comm
    comm.Free()


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A new folder, in which the test runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def alone(here):
    """A world of one rank, in a folder of its own."""
    with hpcdist.init(device="cpu") as world:
        yield world


@pytest.fixture
def rank(world):
    return world.rank


@pytest.fixture
def size(world):
    return world.world_size


@pytest.fixture
def last(size):
    """The last rank."""
    return size - 1


@pytest.fixture
def findings(world):
    """What a test finds wrong, on all ranks: told at its end."""
    found = Findings(world.comm)
    yield found
    found.settle()


@pytest.fixture
def folder(world):
    """A new folder, the same for all ranks, that is gone afterwards; where HPCDIST_TEST_FOLDER says, if it is set."""
    base = os.environ.get("HPCDIST_TEST_FOLDER")
    make = partial(tempfile.mkdtemp, prefix="hpcdist-test-", dir=base)
    path = Path(objects.run_on_root(world.comm, "a folder for the test", make))
    yield path
    world.comm.Barrier()
    if world.rank == 0:
        shutil.rmtree(path)
