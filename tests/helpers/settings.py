"""What the runs of tests/run.py are told, and where they write."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOGS = ROOT / "build" / "test-logs"
ALL = "HPCDIST_TEST_ALL" in os.environ  # make test-all: everything on every number of ranks
HALF = "HPCDIST_TEST_HALF"  # 0 or 1: of tests with parameters that half of the cases, see halves.py

# More ranks than cores, and root: what the two Open MPIs want to be told.
_OPENMPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}
# Of the libraries of tests/clients: no network, no search for GPUs, and no word about forks.
_CLIENTS = {"HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false"}
_NETWORKS = Path("/sys/class/infiniband")
_compiling = threading.Lock()


def environ() -> dict[str, str]:
    """Of all runs. Without networks Open MPI takes ob1 in the end, after 0.2 s in which it waits for them."""
    found = {**os.environ, **_OPENMPI, **_CLIENTS, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
    found.pop(HALF, None)
    return found if _NETWORKS.exists() or ALL else {"OMPI_MCA_pml": "ob1", **found}


def asleep() -> dict[str, str]:
    """Of the jobs of a run: their ranks sleep while they wait, unlike those of users, so not in make test-all; nothing
    where it cannot be compiled."""
    if ALL or shutil.which("cc") is None:
        return {}
    library, source = LOGS / "sched_yield.so", Path(__file__).with_name("sched_yield.c")
    with _compiling:
        if not library.exists() or library.stat().st_mtime < source.stat().st_mtime:
            new = library.with_suffix(".new")
            made = subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", new, source], check=False)
            if made.returncode:
                return {}
            os.replace(new, library)
    return {"LD_PRELOAD": ":".join(filter(None, [str(library), os.environ.get("LD_PRELOAD")]))}
