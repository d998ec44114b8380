"""A call as the ranks compare it: one exchange of small headers before any data move, and the same error everywhere."""

from __future__ import annotations

import struct
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from hpcdist import activity
from hpcdist.comm.team import HEADER, Team
from hpcdist.control import objects
from hpcdist.errors import HpcdistError, RankError, coded
from hpcdist.tensors.accelerator import MemoryKind
from hpcdist.tensors.tree import Tree

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")

LOSES_GRADIENT = coded(
    "HD208", "out is given, but a gradient is needed, which would be lost: omit out, or use torch.no_grad()"
)
LEAVE = "finalize"  # the verb of a rank that makes no more calls
# Digests of the call, the tensor and the counts (zero if absent); extents of x and out along dim; kind of memory;
# 1 if a gradient is needed; 1 if this rank has a problem; bytes of data behind the header, or -1; the number of earlier
# calls of the other kind (with or without async_op): ranks that differ in async_op must not match different calls;
# number of the call that this rank repeats, or 0: see hpcdist/collectives/kept.py.
_FORMAT = struct.Struct("<24sqqBBB3xhqq")
assert _FORMAT.size == HEADER
HEADER_OF = _FORMAT.pack
BALANCED = -2  # in place of a root: the extents of all ranks must add up to 0 modulo 2^64
_NONE = bytes(8)
_MAX_SLEEP = 1e-3  # seconds
_EARLIER = "the number of earlier calls {} async_op, which must agree,"
_EARLIER_CALLS = (_EARLIER.format("with"), _EARLIER.format("without"))


@dataclass(slots=True)
class Call:
    """The call of one rank, as the ranks compare it.

    Attributes:
        x: tensor to send from this rank, detached and at least 1-d; None if it sends none.
        out: memory for the result, if the caller passed it.
        dim: non-negative dim.
        dim_arg: dim to compare; a receiver without a tensor cannot resolve a negative one.
        tensor: (dtype, number of dims, shape except dim) of `x`, or of `out` if there is no `x`.
        extent: extent of `x` along dim, or -1.
        out_extent: extent of `out` along dim, or -1.
        kind: kind of memory that holds the data.
        counts: partition of the root's tensor: a rule's name or counts, as the caller passed it.
        root_decides: whether the others' tensors must match the root's, rather than the most common ones.
        options: (name, value) pairs of other arguments that must agree.
        grad: whether this rank's tensor needs a gradient.
        inline: what travels behind this rank's header, if it fits: bytes, and contiguous host memory.
        tree, header: flattened structure, and its encoded description, of which `extent` is the length.
        trees: structures of all ranks, on the root of split.
        problem: error in the arguments of this rank, if any.
    """

    verb: str
    route: str = "auto"
    dim: int = 0
    dim_arg: int = 0
    root: int = -1
    x: Tensor | None = None
    out: Tensor | None = None
    tensor: tuple[torch.dtype, int, tuple[int, ...]] | None = None
    extent: int = -1
    out_extent: int = -1
    kind: MemoryKind = MemoryKind.CPU
    counts: str | tuple[int, ...] | None = None
    root_decides: bool = False
    options: tuple[tuple[str, object], ...] = ()
    grad: bool = False
    inline: Sequence[Tensor | bytes] | None = None
    tree: Tree | None = None
    header: bytes = b""
    trees: Sequence[Tree] = ()
    problem: str | None = None


class Agreed(NamedTuple):
    """The headers of all ranks.

    Attributes:
        extents, kinds: see :class:`Call`; an entry for each rank.
        outs: extent along dim of `out` on the ranks that passed one.
        inlines: for each rank, the size in bytes of the data that came behind its header, or -1.
        inline: whether all ranks sent theirs so: see :class:`hpcdist.comm.team.HeaderBuffers`.
        grad: whether any rank needs a gradient, so that all must take part in the backward pass.
    """

    extents: tuple[int, ...]
    outs: dict[int, int]
    kinds: tuple[int, ...]
    inlines: tuple[int, ...]
    inline: bool
    grad: bool


