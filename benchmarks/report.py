"""Write the tables: results/tables.md, and README.md between its two marks. python benchmarks/report.py [FOLDER]"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import backend_tables
import checkpoint_tables
import overlap_tables
import results
import staging_tables
from results import BASELINE, FOLDER, KINDS, STRUCTURES, Case, Record, Timing
from tables import duration, figure, table
from targets import target_table

README = Path(__file__).parent / "README.md"
START, END = "<!-- results -->", "<!-- /results -->"
_MIB = 2**20


def case_table(record: Record, case: Case) -> str:
    """Format all measurements of one size and skew: times, bandwidth, paired ratio and difference to the baseline."""
    fastest = min(t.seconds.median for t in case.timings if not t.skipped)
    scale, unit = (1e6, "us") if fastest < 1e-3 else (1e3, "ms")
    head = [
        f"{record.verb}, {shards(record, case)}",
        unit,
        f"IQR, {unit}",
        "GB/s",
        "ratio",
        "IQR",
        f"over baseline, {unit}",
    ]
    rows = [_row(case, timing, scale) for timing in case.timings]
    return table([*head, "rounds x calls"], rows) + "".join(f"\n\n{note}" for note in _skipped(case))


def shards(record: Record, case: Case) -> str:
    """Describe the data of the ranks."""
    if record.verb == "overlap":
        return f"np {record.world_size}, {overlap_tables.label(case)}"
    if case.skew in KINDS:
        return f"np {record.world_size}, {results.show_size(case.size)} a rank, {KINDS[case.skew]}"
    if case.skew in STRUCTURES:
        return f"np {record.world_size}, {STRUCTURES[case.skew]}, {results.show_size(case.size)} a list"
    if record.verb == "backend":
        return f"np {record.world_size}, {backend_tables.label(case)}"
    size, least = results.show_size(max(case.nbytes)), results.show_size(min(case.nbytes))
    return f"np {record.world_size}, {size} a rank" + ("" if case.skew == "even" else f" on rank 0, else {least}")


def _row(case: Case, timing: Timing, scale: float) -> list[str]:
    baseline = case.timings[0].name
    ratio, difference = (of(case, timing.name, baseline) for of in (results.ratio, results.difference))
    if ratio is None or difference is None:
        return [timing.name, "skipped", *["-"] * 6]
    time = timing.seconds
    return [
        timing.name,
        figure(time.median * scale),
        f"{figure(time.low * scale)} to {figure(time.high * scale)}",
        f"{results.gigabytes_per_second(case, timing):.3f}",
        figure(ratio.median),
        f"{figure(ratio.low)} to {figure(ratio.high)}",
        figure(difference.median * scale),
        f"{timing.rounds} x {timing.calls}",
    ]


def _skipped(case: Case) -> list[str]:
    return [f"{timing.name}: skipped, {timing.skipped}." for timing in case.timings if timing.skipped]


def _left_out(record: Record, case: Case, timing: Timing) -> str:
    """Describe a contender that was not timed, for README.md: in which case, or in which kind of case."""
    where = f"{record.name}, {shards(record, case)}" if timing.samples else f"{record.verb}, {KINDS[case.skew]}"
    return f"{where}: {timing.name}: skipped, {timing.skipped}."


def peak_table(record: Record) -> str:
    """Format the peak additional memory of each contender."""
    if not record.peaks:
        return f"Peak memory was not measured: {record.no_peaks}."
    shown = f"{record.peaks[0].result / _MIB:.0f} MiB"
    head = [f"{record.verb}, np {record.world_size}: peak extra memory, result {shown}", "MiB", "of the result"]
    return table(head, [[p.name, f"{p.extra / _MIB:.1f}", f"{p.extra / p.result:.3f}"] for p in record.peaks])


def node_table(record: Record) -> str:
    """Format the memory of all ranks together, while they hold the results."""
    shown = f"{record.nodes[0].result / _MIB:.0f} MiB"
    head = [f"{record.verb}, np {record.world_size}: memory of all ranks, result {shown}", "MiB", "of the result"]
    return table(head, [[p.name, f"{p.extra / _MIB:.1f}", f"{p.extra / p.result:.3f}"] for p in record.nodes])


def ratio_table(record: Record, what: str = "") -> str:
    """Summarise the paired ratios of one run: a row for each contender, a column for each size and skew."""
    cases = [case for case in record.cases if case.what == what]
    head = [f"{record.verb}, {what + ', ' if what else ''}np {record.world_size}"]
    head += [f"{results.show_size(case.size)}{'' if case.skew == 'even' else ' ' + case.skew}" for case in cases]
    rows = []
    for name in [timing.name for timing in cases[0].timings]:
        cells = [results.ratio(case, name) for case in cases]
        rows.append([name, *("skipped" if cell is None else figure(cell.median) for cell in cells)])
    rows[0] = [f"{BASELINE}, time", *map(_baseline_time, cases)]
    return table(head, rows)


def _baseline_time(case: Case) -> str:
    timing = case.timing(BASELINE)
    return "skipped" if timing is None else duration(timing.seconds.median)


def _origin(records: Sequence[Record]) -> str:
    """List the software and machines of the records, one line per combination."""
    lines: dict[str, None] = {}
    for record in records:
        versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
        lines[f"{record.mpi}, {versions}; {record.machine}; {record.date}."] = None
    return "\n".join(f"- {line}" for line in lines)


def block(everything: Sequence[Record]) -> str:
    """Format the generated part of README.md."""
    records = [
        record
        for record in everything
        if record.verb not in (*staging_tables.VERBS, "overlap", "backend", "checkpoints")
    ]
    parts = ["Measured with:", _origin(everything)]
    parts += _verbs(records) if records else []
    sections = overlap_tables.section(everything), backend_tables.section(everything, _picture)
    staging = *staging_tables.section(everything, _picture), *checkpoint_tables.section(everything)
    return "\n\n".join([*parts, *sections[0], *sections[1], *staging])


def _verbs(records: Sequence[Record]) -> list[str]:
    """Format the part on all verbs that are compared with preallocated mpi4py."""
    parts = ["### Targets", target_table(records)]
    parts += ["### Ratios", "Paired ratio to preallocated mpi4py (its own row: time); under 1 is faster."]
    for mpi in dict.fromkeys(record.mpi for record in records):
        parts.append(f"#### {mpi}")
        mine = [record for record in records if record.mpi == mpi]
        parts += [_embed(mine[0], name) for name in ("ragged-concat", "concat-time", "node-memory")]
        for verb in dict.fromkeys(record.verb for record in mine):
            of_verb = [record for record in mine if record.verb == verb]
            for what in dict.fromkeys(case.what for case in of_verb[0].cases):
                parts += [_picture(of_verb[0], what), *(ratio_table(record, what) for record in of_verb)]
    peaks = [peak_table(record) for record in records if record.peaks or record.no_peaks]
    skipped = dict.fromkeys(_left_out(r, c, t) for r in records for c in r.cases for t in c.timings if t.skipped)
    parts += ["### Peak memory", *peaks] if peaks else []
    nodes = [node_table(record) for record in records if record.nodes]
    parts += ["### Memory of a node", *nodes] if nodes else []
    parts += ["### Skipped", "\n".join(f"- {line}" for line in skipped)] if skipped else []
    return [part for part in parts if part]


def _picture(record: Record, what: str = "") -> str:
    """Embed the plot of the record's MPI and verb in README.md, if it exists."""
    return _embed(record, f"{record.verb}-{what}" if what else record.verb)


