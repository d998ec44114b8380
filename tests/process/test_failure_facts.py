"""What a failing rank writes for the supervisor of its job."""

import json
import socket

import pytest
from launch import limit, mpirun

PROGRAM = """
import os, signal, sys, time, torch, hpcdist as hd
world = hd.init()
hd.concat(torch.ones(1))
if world.rank == 1:
    {fault}
hd.concat(torch.ones(1))
"""
HERE = {"job": "7", "host": socket.gethostname()}


@pytest.mark.parametrize(
    ("fault", "rank", "facts"),
    [
        (
            "raise ValueError('a mistake\\nof mine')",
            *(1, {"error": "ValueError: a mistake", "place": "program.py:6", "status": 1}),
        ),
        ("sys.exit(5)", 1, {"status": 5}),
        ("os._exit(5)", 1, {"status": 5}),
        ("os.kill(os.getpid(), signal.SIGSTOP)", 0, {"lost": {"1": HERE["host"]}, "status": 1}),
        ("time.sleep(600)", 0, {"lost": {}, "status": 1}),
    ],
)
def test_the_facts_of_a_failure(fault, rank, facts, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM.format(fault=fault))
    variables = {"SLURM_JOB_ID": "7", "HPCDIST_FACTS": str(tmp_path)}
    job = mpirun(2, "program.py", cwd=tmp_path, env={**variables, **limit(3)})
    assert job.status != 0
    found = json.loads((tmp_path / f"rank-{rank}.json").read_text())
    if "lost" in facts:
        assert "HangError: concat() at program.py:7 has waited for " in found.pop("error")
        assert found.pop("place") == "program.py:7"
    assert found == {**HERE, "rank": rank, **facts}, job
    assert {path.name for path in tmp_path.iterdir()} - {"program.py"} <= {"rank-0.json", "rank-1.json"}


def test_without_a_supervisor_or_its_folder_nothing_is_written(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM.format(fault="sys.exit(5)"))
    job = mpirun(2, "program.py", cwd=tmp_path, env={"HPCDIST_FACTS": str(tmp_path / "none")})
    assert job.status == 5 and "Traceback" not in job.err, job
    assert [path.name for path in tmp_path.iterdir()] == ["program.py"]
