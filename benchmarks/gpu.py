"""Ragged concat of GPU memory, and the copy of a save in the background, beside what people write by hand, in ms.

mpirun -n 2 python benchmarks/gpu.py
mpirun -n 2 python benchmarks/gpu.py --device cpu --sizes 8,65536     # whether this script runs; no figures of a GPU

Where ranks share a GPU (NCCL_MULTI_RANK_GPU_ENABLE=1), read the ratios: the times are not those of two GPUs.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import harness
import torch
import torch.distributed as dist
from mpi4py import MPI

import hpcdist as hd
from hpcdist.tensors import accelerator

LARGE = 2**26  # bytes; from here, fewer and single calls
MEMORY = Path("/dev/shm")  # where the file of a save takes least time


def counts_of(x: torch.Tensor) -> list[int]:
    """The number of elements of each rank, exchanged in memory of the tensor's device."""
    counts = torch.empty(dist.get_world_size(), dtype=torch.int64, device=x.device)
    dist.all_gather_into_tensor(counts, torch.tensor([len(x)], device=x.device))
    return counts.tolist()


def padded(x: torch.Tensor) -> torch.Tensor:
    """Sizes exchanged, padding to the longest, all_gather_into_tensor, then what is not padding."""
    counts = counts_of(x)
    longest = max(counts)
    mine = torch.zeros(longest, dtype=x.dtype, device=x.device)
    mine[: len(x)] = x
    every = torch.empty(len(counts) * longest, dtype=x.dtype, device=x.device)
    dist.all_gather_into_tensor(every, mine)
    return torch.cat([every[r * longest : r * longest + n] for r, n in enumerate(counts)])


def as_objects(x: torch.Tensor) -> torch.Tensor:
    """all_gather_object."""
    found: list[torch.Tensor] = [x] * dist.get_world_size()
    dist.all_gather_object(found, x)
    return torch.cat([y.to(x.device) for y in found])


def listed(x: torch.Tensor) -> torch.Tensor:
    """Sizes exchanged, then all_gather into a list of views of the result: NCCL broadcasts each, in a group."""
    counts = counts_of(x)
    whole = torch.empty(sum(counts), dtype=x.dtype, device=x.device)
    dist.all_gather(list(whole.split(counts)), x)
    return whole


def staged(x: torch.Tensor) -> torch.Tensor:
    """A copy to the host, mpi4py's Allgatherv, and a copy back."""
    counts = MPI.COMM_WORLD.allgather(len(x))
    whole = torch.empty(sum(counts), dtype=x.dtype)
    MPI.COMM_WORLD.Allgatherv(x.cpu().numpy(), [whole.numpy(), counts])
    return whole.to(x.device)


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        accelerator.synchronize(device)


def measure(
    world: hd.World,
    contenders: Mapping[str, Callable[[], object]],
    rounds: int,
    calls: int,
    after: Callable[[], object] = lambda: None,
) -> None:
    """Time contenders in turn, a call on the slowest rank, and print each beside the first one; `after` each, call
    something that is not timed. Collective."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for round_ in range(rounds):
        for name in random.Random(round_).sample(list(contenders), len(contenders)):
            synchronize(world.device)
            world.comm.Barrier()
            start = time.perf_counter()
            for _ in range(calls):
                contenders[name]()
            synchronize(world.device)
            mine = (time.perf_counter() - start) / calls * 1e3
            after()
            times[name].append(world.comm.allreduce(mine, op=MPI.MAX))
    if world.rank == 0:
        first = statistics.median(next(iter(times.values())))
        for name, of_one in times.items():
            middle, spread = statistics.median(of_one), f"{min(of_one):.3f} to {max(of_one):.3f}"
            print(f"  {name:30s}{middle:9.3f} ms ({spread}), {middle / first:6.2f} times the first", flush=True)


def concat(world: hd.World, nbytes: int) -> None:
    """Ragged concat: rank 0 holds `nbytes`, the others half of it. Collective."""
    gpu = world.device.type != "cpu"
    contenders = {"hpcdist, auto": hd.concat, "by hand, padded": padded, "by hand, staged": staged}
    if gpu:  # gloo refuses a list of different sizes
        contenders["by hand, list all_gather"] = listed
    if nbytes <= LARGE:
        contenders["by hand, all_gather_object"] = as_objects
    for route in ("nccl", "mpi", "gloo") if gpu else ("mpi", "gloo"):
        contenders[f"hpcdist, {route}"] = lambda x, route=route: hd.concat(x, route=route)
    n = max(1, nbytes // 8 // (1 if world.rank == 0 else 2))
    x = torch.arange(n, device=world.device) + 10**9 * world.rank
    for name, call in contenders.items():  # each rank looks at its own part and at both ends of the others'
        found, counts = call(x), world.comm.allgather(n)
        at = sum(counts[: world.rank])
        ends = [found[end].item() for r in range(len(counts)) for end in (sum(counts[:r]), sum(counts[: r + 1]) - 1)]
        expected = [value for r, count in enumerate(counts) for value in (10**9 * r, 10**9 * r + count - 1)]
        if len(found) != sum(counts) or not torch.equal(found[at : at + n], x) or ends != expected:
            raise SystemExit(f"{name}: wrong data")
    if world.rank == 0:
        print(f"concat, {nbytes:,} bytes on rank 0, {world.world_size} ranks")
    calls = {name: lambda call=call: call(x) for name, call in contenders.items()}
    measure(world, calls, *((15, 5) if nbytes < LARGE else (5, 1)))


def save(world: hd.World, nbytes: int, folder: Path) -> None:
    """A save in the background, until the call returns: the target is 1.15 times the plain copy. Collective."""
    x = torch.zeros(max(1, nbytes // 8), dtype=torch.int64, device=world.device)
    host = accelerator.host_buffer(x.nbytes, pinned=world.device.type != "cpu").view(x.dtype)
    handles: list[hd.Handle[None]] = []

    def begin() -> None:
        handles.append(hd.staging.save(folder / "x.h5", x, async_op=True))

    def end() -> None:
        while handles:
            handles.pop().wait()

    begin()  # takes new memory
    end()
    if world.rank == 0:
        print(f"save in the background, {nbytes:,} bytes per rank, {world.world_size} ranks")
    measure(world, {"copy to pinned memory": lambda: host.copy_(x), "until save() returns": begin}, 9, 1, end)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    help_ = "bytes of rank 0's shard; others hold half of it"
    parser.add_argument("--sizes", type=harness.sizes, default="8,64K,16M,256M,2G", help=help_)
    parser.add_argument("--device", help="cpu: whether this script runs")
    asked = parser.parse_args()
    with hd.init(device=asked.device) as world, harness.shared_folder(world.comm, MEMORY, "gpu") as folder:
        if world.device.type != "cpu" and not world.settings.own_gpus:
            raise SystemExit("each rank needs a GPU, or NCCL_MULTI_RANK_GPU_ENABLE=1 with NCCL 2.30.3 or later")
        for nbytes in asked.sizes:
            concat(world, nbytes)
        save(world, max(asked.sizes) // 2, folder)


if __name__ == "__main__":
    main()
