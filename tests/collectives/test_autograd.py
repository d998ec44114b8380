"""Gradients through the verbs: on every route the transpose of the transfer, against autograd on one process."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from cases import extents_of, part, whole_of
from collective import Findings, assert_on_all_ranks, raises_on_all_ranks
from torch import Tensor

import hpcdist as hd

pytestmark = pytest.mark.mpi

ROUTES = ("mpi", "gloo", "hdf5")
CASES = ("even", "ragged", "zero in the middle", "all on one rank")


def _whole(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _check(
    world: hd.World,
    shards: list[Tensor],
    verb: Callable[[Tensor], Tensor],
    oracle: Callable[[list[Tensor]], list[Tensor]],
    label: str,
    findings: Findings,
) -> None:
    """The gradient that `verb` brings to this rank's shard, against the one of `oracle`, which makes the results of all
    ranks from the shards of all ranks on one process. The loss is a sum of weighted cubes, over all ranks' results."""
    leaves = [shard.clone().requires_grad_() for shard in shards]
    loss = torch.zeros((), dtype=torch.float64)
    for rank, result in enumerate(oracle(leaves)):
        loss = loss + _loss(result, rank)
    loss.backward()
    mine = shards[world.rank].clone().requires_grad_()
    _loss(verb(mine), world.rank).backward()
    expected = leaves[world.rank].grad
    expected = torch.zeros_like(shards[world.rank]) if expected is None else expected
    same = mine.grad is not None and torch.allclose(mine.grad, expected, rtol=1e-12, atol=1e-12)
    findings.check(same, f"{label}: gradient {mine.grad}, expected {expected}")


def _loss(result: Tensor, rank: int) -> Tensor:
    weight = torch.arange(1, result.numel() + 1, dtype=torch.float64).view(result.shape) * (rank + 1)
    return (result**3 * weight).sum()


@pytest.mark.parametrize("route", ROUTES)
def test_gather_concat_and_split(world: hd.World, route: str) -> None:
    findings, size = Findings(world.comm), world.world_size
    for turn, case in enumerate(CASES if route != "hdf5" else CASES[1:2]):
        extents = extents_of(case, size)
        for shape, dim in [((sum(extents),), 0), ((2, sum(extents), 3), 1), ((3, sum(extents)), -1)]:
            whole, root = _whole(shape, turn), turn % size
            shards = [part(whole, dim, extents, rank) for rank in range(size)]
            label = f"{case} {shape} dim {dim} root {root}"

            def concat(x: Tensor, dim: int = dim) -> Tensor:
                result: Tensor = hd.concat(x, dim, route=route)
                return result

            def gather(x: Tensor, dim: int = dim, root: int = root) -> Tensor:
                result: Tensor = hd.gather(x, dim, root, route=route)
                return result

            def split(x: Tensor, dim: int = dim, root: int = root, extents: tuple[int, ...] = extents) -> Tensor:
                result: Tensor = hd.split(x if world.rank == root else None, dim, root, extents, route=route)
                return result

            _check(world, shards, concat, lambda all_, d=dim: [torch.cat(all_, d)] * size, f"concat {label}", findings)
            _check(
                world,
                shards,
                gather,
                lambda all_, d=dim, r=root: [torch.cat(all_, d) if i == r else torch.zeros(0) for i in range(size)],
                f"gather {label}",
                findings,
            )
            _check_split(world, whole, dim, extents, root, split, f"split {label}", findings)
    findings.settle()


def _check_split(
    world: hd.World,
    whole: Tensor,
    dim: int,
    extents: tuple[int, ...],
    root: int,
    split: Callable[[Tensor], Tensor],
    label: str,
    findings: Findings,
) -> None:
    leaf = whole.clone().requires_grad_()
    sum(_loss(part(leaf, dim, extents, rank), rank) for rank in range(world.world_size)).backward()  # type: ignore[union-attr]
    mine = whole.clone().requires_grad_()
    _loss(split(mine), world.rank).backward()
    if world.rank == root:
        assert leaf.grad is not None
        findings.check(mine.grad is not None and torch.allclose(mine.grad, leaf.grad, rtol=1e-12), label)
    else:
        findings.check(mine.grad is None, f"{label}: a gradient where there was no tensor")


