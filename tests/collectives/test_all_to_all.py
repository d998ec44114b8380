"""all_to_all of lists and of cut tensors, against plain indexing: values encode source, destination and index."""

import pytest
import torch
from cases import DTYPES, STRIDES, copy_of, strides_for, whole_of
from collective import goes_on, refused, several_ranks

import hpcdist as hd
from hpcdist.runtime.world import team_of

ROUTES = ("mpi", "gloo", "hdf5")
KINDS = {
    "even": lambda source, dest, size: 2,
    "ragged": lambda source, dest, size: (3 * source + 2 * dest) % 4,
    "to one rank": lambda source, dest, size: 3 * (dest == size - 1),
    "from one rank": lambda source, dest, size: (dest + 1) * (source == 0),
    "empty": lambda source, dest, size: 0,
}


def _sent(kind, source, dest, size, shape=(2, 3), dim=0, dtype=torch.int64):
    """What `source` sends to `dest`."""
    extent = KINDS[kind](source, dest, size)
    return whole_of((*shape[:dim], extent, *shape[dim:]), dtype, salt=1 + source * size + dest)


def _row(kind, rank, size, *rest):
    return [_sent(kind, rank, dest, size, *rest) for dest in range(size)]


def _column(kind, rank, size, *rest):
    return [_sent(kind, source, rank, size, *rest) for source in range(size)]


def _joined(parts, dim):
    bits = [part.view(torch.uint8) if part.dtype.itemsize == 1 else part for part in parts]
    return torch.cat(bits, dim).view(parts[0].dtype)


def _check(findings, got, want, told):
    findings.check(isinstance(got, list) and len(got) == len(want), f"{told}: {type(got)}")
    for source, (x, expected) in enumerate(zip(got, want, strict=True)):
        findings.same(x, expected, f"{told}: from {source}")
        findings.check(x.is_contiguous(), f"{told}: from {source}: strides")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("route", ROUTES)
def test_lists_and_tensors(findings, rank, size, kind, route):
    """Every dim, from the front and the back; a small call and, along dim 0, one of many bytes."""
    for shape, dim in [((), 0), ((3,), 0), ((3,), 1), ((2, 3), -2), ((0, 2), 1), ((70_000,), 0)]:
        at = dim % (len(shape) + 1)
        mine, want = (of(kind, rank, size, shape, at, torch.int32) for of in (_row, _column))
        told = f"{shape} dim {dim}"
        _check(findings, hd.all_to_all(mine, dim=dim, route=route), want, told)
        counts = [part.shape[at] for part in mine]
        y, received = hd.all_to_all(torch.cat(mine, at), counts, dim=dim, route=route)
        findings.same(y, torch.cat(want, at), f"{told}: joined")
        findings.check(received == [part.shape[at] for part in want], f"{told}: {received}")


def test_every_dtype_and_strides(findings, rank, size):
    for turn, dtype in enumerate(DTYPES):
        mine, want = (of("ragged", rank, size, (2, 3), turn % 3, dtype) for of in (_row, _column))
        names = list(strides_for(dtype))
        ways = [STRIDES[names[(turn + dest) % len(names)]] for dest in range(size)]  # some change the values, too
        views = [way(copy_of(part)) for way, part in zip(ways, mine, strict=True)]
        before = [copy_of(view) for view in views]
        _check(findings, hd.all_to_all(views, dim=turn % 3), [copy_of(ways[rank](copy_of(x))) for x in want], dtype)
        for view, part in zip(views, before, strict=True):
            findings.same(view, part, f"{dtype}: input changed")


def test_conjugated_and_0d(findings, rank, size):
    x = torch.complex(torch.full((size,), rank).double(), torch.arange(size).double())
    want = torch.complex(torch.arange(size).double(), torch.full((size,), -float(rank)).double())
    findings.same(hd.all_to_all(x.conj())[0], want, "conj()")
    _check(findings, hd.all_to_all(list(x.conj())), list(want.view(size, 1)), "0-d")


def test_the_block_rule(findings, rank, size):
    x = torch.arange(2 * size + 1)
    y, counts = hd.all_to_all(x)
    findings.check(counts == [3 if rank == 0 else 2] * size, counts)
    findings.same(y, hd.split(x, root=None).repeat(size), "block rule")


def test_async_and_groups(findings, world, rank, size):
    comm = world.comm.Split(rank % 2, -rank)
    mine, want = (of("ragged", comm.rank, comm.size) for of in (_row, _column))
    handles = [hd.all_to_all(mine, group=comm, async_op=True), hd.all_to_all(mine, dim=0, group=comm, async_op=True)]
    for handle in handles:
        _check(findings, handle.wait(), want, "async in a group")
    _check(findings, hd.all_to_all(mine, group=comm), want, "in a group")
    comm.Free()


