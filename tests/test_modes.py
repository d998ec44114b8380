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
from hpcdist import files
from hpcdist.gather import __main__ as gather_command


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
            with pytest.raises(ValueError if alone else hd.RankError, match=r"requires a gradient|gradient is to flow"):
                call(out)
            findings.check(out._version == 0 or "asynchronous" in name, f"{name}: refused, but counted as written")
        with torch.no_grad():
            call(out)
        if name != "gather" or last:
            findings.same(out.detach(), torch.ones(shape), name)
        findings.check(out.requires_grad and out.is_leaf, name)
    findings.settle()


# --- the default device and dtype ------------------------------------------------------------------------------------


class _Elsewhere:
    """A default device on which nothing is kept, and another default dtype, as torch.set_default_device sets them."""

    def __enter__(self) -> None:
        self._device = torch.device("meta")
        self._device.__enter__()
        torch.set_default_dtype(torch.float64)

    def __exit__(self, *error: object) -> None:
        torch.set_default_dtype(torch.float32)
        self._device.__exit__(*error)


def _host(*shape: int, start: int = 0) -> Tensor:
    count = torch.Size(shape).numel()
    return torch.arange(start, start + count, dtype=torch.float32, device="cpu").view(shape)


@pytest.mark.mpi
@pytest.mark.parametrize("route", ["mpi", "gloo", "hdf5"])
def test_verbs_do_not_depend_on_the_default_device_and_dtype(world: hd.World, route: str) -> None:
    findings, rank, size = Findings(world.comm), world.rank, world.world_size
    x, large = _host(3, 2, start=6 * rank), _host(3, 70_000)
    whole, by_column = _host(3 * size, 2), torch.cat([_host(3, 2, start=6 * r) for r in range(size)], 1)
    with _Elsewhere():
        out = torch.empty(3, 2 * size, dtype=torch.float32, device="cpu").t().contiguous().t()
        findings.same(hd.concat(x, route=route), whole, "concat")
        findings.same(hd.concat(x, 1, route=route, out=out), by_column, "concat, dim 1, out")
        findings.same(hd.concat(x, 1, route=route, async_op=True).wait(60), by_column, "in the background")
        got = hd.gather(x, 1, route=route)
        findings.check(got is None if rank else torch.equal(got, by_column), "gather")
        findings.same(hd.split(got, 1, route=route), x, "split")
        columns = hd.redistribute(x, hd.Split(0), hd.Split(1), route=route)
        findings.same(hd.redistribute(columns, hd.Split(1), hd.Split(0), route=route), x, "redistribute")
        tree = hd.concat({"x": x, "large": [large], "name": b"abc", "n": 2**70, "empty": b""}, route=route)
        findings.same(tree["x"], whole, "a structure")
        findings.same(tree["large"][-1], large, "a large tensor in a structure")
        findings.check(tree["name"] == [b"abc"] * size and tree["empty"] == [b""] * size, "bytes")
        mine = hd.split({"x": whole, "large": large} if rank == 0 else None, route=route)
        findings.same(mine["x"], x, "split of a structure")
        sent = hd.isend([x, large, b"z"], (rank + 1) % size, route="mpi" if route == "gloo" else route)
        got = hd.recv((rank - 1) % size)
        sent.wait(60)
        findings.same(got[0], _host(3, 2, start=6 * ((rank - 1) % size)), "recv")
        findings.same(got[1], large, "recv, large")
        leaf = x.clone().requires_grad_(rank == size - 1)
        hd.concat(leaf, 1, route=route).sum().backward()
        findings.check(rank < size - 1 or torch.equal(leaf.grad, torch.full_like(x, size)), "a gradient")
    findings.settle()


@pytest.mark.mpi
def test_staging_and_commands_do_not_depend_on_the_default_device(world: hd.World, folder: Path) -> None:
    findings, rank, size = Findings(world.comm), world.rank, world.world_size
    x, whole = _host(3, 4, start=12 * rank), _host(3 * size, 4)
    path = folder / "x.h5"
    with _Elsewhere():
        for options in ({}, {"compression": 1}, {"window": 64}):
            hd.staging.save(path, {"x": x, "half": x.bfloat16()}, 0, **options)
            findings.same(hd.staging.load(path, "x"), x, f"load {options}")
            findings.same(hd.staging.load(path, "half", dim=None, verify=True), whole.bfloat16(), f"whole {options}")
            findings.same(hd.staging.load(path, "x", dim=1, window=64, counts=[4] + [0] * (size - 1))[:, :4], whole
                          if rank == 0 else whole[:, :0], f"columns {options}")  # fmt: skip
        with hd.staging.open(path, "w", {"x": (tuple(whole.shape), torch.float32)}) as file:
            file.write("x", x.t().contiguous().t(), (3 * rank, 0))
        with hd.staging.open(path) as opened:
            findings.same(opened.read("x"), whole, "open")
        for suffix in (".npy", ".pt", ".safetensors", ".h5"):
            told = ["--verify", "--window", "1024", "-o", str(folder / f"y{suffix}"), str(path)]
            status = gather_command.main(world, gather_command.parser().parse_args(told))
            findings.check(status in (0, None), f"{suffix}: status {status}")
            findings.same(files.load(str(folder / f"y{suffix}")), whole, suffix)
    findings.settle()
