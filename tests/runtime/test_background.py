"""Asynchronous calls: several in flight, errors, timeouts, what runs meanwhile; and jobs that end with some open."""

import math
import re
import threading
import time
import weakref
from datetime import timedelta
from itertools import product

import pytest
import torch
from collective import refused, several_ranks
from launch import finished, limit, mpirun

import hpcdist as hd


@several_ranks
def test_it_goes_on_while_this_rank_does_other_things(world, last, rank, size, findings):
    """A late rank: the others have their hands free, done() says no, and wait() stops waiting when asked to."""
    gate = threading.Event()
    if rank == last:
        world.comm.Barrier()
        handle = hd.concat(torch.full((2,), rank), async_op=True)
    else:
        handle = hd.concat(torch.full((2,), rank), async_op=True)
        findings.check(not handle.done(), "done before the last rank has come")
        with pytest.raises(TimeoutError, match="it continues"):
            handle.wait(0.05)
        world.comm.Barrier()
    for _ in range(2000):  # nobody calls MPI here: the background does
        if handle.done():
            break
        gate.wait(0.01)
    findings.check(handle.done(), "not done by itself")
    findings.same(handle.wait(), torch.arange(size).repeat_interleave(2), "result")


@several_ranks
def test_an_error_comes_out_of_wait(world, size, findings):
    """The same on all ranks; what was begun before and after is not concerned."""
    good = hd.concat(torch.ones(2), async_op=True)
    bad = hd.concat(torch.ones(2, dtype=torch.float64 if world.rank else torch.float32), async_op=True)
    wrong = hd.gather(torch.ones(2), root=99, async_op=True)
    after = hd.concat(torch.ones(3), async_op=True)
    for handle in (bad, bad, wrong):
        refused("", handle.wait)
    findings.check(good.wait(60).numel() == 2 * size, "before")
    findings.check(after.wait(60).numel() == 3 * size, "after")


def test_a_wait_of_any_length(world, rank, size, findings):
    """Infinity is no limit, and so is what is longer than a thread can wait; a wrong one is this rank's own error."""
    x = torch.arange(3)
    peer = (rank + 1) % size
    received = hd.irecv((rank - 1) % size)
    for wrong in (-1, math.nan, -math.inf, "1", True, timedelta(seconds=-1), -(10**5000)):
        with pytest.raises((ValueError, TypeError), match="timeout"):
            received.wait(wrong)
    for short in (0, 0.001, timedelta(milliseconds=1)):
        with pytest.raises(TimeoutError, match="not done after"):
            received.wait(short)
    world.comm.Barrier()
    sent = hd.isend(x, peer)
    for long in (math.inf, 1e300, timedelta.max, 10**5000):
        findings.same(received.wait(long), x, f"{long:.3}" if isinstance(long, float) else "long")
        sent.wait(long)


def test_modes_of_the_caller_are_kept(findings):
    x = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        quiet = hd.concat(x, async_op=True)
    with torch.inference_mode():
        inferred = hd.concat(x.detach(), async_op=True)
    loud = hd.concat(x, async_op=True)
    findings.check(not quiet.wait(60).requires_grad, "no_grad")
    findings.check(inferred.wait(60).is_inference(), "inference_mode")
    findings.check(loud.wait(60).requires_grad, "a gradient")


def test_an_mpi_without_threads(world, monkeypatch):
    """Said at once, and not found out by a crash."""
    from mpi4py import MPI

    monkeypatch.setattr(MPI, "Query_thread", lambda: MPI.THREAD_SERIALIZED)
    for step in (lambda: hd.concat(torch.ones(1), async_op=True), lambda: hd.irecv(), lambda: hd.isend(1, 0)):
        with pytest.raises(hd.HpcdistError, match="MPI_THREAD_MULTIPLE"):
            step()


# --- jobs ------------------------------------------------------------------------------------------------------------

BEGIN = """
import torch, hpcdist as hd
world = hd.init()
x = torch.full((1000,), float(world.rank))
"""


