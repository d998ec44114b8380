"""Choose the algorithm of a call by rules: those of the file HPCDIST_TUNE, else the defaults.

The ranks agree on the bytes of all messages anyway. So a choice by their total and skew costs no message, where an MPI
library would need one: https://github.com/open-mpi/ompi/issues/12376.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from hpcdist.errors import refusal
from hpcdist.tensors import accelerator

FORMAT = "hpcdist tune 1"
_SENDS = {"sends": "MPI sends and receives"}
_IN_ONE_GROUP = {"sends": "sends and receives of NCCL in one group"}
# The algorithms of each operation of route mpi, and of route nccl, as a plan describes them; the default one first.
# Route nccl replaces NCCL by the name of the accelerator's own library.
ALGORITHMS: dict[str, dict[str, str]] = {
    "allgatherv": {
        "mpi": "MPI_Allgatherv",
        **_SENDS,
        "ring": "a ring of MPI messages in pieces",
        "window": "memory that the ranks of a node share",
    },
    "gatherv": {"mpi": "MPI_Gatherv", **_SENDS},
    "scatterv": {"mpi": "MPI_Scatterv", **_SENDS},
    "alltoallv": {
        "mpi": "MPI_Alltoallv",
        "typed": "MPI sends, and receives with derived datatypes",
        **_SENDS,
    },
    "exchange": _SENDS,
    "nccl allgatherv": {
        "broadcasts": "a group of broadcasts of NCCL",
        "fused": "an all-gather of NCCL",
        "padded": "an all-gather of NCCL, padded to the largest message",
        **_IN_ONE_GROUP,
    },
    **{f"nccl {name}": _IN_ONE_GROUP for name in ("gatherv", "scatterv", "alltoallv", "exchange")},
}


class Rule(NamedTuple):
    """An algorithm, and the calls for which it is taken.

    Attributes:
        total, skew: bytes of all messages, and bytes of the largest one by those of the mean, from which it applies.
        algorithm: name of the algorithm.
        segment: bytes of a piece, where the algorithm cuts messages.
    """

    total: int
    skew: float
    algorithm: str
    segment: int = 0

    @property
    def label(self) -> str:
        """The algorithm, and the bytes of its pieces."""
        return f"{self.algorithm} ({self.segment / 2**20:g} MiB)" if self.segment else self.algorithm

    @property
    def start(self) -> str:
        """From where on it applies."""
        skew = f" and a skew of {self.skew:g}" if self.skew else ""
        return f" from {self.total:,} bytes{skew} on" if self.total or skew else ""


class Sample(NamedTuple):
    """The times of a call: microseconds of each algorithm."""

    operation: str
    total: int
    skew: float
    us: Mapping[str, float]


Table = Mapping[str, Sequence[Rule]]  # of an operation: its rules


class Place(NamedTuple):
    """Where the ranks of a team are: the number of nodes, and the most ranks on one of them."""

    nodes: int
    ranks_per_node: int

    @classmethod
    def of(cls, node_of: Iterable[int]) -> Place:
        """Return the place of ranks on these nodes."""
        ranks = Counter(node_of)
        return cls(len(ranks), max(ranks.values()))

    def __str__(self) -> str:
        return f"nodes: {self.nodes}, ranks per node: {self.ranks_per_node}"


class Tuned(NamedTuple):
    """What a file has for each place where it was measured: rules, and the samples that they come from."""

    file: str
    rules: Mapping[Place, Table]
    samples: Mapping[Place, Sequence[Sample]]


class Rules:
    """The rules of a team.

    Args:
        size: number of ranks.
        tuned: what a file has, if there is one.

    Attributes:
        table: rules of each operation; the latter ones go before.
    """

    def __init__(self, place: Place, size: int, tuned: Tuned | None) -> None:
        self.place, self._size = place, size
        self._file, rules, samples = tuned or Tuned("", {}, {})
        own, self._samples = rules.get(place, {}), samples.get(place, ())
        self.table = {name: [*default(place, size, name), *sorted(own.get(name, ()))] for name in ALGORITHMS}

    def choose(
        self, operation: str, total: int, largest: int, usable: Callable[[str], bool] = lambda algorithm: True
    ) -> Rule:
        """Choose by agreed integers alone.

        Args:
            total: bytes of all messages.
            largest: bytes of the largest one.
            usable: whether an algorithm can carry this call; called for those whose rules apply. Sends always can.
        """
        skew = self._skew(total, largest)
        applying = (rule for rule in reversed(self.table[operation]) if rule.total <= total and rule.skew <= skew)
        return next((rule for rule in applying if usable(rule.algorithm)), Rule(0, 0, "sends"))

    def reason(self, operation: str, rule: Rule, total: int, largest: int) -> str:
        """Explain a rule to the reader of a plan, with the times of all algorithms in the nearest smaller call that was
        measured."""
        skew = self._skew(total, largest)
        found = [x for x in self._samples if x.operation == operation and x.total <= total and x.skew <= skew]
        if found:
            near = max(found, key=itemgetter(1, 2))
            us = ", ".join(f"{name} takes {us:,.0f} us" for name, us in sorted(near.us.items(), key=itemgetter(1)))
            return f"{rule.label} is taken{rule.start} ({self._file}: for {near.total:,} bytes, {us})"
        if rule not in default(self.place, self._size, operation):
            return f"{rule.label} is taken{rule.start}, by {self._file}"
        if not rule.start:
            return ""
        return f"{rule.label} is taken{rule.start}, by default; hpcdist tune measures what others take here"

    def _skew(self, total: int, largest: int) -> float:
        return largest * self._size / total if total else 1.0


def default(place: Place, size: int, operation: str) -> list[Rule]:
    """Return the rules without a file: what was the fastest on 2 to 8 ranks of a node (MPICH 5.0.2, Open MPI 4.1.4)."""
    from mpi4py import MPI

    mpich = MPI.get_vendor()[0] == "MPICH"
    found = [Rule(0, 0, next(iter(ALGORITHMS[operation])))]
    if operation == "nccl allgatherv":
        found += [Rule(0, 0, "fused")]  # where all messages are equal
    if operation == "scatterv":  # 0.7 to 0.9 of the time
        found += [Rule(2**23 if mpich else 2**22, 0, "sends")]
    if operation == "alltoallv" and mpich:
        # columns to rows takes 0.8 to 0.9 of the time; Open MPI takes 0.7 times as long, or twice
        found += [Rule(2**22, 0, "typed")]
    elif operation == "alltoallv" and size == 2:
        # ragged to even rows takes 0.75 of the time, since each rank copies its own part meanwhile
        found += [Rule(2**23, 0, "sends")]
    if operation == "allgatherv":
        if place.nodes == 2 < size:
            # 2 hosts x 2 ranks, 64 MiB: 340 ms, a ring 476 at 1 Gbit/s; 51 and 79 where the wire is as fast as memory.
            # They break even at 2 MiB there, and below 1 MiB at 1 Gbit/s.
            found += [Rule(2**20, 0, "window")]
        elif place.nodes > 1:
            # 4 hosts x 2 ranks at 1 Gbit/s: 64 MiB 510 ms, windows 657; skewed, 16 MiB: 137 ms, windows 310, since the
            # wire of one host has its data for all others. The many steps of a large ring need data for each.
            found += [Rule(10**6, 2.5, "ring", 2**18), Rule(max(10**6, size * 2**17), 0, "ring", 2**18)]
        elif mpich:  # whose own takes 1.2 to 2.8 times as long
            # A ring gains where results are on huge pages, as those of the pool; with `out` it is as fast as sends.
            found += [Rule(2**17 if size == 2 else 10**6, 0, "sends"), Rule(8 * 10**6, 0, "ring", 2**22)]
        elif size == 2:  # even ones take 1.1 times as long
            found += [Rule(2**22, 1.5, "ring", 2**22)]
        elif size >= 8:  # with 4 ranks, MPI's own is as fast or faster
            found += [Rule(8 * 10**6, 0, "ring", 2**22)]
    return found


def fingerprint() -> dict[str, str]:
    """Return what the rules of a file depend on, beside the place."""
    from mpi4py import MPI

    vendor, version = MPI.get_vendor()
    wires = sorted(os.listdir("/sys/class/infiniband")) if os.path.isdir("/sys/class/infiniband") else []
    gpu, library = "none", accelerator.LIBRARY.upper()
    if accelerator.count():
        gpu = f"{accelerator.properties(0).name}, {library} {accelerator.library_version()}"
    return {
        "mpi": f"{vendor} {'.'.join(map(str, version))}",
        "torch": torch.__version__,
        "gpu": gpu,
        "wire": ", ".join(wires) or "no InfiniBand",
    }


def read(file: str) -> tuple[Tuned, str]:
    """Read the rules of a file.

    Returns:
        The rules, and how the file's fingerprint differs from this job's: they do not apply then.

    Raises:
        ValueError: if it cannot be read, is not a file of this version, or names an unknown operation or algorithm.
    """
    rules: dict[Place, dict[str, list[Rule]]] = {}
    samples: dict[Place, list[Sample]] = {}
    try:
        with open(file, encoding="utf-8") as opened:
            found: Any = json.load(opened)
        if (version := found["format"]) != FORMAT:
            raise ValueError(f"its format is {version!r}, expected {FORMAT!r}")
        for operation, rows in found["rules"].items():
            for row in rows:
                place = Place(int(row["nodes"]), int(row["ranks_per_node"]))
                rule = Rule(int(row["total"]), float(row["skew"]), row["algorithm"], int(row["segment"]))
                if rule.algorithm not in ALGORITHMS[operation]:
                    raise ValueError(f"{operation} has no algorithm {rule.algorithm!r}")
                if not rule.segment >= 0:  # of which pieces cannot be
                    raise ValueError(f"segment is {rule.segment}")
                rules.setdefault(place, {}).setdefault(operation, []).append(rule)
        for row in found["samples"]:
            place, us = Place(row["nodes"], row["ranks_per_node"]), {name: float(t) for name, t in row["us"].items()}
            samples.setdefault(place, []).append(Sample(row["operation"], int(row["total"]), float(row["skew"]), us))
        theirs = dict(found["fingerprint"])
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, OSError) as error:
        text = f"HPCDIST_TUNE: {file}: {type(error).__name__}: {error}; write it anew with python -m hpcdist tune"
        raise refusal(ValueError, "HD114", text) from None
    own = fingerprint()
    differ = [
        f"{name} is {own[name]!r} here, {theirs.get(name)!r} there" for name in own if own[name] != theirs.get(name)
    ]
    return Tuned(file, {}, {}) if differ else Tuned(file, rules, samples), "; ".join(differ)


def merged(before: Any, place: Place, rules: Table, samples: Iterable[Sample]) -> dict[str, Any]:
    """Return the contents of a file with the rules and samples of a place in place of earlier ones.

    Args:
        before: its earlier contents, of which the rules of other places stay, if they have this fingerprint.
    """
    found: dict[str, Any] = {"format": FORMAT, "fingerprint": fingerprint(), "rules": {}, "samples": []}
    if isinstance(before, dict) and all(before.get(name) == found[name] for name in ("format", "fingerprint")):
        found = before
    here = place._asdict()
    replaced: list[tuple[Any, str, Any]] = [(found, "samples", samples), *((found["rules"], *x) for x in rules.items())]
    for of, key, rows in replaced:
        others = [row for row in of.get(key, ()) if any(row[name] != value for name, value in here.items())]
        of[key] = [*others, *({**here, **row._asdict()} for row in rows)]
    return found
