"""Call every primitive of torch.distributed once, and print what each rank had and got.

mpirun -n 3 python -m hpcdist.examples.primitives
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

import hpcdist as hd
from hpcdist.runtime.world import World

__all__ = ["main"]

Row = tuple[str, Tensor | None, Tensor | None]  # primitive, input and output of this rank; None for nothing

OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}


def main() -> None:
    """Run all primitives and print the table on rank 0. Collective over all ranks of the job."""
    with hd.init() as world:
        x = 10.0 * world.rank + torch.arange(1, world.world_size + 1, device=world.device)  # 1 2 3, 11 12 13, ...
        lines = [("primitive", "what each rank had", "what each rank got")]
        for name, had, got in (*one_to_all(x, world), *all_to_one(x, world), *all_to_all(x, world), *pairs(x, world)):
            ranks = world.comm.gather((show(had), show(got)))  # on rank 0
            if ranks is not None:
                lines.append((name, " ".join(had for had, _ in ranks), " ".join(got for _, got in ranks)))
        if world.rank == 0:
            print(table(lines))


def one_to_all(x: Tensor, world: World) -> Iterator[Row]:
    """Send from rank 0 to every rank: the same tensor, or one part to each."""
    got = x[:1].clone()
    dist.broadcast(got, src=0)
    yield "broadcast", x[:1], got

    got = torch.empty_like(x[:1])
    parts = [*x.chunk(world.world_size)] if world.rank == 0 else None
    dist.scatter(got, parts, src=0)
    yield "scatter", x if world.rank == 0 else None, got


def all_to_one(x: Tensor, world: World) -> Iterator[Row]:
    """Send from every rank to rank 0: concatenated, or reduced."""
    parts = [*torch.empty_like(x).chunk(world.world_size)] if world.rank == 0 else None
    dist.gather(x[:1], parts, dst=0)
    yield "gather", x[:1], None if parts is None else torch.cat(parts)

    got = x[:1].clone()
    dist.reduce(got, dst=0, op=dist.ReduceOp.SUM)
    yield "reduce, sum", x[:1], got if world.rank == 0 else None  # elsewhere, the result is undefined


def all_to_all(x: Tensor, world: World) -> Iterator[Row]:
    """Send from every rank to every rank."""
    parts = [*torch.empty_like(x).chunk(world.world_size)]
    dist.all_gather(parts, x[:1])
    yield "all_gather", x[:1], torch.cat(parts)

    for name, op in OPERATIONS.items():
        got = x[:1].clone()
        dist.all_reduce(got, op)
        yield f"all_reduce, {name}", x[:1], got

    got = torch.empty_like(x[:1])
    dist.reduce_scatter(got, [*x.chunk(world.world_size)], dist.ReduceOp.SUM)
    yield "reduce_scatter, sum", x, got

    got = x[:1].clone()
    work = dist.all_reduce(got, async_op=True)  # returns at once, as every primitive can
    assert work is not None
    work.wait()  # until then, the contents of `got` are undefined
    yield "all_reduce, async", x[:1], got


def pairs(x: Tensor, world: World) -> Iterator[Row]:
    """Send from rank 0 to the last rank, then to every other rank. A single rank sends nothing."""
    rank, last = world.rank, world.world_size - 1
    got = torch.empty_like(x[:1])
    if last > 0 and rank == 0:
        dist.send(x[:1], dst=last)
    elif last > 0 and rank == last:
        dist.recv(got, src=0)
    yield "send, recv", x[:1] if rank == 0 else None, got if rank == last > 0 else None

    got = torch.empty_like(x[:1])
    works = [dist.irecv(got, src=0)] if rank > 0 else [dist.isend(x[:1], dst=other) for other in range(1, last + 1)]
    for each in works:
        assert each is not None  # it is None on a rank outside the group
        each.wait()
    yield "isend, irecv", x[:1] if rank == 0 else None, got if rank > 0 else None


def show(x: Tensor | None) -> str:
    """Return a tensor as text: [1 2 3]."""
    return "-" if x is None else f"[{' '.join(f'{value:g}' for value in x.tolist())}]"


def table(lines: list[tuple[str, str, str]]) -> str:
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    return "\n".join(" | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)


if __name__ == "__main__":
    main()
