"""Clocks that are apart on purpose."""

import time
from types import SimpleNamespace

import pytest
from mpi4py import MPI

from hpcdist.activity import recording

pytestmark = pytest.mark.mpi
APART = 10**9  # ns between the clocks of one rank and the next


@pytest.mark.timeout(60)
def test_the_shift_of_each_rank_is_found_within_its_error(monkeypatch, tmp_path):
    comm = MPI.COMM_WORLD
    ahead = APART * comm.rank
    made = SimpleNamespace(
        perf_counter_ns=lambda: time.perf_counter_ns() + ahead, time_ns=lambda: time.time_ns() + 2 * ahead
    )
    monkeypatch.setattr(recording, "time", made)
    trace = recording.Recording(str(tmp_path), "job", comm.rank, comm.size)
    trace.compare_clocks(comm)
    trace.compare_clocks(comm)
    first, last = trace.clocks
    root = comm.bcast(first)
    assert abs(first.shift + ahead - root.shift) <= first.error
    assert first.error == 0 if comm.rank == 0 else 0 < first.error < APART / 10
    assert abs(last.shift + ahead - root.shift) <= last.error
    assert last.local > first.local
    # The epoch of this rank's own clock, at the same moment.
    assert abs((last.epoch - last.local) - (time.time_ns() - time.perf_counter_ns()) - ahead) < APART / 10
