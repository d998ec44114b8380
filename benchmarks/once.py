"""Single questions, whose answers are printed and not kept: each way in turn, the slowest rank counts.

mpirun -n 2 python benchmarks/once.py async_save --folder DIR    until a save in the background returns, beside a copy
mpirun -n 2 python benchmarks/once.py pages --folder DIR         the cost of keeping each page to one writing rank
mpirun -n 2 python benchmarks/once.py stopping                   world.should_stop() beside an all_reduce of 8 bytes
mpirun -n 2 python benchmarks/once.py small                      collectives of 8 bytes over "mpi" beside all_reduce
mpirun -n 2 python benchmarks/once.py weights --folder DIR       load(into=) beside plain reads, which keep one copy

DIR is on the disk to measure. On GPUs, async_save copies to pinned memory.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import harness
import torch
import torch.distributed as dist
from mpi4py import MPI
from report import duration, figure, table
from results import show_size
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard, distribute_tensor

import hpcdist as hd
from hpcdist.formats.plain import page_size
from hpcdist.tensors import accelerator
from hpcdist.tools.timing import spread

CACHES = 2**28  # bytes, more than the processor has
Ways = Mapping[str, Callable[[], Any]]


def compare(
    world: hd.World, title: str, ways: Ways, rounds: int, calls: int = 1, before: Callable[[], object] = lambda: None
) -> None:
    """Time each way in turn and print it beside the first one; waiting for its handle is not timed. Collective."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(-1, rounds):  # the first one warms up
        for name in random.Random(round_).sample(list(ways), len(ways)):
            before()
            _synchronize(world)
            world.comm.Barrier()
            start = time.perf_counter()
            for _ in range(calls):
                handle = ways[name]()
            _synchronize(world)
            mine = (time.perf_counter() - start) / calls
            if isinstance(handle, hd.Handle):
                handle.wait()
            slowest = world.comm.allreduce(mine, op=MPI.MAX)
            times[name] += [slowest] if round_ >= 0 else []
    rows, first = [], next(iter(times.values()))
    for name, found in times.items():
        all_, ratio = spread(found), spread([a / b for a, b in zip(found, first, strict=True)])
        rows.append(
            [name, duration(all_.median), f"{duration(all_.low)} to {duration(all_.high)}", figure(ratio.median)]
        )
    if world.rank == 0:
        print(table([f"{title}, np {world.world_size}", "median", "quartiles", "ratio"], rows), end="\n\n", flush=True)


def _synchronize(world: hd.World) -> None:
    if world.device.type != "cpu":
        accelerator.synchronize(world.device)


