"""A job of which some ranks do something else than the others: ``hanging.py RANK:REASON+...,... VERB,...``.

Rank r calls the verb at place r of the list, or its last one.
"""

import contextlib
import ctypes
import fcntl
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.utils.data import DataLoader, Dataset

import hpcdist as hd

x = torch.ones(300)  # too large to travel behind a header: no rank has all of it before the others have sent theirs
used = []  # communicators that verbs have been called with
groups = []  # of ranks 0 and 1, not used yet
whole = []  # with a gradient


class Slow(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, item):
        time.sleep(1000)
        return item


def busy():
    while True:
        pass


def sleep():
    time.sleep(1000)


def fifo():
    with tempfile.TemporaryDirectory() as folder:
        os.mkfifo(f"{folder}/fifo")
        os.read(os.open(f"{folder}/fifo", os.O_RDWR), 1)


def lock():
    with tempfile.TemporaryDirectory() as folder:
        first, second = (os.open(f"{folder}/locked", os.O_RDWR | os.O_CREAT) for _ in range(2))
        fcntl.flock(first, fcntl.LOCK_EX)
        fcntl.flock(second, fcntl.LOCK_EX)


def loader():
    for _ in DataLoader(Slow(), num_workers=1, multiprocessing_context="fork"):
        pass


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def native():
    ctypes.PyDLL(None).sleep(1000)


def other():
    hd.recv(source=0)


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def os_exit():
    os._exit(5)


def os_exit_0():
    os._exit(0)


def in_a_child(end):
    """What a forked child does is its own affair."""
    with contextlib.suppress(hd.HpcdistError):  # it has no world
        raise AssertionError(hd.current())
    if end == "raise":
        raise RuntimeError("in a child")
    os._exit(3) if end == "os._exit" else sys.exit(int(end))


def threads():
    """More threads than have a record of their own, one after the other and at once; then it does not come."""
    for count in (1,) * 20 + (20,):
        comms = [MPI.COMM_SELF.Dup() for _ in range(count)]
        several = [threading.Thread(target=hd.concat, args=(x,), kwargs={"group": comm}) for comm in comms]
        for thread in several:
            thread.start()
        for thread in several:
            thread.join()
    time.sleep(1000)


def harmless():
    """Children that end in every way; then its current folder goes, and the next calls are made from a new place."""
    for end, status in (("0", 0), ("3", 3), ("raise", 1), ("os._exit", 3)):
        child = multiprocessing.get_context("fork").Process(target=in_a_child, args=(end,))
        child.start()
        child.join()
        assert child.exitcode == status
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    os.rmdir(folder)
    hd.concat(x)
    os.write(1, b"harmless\n")


def after():
    """The call of the others beside rank 1's `harmless`."""
    hd.concat(x)


CALLS = {
    "concat": lambda: hd.concat(x),
    "new_comm": lambda: hd.concat(x, group=used[1]),
    "new_group": lambda: hd.concat(x, group=groups[0]),
    "own_group": lambda: dist.new_group([1, dist.get_rank()], backend="mpi"),
    "load": lambda: hd.staging.load("hanging.h5"),
    "plan": lambda: hd.plan(hd.redistribute, x, hd.Split(0), hd.Replicate()),
    "backward": lambda: whole[0].sum().backward(),
    "recv": lambda: hd.recv(source=1),
    "irecv": lambda: hd.irecv(source=1).wait(),
    "split": lambda: hd.split(x),
    "save": lambda: hd.staging.save("hanging.h5", x),
    "finalize": hd.finalize,
    "end": lambda: None,
}


def shorten(limit):
    """A deadline that is shorter than the job takes to start, on a busy machine."""
    watch = hd.current()._stop._watch
    watch._limit = watch._patience = limit
    os.eventfd_write(watch._wake, 1)


def main(reasons, verbs):
    rank = MPI.COMM_WORLD.rank
    mine = dict(word.split(":") for word in reasons.split(",")).get(str(rank))
    if mine == "no_init":
        sleep()
    world = hd.init(backend=os.environ.get("BACKEND") or None)
    x.data = x.to(world.device)
    os.write(1, f"rank {rank} is {os.getpid()}\n".encode())
    hd.concat(x, async_op=True).wait()
    hd.concat(x)
    used.extend(MPI.COMM_WORLD.Split(0, -rank) for _ in range(2))  # of which the second is not used yet
    groups.append(dist.new_group([0, 1], backend="gloo"))
    hd.concat(x, group=used[0])
    whole.append(hd.concat(torch.ones(2, requires_grad=True)))
    shorten(float(os.environ["LIMIT"]))
    for step in mine.split("+") if mine else ():
        globals()[step]()
    CALLS[(verbs.split(",") * world.world_size)[rank] if "," in verbs else verbs]()
    os.write(1, f"survived {rank}\n".encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
