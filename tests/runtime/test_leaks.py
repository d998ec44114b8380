"""What a rank has is the same after many calls as after a few: the short form of benchmarks/leaks.py."""

import gc
import importlib.util
import sys
from pathlib import Path

import pytest
from collective import assert_on_all_ranks

pytestmark = pytest.mark.mpi

CALLS, GROUPS = 800, 100
ATTEMPTS = 3  # memory that is taken once may be taken late; what leaks grows every time
LEAST = {"isend, irecv": 2, "send, recv": 2}
KINDS = [
    *("gather, 12 B", "concat, 12 B", "split, 12 B", "redistribute, 12 B", "concat, ever other sizes"),
    *("concat of structures", "concat, with gradients", "concat, async_op", "concat, refused"),
    *("concat, 2 MiB from the pool", "concat, 2 MiB shared", "plans called", "plans made and dropped"),
    *("send, recv", "isend, irecv", "staging.save, load", "groups of communicators", "groups of torch"),
    *("torch.distributed, backend mpi", "groups of torch, backend mpi"),
]


@pytest.fixture(scope="module")
def leaks():
    path = Path(__file__).parents[2] / "benchmarks" / "leaks.py"
    spec = importlib.util.spec_from_file_location("leaks", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["leaks"] = module
    spec.loader.exec_module(module)
    gc.collect()
    gc.freeze()  # what other tests have imported: see conftest.py
    return module


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", [pytest.param(k, marks=pytest.mark.mpi(min_size=LEAST.get(k, 1))) for k in KINDS])
def test_many_calls_leave_nothing(world, leaks, folder, name):
    kind = leaks.KINDS[name]
    calls = max(20, CALLS // kind.one_of) if kind.one_of else GROUPS
    found = []
    for _ in range(ATTEMPTS):
        found = leaks.grow(world, kind, calls, folder).leaks()
        if not any(world.comm.allgather(bool(found))):
            break
    assert_on_all_ranks(not found, f"{name}, after {calls} more calls: {'; '.join(found)}")


def test_every_kind_of_the_benchmark_is_tested(leaks):
    own = {name for name in leaks.KINDS if "ever other" not in name}
    assert own <= set(KINDS) <= set(leaks.KINDS)


def test_a_leak_is_found(world, leaks, folder):
    kept = []

    def make(world, folder):
        def call(i):
            kept.append([world.comm.Dup(), {"objects": [i]}] if i % 10 == 0 else [i])

        return call

    found = " ".join(leaks.grow(world, leaks.Kind(make), 1000, folder).leaks())
    for each in kept[::10]:
        each[0].Free()
    assert_on_all_ranks("communicators: 100.0" in found and "objects" in found, found)
