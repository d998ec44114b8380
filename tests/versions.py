"""Run the tests with the oldest and newest versions, Open MPI 5 and Intel MPI; a table at the end: make test-versions.

Usage: python tests/versions.py [NAME ...]   (all of NAMES if none is given)

Each has an environment of its own in build/venv, made by .ci/environment from what pip finds: about 5 GB for an oldest
or newest torch. The tests are those of 2 ranks, but for the large ones, and those of files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from run import FILE_TESTS, LOGS, ROOT, Run, execute, report

NAMES = ("floor", "newest", "openmpi5", "impi")
VENVS = "build/venv"
PACKAGES = ("torch", "numpy", "h5py", "mpi4py", "safetensors", "xxhash", "tqdm", "psutil")
COLUMNS = ("environment", "MPI", "Python", *PACKAGES, "np 2", "files")
_VERSIONS = f"""
import json, platform
from importlib.metadata import version
from mpi4py import MPI
vendor, number = MPI.get_vendor()
mpi = " ".join([vendor, ".".join(map(str, number))])
print(json.dumps([mpi, platform.python_version(), *map(version, {PACKAGES})]))
"""


def test(name: str) -> tuple[list[str], bool]:
    """Make an environment and run the tests in it: the row of the table, and whether all has passed."""
    subprocess.run([ROOT / ".ci" / "environment", name, "test", VENVS], check=True)
    bin_ = ROOT / VENVS / name / "bin"
    path = os.environ["PATH"]
    os.environ["PATH"] = f"{bin_}:{path}"  # Intel MPI's mpirun looks there for its parts
    try:
        done = subprocess.run([bin_ / "python", "-c", _VERSIONS], stdout=subprocess.PIPE, check=True)
        runs = [
            Run(name, 2, large=False, venvs=VENVS),
            Run(name, 0, paths=tuple(f"tests/{file}" for file in FILE_TESTS), venvs=VENVS),
        ]
        outcomes = [execute(run) for run in runs]
    finally:
        os.environ["PATH"] = path
    for run, outcome in zip(runs, outcomes, strict=True):
        report(run, outcome)
    results = [f"{one.passed} passed" + f", {one.failed} failed" * bool(one.failed) for one in outcomes]
    return [name, *json.loads(done.stdout), *results], not any(one.failed for one in outcomes)


def main(names: list[str]) -> int:
    """The exit status: 1 if a test has failed or an environment cannot be made, 2 for a name that is not known."""
    if unknown := set(names) - set(NAMES):
        print(f"not known: {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}", file=sys.stderr)
        return 2
    LOGS.mkdir(parents=True, exist_ok=True)
    rows, passed = [], True
    for name in names or NAMES:
        try:
            row, good = test(name)
        except subprocess.CalledProcessError as error:
            row, good = [name, f"cannot be made: {error.cmd[0]} exited with {error.returncode}"], False
        rows.append(row)
        passed = passed and good
    for line in (COLUMNS, ["---"] * len(COLUMNS), *rows):
        print(f"| {' | '.join(line)} |")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
