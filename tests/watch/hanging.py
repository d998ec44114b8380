"""A job in which rank 1, or another one, does something else than the others: ``hanging.py REASON VERB [RANK]``."""

from __future__ import annotations

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
used: list[MPI.Intracomm] = []  # communicators that verbs have been called with
groups: list[dist.ProcessGroup] = []  # of ranks 0 and 1, not used yet
whole: list[torch.Tensor] = []  # with a gradient


class Slow(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 4

    def __getitem__(self, item: int) -> int:
        time.sleep(1000)
        return item


def busy() -> None:
    while True:
        pass


def sleep() -> None:
    time.sleep(1000)


def fifo() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.mkfifo(f"{folder}/fifo")
        os.read(os.open(f"{folder}/fifo", os.O_RDWR), 1)


def lock() -> None:
    with tempfile.TemporaryDirectory() as folder:
        first, second = (os.open(f"{folder}/locked", os.O_RDWR | os.O_CREAT) for _ in range(2))
        fcntl.flock(first, fcntl.LOCK_EX)
        fcntl.flock(second, fcntl.LOCK_EX)


def loader() -> None:
    for _ in DataLoader(Slow(), num_workers=1, multiprocessing_context="fork"):
        pass


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def native() -> None:
    ctypes.PyDLL(None).sleep(1000)


def other() -> None:
    time.sleep(0.5)  # the others wait for longer, and are the first to raise, on a busy machine, too
    hd.recv(source=0)


def in_background() -> None:
    hd.concat(x, async_op=True).wait()


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def os_exit() -> None:
    os._exit(5)


def os_exit_0() -> None:
    os._exit(0)


def child() -> None:
    process = multiprocessing.get_context("fork").Process(target=os._exit, args=(3,))
    process.start()
    process.join()
    assert process.exitcode == 3


def in_a_child(end: str) -> None:
    """What a forked child does is its own affair."""
    assert sys.modules["hpcdist.runtime.world"]._world is None
    if end == "raise":
        raise RuntimeError("in a child")
    sys.exit(int(end))


def children() -> None:
    for end, status in (("0", 0), ("3", 3), ("raise", 1)):
        child = multiprocessing.get_context("fork").Process(target=in_a_child, args=(end,))
        child.start()
        child.join()
        assert child.exitcode == status


def closed() -> None:
    sys.stdout.close()
    raise RuntimeError("a mistake")


def threads() -> None:
    """More threads than have a record of their own, one after the other and at once; then it does not come."""
    for count in (1,) * 20 + (20,):
        comms = [MPI.COMM_SELF.Dup() for _ in range(count)]
        several = [threading.Thread(target=hd.concat, args=(x,), kwargs={"group": comm}) for comm in comms]
        for thread in several:
            thread.start()
        for thread in several:
            thread.join()
    time.sleep(1000)


def no_folder() -> None:
    """Its current folder goes; the next call is made from a place that has not been seen."""
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    os.rmdir(folder)


def wait_for_input() -> None:
    with contextlib.suppress(KeyboardInterrupt):
        time.sleep(1000)


def suspended() -> None:
    time.sleep(2.5)


def slow_save() -> None:
    """On all ranks: the windows of a save, each slow."""


def call(verb: str, world: hd.World) -> None:
    if verb == "new_comm":
        hd.concat(x, group=used[1])
    elif verb == "new_group":
        hd.concat(x, group=groups[0])
    elif verb == "free_comm":
        used[0].Free()
    elif verb == "load":
        hd.staging.load(os.path.join(tempfile.gettempdir(), "hanging.h5"))
    elif verb == "plan":
        hd.plan(hd.redistribute, x, hd.Split(0), hd.Replicate())
    elif verb == "backward":
        whole[0].sum().backward()
    elif verb == "recv":
        hd.recv(source=1)
    elif verb == "irecv":
        hd.irecv(source=1).wait()
    elif verb == "split":
        hd.split(x)
    elif verb.startswith("gather_"):
        hd.gather(x, route=verb.partition("_")[2])
    elif verb == "save":
        hd.staging.save(os.path.join(tempfile.gettempdir(), f"hanging-{os.getppid()}.h5"), x)
    elif verb == "finalize":
        world.finalize()
    elif verb == "concat":
        hd.concat(x)


def shorten(world: hd.World, limit: float) -> None:
    """A deadline that is shorter than the job takes to start, on a busy machine."""
    world._watch._limit = world._watch._patience = limit
    os.eventfd_write(world._watch._wake, 1)


def main(reason: str, verb: str, odd: str = "1") -> None:
    if reason == "no_init" and MPI.COMM_WORLD.rank == 1:
        sleep()
    world = hd.init(backend=os.environ.get("BACKEND") or None)
    x.data = x.to(world.device)
    limit = float(os.environ["LIMIT"])
    os.write(1, f"rank {world.rank} is {os.getpid()}\n".encode())
    hd.concat(x, async_op=True).wait()
    hd.concat(x)
    used.extend(MPI.COMM_WORLD.Split(0, -world.rank) for _ in range(2))  # of which the second is not used yet
    groups.append(dist.new_group([0, 1], backend="gloo"))
    hd.concat(x, group=used[0])
    whole.append(hd.concat(torch.ones(2, requires_grad=True)))
    shorten(world, limit)
    if reason == "slow_save":
        with tempfile.TemporaryDirectory() as folder:
            path = world.comm.bcast(f"{folder}/x.h5")
            slow = (lambda _: time.sleep(0.2)) if world.rank == 1 else None  # the others wait for it at the end
            hd.staging.save(path, torch.ones(40, 64), window=1024, progress=slow)
            world.comm.Barrier()
    elif world.rank == int(odd):
        globals()[reason]()
    call(verb, world)
    os.write(1, f"survived {world.rank}\n".encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