def test_counts_that_do_not_fit_behind_the_headers(findings, rank, size, monkeypatch):
    """As in a large group."""
    monkeypatch.setattr(team_of(), "inline", 0)
    for kind in KINDS:
        mine, want = (of(kind, rank, size) for of in (_row, _column))
        _check(findings, hd.all_to_all(mine), want, kind)
        y, _ = hd.all_to_all(torch.cat(mine), [len(part) for part in mine])
        findings.same(y, torch.cat(want), f"{kind}: joined")


@pytest.mark.parametrize("rows", [1, 300])
@pytest.mark.parametrize("async_op", [False, True])
def test_again_while_one_rank_changes_its_call(findings, rank, size, rows, async_op):
    """In turns, the last rank sends other counts, another shape or dtype; the data are behind the headers, or not."""
    wait = (lambda handle: handle.wait()) if async_op else lambda got: got
    for turn, extra in enumerate((0, 0, 0, 1, 0, 2, 2, 0, 0)):
        sizes = [[rows * (1 + (source + dest) % 2) for dest in range(size)] for source in range(size)]
        sizes[-1][0] += extra * rows
        dim, shape = (1, (2, -1)) if turn in (1, 2, 7, 8) else (0, (-1, 2))
        parts = [
            [
                torch.arange(2 * n).view(shape) + 10_000 * source + 100_000 * dest + 1_000_000 * turn
                for dest, n in enumerate(of)
            ]
            for source, of in enumerate(sizes)
        ]
        if extra == 2:  # dims and dtype must agree
            bad = [part.int() if rank == size - 1 else part for part in parts[rank]]
            if size > 1:
                refused("dtype", lambda bad=bad, dim=dim: wait(hd.all_to_all(bad, dim=dim, async_op=async_op)))
        want = [of[rank] for of in parts]
        _check(findings, wait(hd.all_to_all(parts[rank], dim=dim, async_op=async_op)), want, f"turn {turn}, list")
        x, counts = torch.cat(parts[rank], dim), sizes[rank]
        y, received = wait(hd.all_to_all(x, counts, dim=dim, async_op=async_op))
        findings.same(y, torch.cat(want, dim), f"turn {turn}, tensor")
        findings.check(received == [of[rank] for of in sizes], f"turn {turn}: {received}")
        received.clear()
        y.zero_()


def test_small_repeated_calls_are_one_message(findings, rank, size, monkeypatch):
    comm, seen = team_of().comm, []

    class Spy:
        def __getattr__(self, name):
            seen.append(name)
            return getattr(comm, name)

    monkeypatch.setattr(team_of(), "comm", Spy())
    for columns, told in ((1, ["Allgather"]), (300, ["Allgather", "Alltoallv"])):
        x = torch.arange(size * columns).view(size, columns) + 1000 * rank
        hd.all_to_all(x, [1] * size)
        seen.clear()
        for turn in range(3):
            y, _ = hd.all_to_all(x + turn, [1] * size)
            want = [torch.arange(columns) + columns * rank + 1000 * source + turn for source in range(size)]
            findings.same(y, torch.stack(want), f"{columns} columns")
        findings.check(seen == told * 3, seen)
    parts = [torch.tensor([rank, dest]) for dest in range(size)]
    hd.all_to_all(parts)
    seen.clear()
    _check(findings, hd.all_to_all(parts), [torch.tensor([source, rank]) for source in range(size)], "list")
    findings.check(seen == ["Allgather"], seen)


@pytest.mark.parametrize("columns", [2, 300])
@pytest.mark.parametrize("async_op", [False, True])
def test_plan(findings, rank, size, columns, async_op):
    """Counts are those of the plan; shapes must be the same in every call."""
    mine, want = (of("ragged", rank, size, (columns,), 1) for of in (_row, _column))
    counts, received = ([part.shape[1] for part in parts] for parts in (mine, want))
    plan = hd.plan(hd.all_to_all, torch.cat(mine, 1), counts, dim=1)
    findings.check(plan.shape == plan.box.shape == (columns, sum(received)), plan)
    for turn in range(3):
        got = plan(torch.cat(mine, 1) + turn, async_op=async_op)
        y, found = got.wait() if async_op else got
        findings.same(y, torch.cat(want, 1) + turn, f"turn {turn}")
        findings.check(found == received, found)
        x = torch.cat(mine, 1)
        wrong = torch.cat([x, x[:, :1]], 1) if x.shape[1] else torch.zeros(columns, 1, dtype=x.dtype)
        refused("the plan was made for", plan, wrong if rank == size - 1 else x)
        refused("out is given", plan, x, torch.empty(columns, sum(received), dtype=x.dtype))


