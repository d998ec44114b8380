"""Run PyTorch's own test suites of process groups with this backend and with gloo, and write pytorch-suites.md.

Usage: python benchmarks/suites/suites.py [--tests FOLDER] [--np NP ...] [--backend NAME ...]

It runs what build/pytorch-suites has no result of yet: a JSON file for each suite, torch, number of ranks and backend.

The suites: DistributedTest, which torch's wheel has; and test_c10d_collectives.py, test_c10d_p2p.py and
test_c10d_process_group.py with c10d_backend_common.py, of 2026-07 or later, in FOLDER. These four are in the folder
test/distributed of PyTorch's repository, github.com/pytorch/pytorch, and are left out if FOLDER is not given. Nothing
of them is in this repository. They need torch 2.15, which has all functions that they call. PyTorch's tests need the
package expecttest: pip install expecttest.

Every test has a deadline. One mpirun runs tests until one hangs, ends the job or fails on some ranks alone; the next
goes on behind it. A test that failed of those that PyTorch has for gloo runs once more, alone in a fresh mpirun, and
that outcome counts.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(1, str(ROOT / "tests" / "helpers"))

import table  # noqa: E402
from ranks import C10D, DISTRIBUTED  # noqa: E402
from settings import environ  # noqa: E402

RESULTS = ROOT / "build" / "pytorch-suites"
GRACE = 30  # seconds that a process has to end a test at its deadline by itself
VERSIONS = """
import torch
from mpi4py import MPI
vendor, number = MPI.get_vendor()
print(torch.__version__, vendor + " " + ".".join(map(str, number)), sep="\\n")
"""
ALONE = 12  # tests of a suite that have a second try: where more fail, it is not for what the one before has left
START = 300  # seconds until the first test starts


def run(command, plan, deadline, ranks=1):
    """Run the tests of a plan, up to one that hangs or ends its process.

    The command gets the path of the plan, a JSON file. Each rank notes the tests that start and end in a file of the
    plan's folder: rank-N.jsonl, with its pid in the first line.

    Returns:
        Results by name, and whether all have run.
    """
    with tempfile.TemporaryDirectory(prefix="pytorch-suites-") as name:
        folder, ending = Path(name), ""
        (folder / "plan.json").write_text(json.dumps(plan | {"folder": name, "deadline": deadline}))
        with (folder / "output").open("wb") as output:
            process = subprocess.Popen(
                [*command, str(folder / "plan.json")],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment() | {"TMPDIR": name, "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(deadline)},
                start_new_session=True,
            )
            try:
                ending = _watch(process, folder, deadline)
            finally:
                notes = [_notes(folder / f"rank-{rank}.jsonl") for rank in range(ranks)]
                for kill, pid in [(os.killpg, process.pid), *((os.kill, each[0]["pid"]) for each in notes if each)]:
                    with suppress(ProcessLookupError):
                        kill(pid, signal.SIGKILL)
                process.wait()
        said = "\n".join(
            path.read_text(errors="replace")[-3000:] for path in [*folder.glob("*.stacks"), folder / "output"]
        )
    return _results(notes, ending, said), all(each and "done" in each[-1] for each in notes)


def _watch(process, folder, deadline):
    """Wait for the end; returns why it came."""
    since, seen = time.monotonic(), 0
    while process.poll() is None:
        time.sleep(0.2)
        size = sum(path.stat().st_size for path in folder.glob("rank-*.jsonl"))
        if size != seen:
            since, seen = time.monotonic(), size
        if time.monotonic() - since > (deadline + GRACE if seen else START):
            return f"no answer after {deadline} s"
    return f"the job ended with status {process.returncode}"


def _notes(path):
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _results(notes, ending, said):
    ends = [{one["end"]: one for one in each if "end" in one} for each in notes]
    begun = dict.fromkeys(one["start"] for each in notes for one in each if "start" in one)
    if not begun and not all(each and "done" in each[-1] for each in notes):
        raise SystemExit(f"no test has run: {ending}\n{said}")
    results = {}
    for name in begun:
        found = [each.get(name) for each in ends]
        outcomes = {one["outcome"] if one else "unfinished" for one in found}
        outcome = outcomes.pop() if len(outcomes) == 1 else "failed"
        outcome = "failed" if outcome == "unfinished" else outcome
        reasons = [one["reason"] for one in found if one and one["outcome"] == outcome]
        missing = [rank for rank, one in enumerate(found) if one is None]
        if missing or (name == [*begun][-1] and "no answer" in ending):
            outcome = "failed"
            reasons.append(f"{ending}; no outcome of ranks {missing} of {len(notes)}\n{said}")
        results[name] = {"outcome": outcome, "reason": "\n".join(dict.fromkeys(reasons))}
    return results


def environment():
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**environ(), "PYTHONPATH": path, "PYTORCH_PRINT_REPRO_ON_FAILURE": "0"}


def run_suite(plan, np, options):
    """Run all tests of a suite: those that PyTorch has for gloo, those that failed once more, those for MPI."""
    python, results = [options.python, str(HERE / "ranks.py")], dict[str, dict[str, str]]()
    listed = [*python, "--list", plan["suite"], options.tests]
    done = subprocess.run(listed, stdout=subprocess.PIPE, text=True, check=True, env=environment())

    def go(names, tests_of="gloo"):
        while names:
            told = plan | {"names": names, "tests_of": tests_of, "tests": options.tests}
            new, _ = run([options.mpirun, "-n", str(np), *python], told, options.deadline, np)
            for one in new.values() if tests_of == "mpi" else ():
                one["tests_of"] = "mpi" if one["outcome"] != "skipped" else "gloo, mpi"
            results.update(new)
            names = [name for name in names if name not in new]
            print(plan, f"np {np}: {len(results)} have run, {len(names)} are left", flush=True)

    go([name for name in done.stdout.split() if name.startswith("test_")])
    for name in [name for name, one in results.items() if one["outcome"] == "failed"][:ALONE]:
        go([name])
    if plan["suite"] == DISTRIBUTED:
        skipped = {name: one["reason"] for name, one in results.items() if one["outcome"] == "skipped"}
        # On 2 ranks some make a group of the ranks 1 and 2.
        go([name for name, reason in skipped.items() if np > 2 or "world size" not in reason], "mpi")
    return results


def main():
    """The exit status: 1 if a test has failed that gloo passes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", default="", help="the folder with PyTorch's test files")
    parser.add_argument("--np", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--backend", nargs="+", default=["gloo", "mpi"])
    parser.add_argument("--deadline", type=int, default=90, help="seconds for a test")
    parser.add_argument("--python", default=sys.executable)
    options = parser.parse_args()
    beside = Path(options.python).parent / "mpirun"
    options.mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    RESULTS.mkdir(parents=True, exist_ok=True)
    versions = subprocess.run([options.python, "-c", VERSIONS], stdout=subprocess.PIPE, text=True, check=True)
    torch, mpi = versions.stdout.splitlines()
    for suite in (*C10D, DISTRIBUTED) if options.tests else (DISTRIBUTED,):
        for np in options.np:
            for backend in options.backend:
                path = RESULTS / f"{suite}-torch{torch}-np{np}-{backend}.json"
                if not path.exists():
                    about = {"suite": suite, "backend": backend, "torch": torch, "mpi": mpi, "np": np}
                    about["results"] = run_suite({"suite": suite, "backend": backend}, np, options)
                    path.write_text(json.dumps(about, indent=1))
    text, worse = table.page_of_suites([json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))])
    (HERE / "pytorch-suites.md").write_text(text)
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
