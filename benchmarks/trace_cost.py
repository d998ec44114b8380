"""What a trace costs: calls and a step of examples/train_ddp with HPCDIST_TRACE and without, in turns in one job.

mpirun -n 2 python benchmarks/trace_cost.py
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import hpcdist as hd
from hpcdist import activity
from hpcdist.examples.train_ddp import BATCH, network
from hpcdist.runtime.world import team_of

Case = tuple[str, int, Callable[[], Callable[[], object]]]  # name, calls of a batch, what makes the call in a world


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=9, help="worlds with a trace, and without (default 9)")
    parser.add_argument("--batches", type=int, default=5, help="of each case; the fastest counts (default 5)")
    given = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name, _, _ in CASES}
    order = random.Random(0)  # the same on all ranks
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(given.pairs):
            times: dict[bool, dict[str, float]] = {}
            for traced in order.sample([True, False], 2):
                with hd.init(trace=folder if traced else None) as world:
                    times[traced] = {name: fastest(given.batches, calls, make()) for name, calls, make in CASES}
                    rank, size = world.rank, world.world_size
            for name, pairs in found.items():
                pairs.append((times[False][name], times[True][name]))
    if rank == 0:
        kind = "of the processor" if size == 1 else "on the slowest rank"
        print(f"{size} ranks, {given.pairs} pairs; us {kind}: without a trace, and what it adds (quartiles)")
        for name, pairs in found.items():
            costs = sorted(on - off for off, on in pairs)
            low, high = costs[len(costs) // 4], costs[-1 - len(costs) // 4]
            off = median(off for off, _ in pairs)
            print(f"{name:24} {off:8.2f} {median(costs):+8.2f} ({low:+.2f} to {high:+.2f}) {median(costs) / off:+7.1%}")


def fastest(batches: int, calls: int, step: Callable[[], object]) -> float:
    """Return the time of a call in microseconds, on the slowest rank, of the fastest batch.

    Of a single rank it is the time of its processor, so that other programs do not count.
    """
    times, clock = [], time.process_time if dist.get_world_size() == 1 else time.perf_counter
    for _ in range(batches + 1):  # the first one warms up
        dist.barrier()
        begin = clock()
        for _ in range(calls):
            step()
        took = torch.tensor(clock() - begin)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        times.append(took.item() / calls * 1e6)
    return min(times[1:])


def record() -> Callable[[], object]:
    team = team_of()

    def step() -> None:
        with activity.InCall("concat", team, text=b"concat() at here.py:1"):
            pass

    return step


def concat(size: int) -> Callable[[], object]:
    x = torch.ones(size)
    return lambda: hd.concat(x)


def all_reduce() -> Callable[[], object]:
    x = torch.ones(2)
    return lambda: dist.all_reduce(x)


def train_ddp() -> Callable[[], object]:
    """A step as that of train_ddp.train()."""
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.rand(BATCH, 4), torch.rand(BATCH, 1)

    def step() -> None:
        optimizer.zero_grad()
        functional.mse_loss(model(x), y).backward()
        optimizer.step()

    return step


CASES: list[Case] = [
    ("the record alone", 2000, record),
    ("concat of 8 B", 300, lambda: concat(2)),
    ("concat of 64 KiB", 50, lambda: concat(2**14)),
    ("all_reduce of 8 B", 300, all_reduce),
    ("step of train_ddp", 50, train_ddp),
]


if __name__ == "__main__":
    main()