@pytest.mark.parametrize("route", ROUTES)
def test_redistribute(world: hd.World, route: str) -> None:
    """Also from copies, of which one is taken, and to copies, whose gradients are added up."""
    findings, size = Findings(world.comm), world.world_size
    shape = (2 * size + 1, 5)
    whole = _whole(shape, 1)
    extents = extents_of("ragged", size)
    ragged = _whole((sum(extents), 5), 2)
    half = [(r, min(r + 2, shape[0])) for r in range(size)]  # overlapping rows
    overlapping = hd.Boxes([((a, 0), (b - a, 5)) for a, b in half])
    rows = hd.Split(0).boxes(shape, size)
    columns = hd.Split(1).boxes(shape, size)

    def go(src: hd.layout.Layout, dst: hd.layout.Layout) -> Callable[[Tensor], Tensor]:
        def call(x: Tensor) -> Tensor:
            result: Tensor = hd.redistribute(x, src, dst, route=route)
            return result

        return call

    def cut(x: Tensor, boxes: list[hd.layout.Box]) -> list[Tensor]:
        return [x[box.slices()] for box in boxes]

    _check(
        world,
        cut(whole, rows),
        go(hd.Split(0), hd.Split(1)),
        lambda all_: cut(torch.cat(all_), columns),
        "rows to columns",
        findings,
    )
    _check(
        world,
        cut(whole, rows),
        go(hd.Split(0), hd.Replicate()),
        lambda all_: [torch.cat(all_)] * size,
        "copies",
        findings,
    )
    _check(
        world,
        cut(whole, rows),
        go(hd.Split(0), overlapping),
        lambda all_: [torch.cat(all_)[a:b] for a, b in half],
        "overlapping boxes",
        findings,
    )
    _check(
        world,
        [whole] * size,
        go(hd.Replicate(), hd.Split(1)),
        lambda all_: [x[box.slices()] for x, box in zip(all_, columns, strict=True)],
        "from copies",
        findings,
    )
    _check(
        world,
        [part(ragged, 0, extents, rank) for rank in range(size)],
        go(hd.Split(0), hd.Split(1, "chunk")),
        lambda all_: cut(torch.cat(all_), hd.Split(1, "chunk").boxes(ragged.shape, size)),
        "ragged rows to columns",
        findings,
    )
    findings.settle()


def test_gradcheck(world: hd.World) -> None:
    """torch's own check, by finite differences: of a loss over all ranks, all ranks together."""
    findings, size = Findings(world.comm), world.world_size
    extents = extents_of("ragged", size)
    whole = _whole((sum(extents), 2), 3)
    columns = hd.Split(1).boxes(whole.shape, size)

    def through_all(x: Tensor) -> Tensor:
        """Of the whole, which every rank has, so that all do the same steps: shards, columns, all rows, one number."""
        mine = part(x, 0, extents, world.rank)
        there = hd.redistribute(mine, hd.Split(0), hd.Split(1))
        back: Tensor = hd.concat(there, 1)
        return (back**2).sum() / size

    leaf = whole.clone().requires_grad_()
    through_all(leaf).backward()
    assert leaf.grad is not None
    # A rank's gradient is that of its own rows; finite differences on all ranks at once see the sum.
    found: Tensor = hd.concat(part(leaf.grad, 0, extents, world.rank).clone())
    numeric = torch.zeros_like(whole)
    for i in range(whole.numel()):
        step = torch.zeros_like(whole)
        step.view(-1)[i] = 1e-6
        with torch.no_grad():
            numeric.view(-1)[i] = (through_all(whole + step) - through_all(whole - step)) * size / 2e-6
    findings.check(torch.allclose(found, numeric, rtol=1e-6), f"{found}, numerically {numeric}, columns {columns}")
    if size == 1:
        findings.check(torch.autograd.gradcheck(through_all, (leaf,)), "gradcheck")
    findings.settle()


def test_a_gradient_on_one_rank_only(world: hd.World) -> None:
    """Every rank gets a result to call backward on, and only the rank that asked gets a gradient."""
    findings = Findings(world.comm)
    asks = world.rank == world.world_size - 1
    x = torch.full((2,), float(world.rank), requires_grad=asks)
    whole = hd.concat(x)
    findings.check(whole.requires_grad, "the result takes no part")
    (whole * (world.rank + 1)).sum().backward()
    total = float(sum(range(1, world.world_size + 1)))
    findings.check(x.grad is None if not asks else x.grad is not None and x.grad.tolist() == [total] * 2, x.grad)
    findings.settle()


