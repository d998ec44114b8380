"""Compare the clocks of the ranks."""

from __future__ import annotations

import time
from array import array
from typing import TYPE_CHECKING

from hpcdist.activity.recording import Clock

if TYPE_CHECKING:
    from mpi4py import MPI

_ROUNDS = 32  # of which the fastest counts: a rank may have to wait for a core


def compare(comm: MPI.Intracomm, first: Clock | None) -> Clock:
    """Compare the clock of this rank with that of rank 0, by messages. Collective over `comm`.

    A reply was sent between the question and its arrival: in the middle, give or take half the round trip. So Cristian,
    "Probabilistic clock synchronization" (1989).

    Args:
        first: what this has returned at the start of the job; None at that time.
    """
    local, epoch = time.perf_counter_ns(), time.time_ns()
    if comm.rank == 0:
        shift = epoch - local if first is None else first.shift
        for peer in range(1, comm.size):
            _reply(comm, peer, shift)
        return Clock(local, shift, 0, epoch)
    best, middle, shift = min(_ask(comm) for _ in range(_ROUNDS))
    return Clock(middle, shift, best // 2 + 1, epoch + middle - local)


def _reply(comm: MPI.Intracomm, peer: int, shift: int) -> None:
    answer = array("q", [0])
    for _ in range(_ROUNDS):
        comm.Recv(answer, peer)
        answer[0] = time.perf_counter_ns() + shift
        comm.Send(answer, peer)


def _ask(comm: MPI.Intracomm) -> tuple[int, int, int]:
    """(round trip, its middle by this rank's clock, difference to that of rank 0), in nanoseconds."""
    answer = array("q", [0])
    begin = time.perf_counter_ns()
    comm.Send(answer, 0)
    comm.Recv(answer, 0)
    trip = time.perf_counter_ns() - begin
    middle = begin + trip // 2
    return trip, middle, answer[0] - middle
