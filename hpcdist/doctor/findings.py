"""What the doctor finds: a verdict, what it is about, and what to do; and how that is printed."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal, TypeVar

__all__ = ["Facts", "Finding", "by_node", "by_value", "each", "ranks_text", "report", "status"]

Facts = dict[str, Any]  # of one rank; see examine.py for what is in it
H = TypeVar("H", bound=Hashable)


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        name: what was looked at.
        verdict: "ok"; "warning": it works, but slowly, or not for everything; "broken": something fails or hangs.
        text: what was found.
        fix: what to do; of each finding that is not ok.
    """

    name: str
    verdict: Literal["ok", "warning", "broken"]
    text: str
    fix: str | None = None


def ranks_text(ranks: Iterable[int]) -> str:
    """Ranks as people write them.

    Example::

        >>> ranks_text([0, 1, 2, 5])
        'ranks 0-2, 5'
    """
    given = sorted(set(ranks))
    starts = [given[0], *(b for a, b in pairwise(given) if b > a + 1)]
    ends = [*(a for a, b in pairwise(given) if b > a + 1), given[-1]]
    runs = [f"{a}" if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    return f"rank{'s' * (len(given) > 1)} {', '.join(runs)}"


def by_value(ranks: Sequence[Facts], value: Callable[[Facts], H]) -> dict[H, list[int]]:
    """value -> the ranks that have it, in the order of their lowest ranks."""
    found: dict[H, list[int]] = {}
    for facts in ranks:
        found.setdefault(value(facts), []).append(facts["rank"])
    return found


def by_node(ranks: Sequence[Facts]) -> dict[int, list[Facts]]:
    """The lowest rank of each node -> the facts of its ranks."""
    found: dict[int, list[Facts]] = {}
    for facts in ranks:
        found.setdefault(facts["node"], []).append(facts)
    return found


def each(ranks: Sequence[Facts], text: Callable[[Facts], str]) -> str:
    """What holds on every rank, said once if it is the same, else with the ranks it is true of."""
    found = by_value(ranks, text)
    if len(found) == 1:
        return next(iter(found))
    return "; ".join(f"{what} ({ranks_text(where)})" for what, where in found.items())


def status(findings: Iterable[Finding]) -> int:
    """The exit status: 1 if something is broken, else 0."""
    return int(any(finding.verdict == "broken" for finding in findings))


def report(findings: Sequence[Finding], facts: Sequence[Facts], as_json: bool) -> str:
    """The findings as text, a line for each, and one that counts; or as JSON, with the facts."""
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
    return "\n".join([*lines, f"{count['broken']} broken, {count['warning']} to be warned of, {count['ok']} ok"])
