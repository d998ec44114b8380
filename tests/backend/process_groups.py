"""A job that calls torch.distributed alone: ``process_groups.py CASE``."""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import hpcdist as hd

case = sys.argv[1]


def step() -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
    model(torch.ones(2, 3)).sum().backward()


if case == "gloo":
    world = hd.init(backend="gloo")
    assert dist.get_backend() == "gloo"
elif case == "init":
    world = hd.init()
    assert dist.get_backend() == "mpi"
else:
    dist.init_process_group("mpi", timeout=timedelta(seconds=float(os.environ.get("LIMIT", "60"))))
rank, size = dist.get_rank(), dist.get_world_size()
assert size == int(sys.argv[2])
x = torch.full((3,), float(rank))

if case in ("alone", "init", "gloo"):
    dist.all_reduce(x)
    assert x.tolist() == [sum(range(size))] * 3
    step()
    assert hd.concat(torch.tensor([rank])).tolist() == list(range(size))
    assert hd.concat(torch.tensor([rank]), route="gloo").tolist() == list(range(size))
    assert hd.init().world_size == size  # and again, with the group that there is
    assert hd.concat(torch.tensor([rank]), group=dist.group.WORLD).tolist() == list(range(size))
    for _ in range(2):  # groups end, and begin again
        dist.destroy_process_group()
        dist.init_process_group("mpi")
        group = dist.new_group(list(range(size)))
        dist.all_reduce(x, group=group)
    dist.all_reduce(torch.ones(3), async_op=True)  # neither waited for nor destroyed
    dist.isend(x, (rank + 1) % size) if size > 1 else None
    dist.irecv(x.clone(), (rank - 1) % size) if size > 1 else None
elif case == "destroyed":
    dist.all_reduce(x)
    dist.destroy_process_group()
elif case == "hung":
    step()
    if rank == 1:
        time.sleep(1000)
    step()
elif case == "group_timeout":
    group = dist.new_group(timeout=timedelta(seconds=1))
    if rank == 1:
        time.sleep(1000)
    dist.all_reduce(x, group=group, async_op=True).wait()
elif case == "world_timeout":
    group = dist.new_group()
    if rank == 1:
        time.sleep(1000)
    dist.all_reduce(x, group=group)
elif case == "aborted":
    group = dist.new_group()
    if rank == 0:
        work = dist.all_reduce(x, group=group, async_op=True)
        time.sleep(0.2)
        group.abort()  # does not wait for the others, which never come
    dist.barrier()
    print("survived", flush=True)
    os._exit(0)
elif case == "call_timeout":
    opts = dist.AllreduceOptions()
    opts.timeout, opts.asyncOp = timedelta(seconds=1), os.environ["ASYNC"] == "1"
    if rank == 1:
        time.sleep(1000)
    dist.group.WORLD.allreduce([x], opts).wait()
elif case == "different":
    dist.broadcast(x, 0) if rank else dist.all_reduce(x)
    dist.barrier()
    dist.barrier()
elif case == "recv":
    if rank == 1:
        time.sleep(1000)
    dist.recv(x, 1)
elif case == "killed":
    step()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(x)
elif case == "raises":
    if rank == 1:
        raise RuntimeError("a mistake of rank 1")
    dist.barrier()
elif case == "monitored":
    group = dist.group.WORLD
    barrier = (
        getattr(group, "monitored_barrier", None) if type(group) is not dist.ProcessGroup else dist.monitored_barrier
    )
    barrier()
    if rank == 1:
        time.sleep(60)
    barrier(timeout=timedelta(seconds=0.5), wait_all_ranks=True)
print("survived", flush=True)
