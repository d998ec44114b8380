"""reduce_scatter, reduce and all_reduce against plain torch on one process, which adds the ranks' tensors in order."""

import functools
import itertools

import numpy as np
import pytest
import torch
from cases import EXTENTS, STRIDES, extents_of, part, rows, same_bits, strides_for
from collective import goes_on, raises_on_all_ranks, refused, several_ranks

import hpcdist as hd

ROUTES = ("mpi", "gloo", "hdf5")
DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64),
    *(torch.int64, torch.int8, torch.uint16, torch.bool),
)
STEPS = {"sum": torch.add, "mean": torch.add, "prod": torch.mul, "min": torch.minimum, "max": torch.maximum}
pytestmark = pytest.mark.mpi


def _of(shape, dtype, rank):
    """Values that encode rank and index, and whose sums are rounded differently in another order."""
    index = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)
    values = (index * 7 + rank * 5) % 13 + 1 + 1e-3 * rank * (dtype.is_floating_point and dtype.itemsize > 2)
    return (values % 2).bool() if dtype == torch.bool else values.to(dtype)


def _whole(inputs, op):
    """The reduction on one process. Narrow floats in float32, unsigned integers in int64, with one rounding."""
    dtype = inputs[0].dtype
    narrow = dtype.is_floating_point and dtype.itemsize <= 2
    wide = torch.float32 if narrow else torch.int64 if dtype == torch.uint16 else dtype
    of_bools = torch.logical_or if op in ("sum", "max") else torch.logical_and
    total = functools.reduce(of_bools if dtype == torch.bool else STEPS[op], [x.to(wide) for x in inputs])
    return (total / len(inputs) if op == "mean" else total).to(dtype)


def _check(findings, world, inputs, op, dim, counts, told, **options):
    rank, size, x = world.rank, world.world_size, inputs[world.rank]
    before, whole = x.clone(memory_format=torch.contiguous_format), _whole(inputs, op)
    if x.dim():
        index = torch.as_tensor(rows(counts, x.shape[dim], size)[rank])
        block = torch.index_select(whole.view(torch.int8) if x.itemsize == 1 else whole, dim, index).view(x.dtype)
        findings.same(hd.reduce_scatter(x, dim, counts, op, **options), block, f"reduce_scatter {told}")
    findings.same(hd.all_reduce(x, op, **options), whole, f"all_reduce {told}")
    root = x.numel() % size
    got = hd.reduce(x, root, op, **options)
    findings.check((got is None) if rank != root else same_bits(got, whole), f"reduce {told}: {got}")
    findings.check(same_bits(x, before), f"x has changed: {told}")


@pytest.mark.parametrize("route", ROUTES)
def test_every_partition_dim_and_op(findings, world, size, route):
    """Small ones, whose data travel behind the headers of route mpi, and larger ones."""
    turns = itertools.cycle(STEPS)
    for case in EXTENTS if route != "hdf5" else ("ragged",):
        extents = extents_of(case, size)
        for columns, dim in ((3, 0), (400, 1), (400, -2)):
            shape = [columns, columns]
            shape[dim] = sum(extents)
            for counts in (list(extents), None, "chunk"):
                op = next(turns)
                inputs = [_of(shape, torch.float64, rank) for rank in range(size)]
                _check(findings, world, inputs, op, dim, counts, f"{case} {shape} {dim} {counts} {op}", route=route)


def test_every_dtype(findings, world, size):
    for dtype, op, width in itertools.product(DTYPES, STEPS, (1, 300)):
        if not (op == "mean" and not (dtype.is_floating_point or dtype.is_complex)) and not (
            dtype.is_complex and op in ("min", "max")
        ):
            for _ in range(2):  # what is kept of the first call is not its data
                inputs = [_of((size, width), dtype, rank) for rank in range(size)]
                _check(findings, world, inputs, op, 0, None, f"{dtype} {op} {width}")


