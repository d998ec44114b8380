"""Judge the facts of all ranks, topic by topic."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Literal

from hpcdist.doctor.findings import Facts, Finding
from hpcdist.runtime.cli import ranks_text

__all__ = ["Ranks", "Verdict", "agree", "by_node", "each", "error_of", "grouped", "judging", "some", "topic"]

Ranks = Sequence[Facts]
Verdict = tuple[Literal["ok"], str] | tuple[Literal["ok", "warning", "broken"], str, str] | None  # text, fix
Topic = Callable[[Ranks], Finding | None]


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


def grouped(ranks: Ranks, value: Callable[[Facts], Hashable]) -> list[list[Facts]]:
    """Return the ranks in groups of equal value, in the order of their lowest ranks."""
    found: dict[Hashable, list[Facts]] = {}
    for facts in ranks:
        found.setdefault(value(facts), []).append(facts)
    return list(found.values())


def by_node(ranks: Ranks) -> list[list[Facts]]:
    """Return the ranks of each node."""
    return grouped(ranks, lambda facts: facts["node"])


def each(ranks: Ranks, text: Callable[[Facts], str]) -> str:
    """Return the text of the ranks: once if it is the same on all, else each text with its ranks."""
    if agree(ranks, text):
        return text(ranks[0])
    groups = grouped(ranks, text)
    return "; ".join(f"{text(group[0])} ({ranks_text(facts['rank'] for facts in group)})" for group in groups)


def some(texts: Sequence[str], count: int, what: str) -> str:
    """Return the first `count` texts, and how many more there are."""
    return "; ".join(texts[:count]) + (f"; and {len(texts) - count} more {what}" if len(texts) > count else "")


def agree(ranks: Ranks, value: Callable[[Facts], Hashable]) -> bool:
    """Whether all ranks have the same value."""
    return len(set(map(value, ranks))) == 1


def error_of(ranks: Ranks, key: str) -> tuple[str, list[int]] | None:
    """Return the first error among the facts named `key`, and the ranks that have it; None if it has none."""
    errors = {facts["rank"]: str(facts[key]["error"]) for facts in ranks if "error" in facts.get(key, {})}
    first = next(iter(errors.values()), None)
    return None if first is None else (first, [rank for rank, error in errors.items() if error == first])
