"""``mpirun -n N python -m hpcdist.doctor``: examine a job as it is launched, and say what is wrong and what to do."""

from __future__ import annotations

import argparse
import sys
import time
from typing import IO, NoReturn

from hpcdist.doctor import launch
from hpcdist.doctor.examine import examine, judge, started
from hpcdist.doctor.findings import report, status
from hpcdist.doctor.supervisor import watch
from hpcdist.process.streams import printing
from hpcdist.runtime.cli import path
from hpcdist.runtime.world import environ
from hpcdist.watch.deadlines import deadline

_LIMIT = 60.0
_FIRST_SECONDS = 3  # for which a rank that fails leaves the word to rank 0, which may have failed alike
_LAST_SECONDS = 1  # mpirun of MPICH ends the others with status 0 once one has ended: let that be rank 0
_FORWARD_SECONDS = 0.2  # launchers forget what was printed just before the end of a job
_ABOUT = """
Examine the job, or the process, that this command runs in: launcher, MPI, cores, GPUs, network, shared memory, HDF5,
staging folder, and each route. Every line of the report is ok, warning (it works, but slowly or not for everything) or
broken (something fails or hangs), the latter two with a fix. The exit status is 1 if something is broken, else 0.
"""


class _Parser(argparse.ArgumentParser):
    """Prints on one rank, without asking MPI, which may be what is broken; bad input in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (--help tells more)\n")

    def _print_message(self, message: str, file: IO[str] | None = None) -> None:  # type: ignore[override]
        if launch.is_first(environ()):
            super()._print_message(message, file)


def _seconds(text: str) -> float:
    try:
        return deadline(float(text), None)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected seconds, more than 0, got {text!r}") from None


def main() -> int:
    """Examine this rank, and print on rank 0, or what has ended the examination of another; returns the exit status."""
    args = parser().parse_args()
    facts = launch.gather(environ())
    first = launch.is_first(environ())
    outcome = watch(lambda line: examine(line, facts, args.staging, first, args.limit), facts, args.limit)
    if first:
        findings = [*judge(outcome.facts), *outcome.findings]
        print(report(findings, outcome.facts, args.json), flush=True)
        time.sleep(_FORWARD_SECONDS)
        return status(findings)
    if outcome.done or outcome.terminated:
        time.sleep(_LAST_SECONDS)
        return int(outcome.terminated)
    time.sleep(min(_FIRST_SECONDS, args.limit / 2))  # before rank 0, which waits for this one, runs out of time
    print(report([*started(outcome.facts), *outcome.findings], outcome.facts, False), file=sys.stderr, flush=True)
    time.sleep(_FORWARD_SECONDS)
    return 1


def parser() -> argparse.ArgumentParser:
    """The command line of python -m hpcdist.doctor."""
    p = _Parser("hpcdist.doctor", description=_ABOUT)
    p.add_argument("--json", action="store_true", help="the findings as JSON, with the facts of every rank")
    p.add_argument("--staging", type=path, metavar="FOLDER", help="the staging folder to try, not the usual one")
    p.add_argument(
        "--limit", type=_seconds, default=_LIMIT, metavar="SECONDS",
        help="after which a step of the examination hangs (%(default)g)",
    )  # fmt: skip
    return p


if __name__ == "__main__":
    with printing("hpcdist.doctor"):
        sys.exit(main())
