"""Arguments that few programs have: each call against plain computation, or its error."""

import warnings
from functools import reduce
from itertools import product

import pytest
import torch
import torch.distributed as dist
from collective import all_gather_single, reduce_scatter_single
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.profiler import profile

from hpcdist.errors import RankError
from hpcdist.runtime import registration

UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]


@pytest.mark.parametrize("dtype", UNSIGNED)
def test_unsigned_integers_are_reduced_by_every_operation(dtype, rank, size, findings):
    """torch itself has no arithmetic for them. The highest bit is set: as signed numbers, they would be negative."""
    top = 2 ** (8 * dtype.itemsize - 1)
    every = [[top + 3 * i, i + 1, top - 1 - i] for i in range(size)]
    columns = list(zip(*every, strict=True))
    for name, expected in {
        "MIN": [min(column) for column in columns],
        "MAX": [max(column) for column in columns],
        "SUM": [sum(column) % (2 * top) for column in columns],
        "BXOR": [reduce(int.__xor__, column) for column in columns],
    }.items():
        op, wanted = getattr(dist.ReduceOp, name), torch.tensor(expected, dtype=dtype)
        for repeats in (1, 60_000):  # by MPI, and by memory that the ranks share
            x = torch.tensor(every[rank], dtype=dtype).repeat(repeats)
            dist.all_reduce(x, op)
            findings.same(x, wanted.repeat(repeats), f"all_reduce {name} x {repeats}")
    x = torch.full((3,), 5, dtype=dtype)
    dist.all_reduce(x, dist.ReduceOp.AVG)
    findings.same(x, torch.full((3,), 5, dtype=dtype), "average")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32])
@pytest.mark.parametrize("count", [1, 40, 3000, 300_000])
def test_sums_of_integers_wrap_around_as_torch_has_it(dtype, count, world, findings):
    """Open MPI 4.1 adds integers of 8 and 16 bits with saturation where the processor can, but not the first 32."""
    most = 2 ** (8 * dtype.itemsize - (dtype.is_signed)) - 1
    total = torch.full((count,), most * world.world_size, dtype=torch.int64)
    x = torch.full((count,), most, dtype=dtype)
    dist.all_reduce(x)
    findings.same(x, total.to(dtype), f"{count} of {dtype}")


@pytest.mark.parametrize("count", [3, 2**20])
@pytest.mark.parametrize("where", ["at the start on all ranks", "in its place on the first rank"])
def test_what_is_gathered_may_be_a_part_of_the_result(count, where, rank, size, findings):
    out = torch.zeros(size * count)
    x = out[:count] if where.startswith("at") or rank == 0 else torch.zeros(count)
    all_gather_single(out, x.fill_(rank + 1))
    findings.same(out, torch.arange(1.0, size + 1).repeat_interleave(count), where)


@pytest.mark.parametrize("count", [2, 5000])
def test_equal_parts_are_given_as_splits_on_some_ranks(count, rank, size, findings):
    """None stands for equal splits: each rank may say it as it likes."""
    x = torch.arange(size * count) + 10_000 * size * rank
    expected = torch.cat([torch.arange(count) + count * rank + 10_000 * size * i for i in range(size)])
    splits = None if rank == 0 else [count] * size
    out = torch.zeros_like(x)
    dist.all_to_all_single(out, x, splits, splits)
    findings.same(out, expected, "into another tensor")
    dist.all_to_all_single(x, x, splits, splits)
    findings.same(x, expected, "into the same tensor")


def test_equal_parts_of_a_size_of_each_sender(rank, size, findings):
    """Small ones travel with the header, though a receiver cannot tell the size from its own parts."""
    dest, lengths = rank, [source + 1 for source in range(size)]
    out = torch.zeros(sum(lengths), dtype=torch.int64)
    x = torch.arange(size).repeat_interleave(rank + 1) + 100 * rank
    dist.all_to_all_single(out, x, lengths, [rank + 1] * size)
    expected = torch.cat([torch.full([n], 100 * source + dest) for source, n in enumerate(lengths)])
    findings.same(out, expected, "parts")


def test_tensors_of_inference_mode(rank, size, findings):
    """torch lets nobody write them outside of that mode, in which the thread of asynchronous calls is not."""

    def tensor(*shape, dtype=torch.float32):
        with torch.inference_mode():
            return torch.full(shape, rank + 1.0, dtype=dtype)

    total = float(sum(range(1, size + 1)))
    for async_op, inside in product((True, False), repeat=2):
        with torch.inference_mode(inside):
            cases = [tensor(3), tensor(3, dtype=torch.bfloat16), tensor(2**18), tensor(3, 2)[:, 0]]
            works = [dist.all_reduce(x, async_op=async_op) for x in cases]
            outs = [tensor(2, 2)[:, 0] for _ in range(size)]
            works.append(dist.all_gather(outs, tensor(2), async_op=async_op))
            if size > 1:
                got = tensor(3, 2)[:, 0]
                works += [dist.irecv(got, (rank - 1) % size), dist.isend(tensor(3), (rank + 1) % size)]
            for work in filter(None, works):
                work.wait()
        what = f"async_op={async_op}, in inference mode: {inside}"
        for x in cases:
            findings.same(x, torch.full(x.shape, total, dtype=x.dtype), f"all_reduce {x.dtype}, {what}")
        for i, out in enumerate(outs):
            findings.same(out, torch.full((2,), i + 1.0), f"all_gather from {i}, {what}")
        if size > 1:
            findings.same(got, torch.full((3,), (rank - 1) % size + 1.0), f"recv, {what}")


