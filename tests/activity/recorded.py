"""A program for test_recording.py: calls of each kind on any number of ranks, or an end of another kind.

recorded.py WHAT [FOLDER]
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import hpcdist as hd

ROUNDS = 3


def calls(rank: int, size: int) -> None:
    for _ in range(ROUNDS):
        hd.concat(torch.ones(rank + 1, 2))
    hd.concat(torch.ones(100_000))
    hd.concat(torch.ones(5), async_op=True).wait()
    dist.all_reduce(torch.ones(10))
    work = dist.all_reduce(torch.ones(10_000), async_op=True)
    time.sleep(0.2)
    work.wait()
    x = torch.ones(4, requires_grad=True)
    hd.concat(x).sum().backward()
    if size > 1:
        even = dist.new_group(range(0, size, 2))
        if rank % 2 == 0:
            hd.concat(torch.ones(3), group=even)
        (hd.send if rank else hd.recv)(*((torch.ones(7), 0) if rank == 1 else (1,))) if rank < 2 else None
        if rank == 1:
            dist.send(torch.ones(6), 0)
        elif rank == 0:
            dist.recv(torch.empty(6), None)
    try:
        hd.concat(torch.ones(rank + 1 if rank else 2, 2), dim=1 + rank)
    except (hd.RankError, ValueError, TypeError, IndexError):
        hd.concat(torch.ones(1))


def main(what: str, folder: str | None = None) -> None:
    world = hd.init(trace=folder, timeout=3 if "hang" in what else None)
    rank, size = world.rank, world.world_size
    if what == "calls":
        calls(rank, size)
    elif what == "many":
        from hpcdist.activity import recording

        for i in range(recording.ROWS + 100):
            hd.concat(torch.ones(i // recording.ROWS + 1))
    elif what == "late":
        hd.concat(torch.ones(1))
        time.sleep(rank)
        hd.concat(torch.ones(1))
    elif what == "again":
        hd.concat(torch.ones(1))
        world.finalize()
        hd.init(trace=folder)
        hd.concat(torch.ones(1))
    elif what.startswith("lost"):  # the folder is removed while the job runs
        hd.concat(torch.ones(1))
        if rank == 0:
            assert folder is not None
            for path in Path(folder).iterdir():
                path.unlink()
            Path(folder).rmdir()
        if what == "lost in a hang":
            hd.concat(torch.ones(1))
            if rank == 0:
                hd.concat(torch.ones(1))
            time.sleep(1000)
    else:
        hd.concat(torch.ones(1))
        if rank == size - 1:
            if what == "hang":
                time.sleep(1000)
            if what == "error":
                raise OSError("made up")
            if what == "dead":
                os.kill(os.getpid(), signal.SIGKILL)
        hd.concat(torch.ones(2))
    print("end\n", end="", flush=True)


main(*sys.argv[1:])
