"""Judge the facts of all ranks, topic by topic."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

from hpcdist.doctor.findings import Facts, Finding
from hpcdist.runtime.cli import ranks_text

__all__ = [
    *("Ranks", "Section", "Topic", "Verdict", "agree", "by_node", "each", "error_of", "grouped", "incomplete"),
    *("per_node", "some", "topic"),
]

Ranks = Sequence[Facts]
Verdict = tuple[Literal["ok"], str] | tuple[Literal["ok", "warning", "broken"], str, str] | None  # text, fix


@dataclass(frozen=True)
class Topic:
    """What a finding is about.

    Attributes:
        name: name of the finding.
        needs: facts without which there is nothing to judge.
        judge: function from the ranks that have these facts to the verdict; None if there is nothing to report.
    """

    name: str
    needs: Sequence[str]
    judge: Callable[[Ranks], Verdict]


def topic(name: str, *needs: str) -> Callable[[Callable[[Ranks], Verdict]], Topic]:
    """Make a topic of a function that judges facts: see :class:`Topic`. `needs` are such as "mpi" or "mpi.library"."""
    return lambda judge: Topic(name, needs, judge)


def _finding(name: str, section: str, verdict: Literal["ok", "warning", "broken"], text: str, fix: str = "") -> Finding:
    return Finding(name, verdict, text, fix or None, section)


class Section:
    """The topics of one part of the report; called with the facts of all ranks, it returns their findings."""

    def __init__(self, name: str, *topics: Topic) -> None:
        self.name, self.topics = name, topics

    def __call__(self, ranks: Ranks) -> list[Finding]:
        found = []
        for topic in self.topics:
            known = [facts for facts in ranks if all(_includes(facts, path.split(".")) for path in topic.needs)]
            verdict = topic.judge(known) if known else None
            if verdict is not None:
                found.append(_finding(topic.name, self.name, *verdict))
        return found


def _includes(facts: Facts, path: Sequence[str]) -> bool:
    return path[0] in facts and (len(path) == 1 or _includes(facts[path[0]], path[1:]))


def grouped(ranks: Ranks, value: Callable[[Facts], Hashable]) -> list[list[Facts]]:
    """Return the ranks in groups of equal value, in the order of their lowest ranks."""
    found: dict[Hashable, list[Facts]] = {}
    for facts in ranks:
        found.setdefault(value(facts), []).append(facts)
    return list(found.values())


def by_node(ranks: Ranks) -> list[list[Facts]]:
    """Return the ranks of each node."""
    return grouped(ranks, lambda facts: facts["node"])


def incomplete(ranks: Ranks) -> bool:
    """Whether other ranks of the world have not told their facts: how many a node has, and how many nodes there are, is
    not known then."""
    return int(ranks[0].get("mpi", {}).get("size", 1)) > len(ranks)


def per_node(ranks: Ranks) -> list[Facts]:
    """Return the facts of one rank of each node."""
    return [node[0] for node in by_node(ranks)]


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
