"""A call like an earlier one computes less again; the data of small calls travel behind the headers."""

import itertools

import pytest
import torch
from cases import DTYPES, EXTENTS, Index, extents_of, part, whole_of
from collective import Battery, assert_on_all_ranks, refused

import hpcdist as hd
from hpcdist.collectives import run
from hpcdist.collectives.join import Join
from hpcdist.collectives.kept import BEHIND_HEADERS
from hpcdist.collectives.redistribute import Redistribute
from hpcdist.collectives.split import Scatter
from hpcdist.comm.team import HEADER, inline_capacity
from hpcdist.layout import limits
from hpcdist.runtime.world import team_of

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("case", EXTENTS)
def test_again_and_again_with_other_values(case, world, size):
    """Every dtype and dim, the same call three times: what was kept of the first is not its data."""
    battery = Battery(world)
    extents = extents_of(case, size)
    for dtype, dim, salt in itertools.product(DTYPES, (0, 1), range(3)):
        shape = (sum(extents), 2) if dim == 0 else (2, sum(extents))
        battery.run(whole_of(shape, dtype, salt), dim, extents, sum(extents) % size)
    battery.findings.settle()


def test_around_the_capacity(world, size):
    """Of some ranks the data fit, of others they do not."""
    battery, most = Battery(world), team_of().inline
    for nbytes, step, salt in itertools.product((most - 1, most, most + 1), (-1, 0, 1), range(2)):
        extents = tuple(nbytes + step * (rank % 2) for rank in range(size))
        battery.run(whole_of((sum(extents),), torch.uint8, salt), 0, extents, salt % size)
    battery.findings.settle()


@pytest.mark.parametrize("columns", [1, 300])
def test_extents_that_change_on_one_rank_alone(columns, world, size):
    """The others repeat their call, and find that it is not the same; also where the data are too large for headers."""
    battery = Battery(world)
    for turn in (0, 0, 1, 2, 2, 0, 100, 100, 0, 100, 0):
        extents = tuple(2 + turn * (rank == size - 1) for rank in range(size))
        for dim, shape in enumerate(((sum(extents), columns), (columns, sum(extents)))):
            battery.run(whole_of(shape, torch.int64, turn), dim, extents, 0)
    battery.findings.settle()


@pytest.mark.parametrize("given", ["all", "one", "turns"])
def test_into_memory_of_the_callers(given, findings, rank, size):
    """On all ranks or on one of them, in turns with new memory; once it is strided, once `x` is a part of it."""
    extents = tuple(rank + 1 for rank in range(size))
    for turn in range(8):
        whole = whole_of((sum(extents), 2), torch.int32, turn)
        mine = part(whole, 0, extents, rank)
        into = given == "all" or (rank == size - 1 if given == "one" else turn % 3 != 0)
        out = torch.full((sum(extents), 4), -1, dtype=torch.int32)[:, ::2] if turn == 5 else torch.full_like(whole, -1)
        x, piece, version = mine, torch.full_like(mine, -1), out._version
        if turn == 6:
            x = out[: len(mine)].copy_(mine)
        got = hd.concat(x, out=out if into else None)
        findings.same(got, whole, f"concat, turn {turn}")
        findings.check((got is out) == into == (out._version > version + (turn == 6)), f"turn {turn}: not out")
        on_root = (whole, 0, 0, list(extents)) if rank == 0 else (None,)
        got = hd.split(*on_root, out=piece if into else None)
        findings.same(got, mine, f"split, turn {turn}")
        findings.check((got is piece) == into, f"turn {turn}: the part is not out")
        got = hd.gather(mine, root=size - 1, out=out if into and rank == size - 1 else None)
        findings.check(got is None if rank < size - 1 else torch.equal(got, whole), f"gather, turn {turn}")


def test_counts_that_change_in_place(findings, rank, size):
    """The same tensors or objects as before are other numbers now."""
    whole, tensor = torch.arange(size), torch.ones(size, dtype=torch.int64)
    tensors, objects, none = [torch.tensor(1) for _ in range(size)], [Index(1) for _ in range(size)], [0] * (size - 1)
    for rows in ([1] * size, [1] * size, [size, *none], [*none, size]):
        tensor[:] = torch.tensor(rows)
        for count, held, now in zip(tensors, objects, rows, strict=True):
            count.fill_(now)
            held.value = now
        for counts in (tensor, tensors, objects):
            mine = hd.split(*((whole, 0, 0, counts) if rank == 0 else (None,)))
            findings.check(torch.equal(mine, whole.split(rows)[rank]), f"{type(counts[0])}, {rows}: {mine}")