def test_no_graph_is_kept_when_none_is_needed(world: hd.World) -> None:
    findings = Findings(world.comm)
    plain, leaf = torch.ones(world.rank + 1), torch.ones(world.rank + 1, requires_grad=True)

    def results(x: Tensor) -> list[Tensor | None]:
        mine = hd.split(x if world.rank == 0 else None)
        return [hd.concat(x), hd.gather(x), mine, hd.redistribute(x, hd.Split(0), hd.Replicate())]

    with torch.no_grad():
        found = results(leaf)
    for result in [*found, *results(plain), *results(leaf.detach())]:
        findings.check(result is None or (not result.requires_grad and result.grad_fn is None), result)
    findings.check(hd.gather(plain) is None or world.rank == 0, "gather gave a result")
    findings.settle()


def test_strides_lazy_negation_and_0d(world: hd.World) -> None:
    """The gradient has the shape and the values that the tensor's user sees."""
    findings, size = Findings(world.comm), world.world_size
    base = whole_of((3, 2), torch.complex64).view(torch.float32).to(torch.float64).view(2, 6)
    leaf = (
        torch.arange(12.0, dtype=torch.float64).view(2, 6) + world.rank + 0 * base.nan_to_num(0, 0, 0)
    ).requires_grad_()
    (hd.concat(leaf.t()[::2], 0) ** 2).sum().backward()
    expected = torch.zeros(2, 6, dtype=torch.float64)
    expected[:, ::2] = 2 * size * leaf.detach()[:, ::2]
    findings.check(leaf.grad is not None and torch.equal(leaf.grad, expected), leaf.grad)
    scalar = torch.tensor(2.0 + world.rank, requires_grad=True)
    (hd.concat(scalar) ** 2).sum().backward()
    findings.check(
        scalar.grad is not None and scalar.grad.shape == () and scalar.grad == 2 * size * scalar, scalar.grad
    )
    lazy = torch.randn(3, dtype=torch.complex64, requires_grad=True)
    hd.concat(lazy.conj()).imag.sum().backward()
    findings.check(lazy.grad is not None and torch.equal(lazy.grad, torch.full((3,), -1j * size)), lazy.grad)
    findings.settle()


