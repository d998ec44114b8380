"""Whatever is drawn, the verbs do what plain indexing does on one process.

Hypothesis draws on every rank, from the same seed, and at each example the ranks compare what they have drawn and
agree on how it went: it fails on all of them or on none, so that they shrink it together, too.

In a run with 3 ranks these are 2,000 examples: three quarters from a fixed seed, the others from one that rank 0
draws and prints, to be given again with --hypothesis-seed. In other runs they are a few.
"""

from __future__ import annotations

import copy
import dataclasses
import random
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, NoReturn

import hypothesis
import numpy as np
import pytest
import torch
from cases import STRIDES, copy_of, differs, fields, part, same_bits, shown, whole_of
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy
from settings import ALL
from strategies import (
    BACKEND,
    Redistribution,
    Ring,
    Rule,
    Structured,
    Transfer,
    made,
    memory,
    redistributions,
    rings,
    rows,
    structures,
    transfers,
)
from torch import Tensor

import hpcdist as hd
from hpcdist.comm import matching, mpi
from hpcdist.layout import limits as sizes
from hpcdist.process import abort
from hpcdist.tensors import message as packing
from hpcdist.tensors.storage import copyable, row_major
from hpcdist.validation import collective, local

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore:ComplexHalf")]

FIXED = 20_250_701
RANKS = 3  # with so many, all examples; in other runs a few
FEW = 50
PART = 1 if ALL else 5  # of the examples, one in so many is tried
SECONDS = 60  # until a call that goes on in the background counts as one that hangs

Body = Callable[[hd.World, Any], str | None]
Seed = tuple[int, bool]


class DrawsDifferError(BaseException):
    """The ranks have not drawn the same: nothing that Hypothesis can replay or shrink."""


class _Example:
    """The example that is being tried, to be told if the job is aborted in it, where pytest tells nothing."""

    case: object = None


