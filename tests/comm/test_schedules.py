"""What the model of large jobs records for a rank, without other ranks, is what that rank does in a real job."""

from __future__ import annotations

import sys
from functools import partial
from itertools import product, zip_longest
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from collective import assert_on_all_ranks

import hpcdist as hd
from hpcdist.runtime.world import team_of

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from simulated import CASES, Machine, Recorder, outside, record, recorded


def _sent(log):
    events = [event for event in log if event.name not in ("copy", "result")]
    return [event._replace(ranks=(), peer=event.peer * (event.name != "Wait")) for event in events]


@pytest.mark.parametrize(("case", "nbytes"), [("concat", 24), ("split", 24), *product(CASES, (2**13, 2**21 + 2**13))])
def test_bytes_and_messages_of_a_real_job(case, nbytes, rank, size):
    team = team_of()
    expected = _sent(recorded(case, nbytes * size, Machine(1, size), list(dict.fromkeys((0, rank))))[-1])
    real = []
    with patch.object(team, "comm", Recorder(team.comm, real)):
        CASES[case](rank, size, nbytes * size)()
    odd = [pair for pair in zip_longest(_sent(real), expected) if pair[0] != pair[1]]
    assert_on_all_ranks(not odd and any(event.nbytes for event in real), odd[:1])


def test_a_byte_comes_to_a_node_once_in_a_ring():
    """On 64 nodes x 16 ranks: a rank receives from the one after it what the later ones of its node have, and all else
    from the one before it."""
    machine, nbytes = Machine(64, 16), 2**18
    for rank in (0, 5, 15, 512):
        log = record(partial(hd.concat, torch.empty(nbytes, dtype=torch.uint8)), rank, machine)
        later, before, after = 15 - rank % 16, (rank - 1) % machine.size, (rank + 1) % machine.size
        received, sent = (dict.fromkeys((before, after), 0) for _ in range(2))
        for event in log:
            if event.name in ("Irecv", "Isend"):
                (received if event.name == "Irecv" else sent)[event.peer] += event.nbytes // nbytes
        assert received == {before: machine.size - 1 - later, after: later}
        assert sent == {before: later + 1 if rank % 16 else 0, after: machine.size - (later or 16)}


def test_a_small_tensor_comes_to_each_node_once(tmp_path):
    """Its one owner sends to other nodes, not to their ranks."""
    machine, x, path = Machine(16, 8), torch.zeros(2**18, dtype=torch.uint8), tmp_path / "x.h5"
    record(partial(hd.staging.save, path, x, writer="posix"), 0, Machine(1, 1))  # without MPI-IO
    log = record(partial(hd.staging.load, path, dim=None), 0, machine)
    assert 0 < sum(outside(event, 0, machine)[1] for event in log) <= 15 * x.nbytes