def test_the_compiler_does_not_look_into_calls_and_handles(world, findings):
    """Where it breaks its graph, it goes on with what is called there, and warned of what it did not know."""

    def step(x):
        y = 2 * x
        dist.all_reduce(y)
        handle = dist.all_reduce(y, async_op=True)
        handle.wait()
        return y + 1

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = torch.compile(step, backend="eager")(torch.ones(3))
    findings.same(found, torch.full((3,), 2.0 * world.world_size**2 + 1), "compiled")
    texts = [str(warning.message) for warning in caught]
    findings.check(not any("Dynamo does not know" in text for text in texts), texts)


if not registration.PLUGINS:  # from torch 2.14 on, its dispatcher answers for these, on that rank alone

    def test_a_tensor_without_memory_is_an_error_that_says_so(size):
        whole = distribute_tensor(torch.ones(size), init_device_mesh("cpu", (size,)), [Shard(0)])
        for x, text in ((torch.ones(3, device="meta"), "on device meta"), (whole, r"x\.to_local\(\)")):
            for call in (dist.all_reduce, lambda x: dist.broadcast(x, 0)):
                with pytest.raises(RankError, match=text):
                    call(x)


def _written(make, rank, size, **how):
    """What each call writes into tensors that `make` makes of their values, which it is given as well."""

    def one():
        return make(torch.full((2,), rank + 1.0))

    def many():
        return make(torch.arange(2.0 * size) + 10 * rank)

    def each():
        return [one() for _ in range(size)]

    def exchange(x, **_):
        work = dist.irecv(x[0], (rank - 1) % size)
        dist.send(one(), (rank + 1) % size)
        return work

    calls = {
        "all_reduce": ([one()], lambda x: dist.all_reduce(x[0], **how)),
        "broadcast": ([one()], lambda x: dist.broadcast(x[0], 0, **how)),
        "reduce": ([one()], lambda x: dist.reduce(x[0], 0, **how)),
        "all_gather": (each(), lambda x: dist.all_gather(x, one(), **how)),
        "all_gather_single": ([many()], lambda x: all_gather_single(x[0], one(), **how)),
        "reduce_scatter": ([one()], lambda x: dist.reduce_scatter(x[0], each(), **how)),
        "reduce_scatter_single": ([one()], lambda x: reduce_scatter_single(x[0], many(), **how)),
        "all_to_all": (each(), lambda x: dist.all_to_all(x, each(), **how)),
        "all_to_all_single": ([many()], lambda x: dist.all_to_all_single(x[0], many(), **how)),
        "scatter": ([one()], lambda x: dist.scatter(x[0], each() if rank == 0 else None, 0, **how)),
        "gather": (each(), lambda x: dist.gather(one(), x if rank == 0 else None, 0, **how)),
        **({"irecv": ([one()], exchange)} if size > 1 else {}),
    }
    for x, call in calls.values():
        work = call(x)
        if work is not None:
            work.wait()
    return {name: torch.cat([y + 0 for y in x]) for name, (x, _) in calls.items()}


@pytest.mark.parametrize("async_op", [False, True])
def test_calls_of_lazily_negated_tensors(rank, size, findings, async_op):
    """From torch 2.14 on, the dispatcher drops what gloo writes into them."""
    wanted = _written(Tensor.clone, rank, size)
    for name, got in _written(lambda x: torch._neg_view(-x), rank, size, async_op=async_op).items():
        findings.same(got, wanted[name], name)


def test_fake_tensors_and_the_profiler(rank, size, findings):
    """As of a group of gloo. What is fake moves no data: no rank waits for another."""
    with FakeTensorMode():
        for name, got in (_written(Tensor.clone, rank, size) if rank == 0 else {}).items():
            findings.check(isinstance(got, FakeTensor), name)
    with profile() as found:
        _written(Tensor.clone, rank, size)
    events = {event.name for event in found.events()}
    wanted = {"allreduce_", "broadcast_", "reduce_", "allgather_", "_allgather_base_", "reduce_scatter_", "scatter_"}
    wanted |= {"_reduce_scatter_base_", "alltoall_", "alltoall_base_", "gather_", *["send", "recv_"] * (size > 1)}
    findings.check({f"c10d::{name}" for name in wanted} <= events, sorted(events))
