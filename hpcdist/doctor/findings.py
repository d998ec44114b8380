"""The findings of the doctor: a name, a verdict, what was found and what to do; and the report that prints them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from hpcdist.runtime.cli import plural

__all__ = ["Facts", "Finding", "report", "status"]

Facts = dict[str, Any]  # of one rank; examine.py lists its keys


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        name: topic of the finding.
        verdict: "ok"; "warning": it works, but slowly, or not for everything; "broken": something fails or hangs.
        text: description of what was found.
        fix: advice; every finding that is not ok has one.
    """

    name: str
    verdict: Literal["ok", "warning", "broken"]
    text: str
    fix: str | None = None


def status(findings: Iterable[Finding]) -> int:
    """Return the exit status: 1 if something is broken, else 0."""
    return int(any(finding.verdict == "broken" for finding in findings))


def report(findings: Sequence[Finding], facts: Sequence[Facts], as_json: bool) -> str:
    """Return the findings as text, one line each and their counts, or as JSON with the facts."""
    count = {verdict: sum(f.verdict == verdict for f in findings) for verdict in ("ok", "warning", "broken")}
    if as_json:
        found = {"findings": [asdict(f) for f in findings], "count": count, "ranks": list(facts)}
        return json.dumps(found, indent=1, default=str)
    width = max(len(f.name) for f in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.verdict:7} {finding.name.ljust(width)}  {finding.text}")
        if finding.fix:
            lines.append(f"        {'fix:'.rjust(width)}  {finding.fix}")
    return "\n".join([*lines, f"{count['broken']} broken, {plural(count['warning'], 'warning')}, {count['ok']} ok"])
