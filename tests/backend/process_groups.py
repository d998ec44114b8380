"""A job that makes torch's groups itself, in a world: ``process_groups.py CASE``."""

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from mpi4py import MPI

import hpcdist as hd

LIMIT = timedelta(seconds=float(os.environ.get("LIMIT", "60")))


def init():
    global rank, size, x
    hd.init()
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("mpi", timeout=LIMIT)
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.full((3,), float(rank))


def step():
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
    model(torch.ones(2, 3)).sum().backward()


def refused(text, backend="mpi", **options):
    try:
        dist.init_process_group(backend, **options)
    except Exception as error:
        assert text in str(error), error  # noqa: PT017
    else:
        raise AssertionError(text)


def told():
    """By arguments, which must agree with MPI; the import alone changes nothing of torch."""
    for backend in ("gloo", "mpi4py", None):
        refused("environment variable RANK expected, but not set", backend)
    refused("call hpcdist.init() first", "mpi4py", store=dist.HashStore(), rank=0, world_size=1)
    hd.init()
    dist.destroy_process_group()
    dist.init_process_group("gloo")
    dist.barrier()  # else a rank that still connects may see that another one has gone
    dist.destroy_process_group()
    refused(f"rank 0 of 7, but MPI has rank {rank} of {size}", store=dist.HashStore(), rank=0, world_size=7)
    refused(f"rank {rank} of 7, but MPI has rank {rank} of {size}", rank=rank, world_size=7)
    dist.init_process_group("mpi", rank=rank, world_size=size)  # as scripts do that read the launcher's variables
    dist.barrier()
    assert (dist.get_backend(), dist.get_world_size()) == ("mpi", size)
    dist.destroy_process_group()
    hd.finalize()


def worlds():
    """Begun by torch's own function and by init(), over MPI and gloo; all is left as it is at the end."""
    for begin, name in ((hd.init, "mpi"), (lambda: hd.init(backend="gloo"), "gloo"), (init, "mpi")):
        begin()
        size = dist.get_world_size()
        assert dist.get_backend() == name
        x = torch.full((3,), float(rank))
        dist.all_reduce(x)
        assert x.tolist() == [sum(range(size))] * 3
        step()
        for options in ({}, {"route": "gloo"}, {"group": dist.group.WORLD}):
            assert hd.concat(torch.tensor([rank]), **options).tolist() == list(range(size))
        assert hd.init().world_size == size  # and again, with the group that there is
        hd.finalize()
        if dist.is_initialized():
            dist.destroy_process_group()
    for _ in range(2):  # groups end, and begin again
        init()
        dist.all_reduce(x, group=dist.new_group(list(range(size))))
        dist.destroy_process_group()
    init()
    dist.all_reduce(torch.ones(3), async_op=True)  # neither waited for nor destroyed
    if size > 1:
        dist.isend(x, (rank + 1) % size)
        dist.irecv(x.clone(), (rank - 1) % size)


def call(asynchronous):
    opts = dist.AllreduceOptions()
    opts.timeout, opts.asyncOp = timedelta(seconds=1), asynchronous
    if asynchronous:
        dist.group.WORLD.allreduce([x], opts).wait()
    dist.group.WORLD.allreduce([x], opts)


def late(*steps):
    """Each rank but 1, which does not come, makes another call."""
    if rank == 1:
        time.sleep(1000)
    steps[max(0, rank - 1)]()


def hung():
    """By the deadline of the job."""
    step()
    group = dist.new_group()
    late(step, lambda: dist.recv(x, 1), lambda: dist.all_reduce(x, group=group))


def timeouts():
    """Of a group, and of a call."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    late(
        lambda: dist.all_reduce(x, group=group, async_op=True).wait(),
        *(lambda: call(False), lambda: call(True)),
    )


def raises():
    """After a group that is aborted, which waits for nobody."""
    group = dist.new_group()
    if rank == 0:
        work = dist.all_reduce(x, group=group, async_op=True)
        time.sleep(0.2)
        group.abort()  # does not wait for the others, which never come
        del work
    dist.barrier()
    print("aborted", flush=True)
    if rank == 1:
        raise RuntimeError("a mistake of rank 1")
    dist.barrier()


def monitored():
    group = dist.group.WORLD
    own = getattr(group, "monitored_barrier", None)
    barrier = own if type(group) is not dist.ProcessGroup else dist.monitored_barrier
    barrier()
    late(lambda: barrier(timeout=timedelta(seconds=0.5), wait_all_ranks=True), lambda: barrier(wait_all_ranks=True))


case = sys.argv[1]
if case == "worlds":
    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    told()
else:
    init()
globals()[case]()
print("survived", flush=True)
