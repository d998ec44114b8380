"""Write the tables from the JSON files: those of README.md, results/summary.md, results/tables.md.

python benchmarks/report.py [FOLDER]
"""

from __future__ import annotations

import argparse
import csv
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import results
from results import (
    FOLDER,
    HPCDIST_NEW,
    HPCDIST_SHARED,
    KINDS,
    Amount,
    Case,
    Peak,
    Record,
    Spread,
    alike,
    faster,
    show_size,
)

README = Path(__file__).parent / "README.md"
_PART = re.compile(r"(<!-- results: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_MIB = 2**20
_LARGE = 64 * _MIB
Row = Mapping[str, str]  # of targets.csv


# Formats


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a markdown table; all columns but the first are aligned right."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]

    def show(line: Sequence[str]) -> str:
        cells = [cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(line, widths))]  # noqa: B905
        return "| " + " | ".join(cells) + " |"

    rule = "|" + "|".join("-" * (width + 1) + (":" if i else "-") for i, width in enumerate(widths)) + "|"
    return "\n".join([show(lines[0]), rule, *map(show, lines[1:])])


def figure(value: float) -> str:
    """Format a number with three significant digits, and with two decimals near 1, for ratios.

    Example::

        >>> figure(1.0234), figure(0.00123), figure(123.4)
        ('1.02', '0.00123', '123')
    """
    size = abs(value)
    if size >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}" if size >= 0.1 or size == 0 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Format a time with its unit.

    Example::

        >>> duration(0.00012), duration(0.0345)
        ('120 us', '34.5 ms')
    """
    return f"{figure(seconds * 1e6)} us" if seconds < 1e-3 else f"{figure(seconds * 1e3)} ms"


def span(found: Spread, scale: float = 1) -> str:
    return f"{figure(found.low * scale)} to {figure(found.high * scale)}"


# The measured figures that the pages show, and their targets: targets.csv


def times(record: Record, row: Row) -> Spread | None:
    """How many times faster ours is than the fastest of the others (of all by hand), at a size, or the least of all."""
    ours, others = row["ours"].format(writer=record.versions.get(results.WRITER)), row["others"].split("; ")
    cases = [c for c in record.cases if (c.skew, c.what) == (row["skew"], row["case"])]
    chosen = [case for case in cases if row["size"] in ("", show_size(case.size))]
    return min((found for case in chosen if (found := faster(case, ours, others if others[0] else ()))), default=None)


def over_raw(record: Record, row: Row) -> Spread | None:
    """The microseconds that a call of 8 bytes a rank takes more than the baseline."""
    case = record.case(8, "even")
    found = None if case is None else results.difference(case, row["ours"])
    return None if found is None else Spread(*(value * 1e6 for value in found))


def memory(record: Record, row: Row) -> Spread | None:
    """The peak of a rank, or the memory of a node, relative to the result."""
    peaks = {peak.name: peak.extra / peak.result for peak in (record.nodes or record.peaks)}
    return alike(peaks[row["ours"]]) if row["ours"] in peaks else None


def slower_than_a_route(record: Record, row: Row) -> Spread | None:
    """The number of cases in which the plain call takes over 5% and over 20 us longer than with a route named.

    By the lower quartiles: the median of what differs in nothing but noise is above 5% now and then.
    """
    found = []
    for case, name in product(record.cases, results.ROUTES.values()):
        ratio, difference = (of(case, HPCDIST_NEW, name) for of in (results.ratio, results.difference))
        if ratio is not None and difference is not None:
            found.append(ratio.low > 1.05 and difference.low > 20e-6)
    return alike(sum(found)) if found else None


def slower_than_gloo(record: Record, row: Row) -> Spread | None:
    """The number of cases that are slower than gloo by the upper quartile."""
    return alike(sum(ratio.high < 1 for _, ratio in by_gloo([record])))


def resident(record: Record, row: Row) -> Spread | None:
    return alike(max(record.resident.ranks) / _MIB) if record.resident else None


def amount(record: Record, row: Row) -> Spread | None:
    return next((found.spread for found in record.amounts if found.name == row["ours"]), None)


MEASURES = {f.__name__: f for f in (times, over_raw, memory, slower_than_a_route, slower_than_gloo, resident, amount)}


def by_gloo(records: Iterable[Record]) -> list[tuple[Case, Spread]]:
    """Return how many times faster than gloo backend "mpi" is, in each case in which both were timed."""
    cases = [case for record in records if record.verb == "backend" for case in record.cases]
    return [(case, ratio) for case in cases if (ratio := results.ratio(case, results.GLOO_GROUP, results.MPI_GROUP))]


def target_table(records: Sequence[Record], topic: str, headlines: bool) -> str:
    """Format the figures of a topic: a row for each, a column for each MPI and number of ranks; a miss in bold."""
    with (README.parent / "targets.csv").open(newline="") as file:
        chosen = [row for row in csv.DictReader(file) if row["topic"] == topic and (row["headline"] or not headlines)]
    rows: dict[str, dict[str, str]] = {}  # what -> column -> cell
    columns: dict[str, None] = {"": None, "target": None}
    for record, row in product(records, chosen):
        if record.verb != row["verb"] or str(record.world_size) not in row["ranks"].split():
            continue
        columns[column := f"{record.mpi.rsplit(' ', 1)[0]}, np {record.world_size}"] = None
        found = MEASURES[row["measure"]](record, row)
        if found is not None:
            sign, limit, unit = [*row["limit"].split(), "", "", ""][:3]
            met = not limit or (found.median <= float(limit) if sign == "<=" else found.median >= float(limit))
            target = f"{sign} {figure(float(limit))} {unit}".rstrip() if limit else "-"
            text = f"{figure(found.median)} {unit}".rstrip()
            cells = rows.setdefault(row["what"], {"": row["what"], "target": target})
            cells["target"] += "" if target in cells["target"] else f"; np {record.world_size}: {target}"
            cells[column] = (text if met else f"**{text}**") + ("" if found.low == found.high else f" ({span(found)})")
    order = dict.fromkeys(row["what"] for row in chosen if row["what"] in rows)
    return table(list(columns), [[rows[what].get(column, "-") for column in columns] for what in order])


# The heat map


def cell_text(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2f}"


class HeatRow(NamedTuple):
    """A row of the heat map: an operation, and ours, in the cases of a skew and kind."""

    label: str
    verb: str
    skew: str
    ours: str = HPCDIST_NEW
    what: str = ""


SIZES = (8, 128, 2**16, _MIB, 16 * _MIB, _LARGE)
SHARED = "concat, shared"  # the row of results that the ranks of a node share
LISTS = "list"  # the column of lists, whose sizes are in the rows' names
HEAT = [
    HeatRow("concat", "concat", "even"),
    HeatRow("concat, 16:1", "concat", "16:1"),
    HeatRow(SHARED, "concat", "even", HPCDIST_SHARED),
    HeatRow("gather", "gather", "even"),
    HeatRow("gather, 16:1", "gather", "16:1"),
    HeatRow("split", "split", "even"),
    HeatRow("split, 16:1", "split", "16:1"),
    *(
        HeatRow(words.replace("ragged rows to even rows", "ragged to even"), "redistribute", k)
        for k, words in KINDS.items()
    ),
    HeatRow("send 1,000 (188 KiB)", "structures", "small", what="send"),
    HeatRow("send 10 (80 MiB)", "structures", "large", what="send"),
    HeatRow("concat 16 (64 MiB)", "structures", "many", what="gather"),
    HeatRow("save, dim 0", "staging", "even", "hpcdist, writer {writer}", "save"),
    HeatRow("save, dim 1", "staging", "dim1", "hpcdist, writer {writer}", "save"),
    HeatRow("load, dim 0", "staging", "even", HPCDIST_NEW, "load"),
    HeatRow("load, dim 1", "staging", "dim1", HPCDIST_NEW, "load"),
]
RANKS = (2, 4)


def heat(records: Sequence[Record], mpi: str, np: int) -> dict[tuple[str, int | str], Spread]:
    """Return (row, size) -> time of the best hand-written way divided by ours."""
    found = {}
    for row, record in product(HEAT, records):
        if (record.verb, record.mpi, record.world_size) != (row.verb, mpi, np):
            continue
        for case in (c for c in record.cases if (c.skew, c.what) == (row.skew, row.what)):
            ratio = faster(case, row.ours.format(writer=record.versions.get(results.WRITER)))
            if ratio:
                found[row.label, LISTS if row.verb == "structures" else case.size] = ratio
    return found


def gloo_heat(records: Sequence[Record], mpi: str, np: int) -> dict[tuple[str, int | str], Spread]:
    """Return (collective, size) -> gloo's time divided by that of backend "mpi"; steps have no size."""
    mine = [r for r in records if (r.mpi, r.world_size) == (mpi, np)]
    return {(c.what, LISTS if "step" in c.what else c.size): ratio for c, ratio in by_gloo(mine)}


