"""Asynchronous calls of backend "mpi": in their order, at the same time as other work, with their errors."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from collective import assert_on_all_ranks, several_ranks

from hpcdist.backend import works
from hpcdist.comm.worker import Worker

pytestmark = pytest.mark.mpi


def test_calls_are_done_in_their_order(size):
    """Each is a step of one computation, which another order would change."""
    x, expected = torch.ones(100), torch.ones(100)
    handles = []
    for turn in range(20):
        handles.append(dist.all_reduce(x, async_op=True))
        expected = expected * size
        if turn % 3 == 0:
            dist.broadcast(x, turn % size)  # blocks, after all before it
            assert_on_all_ranks(torch.equal(x, expected), f"turn {turn}")
        if turn % 5 == 4:
            for handle in handles:
                handle.wait()
            x.fill_(1.0)
            expected = torch.ones(100)
    assert all(handle.is_completed() and handle.is_success() for handle in handles)


@several_ranks
def test_a_call_goes_on_while_the_program_does_something_else(world, size):
    x, other = torch.ones(3), torch.zeros(3)
    if world.rank == 0:
        handle = dist.all_reduce(x, async_op=True)  # before the others, which need the message first
        for rank in range(1, size):
            dist.send(torch.full((3,), 7.0), rank)
    else:
        dist.recv(other, 0)
        handle = dist.all_reduce(x, async_op=True)
    handle.wait()
    assert_on_all_ranks(x.tolist() == [size] * 3, x)


@several_ranks
def test_messages_do_not_mix_with_those_of_collectives(world, size):
    """Both travel over the group's communicator. Here a recv from any rank waits before a collective that sends."""
    group, rank, n = dist.new_group(), world.rank, 5000
    received, x, out = torch.zeros(n), torch.full((size * n,), float(rank)), torch.zeros(size * n)
    message = dist.irecv(received, group=group)
    dist.all_to_all_single(out, x, [n] * size, [n] * size, group=group)
    large = torch.full((2**22,), float(rank))
    dist.broadcast(large, 1, group=group)
    dist.isend(torch.full((n,), rank + 0.5), (rank + 1) % size, group=group).wait()
    message.wait()
    assert_on_all_ranks(out.view(size, n).mean(1).tolist() == list(range(size)), out)
    assert_on_all_ranks(large.min() == large.max() == 1 and (received == (rank - 1) % size + 0.5).all(), received)
    dist.destroy_process_group(group)


def test_futures_and_results(world, findings):
    x = torch.full((4,), float(world.rank))
    work = dist.all_reduce(x, async_op=True)
    halved = work.get_future().then(lambda future: future.value()[0] / 2)
    total = torch.full((4,), float(sum(range(world.world_size))))
    findings.same(halved.wait(), total / 2, "then()")
    findings.same(work.result()[0], total, "result()")


def test_an_error_reaches_who_waits(monkeypatch):
    class Team:
        number, size, begun = 0, 1, 0  # of more ranks, the job would end
        worker = Worker("test")

    def fail(team):
        raise OSError("no such wire")

    work = works.Queued("all_reduce", Team(), fail, [])
    with pytest.raises(OSError, match="no such wire"):
        work.wait()
    assert work.is_completed() and not work.is_success() and isinstance(work.exception(), OSError)
    with pytest.raises(RuntimeError, match="OSError: no such wire"):  # torch's futures keep the text of an error
        work.get_future().wait()


@several_ranks
def test_wait_has_a_time_limit(world, rank):
    world.comm.Barrier()
    if rank == 0:
        handle = dist.all_reduce(torch.ones(2), async_op=True)
        message = dist.irecv(torch.zeros(2), 1)
        for work in (handle, message):
            with pytest.raises(TimeoutError, match="timed out"):
                work.wait(timedelta(milliseconds=50))
        world.comm.Barrier()
        handle.wait()
        message.wait()
    else:
        world.comm.Barrier()
        time.sleep(0.01)
        dist.all_reduce(torch.ones(2))
        if rank == 1:
            dist.send(torch.ones(2), 0)


def test_a_group_may_be_made_while_an_asynchronous_call_waits(world, rank):
    """Open MPI makes one communicator at a time: an all_reduce that made one for itself waited for that group."""
    parent = dist.new_group()
    small, large = torch.ones(3), torch.ones(2**20)
    if rank == 0:
        time.sleep(0.3)
    handles = [dist.all_reduce(x, group=parent, async_op=True) for x in (small, large)]
    if rank == 0:
        for handle in handles:
            handle.wait()
    group = dist.new_group()
    for handle in handles:
        handle.wait()
    assert_on_all_ranks(large[0] == small[0] == world.world_size, large)
    dist.destroy_process_group(group)
    dist.destroy_process_group(parent)
