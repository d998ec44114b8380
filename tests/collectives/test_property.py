"""Whatever is drawn, the verbs do what plain indexing does on one process.

Every rank draws the same examples, from the same seed, and the ranks agree on how each went: it fails on all of them or
on none.

In a run with 3 ranks these are 2,000 examples: three quarters from a fixed seed, the others from one that rank 0
draws and prints, to be given again as HPCDIST_TEST_SEED. In other runs they are a few.
"""

import os
import random
import sys
import traceback

import numpy as np
import pytest
import torch
from cases import STRIDES, copy_of, differs, mapped, part, parts_of, rows, same_bits, shown, whole_of, with_parts
from settings import ALL
from strategies import Draw, made, redistributions, rings, structures, transfers
from torch import Tensor

import hpcdist as hd
from hpcdist.comm import messages
from hpcdist.layout import limits as sizes
from hpcdist.process import abort
from hpcdist.routes import mpi
from hpcdist.runtime.world import team_of
from hpcdist.tensors import message as packing
from hpcdist.tensors.storage import copyable, row_major
from hpcdist.validation import collective

FIXED = 20_250_701
RANKS = 3  # with so many, all examples; in other runs a few
FEW = 50
PART = 1 if ALL else 5  # of the examples, one in so many is tried
SECONDS = 60  # until a call that goes on in the background counts as one that hangs


class _Example:
    """The example that is being tried, to be told if the job is aborted in it, where pytest tells nothing."""

    case = None


@pytest.fixture(autouse=True)
def told_before_an_abort(capfd, monkeypatch):
    end = abort.job

    def job(status):
        printed = "".join(capfd.readouterr())
        with capfd.disabled():
            print(f"{printed}\naborted on rank {hd.current().rank} in {_Example.case!r}", file=sys.stderr, flush=True)
            end(status)

    monkeypatch.setattr(abort, "job", job)


LIMITS = [(packing, "SMALL", 128), (mpi, "LIMIT", 48), (sizes, "PIECE", 96), (messages, "INLINE", 100)]
"""The numbers of bytes from which something goes another way, and those with which tiny tensors take it, too."""

USUAL = [getattr(module, name) for module, name, _ in LIMITS]


def _set_limits(tiny):
    for (module, name, few), usual in zip(LIMITS, USUAL, strict=True):
        setattr(module, name, few if tiny else usual)


@pytest.fixture(params=["fixed", "drawn"])
def seed(world, request, capfd):
    """(the seed, whether it is the fixed one); that of this run is told even if the job is aborted."""
    value = world.comm.bcast(int(os.environ.get("HPCDIST_TEST_SEED") or random.SystemRandom().randrange(2**32)))
    if request.param == "drawn" and world.rank == 0:
        with capfd.disabled():
            print(f"\nproperty test: this run's seed is {value}; again with HPCDIST_TEST_SEED={value}", flush=True)
    yield (FIXED, True) if request.param == "fixed" else (value, False)
    _set_limits(tiny=False)