def mpis(records: Iterable[Record]) -> list[str]:
    return list(dict.fromkeys(record.mpi for record in records))


def cells(records: Sequence[Record]) -> list[tuple[str, int | str, Spread]]:
    """Return row, size and figure of all cells of the heat maps."""
    maps = product(mpis(records), RANKS)
    return [(*key, cell) for mpi, np in maps for key, cell in heat(records, mpi, np).items()]


def share(cells: Sequence[Spread]) -> str:
    return f"{sum(cell.median > 1 for cell in cells)} of {len(cells)}"


def _between(cells: Sequence[Spread]) -> str:
    return " and ".join(figure(pick(cell.median for cell in cells)) for pick in (min, max))


def _added(records: Sequence[Record], np: int) -> str:
    """Say by how much plain calls of 8 bytes take longer than the baseline, over verbs and MPIs."""
    mine = [r for r in records if r.world_size == np and r.verb in ("concat", "gather", "split")]
    more = [results.difference(case, HPCDIST_NEW) for record in mine if (case := record.case(8, "even"))]
    found = [1e6 * spread.median for spread in more if spread]
    return f"{min(found):.0f} to {max(found):.0f} us"


def where(records: Sequence[Record]) -> str:
    """Say where hpcdist is faster, and where it is slower."""
    every = cells(records)
    plain = [x for row, _, x in every if row != SHARED]
    shared = [x for row, _, x in every if row == SHARED]
    shared_large = [x for row, size, x in every if row == SHARED and size in SIZES[-2:]]
    large = [x for row, size, x in every if row in ("concat", "concat, 16:1") and size in SIZES[-2:]]
    return (
        f"- **Plain calls:** {share(plain)} cells are above 1, among them "
        f"{share(large)} cells of concats from 16 MiB on.\n"
        f"- **`shared=True`:** {share(shared)} cells are above 1. From 16 MiB on, all are between "
        f"{_between(shared_large)}. The hand-written ways keep one copy per rank.\n"
        f"- **Small calls:** all cells of 8 B to 64 KiB are between "
        f"{_between([x for _, size, x in every if size in SIZES[:3]])}. hpcdist first compares "
        f"arguments and sizes between the ranks; the best hand-written way knows them. For concat, gather and split of "
        f"8 B, hpcdist takes {_added(records, 2)} longer on 2 ranks. On 4 ranks that share 2 cores, it takes "
        f"{_added(records, 4)} longer.\n"
        f"- **Never measured:** several nodes, InfiniBand, several GPUs, Lustre or another parallel file system, "
        f"and calls on more than 8 ranks."
    )


