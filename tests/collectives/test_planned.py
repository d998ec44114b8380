"""Plans: wrong calls, several at once, their end. That they do what their verb does is in test_property.py."""

import pytest
import torch
from cases import extents_of, part, same_bits, whole_of
from collective import assert_on_all_ranks, raises_on_all_ranks, refused, several_ranks
from torch import Tensor

import hpcdist as hd
from hpcdist.runtime.world import team_of

VERBS = ("concat", "gather", "split", "redistribute")
COLUMNS = (3, 300)  # extents of the other dim: the data travel with the headers, and they do not


class Planned:
    """A plan of a verb for a tensor of which the ranks hold, or get, parts along `dim`."""

    def __init__(self, verb, whole, dim, extents, rank, **options):
        self.verb, self.dim, self.extents, self.rank = verb, dim, extents, rank
        self.root = len(extents) - 1
        x = self.x(whole)
        rest = {
            "concat": (dim,),
            "gather": (dim, self.root),
            "split": (dim, self.root, extents if rank == self.root else None),
            "redistribute": (hd.Split(dim, extents), hd.Split(dim, extents[::-1])),
        }
        self.plan = hd.plan(getattr(hd, verb), x, *rest[verb], **options)

    def x(self, whole):
        if self.verb == "split":
            return whole if self.rank == self.root else None
        return part(whole, self.dim, self.extents, self.rank)

    def expected(self, whole):
        whole = whole.resolve_conj().resolve_neg()
        if self.verb == "gather" and self.rank != self.root:
            return None
        if self.verb in ("concat", "gather"):
            return whole
        extents = self.extents if self.verb == "split" else self.extents[::-1]
        return part(whole, self.dim, extents, self.rank)

    def problem(self, got, whole):
        expected = self.expected(whole)
        if expected is None or not isinstance(got, Tensor):
            return None if expected is None and got is None else f"{self.verb}: got {got!r}, expected {expected!r}"
        return None if same_bits(got, expected) else f"{self.verb} {self.extents}: wrong values, or {got.shape}"


@pytest.mark.parametrize("columns", COLUMNS)
def test_ranks_agree_in_one_message(findings, world, size, columns, monkeypatch):
    """In which small data travel, too; others travel in one call after it."""
    extents, comm = extents_of("ragged", size), team_of().comm
    seen = []

    class Spy:
        """The team's communicator, which notes what is called."""

        def __getattr__(self, name):
            seen.append(name)
            return getattr(comm, name)

    whole = whole_of((sum(extents), columns), torch.int16)
    planned = Planned("redistribute", whole, 0, extents, world.rank)
    monkeypatch.setattr(team_of(), "comm", Spy())
    got = [planned.plan(planned.x(whole)) for _ in range(3)]
    monkeypatch.undo()
    alltoall = ["Alltoallv"] * (columns > COLUMNS[0] and size > 1)
    findings.check(seen == ["Allgather", *alltoall] * 3, seen)
    for result in got:
        findings.check(planned.problem(result, whole) is None, planned.verb)


def test_neither_sent_nor_kept(findings, rank):
    """Planning keeps nothing of x alive; results are new memory, and x is not changed."""
    for columns in COLUMNS:
        x = torch.full((2, columns), float(rank))
        plan = hd.plan(hd.concat, x)
        storage = torch.multiprocessing.reductions.StorageWeakRef(x.untyped_storage())
        del x
        findings.check(storage.expired(), "x is kept")
        y = torch.full((2, columns), 1.0 + rank)
        first, second = plan(y), plan(y)
        findings.check(first.data_ptr() != second.data_ptr(), "the same memory twice")
        first.fill_(-1)
        findings.same(plan(y), second, "after an earlier result was overwritten")
        findings.same(y, torch.full((2, columns), 1.0 + rank), "x")


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("verb", VERBS)
def test_wrong_on_one_rank(findings, world, rank, size, verb, columns):
    """The same RankError on all ranks, which names the one at fault; out is unchanged, and the plan still works."""
    extents = (2,) * size
    whole = whole_of((2 * size, columns), torch.float32)
    planned = Planned(verb, whole, 0, extents, rank)
    wrong_rank = planned.root
    x, expected = planned.x(whole), planned.expected(whole)
    wrong = []
    if rank == wrong_rank:
        good, out = x, torch.zeros_like(expected)
        wrong = [
            (good[1:], None, "x is a torch.float32 tensor of shape"),
            (good.double(), None, "x is a torch.float64 tensor"),
            (good.to("meta"), None, "on meta, but the plan was made for"),
            (good.to_sparse(), None, "x must be a dense tensor"),
            (None, None, "x must be a torch.Tensor"),
            (good, out[1:], "out has "),
            (good, out.double(), "out has dtype torch.float64"),
            (good, out[:1].expand(out.shape), "out overlaps itself"),
            (good, out.clone().requires_grad_(), "out requires a gradient"),
            (good, 3, "out must be a "),
        ]
    for i in range(world.comm.bcast(len(wrong), wrong_rank)):
        for async_op in (False, True):
            kept = None if expected is None else torch.zeros_like(expected)
            given = wrong[i][:2] if wrong else (x, kept)

            def call(given=given, async_op=async_op):
                result = planned.plan(*given, async_op=async_op)
                return result.wait(30) if async_op else result

            error = refused(f"a plan of {verb}() was refused", call, ranks=[wrong_rank])
            text = world.comm.bcast(wrong[i][2] if wrong else "", wrong_rank)
            findings.check(text in error.problems[wrong_rank], f"{i}: {error}")
            findings.check(kept is None or not kept.any(), "out was written")
        text = planned.problem(planned.plan(x), whole)
        findings.check(text is None, f"the next call: {text}")


