"""Worlds one after the other, each with NCCL on every rank's own GPU: ``mpirun -n N python tests/gpu/worlds.py``.

The GPU of its local rank, and with ``init(device=)`` the others the other way round; groups of some ranks and of each
backend, which with torch 2.15 and later are bound to that GPU; ragged data over route nccl. All on one node.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from mpi4py import MPI
from stand_in import STAND_IN, install, on_gpu

import hpcdist as hd
from hpcdist.runtime.registration import BINDS

sys.path.append(str(Path(__file__).parents[1] / "helpers"))
LOOPBACK = {"0100007F", "00000000000000000000000001000000"}


def listening():
    """Address and port of each socket of this process that listens, as the kernel writes them."""
    descriptors = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    own = {os.readlink(fd) for fd in descriptors if os.path.islink(fd)}
    found = set()
    for name in ("tcp", "tcp6"):
        with open(f"/proc/net/{name}") as table:
            rows = [line.split() for line in table][1:]
        found |= {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own}
    return found


def check(world):
    """All groups compute on this rank's GPU."""
    rank, size = world.rank, world.world_size
    assert STAND_IN or torch.cuda.current_device() == world.device.index
    assert dist.group.WORLD.bound_device_id == (world.device if BINDS and not STAND_IN else None)
    total = size * (size + 1) / 2

    def mine():
        return torch.full((3,), rank + 1.0, device=world.device)

    x = mine()
    dist.all_reduce(x)
    assert x.tolist() == [total] * 3, x
    whole = torch.zeros(3 * size, device=world.device)
    dist.all_gather_into_tensor(whole, mine())
    assert whole.tolist() == [r + 1.0 for r in range(size) for _ in range(3)], whole
    dist.reduce_scatter_tensor(x, whole)
    assert x.tolist() == [size * (rank + 1.0)] * 3, x
    for backend in (None, "gloo" if STAND_IN else "nccl", "mpi", "gloo"):
        for ranks in (list(range(size)), [0], [size - 1]):
            group = dist.new_group(ranks, backend=backend)
            if rank in ranks:
                x = mine()
                dist.all_reduce(x, group=group)
                assert x.tolist() == [sum(r + 1.0 for r in ranks)] * 3, (backend, ranks, x)
                barrier(world, group)
    if BINDS and not STAND_IN:  # before, torch splits only a group that the program has bound
        halves = [half for half in (list(range(0, size, 2)), list(range(1, size, 2))) if half]
        x = mine()
        dist.all_reduce(x, group=dist.split_group(split_ranks=halves))
        assert x.tolist() == [sum(r + 1.0 for r in halves[rank % 2])] * 3, x
    for route in ("nccl", "gloo", "mpi"):
        whole = hd.concat(torch.full((rank, 2), rank, device=world.device), route=route)
        assert on_gpu(whole) and whole[:, 0].tolist() == [r for r in range(size) for _ in range(r)], (route, whole)
    barrier(world)


def barrier(world, group=None):
    """On this rank's GPU, which torch before 2.15 would have to guess for NCCL."""
    nccl = "nccl" in dist.get_backend_config(group)
    dist.barrier(group, device_ids=[world.device.index] if nccl else None)


def main():
    """Two worlds; the environment stays the user's: torchrun's variables are gone at the end."""
    gpus, rank = torch.cuda.device_count(), MPI.COMM_WORLD.rank
    MPI.COMM_WORLD.Barrier()
    environ, before = dict(os.environ), listening()
    install()
    for device in (None, f"cuda:{gpus - 1 - rank % gpus}" if gpus else "cpu"):
        with hd.init(device=device) as world:
            check(world)
            if BINDS and gpus:  # before, NCCL starts when the program first needs it, and finds an interface by itself
                beyond = {address for address in listening() - before if address.split(":")[0] not in LOOPBACK}
                assert not beyond, beyond
        assert dict(os.environ) == environ
    os.write(1, f"rank {rank}: right\n".encode())


main()
