"""Compare long values of all ranks by their digests; the values themselves are sent only where these differ."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import TYPE_CHECKING, TypeVar

from hpcdist.control import codec, objects

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["same"]

T = TypeVar("T")

_DIGEST = 16  # bytes


def same(comm: MPI.Intracomm, verb: str, key: object, value: T, odd: Callable[[T, T], str | None]) -> T:
    """Return rank 0's `value` on every rank. Collective over `comm`.

    If the digests of `key` are the same on all ranks, nothing else is sent. Otherwise rank 0's value is sent once, and
    each rank reports how its own differs.

    Args:
        key: what must be the same; like `value`, of the kinds of :mod:`hpcdist.control.codec`.
        value: what is sent where keys differ; ranks with equal keys return their own.
        odd: describes how the second value, this rank's, differs from the first one, rank 0's; None if it does not.

    Raises:
        RankError: on every rank, if a value differs, or cannot be encoded.
    """
    from mpi4py import MPI

    try:
        mine = blake2b(codec.encode(key), digest_size=_DIGEST).digest()
    except TypeError:
        mine = bytes(_DIGEST)
    digests = bytearray(_DIGEST * comm.size)
    comm.Allgather([mine, MPI.BYTE], [digests, _DIGEST, MPI.BYTE])
    if bytes(_DIGEST) in {bytes(digests[at : at + _DIGEST]) for at in range(0, len(digests), _DIGEST)}:
        objects.all_gather_object(comm, key, verb)  # raises, with what cannot be encoded
    if digests == mine * comm.size:
        return value
    first = objects.broadcast(comm, verb, lambda: value)
    problems = enumerate(objects.all_gather_object(comm, odd(first, value), verb))
    objects.raise_problems(verb, {rank: text for rank, text in problems if text is not None})
    return first