@pytest.fixture(autouse=True)
def told_before_an_abort(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    end = abort.job

    def job(status: int) -> NoReturn:
        with _uncaptured(request.config) as printed:
            print(f"{printed}\naborted on rank {hd.current().rank} in {_Example.case!r}", file=sys.stderr, flush=True)
            end(status)

    monkeypatch.setattr(abort, "job", job)


@contextmanager
def _uncaptured(config: pytest.Config) -> Iterator[str]:
    """To print past pytest; yields what it has captured so far."""
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is None:
        yield ""
        return
    with capture.global_and_fixture_disabled():
        yield "".join(capture.read_global_capture()) if capture.is_globally_capturing() else ""


LIMITS = [
    *((packing, "SMALL", 128), (mpi, "LIMIT", 48), (sizes, "PIECE", 96), (matching, "INLINE", 100)),
]
"""The numbers of bytes from which something goes another way, and those with which tiny tensors take it, too."""

USUAL = [getattr(module, name) for module, name, _ in LIMITS]


def _set_limits(tiny: bool) -> None:
    for (module, name, few), usual in zip(LIMITS, USUAL, strict=True):
        setattr(module, name, few if tiny else usual)


@pytest.fixture(autouse=True)
def usual_limits() -> Iterator[None]:
    yield
    _set_limits(tiny=False)


@pytest.fixture(scope="module")
def drawn_seed(world: hd.World, request: pytest.FixtureRequest) -> int:
    """The seed of this run, told even if the job is aborted."""
    given_ = request.config.getoption("--hypothesis-seed", None)
    seed: int = world.comm.bcast(random.SystemRandom().randrange(2**32) if given_ is None else int(given_))
    with _uncaptured(request.config):
        if world.rank == 0:
            print(f"\nproperty test: this run's seed is {seed}; again with --hypothesis-seed={seed}", flush=True)
    return seed


@pytest.fixture(params=["fixed", "drawn"])
def seed(request: pytest.FixtureRequest) -> Seed:
    """(the seed, whether it is the fixed one)."""
    return (FIXED, True) if request.param == "fixed" else (request.getfixturevalue("drawn_seed"), False)


def _try(world: hd.World, strategy: SearchStrategy[Any], body: Body, seed: Seed, fixed: int, drawn: int) -> None:
    """Draw `fixed` or `drawn` examples, with the fixed seed or this run's; `body` says what is wrong with one here."""
    value, is_fixed = seed
    number = (fixed if is_fixed else drawn) // PART if world.world_size == RANKS else FEW
    tried = 0

    @hypothesis.seed(value)
    @settings(
        max_examples=number,
        backend=BACKEND,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(strategy)
    def example(case: Any) -> None:
        nonlocal tried
        tried += 1
        _Example.case = case
        _drawn_by_all(world, case)
        _set_limits(case.tiny)
        try:
            problem = body(world, case)
        except Exception as error:
            problem = "".join(traceback.format_exception(error)[-3:])
        problems = _told(world, problem)
        assert not problems, f"seed {value}, {world.world_size} ranks: {problems}"

    try:
        example()
    except DrawsDifferError as error:
        pytest.fail(f"seed {value}, example {tried}: the ranks have not drawn the same: {error}")
    assert tried >= number


def _drawn_by_all(world: hd.World, case: object) -> None:
    """Compare what the ranks have drawn; a rank that is not here any more does not come either."""
    digest = blake2b(repr(case).encode(errors="surrogatepass"), digest_size=8).hexdigest()
    try:
        collective.exchange(world._context.team, local.Call("example", options=(("case", digest),)))
    except hd.RankError as error:
        raise DrawsDifferError(str(error)) from None


def _told(world: hd.World, problem: str | None) -> str:
    """What is wrong on any rank. Those that are in a verb still, while one has failed, come out of it."""
    collective.leave(world._context.team)
    found = world.comm.allgather(problem)
    return "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(found) if text is not None)


def _waited(result: Any, async_op: bool) -> Any:
    return result.wait(SECONDS) if async_op else result


# --- what structures are ---------------------------------------------------------------------------------------------


def _with(value: Any, parts: Sequence[Any]) -> Any:
    """A tuple, named tuple, dict or dataclass like `value`, but of these parts."""
    if isinstance(value, tuple):
        return tuple.__new__(type(value), parts)
    if isinstance(value, dict):
        return type(value)(zip(value, parts, strict=True))
    same = copy.copy(value)
    for (name, _), item in zip(fields(value), parts, strict=True):
        object.__setattr__(same, name, item)
    return same


def _parts(value: Any) -> list[Any] | None:
    """What a container other than a list consists of; None if it is no container."""
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, dict):
        return list(value.values())
    return [item for _, item in fields(value)] if dataclasses.is_dataclass(value) else None


def _arrived(value: Any) -> Any:
    """What a structure is when it has travelled."""
    if isinstance(value, Tensor):
        return row_major(value.resolve_conj().resolve_neg()).view(value.dtype)
    if isinstance(value, np.ndarray):
        return value.astype(value.dtype.newbyteorder("="))
    if isinstance(value, list):
        return list(map(_arrived, value))
    parts = _parts(value)
    return value if parts is None else _with(value, list(map(_arrived, parts)))


def _shares(result: Tensor, x: Tensor) -> bool:
    return bool(result.numel()) and result.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


class _Out:
    """Memory for a result, if it is given, and what must be in and around it afterwards."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, name: str | None) -> None:
        self.arguments = shape, dtype, name
        self.base, self.view = memory(shape, dtype, name) if name is not None else (None, None)

    def problem(self, result: Any, expected: Tensor, x: Tensor | None) -> str | None:
        if not isinstance(result, Tensor) or not same_bits(result, expected):
            return f"the result is {shown(result)}, expected {shown(expected)}"
        if self.base is None:
            if not result.is_contiguous() or (x is not None and _shares(result, x)):
                return "the result is not contiguous, or not memory of its own"
        else:
            base, view = memory(*self.arguments)
            copyable(view).copy_(copyable(expected))
            if result is not self.view or not same_bits(self.base, base):
                text = f"{shown(self.base)}, expected {shown(base)}"
                return f"the result is not out, or memory around it was written: {text}"
        return None


# --- gather, concat, split of a tensor -------------------------------------------------------------------------------


def _joined(shards: Sequence[Tensor], dim: int) -> Tensor:
    """All shards, each put into its place by plain indexing."""
    rows_ = [shard if shard.dim() else shard.reshape(1) for shard in shards]
    shape = list(rows_[0].shape)
    shape[dim] = sum(shard.shape[dim] for shard in rows_)
    whole, start = torch.empty(shape, dtype=rows_[0].dtype), 0
    for shard in rows_:
        index = [slice(None)] * len(shape)
        index[dim] = slice(start, start + shard.shape[dim])
        copyable(whole)[tuple(index)] = copyable(shard)
        start += shard.shape[dim]
    return whole


def _done(case: Transfer, verb: Callable[..., Any], out: _Out, x: Tensor | None, *rest: Any) -> Any:
    """The result of the verb, or of the second call of its plan."""
    options: dict[str, Any] = {"async_op": case.async_op}
    if not case.told or case.root is None:
        return _waited(verb(x, *rest, out=out.view, route=case.route, **options), case.async_op)
    plan = hd.plan(verb, x, *rest, route=case.route)
    _waited(plan(x, out.view, **options), case.async_op)
    return _waited(plan(x, out.view, **options), case.async_op)


def _transfer(world: hd.World, case: Transfer) -> str | None:
    if case.verb == "split":
        return _split(world, case)
    size, rank = world.world_size, world.rank
    whole = whole_of(case.shape or (size,), case.dtype)
    shards = [part(whole, case.dim, case.extents, r) if case.shape else whole[r] for r in range(size)]
    shards = [STRIDES[name](shard) for name, shard in zip(case.strides, shards, strict=True)]
    x, before, expected = shards[rank], copy_of(shards[rank]), _joined(shards, case.dim)
    receives = case.verb == "concat" or rank == case.root
    out = _Out(expected.shape, case.dtype, case.outs[rank] if receives else None)
    if case.verb == "concat":
        result = _done(case, hd.concat, out, x, case.dim)
    else:
        result = _done(case, hd.gather, out, x, case.dim, case.root)
    if not same_bits(x, before):
        return "the shard has changed"
    if not receives:
        return None if result is None else f"the result is {result!r}, expected None"
    return out.problem(result, expected, x)


def _split(world: hd.World, case: Transfer) -> str | None:
    rank, root = world.rank, case.root
    whole = STRIDES[case.strides[root or 0]](whole_of(case.shape, case.dtype))
    before = copy_of(whole)
    out = _Out(part(whole, case.dim, case.extents, rank).shape, case.dtype, None if root is None else case.outs[rank])
    counts = case.counts if root in (None, rank) or case.told else None
    result = _done(case, hd.split, out, whole if root in (None, rank) else None, case.dim, root, counts)
    if not same_bits(whole, before):
        return "x has changed"
    expected = part(before, case.dim, case.extents, rank)
    if root is None:  # a view
        same = isinstance(result, Tensor) and same_bits(result, expected)
        if not same or (expected.numel() and not _shares(result, whole)):
            return f"the result is {shown(result)}, expected {shown(expected)}, a view"
        return None
    return out.problem(result, expected, whole)


# --- redistribute ----------------------------------------------------------------------------------------------------


def _redistribution(world: hd.World, case: Redistribution) -> str | None:
    rank = world.rank
    sources, dests = case.src.slices(case.shape), case.dst.slices(case.shape)
    src, dst = case.src.layout(), case.dst.layout()
    held, own = np.zeros(case.shape, bool), np.zeros(case.shape, bool)
    for slices in sources:
        held[slices] = True
    own[sources[rank]] = True
    options = {"route": case.route}
    rounds = _rounds(case, sources[rank], dests[rank])
    x, expected, out = next(rounds)
    if not all(held[slices].all() for slices in dests):
        return _refused(lambda: hd.redistribute(x, src, dst, **options), "no rank holds")
    if not case.planned:
        options |= {"out": out.view, "async_op": case.async_op}
        result = _waited(hd.redistribute(x, src, dst, **options), case.async_op)
        return out.problem(result, expected, x) or _unchanged(x, case, 0, sources[rank])
    plan_ = hd.plan(hd.redistribute, x, src, dst, **options)
    found = plan_.shape, plan_.box.shape, plan_.received
    wanted = case.shape, tuple(expected.shape), case.dtype.itemsize * int((~own[dests[rank]]).sum())
    problem = None if found == wanted else f"the plan has (shape, box, received) {found}, expected {wanted}"
    for turn in range(2):  # both on every rank, whatever is wrong on this one: here they agree on nothing
        result = _waited(plan_(x, out.view, async_op=case.async_op), case.async_op)
        problem = problem or out.problem(result, expected, x) or _unchanged(x, case, turn, sources[rank])
        x, expected, out = next(rounds)
    return problem


def _whole(case: Redistribution, turn: int) -> Tensor:
    return STRIDES[case.strides](whole_of(case.shape, case.dtype, salt=turn))


def _rounds(
    case: Redistribution, source: tuple[slice, ...], dest: tuple[slice, ...]
) -> Iterator[tuple[Tensor, Tensor, _Out]]:
    """(what this rank has, what it must get, memory for it), with other values and in other memory each time."""
    turn = 0
    while True:
        rank = hd.current().rank
        whole, view = _whole(case, turn), case.views[(rank + turn) % len(case.views)]
        x = whole[source] if view == "view" else STRIDES[view](whole[source])
        part_ = whole[dest].resolve_conj().resolve_neg()
        expected = copyable(part_).clone(memory_format=torch.contiguous_format).view(part_.dtype)
        yield x, expected, _Out(expected.shape, case.dtype, case.outs[(rank + turn) % len(case.outs)])
        turn += 1


def _unchanged(x: Tensor, case: Redistribution, turn: int, source: tuple[slice, ...]) -> str | None:
    return None if same_bits(x, copy_of(_whole(case, turn)[source])) else "x has changed"


def _refused(step: Callable[[], object], text: str) -> str | None:
    try:
        result = step()
    except hd.RankError as error:
        return None if text in str(error) else f"another error than the one expected: {error}"
    return f"expected a RankError, got {result!r}"


# --- structures ------------------------------------------------------------------------------------------------------


def _merged(values: Sequence[Any], dim: int) -> Any:
    """What concat makes of the structures of all ranks."""
    first = values[0]
    if isinstance(first, Tensor):
        return _joined(values, dim)
    if isinstance(first, np.ndarray):
        return _arrived(np.concatenate([np.atleast_1d(value) for value in values], axis=dim))
    if isinstance(first, list):
        return [_arrived(item) for value in values for item in value]
    parts = _parts(first)
    if parts is None:
        return [_arrived(value) for value in values]
    if isinstance(first, dict):
        return _with(first, [_merged([value[key] for value in values], dim) for key in first])
    return _with(first, [_merged(alike, dim) for alike in zip(*map(_parts, values), strict=True)])  # type: ignore[arg-type]


def _cut(value: Any, dim: int, counts: Rule, size: int, rank: int) -> Any:
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
    parts = _parts(value)
    if parts is None:
        return _arrived(value)
    return _with(value, [_cut(item, dim, counts, size, rank) for item in parts])


def _structured(world: hd.World, case: Structured) -> str | None:
    rank, size, root = world.rank, world.world_size, case.root
    options = {"route": case.route, "async_op": case.async_op}
    whole = case.trees[0] if case.verb == "split" else None
    tree = case.trees[rank] if case.verb != "split" else whole if rank == root else None
    x = made(tree)
    if case.verb == "concat":
        result = _waited(hd.concat(x, case.dim, **options), case.async_op)
    elif case.verb == "gather":
        result = _waited(hd.gather(x, case.dim, root, **options), case.async_op)
    else:
        result = _waited(hd.split(x, case.dim, root, case.counts, **options), case.async_op)
    changed = differs(_arrived(x), _arrived(made(tree)), "x afterwards")
    if changed is not None:
        return changed
    if case.verb == "split":
        return differs(result, _cut(made(whole), case.dim, case.counts, size, rank))
    if case.verb == "gather" and rank != root:
        return None if result is None else f"the result is {result!r}, expected None"
    return differs(result, _merged(list(map(made, case.trees)), case.dim))


# --- send, recv ------------------------------------------------------------------------------------------------------


def _ring(world: hd.World, case: Ring) -> str | None:
    rank, size = world.rank, world.world_size
    dest, source = (rank + case.shift) % size, (rank - case.shift) % size
    sent: list[hd.Handle[None]] = []
    problem: str | None = None
    try:
        for trees, tag in zip(case.trees, case.tags, strict=True):
            sent.append(hd.isend(made(trees[rank]), dest, tag))
    except Exception as error:
        problem = f"isend: {error!r}"
    if _told(world, problem):
        for _ in range(world.comm.allgather(len(sent))[source]):  # nothing is left over for the next example
            hd.recv(source)
        return problem
    receive = hd.irecv if case.later else hd.recv
    arrivals: list[tuple[int, Any]] = []
    for message in case.order:
        from_, tag = None if case.anyone else source, None if case.any_tag else case.tags[message]
        try:
            arrivals.append((message, receive(from_, tag, with_source=True)))
        except Exception as error:
            problem = problem or f"recv of message {message}: {error!r}"
    for message, arrival in arrivals:
        try:
            value, giver = _waited(arrival, case.later)
        except Exception as error:
            problem = problem or f"irecv of message {message}: {error!r}"
        else:
            wrong = differs(value, _arrived(made(case.trees[message][source])), f"message {message}")
            problem = problem or wrong or (None if giver == source else f"message {message} comes from {giver}")
    for handle in sent:
        handle.wait(SECONDS)
    return problem


def test_tensors(world: hd.World, seed: Seed) -> None:
    _try(world, transfers(world.world_size), _transfer, seed, 450, 150)


def test_redistribute(world: hd.World, seed: Seed) -> None:
    _try(world, redistributions(world.world_size), _redistribution, seed, 450, 150)


def test_structures(world: hd.World, seed: Seed) -> None:
    _try(world, structures(world.world_size), _structured, seed, 350, 120)


def test_send_and_receive(world: hd.World, seed: Seed) -> None:
    _try(world, rings(world.world_size), _ring, seed, 250, 80)