def async_save(world: hd.World, asked: argparse.Namespace, folder: Path) -> None:
    gpu = world.device.type != "cpu"
    for size in asked.sizes or harness.sizes("64M,256M"):
        for count in (1, 64, 256):
            path, each = folder / "x.h5", max(1, size // count // 4)
            state = {f"x{i}": torch.randn(each, device=world.device) for i in range(count)}
            copies = {name: accelerator.host_buffer(x.nbytes, pinned=gpu).view(x.dtype) for name, x in state.items()}
            other = torch.empty(CACHES // 4)

            def copy(state: Any = state, copies: Any = copies) -> None:
                for name, x in state.items():
                    copies[name].copy_(x)

            ways: Ways = {
                "copy to memory that exists": copy,
                "the same once more (control)": copy,
                "clone of each tensor": lambda state=state: [x.clone() for x in state.values()],  # type: ignore[misc]
                "save, async_op=True": partial(hd.staging.save, path, state, async_op=True),
                "save": partial(hd.staging.save, path, state),
            }
            # As a training step does: the caches hold neither the state nor memory for its copy.
            title = f"save of {show_size(size)} a rank in {count} tensors"
            compare(world, title, ways, asked.rounds, before=partial(other.add_, 1))


def pages(world: hd.World, asked: argparse.Namespace, folder: Path) -> None:
    states: dict[str, Any] = {
        "1 MiB a rank": torch.arange(2**17),
        "64 MiB a rank": torch.arange(2**23),
        "300 tensors of some 200 B a rank": {f"t{i}": torch.ones(50 + i % 10) for i in range(300)},
        "300 tensors of some 20 KB a rank": {f"t{i}": torch.ones(5000 + i % 10) for i in range(300)},
    }

    def save(state: Any, size: Callable[[str], int]) -> None:
        with mock.patch("hpcdist.formats.contents.page_size", size):
            hd.staging.save(folder / "x.h5", state, writer="posix")

    for name, state in states.items():
        ways = {"pages": partial(save, state, page_size), "single bytes": partial(save, state, lambda _: 1)}
        compare(world, name, ways, asked.rounds)


def stopping(world: hd.World, asked: argparse.Namespace, folder: Path) -> None:
    x, gloo = torch.zeros(1, dtype=torch.int64), dist.new_group(backend="gloo")
    ways: Ways = {
        "all_reduce of 8 bytes, backend mpi": partial(dist.all_reduce, x),
        "the same, gloo": partial(dist.all_reduce, x, group=gloo),
        "should_stop()": world.should_stop,
        "should_stop(every=10)": partial(world.should_stop, every=10),
    }
    compare(world, "stopping", ways, asked.rounds, calls=200)


def small(world: hd.World, asked: argparse.Namespace, folder: Path) -> None:
    size, x = world.world_size, torch.zeros(2)
    whole, blocks = torch.zeros(2 * size), [torch.zeros(2) for _ in range(size)]
    others = [torch.zeros(2) for _ in range(size)]
    of_root = blocks if world.rank == 0 else None
    ways: Ways = {
        "all_reduce": partial(dist.all_reduce, x),
        "all_gather_into_tensor": partial(dist.all_gather_into_tensor, whole, x),
        "all_gather": partial(dist.all_gather, blocks, x),
        "gather": partial(dist.gather, x, of_root, 0),
        "scatter": partial(dist.scatter, x, of_root, 0),
        "broadcast": partial(dist.broadcast, x, 0),
        "reduce": partial(dist.reduce, x, 0),
        "reduce_scatter_tensor": partial(dist.reduce_scatter_tensor, x, whole),
        "reduce_scatter": partial(dist.reduce_scatter, x, blocks),
        "all_to_all_single": partial(dist.all_to_all_single, whole, torch.zeros(2 * size)),
        "all_to_all": partial(dist.all_to_all, others, blocks),
        "barrier": dist.barrier,
    }
    compare(world, "8 bytes a rank and block", ways, asked.rounds, calls=200)


def weights(world: hd.World, asked: argparse.Namespace, folder: Path) -> None:
    """8 files of 8 tensors, from the disk each time. Of plain reads, each rank has a run of each file, or of each
    tensor."""
    rank, size, width = world.rank, world.world_size, 1024
    mesh = DeviceMesh("cpu", list(range(size)))
    nbytes = (asked.sizes or [2**29])[0]
    rows, paths = nbytes // 64 // width // 4, [folder / f"model-{i}-of-8.safetensors" for i in range(8)]
    names = {path: [f"{i}.{k}" for k in range(8)] for i, path in enumerate(paths)}
    if rank == 0:
        for path in paths:
            save_file({name: torch.randn(rows, width) for name in names[path]}, path)
        index = {name: path.name for path in paths for name in names[path]}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    world.comm.Barrier()
    length = paths[0].stat().st_size
    memory = [torch.zeros(length // size + 1, dtype=torch.uint8).numpy() for _ in paths]

    def plain() -> None:
        for i in range(8):
            at = (i + 8 * rank // size) % 8
            with open(paths[at], "rb", buffering=0) as file:
                file.seek(length * rank // size)
                file.readinto(memory[at])

    def plain_rows() -> None:
        nbytes = rows // size * width * 4
        for i in range(8):
            at = (i + 8 * rank // size) % 8
            with open(paths[at], "rb", buffering=0) as file:
                for k in range(8):
                    file.seek(length - (8 - k) * rows * width * 4 + rank * nbytes)
                    file.readinto(memory[at][k * nbytes : (k + 1) * nbytes])

    def model(placement: Placement | None) -> torch.nn.Module:
        made = torch.nn.ModuleList(torch.nn.ParameterList(torch.empty(rows, width) for _ in range(8)) for _ in paths)
        for module in made if placement else ():
            for k, x in enumerate(module):
                module[k] = torch.nn.Parameter(distribute_tensor(x.detach(), mesh, [placement]))
        return made

    def forget() -> None:
        for path in paths if rank == 0 else ():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    whole = model(None)
    ways: Ways = {
        "plain reads": plain,
        "the same once more (control)": plain,
        "plain reads of the rows of each rank": plain_rows,
        "into= rows of each rank": partial(hd.staging.load, folder, into=model(Shard(0))),
        "into= columns of each rank": partial(hd.staging.load, folder, into=model(Shard(1))),
        "into= all on each rank": partial(hd.staging.load, folder, into=whole),
    }
    compare(world, f"{show_size(nbytes)} in 8 files of 8 tensors", ways, asked.rounds, before=forget)


QUESTIONS = {"weights": weights, "async_save": async_save, "pages": pages, "stopping": stopping, "small": small}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", choices=QUESTIONS)
    parser.add_argument("--sizes", type=harness.sizes, metavar="LIST", help="bytes per rank, of all tensors")
    parser.add_argument("--rounds", type=int, default=15, help="samples of each way (%(default)s)")
    parser.add_argument("--folder", type=Path, default=tempfile.gettempdir(), help="for files (%(default)s)")
    parser.add_argument("--device", default="cpu", help="cuda for GPUs (%(default)s)")
    asked = parser.parse_args()
    with hd.init(device=asked.device) as world, harness.shared_folder(world.comm, asked.folder, "once") as folder:
        torch.set_num_threads(1)
        QUESTIONS[asked.question](world, asked, folder)


if __name__ == "__main__":
    main()
