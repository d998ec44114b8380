"""A program for test_recording.py: calls of each kind on any number of ranks, or an end of another kind.

recorded.py WHAT [FOLDER]
"""

import os
import re
import shutil
import signal
import sys
import time

import torch
import torch.distributed as dist
from mpi4py import MPI

import hpcdist as hd
from hpcdist import activity
from hpcdist.activity import recording

ROUNDS = 3


def calls(rank, size):
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


def lose(folder):
    """Remove the folder while the job runs."""
    hd.concat(torch.ones(1))
    if hd.current().rank == 0:
        shutil.rmtree(folder)
    hd.concat(torch.ones(1))


def many(rank, size):
    for i in range(recording.ROWS + 100):
        hd.concat(torch.ones(i // recording.ROWS + 1))


def late(rank, size):
    hd.concat(torch.ones(1))
    time.sleep(rank)
    hd.concat(torch.ones(1))


def refusals():
    """Without a folder nothing is recorded; one that cannot be written is an error on all ranks."""
    rank = MPI.COMM_WORLD.rank
    with hd.init():
        hd.concat(torch.ones(1))
        assert activity.thread_records[0].keep is recording.current is None
    for ranks, wrong, text in (
        ((1,), "file/x", "rank 1: (FileExists|NotADirectory)Error"),
        ((0, 1), "/proc/x", "/proc/x"),
        ((1,), 5, "rank 1: trace must be a folder, got int"),
        ((0,), None, "trace is"),
    ):
        try:
            hd.init(trace=wrong if rank in ranks else "good")
        except hd.RankError as error:
            assert re.search(text, str(error)), error  # noqa: PT017
        else:
            raise AssertionError(text)
    with hd.init(trace="good"):
        try:
            hd.init(trace="other")
        except ValueError:
            os.write(1, b"refused\n")


def main(what, folder=None):
    if what == "worlds":  # one after the other: of calls, of too many or late ones, and one whose folder is lost
        rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
        for step in (calls, late if size > 1 else many):
            with hd.init(trace=folder):
                step(rank, size)
        with hd.init(trace=f"{folder}-lost"):
            lose(f"{folder}-lost")
        return
    if "lost" in what:
        refusals()
    world = hd.init(trace=folder)
    hd.concat(torch.ones(1))
    if folder and "lost" in what:
        lose(folder)
    world.comm.Barrier()
    if world.rank == world.world_size - 1:
        time.sleep(1000 if "hang" in what else 1)  # the other ranks are in their next call
        if what == "error":
            raise OSError("made up")
        if what == "dead":
            os.kill(os.getpid(), signal.SIGKILL)
    hd.concat(torch.ones(2))


main(*sys.argv[1:])