# Tables of one record


def case_table(record: Record, case: Case) -> str:
    """Format all measurements of one case: times, bandwidth, paired ratio and difference to the baseline."""
    baseline = case.timings[0].name
    fastest = min(t.seconds.median for t in case.timings if not t.skipped)
    scale, unit = (1e6, "us") if fastest < 1e-3 else (1e3, "ms")
    rows = []
    for timing in case.timings:
        ratio, difference = (of(case, timing.name, baseline) for of in (results.ratio, results.difference))
        if ratio is None or difference is None:
            rows.append([timing.name, "skipped", *["-"] * 6])
            continue
        time, rate = timing.seconds, results.gigabytes_per_second(case, timing)
        row = [timing.name, figure(time.median * scale), span(time, scale), f"{rate:.3f}", figure(ratio.median)]
        rows.append([*row, span(ratio), figure(difference.median * scale), f"{timing.rounds} x {timing.calls}"])
    head = [
        f"{record.verb}, np {record.world_size}, {case.label}",
        unit,
        f"IQR, {unit}",
        "GB/s",
        "ratio",
        "IQR",
        f"over baseline, {unit}",
        "rounds x calls",
    ]
    return "\n\n".join([table(head, rows), *(f"{t.name}: skipped, {t.skipped}." for t in case.timings if t.skipped)])


