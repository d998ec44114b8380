"""redistribute: what test_property.py, which goes from any layout to any layout, does not draw; errors."""

import itertools
import re

import pytest
import torch
from cases import whole_of
from collective import refused, several_ranks

import hpcdist as hd
from hpcdist import activity
from hpcdist.runtime.world import team_of
from hpcdist.tensors import dtensor


def test_out_that_overlaps_x(findings, size):
    whole = whole_of((size, size), torch.int32)
    memory = hd.local(whole, hd.Split(0)).clone()
    got = hd.redistribute(memory, hd.Split(0), hd.Split(1), out=memory.view(size, 1))
    findings.same(got, hd.local(whole, hd.Split(1)), "in place")


def test_groups(findings, world, rank, size):
    comm = world.comm.Split(rank % 2, -rank)
    whole = whole_of((4, 3), torch.float32, salt=rank % 2)
    x = hd.local(whole, hd.Split(0), group=comm)
    got = hd.redistribute(x, hd.Split(0), hd.Split(1), group=comm)
    local = hd.local(whole, hd.Split(1), group=comm)
    findings.same(got, local, "in a group")
    findings.check(not local.numel() or local.untyped_storage().data_ptr() == whole.data_ptr(), "local is a view")
    weights = [1, 5, 1, 1, 2]
    findings.check(len(hd.balance(weights)) == size and sum(hd.balance(weights)) == 5, hd.balance(weights))
    comm.Free()


@several_ranks
@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda w, x: (x, hd.Split(w.rank), hd.Split(0)), r"src is Split\(dim=1"),
        (
            lambda w, x: (x, hd.Split(0), hd.Split(1) if w.rank else hd.Replicate()),
            r"dst is .*Split\(dim=1|dst is Replicate",
        ),
        (lambda w, x: (x, hd.Split(0), "rows"), "dst must be a layout"),
        (lambda w, x: ([1, 2], hd.Split(0), hd.Split(1)), "x must be a torch.Tensor"),
        (lambda w, x: (x[:, : 1 + w.rank], hd.Split(0), hd.Split(1)), r"src: rank 1 holds a part of shape \(2, 2\)"),
        (lambda w, x: (x, hd.Split(0), hd.Split(1, [1] * w.world_size)), "dst: counts add up to"),
        (lambda w, x: (x.double() if w.rank else x, hd.Split(0), hd.Split(1)), "dtype is"),
        (lambda w, x: (x[0] if w.rank else x, hd.Split(0), hd.Split(0)), "number of dims is"),
        *(
            (lambda w, x, out=out: (x, hd.Split(0), hd.Replicate(), out if w.rank == 1 else None), r"rank 1: .*out")
            for out in (torch.ones(1, 1), torch.ones(3), torch.ones(9, 4), [0])
        ),
        (
            lambda w, x: (x, hd.Boxes([((4 * r, 0), (2, 9)) for r in range(w.world_size)]), hd.Replicate()),
            "src: no rank holds .* of the .* elements",
        ),
    ],
)
def test_errors(findings, world, size, wrong, told):
    """The same on all ranks, before anything moves, and the next call succeeds."""
    x = torch.ones(2, 9)
    args = dict(zip(("x", "src", "dst", "out"), wrong(world, x), strict=False))
    error = refused("", hd.redistribute, **args)
    findings.check(re.search(told, str(error)), f"expected {told!r} in {error}")
    for out in (None, torch.empty(2 * size, 9)):  # kept for the call of the next row
        findings.same(hd.redistribute(x, hd.Split(0), hd.Replicate(), out=out), x.repeat(size, 1), "next")


def test_dtensor_has_what_its_layout_says(findings, size):
    """Uneven shards too, and a dimension that is cut twice."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    meshes = [DeviceMesh("cpu", list(range(size)))]
    if size % 2 == 0:
        meshes.append(DeviceMesh("cpu", torch.arange(size).view(2, -1)))
    whole = torch.arange(7 * 5).view(7, 5)
    kinds = [Shard(0), Shard(1), Replicate()]
    for mesh in meshes:
        for placements in itertools.product(kinds, repeat=mesh.ndim):
            theirs = distribute_tensor(whole, mesh, placements)
            layout = dtensor.layout_of(theirs.placements, theirs.device_mesh)
            findings.same(theirs.to_local(), hd.local(whole, layout), f"{placements}")
            rows = hd.redistribute(theirs.to_local(), layout, hd.Split(0))
            findings.same(rows, hd.local(whole, hd.Split(0)), f"from {placements}")


def test_a_plan_is_remembered_for_its_own_layouts(findings, size):
    """The same shapes and the same goal, from boxes that lie in another order."""
    whole = whole_of((2 * size, 3), torch.int32)
    boxes = hd.Split(0).boxes(whole.shape, size)
    for order in (boxes, boxes[::-1], boxes):
        src = hd.Boxes(order)
        got = hd.redistribute(hd.local(whole, src), src, hd.Split(1))
        findings.same(got, hd.local(whole, hd.Split(1)), f"{order}")


def test_the_part_of_one_rank_alone_changes(findings, size):
    """Back and forth, of few and of many bytes: the calls of the other ranks are like their earlier ones."""
    for columns in (2, 2000):
        for last in (3, 5, 3, 5):
            rows = [4] * (size - 1) + [last]
            whole = whole_of((sum(rows), columns), torch.int32)
            got = hd.redistribute(hd.local(whole, hd.Split(0, rows)), hd.Split(0), hd.Split(1))
            findings.same(got, hd.local(whole, hd.Split(1)), f"{columns} columns, {last} rows")


def test_what_one_rank_alone_has_forgotten(findings, world, size):
    """The small calls that it remembers, as after a mistake of its own; the others remember theirs."""
    team = team_of()
    x = torch.arange(4) + 10 * world.rank
    whole = torch.cat([torch.arange(4) + 10 * rank for rank in range(size)])
    for turn in range(3):
        if world.rank == turn % size:
            team.repeats.clear()
        findings.same(hd.redistribute(x, hd.Split(0), hd.Replicate()), whole, "redistribute")
        findings.same(hd.concat(x), whole, "concat")
        findings.same(hd.split(whole if world.rank == 0 else None), x, "split")
        if turn == 1:  # all of them forget
            team.repeats.clear()


def test_route_of_repeated_calls(findings, monkeypatch):
    """A trace shows it, also of later calls, which do not choose it again, and of the backward pass."""
    seen = []
    monkeypatch.setattr(activity, "took", seen.append)
    x = torch.ones(50, 50)
    for times in range(3):
        hd.redistribute(x, hd.Split(0), hd.Split(1))
        findings.check(seen and seen[-1] == "mpi", f"{times}: {seen}")
        seen.clear()
    y = hd.redistribute(x.requires_grad_(), hd.Split(0), hd.Split(1))
    seen.clear()
    y.sum().backward()
    findings.check(seen == ["mpi"], f"backward: {seen}")
