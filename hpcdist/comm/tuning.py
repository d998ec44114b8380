"""Choose the algorithm of a call by rules: those of the file HPCDIST_TUNE, else the defaults.

The ranks agree on the bytes of all messages anyway. So a choice by their total and skew costs no message, where an MPI
library would need one: https://github.com/open-mpi/ompi/issues/12376.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import torch

from hpcdist.errors import refusal

FORMAT = "hpcdist tune 1"
# The algorithms of each operation, as a plan describes them
ALGORITHMS: dict[str, dict[str, str]] = {
    "allgatherv": {
        "mpi": "MPI_Allgatherv",
        "sends": "MPI sends and receives",
        "ring": "a ring of MPI messages in pieces",
        "window": "memory that the ranks of a node share",
    },
    "gatherv": {"mpi": "MPI_Gatherv", "sends": "MPI sends and receives"},
    "scatterv": {"mpi": "MPI_Scatterv", "sends": "MPI sends and receives"},
    "alltoallv": {"mpi": "MPI_Alltoallv", "sends": "MPI sends and receives"},
}


class Rule(NamedTuple):
    """An algorithm, and the calls for which it is the fastest.

    Attributes:
        total, skew: bytes of all messages, and bytes of the largest one by those of the mean, from which it applies.
        algorithm: name of the algorithm.
        segment: bytes of a piece, where the algorithm cuts messages.
        us: microseconds that algorithms take for a call of this total and skew, where they were measured.
    """

    total: int
    skew: float
    algorithm: str
    segment: int = 0
    us: Mapping[str, float] = {}


_from = itemgetter(0, 1)  # total and skew, from which a rule applies
Table = Mapping[str, Sequence[Rule]]  # of an operation: its rules


class Place(NamedTuple):
    """Where the ranks of a team are: the number of nodes, and the most ranks on one of them."""

    nodes: int
    ranks_per_node: int


class Tuned(NamedTuple):
    """The rules of a file.

    Attributes:
        file: its name.
        rules: those of each place.
    """

    file: str
    rules: Mapping[Place, Table]


class Rules:
    """The rules of a team.

    Args:
        tuned: those of a file, if there is one.

    Attributes:
        file: name of the file, if it has rules for this place.
    """

    def __init__(self, place: Place, tuned: Tuned | None) -> None:
        own = {} if tuned is None else tuned.rules.get(place, {})
        self.file = tuned.file if tuned is not None and own else ""
        self._size = place.nodes * place.ranks_per_node
        # The latter ones go before.
        self._table = {name: [*default(place, name), *sorted(own.get(name, ()), key=_from)] for name in ALGORITHMS}

    def choose(self, operation: str, total: int, largest: int) -> Rule:
        """Choose by agreed integers alone.

        Args:
            total: bytes of all messages.
            largest: bytes of the largest one.
        """
        skew = largest * self._size / total if total else 1.0
        return next(rule for rule in reversed(self._table[operation]) if rule.total <= total and rule.skew <= skew)

    def reason(self, rule: Rule) -> str:
        """Explain a rule to the reader of a plan."""
        if not (rule.total or rule.us):
            return ""
        times = ", ".join(f"{name} takes {us:,.0f} us" for name, us in sorted(rule.us.items(), key=itemgetter(1)))
        skew = f" and a skew of {rule.skew:g}" if rule.skew else ""
        source = f" ({self.file}{times and ': '}{times})" if self.file else ""
        return f"{rule.algorithm} is the fastest from {rule.total:,} bytes{skew} on{source}"


class _Team(Protocol):
    @property
    def rules(self) -> Rules: ...


@contextmanager
def forced(team: _Team, operation: str, algorithm: str, segment: int = 0) -> Iterator[None]:
    """A context in which a team takes this algorithm: to measure it. Must agree on all ranks of the team."""
    table = team.rules._table
    kept, table[operation] = table[operation], [Rule(0, 0, algorithm, segment)]
    try:
        yield
    finally:
        table[operation] = kept


def default(place: Place, operation: str) -> list[Rule]:
    """Return the rules without a file: what was the fastest on 2 to 8 ranks of a node (MPICH 5.0.2, Open MPI 4.1.4)."""
    from mpi4py import MPI

    mpich, size = MPI.get_vendor()[0] == "MPICH", place.nodes * place.ranks_per_node
    found = [Rule(0, 0, "mpi")]
    if operation == "scatterv" and not mpich:
        found += [Rule(2**24, 0, "sends")]
    if operation == "allgatherv":
        if place.nodes > 1 < place.ranks_per_node:
            # 2 hosts x 2 ranks break even at 4 MiB where the wire is as fast as memory, and below 256 KiB at 1 Gbit/s.
            found += [Rule(2**20, 0, "window")]
        elif place.nodes > 1:  # 4 hosts at 1 Gbit/s, 16 MiB: 112 ms, not 163; skewed 183, not 305 (sends: 418)
            found += [Rule(10**6, 0, "ring", 2**18)]
        elif mpich:  # its own ring has pieces of 32 KiB, and takes 1.4 to 4 times as long
            found += [Rule(10**6, 0, "ring", 2**20), Rule(10**6, 2.5, "sends"), Rule(4 * 10**6, 0, "ring", 2**20)]
            found += [Rule(64 * 10**6, 0, "ring", 2**22)]
        elif size == 2 or size >= 8:  # with 3 to 6 ranks, MPI's own is as fast or faster
            found += [Rule(8 * 10**6, 0, "ring", 2**22)]
    return found


def fingerprint() -> dict[str, str]:
    """Return what the rules of a file depend on, beside the place."""
    from mpi4py import MPI

    vendor, version = MPI.get_vendor()
    wires = sorted(os.listdir("/sys/class/infiniband")) if os.path.isdir("/sys/class/infiniband") else []
    gpu = torch.accelerator.current_accelerator()
    return {
        "mpi": f"{vendor} {'.'.join(map(str, version))}",
        "torch": torch.__version__,
        "memory": "host" if gpu is None else f"host, {gpu.type}",
        "wire": ", ".join(wires) or "no InfiniBand",
    }


def read(file: str) -> tuple[Tuned, str]:
    """Read the rules of a file.

    Returns:
        The rules, and how the file's fingerprint differs from this job's: they do not apply then.

    Raises:
        ValueError: if it is not a file of this version, or names an unknown operation or algorithm.
        OSError: if it cannot be read.
    """
    rules: dict[Place, dict[str, list[Rule]]] = {}
    try:
        with open(file, encoding="utf-8") as opened:
            found: Any = json.load(opened)
        if (version := found["format"]) != FORMAT:
            raise ValueError(f"its format is {version!r}, expected {FORMAT!r}")
        for operation, rows in found["rules"].items():
            for row in rows:
                place = Place(int(row.pop("nodes")), int(row.pop("ranks_per_node")))
                rule = _rule(**row)
                if rule.algorithm not in ALGORITHMS[operation]:
                    raise ValueError(f"{operation} has no algorithm {rule.algorithm!r}")
                rules.setdefault(place, {}).setdefault(operation, []).append(rule)
        theirs = dict(found["fingerprint"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        text = f"HPCDIST_TUNE: {file}: {type(error).__name__}: {error}; write it anew with python -m hpcdist.tune"
        raise refusal(ValueError, "HD114", text) from None
    own = fingerprint()
    differ = [
        f"{name} is {own[name]!r} here, {theirs.get(name)!r} there" for name in own if own[name] != theirs.get(name)
    ]
    return Tuned(file, {} if differ else rules), "; ".join(differ)


def merged(before: Any, place: Place, rules: Table, samples: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the contents of a file with the rules and samples of a place in place of earlier ones.

    Args:
        before: its earlier contents, of which the rules of other places stay, if they have this fingerprint.
    """
    found: dict[str, Any] = {"format": FORMAT, "fingerprint": fingerprint(), "rules": {}, "samples": []}
    if isinstance(before, dict) and all(before.get(name) == found[name] for name in ("format", "fingerprint")):
        found = before
    here = place._asdict()

    def replaced(name: Any, of: Any, rows: Iterable[Mapping[str, Any]]) -> None:
        others = [row for row in of.get(name, ()) if any(row[key] != value for key, value in here.items())]
        of[name] = [*others, *({**here, **row} for row in rows)]

    for operation, rows in rules.items():
        replaced(operation, found["rules"], [rule._asdict() for rule in rows])
    replaced("samples", found, list(samples))
    return found


def _rule(total: Any, skew: Any, algorithm: str, segment: Any = 0, us: Any = ()) -> Rule:
    """Return the rule of a row of a file."""
    times = {str(name): float(time) for name, time in dict(us).items()}
    return Rule(int(total), float(skew), algorithm, int(segment), times)
