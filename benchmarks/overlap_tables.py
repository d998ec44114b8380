"""Tables of overlap: the part of a transfer that a computation hides."""

from __future__ import annotations

from collections.abc import Sequence

import results
from results import Case, Record, Spread
from tables import figure, table

LATE = 0.05  # seconds that rank 1 is late
KINDS = {
    "mm": "products of matrices on this core",
    "sleep": "sleep: another device computes",
    "late": "products of matrices, rank 1 comes 50 ms late",
}
METHODS = {
    "mpi": results.ROUTES["mpi"],
    "gloo": results.ROUTES["gloo"],
    "Iallgather": "mpi4py, Iallgather",
    "gloo-async": "gloo, async_op=True",
}
# Contenders; the first is the baseline.
AFTER, TOGETHER = "one after the other", "at once"
TRANSFER, COMPUTE = "the transfer alone", "the computation alone"
_NAMES = (TRANSFER, COMPUTE, AFTER, TOGETHER)


def overlap(case: Case) -> Spread | None:
    """Return the saved time of each round, relative to the maximum: the shorter of transfer and computation."""
    timings = [case.timing(name) for name in (AFTER, TOGETHER, TRANSFER, COMPUTE)]
    rounds = zip(*(timing.samples for timing in timings if timing), strict=True)
    found = [(a - b) / min(t, c) for a, b, t, c in (r for r in rounds if len(r) == len(timings) and None not in r)]
    return results.spread(found) if found else None


def label(case: Case) -> str:
    """Describe the transfer and the computation of a case."""
    return f"{METHODS[case.what]}, {KINDS[case.skew]}, {results.show_size(case.size)} a rank"


def overlap_table(record: Record) -> str:
    """Summarise one run: a row for each method and kind, in milliseconds."""
    head = [f"overlap, np {record.world_size}", "the computation", *(f"{name}, ms" for name in _NAMES)]
    rows = []
    for case in record.cases:
        timings = [case.timing(name) for name in _NAMES]
        cells = ["-" if timing is None else figure(timing.seconds.median * 1e3) for timing in timings]
        found = overlap(case)
        last = ["-", "-"] if found is None else [f"{found.median:.2f}", f"{found.low:.2f} to {found.high:.2f}"]
        rows.append([METHODS[case.what], KINDS[case.skew], *cells, *last])
    return table([*head, "overlap", "IQR"], rows)


def section(records: Sequence[Record]) -> list[str]:
    """Return the section on overlap of README.md; empty if it was not measured."""
    runs = [record for record in records if record.verb == "overlap" and record.cases]
    if not runs:
        return []
    parts = ["### Overlap", "1: the shorter one of transfer and computation is hidden; 0: nothing is."]
    for record in runs:
        parts += [f"{record.mpi}:", overlap_table(record)]
    return parts