def times_table(record: Record, what: str | None = None) -> str:
    """Summarise a run by median times: a row for each contender, a column for each case; or the other way round."""
    cases = [case for case in record.cases if what in (None, case.what)]
    names = [timing.name for timing in cases[0].timings]
    rows = [[(t and duration(t.seconds.median)) or "-" for t in map(case.timing, names)] for case in cases]
    labels = [case.label if what is None else case.label.removeprefix(f"{what}, ") for case in cases]
    title = ", ".join(filter(None, (record.verb, what, f"np {record.world_size}")))
    if what is None and record.cases[0].what:
        last = {"overlap": results.overlap}.get(record.verb, lambda case: faster(case, names[-1]))
        found = [f"{figure(s.median)} ({span(s)})" if (s := last(case)) else "-" for case in cases]
        head = [title, *names, "overlap" if record.verb == "overlap" else "times faster"]
        return table(head, [[label, *row, end] for label, row, end in zip(labels, rows, found, strict=True)])
    return table([title, *labels], [[name, *cells] for name, *cells in zip(names, *rows, strict=True)])


def memory_table(record: Record, kind: str) -> str:
    """Format peaks, or the memory of a node."""
    found: list[Peak] = getattr(record, kind)
    what = "peak extra memory" if kind == "peaks" else "memory of all ranks"
    head = [
        f"{record.verb}, np {record.world_size}: {what}, result {show_size(found[0].result)}",
        "MiB",
        "of the result",
    ]
    return table(head, [[p.name, f"{p.extra / _MIB:.1f}", f"{p.extra / p.result:.3f}"] for p in found])


def amounts_table(title: str, amounts: Sequence[Amount]) -> str:
    """Format figures that were measured in some rounds."""
    rows = [[a.name, figure(a.spread.median), span(a.spread), str(len(a.values))] for a in amounts]
    return table([title, "median", "IQR", "rounds"], rows)


def start_up(record: Mapping[str, Any] | None = None) -> str:
    """Format the start-up of Python from a slow folder and from copies; the default is stage-env.json."""
    rows = []
    record = record or json.loads((FOLDER / "stage-env.json").read_text())
    for ranks, rounds in record["rounds"].items():
        for name in rounds[0]:
            seconds, requests, nbytes = zip(*(found[name] for found in rounds), strict=True)
            cells = figure(median(seconds)), f"{figure(min(seconds))} to {figure(max(seconds))}"
            rows.append([f"{ranks} ranks: {name}", *cells, f"{median(requests):,.0f}", f"{median(nbytes) / _MIB:.1f}"])
    return table(["start-up", "s", "range", "requests", "MiB read"], rows)


# Pages


def origin(records: Sequence[Record]) -> str:
    """List the software and machines of the records, one line per combination."""
    lines: dict[str, list[str]] = {}
    for record in records:
        versions = ", ".join(f"{name} {version}" for name, version in record.versions.items() if name != "hpcdist")
        line = f"{record.mpi}, {versions}; {record.machine}; {record.date}"
        lines.setdefault(line, []).append(record.verb)
    return "\n".join(f"- {', '.join(dict.fromkeys(verbs))}: {line}." for line, verbs in lines.items())


