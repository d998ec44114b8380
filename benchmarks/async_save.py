"""staging.save(async_op=True): time until the call returns, beside a copy of the state to memory that exists already.

mpirun -n 2 python benchmarks/async_save.py --folder DIR        DIR on the disk in question
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import harness
import torch
from mpi4py import MPI
from results import show_size

import hpcdist as hd

CACHES = 2**28  # bytes, more than the processor has
COUNTS = (1, 64, 256)  # tensors of a state


class State:
    """Tensors of `size` bytes in all, a copy of them to compare, and a file."""

    def __init__(self, world: hd.World, size: int, count: int, path: Path) -> None:
        self.comm, self.path = world.comm, path
        self.tensors = {f"x{i}": torch.randn(size // count // 4) for i in range(count)}
        self.copies = {name: torch.empty_like(x) for name, x in self.tensors.items()}
        self._other = torch.empty(CACHES // 4)
        self.complete: list[float] = []  # seconds from the call to the file's name

    def memcpy(self) -> None:
        for name, x in self.tensors.items():
            self.copies[name].copy_(x)

    def clone(self) -> None:
        for x in self.tensors.values():
            x.clone()

    def save(self) -> None:
        hd.staging.save(self.path, self.tensors)

    def save_later(self) -> Callable[[], object]:
        return hd.staging.save(self.path, self.tensors, async_op=True).wait

    def seconds(self, method: Callable[[State], Callable[[], object] | None]) -> float:
        """Return the time until a call returns on the slowest rank. Collective."""
        self._other.add_(1)  # as a training step does: the caches hold neither the state nor memory for its copy
        self.comm.Barrier()
        start = time.perf_counter()
        wait = method(self)
        mine = time.perf_counter() - start
        if wait is not None:
            wait()
            self.complete.append(time.perf_counter() - start)
        return float(self.comm.allreduce(mine, op=MPI.MAX))


METHODS: dict[str, Callable[[State], Callable[[], object] | None]] = {
    "memcpy": State.memcpy,
    "control: memcpy": State.memcpy,
    "clone of each tensor": State.clone,
    "save, async_op=True": State.save_later,
    "save": State.save,
}


def run(world: hd.World, asked: argparse.Namespace, folder: Path) -> None:
    torch.set_num_threads(1)
    for size in asked.sizes:
        for count in COUNTS:
            state = State(world, size, count, folder / "x.h5")
            state.memcpy()  # into new memory
            first = state.seconds(State.save_later) / state.seconds(State.memcpy)
            times: dict[str, list[float]] = {name: [] for name in METHODS}
            for round_ in range(asked.rounds):
                for name in random.Random(round_).sample(list(METHODS), len(METHODS)):
                    times[name].append(state.seconds(METHODS[name]))
            if world.rank:
                continue
            print(f"\nsave, np {world.world_size}, {show_size(size)} a rank in {count} tensors")
            print(f"{'until the call returns':28}{'ms':>8}{'ratio':>8}")
            for name, samples in times.items():
                pairs = [a / b for a, b in zip(samples, times["memcpy"], strict=True)]
                print(f"{name:28}{statistics.median(samples) * 1e3:8.1f}{statistics.median(pairs):8.2f}")
            done = statistics.median(state.complete) * 1e3
            print(f"the first call: {first:.2f} times a memcpy; until the file has its name: {done:.0f} ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=harness.sizes, default="64M,256M", help="bytes a rank (%(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="calls of each (%(default)s)")
    parser.add_argument("--folder", type=Path, default=tempfile.gettempdir(), help="folder for the file (%(default)s)")
    asked = parser.parse_args()
    with hd.init(device="cpu") as world, harness.shared_folder(world.comm, asked.folder, "async") as folder:
        run(world, asked, folder)


if __name__ == "__main__":
    main()
