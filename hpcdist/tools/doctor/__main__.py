"""``mpirun -n N python -m hpcdist doctor``: examine a job as it is launched, and report problems with their fixes.

The examination runs in a child process, so that a hang or a crash is a finding, and not the end of the doctor. The
child is forked before MPI starts and takes this process's place in the job, as a program that a shell script starts
under mpirun does. A thread could not watch it: an MPI library that hangs may hold Python's lock.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import chain, groupby
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import NoReturn, TextIO

import psutil

from hpcdist.process import abort
from hpcdist.process.streams import escape, printing
from hpcdist.runtime.commandline import Parser, plural
from hpcdist.runtime.world import environ, is_first
from hpcdist.tools.doctor.checks import ORDER, Facts, Finding, fix_of, judge
from hpcdist.tools.doctor.examine import Steps, examine, launch
from hpcdist.watch.deadlines import deadline

_LIMIT = 60.0  # seconds
_FIRST_SECONDS = 3  # a rank that fails waits so long for rank 0 to report first: it may have failed in the same way
_LAST_SECONDS = 2  # rank 0 must end first: MPICH's mpirun ends the others with its status
_FORWARD_SECONDS = 1.0  # for a launcher on a busy machine to read 64 KiB of output
_PDEATHSIG = 1  # linux/prctl.h: set the signal that a process gets when its parent ends
_KILL_SECONDS = 2  # a process that waits for a dead file system cannot be killed
_REASONS = ("hpcdist.init()", "ulimit -n", "TMPDIR", "/dev/shm")  # why the examination may end
_ABOUT = """
Examine the job or process in which this command runs: launcher, MPI, cores, GPUs, network, shared memory, HDF5, the
folder of route hdf5, and each route. A finding is ok, a warning (slow or limited) or broken (it fails or hangs).
Warnings and broken findings name a fix. docs/reference/doctor.md explains each finding. The exit status is 1 if
something is broken, else 0.
"""


class _TerminatedError(Exception):
    """The launcher ends this process."""


def _end(*_: object) -> NoReturn:
    raise _TerminatedError


@dataclass
class Outcome:
    """The reports of an examination: the facts of each rank, or of this one alone; its last step; whether it is done.

    If it failed, `end` says how, and `terminated` whether the launcher ended this process.
    """

    facts: list[Facts]
    step: str = "the start"
    done: bool = False
    end: str = ""
    terminated: bool = False


def watch(examine: Callable[[list[Facts]], Steps[None]], facts: Facts, limit: float) -> Outcome:
    """Run `examine` in a child process, which has `limit` seconds for each step, and is killed if it hangs."""
    there, here = Pipe(duplex=False)
    abort.flush()  # or both processes print what is in their buffers
    child = os.fork()
    if child == 0:
        there.close()
        _child(examine, facts, here)
    here.close()
    outcome = Outcome([facts])
    signal.signal(signal.SIGTERM, _end)
    try:
        if not _listen(there, outcome, limit):
            outcome.end = f"has not ended in time (--limit {limit:g})"
            os.kill(child, signal.SIGKILL)
        ended = _ended(child)
        if not outcome.end and not outcome.done:
            how = f"killed its process by {signal.Signals(-ended).name}" if ended < 0 else f"ended with status {ended}"
            outcome.end = f"{how}; see its output"
    except _TerminatedError:
        os.kill(child, signal.SIGKILL)
        outcome.terminated = True
        outcome.end = "the launcher has ended the job meanwhile; see the output of the other ranks"
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return outcome


def _listen(there: Connection, outcome: Outcome, limit: float) -> bool:
    """Process the messages of the child until it ends; return False if it hangs."""
    late = time.monotonic() + limit
    with suppress(EOFError, OSError):
        while there.poll(max(0.0, late - time.monotonic())):
            step, outcome.facts = there.recv()
            outcome.done = step is None
            if step is not None:
                outcome.step, limits = step
                late = time.monotonic() + limit * limits
        return False
    return True


def _ended(child: int) -> int:
    """Return the exit status of a process that is ending, or minus the signal that killed it."""
    try:
        return int(psutil.Process(child).wait(_KILL_SECONDS))
    except psutil.TimeoutExpired:
        return -signal.SIGKILL


def _child(examine: Callable[[list[Facts]], Steps[None]], facts: Facts, pipe: Connection) -> NoReturn:
    """Examine, and tell the parent each step as it begins, with the facts so far; None at the end."""
    status, ranks = 1, [facts]
    leave = os._exit  # which hpcdist.init() replaces
    abort.only_this_process = True  # MPI_Abort would end the supervisors before they can print
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)  # the launcher may end only the process that it started
    try:
        for step in chain(examine(ranks), [None]):
            pipe.send((step, ranks))
        status = 0
    except KeyboardInterrupt:  # of the doctor, too, which ends without a report
        pass
    except BaseException:  # it must not go on as the program that was forked
        traceback.print_exc()
    finally:
        abort.flush()
        if status == 0:
            pipe.close()
            # MPICH 5 tells its launcher in an exit handler of C's that MPI has ended; without it, mpirun kills the
            # other supervisors at the first one's end. Python's own handlers belong to the parent.
            ctypes.CDLL(None).exit(0)
        leave(status)


def _seconds(text: str) -> float:
    try:
        return deadline(float(text), None)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected seconds, more than 0, got {text!r}") from None


def main() -> int:
    """Examine this rank; print the report on rank 0, and on another rank why its examination ended early."""
    args = parser().parse_args()
    mine, first = launch(environ()), is_first()
    outcome = watch(lambda ranks: examine(ranks, first, args.limit), mine, args.limit)
    if first:
        findings = [*judge(outcome.facts), *judge_end(outcome)]
        _print(report(findings, outcome.facts, args.json, args.verbose), sys.stdout)
        return int(any(finding.verdict == "broken" for finding in findings))
    if outcome.terminated or not outcome.end:
        time.sleep(_LAST_SECONDS)
        return int(outcome.terminated)
    time.sleep(min(_FIRST_SECONDS, args.limit / 2))  # before rank 0, which waits for this one, runs out of time
    _print("\n".join(lines(judge_end(outcome))), sys.stderr)
    return 1


def judge_end(outcome: Outcome) -> list[Finding]:
    """Return the finding about the end of an examination that has failed, with the findings that may be its reason."""
    if not outcome.end:
        return []
    rank = outcome.facts[0]
    found = [finding for finding in judge(outcome.facts) if finding.verdict != "ok" and finding.name in _REASONS]
    texts = [f"rank {rank['rank']} on {rank['host']}: {outcome.end}", *(f"{f.name}: {f.text}" for f in found)]
    fix = "; ".join(finding.fix or "" for finding in found) or fix_of(outcome.step)
    return [Finding(outcome.step, "broken", "; ".join(texts), fix)]


def report(findings: Sequence[Finding], ranks: Sequence[Facts], as_json: bool, verbose: bool = False) -> str:
    """Return the findings as text, the broken ones first, or as JSON with the facts.

    The ok findings take one line per section, unless `verbose`.
    """
    of = {verdict: [finding for finding in findings if finding.verdict == verdict] for verdict in ORDER}
    count = {verdict: len(found) for verdict, found in of.items()}
    if as_json:
        found = {"findings": [asdict(finding) for finding in findings], "count": count, "ranks": list(ranks)}
        return json.dumps(found, indent=1, default=str)
    total = f"{count['broken']} broken, {plural(count['warning'], 'warning')}, {count['ok']} ok"
    if not verbose and of["ok"]:
        total += " (--verbose shows details)"
        sections = groupby(of["ok"], lambda finding: finding.section)
        of["ok"] = [Finding(section, "ok", ", ".join(finding.name for finding in found)) for section, found in sections]
    shown = list(chain.from_iterable(of.values()))
    return "\n".join([*lines(shown, max(len(finding.name) for finding in shown)), total])


def lines(findings: Sequence[Finding], width: int = 0) -> list[str]:
    """Return a line for each finding, with names of so many characters, and one for its fix."""
    text = []
    for finding in findings:
        text.append(f"{finding.verdict:7} {finding.name.ljust(width)}  {finding.text}")
        if finding.fix:
            text.append(f"        {'fix:'.rjust(width)}  {finding.fix}")
    return text


def _print(text: str, stream: TextIO) -> None:
    """Print it, and give the launcher time to read it. Output printed just before a job fails may be lost."""
    print(text, file=stream, flush=True)
    time.sleep(_FORWARD_SECONDS)


def parser() -> Parser:
    """Return the parser of python -m hpcdist.tools.doctor. It does not ask MPI, which may be what is broken."""
    p = Parser("hpcdist doctor", description=_ABOUT, prints=is_first)
    p.add_argument("--json", action="store_true", help="print the findings as JSON, with the facts of every rank")
    p.add_argument("--verbose", action="store_true", help="print ok findings in full, too")
    p.add_argument(
        "--limit", type=_seconds, default=_LIMIT, metavar="SECONDS",
        help="time after which a step counts as hanging (default %(default)g)",
    )  # fmt: skip
    return p


if __name__ == "__main__":
    escape()  # names of folders and hosts
    with printing("hpcdist doctor"):
        sys.exit(main())
