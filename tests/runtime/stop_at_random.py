"""``stop_at_random.py TRIALS FILE``: a training that is stopped and resumed TRIALS times, by a signal to any rank."""

import os
import random
import signal
import subprocess
import sys

import torch
import torch.distributed as dist
from mpi4py import MPI

import hpcdist as hd

COMM = MPI.COMM_WORLD
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
ROWS = 1000


def trial(number, path, draw):
    """Go on from the file until the ranks have stopped, and save. Returns the number of steps."""
    who, sent, after = draw.randrange(COMM.size), draw.choice(SIGNALS), draw.random() * 0.2
    world = hd.init(stop_on=SIGNALS)
    step, x = 0, torch.zeros(ROWS + COMM.rank)
    if number:
        state = hd.staging.load(path, verify=True)
        step, x = int(hd.staging.load(path, "step", dim=None)), state["x"]
        assert (x == step).all(), (number, step, x)
    begin = step
    if COMM.rank == who:  # from outside: it arrives anywhere, also in MPI
        killer = subprocess.Popen(["sh", "-c", f"sleep {after:.4f}; kill -{int(sent)} {os.getpid()}"])
    while not world.should_stop(every=1 + number % 3):
        step += 1
        x += 1
        total = torch.tensor([step])
        dist.all_reduce(total)
        assert total.item() == step * COMM.size  # no rank has gone one step further
    assert world.stop_reason == f"rank {who} received {sent.name}"
    assert set(COMM.allgather((step, world.stop_reason))) == {(step, world.stop_reason)}
    if COMM.rank == who:
        assert killer.wait() == 0
    hd.staging.save(path, {"x": x, "step": torch.full((1 if COMM.rank == 0 else 0,), step)}, dim=0)
    world.finalize()
    return step - begin


if __name__ == "__main__":
    draw = random.Random(COMM.bcast(random.randrange(2**32)))
    done = [trial(number, sys.argv[2], draw) for number in range(int(sys.argv[1]))]
    if COMM.rank == 0:
        print(len(done), "trials,", sum(done), "steps, at most", max(done))
