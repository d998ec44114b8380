"""The findings of the doctor: a name, a verdict, what was found and what to do; and the report that prints them."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from hpcdist.runtime.cli import plural

__all__ = ["Facts", "Finding", "lines", "report", "status"]

Facts = dict[str, Any]  # of one rank; examine.py lists its keys
_ORDER = ("broken", "warning", "ok")
_WIDTH = 120  # characters of a line of names


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        name: topic of the finding.
        verdict: "ok"; "warning": it works, but slowly, or not for everything; "broken": something fails or hangs.
        text: description of what was found.
        fix: advice; every finding that is not ok has one.
        section: part of the report to which the topic belongs; none for the end of an examination.
    """

    name: str
    verdict: Literal["ok", "warning", "broken"]
    text: str
    fix: str | None = None
    section: str = ""


def status(findings: Iterable[Finding]) -> int:
    """Return the exit status: 1 if something is broken, else 0."""
    return int(any(finding.verdict == "broken" for finding in findings))


def report(findings: Sequence[Finding], facts: Sequence[Facts], as_json: bool, verbose: bool = False) -> str:
    """Return the findings as text, what is broken first, or as JSON with the facts.

    What is ok fills one line a section, unless `verbose`.
    """
    count = {verdict: sum(f.verdict == verdict for f in findings) for verdict in _ORDER}
    if as_json:
        found = {"findings": [asdict(f) for f in findings], "count": count, "ranks": list(facts)}
        return json.dumps(found, indent=1, default=str)
    shown = sorted((f for f in findings if verbose or f.verdict != "ok"), key=lambda f: _ORDER.index(f.verdict))
    folded = {} if verbose else _folded([f for f in findings if f.verdict == "ok"])
    width = max(len(name) for name in (*(f.name for f in shown), *folded))
    text = lines(shown, width)
    for section, names in folded.items():
        start = f"ok      {section.ljust(width)}  "
        text += textwrap.wrap(names, _WIDTH, initial_indent=start, subsequent_indent=" " * len(start))
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


def _folded(findings: Sequence[Finding]) -> dict[str, str]:
    """Return the names of the findings of each section."""
    names: dict[str, list[str]] = {}
    for finding in findings:
        names.setdefault(finding.section, []).append(finding.name)
    return {section: ", ".join(names) for section, names in names.items()}
