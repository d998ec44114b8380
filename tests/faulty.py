"""A job with one fault: ``faulty.py JSON``, where JSON names the verb, route, number of calls, and the fault.

Every call is checked; wrong data end the job with status 99. The rank at fault says when it acts, and its process.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import h5py  # noqa: F401
import torch
from mpi4py import MPI

import hpcdist as hd

WRONG_DATA = 99
ROWS = 1000  # of a rank, at most


def shard(rank):
    """Ragged; its values encode the global row."""
    start = sum(range(rank)) * ROWS
    return torch.arange(start, start + rank * ROWS).reshape(-1, 1).repeat(1, 8)


def rounds(world, verb, route, folder):
    """One call of a verb, which says whether its result is right."""
    rank, size = world.rank, world.world_size
    mine, whole = shard(rank), torch.cat([shard(r) for r in range(size)])
    root, peer, before = size - 1, (rank + 1) % size, (rank - 1) % size

    def gather(_):
        got = hd.gather(mine, root=root, route=route)
        return torch.equal(got, whole) if rank == root else got is None

    def split(_):
        got = hd.split(whole if rank == 0 else None, counts=[r * ROWS for r in range(size)], route=route)
        return torch.equal(got, mine)

    def redistribute(_):
        layout = hd.Split(0, [r * ROWS for r in range(size)])
        return torch.equal(hd.redistribute(mine, layout, hd.Replicate(), route=route), whole)

    def structure(_):
        got = hd.concat({"x": mine, "rank": rank}, route=route)
        return torch.equal(got["x"], whole) and got["rank"] == list(range(size))

    def ring(_):
        sent = hd.isend(mine, peer)
        got = hd.recv(before)
        sent.wait()
        return torch.equal(got, shard(before))

    def save(i):
        hd.staging.save(folder / "saved.h5", mine, attrs={"": {"call": i}})
        return torch.equal(hd.staging.load(folder / "saved.h5", counts=[r * ROWS for r in range(size)]), mine)

    def concat(_):
        return torch.equal(hd.concat(mine, route=route), whole)

    def background(_):
        return torch.equal(hd.concat(mine, route=route, async_op=True).wait(), whole)

    def all_reduce(i):
        return torch.equal(hd.all_reduce(shard(2) * (rank + i), route=route), shard(2) * sum(range(i, size + i)))

    def all_to_all(_):
        got = hd.all_to_all([mine * size + other for other in range(size)], route=route)
        return torch.equal(torch.cat(got), whole * size + rank)

    every = (all_reduce, all_to_all, concat, background, gather, split, redistribute, structure, ring, save)
    return next(call for call in every if call.__name__ == verb)


def commit(fault, verb, world):
    """What the rank at fault does before its call."""
    if fault == "raise":
        raise RuntimeError(f"a mistake of rank {world.rank}")
    if fault == "os_exit":
        os._exit(5)
    if fault == "no_finalize":
        os._exit(0)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "hang":
        time.sleep(1000)
    if fault == "argument":
        mistake(verb)


def mistake(verb):
    """A call of that verb with an argument that is wrong on this rank alone."""
    x = torch.ones(3, 4)
    if verb == "ring":
        hd.isend(x, 99)
    elif verb == "redistribute":
        hd.redistribute(x, "rows", hd.Replicate())
    elif verb == "structure":
        hd.concat({"x": object()})
    elif verb == "save":
        hd.staging.save("x.h5", x, window=0)
    elif verb == "background":
        hd.concat(x, dim=7, async_op=True).wait()
    elif verb == "all_reduce":
        hd.all_reduce(x, "median")
    else:
        {"concat": hd.concat, "gather": hd.gather, "split": hd.split, "all_to_all": hd.all_to_all}[verb](x, dim=7)


def main(what):
    MPI.COMM_WORLD.Barrier()  # the first imports on a new machine take longer than a deadline
    world = hd.init(staging=what["folder"])
    call = rounds(world, what["verb"], what["route"], Path(what["folder"]))
    fault, last = what["fault"], what["calls"]
    i = 0
    while i < last:
        if world.rank == what["rank"] and i == what["at"]:
            said = {"time": time.time(), "pid": os.getpid()}
            Path(what["said"]).write_text(json.dumps(said))
            if fault in ("too_few", "too_many"):
                last += 1 if fault == "too_many" else -1
            if i == last:
                break
            commit(fault, what["verb"], world)
        if not call(i):
            print(f"WRONG DATA on rank {world.rank} in call {i}", file=sys.stderr, flush=True)
            sys.exit(WRONG_DATA)
        i += 1


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
