"""Every public verb, with the type that a checker must find: read by mypy and pyright, never run."""

from __future__ import annotations

from typing import Any, assert_type

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import hpcdist as hd


def groups(x: Tensor, group: dist.ProcessGroup, comm: MPI.Intracomm, mesh: DeviceMesh) -> None:
    assert_type(hd.concat(x, group=group), Tensor)
    assert_type(hd.concat(x, group=comm), Tensor)
    assert_type(hd.concat(x, group=mesh), Tensor)
    assert_type(hd.concat(x, group=None), Tensor)
    hd.concat(x, group=3)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]


def tensors(x: Tensor, maybe: Tensor | None, out: Tensor) -> None:
    assert_type(hd.gather(x, 1, root=2), Tensor | None)
    assert_type(hd.concat(x, dim=1, out=out), Tensor)
    assert_type(hd.split(x, 0, 0, [1, 2]), Tensor)
    assert_type(hd.split(maybe, counts="chunk"), Tensor)
    assert_type(hd.split(None), Tensor)
    assert_type(hd.redistribute(x, hd.Split(0), hd.Replicate()), Tensor)
    assert_type(hd.local(x, hd.Split(1)), Tensor)
    assert_type(hd.reduce_scatter(x, 1, [1, 2], op="max"), Tensor)
    assert_type(hd.reduce(x, op="mean"), Tensor | None)
    assert_type(hd.reduce(x, None), Tensor)
    assert_type(hd.all_reduce(x, out=out), Tensor)
    assert_type(hd.all_to_all(x, [1, 2], dim=1), tuple[Tensor, list[int]])
    assert_type(hd.all_to_all([x, x]), list[Tensor])


def in_the_background(x: Tensor, parts: list[Tensor]) -> None:
    assert_type(hd.gather(x, async_op=True), hd.Handle[Tensor | None])
    assert_type(hd.concat(x, async_op=True), hd.Handle[Tensor])
    assert_type(hd.concat(x, async_op=True).wait(), Tensor)
    assert_type(hd.split(x, async_op=True), hd.Handle[Tensor])
    assert_type(hd.redistribute(x, hd.Split(0), hd.Split(1), async_op=True), hd.Handle[Tensor])
    assert_type(hd.concat(parts, async_op=True), hd.Handle[list[Any]])
    assert_type(hd.reduce_scatter(x, async_op=True), hd.Handle[Tensor])
    assert_type(hd.reduce(x, async_op=True), hd.Handle[Tensor | None])
    assert_type(hd.all_reduce(x, async_op=True), hd.Handle[Tensor])


def structures(parts: list[Tensor], record: dict[str, Tensor], pair: tuple[Tensor, ...]) -> None:
    assert_type(hd.gather(parts), list[Any] | None)
    assert_type(hd.concat(record, allow_pickle=True), dict[Any, Any])
    assert_type(hd.concat(pair), tuple[Any, ...])
    assert_type(hd.split(record), dict[Any, Any])
    assert_type(hd.reduce(record, root=1), dict[Any, Any] | None)
    assert_type(hd.reduce({"loss": 0.3}, root=None, op="mean", weights=3), dict[Any, Any])
    assert_type(hd.reduce(record, root=None, async_op=True), hd.Handle[dict[Any, Any]])
    assert_type(hd.concat(3), Any)


def messages(x: Tensor) -> None:
    hd.send(x, dest=1)
    assert_type(hd.isend({"x": x}, 1, 2), hd.Handle[None])
    assert_type(hd.recv(0), Any)
    assert_type(hd.recv(with_source=True), tuple[Any, int])
    assert_type(hd.irecv(0), hd.Handle[Any])
    assert_type(hd.irecv(0, with_source=True), hd.Handle[tuple[Any, int]])


def plans(x: Tensor) -> None:
    plan = hd.plan(hd.redistribute, x, hd.Split(0), hd.Split(1))
    assert_type(plan, hd.Plan)
    assert_type(plan(x), Any)  # what the verb returns
    assert_type(plan.sent, int)
    assert_type(plan.box, hd.layout.Box | None)
    assert_type(hd.plan(hd.split, x).received, int)


def worlds() -> None:
    with hd.init(device="cpu") as world:
        assert_type(world, hd.World)
        assert_type(world.rank, int)
        assert_type(world.device, torch.device)
    assert_type(hd.current(), hd.World)
    assert_type(hd.balance([1.0, 2.0]), list[int])


def files(x: Tensor) -> None:
    assert_type(hd.staging.load("a.h5"), Any)  # what the file holds
    hd.staging.save("a.h5", {"x": x})
    assert_type(hd.staging.save("a.h5", x, async_op=True), hd.Handle[None])
    assert_type(hd.plan(hd.staging.load, "a.h5", dim=None).file_bytes_of_all, int)
