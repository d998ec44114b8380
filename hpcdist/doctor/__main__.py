"""``mpirun -n N python -m hpcdist.doctor``: examine a job as it is launched, and report problems with their fixes."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TextIO

from hpcdist.doctor import facts
from hpcdist.doctor.examine import examine
from hpcdist.doctor.supervisor import Outcome, watch
from hpcdist.doctor.table import ORDER, Facts, Finding, judge
from hpcdist.process.streams import escape, printing
from hpcdist.runtime.cli import Parser, path, plural
from hpcdist.runtime.world import environ, is_first
from hpcdist.watch.deadlines import deadline

_LIMIT = 60.0  # seconds
_FIRST_SECONDS = 3  # a rank that fails waits so long for rank 0 to report first: it may have failed in the same way
_LAST_SECONDS = 2  # rank 0 must end first: MPICH's mpirun ends the others with its status
_FORWARD_SECONDS = 0.2  # launchers lose what is printed just before the end of a job that fails
_FORWARD_RATE = 2**16  # characters a second, read by a launcher on a busy machine
_FORWARD_MOST = 1.0  # seconds: a pipe or terminal holds no more than 64 KiB, and the rest has been read when print ends
_WIDTH = 120  # characters of a line of names
_REASONS = ("hpcdist.init()", "ulimit -n", "TMPDIR", "/dev/shm")  # why the examination may end
_ABOUT = """
Examine the job, or the process, that this command runs in: launcher, MPI, cores, GPUs, network, shared memory, HDF5,
staging folder, and each route. Every finding is ok, a warning (it works, but slowly or not for everything) or broken
(something fails or hangs); warnings and what is broken come with a fix. docs/doctor.md explains each finding. The exit
status is 1 if something is broken, else 0.
"""


def _seconds(text: str) -> float:
    try:
        return deadline(float(text), None)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected seconds, more than 0, got {text!r}") from None


def main() -> int:
    """Examine this rank; print the report on rank 0, and on another rank why its examination ended early."""
    args = parser().parse_args()
    mine, first = facts.launch(environ()), is_first()
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
    """Print it, and give the launcher time to read it."""
    print(text, file=stream, flush=True)
    time.sleep(_FORWARD_SECONDS + min(len(text) / _FORWARD_RATE, _FORWARD_MOST))


def parser() -> Parser:
    """Return the parser of python -m hpcdist.doctor. It does not ask MPI, which may be what is broken."""
    p = Parser("hpcdist.doctor", description=_ABOUT, prints=is_first)
    p.add_argument("--json", action="store_true", help="print the findings as JSON, with the facts of every rank")
    p.add_argument("--verbose", action="store_true", help="print what is ok in full, too")
    p.add_argument("--staging", type=path, metavar="FOLDER", help="staging folder to try instead of the default")
    p.add_argument(
        "--limit", type=_seconds, default=_LIMIT, metavar="SECONDS",
        help="time after which a step of the examination counts as hanging (default %(default)g)",
    )  # fmt: skip
    return p


if __name__ == "__main__":
    escape()  # names of folders and hosts
    with printing("hpcdist.doctor"):
        sys.exit(main())