@several_ranks
@pytest.mark.parametrize("columns", COLUMNS)
def test_where_no_tensor_is_expected(rank, size, columns):
    """x on a rank to which split sends, out on one that gather does not send to."""
    ones = torch.ones(size, columns)
    given = rank in (0, size - 1)
    split, gather = hd.plan(hd.split, None if rank else ones), hd.plan(hd.gather, ones)
    out = torch.ones(size * size, columns) if given else None
    for call, told in (
        (lambda: split(ones if given else None), "x is given, but split sends from the root"),
        (lambda: gather(ones, out), "out is given, but only the root"),
    ):
        refused(told, call, ranks=[size - 1])
    assert_on_all_ranks(gather(ones, None if rank else out) is (None if rank else out), "next")


def test_what_cannot_be_planned(world, size):
    """Structures, no tensor at all, root=None; but shared results can."""
    structure = {"x": torch.ones(size)}
    refused("", hd.plan, hd.split, None)
    for verb in (hd.concat, hd.split):
        x = None if world.rank and verb is hd.split else structure
        refused("[HD201]", hd.plan, verb, x)
    with pytest.raises(TypeError, match="root=None"):
        hd.plan(hd.split, torch.ones(size), root=None)
    x = torch.ones(2**15)
    assert_on_all_ranks(torch.equal(hd.plan(hd.concat, x, shared=True)(x), x.repeat(size)), "shared")


@several_ranks
@pytest.mark.parametrize("columns", COLUMNS)
def test_ranks_that_call_something_else(findings, world, size, columns):
    """Another plan, another verb, the same with async_op: an error on all ranks, and no hang."""
    last = world.rank == size - 1
    x = torch.ones(2, columns)
    one, other, gather = hd.plan(hd.concat, x), hd.plan(hd.concat, x), hd.plan(hd.gather, x)
    small = hd.plan(hd.concat, torch.ones(1))
    calls = [
        (lambda: other(x), "the plan is "),
        (lambda: gather(x), "called a plan of concat()"),
        (lambda: small(torch.ones(1)), "number of dims is 1"),
        (lambda: hd.concat(x), "called concat()"),
        (lambda: hd.split(None), "called split()"),
        (lambda: hd.plan(hd.concat, x), "called plan of concat()"),
    ]
    for wrong, text in calls:
        refused(text, *((wrong,) if last else (one, x)))
        findings.same(one(x), torch.ones(2 * size, columns), "the next call")


def test_several_plans_in_flight(findings, world, rank, size):
    """In the foreground and the background at once, in any order."""
    wholes = [whole_of((2 * size, columns), torch.int32) for columns in COLUMNS]
    plans = [Planned(verb, w, 0, (2,) * size, rank) for verb in VERBS for w in wholes]
    of = [w for _ in VERBS for w in wholes]
    for order in (range(len(plans)), reversed(range(len(plans)))):
        handles = [(i, plans[i].plan(plans[i].x(of[i]), async_op=True)) for i in order]
        for i in (3, 0, 7, 2):
            findings.check(plans[i].problem(plans[i].plan(plans[i].x(of[i])), of[i]) is None, "in the foreground")
        for i, handle in reversed(handles):
            findings.check(plans[i].problem(handle.wait(60), of[i]) is None, "in the background")


@pytest.mark.parametrize("columns", COLUMNS)
def test_after_its_group_was_freed(findings, world, rank, columns):
    comm = world.comm.Split(rank % 2, -rank)
    x = torch.full((1, columns), float(comm.rank))
    plan = hd.plan(hd.concat, x, group=comm)
    findings.same(plan(x), torch.arange(float(comm.size)).view(-1, 1).expand(-1, columns).contiguous(), "in a group")
    comm.Free()
    findings.settle()
    error = raises_on_all_ranks(hd.HpcdistError, lambda: plan(x))
    assert_on_all_ranks("make a new plan" in str(error), error)


def test_in_and_out_of_inference_mode(findings, size):
    for columns in COLUMNS:
        with torch.inference_mode():
            x = torch.ones(1, columns)
            plan = hd.plan(hd.concat, x)
            plan(x)
        findings.same(plan(torch.ones(1, columns)), torch.ones(size, columns), "outside")
        with torch.inference_mode():
            findings.same(plan(x), torch.ones(size, columns), "within")


def test_inference_mode_makes_no_result_that_nobody_gets(world, monkeypatch):
    made, empty_like = [], torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda x, **options: made.append(x) or empty_like(x, **options))
    with torch.inference_mode():
        for _ in range(4):
            hd.concat(torch.ones(1, COLUMNS[0]))
    assert_on_all_ranks(not made, f"{len(made)} were made")