def test_bfloat16_gradients_are_added_in_float32(world: hd.World) -> None:
    findings = Findings(world.comm)
    x = torch.zeros(4, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.tensor(256.0 if world.rank == 0 else 0.5).bfloat16()
    (hd.concat(x) * weight).sum().backward()
    total = torch.tensor(256 + 0.5 * (world.world_size - 1)).bfloat16()
    findings.check(x.grad is not None and torch.equal(x.grad, total.expand(4)), x.grad)
    findings.settle()


def test_out_and_a_gradient(world: hd.World) -> None:
    """The same error everywhere, whichever rank gives `out`, and whichever needs a gradient."""
    size = world.world_size
    for asks in range(size):
        for gives in range(size):
            x = torch.ones(2, requires_grad=world.rank == asks)
            out = torch.zeros(2 * size) if world.rank == gives else None
            error = raises_on_all_ranks(world.comm, hd.RankError, lambda x=x, out=out: hd.concat(x, out=out))
            findings = Findings(world.comm)
            findings.check(list(error.problems) == [gives] and "out is given, but a gradient" in str(error), error)
            findings.settle()
            raises_on_all_ranks(
                world.comm, hd.RankError, lambda x=x, out=out: hd.redistribute(x, hd.Split(0), hd.Replicate(), out=out)
            )
    with torch.no_grad():
        out = torch.zeros(2 * size, requires_grad=True)
        assert hd.concat(torch.ones(2, requires_grad=True), out=out) is out


def test_a_gradient_through_an_asynchronous_call(world: hd.World) -> None:
    findings = Findings(world.comm)
    x = torch.full((2,), float(world.rank), requires_grad=True)
    handles = [hd.concat(x, async_op=True), hd.concat(x * 2, async_op=True)]
    sum((handle.wait() * (world.rank + 1)).sum() for handle in handles).backward()  # type: ignore[union-attr]
    total = float(3 * sum(range(1, world.world_size + 1)))
    findings.check(x.grad is not None and x.grad.tolist() == [total] * 2, x.grad)
    findings.settle()


def test_asynchronous_and_other_results_in_one_backward(world: hd.World) -> None:
    """Though one rank's threads have done more than another's, and the shapes differ."""
    findings, size = Findings(world.comm), world.world_size
    if world.rank == 0:
        for _ in range(50):
            torch.ones(1, requires_grad=True).exp()
    x, y = torch.ones(2, requires_grad=True), torch.ones(5, requires_grad=True)
    handle = hd.concat(x, async_op=True)
    other = hd.concat(y)
    (handle.wait(60).sum() + 10 * other.sum()).backward()
    findings.check(x.grad is not None and x.grad.tolist() == [size] * 2, x.grad)
    findings.check(y.grad is not None and y.grad.tolist() == [10 * size] * 5, y.grad)
    findings.settle()


@pytest.mark.mpi(min_size=2)
def test_backward_through_different_results_is_an_error(world: hd.World) -> None:
    """Of the same verb and shape: nothing else would show it."""
    results = [hd.concat(torch.ones(2, requires_grad=True)) for _ in range(2)]
    error = raises_on_all_ranks(world.comm, hd.RankError, results[min(world.rank, 1)].sum().backward)
    findings = Findings(world.comm)
    findings.check("the result is number" in str(error), error)
    findings.settle()


@pytest.mark.mpi(min_size=2)
def test_backward_on_some_ranks_only_is_an_error(world: hd.World) -> None:
    """A rank that goes on to another verb: all are told, and the job can go on."""
    x = torch.ones(2, requires_grad=True)
    whole = hd.concat(x)
    step = whole.sum().backward if world.rank == 0 else lambda: hd.concat(torch.ones(1))
    error = raises_on_all_ranks(world.comm, hd.RankError, step)
    findings = Findings(world.comm)
    findings.check("the backward pass of concat()" in str(error), error)
    findings.check(hd.concat(torch.ones(1)).numel() == world.world_size, "the next call")
    findings.settle()


@pytest.mark.parametrize("route", ["mpi", "gloo"])
def test_no_grad_on_one_rank_only(world: hd.World, route: str) -> None:
    """The results are counted alike on all ranks, so that the backward passes that follow find each other."""
    findings, last = Findings(world.comm), world.world_size - 1
    plan = hd.plan(hd.redistribute, torch.ones(2, requires_grad=True), hd.Split(0), hd.Replicate(), route=route)
    verbs: list[Callable[[Tensor], Tensor]] = [
        lambda x: hd.redistribute(x, hd.Split(0), hd.Replicate(), route=route),
        lambda x: hd.concat(x, route=route),
        plan,
    ]
    for verb in verbs:
        for quiet in (True, False):
            x = torch.full((2,), 1.0 + world.rank, requires_grad=True)
            with torch.set_grad_enabled(not (quiet and world.rank == last)):
                whole = verb(x)
            if quiet:
                continue  # whose results nobody goes back through
            whole.square().sum().backward()
            expected = torch.full((2,), 2.0 * world.world_size * (1 + world.rank))
            findings.same(x.grad, expected, f"gradient {x.grad}")
    findings.settle()


@pytest.mark.parametrize("columns", [1, 100])
def test_a_backward_pass_through_a_call_within_no_grad_on_one_rank(world: hd.World, columns: int) -> None:
    """That rank takes part: through verbs and plans alike, of small tensors and of larger ones."""
    findings, last, rank = Findings(world.comm), world.world_size - 1, world.rank
    plan = hd.plan(hd.concat, torch.ones(2, columns, requires_grad=True))
    for verb in (hd.concat, plan):
        x = torch.full((2, columns), 1.0 + rank, requires_grad=True)
        with torch.set_grad_enabled(rank != last or last == 0):
            whole = verb(x)
        whole.square().sum().backward()
        expected = torch.full((2, columns), 2.0 * world.world_size * (1 + rank))
        if rank != last or last == 0:
            findings.same(x.grad, expected, f"gradient {x.grad}")
    with torch.no_grad():
        findings.check(not plan(x).requires_grad, "no rank wants a gradient")
    findings.settle()


def test_backward_after_the_group_was_freed(world: hd.World) -> None:
    """An error on this rank, and the job can go on."""
    comm = world.comm.Dup()
    y = hd.concat(torch.ones(2, requires_grad=True), group=comm)
    comm.Free()
    with pytest.raises(hd.HpcdistError, match=r"the backward pass of concat: .* its group was freed"):
        y.sum().backward()
    assert_on_all_ranks(world.comm, hd.concat(torch.ones(1)).numel() == world.world_size, "the next call")


def test_a_result_dies_with_its_last_reference(world: hd.World) -> None:
    """No cycle keeps the graph, and with it memory, until the garbage collector runs."""
    findings = Findings(world.comm)
    calls: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "concat": lambda x: hd.concat(x),
        "redistribute": lambda x: hd.redistribute(x, hd.Split(0), hd.Replicate()),
        "in the background": lambda x: hd.concat(x, async_op=True).wait(30),
    }
    gc.disable()
    try:
        for name, call in calls.items():
            x = torch.ones(3, requires_grad=True)
            y = call(x)
            y.sum().backward()
            alive = weakref.ref(x)
            del x, y
            findings.check(alive() is None, name)
    finally:
        gc.enable()
    findings.settle()
