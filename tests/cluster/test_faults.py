"""A sample of the fault battery, under each MPI that is there; the whole is ``python tests/faults.py --runs 200``."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from launch import slowness

ROOT = Path(__file__).resolve().parent.parent.parent
RUNS = 9  # one of each fault
pytestmark = pytest.mark.cluster


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_jobs_with_a_fault_end_as_they_should(mpi: str, tmp_path: Path) -> None:
    report = tmp_path / "runs.json"
    own = ROOT / ".venv" / mpi / "bin" / "python"
    command = [own, ROOT / "tests" / "faults.py", "--runs", str(RUNS), "--workers", "3", "--json", report]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280 * slowness())
    runs = json.loads(report.read_text())
    bad = [run for run in runs if run["problems"]]
    shown = [(run["fault"], run["verb"], run["route"], run["problems"], run["output"][-3000:]) for run in bad]
    assert not bad, "\n".join(str(part) for one in shown for part in one)
    assert len(runs) == RUNS
    assert done.returncode == 0, done.stderr