TOPICS = {
    "verbs": ("concat, gather and split", ("concat", "gather", "split", "ranks")),
    "redistribute": ("redistribute", ("redistribute",)),
    "structures": ("Lists of tensors", ("structures",)),
    "exchanges": ("reduce_scatter and all_to_all", ("exchanges",)),
    "overlap": ("Overlap", ("overlap",)),
    "backend": ("torch.distributed", ("backend",)),
    "staging": ("save and load", ("staging",)),
    "checkpoints": ("Checkpoints", ("checkpoints",)),
    "data": ("The data loader", ("data", "data-hosts")),
    "amounts": ("Memory and small calls", ()),
}


def summary(records: Sequence[Record]) -> str:
    """Format results/summary.md: of each topic the targets, and the median times of all contenders."""
    parts = [
        "# All measured times",
        "`benchmarks/report.py` writes this page. The [benchmarks](../README.md) define the words. A cell is the "
        "median time of a call; `-` was skipped, and the reasons follow at the end.",
        "## Measured with",
        origin(records),
    ]
    for topic, (title, verbs) in TOPICS.items():
        parts.append(f"## {title}")
        if topic != "overlap":
            parts += [
                'Times faster than what follows "against", the quartiles in brackets; bold: the target is missed.'
            ]
            parts += [target_table(records, topic, False)]
        mine = [record for record in records if record.verb in verbs and (record.cases or record.amounts)]
        for mpi in mpis(mine):
            parts.append(f"### {title}, {mpi}")
            for record in (record for record in mine if record.mpi == mpi):
                whats = dict.fromkeys(case.what for case in record.cases)
                wide = record.verb in ("backend", "overlap")
                parts += [amounts_table(record.verb, record.amounts)] if record.amounts else []
                parts += [times_table(record)] if wide else [times_table(record, what) for what in whats]
                parts += [memory_table(record, kind) for kind in ("peaks", "nodes") if getattr(record, kind)]
    parts += ["## Start-up", start_up(), "## Skipped", skipped(records)]
    return "\n\n".join(parts) + "\n"


def skipped(records: Sequence[Record]) -> str:
    """List what was not timed, and why."""
    cases = [(f"{r.verb}, {r.mpi}, np {r.world_size}, {case.label}", case) for r in records for case in r.cases]
    return "\n".join(f"- {place}: {t.name}: {t.skipped}." for place, case in cases for t in case.timings if t.skipped)


def tables(records: Sequence[Record]) -> str:
    """Format results/tables.md: every case of every record in full."""
    parts = ["# All measurements", "Written by report.py; the words are defined in ../README.md."]
    for record in (record for record in records if record.cases):
        parts += [f"## {record.verb}, np {record.world_size}, {record.mpi}", origin([record])]
        parts += [case_table(record, case) for case in record.cases]
    return "\n\n".join(parts) + "\n"


def filled(text: str, records: Sequence[Record]) -> str:
    """Return a page with its generated parts: from `<!-- results: NAME -->` to `<!-- end -->`."""

    def part(found: re.Match[str]) -> str:
        topic = found[2]
        made = (
            where(records)
            if topic == "where"
            else start_up()
            if topic == "start-up"
            else table(*json.loads((FOLDER / f"{topic}.json").read_text()))
            if topic.startswith("model")
            else target_table(records, topic, True)
        )
        return f"{found[1]}\n{made}\n\n{found[3]}"

    return _PART.sub(part, text)


def pages(records: Sequence[Record]) -> dict[Path, str]:
    """Return what this program writes."""
    written = {FOLDER / "summary.md": summary(records), FOLDER / "tables.md": tables(records)}
    return written | {page: filled(page.read_text(), records) for page in (README, README.with_name("MEASUREMENTS.md"))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "folder", type=Path, nargs="?", default=FOLDER, help="with JSON files; of another folder, print"
    )
    asked = parser.parse_args()
    records = results.load_all(asked.folder)
    if not records:
        raise SystemExit(f"no JSON files in {asked.folder}: run benchmarks/all.py first")
    if asked.folder.resolve() != FOLDER.resolve():
        print(tables(records))
        return
    for path, text in pages(records).items():
        path.write_text(text)


if __name__ == "__main__":
    main()