@pytest.mark.parametrize("route", ROUTES[:2])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("async_op", [False, True])
def test_gradients(findings, rank, size, dim, route, async_op):
    """The factor of an element's gradient names the rank that received it; of some ranks, none needs a gradient."""
    for needing in (range(size), [0]):
        mine = [part.double() for part in _row("ragged", rank, size, (3,), dim)]
        leaves = [part.clone().requires_grad_(rank in needing) for part in mine]
        whole = torch.cat(mine, dim).requires_grad_(rank in needing)
        options = {"dim": dim, "route": route, "async_op": async_op}
        done = (lambda handle: handle.wait()) if async_op else lambda got: got
        parts = done(hd.all_to_all(leaves, **options))
        joined, _ = done(hd.all_to_all(whole, [part.shape[dim] for part in mine], **options))
        findings.check(joined.requires_grad and all(part.requires_grad for part in parts), "requires_grad")
        (sum((part**2).sum() for part in parts) * (rank + 1)).backward()
        ((joined**2).sum() * (rank + 1)).backward()
        if rank in needing:
            want = [2 * (dest + 1) * part for dest, part in enumerate(mine)]
            for leaf, expected in zip(leaves, want, strict=True):
                findings.same(leaf.grad, expected, "of a list")
            findings.same(whole.grad, torch.cat(want, dim), "of a tensor")
        with torch.no_grad():
            got = done(hd.all_to_all(leaves, **options))
        findings.check(not any(part.requires_grad for part in got), "no_grad")


@several_ranks
@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda xs: [xs[:-1]], "tensors, expected one for each of"),
        (lambda xs: [[*xs[:-1], xs[0].double()]], "the tensors of x differ"),
        (lambda xs: [[*xs[:-1], xs[0][0]]], "the tensors of x differ"),
        (lambda xs: [[*xs[:-1], torch.ones(1, 4)]], "the tensors of x differ"),
        (lambda xs: [[x.double() for x in xs]], "dtype is torch.float64"),
        (lambda xs: [[x[0] for x in xs]], "number of dims is 1"),
        (lambda xs: [[x[:, 1:] for x in xs]], "shape is (*, 2)"),
        (lambda xs: [[*xs[:-1], {"x": xs[-1]}]], "x is a list of structures, where"),
        (lambda xs: [xs, [1] * len(xs)], "counts is given, but x is a list"),
        (lambda xs: [torch.cat(xs)], "x is a tensor, where"),
        (lambda xs: [torch.cat(xs), [1]], "counts has 1 entries"),
        (lambda xs: [torch.cat(xs), [-1, *[1] * (len(xs) - 1)]], "counts has a negative entry"),
        (lambda xs: [torch.cat(xs), [9] * len(xs)], "counts add up to"),
        (lambda xs: [{"x": xs[0]}], "x must be a torch.Tensor, got dict"),
        (lambda xs: [None], "x must be a torch.Tensor, got NoneType"),
    ],
)
def test_errors(rank, size, wrong, text):
    """A mistake of the last rank, in the foreground and in the background: the same error on all ranks."""
    xs = [torch.ones(dest + 1, 3) for dest in range(size)]
    args = wrong(xs) if rank == size - 1 else [xs]
    if size == 2 and "differ" not in text and text.endswith(("torch.float64", "is 1", "2)", "where")):
        text = text.split(" is ")[0] + " is "  # of two ranks, either may be the one that is named
    refused(text, hd.all_to_all, *args)
    refused(text, lambda: hd.all_to_all(*args, async_op=True).wait())
    for options in ({"dim": 1 + (rank == 0)}, {"dim": "rows"}, {"route": "gloo" if rank else "mpi"}):
        refused("dim" if "dim" in options else "route", hd.all_to_all, xs, **options)
    goes_on()


@several_ranks
def test_backward_of_other_calls_in_other_orders(rank, size):
    """As for the other verbs: an error, and no hang."""
    x = torch.ones(size, requires_grad=True)
    first, second = hd.all_to_all(x)[0], hd.all_to_all([x[:1]] * size)[0]
    refused("the result", lambda: (first if rank else second).sum().backward())
    goes_on()


def test_parts_may_be_written(findings, rank, size):
    """Each by itself, although they share memory, also where they have a gradient."""
    leaf = torch.arange(3.0 * size, dtype=torch.float64).requires_grad_()
    got = hd.all_to_all(list((leaf * (rank + 1)).split(3)))
    got[0].mul_(10)
    expected = [
        torch.arange(3.0 * rank, 3.0 * rank + 3) * (source + 1) * (1 if source else 10) for source in range(size)
    ]
    findings.check(all(torch.equal(a, b.double()) for a, b in zip(got, expected, strict=True)), got)
    sum(((part * (rank + 1)).sum() for part in got), torch.zeros(())).backward()
    by_dest = torch.arange(1.0, size + 1).repeat_interleave(3) * (rank + 1) * (10 if rank == 0 else 1)
    findings.check(torch.equal(leaf.grad, by_dest.double()), leaf.grad)
