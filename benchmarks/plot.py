"""Plot results/<mpi>-<verb>.svg from the JSON files: ratios to preallocated mpi4py; for staging, rates;
and those of pictures.py.

python benchmarks/plot.py [FOLDER]; needs matplotlib (pip install -e .[bench]).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl
import pictures
import results
import staging_tables
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from results import BASELINE, CONTROL, FOLDER, KINDS, STRUCTURES, Record

mpl.use("Agg")
mpl.rcParams["svg.hashsalt"] = "hpcdist"  # the same data give the same file
mpl.rcParams["svg.fonttype"] = "none"  # keep text as text: a third of the size

_BAR = 0.8  # of the height of a contender's row, shared by its bars
Colour = tuple[float, float, float, float]
_COLOURS = plt.get_cmap("viridis")


def draw(records: Sequence[Record], path: Path) -> None:
    """Plot a panel for each number of ranks and skew, a row for each contender, a bar for each size.

    Bars start at 1 (as fast as preallocated mpi4py) on a log scale: left is faster, right is slower. The
    line on a bar spans the quartiles.
    """
    skews = list(dict.fromkeys(case.skew for record in records for case in record.cases))
    sizes = sorted({case.size for record in records for case in record.cases})
    colours = {size: _COLOURS(0.9 * i / max(1, len(sizes) - 1)) for i, size in enumerate(sizes)}
    names = [t.name for t in records[0].cases[0].timings if t.name not in (BASELINE, CONTROL)]
    rows, columns = len(records), len(skews)
    inches = (5 + 3.5 * columns, 1.2 + rows * 0.45 * len(names))
    figure, panels = plt.subplots(rows, columns, figsize=inches, sharex=True, sharey=True, squeeze=False)
    for line, record in zip(panels, records, strict=True):
        for panel, skew in zip(line, skews, strict=True):
            _panel(panel, record, skew, names, colours)
    first = records[0]
    figure.suptitle(f"{first.verb} on {first.mpi}: time as a multiple of preallocated mpi4py (less is faster)")
    keys = [Patch(color=colour, label=results.show_size(size)) for size, colour in colours.items()]
    figure.legend(handles=keys, loc="lower center", ncols=len(keys), title="bytes a rank", frameon=False)
    figure.tight_layout(rect=(0, 0.09 if rows == 1 else 0.055, 1, 1))
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def _panel(panel: Axes, record: Record, skew: str, names: Sequence[str], colours: Mapping[int, Colour]) -> None:
    sizes = sorted({case.size for case in record.cases if case.skew == skew}) or list(colours)
    what = record.cases[0].what
    height = _BAR / len(sizes)
    for number, size in enumerate(sizes):
        case, colour = record.case(size, skew, what), colours[size]
        for row, name in enumerate(names):
            at = row + (number - (len(sizes) - 1) / 2) * height
            ratio = None if case is None else results.ratio(case, name)
            if ratio is None:
                panel.text(1.05, at, "skipped" if case else "not measured", va="center", fontsize=6)
                continue
            panel.barh(at, ratio.median - 1, height, left=1, color=colour)
            panel.hlines(at, ratio.low, ratio.high, color="black", linewidth=0.8)
    panel.set_xscale("log")
    panel.axvline(1, color="black", linewidth=0.8)
    _rows(panel, names)
    panel.set_title(f"np {record.world_size}, {_skew(skew)}")


def _skew(skew: str) -> str:
    """Describe the data of a panel."""
    words = {**KINDS, **STRUCTURES, "even": "even"}
    return words.get(skew, f"{skew} (rank 0 holds the most)")


def _rows(panel: Axes, names: Sequence[str]) -> None:
    """Label a row for each contender, from the top; hpcdist in bold."""
    panel.grid(axis="x", alpha=0.3)
    panel.set_axisbelow(True)
    panel.set_yticks(range(len(names)), names)
    for tick in panel.get_yticklabels():
        tick.set_fontweight("bold" if tick.get_text().startswith("hpcdist") else "normal")
    panel.set_ylim(len(names) - 0.5, -0.5)


def draw_rates(records: Sequence[Record], path: Path) -> None:
    """Plot staging at the largest size that all records have: panels for save and load at each number of ranks.

    A row for each contender, a bar for each layout. The line on a bar spans the quartiles.
    """
    common = set.intersection(*({case.size for case in record.cases} for record in records))
    size = max(common or (case.size for record in records for case in record.cases))
    layouts = [case.skew for case in records[0].cases if (case.what, case.size) == ("save", size)]
    colours = {layout: _COLOURS(0.45 * i) for i, layout in enumerate(layouts)}
    rows, inches = len(records), (14, 1.5 + 4 * len(records))
    figure, panels = plt.subplots(rows, 2, figsize=inches, sharex="col", sharey="col", squeeze=False)
    for line, record in zip(panels, records, strict=True):
        for panel, what in zip(line, ("save", "load"), strict=True):
            _rates(panel, record, size, what, colours)
    title = (
        f"staging on {records[0].mpi}: GB/s of all ranks together, {results.show_size(size)} a rank (more is faster)"
    )
    figure.suptitle(title)
    keys = [Patch(color=colour, label=staging_tables.LAYOUTS[layout]) for layout, colour in colours.items()]
    figure.legend(handles=keys, loc="lower center", ncols=len(keys), frameon=False)
    figure.tight_layout(rect=(0, 0.35 / inches[1], 1, 1))
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def _rates(panel: Axes, record: Record, size: int, what: str, colours: Mapping[str, Colour]) -> None:
    height = _BAR / len(colours)
    cases = {layout: record.case(size, layout, what) for layout in colours}
    names = next(([t.name for t in case.timings if t.name != CONTROL] for case in cases.values() if case), [])
    for number, (layout, colour) in enumerate(colours.items()):
        case = cases[layout]
        for row, name in enumerate(names):
            at = row + (number - (len(colours) - 1) / 2) * height
            timing = None if case is None else case.timing(name)
            if case is None or timing is None:
                panel.text(0, at, " left out" if case else " not measured", va="center", fontsize=6)
                continue
            time, gigabytes = timing.seconds, sum(case.nbytes) / 1e9
            panel.barh(at, gigabytes / time.median, height, color=colour)
            panel.hlines(at, gigabytes / time.high, gigabytes / time.low, color="black", linewidth=0.8)
    _rows(panel, names)
    panel.set_title(f"{what}, np {record.world_size}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER, help="with the JSON files (benchmarks/results)")
    parser.add_argument("--format", choices=("svg", "png"), default="svg")
    asked = parser.parse_args()
    by_verb: dict[str, list[Record]] = {}
    everything = results.load_all(asked.folder)
    print(*pictures.draw_all(everything, asked.folder, asked.format), sep="\n")
    for record in everything:
        if not record.cases or record.verb in ("overlap", "ranks", "backend"):
            continue
        name = f"{record.name.split('-np')[0]}-{record.verb}"
        if record.verb == "staging":
            by_verb.setdefault(name, []).append(record)
            continue
        for what in dict.fromkeys(case.what for case in record.cases):
            part = replace(record, cases=[case for case in record.cases if case.what == what])
            by_verb.setdefault(f"{name}-{what}" if what else name, []).append(part)
    for name, records in by_verb.items():
        path = asked.folder / f"{name}.{asked.format}"
        render = draw_rates if records[0].verb == "staging" else draw
        render(sorted(records, key=lambda record: record.world_size), path)
        print(path)


if __name__ == "__main__":
    main()
