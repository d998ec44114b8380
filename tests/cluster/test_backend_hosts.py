"""The process group "mpi" over several hosts.

python -m pytest -m cluster tests/cluster/test_backend_hosts.py     # as root; under the MPI of that Python
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hosts import Hosts

pytestmark = pytest.mark.cluster

PROGRAM = Path(__file__).resolve().with_name("backend_calls.py")


@pytest.mark.parametrize("ranks", [[2, 2], [1, 1, 1]], ids=["2 hosts x 2 ranks", "3 hosts x 1 rank"])
def test_every_call_over_several_hosts(hosts: Hosts, ranks: list[int]) -> None:
    nodes = [node for node, count in enumerate(ranks) for _ in range(count)]
    job = hosts.mpirun(ranks, PROGRAM)
    assert job.status == 0, job.err
    found = re.findall(r"^rank (\d+) of node (\d+): (\d+) checks$", job.out, re.MULTILINE)
    assert sorted((int(rank), int(node)) for rank, node, _ in found) == list(enumerate(nodes))
    assert min(int(checks) for *_, checks in found) > 80
