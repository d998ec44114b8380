"""Results for which there is no memory: the same error on all ranks before data move, and the job goes on."""

import gc
import resource
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from collective import change_settings, refused

import hpcdist as hd
from hpcdist.collectives import results


@pytest.fixture(autouse=True)
def low(monkeypatch):
    """All results are large."""
    monkeypatch.setattr(results, "LARGE", 0)
    monkeypatch.setattr(results, "AGREED", 0)


CALLS = {
    "concat": lambda x, rank, plan: hd.concat(x),
    "gather": lambda x, rank, plan: hd.gather(x, root=0),
    "split": lambda x, rank, plan: hd.split(x if rank == 0 else None),
    "redistribute": lambda x, rank, plan: hd.redistribute(x, hd.Split(0), hd.Replicate()),
    "all_reduce": lambda x, rank, plan: hd.all_reduce(x),
    "all_to_all": lambda x, rank, plan: hd.all_to_all(x, dim=1),
    "plan": lambda x, rank, plan: plan(x),
    "structures": lambda x, rank, plan: hd.concat({"x": x}),
    "async_op": lambda x, rank, plan: hd.concat(x, async_op=True).wait(60),
}


@pytest.mark.parametrize("limits", [(999, 10**9), (10**9, 999)], ids=["its own", "its node's"])
@pytest.mark.parametrize("verb", CALLS)
def test_more_than_there_is(findings, world, rank, size, verb, limits, monkeypatch):
    x = torch.full((100 * size, 10), rank, dtype=torch.uint8)
    plan = hd.plan(hd.redistribute, x, hd.Split(0), hd.Replicate())
    with monkeypatch.context() as patch:
        change_settings(patch, world, memory=(limits,) * size)
        error = refused("[HD310]", CALLS[verb], x, rank, plan)
        together = "" if limits[0] == 999 else ", and the results on its node"
        findings.check(together in str(error) and "its result has" in str(error), error)
    findings.check(CALLS[verb](x, rank, plan) is not None or rank, "the next call")


@contextmanager
def less_than(nbytes):
    """A context in which this process can have no more memory than `nbytes`, as after ``ulimit -v``."""
    gc.collect()  # what an error of before still holds
    hd.memory.empty_cache()
    size = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmSize"))
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (int(size.split()[1]) * 1024 + nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("verb", [*CALLS, "columns", "parts of structures"])
def test_memory_that_one_rank_cannot_have(findings, world, last, size, verb, monkeypatch):
    monkeypatch.undo()  # the limits are as they are
    calls = CALLS | {
        "columns": lambda x, rank, plan: hd.concat(x, dim=1),
        "gather": lambda x, rank, plan: hd.gather(x, root=last),
        "parts of structures": lambda x, rank, plan: hd.split({"x": x} if rank == 0 else None),
    }
    call = calls[verb]
    # Results of 80 MiB: malloc() keeps up to 64 MiB of what was freed, and reserves as much for a thread.
    splits = verb in ("split", "parts of structures", "all_to_all")
    small, x = torch.ones(size, 10), torch.ones(1, 2**20 * (20 if splits else 10))
    x = x.expand(size, -1) if splits else x
    plan = hd.plan(hd.redistribute, x, hd.Split(0), hd.Replicate())
    if verb != "plan":
        call(small, world.rank, plan)
    if size > 1:
        with less_than(2**22) if world.rank == last else nullcontext():
            refused("can't allocate memory", call, x, world.rank, plan, ranks=[last])
    findings.check(call(x, world.rank, plan) is not None or world.rank != last, "the next call")
