"""The pages on PyTorch's suites count what ran, and say where gloo, or torch's own storage, does better."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks" / "suites"))
import checkpoints
from table import brief, page_of_suites as page

sys.path.pop(0)

ABOUT = {"suite": "distributed_test", "torch": "2.15.0", "mpi": "MPICH", "np": 2}
FAILED = (
    'Traceback (most recent call last):\n  File "a.py", line 1, in b\nValueError: no | such\n\nTo execute this test\n'
)


def _run(backend, **outcomes):
    results = {}
    for name, outcome in outcomes.items():
        kind, _, tests_of = outcome.partition(" ")
        results[name] = {"outcome": kind, "reason": FAILED if kind == "failed" else "needs a GPU" * (kind == "skipped")}
        if tests_of:
            results[name]["tests_of"] = tests_of
    return {**ABOUT, "backend": backend, "results": results}


def test_the_page_counts_and_compares():
    gloo = _run("gloo", a="passed", b="passed", c="failed", d="skipped", e="failed mpi")
    ours = _run("mpi", a="passed", b="failed", c="failed", d="skipped", e="passed mpi")
    text, worse = page([gloo, ours])
    assert worse == ["distributed_test b, torch 2.15.0 np 2"]
    rows = text.splitlines()
    assert "| 2.15.0 | distributed_test | 2 | 2, 1, 1 | 1, 2, 1 |" in rows
    assert "| 2.15.0 | distributed_test, for MPI | 2 | 0, 1, 0 | 1, 0, 0 |" in rows
    differ, same = rows.index("## Where they differ"), rows.index("## Failures of all")
    assert [row.split(" | ")[1] for row in rows[differ:same] if "2.15.0" in row] == ["b", "e"]
    assert [row.split(" | ")[1] for row in rows[same:] if "2.15.0" in row] == ["c"]
    assert "| needs a GPU | 1 | 1 |" in rows


def test_a_reason_is_the_error_of_a_traceback():
    assert brief(FAILED) == "ValueError: no \\| such"
    assert brief("no answer after 90 s; no outcome of ranks [1] of 2\nTimeout (0:01:30)!\n") == (
        "no answer after 90 s; no outcome of ranks [1] of 2"
    )


def test_the_page_of_checkpoints():
    def run(storage, **outcomes):
        cuda = "AssertionError: Torch not compiled with CUDA enabled\n"
        results = {
            f"test_planner.TestPlanner.{name}": {
                "outcome": outcome.replace("cuda", "failed"),
                "reason": {"failed": FAILED, "cuda": cuda, "skipped": "why"}.get(outcome, ""),
            }
            for name, outcome in outcomes.items()
        }
        return {"torch": "2.13.0", "of": "2.12", "storage": storage, "results": results}

    files = run("files", a="passed", b="passed", c="failed", d="cuda", e="skipped")
    text, worse = checkpoints.page([files, run("hdf5", a="passed", b="failed", c="failed", d="cuda", e="skipped")])
    assert worse == ["test_planner TestPlanner.b, torch 2.13.0"]
    rows = text.splitlines()
    assert "| 2.13.0 | 2.12 | test_planner | 2, 1, 2 | 1, 2, 2 |" in rows
    assert "| test_planner | b | passed | failed | ValueError: no \\| such | torch 2.13.0 |" in rows
    assert "| test_planner | c | failed | failed | ValueError: no \\| such | torch 2.13.0 |" in rows
    assert "| needs a GPU | 1 | 1 |" in rows and "| why | 1 | 1 |" in rows