def exchange(team: Team, call: Call, exchanged: bool = False) -> Agreed:
    """Compare `call` on all ranks of the team. Collective; one small Allgather, no data, no GPU synchronisation.

    Args:
        exchanged: whether the header of this call has been exchanged, as that of an earlier one.

    Raises:
        RankError: on every rank, if the calls differ or a rank has a problem; the team remains usable.
    """
    header: bytes | None = None
    data: list[Any] = []
    if not exchanged:
        for part in call.inline or ():
            data.append(part if isinstance(part, bytes) else team.headers.memory(part.data_ptr(), part.nbytes))
        nbytes = sum(map(len, data))
        if call.inline is None or nbytes > team.inline:
            data, nbytes = [], -1
        header = HEADER_OF(
            digests((call.verb, call.route, call.dim_arg, call.root, *call.options), call.tensor, call.counts),
            call.extent,
            call.out_extent,
            call.kind,
            call.grad,
            call.problem is not None,
            nbytes,
            0 if call.verb == LEAVE else team.calls[team.foreground is team],
            0,
        )
    agreed = agree(team, header, data, call.root)
    if not (agreed and agreed.inline):  # else the data have arrived, too
        activity.touch()
    if agreed is None:
        raise RankError(*_explain(team, call))
    return agreed


def agree(team: Team, header: bytes | None, data: Sequence[Any], root: int = BALANCED) -> Agreed | None:
    """Exchange the headers of all ranks and data behind them; return what they agree on, None if they differ.

    Collective; one small Allgather.

    Args:
        header: what HEADER_OF() returns; None if the headers have been exchanged.
        data: bytes, or the memory of tensors.
        root: of the call, if it has one.
    """
    buffers = team.headers
    if header is not None:
        buffers.own = b"".join((header, *data)).ljust(len(buffers.own), b"\0")
        allgather(team, buffers.own)
    headers = buffers.headers(buffers.all)
    if headers != buffers.last:  # programs repeat their calls: no need to compare the headers again
        buffers.last, buffers.agreed = headers, _compare(headers, root)
    agreed: Agreed | None = buffers.agreed
    return agreed


def allgather(team: Team, message: bytes) -> None:
    """Exchange the messages of all ranks of the team: see HeaderBuffers. Collective; one Allgather."""
    recv = team.headers.recv
    if team.foreground is team:
        team.comm.Allgather((message, recv[2]), recv)
    else:
        _poll(team.comm.Iallgather((message, recv[2]), recv))


def leave(team: Team) -> None:
    """Wait until every rank of the team leaves. Collective.

    Matches any verb of the other ranks: a rank that still calls one gets a RankError that names those that have left.
    """
    while True:
        try:
            exchange(team, Call(LEAVE))
            break
        except RankError:
            continue
    team.calls = {False: 0, True: 0}  # a rank that left early has made fewer


def check_out(
    verb: str, outs: Mapping[int, T], expected: Sequence[T], grad: bool, what: str = "extent {} along dim"
) -> None:
    """Check the memory for results, and that none would lose a gradient.

    Args:
        outs: what is known of the memory of the ranks that passed some.
        expected: the same of the results of all ranks.

    Raises:
        RankError: on every rank, if a rank's `out` does not match its result.
    """
    objects.raise_problems(
        verb,
        {
            rank: coded("HD208", f"out has {what.format(got)}, expected {expected[rank]}")
            for rank, got in outs.items()
            if got != expected[rank]
        },
    )
    objects.raise_problems(verb, dict.fromkeys(outs, LOSES_GRADIENT) if grad else {})


def _compare(headers: tuple[bytes, ...], root: int) -> Agreed | None:
    """Return the agreed values of the headers of a call from or to `root`; None if they disagree."""
    digests, extents, out_extents, kinds, grads, problems, inlines, calls, _ = zip(
        *map(_FORMAT.unpack, headers), strict=True
    )
    parts = [{digest[at : at + 8] for digest in digests} - {_NONE} for at in (0, 8, 16)]
    if any(problems) or max(map(len, (*parts, set(calls)))) > 1:
        return None
    if root == BALANCED and sum(extents) % 2**64:
        return None
    if max(kinds) > MemoryKind.GPU:
        on_gpu = (MemoryKind.GPU, MemoryKind.FOLLOWS if kinds[root] == MemoryKind.GPU else MemoryKind.GPU)
        kinds = tuple(MemoryKind.GPU if kind in on_gpu else MemoryKind.CPU for kind in kinds)
    outs = {rank: extent for rank, extent in enumerate(out_extents) if extent >= 0}
    return Agreed(extents, outs, kinds, inlines, min(inlines) >= 0, any(grads))


