"""Start pytest for each MPI and number of ranks: python tests/run.py [NAME ...], of RUNS; without names, of DEFAULT."""

import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "helpers"))
from settings import ALL, ROOT, environ

LOGS = ROOT / "build" / "test-logs"
CORES = sorted(os.sched_getaffinity(0))
HALF = ",".join(map(str, CORES[: max(1, len(CORES) // 2)]))
# A run ends with this process, or after an hour.
LIMIT = ("setpriv", "--pdeathsig", "TERM", "timeout", "--foreground", "-k20", "3600")
WAIT = "tests/tools/doctor tests/process tests/runtime tests/watch"  # jobs that mostly wait for a deadline
REST = "--ignore=" + WAIT.replace(" ", " --ignore=")
VERBS = "tests/collectives tests/p2p tests/comm/test_context.py"
FILES = "tests/formats tests/test_versions.py tests/tensors/test_storage.py tests/tensors/test_tree.py" + "".join(
    f" tests/staging/test_{name}.py" for name in ("damaged", "edges", "errors", "host", "save_load", "strange")
)
# name: environment, number of ranks (0: pytest starts the jobs), arguments, file system (see staging/on.sh)
RUNS = {
    "openmpi-hosts": ("openmpi", 0, "-m cluster --ignore=tests/cluster/test_slurm.py", ""),
    "openmpi-jobs": ("openmpi", 0, REST, ""),
    "openmpi-waiting": ("openmpi", 0, WAIT, ""),
    "openmpi-slurm": ("openmpi", 0, "-m cluster tests/cluster/test_slurm.py", ""),
    "mpich-jobs": ("mpich", 0, REST, ""),
    "libraries-jobs": ("libraries", 0, "tests/clients", ""),
    "libraries-hosts": ("libraries", 0, "-m cluster tests/cluster/test_clients_hosts.py", ""),
    "floor-jobs": ("floor", 0, FILES, ""),
    "mpich-np2": ("mpich", 2, "", ""),
    "openmpi-np3": ("openmpi", 3, "", ""),
    "openmpi-np5": ("openmpi", 5, f"{VERBS} tests/data tests/staging/test_meshes.py", ""),
    **{f"openmpi-np2-{on}": ("openmpi", 2, "tests/staging", on) for on in ("xfs", "btrfs")},
    "openmpi-np2-clients": ("openmpi", 2, "tests/staging/test_clients.py", "clients"),
    "openmpi-np2-tmpfs": ("openmpi", 2, "tests/staging/full.py", "tmpfs"),
    "mpich-np1": ("mpich", 1, "", ""),
    "floor-np2": ("floor", 2, "", ""),
    "torch214-jobs": ("torch214", 0, FILES, ""),
    "torch214-np2": ("torch214", 2, "", ""),
}
DEFAULT = list(RUNS)
RUNS["quick"] = ("mpich", 2, f"{VERBS} tests/layout tests/validation", "")
for of in ("newest", "openmpi5", "impi", "torch215"):  # make test-versions
    RUNS |= {f"{of}-np2": (of, 2, "", ""), f"{of}-jobs": (of, 0, FILES, "")}


def execute(name):
    """Run pytest with its output in a log, and print its end; returns the numbers of tests that passed and failed."""
    environment, np, arguments, on = RUNS[name]
    bin_, log, begin = ROOT / ".venv" / environment / "bin", LOGS / f"{name}.log", time.monotonic()
    marks = "mpi" + " and not large" * (not ALL) if np else "not mpi" + " and both" * (name == "mpich-jobs")
    with log.open("wb") as out:
        made = subprocess.run([ROOT / ".ci" / "environment", environment, "test"], stdout=out, stderr=out).returncode
        words = [*LIMIT, *(["bash", "tests/staging/on.sh", on] if on else [])]
        if np:  # ranks that wait leave a core to the jobs
            own = bin_ / "mpirun"
            mpirun = own if own.exists() else shutil.which("mpirun") or "mpirun"
            words += ["chrt", "--batch", "0", "taskset", "-c", HALF, mpirun, "-n", str(np), *["--"] * bool(on)]
        words += [bin_ / "python", "-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider", "-m", marks]
        words += [*["--with-mpi"] * bool(np), *arguments.split()]
        path = {"PATH": f"{bin_}:{os.environ['PATH']}"} if environment == "impi" else {}  # its mpirun looks there alone
        how = {"cwd": ROOT, "env": environ() | path, "stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
        status = made or subprocess.run(words, **how).returncode
    text = log.read_text(errors="replace")
    ends = re.findall(r"^=* ?(\d+ (?:passed|failed|error|skipped).*) in \d", text, re.MULTILINE)[-1:]
    count = {what: int(number) for number, what in re.findall(r"(\d+) (passed|failed|error|skipped)", "".join(ends))}
    passed = count.pop("passed", 0)
    failed = sum(count.values()) or int(status != 0 or not passed)  # nothing is skipped
    print(f"{name:20} {passed:5} passed {failed:4} failed {time.monotonic() - begin:6.0f} s", flush=True)
    if failed:
        print(f"--- {log}, exit status {status}:", *text.splitlines()[-80:], "---", sep="\n", flush=True)
    return passed, failed


def of_root(name):
    """Whether a run makes hosts, or mounts file systems."""
    _, _, arguments, on = RUNS[name]
    return "-m cluster" in arguments or on != ""


if __name__ == "__main__":
    names = sys.argv[1:] or DEFAULT
    if not RUNS.keys() >= {*names}:
        sys.exit(f"usage: python tests/run.py [NAME ...]; the names: {' '.join(RUNS)}")
    left_out = [f"{name}: needs root" for name in names if os.getuid() and of_root(name)]
    names = [name for name in names if not os.getuid() or not of_root(name)]
    shutil.rmtree(LOGS, ignore_errors=True)
    LOGS.mkdir(parents=True)
    for needed in dict.fromkeys(RUNS[name][0] for name in names):  # those that come later are made meanwhile
        subprocess.Popen([ROOT / ".ci" / "environment", needed, "test"], stdout=subprocess.DEVNULL)
    lanes = ThreadPoolExecutor(2), ThreadPoolExecutor(1)  # of jobs, many of which wait; of ranks
    ended = [lanes[RUNS[name][1] > 0].submit(execute, name) for name in names]
    passed, failed = (sum(numbers) for numbers in zip((0, 0), *(one.result() for one in ended), strict=True))
    left_out += [path.read_text() for path in ROOT.glob(".venv/*/left-out")]
    print(*(f"left out: {what}" for what in left_out), f"{passed} passed, {failed} failed", sep="\n")
    sys.exit(bool(failed or not passed or ("CI" in os.environ and left_out)))
