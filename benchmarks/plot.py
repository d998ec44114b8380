"""Draws results/<mpi>-<verb>.svg out of the JSON files: the ratio of every contender to preallocated mpi4py.

python benchmarks/plot.py [FOLDER]; needs matplotlib (pip install -e .[bench]).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import results
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from results import BASELINE, CONTROL, FOLDER, Record

mpl.use("Agg")
mpl.rcParams["svg.hashsalt"] = "hpcdist"  # the same figures give the same file
mpl.rcParams["svg.fonttype"] = "none"  # text stays text: a third of the size

_BAR = 0.8  # of the height of a contender's row, shared by its bars
_COLOURS = plt.get_cmap("viridis")


def draw(records: Sequence[Record], path: Path) -> None:
    """A panel for each number of ranks and skew, a row for each contender, a bar for each size.

    Bars start at 1 (as fast as preallocated mpi4py) on a log scale: to the left is faster, to the right slower. The
    line on a bar spans the quartiles.
    """
    skews = list(dict.fromkeys(case.skew for record in records for case in record.cases))
    names = [t.name for t in records[0].cases[0].timings if t.name not in (BASELINE, CONTROL)]
    rows, columns = len(records), len(skews)
    size = (5 + 3.5 * columns, 1.2 + rows * 0.45 * len(names))
    figure, panels = plt.subplots(rows, columns, figsize=size, sharex=True, sharey=True, squeeze=False)
    for line, record in zip(panels, records, strict=True):
        for panel, skew in zip(line, skews, strict=True):
            _panel(panel, record, skew, names)
    first = records[0]
    figure.suptitle(f"{first.verb} on {first.mpi}: time as a multiple of preallocated mpi4py (less is faster)")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(labels), title="bytes a rank", frameon=False)
    figure.tight_layout(rect=(0, 0.09 if rows == 1 else 0.055, 1, 1))
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def _panel(panel: Axes, record: Record, skew: str, names: Sequence[str]) -> None:
    cases = [case for case in record.cases if case.skew == skew]
    height = _BAR / len(cases)
    for number, case in enumerate(cases):
        colour = _COLOURS(0.9 * number / max(1, len(cases) - 1))
        for row, name in enumerate(names):
            at = row + (number - (len(cases) - 1) / 2) * height
            ratio = results.ratio(case, name)
            if ratio is None:
                panel.text(1.05, at, "skipped", va="center", fontsize=6)
                continue
            label = results.show_size(case.size) if row == 0 else None
            panel.barh(at, ratio.median - 1, height, left=1, color=colour, label=label)
            panel.hlines(at, ratio.low, ratio.high, color="black", linewidth=0.8)
    panel.set_xscale("log")
    panel.axvline(1, color="black", linewidth=0.8)
    panel.grid(axis="x", alpha=0.3)
    panel.set_axisbelow(True)
    panel.set_yticks(range(len(names)), names)
    for tick in panel.get_yticklabels():
        tick.set_fontweight("bold" if tick.get_text().startswith("hpcdist") else "normal")
    panel.set_ylim(len(names) - 0.5, -0.5)
    panel.set_title(f"np {record.world_size}, {'even' if skew == 'even' else f'{skew} (rank 0 holds the most)'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER, help="of the JSON files (benchmarks/results)")
    parser.add_argument("--format", choices=("svg", "png"), default="svg")
    asked = parser.parse_args()
    pictures: dict[str, list[Record]] = {}
    for record in results.load_all(asked.folder):
        pictures.setdefault(f"{record.name.split('-np')[0]}-{record.verb}", []).append(record)
    for name, records in pictures.items():
        path = asked.folder / f"{name}.{asked.format}"
        draw(sorted(records, key=lambda record: record.world_size), path)
        print(path)


if __name__ == "__main__":
    main()
