"""Run PyTorch's own test suites of process groups with this backend and with gloo, and write docs/pytorch-suites.md.

Usage: python tests/pytorch_suites/suites.py [--tests FOLDER] [--np NP ...] [--backend NAME ...] [--suite NAME ...]
       python tests/pytorch_suites/suites.py --table   only the page, from the results that are there

It runs what build/pytorch-suites has no result of yet: a JSON file for each suite, torch, number of ranks and backend.
With --stop it ends after some seconds, with status 3 if something is left, and the next call goes on.

The suites: DistributedTest, which torch's wheel has; and test_c10d_collectives.py, test_c10d_p2p.py and
test_c10d_process_group.py with c10d_backend_common.py, of 2026-07 or later, in FOLDER. These four are in the folder
test/distributed of PyTorch's repository, github.com/pytorch/pytorch, and are left out if FOLDER is not given. Nothing
of them is in this repository. They need torch 2.15, which has all functions that they call. PyTorch's tests need the
package expecttest: pip install expecttest.

Every test has a deadline. One mpirun runs tests until --seconds have passed, or until one hangs, ends the job or fails
on some ranks alone; the next goes on behind it. A test that failed of those that PyTorch has for gloo runs once more,
alone in a fresh mpirun, and that outcome counts.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(1, str(HERE.parent / "helpers"))

import table  # noqa: E402
from ranks import C10D, DISTRIBUTED, SUITES  # noqa: E402
from settings import environ  # noqa: E402

RESULTS = ROOT / "build" / "pytorch-suites"
GRACE = 15  # seconds that the other ranks have once one rank has failed, and that a job has to end
VERSIONS = """
import torch
from mpi4py import MPI
vendor, number = MPI.get_vendor()
print(torch.__version__, vendor + " " + ".".join(map(str, number)), sep="\\n")
"""
ALONE = 12  # tests of a suite that have a second try: where more fail, it is not for what the one before has left
START = 300  # seconds until the first test starts


@dataclass(frozen=True)
class Job:
    """One run of some tests of a suite under mpirun."""

    suite: str
    backend: str
    np: int
    names: list[str]
    options: argparse.Namespace
    tests_of: str = "gloo"

    def run(self) -> dict[str, dict[str, Any]]:
        """Results by test: of all tests up to the first that failed, or until the seconds were over."""
        with tempfile.TemporaryDirectory(prefix="pytorch-suites-") as folder:
            plan = Path(folder) / "plan.json"
            options = self.options
            told = {"suite": self.suite, "backend": self.backend, "names": self.names, "tests_of": self.tests_of}
            told |= {"folder": folder, "tests": options.tests or "", "deadline": options.deadline}
            told["seconds"] = min(options.seconds, options.end - time.monotonic())
            plan.write_text(json.dumps(told))
            launch = [options.mpirun, "-n", str(self.np)]
            with (Path(folder) / "output").open("wb") as output:
                process = subprocess.Popen(
                    [*launch, options.python, str(HERE / "ranks.py"), str(plan)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=_environment(),
                    start_new_session=True,
                )
                try:
                    ending = self._watch(process, Path(folder))
                finally:
                    self._end(process, Path(folder))
            return self._results(Path(folder), ending)

    def _watch(self, process: subprocess.Popen[bytes], folder: Path) -> str:
        """Wait for the end; the reason if it is not the ranks' own."""
        since, seen = time.monotonic(), (0, 0)
        while process.poll() is None:
            time.sleep(0.2)
            notes = [_notes(folder, rank) for rank in range(self.np)]
            now = (sum(map(len, notes)), max(len([one for one in each if "start" in one]) for each in notes))
            if now != seen:
                since, seen = time.monotonic(), now
            waited = time.monotonic() - since
            last = [each[-1] if each else {} for each in notes]
            if not seen[1]:
                if waited > START:
                    return f"no test has started after {START} s"
            elif waited > self.options.deadline + GRACE:
                return f"no answer after {self.options.deadline} s"
            elif any(one.get("outcome") == "failed" for one in last) and waited > GRACE:
                return "another rank failed"
            elif all("done" in one for one in last) and waited > GRACE:
                return f"the job has not ended {GRACE} s after its last test"
        return f"the job ended with status {process.returncode}" if process.returncode else ""

    def _end(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(5)
        for rank in range(self.np):
            for note in _notes(folder, rank)[:1]:
                with suppress(ProcessLookupError):
                    os.kill(note["pid"], signal.SIGKILL)

    def _results(self, folder: Path, ending: str) -> dict[str, dict[str, Any]]:
        notes = [_notes(folder, rank) for rank in range(self.np)]
        ends = [{one["end"]: one for one in each if "end" in one} for each in notes]
        begun = [name for name in self.names if any(one.get("start") == name for each in notes for one in each)]
        results = {}
        for name in begun:
            ranks = [each.get(name) for each in ends]
            outcomes = {one["outcome"] if one else "unfinished" for one in ranks}
            seconds = max((one["seconds"] for one in ranks if one), default=0.0)
            outcome = next(iter(outcomes)) if len(outcomes) == 1 and "unfinished" not in outcomes else "failed"
            failed = [one["reason"] for one in ranks if one and one["outcome"] == "failed"]
            reason = next((one["reason"] for one in ranks if one and one["outcome"] == "skipped"), "")
            if outcome == "failed":
                missing = [rank for rank, one in enumerate(ranks) if one is None]
                disagree = [f"the ranks' outcomes: {', '.join(sorted(outcomes))}"] * (len(outcomes) > 1)
                reason = "\n".join([*failed, *self._unfinished(folder, ending, missing), *disagree])
            results[name] = {"outcome": outcome, "reason": reason, "seconds": round(seconds, 2)}
        if not begun:
            output = (folder / "output").read_text(errors="replace")[-3000:]
            results[self.names[0]] = {"outcome": "failed", "reason": f"{ending}\n{output}", "seconds": 0.0}
        elif "not ended" in ending:
            results[begun[-1]] = {"outcome": "failed", "reason": ending, "seconds": 0.0}
        return results

    def _unfinished(self, folder: Path, ending: str, missing: list[int]) -> list[str]:
        """Why ranks have no outcome: the end of the job, the stacks of the first of them, and the end of the output."""
        if not missing:
            return []
        stacks = (folder / f"rank-{missing[0]}.stacks").read_text(errors="replace")
        output = (folder / "output").read_text(errors="replace")
        return [f"{ending}; no outcome of ranks {missing} of {self.np}", stacks[-3000:], output[-3000:]]


def _notes(folder: Path, rank: int) -> list[dict[str, Any]]:
    path = folder / f"rank-{rank}.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**environ(), "PYTHONPATH": path, "PYTORCH_PRINT_REPRO_ON_FAILURE": "0"}


def names_of(suite: str, options: argparse.Namespace) -> list[str]:
    """The names of a suite's tests that match --match."""
    command = [options.python, str(HERE / "ranks.py"), "--list", suite, options.tests or ""]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=_environment())
    return [name for name in done.stdout.split() if name.startswith("test_") and options.match in name]


