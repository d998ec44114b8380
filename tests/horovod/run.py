"""Run Horovod's own tests on hpcdist.horovod, and write docs/horovod-tests.md.

Usage: python tests/horovod/run.py --horovod FOLDER [--environment NAME=PREFIX ...] [--ranks N ...]

FOLDER is a clone of github.com/horovod/horovod, of which nothing is in this repository. PREFIX is the virtual
environment of an MPI. Each rank runs pytest on a file, with stand-ins for the modules that it imports: hpcdist.horovod
for horovod.torch, the standard library for cloudpickle and mock. Every test has a deadline, which ends the job; the
next job then goes on after it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import types
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "horovod-tests.md"
FILES = ("test_torch.py", "test_process_sets_static.py", "test_process_sets_multi_comm.py")
HEAD = """# Horovod's own tests

This page has the results of Horovod's tests of `horovod.torch` and of process sets on
[hpcdist.horovod](start/from-horovod.md), without a GPU.
`tests/horovod/run.py` runs them without a change, and writes this page. `torch.optim.Muon` is newer than the tests, and
refuses the biases of their models, so it is hidden from them. A test that fails on any rank has failed.

"""
# Why a test fails, where its error does not say it.
CAUSES = {
    "test_broadcast_state_no_grad": "expects that broadcast_optimizer_state() makes gradients of zeros",
    "test_global_barrier_op": "measures time: a rank that waited measured less than 5 s",
}


def stand_in() -> None:
    """Put modules in the place of those that the tests import."""
    import pickle

    import torch

    import hpcdist.horovod as hvd

    torch.optim.Muon.__module__ = "newer"
    basics = types.SimpleNamespace(
        _get_process_set_ids_and_ranks=lambda: {number: one.ranks for number, one in hvd._registered.items()}
    )
    hvd.mpi_ops = types.SimpleNamespace(_basics=basics)
    threads: Any = types.ModuleType("horovod.runner.util.threads")
    threads.in_thread = None
    for name in ("horovod", "horovod.runner", "horovod.runner.util"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["horovod"].torch = sys.modules["horovod"].tensorflow = hvd  # type: ignore[attr-defined]
    sys.modules |= {"horovod.torch": hvd, "horovod.tensorflow": hvd, "horovod.runner.util.threads": threads}
    sys.modules |= {"cloudpickle": pickle, "mock": mock}


class Notes:
    """A plugin of pytest: writes a line for each test that starts or ends, and leaves out those that are done."""

    def __init__(self, path: Path, done: list[str]) -> None:
        self.file, self.done = path.open("w", buffering=1), done

    def _note(self, *what: str) -> None:
        print(json.dumps(what), file=self.file)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [item for item in items if item.name not in self.done]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._note(nodeid.rpartition("::")[2], "started", "")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.skipped:
            self._note(report.nodeid.rpartition("::")[2], "skipped", str(report.longrepr[2]).removeprefix("Skipped: "))
        elif report.failed or report.when == "call":
            text = str(report.longrepr).strip().splitlines()[-1] if report.failed else ""
            self._note(report.nodeid.rpartition("::")[2], report.outcome, text)


def run_rank(file: str, folder: str, done: str, deadline: str) -> None:
    """One rank: run a file, and note the results."""
    import pytest

    rank = os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK")
    stand_in()
    notes = Notes(Path(folder) / f"rank-{rank}", json.loads(done))
    options = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, f"--timeout={deadline}", "--timeout-method=thread"]
    pytest.main([file, *options], plugins=[notes])


def run(prefix: str, ranks: int, file: Path, deadline: int) -> dict[str, tuple[str, str]]:
    """Run a file on some ranks. Returns outcome and reason by test."""
    results: dict[str, tuple[str, str]] = {}
    variables = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "PYTHONPATH": str(ROOT)}
    variables |= {"OMPI_MCA_rmaps_base_oversubscribe": "1", "OMP_NUM_THREADS": "1", "HPCDIST_TIMEOUT": str(deadline)}
    variables |= {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    variables["PATH"] = f"{prefix}/bin:{os.environ['PATH']}"
    while True:
        with tempfile.TemporaryDirectory() as folder:
            command = ["mpirun", "-n", str(ranks), f"{prefix}/bin/python", __file__, "--rank", str(file), folder]
            command += [json.dumps(list(results)), str(2 * deadline)]
            subprocess.run(command, env=os.environ | variables, capture_output=True, timeout=3600)
            notes = [path.read_text().splitlines() for path in sorted(Path(folder).glob("rank-*"))]
        found: dict[str, tuple[str, str]] = {}
        for name, outcome, reason in (json.loads(line) for lines in notes for line in lines):
            if found.get(name, ("started",))[0] != "failed" and (outcome != "started" or name not in found):
                found[name] = outcome, reason
        hung = [name for name, (outcome, _) in found.items() if outcome == "started"]
        results |= found | dict.fromkeys(hung, ("failed", f"it ended the job, or had no answer in {deadline} s"))
        if not hung:
            return results


def left_out(reason: str) -> bool:
    return any(word in reason for word in ("GPU", "Adasum", "lastic"))


def page(runs: dict[str, dict[str, tuple[str, str]]]) -> str:
    """The text of the page."""
    lines = [HEAD, "| MPI, ranks | passed | failed | left out: needs a GPU | left out: other reasons |"]
    lines.append("|---|---|---|---|---|")
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for title, results in runs.items():
        counts = Counter(
            "GPU" if outcome == "skipped" and left_out(reason) else outcome for outcome, reason in results.values()
        )
        lines.append(f"| {title} | {counts['passed']} | {counts['failed']} | {counts['GPU']} | {counts['skipped']} |")
        for name, (outcome, reason) in results.items():
            if outcome != "passed":
                reason = CAUSES.get(name, reason) if outcome == "failed" else reason
                reasons.setdefault((outcome.replace("skipped", "left out"), name, reason), []).append(title)
    lines += ["", "| test | outcome | why | MPI, ranks |", "|---|---|---|---|"]
    for (outcome, name, reason), titles in sorted(reasons.items()):
        where = "all" if len(titles) == len(runs) else "; ".join(titles)
        lines.append(f"| {name} | {outcome} | {reason[:150].replace('|', chr(92) + '|') or 'always'} | {where} |")
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


def main() -> None:
    """Run the files, and write the page."""
    if sys.argv[1] == "--rank":
        run_rank(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description="Run Horovod's own tests on hpcdist.horovod.")
    parser.add_argument("--horovod", type=Path, required=True)
    own = [f"{kind}={ROOT}/.venv/{kind}" for kind in ("mpich", "openmpi")]
    parser.add_argument("--environment", nargs="+", default=own)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--deadline", type=int, default=60)
    options = parser.parse_args()
    runs: dict[str, dict[str, tuple[str, str]]] = {}
    for kind, prefix in (one.split("=") for one in options.environment):
        for ranks in options.ranks:
            title = f"{kind}, {ranks}"
            runs[title] = {}
            for name in FILES:
                runs[title] |= run(prefix, ranks, options.horovod / "test" / "parallel" / name, options.deadline)
            print(title, dict(Counter(outcome for outcome, _ in runs[title].values())), flush=True)
            PAGE.write_text(page(runs))


if __name__ == "__main__":
    main()
