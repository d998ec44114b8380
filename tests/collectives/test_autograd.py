"""Gradients through the verbs: on every route the transpose of the transfer, against autograd on one process."""

import gc
import itertools
import weakref

import pytest
import torch
from cases import extents_of, part
from collective import goes_on, refused, several_ranks

import hpcdist as hd

ROUTES = ("mpi", "gloo", "hdf5")
CASES = ("even", "ragged", "zero in the middle", "all on one rank")


def _whole(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _check(
    world,
    inputs,
    verb,
    oracle,
    label,
    findings,
):
    """The gradient that `verb` brings to this rank's input, against the one of `oracle`, which makes the results of all
    ranks from the inputs of all ranks on one process. The loss is a sum of weighted cubes, over all ranks' results."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    sum(_loss(result, rank) for rank, result in enumerate(oracle(leaves))).backward()
    mine = inputs[world.rank].clone().requires_grad_()
    _loss(verb(mine), world.rank).backward()
    expected, got = (torch.zeros_like(x) if x.grad is None else x.grad for x in (leaves[world.rank], mine))
    same = torch.allclose(got, expected, rtol=1e-12, atol=1e-12)
    findings.check(same, f"{label}: gradient {got}, expected {expected}")


def _loss(result, rank):
    if result is None:
        return torch.zeros((), requires_grad=True)
    weight = torch.arange(1, result.numel() + 1, dtype=torch.float64).view(result.shape) * (rank + 1)
    return (result**3 * weight).sum()


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("route", ROUTES)
def test_gather_concat_and_split(findings, world, size, route, planned):
    def run(verb, x, *rest):
        return hd.plan(verb, x, *rest, route=route)(x) if planned else verb(x, *rest, route=route)

    for turn, case in enumerate(CASES if route != "hdf5" else CASES[1:2]):
        extents, root = extents_of(case, size), turn % size
        for shape, dim in [((sum(extents),), 0), ((2, sum(extents), 3), 1), ((3, sum(extents)), -1)]:
            whole = _whole(shape, turn)
            shards = [part(whole, dim, extents, rank) for rank in range(size)]
            join = lambda all_, dim=dim: torch.cat(all_, dim)  # noqa: E731
            alone = lambda all_, root=root, join=join: [join(all_) if r == root else None for r in range(size)]  # noqa: E731
            cut = lambda all_, a=(dim, extents), root=root: [part(all_[root], *a, r) for r in range(size)]  # noqa: E731
            for verb, inputs, rest, oracle in (
                (hd.concat, shards, (dim,), lambda all_, join=join: [join(all_)] * size),
                (hd.gather, shards, (dim, root), alone),
                (hd.split, [whole] * size, (dim, root, extents), cut),
            ):
                told = f"{verb.__name__} {case} {shape} dim {dim} root {root}"
                given = lambda x, verb=verb, root=root: None if verb is hd.split and world.rank != root else x  # noqa: E731
                call = lambda x, verb=verb, rest=rest, given=given: run(verb, given(x), *rest)  # noqa: E731
                _check(world, inputs, call, oracle, told, findings)


@pytest.mark.parametrize("route", ROUTES)
def test_redistribute(findings, world, size, route):
    """Also from copies, of which one is taken, and to copies, whose gradients are added up."""
    shape, extents = (2 * size + 1, 5), extents_of("ragged", size)
    whole, ragged = _whole(shape, 1), _whole((sum(extents), 5), 2)
    halos = hd.Boxes([((r, 0), (min(2, shape[0] - r), 5)) for r in range(size)])

    def cut(x, layout):
        return [x[box.slices()] for box in layout.boxes(x.shape, size)]

    rows, columns, copies = hd.Split(0), hd.Split(1), hd.Replicate()
    shards = cut(whole, rows)
    by_chunk = hd.Split(1, "chunk")
    for inputs, src, dst, oracle in [
        (shards, rows, columns, lambda all_: cut(torch.cat(all_), columns)),
        (shards, rows, copies, lambda all_: cut(torch.cat(all_), copies)),
        (shards, rows, halos, lambda all_: cut(torch.cat(all_), halos)),
        ([whole] * size, copies, columns, lambda all_: [cut(x, columns)[rank] for rank, x in enumerate(all_)]),
        (cut(ragged, hd.Split(0, extents)), rows, by_chunk, lambda all_: cut(torch.cat(all_), by_chunk)),
    ]:
        call = lambda x, src=src, dst=dst: hd.redistribute(x, src, dst, route=route)  # noqa: E731
        _check(world, inputs, call, oracle, f"{src} to {dst}", findings)


def test_no_graph_is_kept_when_none_is_needed(findings, rank):
    plain, leaf = torch.ones(rank + 1), torch.ones(rank + 1, requires_grad=True)

    def results(x):
        mine = hd.split(x if rank == 0 else None)
        return [hd.concat(x), hd.gather(x), mine, hd.redistribute(x, hd.Split(0), hd.Replicate())]

    with torch.no_grad():
        found = results(leaf)
    for result in [*found, *results(plain), *results(leaf.detach())]:
        findings.check(result is None or (not result.requires_grad and result.grad_fn is None), result)
    findings.check(hd.gather(plain) is None or rank == 0, "gather gave a result")


def test_strides_lazy_negation_and_0d(findings, rank, size):
    """The gradient has the shape and the values that the tensor's user sees."""
    leaf = (torch.arange(12.0, dtype=torch.float64).view(2, 6) + rank).requires_grad_()
    (hd.concat(leaf.t()[::2], 0) ** 2).sum().backward()
    expected = torch.zeros(2, 6, dtype=torch.float64)
    expected[:, ::2] = 2 * size * leaf.detach()[:, ::2]
    findings.check(torch.equal(leaf.grad, expected), leaf.grad)
    scalar = torch.tensor(2.0 + rank, requires_grad=True)
    (hd.concat(scalar) ** 2).sum().backward()
    findings.same(scalar.grad, (2 * size * scalar).detach(), "0-d")
    lazy = torch.randn(3, dtype=torch.complex64, requires_grad=True)
    hd.concat(lazy.conj()).imag.sum().backward()
    findings.check(torch.equal(lazy.grad, torch.full((3,), -1j * size)), lazy.grad)


def test_bfloat16_gradients_are_added_in_float32(findings, world):
    x = torch.zeros(4, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.tensor(256.0 if world.rank == 0 else 0.5).bfloat16()
    (hd.concat(x) * weight).sum().backward()
    total = torch.tensor(256 + 0.5 * (world.world_size - 1)).bfloat16()
    findings.check(torch.equal(x.grad, total.expand(4)), x.grad)


def test_out_and_a_gradient(rank, size):
    """The same error everywhere, whichever rank gives `out`, and whichever needs a gradient."""
    for asks, gives in itertools.product(range(size), repeat=2):
        x = torch.ones(2, requires_grad=rank == asks)
        out = torch.zeros(2 * size) if rank == gives else None
        for call in (hd.concat, lambda x, out: hd.redistribute(x, hd.Split(0), hd.Replicate(), out=out)):
            refused("[HD208]", call, x, out=out, ranks=[gives])
    with torch.no_grad():
        out = torch.zeros(2 * size, requires_grad=True)
        assert hd.concat(torch.ones(2, requires_grad=True), out=out) is out


def test_asynchronous_and_other_results_in_one_backward(findings, world, size):
    """Though one rank's threads have done more than another's, and the shapes differ."""
    if world.rank == 0:
        for _ in range(50):
            torch.ones(1, requires_grad=True).exp()
    x, y = torch.ones(2, requires_grad=True), torch.ones(5, requires_grad=True)
    handles = [hd.concat(x, async_op=True), hd.concat(x * 2, async_op=True)]
    other = hd.concat(y)
    (sum(handle.wait(60).sum() for handle in handles) + 10 * other.sum()).backward()
    findings.check(x.grad.tolist() == [3 * size] * 2, x.grad)
    findings.check(y.grad.tolist() == [10 * size] * 5, y.grad)


@several_ranks
def test_other_steps_than_the_backward_pass_of_one_rank_are_errors(world):
    """That of another result of the same verb and shape, which nothing else would show; another verb."""
    results = [hd.concat(torch.ones(2, requires_grad=True)) for _ in range(2)]
    for step, told in (
        (results[1].sum().backward, "the result is number"),
        (lambda: hd.concat(torch.ones(1)), "the backward pass of concat()"),
    ):
        mine = step if world.rank else lambda: results[0].sum().backward()
        refused(told, mine)
    goes_on()


@pytest.mark.parametrize("columns", [1, 100])
@pytest.mark.parametrize("route", ["mpi", "gloo"])
def test_no_grad_on_one_rank_only(findings, rank, size, last, route, columns):
    """That rank takes part in the backward pass; and where nobody goes back through such a result, the results are
    still counted alike on all ranks, so that the backward passes that follow find each other."""
    layouts = (hd.Split(0), hd.Replicate())
    x = torch.ones(2, columns, requires_grad=True)
    verbs = [
        lambda x: hd.redistribute(x, *layouts, route=route),
        lambda x: hd.concat(x, route=route),
        hd.plan(hd.redistribute, x, *layouts, route=route),
        hd.plan(hd.concat, x, route=route),
    ]
    for verb, (quiet, back) in itertools.product(verbs, [(True, False), (True, True), (False, True)]):
        quiet = quiet and rank == last > 0
        x = torch.full((2, columns), 1.0 + rank, requires_grad=True)
        with torch.set_grad_enabled(not quiet):
            whole = verb(x)
        if back:
            whole.square().sum().backward()
            wanted = torch.full((2, columns), 2.0 * size * (1 + rank))
            findings.check(quiet or torch.equal(x.grad, wanted), f"gradient {x.grad}")
        with torch.no_grad():
            findings.check(not verb(x).requires_grad, "no rank wants a gradient")


def test_backward_after_the_group_was_freed(world):
    """An error on this rank, and the job can go on."""
    comm = world.comm.Dup()
    y = hd.concat(torch.ones(2, requires_grad=True), group=comm)
    comm.Free()
    with pytest.raises(hd.HpcdistError, match=r"the backward pass of concat: .* its group was freed"):
        y.sum().backward()
    goes_on()


def test_a_result_dies_with_its_last_reference(findings, world):
    """No cycle keeps the graph, and with it memory, until the garbage collector runs."""
    calls = {
        "concat": lambda x: hd.concat(x),
        "redistribute": lambda x: hd.redistribute(x, hd.Split(0), hd.Replicate()),
        "in the background": lambda x: hd.concat(x, async_op=True).wait(30),
        "split": lambda x: hd.split(x if world.rank == 0 else None),
    }
    gc.disable()
    try:
        for name, call in calls.items():
            x = torch.ones(world.world_size, requires_grad=True)
            y = call(x)
            y.sum().backward()
            alive = weakref.ref(x), weakref.ref(y)
            del x, y
            findings.check([ref() for ref in alive] == [None, None], name)
    finally:
        gc.enable()
