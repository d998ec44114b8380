"""Ragged concat of GPU memory: hpcdist's routes, and what people write by hand. Prints milliseconds.

mpirun -n 2 python benchmarks/gpu.py

Where ranks share a GPU (NCCL_MULTI_RANK_GPU_ENABLE=1), read the ratios: the times are not those of two GPUs.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist

import hpcdist as hd

ROUNDS, CALLS = 15, 5


def padded(x: torch.Tensor) -> torch.Tensor:
    """Sizes exchanged, padding to the longest, all_gather_into_tensor, then what is not padding."""
    size = dist.get_world_size()
    counts = torch.empty(size, dtype=torch.int64, device=x.device)
    dist.all_gather_into_tensor(counts, torch.tensor([len(x)], device=x.device))
    longest = int(counts.max())
    mine = torch.zeros(longest, dtype=x.dtype, device=x.device)
    mine[: len(x)] = x
    every = torch.empty(size * longest, dtype=x.dtype, device=x.device)
    dist.all_gather_into_tensor(every, mine)
    return torch.cat([every[r * longest : r * longest + n] for r, n in enumerate(counts.tolist())])


def as_objects(x: torch.Tensor) -> torch.Tensor:
    """all_gather_object."""
    found: list[torch.Tensor] = [x] * dist.get_world_size()
    dist.all_gather_object(found, x)
    return torch.cat([y.to(x.device) for y in found])


def milliseconds(call: Callable[[], object], world: hd.World) -> float:
    """The slowest rank's time for a call, by events on its stream."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    world.comm.Barrier()
    begin.record()
    for _ in range(CALLS):
        call()
    end.record()
    end.synchronize()
    return max(world.comm.allgather(begin.elapsed_time(end) / CALLS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="8,65536,16777216", help="bytes of rank 0's shard; others hold half of it")
    sizes = [int(size) for size in parser.parse_args().sizes.split(",")]
    with hd.init() as world:
        if not world.settings.own_gpus:
            raise SystemExit("each rank needs a GPU, or NCCL_MULTI_RANK_GPU_ENABLE=1 with NCCL 2.30.3 or later")
        routes = {route: lambda x, route=route: hd.concat(x, route=route) for route in ("nccl", "mpi", "gloo")}
        contenders = {"hpcdist, auto": hd.concat, "by hand, padded": padded, "by hand, all_gather_object": as_objects}
        contenders |= {f"hpcdist, {route}": call for route, call in routes.items()}
        for nbytes in sizes:
            n = max(1, nbytes // 8 // (1 if world.rank == 0 else 2))
            x = torch.arange(n, device=world.device) + 10**9 * world.rank
            expected = torch.cat(world.comm.allgather(x.cpu()))
            for name, call in contenders.items():
                if not torch.equal(call(x).cpu(), expected):
                    raise SystemExit(f"{name}: wrong data")
            times: dict[str, list[float]] = {name: [] for name in contenders}
            for _ in range(ROUNDS):
                for name, call in contenders.items():
                    times[name].append(milliseconds(lambda call=call, x=x: call(x), world))
            if world.rank == 0:
                first = statistics.median(times["hpcdist, auto"])
                print(f"{nbytes:,} bytes on rank 0, {world.world_size} ranks")
                for name, of_one in times.items():
                    middle, lowest, highest = statistics.median(of_one), min(of_one), max(of_one)
                    spread = f"{lowest:.3f} to {highest:.3f}"
                    print(f"  {name:28s}{middle:9.3f} ms ({spread}), {middle / first:6.2f} times auto")


if __name__ == "__main__":
    main()
