"""What torch does around a call: versions of tensors, tracing, compilation, transforms, default devices and dtypes."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from collective import Findings
from torch import Tensor

import hpcdist as hd


@pytest.fixture
def folder(world: hd.World) -> Iterator[Path]:
    """A new folder, the same for all ranks, that is gone afterwards."""
    path = Path(world.comm.bcast(tempfile.mkdtemp(prefix="hpcdist-test-") if world.rank == 0 else None))
    yield path
    world.comm.Barrier()
    if world.rank == 0:
        shutil.rmtree(path)


# --- what is written into a caller's tensor --------------------------------------------------------------------------


def _into(world: hd.World, folder: Path) -> dict[str, tuple[Callable[[Tensor], Any], tuple[int, ...]]]:
    """What writes into a caller's tensor: (the call with that as its out, the shape of the result on this rank)."""
    x, rows, rank = torch.ones(2), hd.Split(0), world.rank
    all_ = (2 * world.world_size,)
    plan = hd.plan_redistribute(x, rows, hd.Replicate())
    hd.staging.save(folder / "x.h5", {"x": x})
    root = world.world_size - 1
    return {
        "concat": (lambda out: hd.concat(x, out=out), all_),
        "concat, hdf5": (lambda out: hd.concat(x, out=out, route="hdf5"), all_),
        "asynchronous concat": (lambda out: hd.concat(x, out=out, async_op=True).wait(60), all_),
        "gather": (lambda out: hd.gather(x, root=root, out=out if rank == root else None), all_),
        "split": (lambda out: hd.split(torch.ones(all_) if rank == root else None, 0, root, out=out), (2,)),
        "split of what all hold": (lambda out: hd.split(torch.ones(all_), root=None, out=out), (2,)),
        "redistribute": (lambda out: hd.redistribute(x, rows, hd.Replicate(), out=out), all_),
        "plan": (lambda out: plan(x, out), all_),
        "asynchronous plan": (lambda out: plan(x, out, async_op=True).wait(60), all_),
        "staging.load": (lambda out: hd.staging.load(folder / "x.h5", "x", out=out, dim=None), all_),
        "staging.open": (lambda out: hd.staging.open(folder / "x.h5").read("x", out=out), all_),
    }


@pytest.mark.mpi
def test_a_backward_pass_that_needs_the_old_values_of_out_fails(world: hd.World, folder: Path) -> None:
    """As after an in-place operation of torch's, though MPI, gloo or the reading of a file has written."""
    findings, last = Findings(world.comm), world.rank == world.world_size - 1
    for name, (call, shape) in _into(world, folder).items():
        out, weight = torch.zeros(shape), torch.ones(shape, requires_grad=True)
        y, version = (weight * out).sum(), out._version
        call(out)
        if name == "gather" and not last:  # which has no result, and no out
            continue
        findings.same(out, torch.ones(shape), name)
        findings.check(out._version > version, f"{name}: autograd was not told")
        try:
            y.backward()
            findings.check(False, f"{name}: a gradient of the new values: {weight.grad}")
        except RuntimeError as error:
            findings.check("modified by an inplace operation" in str(error), f"{name}: {error}")
    findings.settle()


@pytest.mark.mpi
def test_an_out_that_requires_a_gradient(world: hd.World, folder: Path) -> None:
    """Refused as torch.cat(out=) refuses it, and untouched; written where no graph is kept."""
    findings, last = Findings(world.comm), world.rank == world.world_size - 1
    for name, (call, shape) in _into(world, folder).items():
        out = torch.zeros(shape, requires_grad=True)
        alone = name in ("split of what all hold", "staging.open")
        if "plan" not in name:  # a wrong call of a plan ends the job
            with pytest.raises(ValueError if alone else hd.RankError, match="requires a gradient|gradient is to flow"):
                call(out)
            findings.check(out._version == 0 or "asynchronous" in name, f"{name}: refused, but counted as written")
        with torch.no_grad():
            call(out)
        if name != "gather" or last:
            findings.same(out.detach(), torch.ones(shape), name)
        findings.check(out.requires_grad and out.is_leaf, name)
    findings.settle()
