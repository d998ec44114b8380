"""Judge the facts of all ranks, topic by topic."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import pairwise
from typing import Literal, TypeVar

from hpcdist.doctor.findings import Facts, Finding

__all__ = ["Ranks", "Verdict", "agree", "by_node", "each", "error_of", "judging", "ranks_text", "some", "topic"]

Ranks = Sequence[Facts]
Verdict = tuple[Literal["ok"], str] | tuple[Literal["ok", "warning", "broken"], str, str] | None  # text, fix
Topic = Callable[[Ranks], Finding | None]
H = TypeVar("H", bound=Hashable)


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


def some(texts: Sequence[str], count: int, what: str) -> str:
    """Return the first `count` texts, and how many more there are."""
    return "; ".join(texts[:count]) + (f"; and {len(texts) - count} more {what}" if len(texts) > count else "")


def agree(ranks: Ranks, value: Callable[[Facts], Hashable]) -> bool:
    """Whether all ranks have the same value."""
    return len(_by_value(ranks, value)) == 1


def error_of(ranks: Ranks, key: str) -> tuple[str, list[int]] | None:
    """Return the first error among the facts named `key`, and the ranks that have it; None if there is none."""
    failed = [facts for facts in ranks if "error" in facts.get(key, {})]
    return next(iter(_by_value(failed, lambda facts: str(facts[key]["error"])).items()), None)
