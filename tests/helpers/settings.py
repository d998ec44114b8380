"""What tests ask about the run that they are in."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ALL = "HPCDIST_TEST_ALL" in os.environ  # make test-all: also what takes long
_NEEDED = """OMPI_ALLOW_RUN_AS_ROOT OMPI_ALLOW_RUN_AS_ROOT_CONFIRM PRTE_ALLOW_RUN_AS_ROOT PRTE_ALLOW_RUN_AS_ROOT_CONFIRM
OMPI_MCA_rmaps_base_oversubscribe PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe OMP_NUM_THREADS
OMPI_MCA_hwloc_base_binding_policy=none PRTE_MCA_hwloc_default_binding_policy=none OMPI_MCA_mpi_yield_when_idle"""
ROOT_AND_MORE = {key: value or "1" for key, _, value in (pair.partition("=") for pair in _NEEDED.split())}
"""What lets MPI start as root, and more ranks than cores."""


def environ():
    """Return the environment for pytest and its jobs: root, and more ranks than cores.

    Without networks Open MPI takes ob1 in the end, after 0.2 s in which it waits for them.
    """
    found = {**os.environ, **ROOT_AND_MORE}
    return found if ALL or Path("/sys/class/infiniband").exists() else {"OMPI_MCA_pml": "ob1", **found}
