"""The process group "mpi" beside gloo's, in one run: torch's collectives, steps of DDP and FSDP2, DTensor, new groups.

mpirun -n 2 python benchmarks/backend.py --only all_reduce,DDP --sizes 8,64M
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import harness
import torch
import torch.distributed as dist
from harness import Step
from mpi4py import MPI
from results import GLOO_GROUP, MPI_GROUP
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

import hpcdist as hd
from hpcdist.tools.timing import Contender

# Layers, and features of each: so many parameters.
TRAININGS = {
    "DDP step, 1 million": (2, 700),
    "DDP step, 100 million": (6, 4082),
    "FSDP2 step, 10 million": (10, 1000),
}
DTENSOR = "DTensor step, Shard(0) to Shard(1)"
# How many groups it makes, with an all_reduce in each.
MAKING = {
    "new_group, all ranks": 1,
    "new_group, halves": 2,
    "init_process_group, new_group": 1,
}


@dataclass
class Case(harness.Data):
    """A collective on this rank: float32 whose values tell rank and place; `size` is the bytes that a rank sends."""

    size: int
    what: str
    comm: MPI.Intracomm
    x: Tensor
    out: Tensor
    expected: Tensor
    skew: str = "even"

    @property
    def nbytes(self) -> list[int]:
        return [self.x.nbytes] * self.comm.size

    def reset(self) -> None:
        """The result's memory holds the input where the call reduces, or broadcasts, in place."""
        self.out.copy_(self.x) if self.out.shape == self.x.shape else self.out.fill_(-1)

    def correct(self, result: Tensor) -> bool:
        return torch.equal(result, self.expected)

    def intact(self) -> bool:
        return torch.equal(self.x, _values(self.comm.rank, self.x.numel()))


def _values(rank: int, numel: int) -> Tensor:
    return (torch.arange(numel) % 1000 + 1000 * rank).float()


