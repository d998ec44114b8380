"""A job with groups of gloo whose deadline is 4 s: ``gloo_groups.py CASE``."""

import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import hpcdist as hd

case = sys.argv[1]
world = hd.init(backend="gloo", timeout=60)
group = dist.new_group(timeout=timedelta(seconds=4))
x = torch.ones(4)
dist.all_reduce(x)
dist.all_reduce(x, group=group)
if case in ("hang", "async") and world.rank == 1:
    time.sleep(1000)
if case == "hang":
    dist.all_reduce(x, group=group)
elif case == "async":
    dist.all_reduce(x, group=group, async_op=True)
    time.sleep(1000)
elif case == "different":
    dist.all_reduce(x, group=group) if world.rank else dist.broadcast(x, 0, group=group)
    dist.barrier(group=group)
elif case == "alone":
    for _ in range(2):
        work = dist.all_reduce(x, group=group, async_op=True)
        time.sleep(5)
    work.wait()
    dist.destroy_process_group(group)
print("survived", flush=True)