def _embed(record: Record, name: str) -> str:
    path = FOLDER / f"{record.name.split('-np')[0]}-{name}.svg"
    return f"![{name}, {record.mpi}](results/{path.name})" if path.exists() else ""


def tables(records: Sequence[Record]) -> str:
    """Format results/tables.md: every case of every record in full."""
    parts = ["# All measurements", "Written by report.py; the words are defined in ../README.md."]
    for record in records:
        parts += [f"## {record.verb}, np {record.world_size}, {record.mpi}", _origin([record])]
        show = staging_tables.case_table if record.verb == "staging" else case_table
        parts += [show(record, case) for case in record.cases]
        parts += [staging_tables.resident_line(record, record.resident)] if record.resident else []
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--show", action="store_true", help="print everything without writing files")
    parser.add_argument(
        "folder",
        type=Path,
        nargs="?",
        default=FOLDER,
        help="with the JSON files; README.md contains benchmarks/results",
    )
    asked = parser.parse_args()
    records = results.load_all(asked.folder)
    if not records:
        raise SystemExit(f"no JSON files in {asked.folder}: run benchmarks/all.py first")
    if asked.show:
        print(block(records), tables(records), sep="\n\n")
        return
    (asked.folder / "tables.md").write_text(tables(records))
    if asked.folder.resolve() != FOLDER.resolve():
        return
    text = README.read_text()
    before, after = text[: text.index(START) + len(START)], text[text.index(END) :]
    README.write_text(f"{before}\n\n{block(records)}\n\n{after}")


if __name__ == "__main__":
    main()
