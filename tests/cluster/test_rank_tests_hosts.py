"""Tests of ranks over several hosts: the verbs, messages, and torch's collectives with backend "mpi".

python -m pytest -m cluster tests/cluster/test_rank_tests_hosts.py     # as root; under the MPI of that Python
"""

import pytest
from settings import ROOT

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
PYTEST = ("-m", "pytest", "-q", "--with-mpi", "-p", "no:cacheprovider", "-m", "mpi and not large")


@pytest.mark.parametrize(
    "words",
    [
        ("tests/collectives/test_verbs.py", "tests/p2p", "-k", "every_shape or torch_group or in_flight"),
        ("tests/backend/test_operations.py", "-k", "not async"),
    ],
)
def test_tests_of_ranks(words, hosts):
    """In spite of the useless interfaces."""
    env = {"HPCDIST_STAGING": str(hosts.folder), "HPCDIST_TEST_FOLDER": str(hosts.folder)}
    job = hosts.start_mpirun([2, 1, 1], *PYTEST, *words, cwd=ROOT, env=env).wait(300)
    assert job.status == 0 and " passed" in job.out, f"{job.out}\n{job.err}"
