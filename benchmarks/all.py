"""Run every benchmark under one MPI, then the report and the plots.

python benchmarks/all.py --np 2,4 --verbs concat,staging
Run it in the environment whose mpi4py and mpirun you want to measure.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from results import FOLDER
from tqdm import tqdm

HERE = Path(__file__).parent
_QUICK = "--rounds 10 --budget 4 --seconds"


class Run(NamedTuple):
    """How a benchmark is run by default.

    Attributes:
        ranks: numbers of ranks.
        quick: options with --quick; all together take ten minutes. A way that needs more than its share is skipped.
        deadline: in seconds.
    """

    ranks: tuple[int, ...] = (2, 4)
    quick: str = f"{_QUICK} 25"
    deadline: float = 300


RUNS = {
    "concat": Run(),
    "gather": Run(),
    "split": Run(),
    "redistribute": Run(deadline=600),
    "structures": Run(quick=f"{_QUICK} 12", deadline=600),
    "exchanges": Run(quick=f"{_QUICK} 25"),
    "overlap": Run(quick=f"{_QUICK} 12"),
    "backend": Run(quick=f"{_QUICK} 60"),
    "staging": Run((1, 2, 4), "--rounds 5 --layouts even,dim1 --seconds 40", 2400),
    "checkpoints": Run(quick="--rounds 5 --sizes 32M --seconds 40", deadline=900),
    "data": Run((2,), "--rounds 5 --size 256M --seconds 40", 1200),
    "ranks": Run((1, 2, 4, 8), f"{_QUICK} 12"),
    "resident": Run((2,), "--size 1G"),
}
SHARDS = ("concat", "gather", "split", "ranks")  # of shards.py
# Open MPI 4 and 5 bind ranks to cores by default, MPICH does not, and gloo's threads need more than the rank's core.
UNBOUND = {"OMPI_MCA_hwloc_base_binding_policy": "none", "PRTE_MCA_hwloc_default_binding_policy": "none"}
# Open MPI 4 and 5 refuse more ranks than cores by default; if allowed, ranks should yield while they wait.
CROWDED = {
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


def environment(world_size: int) -> dict[str, str]:
    """Return the environment for mpirun: this one, plus settings that make launchers comparable, unless already set."""
    crowded = CROWDED if world_size > (os.cpu_count() or 1) else {}
    return {**UNBOUND, **crowded, **os.environ}


def launch(command: list[str], environ: dict[str, str], deadline: float) -> str | None:
    """Run a command, and terminate it and its children after `deadline` seconds; return the problem, if any."""
    process = subprocess.Popen(command, env=environ, start_new_session=True)
    try:
        status = process.wait(deadline)
        return f"exit status {status}" if status else None
    except subprocess.TimeoutExpired:
        return f"not done in {deadline:g} s"
    finally:
        if process.poll() is None:
            process.terminate()  # mpirun forwards it to its ranks
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _mpirun() -> str:
    """Return the launcher next to this Python (wheels contain one), else the one in PATH."""
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else shutil.which("mpirun") or "mpirun"


def _arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, epilog="Other options go to the benchmarks: --rounds 10")
    parser.add_argument("--mpirun", type=shlex.split, default=[_mpirun()], help="with its own options, in quotes")
    parser.add_argument(
        "--np",
        type=lambda text: [int(n) for n in text.split(",")],
        metavar="LIST",
        help="numbers of ranks (mostly 2,4)",
    )
    parser.add_argument("--verbs", type=lambda text: text.split(","), default=list(RUNS), metavar=",".join(RUNS))
    parser.add_argument("--quick", action="store_true", help="fewer rounds and cases: about 10 minutes for everything")
    parser.add_argument("--deadline", type=float, help="seconds per run (300 to 2400)")
    return parser.parse_known_args()


def main() -> int:
    asked, others = _arguments()
    failed = []
    start = time.monotonic()
    runs = sorted((world_size, verb) for verb in asked.verbs for world_size in asked.np or RUNS[verb].ranks)
    with tqdm(runs, unit="run", disable=None) as bar:
        for world_size, verb in bar:
            script = ["shards.py", verb] if verb in SHARDS else [f"{verb}.py"]
            command = [*asked.mpirun, "-n", str(world_size), sys.executable, str(HERE / script[0]), *script[1:]]
            command += ["--json", str(FOLDER), *(RUNS[verb].quick.split() if asked.quick else ())]
            command += others if verb != "resident" else ()
            bar.set_postfix_str(f"{verb}, np {world_size}")
            deadline = asked.deadline or RUNS[verb].deadline
            problem = launch(command, environment(world_size), deadline)
            if problem:
                failed.append(f"{verb}, np {world_size}: {problem}")
    print(f"{len(runs)} runs in {time.monotonic() - start:.0f} s")
    for script in ("plot.py", "report.py"):
        problem = launch([sys.executable, str(HERE / script)], dict(os.environ), 300)
        if problem:
            failed.append(f"{script}: {problem}")
    print(*failed, sep="\n", file=sys.stderr, end="\n" if failed else "")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
