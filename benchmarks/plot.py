"""Draw the pictures from the JSON files: results/<mpi>-<name>.svg. python benchmarks/plot.py [FOLDER]

Each is 380 pixels wide with text of 11 to 13 pixels, so that a phone shows it as it is, on its own light ground.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import median

import report
import results
from results import BASELINE, FOLDER, HPCDIST_NEW, HPCDIST_SHARED, MPI4PY_NEW, Record, Spread, alike, show_size

WIDTH = 380
OURS, OTHERS, SLOW = "#1f5fa8", "#8a8a8a", "#c8641e"
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#222}.t{font-weight:600;font-size:13px}"
    ".s{font-size:11px}.o{font-weight:600}"
)
WAYS = {
    results.GLOO_OBJECT: "torch all_gather_object",
    results.MPI4PY_PICKLE: "mpi4py allgather (pickle)",
    results.GLOO_BY_ROOT: "torch, send to rank 0, broadcast",
    results.GLOO_PADDED: "torch all_gather, padded",
    MPI4PY_NEW: "mpi4py: exchange counts, Allgatherv",
    BASELINE: "mpi4py Allgatherv, counts known, preallocated",
    HPCDIST_NEW: "hpcdist.concat(x)",
    HPCDIST_SHARED: "hpcdist.concat(x, shared=True)",
}
LINES = (results.GLOO_PADDED, MPI4PY_NEW, BASELINE, HPCDIST_NEW, HPCDIST_SHARED)
AGAIN = "from the copy, once more"
Cells = Mapping[tuple[str, int | str], Spread]
Points = list[tuple[int, Spread]]  # (place on the axis, value)


class Picture:
    """The parts of an SVG picture, from the top; `y` is where the next part begins."""

    def __init__(self, title: str, *lines: str) -> None:
        self.parts: list[str] = []
        self.title, self.y = title, 20.0
        self.text(10, self.y, title, "t")
        for line in lines:
            self.y += 15
            self.text(10, self.y, line, "s")
        self.y += 12

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start", fill: str = "") -> None:
        more = "".join(
            f' {key}="{value}"' for key, value in (("class", kind), ("style", fill and f"fill:{fill}")) if value
        )
        at = f'x="{x:.0f}" y="{y:.0f}"' + ("" if anchor == "start" else f' text-anchor="{anchor}"')
        self.parts.append(f"<text {at}{more}>{escape(text, quote=False)}</text>")

    def rect(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        self.parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}"/>')

    def line(self, points: Iterable[tuple[float, float]], colour: str, width: float = 1, dash: str = "") -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        more = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{more}/>')

    def svg(self) -> str:
        size = f'viewBox="0 0 {WIDTH} {self.y:.0f}" width="{WIDTH}" height="{self.y:.0f}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><title>{escape(self.title)}</title>'
        body = "\n".join(self.parts)
        return f'{head}<style>{STYLE}</style>\n<rect width="100%" height="100%" rx="6" fill="#fff"/>\n{body}\n</svg>\n'

    def heat(self, heading: str, rows: Sequence[str], columns: Sequence[int | str], cells: Cells) -> None:
        """A table of figures, blue above 1 and orange below; what was not measured stays empty."""
        left, height = 132, 19
        width = (WIDTH - left - 6) / len(columns)
        self.y += 12
        self.text(10, self.y, heading, "o")
        for number, column in enumerate(columns):
            name = column if isinstance(column, str) else show_size(column).replace(" ", "").replace("iB", "")
            self.text(left + (number + 0.5) * width, self.y, name, "s", "middle")
        self.y += 5
        for row in rows:
            self.text(10, self.y + 14, row)
            for number, column in enumerate(columns):
                if (row, column) in cells:
                    value = cells[row, column].median
                    fill, ink = shade(value)
                    self.rect(left + number * width, self.y, width - 1, height - 1, fill)
                    self.text(left + (number + 0.5) * width, self.y + 14, report.cell_text(value), "s", "middle", ink)
            self.y += height
        self.y += 6

    def bars(self, heading: str, values: Mapping[str, Spread], unit: str) -> None:
        """A bar for each value below its name, with a line over the quartiles; the fastest on top."""
        self.y += 4
        if heading:
            self.y += 10
            self.text(10, self.y, heading, "o")
        scale = (WIDTH - 100) / max(found.high for found in values.values())
        for name, found in sorted(values.items(), key=lambda pair: pair[1].median, reverse="/s" in unit):
            ours = "hpcdist" in name
            self.text(10, self.y + 14, name, "o" if ours else "")
            self.rect(10, self.y + 19, found.median * scale, 12, OURS if ours else OTHERS)
            self.line([(10 + found.low * scale, self.y + 25), (10 + found.high * scale, self.y + 25)], "#222", 1.5)
            self.text(16 + found.high * scale, self.y + 29, f"{report.figure(found.median)} {unit}")
            self.y += 34
        self.y += 6

    def lines(
        self, x: Sequence[str], series: Mapping[str, Points], below: str, unit: Callable[[float], str], log: bool
    ) -> None:
        """A line for each series, with the quartiles at each point, and the names below."""
        top, height, left, right = self.y + 4, 200, 52, WIDTH - 14
        values = [value for points in series.values() for _, found in points for value in found]
        low, high = (
            (10 ** math.floor(math.log10(min(values))), 10 ** math.ceil(math.log10(max(values))))
            if log
            else (0, max(values) * 1.1)
        )

        def at(place: int, value: float) -> tuple[float, float]:
            share = math.log(value / low) / math.log(high / low) if log else value / high
            return left + (right - left) * (place + 0.3) / (len(x) - 0.4), top + height * (1 - share)

        step = 10 ** math.floor(math.log10(high)) if high else 1
        ticks = (
            [low * 10**i for i in range(round(math.log10(high / low)) + 1)]
            if log
            else ([step * i for i in range(int(high / step) + 1)])
        )
        for tick in ticks:
            y = at(0, tick)[1]
            self.line([(left, y), (right, y)], "#ddd")
            self.text(left - 5, y + 4, unit(tick), "s", "end")
        for place, name in enumerate(x):
            self.text(at(place, low or 1)[0], top + height + 16, name, "s", "middle")
        self.text((left + right) / 2, top + height + 32, below, "s", "middle")
        self.y = top + height + 40
        for name, points in series.items():
            ours = "hpcdist" in name or "copy" in name
            colour = OURS if ours else OTHERS
            dash = (
                ""
                if name in (WAYS[HPCDIST_NEW], WAYS[BASELINE], AGAIN)
                else "6 3"
                if ours or name == WAYS[MPI4PY_NEW]
                else "2 3"
            )
            width = 2.5 if ours else 1.5
            self.line([at(place, found.median) for place, found in points], colour, width, dash)
            for place, found in points:
                self.line([at(place, found.low), at(place, found.high)], colour, 3)
            self.line([(10, self.y + 10), (44, self.y + 10)], colour, width, dash)
            self.text(50, self.y + 14, name, "o" if ours else "")
            self.y += 18
        self.y += 8


def shade(value: float) -> tuple[str, str]:
    """Return the colours of a cell and of its text: white near 1, full at 8 times, on a log scale."""
    share = min(1, abs(math.log(value, 8)))
    if 0.95 <= value <= 1.05:
        return "#e8e8e8", ""
    full = [int((OURS if value > 1 else SLOW)[i : i + 2], 16) for i in (1, 3, 5)]
    mixed = [round(255 + (part - 255) * (0.15 + 0.85 * share)) for part in full]
    return "#" + "".join(f"{part:02x}" for part in mixed), "#fff" if share > 0.55 else ""


def machine(records: Sequence[Record], more: str = "") -> str:
    cores = records[0].machine.split(",")[1].strip()
    return f"{more}one node, {cores}; {records[0].mpi}"


def time(seconds: float) -> str:
    """Format a power of ten: 1 us, 10 ms."""
    return f"{seconds * 1e6:g} us" if seconds < 1e-3 else f"{seconds * 1e3:g} ms" if seconds < 1 else f"{seconds:g} s"


def scaled(found: Spread, factor: float) -> Spread:
    return Spread(*(value * factor for value in found))


def heat(records: Sequence[Record], mpi: str) -> Picture | None:
    picture = Picture(
        "Best hand-written time divided by hpcdist's",
        "Above 1 (blue): hpcdist is faster. By bytes per rank.",
        machine(records),
    )
    for np in report.RANKS:
        cells = report.heat(records, mpi, np)
        rows = [row.label for row in report.HEAT if any(label == row.label for label, _ in cells)]
        picture.heat(f"{np} ranks", rows, [*report.SIZES, report.LISTS], cells)
    return picture


def backend(records: Sequence[Record], mpi: str) -> Picture | None:
    runs = [record for record in records if record.verb == "backend"]
    if not runs:
        return None
    picture = Picture(
        "torch.distributed: gloo's time divided by MPI's",
        "Above 1 (blue): MPI is faster. By bytes that a rank sends.",
        machine(runs),
    )
    for record in runs:
        cells = report.gloo_heat(records, mpi, record.world_size)
        short = {
            what: what.replace("_single", "").replace(", Shard(0) to Shard(1)", "").replace(" million", " M")
            for what, _ in cells
        }
        sizes = sorted({size for _, size in cells if not isinstance(size, str)})
        columns = [*sizes, "step"]
        named = {
            (short[what], "step" if size == report.LISTS else size): found for (what, size), found in cells.items()
        }
        picture.heat(f"{record.world_size} ranks", list(short.values()), columns, named)
    return picture


def ragged(records: Sequence[Record], mpi: str) -> Picture | None:
    """Ways to concatenate ragged shards, at the largest size."""
    record = next((r for r in records if r.verb == "concat"), None)  # of the fewest ranks
    case = max((c for c in record.cases if c.skew == "16:1"), key=lambda c: c.size, default=None) if record else None
    if record is None or case is None:
        return None
    most, least = show_size(max(case.nbytes)), show_size(min(case.nbytes))
    picture = Picture(
        "Concatenate tensors of different sizes, ms",
        f"{record.world_size} ranks on {machine([record])}",
        f"{most} on rank 0, {least} on the others; median, quartiles",
    )
    found = {label: scaled(t.seconds, 1e3) for name, label in WAYS.items() if (t := case.timing(name))}
    picture.bars("", found, "ms")
    return picture


def concat_time(records: Sequence[Record], mpi: str) -> Picture | None:
    record = next((r for r in records if r.verb == "concat"), None)
    cases = sorted((c for c in record.cases if c.skew == "even"), key=lambda c: c.size) if record else []
    if record is None or len(cases) < 3:
        return None
    picture = Picture("Time of a concat by size", f"{record.world_size} ranks on {machine([record])}; quartiles")
    series = {WAYS[n]: [(i, t.seconds) for i, c in enumerate(cases) if (t := c.timing(n))] for n in LINES}
    picture.lines([show_size(c.size) for c in cases], series, "bytes per rank", time, log=True)
    return picture


def ranks(records: Sequence[Record], mpi: str) -> Picture | None:
    """Time by number of ranks, at the largest size."""
    runs = [r for r in records if r.verb == "ranks" and r.cases]
    if len(runs) < 2:
        return None
    size = max(case.size for record in runs for case in record.cases)
    picture = Picture(
        f"Time of a concat of {show_size(size)} per rank",
        "up to more ranks than cores; median, quartiles",
        machine(runs),
    )
    series = {}
    for name in LINES:
        timings = [(i, case.timing(name)) for i, r in enumerate(runs) if (case := r.case(size, "even"))]
        series[WAYS[name]] = [(i, t.seconds) for i, t in timings if t]
    picture.lines([str(r.world_size) for r in runs], series, "ranks", time, log=True)
    return picture


def node_memory(records: Sequence[Record], mpi: str) -> Picture | None:
    runs = [r for r in records if r.nodes]
    if len(runs) < 2:
        return None
    picture = Picture(
        "Memory for the results of a concat",
        f"all ranks of {machine(runs)}",
        "divided by the result; one value each, so no spread",
    )
    series = {
        WAYS[name]: [(i, alike(n.extra / n.result)) for i, r in enumerate(runs) for n in r.nodes if n.name == name]
        for name in LINES
        if name != BASELINE
    }
    picture.lines([str(r.world_size) for r in runs], series, "ranks", lambda value: f"{value:g}", log=True)
    return picture


def staging(records: Sequence[Record], mpi: str) -> Picture | None:
    """Rates of save and load, in the first layout, at the largest size, by two ranks."""
    record = next((r for r in records if (r.verb, r.world_size) == ("staging", 2)), None)
    if record is None:
        return None
    size = max(case.size for case in record.cases)
    picture = Picture(
        "Save and load, GB/s (more is faster)",
        f"2 ranks on {machine([record])}",
        f"{show_size(size)} per rank, split along dim 0; median, quartiles",
    )
    for what in ("save", "load"):
        case = record.case(size, "even", what)
        if case:
            nbytes = sum(case.nbytes) / 1e9
            times = [(t.name, t.seconds) for t in case.timings if not t.skipped and t.name != results.CONTROL]
            rates = {name: Spread(nbytes / s.median, nbytes / s.high, nbytes / s.low) for name, s in times}
            picture.bars(what, rates, "GB/s")
    return picture


def data(records: Sequence[Record], mpi: str) -> Picture | None:
    """Rates of the data loader and of what people write, for samples of one size, by two ranks."""
    record = next((r for r in records if (r.verb, r.world_size) == ("data", 2) and r.cases), None)
    if record is None:
        return None
    layout = record.cases[0].skew
    picture = Picture(
        "Shuffled batches, 1,000 samples/s (more is faster)",
        f"2 ranks on {machine([record])}",
        f"{layout}, batches of 64 a rank; median, quartiles",
    )
    headings = {"cold": "cold files", "warm": "files in the page cache", "memory": "memory"}
    for case in (case for case in record.cases if case.skew == layout):
        times = [(t.name, t.seconds) for t in case.timings if not t.skipped and t.name != results.CONTROL]
        samples = 64 * record.world_size / 1e3
        rates = {name: Spread(samples / s.median, samples / s.high, samples / s.low) for name, s in times}
        picture.bars(headings[case.what], rates, "k/s")
    return picture


def stage_env(folder: Path) -> Picture | None:
    path = folder / "stage-env.json"
    if not path.exists():
        return None
    record = json.loads(path.read_text())
    first, staged, copy = "start from the shared folder", "stage_env", "start from the copy"
    picture = Picture(
        "Start Python from a slow folder, seconds", record["limits"], "2 hosts that share 2 cores; range of 3 starts"
    )
    series: dict[str, Points] = {}
    for name, steps in ((first, [first]), ("stage_env, then from the copy", [staged, copy]), (AGAIN, [copy])):
        found = [[sum(one[step][0] for step in steps) for one in rounds] for rounds in record["rounds"].values()]
        series[name] = [(i, Spread(median(each), min(each), max(each))) for i, each in enumerate(found)]
    picture.lines(list(record["rounds"]), series, "ranks", lambda value: f"{value:g} s", log=False)
    return picture


PICTURES: dict[str, Callable[[Sequence[Record], str], Picture | None]] = {
    "heat": heat,
    "ragged-concat": ragged,
    "concat-time": concat_time,
    "ranks": ranks,
    "node-memory": node_memory,
    "backend": backend,
    "staging": staging,
    "data": data,
}


def pictures(records: Sequence[Record], folder: Path = FOLDER) -> dict[Path, str]:
    """Return what this program draws; of what there is no record, nothing."""
    found = {folder / "stage-env.svg": stage_env(folder)}
    for mpi in report.mpis(records):
        mine = sorted((r for r in records if r.mpi == mpi), key=lambda record: record.world_size)
        prefix = mine[0].name.split("-np")[0]
        found |= {folder / f"{prefix}-{name}.svg": draw(mine, mpi) for name, draw in PICTURES.items()}
    return {path: picture.svg() for path, picture in found.items() if picture}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER, help="with the JSON files (benchmarks/results)")
    asked = parser.parse_args()
    for path, text in pictures(results.load_all(asked.folder), asked.folder).items():
        path.write_text(text)
        print(path)


if __name__ == "__main__":
    main()
