"""Exchange small values between the ranks while a call is set up, and fail together.

:func:`run_on_all` and :func:`run_on_root` run a step and distribute its result, as those of
``torch.distributed.checkpoint``'s ``_DistWrapper`` do. Values travel by pickle, as mpi4py's objects do, because the
ranks of a job trust each other. The structures that users pass do not: see :mod:`hpcdist.control.codec`.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping
from contextlib import suppress
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeVar

from hpcdist import activity
from hpcdist.activity import procstat
from hpcdist.errors import RankError, coded, described, without_hint

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")


def all_gather_object(comm: MPI.Comm, value: Any, what: str = "an exchange before a call") -> list[Any]:
    """Gather the value of every rank on all ranks, in rank order. Collective over `comm`.

    Args:
        what: the operation as the user called it, for the error.

    Raises:
        RankError: on every rank, if the value of one cannot be pickled.
    """
    return run_on_all(comm, what, lambda: value)


def run_on_root(comm: MPI.Comm, what: str, step: Callable[[], T]) -> T:
    """Run `step` on rank 0 and return its result on every rank. Collective over `comm`.

    Args:
        what: the operation as the user called it, for the error.
        step: its result is small, and can be pickled.

    Raises:
        RankError: on every rank, if `step` fails; on rank 0 from the error that it raised.
    """
    causes: list[Exception] = []
    value: T
    value, problem = pickle.loads(comm.bcast(_outcome(step, causes) if comm.rank == 0 else b""))
    activity.touch()
    if problem is not None:
        raise_problems(what, {0: problem}, causes)
    return value


def run_on_all(comm: MPI.Comm, what: str, step: Callable[[], T]) -> list[T]:
    """Run `step` on every rank and return all results, in rank order. Collective over `comm`.

    Args:
        what, step: as those of :func:`run_on_root`.

    Raises:
        RankError: on every rank, if `step` fails on one; on that rank from the error that it raised.
    """
    causes: list[Exception] = []
    values: tuple[T, ...]
    values, problems = zip(*map(pickle.loads, comm.allgather(_outcome(step, causes))), strict=True)
    activity.touch()
    if any(problems):
        raise_problems(what, dict(enumerate(problems)), causes)
    return list(values)


def everywhere(comm: MPI.Intracomm, good: bool) -> bool:
    """Return whether it is good on all ranks. Collective over `comm`, and a barrier; one Allreduce."""
    from mpi4py import MPI

    found = bytearray([good])
    comm.Allreduce(MPI.IN_PLACE, [found, MPI.BYTE], MPI.BAND)
    return bool(found[0])


def raise_problems(what: str, found: Mapping[int, str | None], causes: list[Exception] | None = None) -> None:
    """Raise a RankError if there are problems, which are the same on all ranks.

    Args:
        what: the operation as the user called it.
        found: the problem of each rank, if it has one.
        causes: this rank's own error, if any, from which it is raised.
    """
    if problems := {rank: text for rank, text in found.items() if text}:
        # Popped: an error in a variable of a frame of its own traceback would keep that frame alive, and what the
        # caller holds.
        raise RankError(what, problems) from (without_hint(causes.pop()) if causes else None)


def first_difference(first: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """Describe how the options of a rank differ from those of rank 0; None if they do not. A missing one is None."""
    for option in {**first, **other}:
        if other.get(option) != first.get(option):
            return coded("HD303", f"{option} is {other.get(option)!r}, where rank 0 has {first.get(option)!r}")
    return None


def same(comm: MPI.Intracomm, verb: str, key: object, value: T, odd: Callable[[T, T], str | None]) -> T:
    """Return rank 0's `value` on every rank. Collective over `comm`.

    If the digests of `key` are the same on all ranks, one Allreduce shows it, and each rank gets its own value back.
    Otherwise rank 0's value is sent once, every rank gets a copy, and each reports how its own differs.

    Args:
        key: what must be the same; equal ones have the same repr().
        value: what is sent where keys differ.
        odd: describes how the second value, this rank's, differs from the first one, rank 0's; None if it does not.

    Raises:
        RankError: on every rank, if a value differs.
    """
    import numpy as np
    from mpi4py import MPI

    digest = np.frombuffer(blake2b(repr(key).encode(), digest_size=16).digest(), np.uint64)
    extremes = np.concatenate([digest, ~digest])  # the largest of each, and of each complement: that of the smallest
    comm.Allreduce(MPI.IN_PLACE, extremes, MPI.MAX)
    if (extremes[:2] != ~extremes[2:]).any():
        mine, value = value, run_on_root(comm, verb, lambda: value)
        raise_problems(verb, dict(enumerate(all_gather_object(comm, odd(value, mine), verb))))
    return value


def node_file(comm: MPI.Comm) -> int | None:
    """Return a descriptor of a new file in memory, the same on all ranks of a node. Collective over `comm`.

    Rank 0 makes it, and the others open it through its process; None on all ranks where the system does not let them,
    as between containers.
    """
    made: list[int] = []
    with suppress(OSError):
        made = [open_on_root(comm)]
    if all(all_gather_object(comm, bool(made))):
        return made[0]
    for fd in made:
        os.close(fd)
    return None


def open_on_root(comm: MPI.Comm) -> int:
    """Make a file in memory on rank 0, and return a descriptor of it on every rank. Collective over `comm`.

    Raises:
        OSError: on this rank, if the system does not let it open a file of rank 0.
    """
    made: list[int] = []

    def make() -> list[int]:
        made.append(os.memfd_create("hpcdist", os.MFD_CLOEXEC))
        return procstat.address(made[0])

    there = run_on_root(comm, "init", make)
    return made[0] if made else procstat.opened(there)


def _outcome(step: Callable[[], Any], causes: list[Exception]) -> bytes:
    """Run a step; return (its result, None), or (None, its error as text), with the error appended to `causes`."""
    try:
        return pickle.dumps((step(), None))
    except Exception as error:
        causes.append(error)
        return pickle.dumps((None, described(error, "HD309")))
