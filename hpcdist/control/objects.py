"""Exchange small values between the ranks while a call is set up, and fail together.

:func:`run_on_all` and :func:`run_on_root` run a step and distribute its result, as those of
``torch.distributed.checkpoint``'s ``_DistWrapper`` do. Values travel as text, not as pickle: see
:mod:`hpcdist.control.codec`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar

from hpcdist import activity
from hpcdist.activity import procstat
from hpcdist.control import codec
from hpcdist.errors import HpcdistError, RankError, coded, described, without_hint

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")

_MOST = 2**30  # bytes that all ranks together may exchange at once
# Bytes of the first message, which is all there is of short values: of each rank, where all send; of the root, else.
_INLINE, _HEAD = 64, 2**11
_LENGTH = 8  # bytes of the length, at the beginning of it


def all_gather_object(comm: MPI.Comm, value: Any, what: str = "an exchange before a call") -> list[Any]:
    """Gather the value of every rank on all ranks, in rank order. Collective over `comm`.

    Args:
        value: of the kinds that :mod:`hpcdist.control.codec` knows.
        what: the operation as the user called it, for the error.

    Raises:
        RankError: on every rank, if the value of one is of another kind.
    """
    values = [codec.decode(text) for text in all_texts(comm, _encoded(value))]
    raise_problems(what, {rank: problem for rank, (_, problem) in enumerate(values) if problem is not None})
    return [value for value, _ in values]


def broadcast_bytes(comm: MPI.Comm, data: bytes, root: int) -> bytes:
    """Return the root's bytes on every rank. Collective over `comm`; one small broadcast, and another for long data."""
    from mpi4py import MPI

    first = bytearray(_HEAD)
    if comm.rank == root:
        first[:] = _head(data, _HEAD)
    comm.Bcast([first, MPI.BYTE], root)
    length, begin = _parsed(first)
    _check_size(length)
    if length == len(begin):
        return begin
    rest = bytearray(data[len(begin) :]) if comm.rank == root else bytearray(length - len(begin))
    comm.Bcast([rest, MPI.BYTE], root)
    return begin + bytes(rest)


def run_on_root(comm: MPI.Comm, what: str, step: Callable[[], T]) -> T:
    """Run `step` on rank 0 and return its result on every rank. Collective over `comm`.

    Args:
        what: the operation as the user called it, for the error.
        step: its result is small, and of the kinds that :mod:`hpcdist.control.codec` knows.

    Raises:
        RankError: on every rank, if `step` fails; on rank 0 from the error that it raised.
    """
    causes: list[Exception] = []
    text = _encoded(_attempt(step, causes)) if comm.rank == 0 else b""
    outcome, not_encoded = codec.decode(broadcast_bytes(comm, text, 0))
    value: Any
    value, problem = outcome or (None, not_encoded)
    activity.touch()
    raise_problems(what, {} if problem is None else {0: problem}, causes)
    return value  # type: ignore[no-any-return]


def run_on_all(comm: MPI.Intracomm, what: str, step: Callable[[], T]) -> list[T]:
    """Run `step` on every rank and return all results, in rank order. Collective over `comm`.

    Args:
        what, step: as those of :func:`run_on_root`.

    Raises:
        RankError: on every rank, if `step` fails on one; on that rank from the error that it raised.
    """
    causes: list[Exception] = []
    outcomes: list[tuple[T, str | None]] = all_gather_object(comm, _attempt(step, causes), what)
    activity.touch()
    raise_problems(what, {rank: error for rank, (_, error) in enumerate(outcomes) if error is not None}, causes)
    return [value for value, _ in outcomes]


def everywhere(comm: MPI.Intracomm, good: bool) -> bool:
    """Return whether it is good on all ranks. Collective over `comm`, and a barrier; one Allreduce."""
    from mpi4py import MPI

    found = bytearray([good])
    comm.Allreduce(MPI.IN_PLACE, [found, MPI.BYTE], MPI.BAND)
    return bool(found[0])


def raise_problems(what: str, problems: dict[int, str], causes: list[Exception] | None = None) -> None:
    """Raise a RankError if there are problems, which are the same on all ranks.

    Args:
        what: the operation as the user called it.
        causes: this rank's own error, if any, from which it is raised.
    """
    if problems:
        # Popped: an error in a variable of a frame of its own traceback would keep that frame alive, and what the
        # caller holds.
        raise RankError(what, problems) from (without_hint(causes.pop()) if causes else None)


