"""Is it the same on every rank? One exchange of a small header before any data move, and one error everywhere."""

from __future__ import annotations

import struct
import time
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

from hpcdist import activity
from hpcdist.comm.team import HeaderBuffers, Team
from hpcdist.control import objects
from hpcdist.errors import HpcdistError, RankError
from hpcdist.tensors.dtypes import MemoryKind
from hpcdist.validation.call import LOST, Call, show_shape

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["LEAVE", "Agreed", "check_out", "exchange", "leave"]

LEAVE = "finalize"  # the verb of a rank that calls no other any more
# Digests of the call, the tensor and the counts (zero: has none); extents of x and out along dim; where the data are;
# 1 if a gradient is to flow; 1 if this rank has something to complain of; how many calls of the other kind (with
# async_op, or without) came before: ranks that differ in async_op must not take one call for another.
_HEADER = struct.Struct("<24sqqBBB5xq")
_NONE = bytes(8)
_LONGEST_NAP = 1e-3  # seconds


class Agreed(NamedTuple):
    """What all ranks know after the exchange: an entry for each rank."""

    extents: tuple[int, ...]
    out_extents: tuple[int, ...]
    kinds: tuple[int, ...]
    grads: tuple[int, ...]

    @property
    def grad(self) -> bool:
        """Whether a gradient is to flow back to any rank, so that all must take part in bringing it there."""
        return 1 in self.grads


def exchange(team: Team, call: Call) -> Agreed:
    """Compare `call` on all ranks of the team. Collective; one small Allgather, no data, no GPU synchronised.

    Raises:
        RankError: on every rank, if the calls differ or a rank has a problem; the team can go on.
    """
    agreed = _share(team, call)
    activity.touch()
    if agreed is None:
        raise RankError(*_explain(team, call))
    if max(agreed.kinds) > MemoryKind.CUDA:
        root_on_gpu = agreed.kinds[call.root] == MemoryKind.CUDA
        on_gpu = (kind == MemoryKind.CUDA or (kind == MemoryKind.FOLLOWS and root_on_gpu) for kind in agreed.kinds)
        agreed = agreed._replace(kinds=tuple(MemoryKind.CUDA if gpu else MemoryKind.CPU for gpu in on_gpu))
    return agreed


def leave(team: Team) -> None:
    """Wait until every rank of the team is done. Collective, and the counterpart of whatever verb the others call:
    a rank that still calls one gets a RankError that names those that have left."""
    call = Call(LEAVE)
    while _share(team, call) is None:
        activity.touch()
        _explain(team, call)
    team.calls = {False: 0, True: 0}  # a rank that ended early has begun fewer


def check_out(verb: str, agreed: Agreed, expected: Sequence[int]) -> None:
    """Raise on every rank if a rank's `out` has another extent along dim than its result will have, or would cut off a
    gradient."""
    if max(agreed.out_extents) < 0:
        return
    given = {rank: extent for rank, extent in enumerate(agreed.out_extents) if extent >= 0}
    odd = {
        r: f"out has extent {got} along dim, expected {expected[r]}" for r, got in given.items() if got != expected[r]
    }
    objects.raise_problems(verb, odd)
    objects.raise_problems(verb, dict.fromkeys(given, LOST) if agreed.grad else {})


def _share(team: Team, call: Call) -> Agreed | None:
    """What the ranks agree on, or None if they do not."""
    headers = team.headers
    if headers is None:
        headers = team.headers = HeaderBuffers(_HEADER.size, team.size)
    _HEADER.pack_into(
        headers.own,
        0,
        _digests((call.verb, call.route, call.dim_arg, call.root, *call.options), call.tensor, call.counts),
        call.extent,
        call.out_extent,
        call.kind,
        call.grad,
        call.problem is not None,
        0 if call.verb == LEAVE else team.calls[team.foreground is team],
    )
    if team.foreground is team:
        team.comm.Allgather(headers.send, headers.recv)
    else:
        _wait_quietly(team.comm.Iallgather(headers.send, headers.recv))
    if headers.all == headers.last:  # a program repeats its calls: what they agreed on need not be worked out again
        same: Agreed = headers.agreed
        return same
    digests, extents, out_extents, kinds, grads, problems, calls = zip(*_HEADER.iter_unpack(headers.all), strict=True)
    whats, tensors, counts = (
        {digest[at : at + 8] for digest in digests if digest[at : at + 8] != _NONE} for at in (0, 8, 16)
    )
    if any(problems) or max(map(len, (whats, tensors, counts, set(calls)))) > 1:
        return None
    headers.last, headers.agreed = bytes(headers.all), (found := Agreed(extents, out_extents, kinds, grads))
    return found


