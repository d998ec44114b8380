"""Run PyTorch's own test suites of process groups with this backend and with gloo, and write docs/pytorch-suites.md.

Usage: python tests/pytorch_suites/suites.py [--tests FOLDER] [--np NP ...] [--backend NAME ...] [--suite NAME ...]
       python tests/pytorch_suites/suites.py --table   only the page, from the results that are there

The suites: DistributedTest, which torch's wheel has; and test_c10d_collectives.py, test_c10d_p2p.py and
test_c10d_process_group.py with c10d_backend_common.py, of 2026-07 or later, in FOLDER. These four are in the folder
test/distributed of PyTorch's repository, github.com/pytorch/pytorch, and are left out if FOLDER is not given. Nothing
of them is in this repository. They need torch 2.15, which has all functions that they call. PyTorch's tests need the
package expecttest: pip install expecttest.

Every test has a deadline. One mpirun runs tests until --seconds have passed, or until one hangs, ends the job or fails
on some ranks alone; the next goes on behind it. A test that failed of those that PyTorch has for gloo runs once more,
alone in a fresh mpirun, and that outcome counts. The results are in build/pytorch-suites, one JSON file for each suite,
number of ranks and backend.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
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
sys.path.insert(1, str(HERE.parent))

import table  # noqa: E402
from ranks import C10D, DISTRIBUTED, SUITES  # noqa: E402
from run import OPENMPI  # noqa: E402

RESULTS = ROOT / "build" / "pytorch-suites"
GRACE = 15  # seconds that the other ranks have once one rank has failed, and that a job has to end
START = 900  # seconds until the first test starts: imports, and whatever --wrap waits for


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
            plan.write_text(
                json.dumps(
                    {
                        "suite": self.suite,
                        "backend": self.backend,
                        "names": self.names,
                        "tests_of": self.tests_of,
                        "folder": folder,
                        "tests": options.tests or "",
                        "deadline": options.deadline,
                        "seconds": options.seconds,
                    }
                )
            )
            launch = [*shlex.split(options.wrap), options.mpirun, "-n", str(self.np)]
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
            outcome = outcomes.pop() if len(outcomes) == 1 and "unfinished" not in outcomes else "failed"
            failed = [one["reason"] for one in ranks if one and one["outcome"] == "failed"]
            reason = next((one["reason"] for one in ranks if one and one["outcome"] == "skipped"), "")
            if outcome == "failed":
                reason = "\n".join(failed) or self._unfinished(folder, ending, ranks)
            results[name] = {"outcome": outcome, "reason": reason, "seconds": round(seconds, 2)}
        if not begun:
            output = (folder / "output").read_text(errors="replace")[-3000:]
            results[self.names[0]] = {"outcome": "failed", "reason": f"{ending}\n{output}", "seconds": 0.0}
        elif "not ended" in ending:
            results[begun[-1]] = {"outcome": "failed", "reason": ending, "seconds": 0.0}
        return results

    def _unfinished(self, folder: Path, ending: str, ranks: list[Any]) -> str:
        """Why some ranks have no outcome: the end of the job, their stacks, and the end of the output."""
        missing = [rank for rank, one in enumerate(ranks) if one is None]
        parts = [f"{ending}; no outcome of ranks {missing}, of {len(ranks)}"]
        for rank in missing[:1]:
            stacks = (folder / f"rank-{rank}.stacks").read_text(errors="replace")
            parts.append(stacks[-3000:])
        parts.append((folder / "output").read_text(errors="replace")[-3000:])
        return "\n".join(parts)


def _notes(folder: Path, rank: int) -> list[dict[str, Any]]:
    path = folder / f"rank-{rank}.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, **OPENMPI, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def names_of(suite: str, options: argparse.Namespace) -> list[str]:
    """The names of a suite's tests that match --match."""
    command = [options.python, str(HERE / "ranks.py"), "--list", suite, options.tests or ""]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=_environment())
    return [name for name in done.stdout.split() if name.startswith("test_") and options.match in name]


def run_suite(suite: str, backend: str, np: int, names: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Results by test: PyTorch's tests for gloo, and of those that it skips for gloo those that it has for MPI."""
    results = run_tests(Job(suite, backend, np, names, options))
    if suite == DISTRIBUTED:
        skipped = [name for name, one in results.items() if one["outcome"] == "skipped"]
        if np < 3:  # they make a group of the ranks 1 and 2
            skipped = [name for name in skipped if "world size" not in results[name]["reason"]]
        again = run_tests(Job(suite, backend, np, skipped, options, tests_of="mpi"))
        results.update({name: {**one, "tests_of": "mpi"} for name, one in again.items() if one["outcome"] != "skipped"})
    return results


def run_tests(job: Job) -> dict[str, Any]:
    """Results by test, each failed one after a second try alone."""
    results: dict[str, Any] = {}
    title = f"{job.suite} np {job.np} {job.backend}, tests of {job.tests_of}"
    while rest := [name for name in job.names if name not in results]:
        results.update(replace(job, names=rest).run())
        failed = [name for name, one in results.items() if one["outcome"] == "failed"]
        print(f"{title}: {len(results)} of {len(job.names)}, {len(failed)} failed", flush=True)
    again = [name for name, one in results.items() if one["outcome"] == "failed" and job.tests_of == "gloo"]
    for name in again:
        alone = replace(job, names=[name]).run()[name]
        alone["first"] = results[name]["reason"]
        results[name] = alone
        print(f"{title}: {name} alone: {alone['outcome']}", flush=True)
    return results


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", help="the folder with PyTorch's test files")
    parser.add_argument("--np", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--backend", nargs="+", default=["gloo", "mpi4py"])
    parser.add_argument("--suite", nargs="+", choices=SUITES)
    parser.add_argument(
        "--match", default="", help="only tests with this in their name; their results replace older ones"
    )
    parser.add_argument("--deadline", type=float, default=90, help="seconds for a test")
    parser.add_argument("--seconds", type=float, default=60, help="after which a run starts no further test")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--mpirun", help="default: beside --python, else that of PATH")
    parser.add_argument("--wrap", default="", help="a command before each mpirun, such as one that takes a lock")
    parser.add_argument("--table", action="store_true", help="only write the page")
    options = parser.parse_args()
    beside = Path(options.python).parent / "mpirun"
    options.mpirun = options.mpirun or (str(beside) if beside.exists() else shutil.which("mpirun"))
    options.suite = options.suite or ((*C10D, DISTRIBUTED) if options.tests else (DISTRIBUTED,))
    return options


def main() -> int:
    """The exit status: 1 if a test has failed that gloo passes."""
    options = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and end the job that runs
    RESULTS.mkdir(parents=True, exist_ok=True)
    if not options.table:
        code = "import torch; from mpi4py import MPI; print(torch.__version__); print(*MPI.get_vendor())"
        versions = subprocess.run([options.python, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
        torch, mpi = versions.stdout.splitlines()
        for suite in options.suite:
            names = names_of(suite, options)
            for np in options.np:
                for backend in options.backend:
                    path = RESULTS / f"{suite}-torch{torch}-np{np}-{backend}.json"
                    results = run_suite(suite, backend, np, names, options)
                    old = json.loads(path.read_text())["results"] if options.match and path.exists() else {}
                    about = {"suite": suite, "torch": torch, "mpi": mpi, "np": np, "backend": backend}
                    path.write_text(json.dumps({**about, "results": {**old, **results}}, indent=1))
    text, worse = table.page([json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))])
    (ROOT / "docs" / "pytorch-suites.md").write_text(text)
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