def first_difference(first: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """Describe how the options of a rank differ from those of rank 0; None if they do not. A missing one is None."""
    for option in {**first, **other}:
        if other.get(option) != first.get(option):
            return coded("HD303", f"{option} is {other.get(option)!r}, where rank 0 has {first.get(option)!r}")
    return None


def same(
    comm: MPI.Intracomm,
    verb: str,
    key: object,
    value: T,
    odd: Callable[[T, T], str | None],
    row: Callable[[T], Sequence[int]] = lambda value: (),
) -> tuple[T, Any]:
    """Return rank 0's `value` on every rank, and a table of the `row` of each rank. Collective over `comm`.

    If the digests of `key` are the same on all ranks, nothing else is sent. Otherwise rank 0's value is sent once, and
    each rank reports how its own differs.

    Args:
        key: what must be the same; like `value`, of the kinds of :mod:`hpcdist.control.codec`.
        value: what is sent where keys differ; ranks with equal keys return their own.
        odd: describes how the second value, this rank's, differs from the first one, rank 0's; None if it does not.
        row: this rank's integers that belong to a value: rank 0's, which may list the same in another order.

    Raises:
        RankError: on every rank, if a value differs, or cannot be encoded.
    """
    import numpy as np
    from mpi4py import MPI

    try:
        digest = blake2b(codec.encode(key), digest_size=16).digest()
    except TypeError:
        digest = b""
    digests = all_texts(comm, digest)
    if b"" in digests:
        all_gather_object(comm, key, verb)  # raises, with what cannot be encoded
    if len(set(digests)) > 1:
        mine, value = value, run_on_root(comm, verb, lambda: value)
        problems = enumerate(all_gather_object(comm, odd(value, mine), verb))
        raise_problems(verb, {rank: text for rank, text in problems if text is not None})
    own = np.array(row(value), np.int64)
    table = np.empty((comm.size, len(own)), np.int64)
    comm.Allgather([own, MPI.INT64_T], [table, MPI.INT64_T])
    return value, table


def node_file(comm: MPI.Comm) -> int | None:
    """Return a descriptor of a new file in memory, the same on all ranks of a node. Collective over `comm`.

    Rank 0 makes it, and the others open it through its process; None on all ranks where the system does not let them,
    as between containers.
    """
    made: list[int] = []

    def make() -> list[int]:
        made.append(os.memfd_create("hpcdist", os.MFD_CLOEXEC))
        return procstat.address(made[0])

    there = run_on_root(comm, "init", make)
    with suppress(OSError):
        made = made or [procstat.opened(there)]
    if all(all_gather_object(comm, bool(made))):
        return made[0]
    for fd in made:
        os.close(fd)
    return None


def _attempt(step: Callable[[], T], causes: list[Exception]) -> tuple[T | None, str | None]:
    """Run a step; return (its result, None), or (None, its error as text), with the error appended to `causes`."""
    try:
        return step(), None
    except Exception as error:
        causes.append(error)
        return None, described(error, "HD309")


def _encoded(value: object) -> bytes:
    """Encode (the value, None), or (None, why it cannot be encoded)."""
    try:
        return codec.encode((value, None))
    except (TypeError, ValueError, RecursionError) as error:
        return codec.encode((None, described(error, "HD309")))


def all_texts(comm: MPI.Comm, text: bytes, to_all: bool = True) -> list[bytes]:
    """Return the texts of all ranks, on every rank or on rank 0; an empty list elsewhere. Collective over `comm`: one
    small Allgather, and another message if a text is long."""
    from mpi4py import MPI

    heads, receives = bytearray(_INLINE * comm.size), to_all or comm.rank == 0
    comm.Allgather([_head(text, _INLINE), MPI.BYTE], [heads, _INLINE, MPI.BYTE])
    found = [_parsed(heads[at : at + _INLINE]) for at in range(0, len(heads), _INLINE)]
    _check_size(sum(length for length, _ in found))
    left = [length - len(begin) for length, begin in found]
    rests = bytearray(sum(left) if receives else 0)
    if any(left):
        send, recv = [text[_INLINE - _LENGTH :], MPI.BYTE], [rests, left, MPI.BYTE] if receives else None
        (comm.Allgatherv if to_all else comm.Gatherv)(send, recv)
    ends = accumulate(left)
    return [begin + rests[e - n : e] for (_, begin), e, n in zip(found, ends, left, strict=True)] if receives else []


def _head(data: bytes, size: int) -> bytes:
    """The length of some bytes and as many of them as there is space for, in `size` bytes."""
    return (len(data).to_bytes(_LENGTH, "little") + data[: size - _LENGTH]).ljust(size, b"\0")


def _parsed(head: bytearray) -> tuple[int, bytes]:
    """The length of some bytes and the first of them, as _head() has put them together."""
    length = int.from_bytes(head[:_LENGTH], "little")
    return length, bytes(head[_LENGTH : _LENGTH + length])


def _check_size(nbytes: int) -> None:
    if nbytes > _MOST:
        raise HpcdistError(
            "HD310", f"the ranks have {nbytes} bytes to exchange before a call; at most {_MOST} are allowed"
        )