# Worlds one after the other: a finalize() that was refused, and is repeated; messages that nobody receives; calls that
# all ranks have begun and nobody waits for, some of which fail; and a rank that ends while another one calls.
ENDS = """
import os
def say(text): os.write(1, f"{text}\\n".encode())
hd.concat(x, async_op=True).wait()
for turn in range(3):
    try: world.finalize() if world.rank == turn % 2 else hd.concat(x)
    except hd.RankError as error: say("refused")
    assert hd.concat(x).numel() == hd.concat(x, async_op=True).wait().numel() == 2000
world.finalize()
world = hd.init()
if world.rank == 0:
    hd.isend("small", 1)
    hd.isend(torch.zeros(10**6), 1)
else:
    hd.irecv(tag=5)
world.finalize()
world = hd.init()
handles = [hd.concat(x, async_op=True) for _ in range(5)]
bad = [hd.concat(x, route=("mpi", "gloo")[world.rank], async_op=True) for _ in range(2)]
try: bad[0].wait()
except hd.RankError: pass
world.finalize()
world = hd.init()
hd.concat(x, async_op=True).wait()
if world.rank == 0:
    try: hd.concat(x, async_op=True).wait(30)
    except hd.RankError as error: say(error)
"""


@pytest.mark.both
def test_worlds_that_end_with_calls_under_way():
    job = finished(2, code=BEGIN + ENDS)
    assert job.out.count("refused\n") == 6, job.out
    assert job.err.count("hpcdist: concat() failed, and wait() was not called: RankError('concat() was refused") == 2
    assert "rank 1: called finalize(), or reached the end of its program" in job.out


def test_a_failure_in_the_background_ends_the_job():
    job = mpirun(
        2,
        code=BEGIN
        + """
from hpcdist.routes import mpi
def broken(*args):
    raise OSError("the network is gone")
if world.rank == 1:
    mpi.Mpi.prepare = broken
handle = hd.concat(x, async_op=True)
import time
import weakref
time.sleep(50)
""",
    )
    assert job.status != 0
    assert "the network is gone" in job.err and "failed in the middle of a transfer" in job.err


def test_a_message_for_which_there_is_no_memory_ends_the_job():
    """Its sender waits for this rank."""
    job = mpirun(
        2,
        code=BEGIN
        + """
from hpcdist.process import machine
machine.capacity = lambda: (2 * 10**7, 2 * 10**7)
if world.rank == 0:
    hd.send(torch.zeros(10**7), 1)
else:
    hd.recv(0)
""",
    )
    assert job.status != 0
    assert "more than the memory of this host" in job.err and "recv() failed in the middle" in job.err


DIFFERS = (
    BEGIN
    + """
odd = world.rank == 1
def show(call):
    try:
        print(f"[{call()}]")
    except hd.RankError as error:
        print(f"[{error}]")
"""
)


def test_async_op_that_differs_is_told_in_the_next_call():
    """Rank 1 calls with async_op what the other calls without: its next call is not taken for that one."""
    code = """
hd.concat(x, async_op=True).wait()
handle = hd.concat(x, async_op=True) if odd else None
show(lambda: hd.concat(x))
os = __import__("os"); os.write(1, b"done\\n"); world.comm.Barrier()
os._exit(0)
"""
    job = mpirun(2, code=DIFFERS + code)
    assert job.out.count("with async_op, which must agree, is 2, where rank 0 has 1") == 2, job.out + job.err


def test_async_op_that_differs_is_told_at_the_deadline():
    """Where no other call follows, each waits for the other."""
    job = mpirun(
        2,
        code=DIFFERS
        + """
hd.concat(x, async_op=True).wait()
show(lambda: hd.concat(x, async_op=True).wait() if odd else hd.concat(x))
""",
        env=limit(2),
    )
    assert job.status != 0
    told = r"has not reached this call: .* with(out)? async_op, and this call is with(out)? it: async_op must agree"
    assert re.search(told, job.err), job.err


LATER = {
    "gather": lambda x, rank: hd.gather(x, async_op=True),
    "concat": lambda x, rank: hd.concat(x, async_op=True),
    "split": lambda x, rank: hd.split(x if rank == 0 else None, async_op=True),
    "redistribute": lambda x, rank: hd.redistribute(x, hd.Replicate(), hd.Split(0), async_op=True),
    "structure": lambda x, rank: hd.concat([x], async_op=True),
}


def test_a_handle_keeps_no_arguments_alive(world):
    """Whether it was waited for or not, where no gradient flows."""
    for verb, waited in product(LATER, (True, False)):
        x = torch.arange(4.0 * world.world_size)
        alive, handle = weakref.ref(x), LATER[verb](x, world.rank)
        if waited:
            handle.wait(30)
        del x
        end = time.monotonic() + 30
        while alive() is not None and time.monotonic() < end:
            time.sleep(0.001)
        assert alive() is None, (verb, waited)
        handle.wait(30)
