"""Compare long values of all ranks by their digests; the values themselves are sent only where these differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from hpcdist.control import codec, objects

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["same"]

T = TypeVar("T")

_DIGEST = 16  # bytes
_WITH = 6  # integers of a rank that travel with its digest


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
    from mpi4py import MPI

    try:
        mine = blake2b(codec.encode(key), digest_size=_DIGEST).digest()
    except TypeError:
        mine = bytes(_DIGEST)
    own = np.zeros(_DIGEST // 8 + _WITH, np.int64)
    own[: _DIGEST // 8] = np.frombuffer(mine, np.int64)
    mine_too = row(value)
    own[_DIGEST // 8 :][: len(mine_too)] = mine_too[:_WITH]
    found = np.empty((comm.size, len(own)), np.int64)
    comm.Allgather([own, MPI.INT64_T], [found, MPI.INT64_T])
    digests = found[:, : _DIGEST // 8]
    if not digests.any(axis=1).all():
        objects.all_gather_object(comm, key, verb)  # raises, with what cannot be encoded
    if (digests == digests[0]).all():
        short = len(mine_too) <= _WITH
        return value, found[:, _DIGEST // 8 :][:, : len(mine_too)] if short else _table(comm, mine_too)
    first = objects.run_on_root(comm, verb, lambda: value)
    problems = enumerate(objects.all_gather_object(comm, odd(first, value), verb))
    objects.raise_problems(verb, {rank: text for rank, text in problems if text is not None})
    return first, _table(comm, row(first))


def _table(comm: MPI.Intracomm, row: Sequence[int]) -> Any:
    """The rows of all ranks. Collective."""
    from mpi4py import MPI

    table = np.empty((comm.size, len(row)), np.int64)
    comm.Allgather([np.array(row, np.int64), MPI.INT64_T], [table, MPI.INT64_T])
    return table