def _poll(request: MPI.Request) -> None:
    """Wait for a request in the background, with sleeps: MPI's own wait would take a core from this process.

    The sleeps grow with the time that has passed, and so never add much to it.
    """
    begin = time.monotonic()
    while not request.Test():
        time.sleep(min(_MAX_SLEEP, (time.monotonic() - begin) / 10))


@lru_cache(maxsize=4096)
def digests(*parts: object) -> bytes:
    """Return 8 bytes for each part, zero for None."""
    return b"".join(_NONE if p is None else blake2b(repr(p).encode(), digest_size=8).digest() for p in parts)


def _explain(team: Team, call: Call) -> tuple[str, dict[int, str]]:
    """Return the verb and the problem of each wrong rank, the same on every rank. Collective, after a disagreement."""
    mine = [call.verb, call.problem, team.calls[False], _options(team, call)]
    verbs, problems, calls, options = zip(*objects.all_gather_object(team.comm, mine), strict=True)
    if team.foreground is team:  # ranks that disagreed may have made different numbers of calls, and may go on
        team.calls[False] = max(calls)
    if len(set(verbs)) > 1:
        left = "called finalize(), or reached the end of its program"
        wrong = _deviations("", [left if verb == LEAVE else f"called {verb}()" for verb in verbs])
        return verbs[0], {rank: coded("HD301", text) for rank, text in wrong.items()}
    found = {rank: [problem] for rank, problem in enumerate(problems) if problem}
    for name in options[0]:
        values = [None if problem else given.get(name) for problem, given in zip(problems, options, strict=True)]
        expected = None
        if call.root_decides and name in ("dtype", "number of dims", "shape", "counts"):
            # The memory for split's parts must match the root's tensor.
            expected = values[call.root] if all(given["root"] == call.root >= 0 for given in options) else None
        for rank, text in _deviations(name, values, expected).items():
            found.setdefault(rank, []).append(coded("HD301" if name in _EARLIER_CALLS else "HD303", text))
        if name in ("x", "number of dims") and len({v for v in values if v is not None}) > 1:
            break  # what follows would only repeat the difference
    if not found:
        raise HpcdistError("HD901", f"the ranks' headers differ, but not their calls: {options}")
    return verbs[0], {rank: "; ".join(texts) for rank, texts in found.items()}


def show_shape(shape: Sequence[int]) -> str:
    """Format a shape, with * for -1.

    Example::

        >>> show_shape((3, -1, 4))
        '(3, *, 4)'
    """
    return str(tuple(shape)).replace("-1", "*")


def _options(team: Team, call: Call) -> dict[str, Any]:
    """Return the values that the ranks compare, by their names in messages."""
    dtype, ndim, shape = call.tensor or (None, None, None)
    kind = "with" if team.foreground is team else "without"
    return {
        "route": call.route,
        "root": call.root if call.root >= 0 else "None",
        "dim": call.dim_arg,
        **{name: str(value) for name, value in call.options},
        "dtype": dtype and str(dtype),
        "number of dims": ndim,
        "shape": show_shape(shape) if shape else None,
        "counts": None if call.counts is None else str(call.counts),
        _EARLIER.format(kind): team.calls[team.foreground is team],
    }


def _deviations(name: str, values: Sequence[Any], expected: Any = None) -> dict[int, str]:
    """Describe the values other than `expected`: by default the most common one (of several, the lowest rank's)."""
    known = [value for value in values if value is not None]
    if len(set(known)) < 2:
        return {}
    if expected is None:
        expected = Counter(known).most_common(1)[0][0]  # of equally common ones, the first
    where = _ranks([rank for rank, value in enumerate(values) if value == expected])
    is_, has = (f"{name} is ", "has " if values.count(expected) == 1 else "have ") if name else ("", "")
    return {
        rank: f"{is_}{value}, where {where} {has}{expected}"
        for rank, value in enumerate(values)
        if value is not None and value != expected
    }


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:4]))
    return f"ranks {shown}" + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")