def test_mistakes_between_repeated_calls(world, last, size):
    x = torch.arange(2) + 10 * world.rank
    expected = torch.cat([torch.arange(2) + 10 * rank for rank in range(size)])
    freed = torch.arange(2)
    freed.untyped_storage().resize_(0)
    for mistake in (freed, x.to_sparse(), torch.nested.nested_tensor([x])):
        for _ in range(2):
            assert_on_all_ranks(torch.equal(hd.concat(x), expected))
        given = mistake if world.rank == last else x
        refused("", hd.concat, given)
        whole = (mistake if world.rank == last else None) if size > 1 else mistake
        refused("", hd.split, whole, 3, last)
    split = lambda counts: hd.split(*((expected, 0, 0, counts) if world.rank == 0 else (None,)))  # noqa: E731
    assert_on_all_ranks(torch.equal(split([2] * size), x))
    refused("", split, [2.0] * size)
    for dim in (1.0, True, "0", [0]):
        hd.concat(x), hd.concat(x[:, None], 1)
        refused("", hd.concat, x[:, None], dim)


def test_other_calls_between_repeated_calls(findings, rank, size):
    """With a gradient that one rank needs, in the background, planned."""
    x, expected = torch.full((2,), float(rank)), torch.arange(float(size)).repeat_interleave(2)
    for _ in range(3):
        findings.same(hd.concat(x), expected, "repeated")
        leaf = x.clone().requires_grad_() if rank == size - 1 else x
        hd.concat(leaf).sum().backward()
        findings.check(leaf is x or torch.equal(leaf.grad, torch.full((2,), float(size))), leaf.grad)
        with torch.no_grad():
            findings.same(hd.concat(leaf), expected, "within no_grad")
        handle, planned = hd.concat(x, async_op=True), hd.plan(hd.concat, leaf)
        findings.check(planned.methods == (BEHIND_HEADERS.name,), planned)
        findings.same(hd.concat(x), expected, "beside one in the background")
        findings.same(handle.wait(), expected, "in the background")


def test_what_is_remembered_is_bounded(world, monkeypatch):
    """And what is forgotten is made again."""
    monkeypatch.setattr(run, "MOST", 5)
    team = team_of()
    for turn in range(100):
        n = turn % 70 + 1
        whole = hd.concat(torch.full((n,), turn, dtype=torch.uint8))
        assert_on_all_ranks(whole.tolist() == [turn] * (n * world.world_size))
        columns = hd.redistribute(x := whole_of((n, 2), torch.int32), hd.Replicate(), hd.Split(1))
        assert_on_all_ranks(torch.equal(columns, hd.local(x, hd.Split(1))))
    assert_on_all_ranks(0 < len(team.repeats) <= 5, len(team.repeats))


def test_the_headers_of_many_ranks_stay_small():
    for size in (1, 2, 4096, 16384, 10**6):
        assert size * (HEADER + inline_capacity(size)) <= max(limits.HEADERS, HEADER * size)
    assert list(map(inline_capacity, (2, 16, 64, 8192, 10**6))) == [960, 960, 192, 64, 0]


@pytest.mark.parametrize("n", [3, 300])
def test_repeated_calls_are_known(n, last, rank, size, monkeypatch):
    """Also with out and counts, and where it was another rank whose extent changed once."""
    team = team_of()
    team.repeats.clear()  # as when there are too many
    x, out, part = torch.arange(n), torch.empty(n * size, dtype=torch.int64), torch.empty(n)

    def call():
        out.fill_(-1), part.fill_(-1)
        hd.concat(x, out=out)
        hd.gather(x)
        hd.split(torch.ones(n * size) if rank == 0 else None, counts=[n] * size, out=part)
        hd.redistribute(x, hd.Split(0), hd.Replicate(), out=out)
        whole = hd.concat(torch.ones(3 if rank == last else 2))
        assert_on_all_ranks(len(whole) == 2 * last + 3)
        assert_on_all_ranks(torch.equal(out, x.repeat(size)) and torch.equal(part, torch.ones(n)))

    def refuse(*_):
        raise AssertionError("the call was not known")

    hd.concat(torch.ones(2))
    call()
    for kind in (Join, Scatter, Redistribute):
        monkeypatch.setattr(kind, "plan", refuse)
    call()
