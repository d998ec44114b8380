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
import time

import torch
from mpi4py import MPI
from torch.utils.data import DataLoader, Dataset

import hpcdist as hd

x = torch.ones(3)


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


def wait_for_input() -> None:
    with contextlib.suppress(KeyboardInterrupt):
        time.sleep(1000)


def suspended() -> None:
    time.sleep(2.5)


def slow_save() -> None:
    """On all ranks: the windows of a save, each slow."""


def call(verb: str, world: hd.World) -> None:
    if verb == "recv":
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
    os.write(world._watch._waker, b"x")


def main(reason: str, verb: str, odd: str = "1") -> None:
    if reason == "no_init" and MPI.COMM_WORLD.rank == 1:
        sleep()
    world = hd.init()
    limit = float(os.environ["LIMIT"])
    os.write(1, f"rank {world.rank} is {os.getpid()}\n".encode())
    hd.concat(x, async_op=True).wait()
    hd.concat(x)
    shorten(world, limit)
    if reason == "slow_save":
        with tempfile.TemporaryDirectory() as folder:
            path = world.comm.bcast(f"{folder}/x.h5")
            slow = (lambda _: time.sleep(0.2)) if world.rank == 1 else None
            hd.staging.save(path, torch.ones(40, 64), window=1024, progress=slow)
            world.comm.Barrier()
    elif world.rank == int(odd):
        globals()[reason]()
    call(verb, world)
    os.write(1, f"survived {world.rank}\n".encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
