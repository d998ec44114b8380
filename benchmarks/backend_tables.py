"""Tables of the process group "mpi" beside gloo's: times, how many times faster, and the targets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import results
from results import GLOO_GROUP, MPI_GROUP, Case, Record, Spread
from tables import duration, figure, table

_MIB = 2**20
# (kind of case, bytes, or None for any): at least so many times gloo's speed, at np 2 and 4
TARGETS: dict[tuple[str, int | None], float] = {
    ("all_gather_single", 16 * _MIB): 5,
    ("all_reduce", 8): 20,
    ("all_reduce", 64 * _MIB): 1.3,
    ("DDP step, 1 million", None): 1.4,
    ("DDP step, 100 million", None): 1.4,
}


def faster(case: Case) -> Spread | None:
    """Return how many times faster than gloo the group is, by pairs of one round."""
    return results.ratio(case, GLOO_GROUP, MPI_GROUP)


def label(case: Case) -> str:
    """Describe a case."""
    return case.what if "step" in case.what else f"{case.what}, {results.show_size(case.size)}"


def _time(case: Case, name: str) -> str:
    timing = case.timing(name)
    return "-" if timing is None else duration(timing.seconds.median)


def ratio_table(records: Sequence[Record]) -> str:
    """Summarise the runs of one MPI: a row for each case, and for each number of ranks both times and their ratio."""
    head = ["torch.distributed"]
    for record in records:
        n = f"np {record.world_size}"
        head += [f"{n}: gloo", "mpi", "times faster", "IQR"]
    rows = []
    for first in records[0].cases:
        row = [label(first)]
        for record in records:
            case = record.case(first.size, first.skew, first.what)
            found = None if case is None else faster(case)
            if case is None or found is None:
                row += ["-"] * 4
                continue
            times = [_time(case, name) for name in (GLOO_GROUP, MPI_GROUP)]
            row += [*times, figure(found.median), f"{figure(found.low)} to {figure(found.high)}"]
        rows.append(row)
    return table(head, rows)


def target_table(records: Sequence[Record]) -> str:
    """Format the targets; the last row counts the cases that are slower than gloo by the upper quartile."""
    rows = []
    for (what, size), limit in TARGETS.items():
        for record in records:
            cases = [c for c in record.cases if c.what == what and size in (None, c.size)]
            found = faster(cases[0]) if cases else None
            cells = ["not measured", "-", "-"]
            if found is not None:
                iqr = f"{figure(found.low)} to {figure(found.high)}"
                cells = [f"{figure(found.median)} x", iqr, "yes" if found.median >= limit else "NO"]
            rows.append(
                [label(cases[0]) if cases else what, record.mpi, str(record.world_size), f"{limit:g} x", *cells]
            )
    for record in records:
        found = [(case, ratio) for case in record.cases if (ratio := faster(case)) is not None]
        slow = [label(case) for case, ratio in found if ratio.high < 1]
        shown = f"{len(slow)} of {len(found)}" + (f": {', '.join(slow)}" if slow else "")
        rows.append(
            ["slower than gloo", record.mpi, str(record.world_size), "none", shown, "-", "NO" if slow else "yes"]
        )
    return table(["times gloo's speed", "MPI", "np", "at least", "measured", "IQR", "met"], rows)


def section(records: Sequence[Record], picture: Callable[[Record], str]) -> list[str]:
    """Return the section on the process group of README.md; empty if it was not measured.

    Args:
        picture: returns the line that shows the picture of a record's MPI.
    """
    runs = [record for record in records if record.verb == "backend" and record.cases]
    if not runs:
        return []
    parts = [
        "### Process group",
        'Calls of torch.distributed on CPU tensors with backend "mpi", beside gloo in the same run; a size is that of '
        "the tensor that a rank sends. Times faster: gloo's time by ours, in pairs of one round.",
        target_table(runs),
    ]
    for mpi in dict.fromkeys(record.mpi for record in runs):
        mine = sorted((r for r in runs if r.mpi == mpi), key=lambda record: record.world_size)
        parts += [f"#### Process group, {mpi}", picture(mine[0]), ratio_table(mine)]
    return [part for part in parts if part]


def points(record: Record) -> dict[str, list[tuple[int, float]]]:
    """Return (size, times faster) of each collective, by its name."""
    found: dict[str, list[tuple[int, float]]] = {}
    for case, ratio in ((case, faster(case)) for case in record.cases):
        if ratio is not None and "step" not in case.what:
            found.setdefault(case.what, []).append((case.size, ratio.median))
    return found
