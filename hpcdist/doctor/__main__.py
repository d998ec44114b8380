"""``mpirun -n N python -m hpcdist.doctor``: examine a job as it is launched, and report problems with their fixes.

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
import textwrap
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NoReturn, TextIO

from hpcdist.doctor.checks import ORDER, Facts, Finding, fix_of, judge
from hpcdist.doctor.examine import ProgressPipe, examine, launch
from hpcdist.process import abort
from hpcdist.process.streams import escape, printing
from hpcdist.runtime.cli import Parser, path, plural
from hpcdist.runtime.world import environ, is_first
from hpcdist.watch.deadlines import deadline

_LIMIT = 60.0  # seconds
_FIRST_SECONDS = 3  # a rank that fails waits so long for rank 0 to report first: it may have failed in the same way
_LAST_SECONDS = 2  # rank 0 must end first: MPICH's mpirun ends the others with its status
_FORWARD_SECONDS = 1.0  # for a launcher on a busy machine to read 64 KiB of output
_PDEATHSIG = 1  # linux/prctl.h: set the signal that a process gets when its parent ends
_KILL_SECONDS = 2  # a process that waits for a dead file system cannot be killed
_WIDTH = 120  # characters of a line of names
_REASONS = ("hpcdist.init()", "ulimit -n", "TMPDIR", "/dev/shm")  # why the examination may end
_ABOUT = """
Examine the job or process in which this command runs: launcher, MPI, cores, GPUs, network, shared memory, HDF5, staging
folder, and each route. A finding is ok, a warning (slow or limited) or broken (it fails or hangs). Warnings and broken
findings name a fix. docs/doctor.md explains each finding. The exit status is 1 if something is broken, else 0.
"""


class _TerminatedError(Exception):
    """The launcher ends this process."""


def _end(*_: object) -> NoReturn:
    raise _TerminatedError


@dataclass
class Outcome:
    """What an examination has reported: the facts of each rank, or of this one alone; its last step; that it is done.

    If it failed, `end` is the finding about that, and `terminated` says whether the launcher ended this process.
    """

    facts: list[Facts]
    done: bool = False
    terminated: bool = False
    step: str = "the start"
    end: Finding | None = None

    def take(self, ranks: Sequence[Facts]) -> None:
        """Take the newer facts of these ranks."""
        new = {facts["id"]: facts for facts in ranks}  # not by the rank, which may only be known later
        self.facts = [new.pop(facts["id"], facts) for facts in self.facts] + list(new.values())


def watch(examine: Callable[[ProgressPipe], None], facts: Facts, limit: float) -> Outcome:
    """Run `examine` in a child process, which has `limit` seconds for each step, and is killed if it hangs."""
    there, here = Pipe(duplex=False)
    abort.flush()  # or both processes print what is in their buffers
    child = os.fork()
    if child == 0:
        there.close()
        _child(examine, ProgressPipe(here))
    here.close()
    outcome = Outcome([facts])
    end = None
    signal.signal(signal.SIGTERM, _end)
    try:
        if not _listen(there, outcome, limit):
            end = f"has not ended in time (--limit {limit:g})"
            os.kill(child, signal.SIGKILL)
        ended = _ended(child)
    except _TerminatedError:
        os.kill(child, signal.SIGKILL)
        outcome.terminated = True
        end = "the launcher has ended the job meanwhile; see the output of the other ranks"
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if end is None and not outcome.done:
        how = f"killed its process by {signal.Signals(-ended).name}" if ended < 0 else f"ended with status {ended}"
        end = f"{how}; see its output"
    if end is not None:
        outcome.done = False
        text = f"rank {outcome.facts[0]['rank']} on {facts['host']}: {end}"
        outcome.end = Finding(outcome.step, "broken", text, fix_of(outcome.step))
    return outcome


def _listen(there: Connection, outcome: Outcome, limit: float) -> bool:
    """Process the messages of the child until it ends; return False if it hangs."""
    late = time.monotonic() + limit
    while there.poll(max(0.0, late - time.monotonic())):
        try:
            message: Any = there.recv()
        except (EOFError, OSError):
            return True
        if isinstance(message, tuple):
            outcome.step, limits = message
            late = time.monotonic() + limit * limits
        elif message is None:
            outcome.done = True
        else:
            outcome.take(message)
    return False


def _ended(child: int) -> int:
    """Return the exit status of a process that is ending, or minus the signal that killed it."""
    end = time.monotonic() + _KILL_SECONDS
    while time.monotonic() < end:
        pid, code = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(code)
        time.sleep(0.005)
    return -signal.SIGKILL


def _child(examine: Callable[[ProgressPipe], None], pipe: ProgressPipe) -> NoReturn:
    status = 1
    leave = os._exit  # which hpcdist.init() replaces
    # MPI_Abort would end the supervisors before they can print.
    abort.job = lambda status, *_, **__: leave(status)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with suppress(AttributeError):
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)  # the launcher may end only the process that it started
    try:
        examine(pipe)
        pipe.done()
        status = 0
    except KeyboardInterrupt:  # of the doctor, too, which ends without a report
        pass
    except BaseException:  # it must not go on as the program that was forked
        traceback.print_exc()
    finally:
        abort.flush()
        if status == 0:
            pipe.connection.close()
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
    outcome = watch(lambda pipe: examine(pipe, mine, args.staging, first, args.limit), mine, args.limit)
    if first:
        findings = [*judge(outcome.facts), *judge_end(outcome)]
        _print(report(findings, outcome.facts, args.json, args.verbose), sys.stdout)
        return int(any(finding.verdict == "broken" for finding in findings))
    if outcome.done or outcome.terminated:
        time.sleep(_LAST_SECONDS)
        return int(outcome.terminated)
    time.sleep(min(_FIRST_SECONDS, args.limit / 2))  # before rank 0, which waits for this one, runs out of time
    _print("\n".join(lines(judge_end(outcome))), sys.stderr)
    return 1


def judge_end(outcome: Outcome) -> list[Finding]:
    """Return the finding about the end of an examination that has failed, with the findings that may be its reason."""
    if outcome.end is None:
        return []
    found = [finding for finding in judge(outcome.facts) if finding.verdict != "ok" and finding.name in _REASONS]
    text = "; ".join([outcome.end.text, *(f"{finding.name}: {finding.text}" for finding in found)])
    fix = "; ".join(finding.fix or "" for finding in found)
    return [replace(outcome.end, text=text, fix=fix or outcome.end.fix)]


def report(findings: Sequence[Finding], ranks: Sequence[Facts], as_json: bool, verbose: bool = False) -> str:
    """Return the findings as text, what is broken first, or as JSON with the facts.

    What is ok fills one line a section, unless `verbose`.
    """
    count = {verdict: sum(f.verdict == verdict for f in findings) for verdict in ORDER}
    if as_json:
        found = {"findings": [asdict(f) for f in findings], "count": count, "ranks": list(ranks)}
        return json.dumps(found, indent=1, default=str)
    shown = sorted((f for f in findings if verbose or f.verdict != "ok"), key=lambda f: ORDER.index(f.verdict))
    folded: dict[str, list[str]] = {}  # names of the others, by section
    for finding in [] if verbose else findings:
        if finding.verdict == "ok":
            folded.setdefault(finding.section, []).append(finding.name)
    width = max(len(name) for name in (*(f.name for f in shown), *folded))
    text = lines(shown, width)
    for section, names in folded.items():
        start = f"ok      {section.ljust(width)}  "
        text += textwrap.wrap(", ".join(names), _WIDTH, initial_indent=start, subsequent_indent=" " * len(start))
    total = f"{count['broken']} broken, {plural(count['warning'], 'warning')}, {count['ok']} ok"
    return "\n".join([*text, total if verbose or not folded else f"{total} (--verbose shows what was found)"])


def lines(findings: Sequence[Finding], width: int = 0) -> list[str]:
    """Return a line for each finding, with names of so many characters, and one for its fix."""
    text = []
    for finding in findings:
        text.append(f"{finding.verdict:7} {finding.name.ljust(width)}  {finding.text}")
        if finding.fix:
            text.append(f"        {'fix:'.rjust(width)}  {finding.fix}")
    return text


def _print(text: str, stream: TextIO) -> None:
    """Print it, and give the launcher time to read it: what is printed just before a job fails may be lost."""
    print(text, file=stream, flush=True)
    time.sleep(_FORWARD_SECONDS)


def parser() -> Parser:
    """Return the parser of python -m hpcdist.doctor. It does not ask MPI, which may be what is broken."""
    p = Parser("hpcdist doctor", description=_ABOUT, prints=is_first)
    p.add_argument("--json", action="store_true", help="print the findings as JSON, with the facts of every rank")
    p.add_argument("--verbose", action="store_true", help="print ok findings in full, too")
    p.add_argument("--staging", type=path, metavar="FOLDER", help="staging folder to try instead of the default")
    p.add_argument(
        "--limit", type=_seconds, default=_LIMIT, metavar="SECONDS",
        help="time after which a step counts as hanging (default %(default)g)",
    )  # fmt: skip
    return p


if __name__ == "__main__":
    escape()  # names of folders and hosts
    with printing("hpcdist doctor"):
        sys.exit(main())