def _try(world, draws, body, seed, fixed, drawn):
    """Draw `fixed` or `drawn` examples, with the fixed seed or this run's; `body` says what is wrong with one here."""
    value, is_fixed = seed
    for turn in range((fixed if is_fixed else drawn) // PART if world.world_size == RANKS else FEW):
        case = _Example.case = draws(Draw(f"{value}, {turn}"), world.world_size)
        _set_limits(case.tiny)
        try:
            problem = body(world, case)
        except Exception as error:
            problem = "".join(traceback.format_exception(error)[-3:])
        problems = _told(world, problem)
        assert not problems, f"seed {value}, example {turn}, {world.world_size} ranks: {case!r}\n{problems}"


def _told(world, problem):
    """What is wrong on any rank. Those that are in a verb still, while one has failed, come out of it."""
    collective.leave(team_of())
    found = world.comm.allgather(problem)
    return "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(found) if text is not None)


def _waited(result, async_op):
    return result.wait(SECONDS) if async_op else result


def _shares(result, x):
    return bool(result.numel()) and result.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


class _Out:
    """Memory for a result, if it is given, and what must be in and around it afterwards."""

    def __init__(self, shape, dtype, name):
        self.make = lambda: None if name is None else STRIDES[name](whole_of((*shape,), dtype, salt=5))
        self.view = self.make()

    def problem(self, result, expected, x):
        if not isinstance(result, Tensor) or not same_bits(result, expected):
            return f"the result is {shown(result)}, expected {shown(expected)}"
        view = self.make()
        if view is None:
            if not result.is_contiguous() or (x is not None and _shares(result, x)):
                return "the result is not contiguous, or not memory of its own"
        else:
            copyable(view).copy_(copyable(expected))
            if result is not self.view or bytes(result.untyped_storage()) != bytes(view.untyped_storage()):
                return f"the result is not out, or memory around it was written: expected {shown(view)}"
        return None


# --- gather, concat, split of a tensor -------------------------------------------------------------------------------


def _joined(shards, dim):
    """All shards, each put into its place by plain indexing."""
    rows_ = [shard if shard.dim() else shard.reshape(1) for shard in shards]
    extents = tuple(shard.shape[dim] for shard in rows_)
    shape = list(rows_[0].shape)
    shape[dim] = sum(extents)
    whole = torch.empty(shape, dtype=rows_[0].dtype)
    for rank, shard in enumerate(rows_):
        part(copyable(whole), dim, extents, rank).copy_(copyable(shard))
    return whole


def _done(case, verb, out, x, *rest):
    """The result of the verb, or of the second call of its plan."""
    if not case.planned or case.root is None:
        return _waited(verb(x, *rest, out=out.view, route=case.route, async_op=case.async_op), case.async_op)
    plan = hd.plan(verb, x, *rest, route=case.route)
    return [_waited(plan(x, out.view, async_op=case.async_op), case.async_op) for _ in range(2)][1]


def _transfer(world, case):
    if case.verb == "split":
        return _split(world, case)
    size, rank = world.world_size, world.rank
    whole = whole_of(case.shape or (size,), case.dtype)
    shards = [part(whole, case.dim, case.extents, r) if case.shape else whole[r] for r in range(size)]
    shards = [STRIDES[name](shard) for name, shard in zip(case.strides, shards, strict=True)]
    x, before, expected = shards[rank], copy_of(shards[rank]), _joined(shards, case.dim)
    receives = case.verb == "concat" or rank == case.root
    out = _Out(expected.shape, case.dtype, case.outs[rank] if receives else None)
    rest = (case.dim,) if case.verb == "concat" else (case.dim, case.root)
    result = _done(case, getattr(hd, case.verb), out, x, *rest)
    if not same_bits(x, before):
        return "the shard has changed"
    if not receives:
        return None if result is None else f"the result is {result!r}, expected None"
    return out.problem(result, expected, x)


def _split(world, case):
    rank, root = world.rank, case.root
    whole = STRIDES[case.strides[root or 0]](whole_of(case.shape, case.dtype))
    before = copy_of(whole)
    expected = part(before, case.dim, case.extents, rank)
    out = _Out(expected.shape, case.dtype, None if root is None else case.outs[rank])
    counts = case.counts if root in (None, rank) or case.planned else None
    result = _done(case, hd.split, out, whole if root in (None, rank) else None, case.dim, root, counts)
    if not same_bits(whole, before):
        return "x has changed"
    if root is None:  # a view
        same = isinstance(result, Tensor) and same_bits(result, expected)
        if not same or (expected.numel() and not _shares(result, whole)):
            return f"the result is {shown(result)}, expected {shown(expected)}, a view"
        return None
    return out.problem(result, expected, whole)


# --- redistribute ----------------------------------------------------------------------------------------------------


def _redistribution(world, case):
    rank = world.rank
    mine, wanted = case.src[rank], case.dst[rank]
    held, own = np.zeros(case.shape, bool), np.zeros(case.shape, bool)
    for slices in case.src:
        held[slices] = True
    own[mine] = True
    call, options = hd.redistribute, {"route": case.route}
    x, expected, out = _turn(case, rank, 0)
    if not all(held[slices].all() for slices in case.dst):
        try:
            return f"expected a RankError, got {call(x, case.source, case.dest, **options)!r}"
        except hd.RankError as error:
            return None if "no rank holds" in str(error) else f"another error than the one expected: {error}"
    problem = None
    if case.planned:
        plan = hd.plan(call, x, case.source, case.dest, **options)
        found = plan.shape, plan.box.shape, plan.received
        right = case.shape, tuple(expected.shape), case.dtype.itemsize * int((~own[wanted]).sum())
        problem = None if found == right else f"the plan has (shape, box, received) {found}, expected {right}"
    for turn in range(1 + case.planned):  # both on every rank, whatever is wrong on this one
        x, expected, out = _turn(case, rank, turn)
        if case.planned:
            result = plan(x, out.view, async_op=case.async_op)
        else:
            result = call(x, case.source, case.dest, out=out.view, async_op=case.async_op, **options)
        problem = problem or out.problem(_waited(result, case.async_op), expected, x)
        same = same_bits(x, copy_of(_whole(case, turn)[mine]))
        problem = problem or (None if same else "x has changed")
    return problem


def _whole(case, turn):
    return STRIDES[case.strides](whole_of(case.shape, case.dtype, salt=turn))


def _turn(case, rank, turn):
    """(what this rank has, what it must get, memory for it), with other values and in other memory each time."""
    place = (rank + turn) % len(case.src)
    whole, view = _whole(case, turn), case.views[place]
    x, expected = whole[case.src[rank]], _arrived(whole[case.dst[rank]])
    return x if view is None else STRIDES[view](x), expected, _Out(expected.shape, case.dtype, case.outs[place])


# --- structures ------------------------------------------------------------------------------------------------------


def _arrived(value):
    """What a structure is when it has travelled."""

    def leaf(x):
        if isinstance(x, Tensor):
            return row_major(x.resolve_conj().resolve_neg()).view(x.dtype)
        return x.astype(x.dtype.newbyteorder("=")) if isinstance(x, np.ndarray) else x

    return mapped(leaf, value)


def _merged(values, dim):
    """What concat makes of the structures of all ranks."""
    first = values[0]
    if isinstance(first, Tensor):
        return _joined(values, dim)
    if isinstance(first, np.ndarray):
        return _arrived(np.concatenate([np.atleast_1d(value) for value in values], axis=dim))
    if isinstance(first, list):
        return [_arrived(item) for value in values for item in value]
    parts = parts_of(first)
    if parts is None:
        return [_arrived(value) for value in values]
    if isinstance(first, dict):
        return with_parts(first, [_merged([value[key] for value in values], dim) for key in first])
    return with_parts(first, [_merged(alike, dim) for alike in zip(*map(parts_of, values), strict=True)])


def _cut(value, dim, counts, size, rank):
    """What split gives a rank of a structure."""
    if isinstance(value, (Tensor, np.ndarray, list)):
        extent = len(value) if isinstance(value, list) else value.shape[dim]
        mine = rows(counts, extent, size)[rank]
        span = slice(mine[0], mine[-1] + 1) if len(mine) else slice(0, 0)
        if isinstance(value, list):
            return _arrived(value[span])
        index = [slice(None)] * value.ndim
        index[dim] = span
        return _arrived(value[tuple(index)])
    parts = parts_of(value)
    if parts is None:
        return _arrived(value)
    return with_parts(value, [_cut(item, dim, counts, size, rank) for item in parts])


def _structured(world, case):
    rank, size, root, dim = world.rank, world.world_size, case.root, case.dim
    is_split = case.verb == "split"
    tree = case.trees[rank] if not is_split else case.trees[0] if rank == root else None
    x, rest = made(tree), {"concat": (dim,), "gather": (dim, root), "split": (dim, root, case.counts)}[case.verb]
    result = _waited(getattr(hd, case.verb)(x, *rest, route=case.route, async_op=case.async_op), case.async_op)
    changed = differs(_arrived(x), _arrived(made(tree)), "x afterwards")
    if changed is not None:
        return changed
    if is_split:
        return differs(result, _cut(made(case.trees[0]), dim, case.counts, size, rank))
    if case.verb == "gather" and rank != root:
        return None if result is None else f"the result is {result!r}, expected None"
    return differs(result, _merged(list(map(made, case.trees)), dim))


# --- send, recv ------------------------------------------------------------------------------------------------------


def _ring(world, case):
    rank, size = world.rank, world.world_size
    dest, source = (rank + case.shift) % size, (rank - case.shift) % size
    sent = []
    problem = None
    try:
        for trees, tag in zip(case.trees, case.tags, strict=True):
            sent.append(hd.isend(made(trees[rank]), dest, tag))
    except Exception as error:
        problem = f"isend: {error!r}"
    if _told(world, problem):
        for _ in range(world.comm.allgather(len(sent))[source]):  # nothing is left over for the next example
            hd.recv(source)
        return problem
    receive = hd.irecv if case.async_op else hd.recv
    arrivals = []
    for message in case.order:
        from_, tag = None if case.anyone else source, None if case.any_tag else case.tags[message]
        try:
            arrivals.append((message, receive(from_, tag, with_source=True)))
        except Exception as error:
            problem = problem or f"recv of message {message}: {error!r}"
    for message, arrival in arrivals:
        try:
            value, giver = _waited(arrival, case.async_op)
        except Exception as error:
            problem = problem or f"irecv of message {message}: {error!r}"
        else:
            wrong = differs(value, _arrived(made(case.trees[message][source])), f"message {message}")
            problem = problem or wrong or (None if giver == source else f"message {message} comes from {giver}")
    for handle in sent:
        handle.wait(SECONDS)
    return problem


def test_tensors(world, seed):
    _try(world, transfers, _transfer, seed, 450, 150)


def test_redistribute(world, seed):
    _try(world, redistributions, _redistribution, seed, 450, 150)


def test_structures(world, seed):
    _try(world, structures, _structured, seed, 350, 120)


def test_send_and_receive(world, seed):
    _try(world, rings, _ring, seed, 250, 80)
