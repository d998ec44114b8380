"""world.should_stop() beside torch's all_reduce of 8 bytes: microseconds a call, in turn.

mpirun -n 2 python benchmarks/stopping.py --rounds 200
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import hpcdist as hd

CALLS = 200  # of a sample


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    rounds = parser.parse_args().rounds
    with hd.init(device="cpu") as world:
        x, gloo = torch.zeros(1, dtype=torch.int64), dist.new_group(backend="gloo")
        methods: dict[str, Callable[[], object]] = {
            "should_stop()": world.should_stop,
            "should_stop(every=10)": lambda: world.should_stop(every=10),
            "all_reduce, backend mpi": lambda: dist.all_reduce(x),
            "all_reduce, gloo": lambda: dist.all_reduce(x, group=gloo),
        }
        samples: dict[str, list[float]] = {name: [] for name in methods}
        for turn in range(rounds):
            for name in list(methods)[:: 1 if turn % 2 else -1]:
                world.comm.Barrier()
                begin = time.perf_counter()
                for _ in range(CALLS):
                    methods[name]()
                slowest = max(world.comm.allgather(time.perf_counter() - begin))
                samples[name].append(slowest / CALLS * 1e6)
        if world.rank == 0:
            base = samples["all_reduce, backend mpi"]
            for name, found in samples.items():
                ratio = statistics.median(a / b for a, b in zip(found, base, strict=True))
                low, middle, high = statistics.quantiles(found, n=4)
                print(f"{name:24} {middle:7.2f} us, {low:.2f} to {high:.2f}, {ratio:.2f} of all_reduce")


if __name__ == "__main__":
    main()
