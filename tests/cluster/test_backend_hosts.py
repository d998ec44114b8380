"""The process group "mpi" over several hosts.

python -m pytest -m cluster tests/cluster/test_backend_hosts.py     # as root; under the MPI of that Python
"""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.cluster

PROGRAM = Path(__file__).resolve().with_name("backend_calls.py")


def test_every_call_over_several_hosts(hosts):
    job = hosts.mpirun([2, 1, 1], PROGRAM)
    assert job.status == 0, job.err
    found = re.findall(r"^rank (\d+) of node (\d+): (\d+) checks$", job.out, re.MULTILINE)
    assert sorted((int(rank), int(node)) for rank, node, _ in found) == [(0, 0), (1, 0), (2, 1), (3, 2)]
    assert min(int(checks) for *_, checks in found) > 80
