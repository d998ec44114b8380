"""The findings of the doctor: a name, a verdict, what was found and what to do; and the report that prints them."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal, TypeVar

from hpcdist.runtime.cli import plural

__all__ = [
    *("Facts", "Finding", "Ranks", "Verdict", "agree", "by_node", "each", "error_of", "judging", "ranks_text"),
    *("report", "status", "topic"),
]

Facts = dict[str, Any]  # of one rank; examine.py lists its keys
Ranks = Sequence[Facts]
Verdict = tuple[Literal["ok"], str] | tuple[Literal["ok", "warning", "broken"], str, str] | None  # text, fix
Topic = Callable[[Ranks], "Finding | None"]
H = TypeVar("H", bound=Hashable)


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


def topic(name: str, *needs: str) -> Callable[[Callable[[Ranks], Verdict]], Topic]:
    """Make a topic of a function that judges facts: its verdict becomes the finding `name`.

    The function is given the ranks whose facts include `needs`, such as "mpi" or "mpi.library". It is not called if
    there are none, and returns None if there is nothing to report.
    """

    def made(judge: Callable[[Ranks], Verdict]) -> Topic:
        def found(ranks: Ranks) -> Finding | None:
            known = [facts for facts in ranks if all(_includes(facts, path.split(".")) for path in needs)]
            verdict = judge(known) if known else None
            return None if verdict is None else Finding(name, *verdict)

        return found

    return made


def _includes(facts: Facts, path: Sequence[str]) -> bool:
    return path[0] in facts and (len(path) == 1 or _includes(facts[path[0]], path[1:]))


def judging(*topics: Topic) -> Callable[[Ranks], list[Finding]]:
    """Return the function that collects the findings of several topics."""
    return lambda ranks: [finding for topic in topics if (finding := topic(ranks)) is not None]


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ranks as text.

    Example::

        >>> ranks_text([0, 1, 2, 5])
        'ranks 0-2, 5'
    """
    given = sorted(set(ranks))
    starts = [given[0], *(b for a, b in pairwise(given) if b > a + 1)]
    ends = [*(a for a, b in pairwise(given) if b > a + 1), given[-1]]
    runs = [f"{a}" if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    return f"rank{'s' * (len(given) > 1)} {', '.join(runs)}"


def _by_value(ranks: Ranks, value: Callable[[Facts], H]) -> dict[H, list[int]]:
    """Return value -> the ranks that have it, in the order of their lowest ranks."""
    found: dict[H, list[int]] = {}
    for facts in ranks:
        found.setdefault(value(facts), []).append(facts["rank"])
    return found


def by_node(ranks: Ranks) -> list[list[Facts]]:
    """Return the facts of each node's ranks, in the order of their lowest ranks."""
    found: dict[int, list[Facts]] = {}
    for facts in ranks:
        found.setdefault(facts["node"], []).append(facts)
    return list(found.values())


def each(ranks: Ranks, text: Callable[[Facts], str]) -> str:
    """Return the text of the ranks: once if it is the same on all, else each text with its ranks."""
    found = _by_value(ranks, text)
    if len(found) == 1:
        return next(iter(found))
    return "; ".join(f"{what} ({ranks_text(where)})" for what, where in found.items())


def agree(ranks: Ranks, value: Callable[[Facts], Hashable]) -> bool:
    """Whether all ranks have the same value."""
    return len(_by_value(ranks, value)) == 1


def error_of(ranks: Ranks, key: str) -> tuple[str, list[int]] | None:
    """Return the first error among the facts named `key`, and the ranks that have it; None if there is none."""
    failed = [facts for facts in ranks if "error" in facts.get(key, {})]
    return next(iter(_by_value(failed, lambda facts: str(facts[key]["error"])).items()), None)


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
