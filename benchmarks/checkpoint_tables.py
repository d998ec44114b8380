"""Tables of checkpoints beside torch's DCP: times, how many times faster, and the targets."""

from __future__ import annotations

from collections.abc import Sequence

import results
from results import Record, Spread
from tables import duration, figure, table

FOLDER = "DCP, a folder of files"
CONSOLIDATED = "DCP, consolidated to one safetensors"
WRITER, READER = "DCP, hpcdist's HDF5Writer", "DCP, hpcdist's HDF5Reader"
GATHERED = "gathered on rank 0, torch.save"
SAVE_H5, SAVE_SAFETENSORS, LOAD_H5 = "staging.save, .h5", "staging.save, .safetensors", "staging.load, .h5"
SAVE, LOAD, ELSEWHERE = "save", "load", "load of what one rank has saved"
# (what is done, by whom, beside whom, at least so many times its speed)
TARGETS = (
    (SAVE, WRITER, FOLDER, 1.4),
    (SAVE, SAVE_H5, FOLDER, 1.4),
    (SAVE, SAVE_SAFETENSORS, CONSOLIDATED, 3.0),
    (ELSEWHERE, READER, FOLDER, 2.0),
    (ELSEWHERE, LOAD_H5, FOLDER, 2.0),
)


def _faster(record: Record, what: str, name: str, other: str) -> Spread | None:
    case = next((case for case in record.cases if case.what == what), None)
    return None if case is None else results.ratio(case, other, name)


def target_table(records: Sequence[Record]) -> str:
    rows = []
    for what, name, other, limit in TARGETS:
        for record in records:
            found = _faster(record, what, name, other)
            cells = ["not measured", "-", "-"]
            if found is not None:
                met = "yes" if found.median >= limit else "NO"
                cells = [f"{figure(found.median)} x", f"{figure(found.low)} to {figure(found.high)}", met]
            rows.append([f"{what}: {name}, by {other}", record.mpi, str(record.world_size), f"{limit:g} x", *cells])
    return table(["times the other's speed", "MPI", "np", "at least", "measured", "IQR", "met"], rows)


def time_table(record: Record, what: str) -> str:
    """Format one kind of case of a run: a row for each way."""
    cases = [case for case in record.cases if case.what == what]
    size = results.show_size(cases[0].size)
    rows = []
    for timing in cases[0].timings:
        found = None if timing.skipped else timing.seconds
        ratio = _faster(record, what, timing.name, FOLDER)
        if found is None or ratio is None:
            rows.append([timing.name, "skipped", "-", "-", "-"])
            continue
        spread = f"{duration(found.low)} to {duration(found.high)}"
        rows.append([timing.name, duration(found.median), spread, figure(ratio.median), str(timing.rounds)])
    head = [f"{what}, np {record.world_size}, {size} a rank", "median", "IQR", "times DCP's folder", "rounds"]
    return table(head, rows)


def section(records: Sequence[Record]) -> list[str]:
    """Return the section on checkpoints of README.md; empty if they were not measured."""
    runs = [record for record in records if record.verb == "checkpoints" and record.cases]
    if not runs:
        return []
    parts = [
        "### Checkpoints",
        "A state of 24 float32 tensors that is cut along dim 0, as FSDP2 does it; a save ends with its data on the "
        "disk. Times faster: the other's time by this one's, in pairs of one round.",
        target_table(runs),
    ]
    for record in runs:
        parts.append(f"#### Checkpoints, {record.mpi}, np {record.world_size}")
        parts += [time_table(record, what) for what in dict.fromkeys(case.what for case in record.cases)]
    return parts
