"""Write the tables from the JSON files: those of README.md, results/summary.md, results/tables.md.

python benchmarks/report.py [FOLDER]
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import results
from results import (
    BASELINE,
    BY_HAND,
    DTENSOR,
    FOLDER,
    HPCDIST,
    HPCDIST_NEW,
    HPCDIST_OUT,
    HPCDIST_SHARED,
    KINDS,
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
SHARED_FILE = ("POSIX", "MPI-IO, Write_at_all", "MPI-IO, Read_at_all", results.PLAIN_H5PY, "h5py, independent")
Measure = Callable[[Record], Spread | None]


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


# The measured figures that the pages show, and their targets


class Target(NamedTuple):
    """A figure, and the limit that it was to meet; `measure` returns None if a record does not have it."""

    topic: str
    what: str
    verb: str
    limit: float
    measure: Measure
    world_sizes: tuple[int, ...] = (2, 4)
    at_most: bool = False
    unit: str = ""
    headline: bool = False

    def met(self, found: Spread) -> bool:
        return found.median <= self.limit if self.at_most else found.median >= self.limit


def times(ours: str, others: Sequence[str], size: int | None, skew: str = "even", what: str = "") -> Measure:
    """Measure how many times faster ours is than the fastest of the others, at a size, or at the least of all sizes."""

    def measure(record: Record) -> Spread | None:
        name = ours.format(writer=record.versions.get(results.WRITER))
        cases = [c for c in record.cases if (c.skew, c.what) == (skew, what) and size in (None, c.size)]
        return min((found for case in cases if (found := faster(case, name, others))), default=None)

    return measure


def over_raw(name: str) -> Measure:
    """Measure the microseconds that a call of 8 bytes a rank takes more than the baseline."""

    def measure(record: Record) -> Spread | None:
        case = record.case(8, "even")
        found = None if case is None else results.difference(case, name)
        return None if found is None else Spread(*(value * 1e6 for value in found))

    return measure


def of_result(kind: str, name: str) -> Measure:
    """Measure memory relative to the result: "peaks" or "nodes" of a record."""

    def measure(record: Record) -> Spread | None:
        found: list[Peak] = [peak for peak in getattr(record, kind) if peak.name == name]
        return alike(found[0].extra / found[0].result) if found else None

    return measure


def slower_than_a_route(record: Record) -> Spread | None:
    """Count the cases in which the plain call takes over 5% and over 20 us longer than with a route named.

    By the lower quartiles: the median of what differs in nothing but noise is above 5% now and then.
    """
    count, seen = 0, False
    for case, name in product(record.cases, results.ROUTES.values()):
        ratio, difference = (f(case, HPCDIST_NEW, name) for f in (results.ratio, results.difference))
        if ratio is not None and difference is not None:
            seen = True
            count += ratio.low > 1.05 and difference.low > 20e-6
    return alike(count) if seen else None


def slower_than_gloo(record: Record) -> Spread:
    """Count the cases that are slower than gloo by the upper quartile."""
    return alike(sum(ratio.high < 1 for _, ratio in by_gloo([record])))


def resident(record: Record) -> Spread | None:
    return alike(max(record.resident.ranks) / _MIB) if record.resident else None


def by_gloo(records: Iterable[Record]) -> list[tuple[Case, Spread]]:
    """Return how many times faster than gloo backend "mpi" is, in each case in which both were timed."""
    cases = [case for record in records if record.verb == "backend" for case in record.cases]
    return [(case, ratio) for case in cases if (ratio := results.ratio(case, results.GLOO_GROUP, results.MPI_GROUP))]


def targets() -> Iterator[Target]:
    padded, new = (results.GLOO_PADDED,), (results.MPI4PY_NEW,)
    for verb in ("concat", "gather"):
        as_raw, skewed = times(HPCDIST_OUT, (BASELINE,), _LARGE), times(HPCDIST_OUT, padded, _LARGE, "16:1")
        yield Target("verbs", f"{verb} with out=, 64 MiB: mpi4py, preallocated", verb, 1 / 1.05, as_raw, headline=True)
        yield Target("verbs", f"{verb} with out=, 64 MiB, 16:1: gloo, padded", verb, 8, skewed, headline=True)
    for np, limit in ((2, 2), (4, 4)):
        shared = times(HPCDIST_SHARED, (BASELINE,), _LARGE)
        yield Target(
            "verbs", "concat, shared=True, 64 MiB: mpi4py, preallocated", "concat", limit, shared, (np,), headline=True
        )
    for verb, limit, size in product(("concat", "gather", "split"), (1.0,), (8, 128)):
        limit = 1 / 1.2 if verb == "split" else limit
        what = f"{verb}, {size} B: mpi4py, counts exchanged"
        yield Target("verbs", what, verb, limit, times(HPCDIST_NEW, new, size), headline=size == 8)
    for verb, size in product(("concat", "gather", "split"), (16, 64)):
        of_out = times(HPCDIST_NEW, (HPCDIST_OUT,), size * _MIB)
        yield Target("verbs", f"{verb}, {size} MiB: the same with out=", verb, 1 / 1.1, of_out)
    for kind, words in KINDS.items():
        ranks = (4,) if kind == "tiles" else (2, 4)
        best = times(results.PLAN_OUT, BY_HAND, _LARGE, kind)
        yield Target(
            "redistribute",
            f"plan with out=, {words}, 64 MiB: the best by hand",
            "redistribute",
            0.95,
            best,
            ranks,
            headline=True,
        )
        for np in ranks if kind != "ragged" else ():
            dtensor = times(HPCDIST_NEW, (DTENSOR,), _LARGE, kind)
            yield Target(
                "redistribute",
                f"{words}, 64 MiB: {DTENSOR}",
                "redistribute",
                {2: 1.5, 4: 2.5}[np],
                dtensor,
                (np,),
                headline=True,
            )
        for size in (16, 64):
            of_out = times(HPCDIST_NEW, (HPCDIST_OUT,), size * _MIB, kind)
            what = f"{words}, {size} MiB: the same with out="
            yield Target("redistribute", what, "redistribute", 1 / 1.1, of_out, ranks)
    one_by_one = times(HPCDIST_NEW, (results.GLOO_ONE_BY_ONE,), None, "small", "send")
    objects = times(HPCDIST_NEW, (results.GLOO_OBJECT,), _LARGE, "many", "gather")
    for what, limit, found in (
        ("send, 1,000 small tensors: gloo, one by one", 20, one_by_one),
        ("send, 1,000 small tensors: the best by hand", 0, times(HPCDIST_NEW, (), None, "small", "send")),
        ("send, 10 tensors of 8 MiB: the best by hand", 0, times(HPCDIST_NEW, (), None, "large", "send")),
        ("concat of 16 tensors, 64 MiB: gloo, all_gather_object", 5, objects),
        ("concat of 16 tensors, 64 MiB: the best by hand", 0, times(HPCDIST_NEW, (), _LARGE, "many", "gather")),
    ):
        yield Target("structures", what, "structures", limit, found, headline=True)
    for what, size, limit in (
        ("all_reduce", 8, 20.0),
        ("all_reduce", _LARGE, 1.3),
        ("all_gather_single", 16 * _MIB, 5),
        ("DDP step, 1 million", None, 1.4),
        ("DDP step, 100 million", None, 1.4),
    ):
        found = times(results.MPI_GROUP, (results.GLOO_GROUP,), size, what=what)
        name = f"{what}, {show_size(size)}: gloo" if size else f"{what} of parameters: gloo"
        yield Target("backend", name, "backend", limit, found, headline=True)
    yield from _files()
    for what, ours, other, limit in (
        ("save", results.DCP_WRITER, results.DCP_FOLDER, 1.4),
        ("save", results.SAVE_H5, results.DCP_FOLDER, 1.4),
        ("save", results.SAVE_SAFETENSORS, results.DCP_CONSOLIDATED, 3),
        (results.ELSEWHERE, results.DCP_READER, results.DCP_FOLDER, 2),
        (results.ELSEWHERE, results.LOAD_H5, results.DCP_FOLDER, 2),
    ):
        found = times(ours, (other,), None, what=what)
        yield Target("checkpoints", f"{what}, {ours}: {other}", "checkpoints", limit, found, (2,), headline=True)
    yield from _amounts()


def _files() -> Iterator[Target]:
    """Iterate over the targets of staging; they hold at every size."""
    ours = "hpcdist, writer {writer}"
    best_load = ("POSIX", results.PLAIN_H5PY, results.H5PY_ALONE, results.SAFETENSORS)
    for layout, dim, limit in (("even", "dim 0", 0.85), ("ragged", "dim 0, ragged", 0.85), ("dim1", "dim 1", 0.5)):
        for what, name, others, least, shown in (
            ("save", ours, ("POSIX",), limit, True),
            ("save", ours, SHARED_FILE, 0 if layout == "dim1" else 0.95, False),
            ("save", ours, (results.PLAIN_H5PY,), 0 if layout == "dim1" else 5, layout == "even"),
            ("load", HPCDIST, ("POSIX",), limit, True),
            ("load", HPCDIST, best_load, 1, True),
        ):
            other = "the best" if len(others) > 1 else others[0]
            found = times(name, others, None, layout, what)
            yield Target(
                "staging", f"{what}, {dim}, 64 MiB: {other}", "staging", least, found, (1, 2, 4), headline=shown
            )
    for what, name, other in (("save", ours, results.UNCHECKED), ("load", HPCDIST, results.UNVERIFIED)):
        found = times(name, (other,), None, "even", what)
        yield Target(
            "staging", f"{what}, dim 0, 64 MiB: the same without checksums", "staging", 1 / 1.15, found, (1, 2, 4)
        )


def _amounts() -> Iterator[Target]:
    """Iterate over the targets that are no ratio of times."""
    for verb, name, limit in (
        ("concat", HPCDIST_OUT, 25),
        *((verb, results.PLAN_OUT, 10) for verb in ("concat", "gather", "split")),
    ):
        what = f"{name.replace('hpcdist', verb)}, 8 B: more than mpi4py, preallocated"
        yield Target("amounts", what, verb, limit, over_raw(name), (2,), True, "us", True)
    # 0.005: the error of the kernel's counters
    peak, node = of_result("peaks", HPCDIST_NEW), of_result("nodes", HPCDIST_SHARED)
    yield Target("amounts", "concat: peak extra memory of a rank, by the result", "concat", 1.005, peak, (2, 4), True)
    yield Target(
        "amounts",
        "concat, shared=True: memory of a node, by the result",
        "ranks",
        1.05,
        node,
        (2, 4, 8),
        True,
        headline=True,
    )
    yield Target(
        "amounts",
        "gather command over 6 GiB: resident memory of a rank",
        "resident",
        400,
        resident,
        (2,),
        True,
        "MiB",
        True,
    )
    for verb in ("concat", "gather", "split", "redistribute"):
        what = f"{verb}: cases in which a named route is faster by 5% and 20 us, by lower quartiles"
        yield Target("amounts", what, verb, 0, slower_than_a_route, (2, 4), True)
    yield Target("amounts", "torch.distributed: cases slower than gloo", "backend", 0, slower_than_gloo, (2, 4), True)


def target_table(records: Sequence[Record], topic: str, headlines: bool) -> str:
    """Format the figures of a topic: a row for each, a column for each MPI and number of ranks; a miss in bold."""
    chosen = [t for t in targets() if t.topic == topic and (t.headline or not headlines)]
    runs = {(r.mpi, r.world_size): None for r in records if r.verb in {t.verb for t in chosen}}
    columns = [(mpi, np) for mpi, np in runs if any(np in t.world_sizes for t in chosen)]
    rows: dict[str, dict[tuple[str, int], str]] = {}
    limits: dict[str, list[str]] = {}
    for target in chosen:
        cells, sign = rows.setdefault(target.what, {}), "<=" if target.at_most else ">="
        limits.setdefault(target.what, []).append(
            f"{sign} {figure(target.limit)}" if target.limit or sign == "<=" else "-"
        )
        for record in records:
            key = record.mpi, record.world_size
            if record.verb != target.verb or record.world_size not in target.world_sizes:
                continue
            found = target.measure(record)
            if found is not None:
                text = " ".join(filter(None, (figure(found.median), target.unit)))
                text = text if target.met(found) else f"**{text}**"
                cells[key] = text if found.low == found.high else f"{text} ({span(found)})"
    head = ["", "target", *(f"{mpi.rsplit(' ', 1)[0]}, np {np}" for mpi, np in columns)]
    return table(
        head,
        [
            [what, ", ".join(dict.fromkeys(limits[what])), *(cells.get(c, "-") for c in columns)]
            for what, cells in rows.items()
            if cells
        ],
    )


# The heat map


def cell_text(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2f}"


class Row(NamedTuple):
    """A row of the heat map: an operation, and ours, in the cases of a skew and kind."""

    label: str
    verb: str
    skew: str
    ours: str = HPCDIST_NEW
    what: str = ""


SIZES = (8, 128, 2**16, _MIB, 16 * _MIB, _LARGE)
LISTS = "list"  # the column of lists, whose sizes are in the rows' names
HEAT = [
    Row("concat", "concat", "even"),
    Row("concat, 16:1", "concat", "16:1"),
    Row("concat, shared", "concat", "even", HPCDIST_SHARED),
    Row("gather", "gather", "even"),
    Row("gather, 16:1", "gather", "16:1"),
    Row("split", "split", "even"),
    Row("split, 16:1", "split", "16:1"),
    *(
        Row(words.replace("ragged rows to even rows", "ragged to even"), "redistribute", k)
        for k, words in KINDS.items()
    ),
    Row("send 1,000 (188 KiB)", "structures", "small", what="send"),
    Row("send 10 (80 MiB)", "structures", "large", what="send"),
    Row("concat 16 (64 MiB)", "structures", "many", what="gather"),
    Row("save, dim 0", "staging", "even", "hpcdist, writer {writer}", "save"),
    Row("save, dim 1", "staging", "dim1", "hpcdist, writer {writer}", "save"),
    Row("load, dim 0", "staging", "even", HPCDIST, "load"),
    Row("load, dim 1", "staging", "dim1", HPCDIST, "load"),
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


def _share(cells: Sequence[Spread]) -> str:
    return f"{sum(cell.median > 1 for cell in cells)} of {len(cells)}"


def where(records: Sequence[Record]) -> str:
    """Say where hpcdist is faster, and where it is slower, in two sentences."""
    cells = [(key, cell) for mpi, np in product(mpis(records), RANKS) for key, cell in heat(records, mpi, np).items()]

    def some(choose: Callable[[str, int | str], bool]) -> list[Spread]:
        return [cell for key, cell in cells if choose(*key)]

    concat = some(lambda row, size: row == "concat, shared" and size in SIZES[-2:])
    large = some(lambda row, size: row in ("concat", "concat, 16:1") and size in SIZES[-2:])
    small = some(lambda _, size: size in SIZES[:3])
    fast = [cell_text(pick(c.median for c in concat)) for pick in (min, max)]
    slow = [cell_text(pick(c.median for c in small)) for pick in (min, max)]
    return (
        f"- **Faster:** {_share([cell for _, cell in cells])} cells are above 1. `concat` with `shared=True` of 16 MiB "
        f"or more is {fast[0]} to {fast[1]} times as fast, and plain `concat` of these sizes is faster in "
        f"{_share(large)} cells.\n"
        f"- **Slower:** all cells of 8 B to 64 KiB are between {slow[0]} and {slow[1]}. A call of hpcdist first "
        f"compares arguments and sizes between the ranks, and the best hand-written way knows them.\n"
        f"- **Never measured:** several nodes, InfiniBand, several GPUs, Lustre or another parallel file system, "
        f"and more than 8 ranks."
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
    "overlap": ("Overlap", ("overlap",)),
    "backend": ("torch.distributed", ("backend",)),
    "staging": ("save and load", ("staging",)),
    "checkpoints": ("Checkpoints", ("checkpoints",)),
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
        if any(t.topic == topic for t in targets()):
            parts += [
                "Times faster than what follows the colon, the quartiles in brackets; bold: the target is missed."
            ]
            parts += [target_table(records, topic, False)]
        mine = [record for record in records if record.verb in verbs and record.cases]
        for mpi in mpis(mine):
            parts.append(f"### {title}, {mpi}")
            for record in (record for record in mine if record.mpi == mpi):
                whats = dict.fromkeys(case.what for case in record.cases)
                wide = record.verb in ("backend", "overlap")
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