def make_case(comm: MPI.Intracomm, what: str, size: int) -> Case:
    """Make the data of a collective on this rank, and what plain indexing and sums give."""
    p, numel = comm.size, max(1, size // 4)
    numel += -numel % p if what in ("reduce_scatter_single", "all_to_all_single") else 0
    everything = torch.stack([_values(rank, numel) for rank in range(p)])
    mine = slice(comm.rank * (numel // p), (comm.rank + 1) * (numel // p))
    expected = {
        "all_reduce": lambda: everything.sum(0),
        "broadcast": lambda: everything[0].clone(),
        "all_gather_single": lambda: everything.flatten(),
        "reduce_scatter_single": lambda: everything.sum(0)[mine].clone(),
        "all_to_all_single": lambda: everything[:, mine].flatten(),
    }[what]()
    return Case(size, what, comm, everything[comm.rank].clone(), torch.empty_like(expected), expected)


CALLS: dict[str, Callable[[Case, Any], object]] = {
    "all_reduce": lambda case, group: dist.all_reduce(case.out, group=group),
    "broadcast": lambda case, group: dist.broadcast(case.out, 0, group=group),
    "all_gather_single": lambda case, group: dist.all_gather_into_tensor(case.out, case.x, group=group),
    "reduce_scatter_single": lambda case, group: dist.reduce_scatter_tensor(case.out, case.x, group=group),
    "all_to_all_single": lambda case, group: dist.all_to_all_single(case.out, case.x, group=group),
}


def contender(name: str, group: Any, what: str) -> Contender:
    """A collective of a group."""

    def call(case: Case) -> Tensor:
        CALLS[what](case, group)
        return case.out

    return Contender(name, call)


@dataclass
class Training(harness.Data):
    """A model of linear layers, wrapped for each group; a step is forward, backward and the reduction of gradients."""

    what: str
    comm: MPI.Intracomm
    model: nn.Sequential
    x: Tensor
    size: int
    skew: str = "even"
    expected: Tensor | None = None

    def _wrap(self, group: Any) -> nn.Module:
        if self.what.startswith("DDP"):
            return DistributedDataParallel(self.model, process_group=group)
        model, mesh = copy.deepcopy(self.model), DeviceMesh.from_group(group, "cpu")
        for layer in model:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def step(self, name: str, group: Any) -> Tensor:
        model = self.once(name, lambda: self._wrap(group))
        model.zero_grad(set_to_none=True)
        model(self.x).square().mean().backward()
        found: Any = next(model.parameters()).grad
        return found.to_local() if isinstance(found, DTensor) else found

    def correct(self, result: Tensor) -> bool:
        """The gradient is the first contender's, which is gloo's."""
        if self.expected is None:
            self.expected = result.clone()
        return torch.allclose(result, self.expected)

    def intact(self) -> bool:
        return self.expected is not None


def make_training(comm: MPI.Intracomm, what: str) -> Training:
    """Make a model, the same on all ranks, and a batch of this rank's own."""
    layers, features = TRAININGS[what]
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(features, features) for _ in range(layers)))
    torch.manual_seed(comm.rank)
    size = sum(p.nbytes for p in model.parameters())
    return Training(what, comm, model, torch.randn(8, features), size)


@dataclass
class Resharding(harness.Data):
    """A matrix of float32 in rows for each group, whose values tell the place; a step makes columns of it."""

    comm: MPI.Intracomm
    size: int
    what: str = DTENSOR
    skew: str = "even"

    def __post_init__(self) -> None:
        columns = 1024 * self.comm.size
        self._whole = torch.arange(self.size // 4 * self.comm.size).float().view(-1, columns)

    def step(self, name: str, group: Any) -> Tensor:
        rows = self.once("rows", lambda: self._whole.chunk(self.comm.size)[self.comm.rank].clone())
        whole = self.once(name, lambda: DTensor.from_local(rows, DeviceMesh.from_group(group, "cpu"), [Shard(0)]))
        return whole.redistribute(placements=[Shard(1)]).to_local()

    def correct(self, result: Tensor) -> bool:
        return torch.equal(result, self._whole.chunk(self.comm.size, 1)[self.comm.rank])


@dataclass
class Making(harness.Data):
    """New groups, and the first call of each. torch's groups end with the last kind of these."""

    comm: MPI.Intracomm
    what: str
    size: int = 8
    skew: str = "even"

    def step(self, name: str, group: Any) -> Tensor:
        backend = "gloo" if name == GLOO_GROUP else "mpi"
        if self.what.startswith("init"):
            if dist.is_initialized():
                dist.destroy_process_group()
            dist.init_process_group(backend)
        ranks, parts = range(self.comm.size), MAKING[self.what]
        made = [(part, dist.new_group(list(part), backend=backend)) for part in (ranks[i::parts] for i in range(parts))]
        x = torch.tensor([float(self.comm.rank), 1])
        for part, new in made:
            if self.comm.rank in part:
                dist.all_reduce(x, group=new)
                dist.destroy_process_group(new)
        return x

    def correct(self, result: Tensor) -> bool:
        parts = MAKING[self.what]
        part = range(self.comm.size)[self.comm.rank % parts :: parts]
        return result.tolist() == [sum(part), len(part)]


def _stepping(name: str, group: Any) -> Contender:
    return Contender(name, lambda case: case.step(name, group))


def main() -> None:
    parser = harness.parser(__doc__, "8,1K,64K,256K,1M,16M,64M", seconds=120)
    parser.add_argument(
        "--only", type=harness.words, default=[""], metavar="LIST", help="names with these words in them"
    )
    asked = parser.parse_args()
    with hd.init(device="cpu", backend="mpi") as world:
        groups = {GLOO_GROUP: dist.new_group(backend="gloo"), MPI_GROUP: dist.group.WORLD}
        whats = [what for what in (*CALLS, *TRAININGS, DTENSOR, *MAKING) if any(word in what for word in asked.only)]
        steps = [
            Step(partial(make_case, what=what, size=size), [contender(n, g, what) for n, g in groups.items()])
            for what, size in product([w for w in whats if w in CALLS], asked.sizes)
        ]
        makers: dict[str, Callable[[MPI.Intracomm], Any]] = {w: partial(make_training, what=w) for w in TRAININGS}
        makers[DTENSOR] = partial(Resharding, size=2**24)
        makers |= {what: partial(Making, what=what) for what in MAKING}
        steps += [Step(makers[what], [_stepping(n, g) for n, g in groups.items()]) for what in whats if what in makers]
        harness.run(harness.start("backend", world.comm), world.comm, steps, asked)


if __name__ == "__main__":
    main()
