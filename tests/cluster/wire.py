"""A job: what each verb puts on the wires of the hosts, counted from their interfaces, as one JSON object.

mpirun python wire.py 8 4 mpi,gloo     # MiB a rank, rounds, routes
"""

import json
import sys
import time
from itertools import pairwise
from pathlib import Path

import torch

import hpcdist as hd


def main(nbytes, rounds, routes):
    world = hd.init()
    measured = {}
    for route in routes:
        small, large = (verbs(world, route, size) for size in (world.world_size**2 * 8, nbytes))
        for name in large:
            small[name]()  # makes what connections there are to make
            # What TCP has to send again, when the machine is busy, comes on top: the least is the verb's own.
            found = [measure(world, large[name]) for _ in range(rounds)]
            measured[f"{name} {route}"] = min(found, key=lambda one: sum(one["received"]))
    if world.rank == 0:
        print(json.dumps(measured))
    world.finalize()


def verbs(world, route, nbytes):
    """Each verb, with `nbytes` a rank, or nearly."""
    rank, size = world.rank, world.world_size
    cols = nbytes // 8 // size
    x = torch.full((size, cols), rank, dtype=torch.float64)
    whole = torch.ones(size * size, cols, dtype=torch.float64) if rank == 0 else None
    everywhere = torch.ones(size * size, cols, dtype=torch.float64)
    near = near_rows(world, size)
    shifted = torch.ones(near[0][rank], cols, dtype=torch.float64)
    found = {
        "gather": lambda: hd.gather(x, route=route),
        "split": lambda: hd.split(whole, route=route),
        "concat": lambda: hd.concat(x, route=route),
        "concat of a structure": lambda: hd.concat({"x": x, "rank": rank}, route=route),
        "rows to columns": lambda: hd.redistribute(x, hd.Split(0), hd.Split(1), route=route),
        "rows within the nodes": lambda: hd.redistribute(shifted, *(hd.Split(0, c) for c in near), route=route),
        "copies to rows": lambda: hd.redistribute(everywhere, hd.Replicate(), hd.Split(0), route=route),
    }
    if route == "mpi":
        found["concat shared"] = lambda: hd.concat(x, shared=True)
        found["send"] = lambda: message(world, x, size - 1)
        if world.local_rank == 1 or size > world.nodes:
            found["send within a node"] = lambda: message(world, x, 1)
    return found


def near_rows(world, size):
    """The rows of each rank before and after some have moved, but none to another node."""
    nodes = world.comm.allgather(world.node)
    before, after = [size] * len(nodes), [size] * len(nodes)
    for rank, (node, next_node) in enumerate(pairwise(nodes)):
        if node == next_node:
            after[rank] -= size // 2
            after[rank + 1] += size // 2
    return tuple(before), tuple(after)


def message(world, x, dest):
    if world.rank == 0:
        hd.isend(x, dest).wait(60)
    elif world.rank == dest:
        assert hd.irecv(0).wait(60).shape == x.shape


def measure(world, step):
    """Bytes that each node has received and sent; the same on all ranks."""
    before = counted(world)
    step()
    after = counted(world)
    nodes = world.comm.allgather((world.local_rank, [b - a for a, b in zip(before, after, strict=True)]))
    traffic = [changes for local_rank, changes in nodes if local_rank == 0]
    return {"received": [t[0] for t in traffic], "sent": [t[1] for t in traffic]}


def counted(world):
    """Bytes received and sent by this host's wire so far."""
    world.comm.Barrier()
    time.sleep(0.01)  # acknowledgements may still be on their way
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    values = next(line.split(":")[1].split() for line in lines if line.strip().startswith("eth0:"))
    world.comm.Barrier()
    return int(values[0]), int(values[8])


if __name__ == "__main__":
    main(int(sys.argv[1]) << 20, int(sys.argv[2]), *(names.split(",") for names in sys.argv[3:]))
