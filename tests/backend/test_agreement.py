"""Ranks whose calls differ: the same error on all of them, before data move, and the job goes on."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launch import mpirun
from torch import Tensor

import hpcdist as hd
from hpcdist.errors import RankError

PROGRAM = str(Path(__file__).with_name("differing_calls.py"))
LARGE = 2**14  # elements of float32: 64 KiB, which is compared without being asked


def _all_gather(x: Tensor) -> None:
    dist.all_gather([torch.empty_like(x) for _ in range(dist.get_world_size())], x)


CALLS: dict[str, Callable[[Tensor], object]] = {
    "all_reduce": dist.all_reduce,
    "broadcast": lambda x: dist.broadcast(x, 0),
    "reduce": lambda x: dist.reduce(x, 0),
    "all_reduce with async_op": lambda x: dist.all_reduce(x, async_op=True).wait(),
    "all_gather": _all_gather,
    "all_gather_single": lambda x: dist.all_gather_into_tensor(x.repeat(dist.get_world_size()), x),
    "reduce_scatter_single": lambda x: dist.reduce_scatter_tensor(x.clone(), x.repeat(dist.get_world_size())),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("verb", CALLS)
@pytest.mark.parametrize("odd", [torch.ones(LARGE + 1), torch.ones(LARGE, dtype=torch.float64)], ids=["size", "dtype"])
def test_large_tensors_are_compared(odd: Tensor, verb: str, world: hd.World) -> None:
    last = world.world_size - 1
    x = odd.clone() if world.rank == last else torch.ones(LARGE)
    shown = re.escape(f"rank {last}: is in {verb.split()[0]}() of ")
    with pytest.raises(RankError, match=shown):
        CALLS[verb](x)
    y = torch.full((LARGE,), float(world.rank))
    dist.all_reduce(y)  # the job goes on
    assert torch.equal(y, torch.full((LARGE,), float(sum(range(world.world_size)))))


def _differs(what: str, verb: str) -> str:
    line = r"\S*test_agreement.py:\d+"
    return rf"rank 1: is in {verb}\(\) of {what} at {line}, and rank 0 in {verb}\(\) of 16384 x .* at {line}"


@pytest.mark.mpi(min_size=2)
def test_operations_and_roots_are_compared(world: hd.World) -> None:
    x, odd = torch.ones(LARGE), world.rank == 1
    with pytest.raises(RankError, match=_differs(r"16384 x torch.float32, MAX", "all_reduce")):
        dist.all_reduce(x, dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM)
    with pytest.raises(RankError, match=_differs(r"16384 x torch.float32, 1", "broadcast")):
        dist.broadcast(x, int(odd))
    with pytest.raises(RankError, match=r"rank 1: is in broadcast\(\).*, and rank 0 in all_reduce\(\)"):
        dist.broadcast(x, 0) if odd else dist.all_reduce(x)
    assert torch.equal(x, torch.ones(LARGE))


@pytest.mark.once
@pytest.mark.parametrize("np", [2, 3])
def test_every_call_is_compared_if_asked(np: int) -> None:
    job = mpirun(np, PROGRAM, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    assert job.status == 0, job.err
    assert job.out.count("survived") == np


@pytest.mark.once
def test_without_being_asked_a_difference_of_small_calls_ends_the_job() -> None:
    """Open MPI tells of a message that is too long; MPICH ends the job itself, in a function of its own."""
    job = mpirun(2, PROGRAM, "small")
    assert job.status != 0
    assert "TORCH_DISTRIBUTED_DEBUG=DETAIL compares them" in job.err or "Message truncated" in job.err, job.err
    assert "survived" not in job.out
