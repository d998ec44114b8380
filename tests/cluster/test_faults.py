"""A sample of the fault battery, under each MPI that is there; the whole is ``python tests/faults.py --runs 200``."""

import json
import subprocess
from pathlib import Path

import pytest
from launch import slowness

ROOT = Path(__file__).resolve().parent.parent.parent
RUNS = {"openmpi": 9, "mpich": 4}  # one of each fault; those in which the launcher has a part
pytestmark = pytest.mark.cluster


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mpi", RUNS)
def test_jobs_with_a_fault_end_as_they_should(mpi, tmp_path):
    report = tmp_path / "runs.json"
    own = ROOT / ".venv" / mpi / "bin" / "python"
    command = [own, ROOT / "tests" / "faults.py", "--runs", str(RUNS[mpi]), "--workers", "3", "--json", report]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280 * slowness())
    runs = json.loads(report.read_text())
    bad = [run for run in runs if run["problems"]]
    shown = [(run["fault"], run["verb"], run["route"], run["output"][-3000:], run["problems"]) for run in bad]
    assert not bad, "\n".join(str(part) for one in shown for part in one)
    assert len(runs) == RUNS[mpi]
    assert done.returncode == 0, done.stderr
