"""A job that calls torch.distributed alone: ``process_groups.py CASE``."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

import hpcdist as hd

LIMIT = timedelta(seconds=float(os.environ.get("LIMIT", "60")))


def init() -> None:
    global rank, size, x
    dist.init_process_group("mpi", timeout=LIMIT)
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.full((3,), float(rank))


def step() -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
    model(torch.ones(2, 3)).sum().backward()


def worlds() -> None:
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


def call(asynchronous: bool) -> None:
    opts = dist.AllreduceOptions()
    opts.timeout, opts.asyncOp = timedelta(seconds=1), asynchronous
    late(lambda: dist.group.WORLD.allreduce([x], opts).wait())


def late(*steps: Callable[[], object]) -> None:
    """Each rank but 1, which does not come, makes another call."""
    if rank == 1:
        time.sleep(1000)
    steps[rank // 2]()


def hung() -> None:
    step()
    late(step, lambda: dist.recv(x, 1))


def group_timeout() -> None:
    group = dist.new_group(timeout=timedelta(seconds=1))
    late(lambda: dist.all_reduce(x, group=group, async_op=True).wait())


def world_timeout() -> None:
    group = dist.new_group()
    late(lambda: dist.all_reduce(x, group=group))


def aborted() -> None:
    group = dist.new_group()
    if rank == 0:
        work = dist.all_reduce(x, group=group, async_op=True)
        time.sleep(0.2)
        group.abort()  # does not wait for the others, which never come
        del work
    dist.barrier()
    print("survived", flush=True)
    os._exit(0)


def raises() -> None:
    if rank == 1:
        raise RuntimeError("a mistake of rank 1")
    dist.barrier()


def monitored() -> None:
    group = dist.group.WORLD
    own = getattr(group, "monitored_barrier", None)
    barrier = own if type(group) is not dist.ProcessGroup else dist.monitored_barrier
    barrier()
    late(lambda: barrier(timeout=timedelta(seconds=0.5), wait_all_ranks=True), lambda: barrier(wait_all_ranks=True))


case = sys.argv[1]
init()
if case == "worlds":
    dist.destroy_process_group()
eval(case if ")" in case else f"{case}()")
print("survived", flush=True)
