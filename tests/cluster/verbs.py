"""A job: every verb on every route, against plain indexing of one whole tensor, on the hosts that it is told of.

mpirun python verbs.py 0,0,1,1      # the node of each rank
"""

from __future__ import annotations

import itertools
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from cases import extents_of, part, whole_of
from collective import Findings

import hpcdist as hd

ROUTES = ("mpi", "gloo", "hdf5", "auto")
CASES = ("ragged", "zero first", "zero in the middle", "zero last", "all zero", "all on one rank")
LARGE = 1 << 18  # rows of 24 bytes for each of two ranks: no message of that size goes at once


def main(nodes: list[int]) -> None:
    world = hd.init()
    findings = Findings(world.comm)
    check_world(world, nodes, findings)
    for route in ROUTES:
        for turn, case in enumerate(CASES):
            check_tensors(world, route, extents_of(case, world.world_size), turn % world.world_size, findings)
        check_tensors(world, route, tuple(LARGE * (rank < 2) for rank in range(world.world_size)), 1, findings)
        check_layouts(world, route, findings)
    check_messages(world, findings)
    findings.settle()
    lines = world.comm.gather(f"rank {world.rank} of node {world.node}: {findings.checked} checks")
    if lines is not None:
        print("\n".join(lines))
    world.finalize()


def check_world(world: hd.World, nodes: list[int], findings: Findings) -> None:
    mine = nodes[world.rank]
    expected = (len(nodes), mine, max(nodes) + 1, nodes[: world.rank].count(mine))
    found = (world.world_size, world.node, world.nodes, world.local_rank)
    findings.check(found == expected, f"size, node, nodes and local rank are {found}, expected {expected}")
    findings.check(os.uname().nodename == f"node{mine + 1}", f"node {mine} is {os.uname().nodename}")
    x = torch.tensor([world.rank + 1.0])
    dist.all_reduce(x)  # torch's own gloo group
    findings.check(x.item() == sum(range(world.world_size + 1)), f"all_reduce gives {x.item()}")


def check_tensors(world: hd.World, route: str, extents: tuple[int, ...], root: int, findings: Findings) -> None:
    for dim, dtype in ((0, torch.float32), (1, torch.bfloat16)):
        shape = (sum(extents), 3, 2) if dim == 0 else (3, sum(extents), 2)
        whole = whole_of(shape, dtype, salt=dim)
        shard = part(whole, dim, extents, world.rank)
        on_root = whole if world.rank == root else None
        for async_op in (False, True):
            options: dict[str, Any] = {"route": route, "async_op": async_op}
            results = [
                hd.gather(shard, dim, root, **options),
                hd.concat(shard, dim, **options),
                hd.split(on_root, dim, root, list(extents), **options),
            ]
            if async_op:  # all three were under way at once
                results = [handle.wait(30) for handle in results]
            gathered, joined, mine = results
            where = f"{options}, dim {dim}, extents {extents}, root {root}"
            if world.rank == root:
                findings.same(gathered, whole, f"gather {where}")
            else:
                findings.check(gathered is None, f"gather {where}: got a result, expected None")
            findings.same(joined, whole, f"concat {where}")
            findings.same(mine, shard.contiguous(), f"split {where}")


def check_layouts(world: hd.World, route: str, findings: Findings) -> None:
    size, shape = world.world_size, (7, 5)
    whole = whole_of(shape, torch.float64)
    ragged = (0, *(1 for _ in range(size - 2)), 7 - (size - 2))
    grid = (1, size) if size % 2 else (2, size // 2)
    layouts: list[Any] = [
        hd.Split(0),
        hd.Split(1),
        hd.Split(0, ragged),
        hd.Block(grid, (0, 1)),
        hd.Replicate(),
    ]
    for src, dst in itertools.permutations(layouts, 2):
        x = whole[index(src, shape, world)].clone()
        expected = whole[index(dst, shape, world)].contiguous()
        findings.same(hd.redistribute(x, src, dst, route=route), expected, f"{route}: {src} to {dst}")
        handle = hd.redistribute(x, src, dst, route=route, async_op=True)
        findings.same(handle.wait(30), expected, f"{route}: {src} to {dst}, async")


def index(layout: hd.layout.Layout, shape: tuple[int, ...], world: hd.World) -> tuple[slice, ...]:
    box = layout.boxes(shape, world.world_size)[world.rank]
    return tuple(slice(start, start + extent) for start, extent in zip(box.offset, box.shape, strict=True))


def check_messages(world: hd.World, findings: Findings) -> None:
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
