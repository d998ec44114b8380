"""The table of checks: each has a name, the facts that it needs, a verdict, a meaning and a fix.

A verdict is a pure function of facts. checks.py fills the table, and docs/doctor.md is made from it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hpcdist.runtime.cli import ranks_text

__all__ = [
    "CHECKS", "NODE", "ORDER", "RANK", "STEPS", "Check", "Facts", "Finding", "Ranks", "Verdict", "by_node",
    "describe", "fix_of", "grouped", "incomplete", "judge", "known", "names", "some",
]  # fmt: skip

ORDER = ("broken", "warning", "ok")
RANK, NODE, JOB = ("id",), ("node",), ()  # not the rank's number, which may only be known later

Facts = dict[str, Any]  # of one rank: see facts.py and examine.py
Ranks = Sequence[Facts]
Grade = Literal["ok", "warning", "broken"]  # "warning": it works, but slowly, or not for everything
Verdict = tuple[Grade, str] | tuple[Grade, str, str] | None  # the text, and a fix if it is not that of the table
Judge = Callable[[Any], Verdict]


@dataclass(frozen=True)
class Finding:
    """One line of the report; every finding that is not ok has a fix. Steps that ended belong to no section."""

    name: str
    verdict: Grade
    text: str
    fix: str | None = None
    section: str = ""


@dataclass
class Check:
    """One row of the table; it decorates the function that judges.

    Attributes:
        section, name: part of the report, and name of the finding.
        needs: facts without which there is nothing to judge, such as "mpi.library", with spaces between.
        fix: what to do about a finding that is not ok, as Markdown; the verdict may have a more precise one.
        per: the facts that are the same in what is judged by itself: RANK, NODE, JOB, or others such as
            "memory.group_id". The finding is about the worst of them.
        errors: the facts whose "error" is this finding.
        alike: verdict and fix if the texts of those that are ok differ; None if they may.
        meaning: what a finding that is not ok means, as Markdown: the docstring of `judge`.
        judge: function from the facts of a rank, or of the ranks of a node or job, to the verdict; None for no finding.
    """

    section: str
    name: str
    needs: str
    fix: str = ""
    per: Sequence[str] = JOB
    errors: str = ""
    alike: tuple[Grade, str] | None = None
    meaning: str = ""
    judge: Judge = field(init=False)

    def __call__(self, judge: Judge) -> Judge:
        """Complete the row with this function."""
        self.judge = judge
        self.meaning = self.meaning or " ".join((judge.__doc__ or "").split())
        CHECKS.append(self)
        return judge


CHECKS: list[Check] = []
# The steps of the examination that have not the name of a check: what it means if it ends there, and what to do.
STEPS = {
    "the start": ("The examination failed before its first step.", "report it as a bug of hpcdist"),
    "this rank's limits": ("`TMPDIR` or `/dev/shm` does not respond.", "`df $TMPDIR /dev/shm` on that node"),
    "MPI_Init": (
        "MPI does not start, or waits for a rank that never starts. If `ulimit -n`, `TMPDIR` or `/dev/shm` is not ok, "
        "that is the reason; else the launcher and the library do not belong together.",
        "the launcher and mpi4py's MPI library must belong together: the mpirun of the same installation; under Slurm "
        "`srun --mpi=pmix` for Open MPI, `srun --mpi=pmi2` for MPICH",
    ),
    "MPI's first messages": (
        "MPI starts, but no message arrives.",
        "look for a firewall between the nodes, or name the network to MPI",
    ),
    "this rank's software": ("A file of the environment or the current folder cannot be read.", "`df` on that node"),
    "this rank's hardware": ("A GPU or a driver does not respond.", "look at `nvidia-smi` and `dmesg` on that node"),
    "all ranks together": ("A rank is stopped or very slow.", "look at `top` on that node"),
    "links between nodes": (
        "Messages between two nodes stop.",
        "name the network to MPI; look for a firewall between the nodes",
    ),
    "hpcdist.finalize()": ("The connections of a route do not end.", "look at the findings about routes"),
    "MPI_Finalize": ("MPI does not end.", "look at the findings about MPI"),
}


def fix_of(name: str) -> str:
    """Return what to do about a check, or a step, of this name."""
    fixes = {**{row.name: row.fix for row in CHECKS}, **{step: fix for step, (_, fix) in STEPS.items()}}
    return fixes[name].replace("`", "")


def judge(ranks: Ranks) -> list[Finding]:
    """Return the findings about the facts of all ranks."""
    found = [_judge(row, ranks) for row in CHECKS]
    return [finding for finding in found if finding is not None]


def _judge(row: Check, ranks: Ranks) -> Finding | None:
    found: list[tuple[Ranks, Verdict]] = []
    for facts in ranks:
        if row.errors and (error := known(facts, f"{row.errors}.error")):
            found.append(([facts], ("broken", " ".join(error.split()))))
    whole = not found and row.per is JOB
    if not found:
        having = [facts for facts in ranks if all(known(facts, need) is not None for need in row.needs.split())]
        units = grouped(having, lambda facts: tuple(known(facts, path) for path in row.per))
        found = [(unit, row.judge(unit[0] if row.per is RANK else unit)) for unit in units]
    grade = min((verdict[0] for _, verdict in found if verdict), key=ORDER.index, default=None)
    worst = [(unit, verdict) for unit, verdict in found if verdict and verdict[0] == grade]
    if grade is None:
        return None
    texts: dict[str, list[Facts]] = {}
    for unit, verdict in worst:
        texts.setdefault(verdict[1], []).extend(unit)
    first = worst[0][1]
    fix = first[2] if len(first) == 3 else None if grade == "ok" else fix_of(row.name)
    if grade == "ok" and row.alike and len(texts) > 1:
        grade, fix = row.alike
    if whole or (list(map(len, texts.values())) == [len(ranks)] and not incomplete(ranks)):
        return Finding(row.name, grade, first[1], fix, row.section)
    text = some([f"{text} ({names(unit)})" for text, unit in texts.items()], 4, "texts")
    return Finding(row.name, grade, text, fix, row.section)


def known(facts: Facts, path: str) -> Any:
    """Return a fact by its path, such as "mpi.library"; None if the rank does not have it."""
    found: Any = facts
    for name in path.split("."):
        found = found.get(name) if found else None
    return found


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
    """Whether the facts of other ranks are missing: then neither the nodes nor their ranks can be counted."""
    return (known(ranks[0], "mpi.size") or 1) > len(ranks)


def names(ranks: Ranks) -> str:
    """Return the ranks as text, such as "ranks 0-2"; with their host, if it is one: "ranks 0-2 on a"."""
    hosts = {facts["host"] for facts in ranks}
    return ranks_text(facts["rank"] for facts in ranks) + (f" on {hosts.pop()}" if len(hosts) == 1 else "")


def describe(mount: Facts) -> str:
    """Return a mount as text, such as "lustre at /scratch"."""
    return f"{mount['type']} at {mount['point']}"


def some(texts: Sequence[str], count: int, what: str) -> str:
    """Return the first `count` texts, and how many more there are."""
    return "; ".join(texts[:count]) + (f"; and {len(texts) - count} more {what}" if len(texts) > count else "")