def run_suite(suite: str, backend: str, np: int, about: dict[str, Any], options: argparse.Namespace) -> bool:
    """Run what the file of results lacks, until the time is over; whether nothing is left."""
    path = RESULTS / f"{suite}-torch{about['torch']}-np{np}-{backend}.json"
    if options.again:
        path.unlink(missing_ok=True)
    if path.exists():
        state = json.loads(path.read_text())
    else:
        state = {**about, "suite": suite, "np": np, "backend": backend}
        state |= {"names": names_of(suite, options), "results": {}}
    results = state["results"]
    job = Job(suite, backend, np, [], options)
    while (next_ := _next(state, options.match)) and time.monotonic() < options.end:
        names, tests_of, alone = next_
        new = replace(job, names=names, tests_of=tests_of).run()
        for name, one in new.items():
            if alone:
                one["first"] = results[name]["reason"]
            if tests_of == "mpi":
                one["tests_of"] = "mpi" if one["outcome"] != "skipped" else "gloo, mpi"
        results.update(new)
        path.write_text(json.dumps(state, indent=1))
        failed = [name for name, one in results.items() if one["outcome"] == "failed"]
        print(f"{suite} np {np} {backend}: {len(results)} of {len(state['names'])}, {len(failed)} failed", flush=True)
    return not next_


def _next(state: dict[str, Any], match: str) -> tuple[list[str], str, bool] | None:
    """The tests for the next job, whose tests they are of PyTorch's, and whether one is alone for a second try."""
    results = state["results"]
    if names := [name for name in state["names"] if name not in results and match in name]:
        return names, "gloo", False
    second = [name for name, one in results.items() if "first" in one]
    for name, one in results.items():
        if len(second) < ALONE and one["outcome"] == "failed" and "tests_of" not in one and "first" not in one:
            return [name], "gloo", True
    skipped = [name for name, one in results.items() if one["outcome"] == "skipped" and "tests_of" not in one]
    if state["np"] < 3:  # these make a group of the ranks 1 and 2
        skipped = [name for name in skipped if "world size" not in results[name]["reason"]]
    return (skipped, "mpi", False) if skipped and state["suite"] == DISTRIBUTED else None


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", help="the folder with PyTorch's test files")
    parser.add_argument("--np", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--backend", nargs="+", default=["gloo", "mpi"])
    parser.add_argument("--suite", nargs="+", choices=SUITES)
    parser.add_argument("--match", default="", help="only tests with this in their name")
    parser.add_argument("--again", action="store_true", help="forget earlier results of these suites")
    parser.add_argument("--stop", type=float, default=math.inf, help="seconds after which no further job starts")
    parser.add_argument("--deadline", type=float, default=90, help="seconds for a test")
    parser.add_argument("--seconds", type=float, default=60, help="after which a run starts no further test")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--mpirun", help="default: beside --python, else that of PATH")
    parser.add_argument("--table", action="store_true", help="only write the page")
    options = parser.parse_args()
    beside = Path(options.python).parent / "mpirun"
    options.mpirun = options.mpirun or (str(beside) if beside.exists() else shutil.which("mpirun"))
    options.end = time.monotonic() + options.stop
    options.suite = options.suite or ((*C10D, DISTRIBUTED) if options.tests else (DISTRIBUTED,))
    return options


def main() -> int:
    """The exit status: 1 if a test has failed that gloo passes, 3 if the time was over before all have run."""
    options = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and end the job that runs
    RESULTS.mkdir(parents=True, exist_ok=True)
    if not options.table:
        versions = subprocess.run([options.python, "-c", VERSIONS], stdout=subprocess.PIPE, text=True, check=True)
        torch, mpi = versions.stdout.splitlines()
        for suite in options.suite:
            for np in options.np:
                for backend in options.backend:
                    done = run_suite(suite, backend, np, {"torch": torch, "mpi": mpi}, options)
                    if not done:
                        return 3
    text, worse = table.page([json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))])
    (ROOT / "docs" / "pytorch-suites.md").write_text(text)
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