def _wait_quietly(request: MPI.Request) -> None:
    """In the background, where the others may be long in coming: MPI's own way to wait would take a core from what
    this process computes meanwhile. The naps grow with the time that has passed, and so delay nothing by much."""
    begin = time.monotonic()
    while not request.Test():
        time.sleep(min(_LONGEST_NAP, (time.monotonic() - begin) / 10))


@lru_cache(maxsize=4096)
def _digests(*parts: object) -> bytes:
    """8 bytes for each part, zero for None."""
    return b"".join(_NONE if p is None else blake2b(repr(p).encode(), digest_size=8).digest() for p in parts)


def _explain(team: Team, call: Call) -> tuple[str, dict[int, str]]:
    """The verb and what is wrong on which rank, the same on every rank. Collective; only after a disagreement."""
    facts = objects.all_gather_object(team.comm, _facts(team, call))
    if team.foreground is team:  # ranks that called different verbs have begun different numbers of them, and may go on
        team.calls[False] = max(fact["calls"] for fact in facts)
    verbs = [fact["verb"] for fact in facts]
    if len(set(verbs)) > 1:
        return verbs[0], _deviations("verb", [_verb_text(verb) for verb in verbs])
    problems: dict[int, list[str]] = {}
    for rank, fact in enumerate(facts):
        if fact["problem"]:
            problems.setdefault(rank, []).append(fact["problem"])
    options = [name for name in facts[0] if name not in ("verb", "problem", "calls")]
    for name in options:
        values = [None if fact["problem"] else fact.get(name) for fact in facts]
        for rank, text in _deviations(name, values, _given(name, call, facts, values)).items():
            problems.setdefault(rank, []).append(text)
        if name == "number of dims" and len({v for v in values if v is not None}) > 1:
            break  # a difference of shape would say the same again
    if not problems:
        raise HpcdistError(f"the ranks' headers differ, but not their calls: {facts}")
    return verbs[0], {rank: "; ".join(texts) for rank, texts in problems.items()}


def _verb_text(verb: str) -> str:
    return "called finalize(), or reached the end of its program" if verb == LEAVE else f"called {verb}()"


def _facts(team: Team, call: Call) -> dict[str, Any]:
    dtype, ndim, others = call.tensor or (None, None, None)
    kind = "with" if team.foreground is team else "without"
    return {
        "verb": call.verb,
        "problem": call.problem,
        "calls": team.calls[False],
        "route": call.route,
        "root": call.root,
        "dim": call.dim_arg,
        "dtype": dtype and str(dtype),
        "number of dims": ndim,
        "shape": show_shape(others) if others else None,
        "counts": None if call.counts is None else str(call.counts),
        **{name: str(value) for name, value in call.options},
        f"the number of earlier calls {kind} async_op, which must agree,": team.calls[team.foreground is team],
    }


def _given(name: str, call: Call, facts: list[dict[str, Any]], values: list[Any]) -> Any:
    """What the root says, where it decides: of split's tensor, to which the memory for the parts must fit."""
    root = call.root
    if name in ("dtype", "number of dims", "shape", "counts") and call.root_decides:
        return values[root] if all(fact["root"] == root >= 0 for fact in facts) else None
    return None


def _deviations(name: str, values: list[Any], usual: Any = None) -> dict[int, str]:
    """The ranks whose value is not `usual`: by default the most common one (of equals, that of the lowest rank)."""
    known = [value for value in values if value is not None]
    if len(set(known)) < 2:
        return {}
    if usual is None:
        usual = Counter(known).most_common(1)[0][0]  # most_common keeps the order of first sight among equals
    where = _ranks([rank for rank, value in enumerate(values) if value == usual])
    is_, has = ("", "") if name == "verb" else (f"{name} is ", "has " if values.count(usual) == 1 else "have ")
    return {
        rank: f"{is_}{value}, where {where} {has}{usual}"
        for rank, value in enumerate(values)
        if value is not None and value != usual
    }


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:4]))
    return f"ranks {shown}" + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")
