"""A barrier that reports which ranks have not reached it in time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from mpi4py import MPI

from hpcdist.errors import refusal

if TYPE_CHECKING:
    from hpcdist.backend.communicator import Communicator

__all__ = ["monitored_barrier"]

_TAGS = 2**14  # of the barriers of a group, which take turns: a rank that comes too late meets none of the next ones
_SLEEP = 1e-4  # seconds between two looks


def monitored_barrier(team: Communicator, number: int, timeout: timedelta, wait_all_ranks: bool) -> None:
    """Wait for all ranks of the group, or raise an error that names those that are missing.

    Args:
        number: number of such barriers of the group before this one.
        wait_all_ranks: whether rank 0 names all missing ranks, or the first that it finds.

    Raises:
        RuntimeError: on rank 0, if a rank has not reached it in time; on the others, if rank 0 has not let them go on.
    """
    end, tag = time.monotonic() + timeout.total_seconds(), 1 + number % _TAGS
    text = f"monitoredBarrier in {1000 * timeout.total_seconds():g} ms"  # the errors are worded as gloo's
    if team.rank:
        sent = team.comm.Isend([b"", MPI.BYTE], 0, tag)
        if _missing({0: team.comm.Irecv([bytearray(0), MPI.BYTE], 0, tag)}, end, True):
            raise refusal(
                RuntimeError,
                "HD601",
                f"Rank {team.rank} successfully reached monitoredBarrier, but received errors while waiting for "
                f"send/recv from rank 0: it failed to pass {text}",
            )
        sent.Wait()
        return
    if not timeout:
        raise refusal(RuntimeError, "HD601", "Rank 0 timed out in monitoredBarrier after 0 ms")
    others = range(1, team.size)
    missing = _missing({r: team.comm.Irecv([bytearray(0), MPI.BYTE], r, tag) for r in others}, end, wait_all_ranks)
    if missing:
        names = ", ".join(map(str, missing))
        raise refusal(
            RuntimeError,
            "HD601",
            f"Rank {names} failed to pass {text}" if len(missing) == 1 else f"Ranks {names} failed to pass {text}",
        )
    for rank in others:
        team.comm.Isend([b"", MPI.BYTE], rank, tag).Wait()


def _missing(requests: dict[int, MPI.Request], end: float, all_: bool) -> Sequence[int]:
    """Wait for messages until `end`; return the ranks of those that have not come, the first or all of them."""
    while requests:
        requests = {rank: request for rank, request in requests.items() if not request.Test()}
        if time.monotonic() > end:
            break
        if requests:
            time.sleep(_SLEEP)
    for request in requests.values():
        request.Cancel()
        request.Wait()
    return sorted(requests) if all_ else sorted(requests)[:1]