def test_strides_0d_and_nan(findings, world, size):
    for name, width in itertools.product(strides_for(torch.float32), (3, 400)):
        inputs = [STRIDES[name](_of((size + 1, width), torch.float32, rank)) for rank in range(size)]
        _check(findings, world, inputs, "sum", 1, None, f"{name} {width}")
    _check(findings, world, [torch.tensor(rank + 0.1) for rank in range(size)], "sum", 0, None, "0-d")
    inputs = [torch.tensor([1.0, torch.nan if rank == size - 1 else rank]) for rank in range(size)]
    _check(findings, world, inputs, "max", 0, None, "NaN")
    again = [hd.all_reduce(torch.tensor(rank + world.rank)) for rank in range(3)]
    findings.check([int(x) for x in again] == [size * (size - 1) // 2 + size * n for n in range(3)], again)


@pytest.mark.parametrize("width", [1, 500])
def test_out_async_and_group(findings, world, rank, size, width):
    inputs = [_of((size, width), torch.float32, rank) for rank in range(size)]
    whole = _whole(inputs, "sum")
    for turn in range(3):
        out = torch.zeros(size, 2 * width)[:, ::2] if turn == 1 else torch.zeros(size, width)
        x = out.copy_(inputs[rank]) if turn == 2 else inputs[rank]
        findings.check(hd.all_reduce(x, out=out) is out, "not out")
        findings.same(out, whole, f"all_reduce into memory {turn}")
        block = torch.zeros(1, width)
        handle = hd.reduce_scatter(inputs[rank], out=block, async_op=True)
        on_root = hd.reduce(inputs[rank], out=torch.zeros_like(whole) if rank == 0 else None)
        findings.check(handle.wait() is block, "not out")
        findings.same(block, whole[rank : rank + 1], "reduce_scatter in the background")
        findings.check(on_root is None if rank else same_bits(on_root, whole), on_root)
    same = world.comm.Split(rank % 2)
    findings.same(hd.all_reduce(inputs[rank], group=same), _whole(inputs[rank % 2 :: 2], "sum"), "of some ranks")


@pytest.mark.parametrize("route", ROUTES)
def test_gradients(findings, world, rank, size, route):
    extents = list(extents_of("zero in the middle", size))
    for op, width, dim in itertools.product(("sum", "mean"), (2, 300), (0, 1)):
        shape = (sum(extents), width) if dim == 0 else (width, sum(extents))
        inputs = [_of(shape, torch.float64, rank) for rank in range(size)]
        for name, verb, alone in (
            ("reduce_scatter", lambda x: hd.reduce_scatter(x, dim, extents, op, route=route), None),  # noqa: B023
            ("reduce", lambda x: hd.reduce(x, size - 1, op, route=route), [size - 1]),  # noqa: B023
            ("all_reduce", lambda x: hd.all_reduce(x, op, route=route), range(size)),  # noqa: B023
        ):
            leaves = [x.clone().requires_grad_() for x in inputs]
            whole = functools.reduce(torch.add, leaves) / (size if op == "mean" else 1)
            ranks = range(size) if alone is None else alone
            results = {r: part(whole, dim, extents, r) if alone is None else whole for r in ranks}
            sum((x**3).sum() * (r + 1) for r, x in results.items()).backward()
            leaf = inputs[rank].clone().requires_grad_()
            (verb(leaf) ** 3).sum().mul(rank + 1).backward()
            same = torch.allclose(leaf.grad, leaves[rank].grad, rtol=1e-12)
            findings.check(same, f"{name} {op} {shape} {dim}: {leaf.grad}, expected {leaves[rank].grad}")


@pytest.mark.parametrize("width", [2, 300])
@pytest.mark.parametrize("async_op", [False, True])
def test_plans(findings, rank, size, width, async_op):
    """Of other values than planned, with `out` on one rank, a gradient, and a wrong shape."""
    counts, root = [*[0] * (size - 1), width], size - 1
    inputs = [[_of((3, width), torch.float32, peer + turn) for peer in range(size)] for turn in range(4)]
    for verb, args in ((hd.reduce_scatter, (1, counts)), (hd.reduce, (root,)), (hd.all_reduce, ())):
        plan = hd.plan(verb, inputs[0][rank], *args, op="mean", async_op=async_op)
        for turn, xs in enumerate(inputs):
            receives = rank == root or verb is hd.all_reduce
            whole, x = _whole(xs, "mean"), xs[rank].clone().requires_grad_(turn == 3)
            want = whole if receives else whole[:, :0]
            out = torch.full_like(want, -1) if turn == 2 and rank == root else None
            got = plan(x, out, async_op=async_op)
            got = got.wait() if async_op else got
            if got is None:
                findings.check(verb is hd.reduce and not receives and turn < 3, f"{verb.__name__}, {turn}: None")
                continue
            findings.check(out is None or got is out, "out")
            if receives or verb is hd.reduce_scatter:
                findings.same(got.detach(), want, f"{verb.__name__}, turn {turn}")
            if turn == 3:
                (got.sum() / (size if verb is hd.all_reduce else 1)).backward()
                findings.same(x.grad, torch.full_like(x, 1 / size), f"{verb.__name__}: gradient")
        refused("the plan was made for", plan, inputs[0][rank][: 2 + (rank < root)])


@several_ranks
def test_arguments_that_are_wrong_or_differ_on_one_rank(rank, size):
    """The same error on every rank, and the job goes on."""
    x, last = torch.ones(size, 2), rank == size - 1
    leaf, halves = torch.ones(size, 2, requires_grad=last), torch.ones(size, 2, dtype=torch.int64)
    for text, call, args, options in (
        ("[HD303]", hd.all_reduce, (x[: size - last],), {}),
        ("[HD303]", hd.all_reduce, (x, "max" if last else "sum"), {}),
        ("[HD303]", hd.reduce_scatter, (x.double() if last else x,), {}),
        ("[HD303]", hd.reduce_scatter, (x, 0, "chunk" if last else None), {}),
        ("[HD303]", hd.reduce, (x, int(last)), {}),
        ("[HD201]", hd.all_reduce, (x, "median" if last else "sum"), {}),
        ("[HD201]", hd.all_reduce, (None if last else x,), {}),
        ("[HD202]", hd.all_reduce, (halves, "mean"), {}),
        ("[HD202]", hd.all_reduce, (x.cfloat(), "min"), {}),
        ("[HD204]", hd.reduce_scatter, (torch.tensor(1),), {}),
        ("[HD213]", hd.reduce_scatter, (x, 0, [1]), {}),
        ("[HD208]", hd.all_reduce, (leaf, "max"), {}),
        ("[HD208]", hd.all_reduce, (leaf,), {"out": torch.zeros(size, 2) if rank == 0 else None}),
        ("[HD208]", hd.reduce_scatter, (x,), {"out": torch.zeros(2 if last else 1, 2)}),
        ("[HD208]", hd.all_reduce, (x,), {"out": torch.zeros(size, 2 + last)}),
        ("[HD211]", hd.reduce, (x,), {"out": torch.zeros(size, 2)}),
        ("[HD207]", hd.reduce, (x,), {"route": "pigeon" if last else "auto"}),
    ):
        refused(text, call, *args, what=str(args), **options)
    raises_on_all_ranks(hd.RankError, lambda: hd.concat(x) if last else hd.all_reduce(x))
    goes_on()


def test_backward_while_the_background_works(findings, world, rank, size):
    """Of a call of the background: by the messages of the foreground."""
    for turn in range(4):
        x = torch.full((100_000,), rank + 1.0, dtype=torch.float64, requires_grad=True)
        whole = hd.all_reduce(x, async_op=True).wait(60)
        others = [hd.concat(torch.full((20_000 + i,), float(turn)), async_op=True) for i in range(20)]
        (whole.sum() * (rank + 1)).backward()
        findings.check(all((other.wait(60) == turn).all() for other in others), "the others")
        findings.check((x.grad == size * (size + 1) / 2).all(), x.grad)


@several_ranks
def test_after_arguments_that_are_equal_but_of_another_type(rank, size):
    """What one rank has made of them is not kept for the next call."""
    last = rank == size - 1
    for name, other, call in (
        ("op", np.str_("sum"), lambda op: hd.all_reduce(torch.ones(3), op).tolist()),
        ("root", np.int64(0), lambda root: hd.reduce({"a": 1.0}, 0 if root == "sum" else root)),
        ("root", np.int64(0), lambda root: hd.reduce(torch.ones(3), 0 if root == "sum" else root)),
    ):
        first = call(other if last else "sum")
        assert str(call("sum")) == str(first), name
    goes_on()
