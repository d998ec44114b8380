"""A job: every verb on every route, against plain indexing of one whole tensor, on the hosts that it is told of.

mpirun python verbs.py 0,0,1,1      # the node of each rank
"""

import itertools
import os
import sys

import torch
import torch.distributed as dist
from cases import extents_of, whole_of
from collective import Battery, Findings

import hpcdist as hd

ROUTES = ("mpi", "gloo", "hdf5", "auto")
CASES = ("ragged", "zero first", "zero in the middle", "zero last", "all zero", "all on one rank")
LARGE = 1 << 18  # rows of 24 bytes for each of two ranks: no message of that size goes at once


def main(nodes):
    world = hd.init()
    size, findings = world.world_size, Findings(world.comm)
    check_world(world, nodes, findings)
    cases = [*(extents_of(case, size) for case in CASES), tuple(LARGE * (rank < 2) for rank in range(size))]
    for route in ROUTES:
        battery = Battery(world, route=route)
        battery.findings = findings
        for (turn, extents), dim in itertools.product(enumerate(cases), (0, 1)):
            shape = (3, sum(extents), 2) if dim else (sum(extents), 3, 2)
            whole = whole_of(shape, torch.bfloat16 if dim else torch.float32, salt=dim)
            battery.run(whole, dim, extents, turn % size)
        check_layouts(world, route, findings)
    check_messages(world, findings)
    findings.settle()
    lines = world.comm.gather(f"rank {world.rank} of node {world.node}: {findings.checked} checks")
    if lines is not None:
        print("\n".join(lines))
    world.finalize()


def check_world(world, nodes, findings):
    mine = nodes[world.rank]
    expected = (len(nodes), mine, max(nodes) + 1, nodes[: world.rank].count(mine))
    found = (world.world_size, world.node, world.nodes, world.local_rank)
    findings.check(found == expected, f"size, node, nodes and local rank are {found}, expected {expected}")
    findings.check(os.uname().nodename == f"node{mine + 1}", f"node {mine} is {os.uname().nodename}")
    x = torch.tensor([world.rank + 1.0])
    dist.all_reduce(x)  # torch's own gloo group
    findings.check(x.item() == sum(range(world.world_size + 1)), f"all_reduce gives {x.item()}")


def check_layouts(world, route, findings):
    size = world.world_size
    whole = whole_of((7, 5), torch.float64)
    ragged = (0, *(1 for _ in range(size - 2)), 7 - (size - 2))
    grid = (1, size) if size % 2 else (2, size // 2)
    layouts = [hd.Split(0), hd.Split(1), hd.Split(0, ragged), hd.Block(grid, (0, 1)), hd.Replicate()]
    for src, dst in itertools.permutations(layouts, 2):
        x, expected = hd.local(whole, src).clone(), hd.local(whole, dst).contiguous()
        findings.same(hd.redistribute(x, src, dst, route=route), expected, f"{route}: {src} to {dst}")
        handle = hd.redistribute(x, src, dst, route=route, async_op=True)
        findings.same(handle.wait(30), expected, f"{route}: {src} to {dst}, async")


def check_messages(world, findings):
    """Each pair of ranks, in both directions, blocking and not; an empty tensor among what is sent."""
    rank, size = world.rank, world.world_size
    for source, dest in itertools.permutations(range(size), 2):
        x = whole_of((1 << 17,), torch.float32, salt=source)
        if rank == source:
            hd.send({"large": x, "text": "a"}, dest, tag=source)
        elif rank == dest:
            got = hd.recv(source, tag=source)
            findings.same(got["large"], x, f"send from {source} to {dest}")
            findings.check(got["text"] == "a", got["text"])
    sends = [hd.isend(whole_of((rank, 5), torch.int32, salt=dest), dest) for dest in range(size)]
    for source, handle in [(source, hd.irecv(source)) for source in range(size)]:
        findings.same(handle.wait(30), whole_of((source, 5), torch.int32, salt=rank), "isend")
    for handle in sends:
        handle.wait(30)


if __name__ == "__main__":
    main([int(node) for node in sys.argv[1].split(",")])
