"""The tables and targets of staging: rates relative to POSIX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import NamedTuple

import results
from results import (
    H5PY_ALONE,
    HPCDIST,
    PLAIN_H5PY,
    POSIX,
    SAFETENSORS,
    UNCHECKED,
    UNVERIFIED,
    Case,
    Record,
    Resident,
    Spread,
)
from tables import figure, table

VERBS = ("staging", "resident")
WRITER = "staging writer"  # key in a record's versions: the meaning of writer="auto"
LAYOUTS = {"even": "dim 0, even", "ragged": "dim 0, ragged", "dim1": "dim 1"}
SHARED = (
    POSIX,
    "MPI-IO, Write_at_all",
    "MPI-IO, Read_at_all",
    PLAIN_H5PY,
    "h5py, independent",
    H5PY_ALONE,
)  # one file of all ranks
_MIB = 2**20


def rate(case: Case, name: str, other: str) -> Spread | None:
    """Compute the paired ratio of rates: in each round, the time of `other` divided by that of `name`."""
    return results.ratio(case, other, name)


def case_table(record: Record, case: Case) -> str:
    """Format all measurements of one layout and size."""
    what = f"{case.what}, np {record.world_size}, {LAYOUTS[case.skew]}, {results.show_size(case.size)} a rank"
    others = [POSIX, PLAIN_H5PY] if case.what == "save" and case.timing(PLAIN_H5PY) else [POSIX]
    head = [what, "ms", "IQR, ms", "GB/s"]
    for other in others:
        head += [f"rate by {other}'s", "IQR"]
    rows, notes = [], []
    for timing in case.timings:
        if timing.skipped:
            rows.append([timing.name, "left out", *["-"] * (len(head) - 1)])
            notes.append(f"{timing.name}: left out: {timing.skipped}.")
            continue
        time = timing.seconds
        row = [timing.name, figure(time.median * 1e3), f"{figure(time.low * 1e3)} to {figure(time.high * 1e3)}"]
        row.append(f"{results.gigabytes_per_second(case, timing):.3f}")
        for other in others:
            found = rate(case, timing.name, other)
            row += ["-", "-"] if found is None else [figure(found.median), _range(found)]
        rows.append([*row, str(timing.rounds)])
    notes += best_notes(case)
    if case.skew == "dim1":
        notes.append(f"{POSIX}: as many bytes, each rank's in one run, as along dim 0.")
    return "\n\n".join([table([*head, "rounds"], rows), *notes])


def best_notes(case: Case) -> list[str]:
    """Return, for each of hpcdist's contenders, its rate in relation to the fastest other one with the same file."""
    best = results.best(case, SHARED)
    found = [(t.name, rate(case, t.name, best)) for t in case.timings if best and t.name.startswith(HPCDIST)]
    return [f"{name}: {figure(r.median)} ({_range(r)}) of the rate of {best}, the best." for name, r in found if r]


def _range(found: Spread) -> str:
    return f"{figure(found.low)} to {figure(found.high)}"


def rate_table(record: Record, what: str) -> str:
    """Summarise one run: a row for each contender, a column for each layout and size."""
    cases = [case for case in record.cases if case.what == what]
    head = [f"{what}, np {record.world_size}"]
    head += [f"{LAYOUTS[case.skew].removeprefix('dim 0, ')}, {results.show_size(case.size)}" for case in cases]
    rows = [[f"{POSIX}, GB/s", *(_gigabytes(case) for case in cases)]]
    for name in [timing.name for timing in cases[0].timings if timing.name != POSIX]:
        found = [rate(case, name, POSIX) for case in cases]
        rows.append([name, *("-" if cell is None else figure(cell.median) for cell in found)])
    return table(head, rows)


def _gigabytes(case: Case) -> str:
    timing = case.timing(POSIX)
    return "-" if timing is None else figure(results.gigabytes_per_second(case, timing))


class Target(NamedTuple):
    """A target for every size, and how to measure it in a case."""

    what: str
    case: tuple[str, str]  # save or load, layout
    limit: float
    at_most: bool
    measure: Callable[[Case, str], Spread | None]  # the name of the default save is the second argument


def _save(other: str) -> Callable[[Case, str], Spread | None]:
    return lambda case, default: rate(case, default, other)


def _save_by_best(case: Case, default: str) -> Spread | None:
    best = results.best(case, SHARED)
    return None if best is None else rate(case, default, best)


