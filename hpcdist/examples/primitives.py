"""Call every primitive of torch.distributed once, and print what each rank had and got.

mpirun -n 3 python -m hpcdist.examples.primitives
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

import hpcdist as hd

Row = tuple[str, Tensor | None, Tensor | None]  # primitive, input and output of this rank; None for nothing


def main() -> None:
    """Run all primitives and print the table on rank 0. Collective over all ranks of the job."""
    with hd.init() as world:
        x = 10.0 * world.rank + torch.arange(1, world.world_size + 1, device=world.device)  # 1 2 3, 11 12 13, ...
        line = "{:19} | {:29} | {}".format
        if world.rank == 0:
            print(line("primitive", "what each rank had", "what each rank got"))
        for name, had, got in (*with_a_root(x, world), *all_to_all(x, world), *pairs(x, world)):
            ranks = world.comm.gather((show(had), show(got)))  # on rank 0
            if ranks is not None:
                print(line(name, *map(" ".join, zip(*ranks, strict=True))))


def with_a_root(x: Tensor, world: hd.World) -> Iterator[Row]:
    """Send from rank 0 to every rank, the same tensor or one part to each; and from every rank to rank 0."""
    root, one = world.rank == 0, x[:1]
    got = one.clone()
    dist.broadcast(got, src=0)
    yield "broadcast", one, got

    got = torch.empty_like(one)
    dist.scatter(got, [*x.chunk(world.world_size)] if root else None, src=0)
    yield "scatter", x if root else None, got

    parts = [*torch.empty_like(x).chunk(world.world_size)] if root else None
    dist.gather(one, parts, dst=0)
    yield "gather", one, None if parts is None else torch.cat(parts)

    got = one.clone()
    dist.reduce(got, dst=0, op=dist.ReduceOp.SUM)
    yield "reduce, sum", one, got if root else None  # elsewhere, the result is undefined


def all_to_all(x: Tensor, world: hd.World) -> Iterator[Row]:
    """Send from every rank to every rank."""
    one = x[:1]
    parts = [*torch.empty_like(x).chunk(world.world_size)]
    dist.all_gather(parts, one)
    yield "all_gather", one, torch.cat(parts)

    for name in ("sum", "avg", "min", "max", "product"):
        got = one.clone()
        dist.all_reduce(got, getattr(dist.ReduceOp, name.upper()))
        yield f"all_reduce, {name}", one, got

    got = torch.empty_like(one)
    dist.reduce_scatter(got, [*x.chunk(world.world_size)], dist.ReduceOp.SUM)
    yield "reduce_scatter, sum", x, got

    got = one.clone()
    work = dist.all_reduce(got, async_op=True)  # returns at once, as every primitive can
    assert work is not None
    work.wait()  # until then, the contents of `got` are undefined
    yield "all_reduce, async", one, got


def pairs(x: Tensor, world: hd.World) -> Iterator[Row]:
    """Send from rank 0 to the last rank, then to every other rank. A single rank sends nothing."""
    rank, last, one = world.rank, world.world_size - 1, x[:1]
    had, got = one if rank == 0 else None, torch.empty_like(one)
    if rank == 0 < last:
        dist.send(one, dst=last)
    if rank == last > 0:
        dist.recv(got, src=0)
    yield "send, recv", had, got if rank == last > 0 else None

    works = [dist.irecv(got, src=0)] if rank > 0 else [dist.isend(one, dst=other) for other in range(1, last + 1)]
    for each in works:
        assert each is not None  # it is None on a rank outside the group
        each.wait()
    yield "isend, irecv", had, got if rank > 0 else None


def show(x: Tensor | None) -> str:
    """Return a tensor as text: [1 2 3]."""
    return "-" if x is None else f"[{' '.join(f'{value:g}' for value in x.tolist())}]"


if __name__ == "__main__":
    main()