def _load_by_best(case: Case, _: str) -> Spread | None:
    best = results.best(case, (POSIX, PLAIN_H5PY, H5PY_ALONE, SAFETENSORS))
    return None if best is None else rate(case, HPCDIST, best)


def _load(case: Case, _: str) -> Spread | None:
    return rate(case, HPCDIST, POSIX)


TARGETS = [
    *(
        Target(f"save, {LAYOUTS[layout]}: rate by POSIX's", ("save", layout), limit, False, _save(POSIX))
        for layout, limit in (("even", 0.85), ("ragged", 0.85), ("dim1", 0.5))
    ),
    *(
        Target(f"save, {LAYOUTS[layout]}: rate by plain h5py's", ("save", layout), 5, False, _save(PLAIN_H5PY))
        for layout in ("even", "ragged")
    ),
    *(
        Target(f"load, {LAYOUTS[layout]}: rate by pread's", ("load", layout), limit, False, _load)
        for layout, limit in (("even", 0.85), ("ragged", 0.85), ("dim1", 0.5))
    ),
    *(
        Target(f"save, {LAYOUTS[layout]}: rate by the best's", ("save", layout), 0.95, False, _save_by_best)
        for layout in ("even", "ragged")
    ),
    *(
        Target(
            f"load, {words}: rate by the best of pread, h5py, safetensors", ("load", layout), 1, False, _load_by_best
        )
        for layout, words in LAYOUTS.items()
    ),
    Target(
        "save, checksums: time with by time without", ("save", "even"), 1.15, True, lambda c, d: rate(c, UNCHECKED, d)
    ),
    Target(
        "load, checksums: time with by time without",
        ("load", "even"),
        1.15,
        True,
        lambda c, _: rate(c, UNVERIFIED, HPCDIST),
    ),
]
_RESIDENT = 400 * _MIB


def target_table(records: Sequence[Record]) -> str:
    """Format targets and measurements: the median and in brackets the IQR, for every size."""
    runs = [record for record in records if record.verb == "staging"]
    sizes = sorted({case.size for record in runs for case in record.cases})
    rows = []
    for target, record in product(TARGETS, runs):
        default = f"hpcdist, writer {record.versions[WRITER]}"
        cases = [record.case(size, target.case[1], target.case[0]) for size in sizes]
        found = [None if case is None else target.measure(case, default) for case in cases]
        if not any(found):
            continue
        met = [
            spread.median <= target.limit if target.at_most else spread.median >= target.limit
            for spread in found
            if spread
        ]
        limit = f"at {'most' if target.at_most else 'least'} {target.limit:g}"
        cells = ["-" if spread is None else f"{figure(spread.median)} ({_range(spread)})" for spread in found]
        rows.append([target.what, record.mpi, str(record.world_size), limit, *cells, "yes" if all(met) else "NO"])
    return table(["target", "MPI", "np", "limit", *map(results.show_size, sizes), "met"], rows)


def resident_line(record: Record, resident: Resident) -> str:
    """Format the target of resident memory, and the measurement."""
    most = max(resident.ranks)
    ranks = ", ".join(f"{nbytes / _MIB:.0f}" for nbytes in resident.ranks)
    return (
        f"- `{resident.command}` over {results.show_size(resident.nbytes)}, {record.mpi}, np {record.world_size}: "
        f"{ranks} MiB resident at the peak of each rank's process; limit: under {_RESIDENT // _MIB} MiB; "
        f"met: {'yes' if most < _RESIDENT else 'NO'}."
    )


def section(records: Sequence[Record], picture: Callable[[Record], str]) -> list[str]:
    """Return the section on staging of README.md, empty if not measured. `picture` embeds a record's plot."""
    runs = [record for record in records if record.verb == "staging" and record.cases]
    parts = []
    if runs:
        parts = ["### Staging", "Rates in relation to POSIX (its own row: GB/s); over 1 is faster."]
        parts.append(target_table(runs))
    lines = [resident_line(record, record.resident) for record in records if record.resident]
    parts += ["\n".join(lines)] if lines else []
    for mpi in dict.fromkeys(record.mpi for record in runs):
        mine = [record for record in runs if record.mpi == mpi]
        parts += [f"#### Staging, {mpi}", picture(mine[0])]
        parts += [rate_table(record, what) for record in mine for what in ("save", "load")]
    notes = {
        f"- {r.mpi}, {t.name}: left out: {t.skipped}." for r in runs for c in r.cases for t in c.timings if t.skipped
    }
    parts += ["\n".join(sorted(notes))] if notes else []
    return [part for part in parts if part]
