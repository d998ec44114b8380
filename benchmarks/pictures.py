"""Pictures for readers in a hurry, from the recorded results alone: one without its record is not drawn.

- <mpi>-ragged-concat: ways to write a ragged concat by hand, preallocated mpi4py among them, and hpcdist's, in
  milliseconds.
- <mpi>-concat-time: time of concat against size.
- <mpi>-node-memory: memory of all ranks of a node against their number.
- <mpi>-ranks: time of concat against the number of ranks of one node, more than it has cores.
- <mpi>-backend: how many times faster than gloo torch's collectives are with backend "mpi", against size.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import backend_tables
import results
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from results import (
    BASELINE,
    GLOO_BY_ROOT,
    GLOO_OBJECT,
    GLOO_PADDED,
    HPCDIST_NEW,
    HPCDIST_SHARED,
    MPI4PY_NEW,
    MPI4PY_PICKLE,
    Record,
)

_MIB = 2**20
_OURS = {HPCDIST_NEW: "hpcdist.concat(x)", HPCDIST_SHARED: "hpcdist.concat(x, shared=True)"}
_BY_HAND = {
    GLOO_OBJECT: "torch all_gather_object",
    MPI4PY_PICKLE: "mpi4py allgather (pickle)",
    GLOO_BY_ROOT: "torch, send to rank 0, broadcast",
    GLOO_PADDED: "torch all_gather, padded",
    MPI4PY_NEW: "mpi4py: exchange counts, Allgatherv",
}
_LINES = {BASELINE: "mpi4py Allgatherv, counts known, preallocated", **_BY_HAND, **_OURS}
_BLUE, _GREY = "#1f5fa8", "#b0b0b0"


def draw_all(records: Sequence[Record], folder: Path, ending: str) -> list[Path]:
    """Draw what there are records for; return the paths of the pictures."""
    paths = []
    for vendor in dict.fromkeys(record.name.split("-np")[0] for record in records):
        mine = sorted((r for r in records if r.name.startswith(f"{vendor}-np")), key=lambda r: r.world_size)
        concat = next((r for r in mine if r.verb == "concat"), None)  # of the fewest ranks
        ranks = [r for r in mine if r.verb == "ranks"]
        for name, figure in (
            ("ragged-concat", None if concat is None else ragged(concat)),
            ("concat-time", None if concat is None else against_size(concat)),
            ("node-memory", node_memory(ranks)),
            ("ranks", against_ranks(ranks)),
            ("backend", against_gloo([r for r in mine if r.verb == "backend"])),
        ):
            if figure is not None:
                paths.append(folder / f"{vendor}-{name}.{ending}")
                figure.tight_layout()
                figure.savefig(paths[-1], metadata={"Date": None} if ending == "svg" else None)
                plt.close(figure)
    return paths


def ragged(record: Record) -> plt.Figure | None:
    """Draw a bar for each way to concatenate ragged shards, with its milliseconds; the slowest on top."""
    cases = [case for case in record.cases if case.skew == "16:1"]
    case = max(cases, key=lambda case: case.size, default=None)
    if case is None:
        return None
    timings = {name: case.timing(name) for name in _LINES}
    if not all(timings[name] for name in (BASELINE, *_BY_HAND, HPCDIST_NEW)):
        return None
    ms = {name: timing.seconds.median * 1e3 for name, timing in timings.items() if timing}
    names = sorted(ms, key=lambda name: ms[name], reverse=True)
    figure, panel = plt.subplots(figsize=(9, 0.55 * len(names) + 1.3))
    colours = [_BLUE if name in _OURS else _GREY for name in names]
    bars = panel.barh([_LINES[name] for name in names], [ms[name] for name in names], color=colours)
    panel.bar_label(bars, [f"{ms[name]:.3g} ms" for name in names], padding=4)
    panel.invert_yaxis()
    panel.margins(x=0.12)
    panel.spines[["top", "right", "bottom"]].set_visible(False)
    panel.set_xticks([])
    for tick, name in zip(panel.get_yticklabels(), names, strict=True):
        tick.set_fontweight("bold" if name in _OURS else "normal")
    least, cores = results.show_size(min(case.nbytes)), record.machine.split(",")[1].strip()
    figure.suptitle(
        f"Concatenate shards of different sizes on every rank: less is faster\n"
        f"{record.world_size} ranks on one node of {cores}, {results.show_size(case.size)} on rank 0 and {least} on "
        f"each other; {record.mpi}",
        fontsize=10,
    )
    return figure


def against_size(record: Record) -> plt.Figure | None:
    """Draw a line for each way to concatenate even shards: time against the bytes of a shard."""
    cases = sorted((case for case in record.cases if case.skew == "even"), key=lambda case: case.size)
    if len(cases) < 3:
        return None
    figure, panel = plt.subplots(figsize=(9, 5.5))
    for name, label in _LINES.items():
        points = [(case.size, t.seconds.median * 1e3) for case in cases if (t := case.timing(name))]
        _line(panel, points, name, label)
    panel.set_xscale("log", base=2)
    panel.set_xticks([case.size for case in cases], [results.show_size(case.size) for case in cases])
    _axes(panel, "bytes a rank", "ms")
    panel.set_title(f"concat, time of a call: {record.world_size} ranks, even shards, {record.mpi}", fontsize=10)
    return figure


def node_memory(records: Sequence[Record]) -> plt.Figure | None:
    """Draw the memory of all ranks while they hold the result, relative to the result, against their number."""
    records = [record for record in records if record.nodes]
    if len(records) < 2:
        return None
    figure, panel = plt.subplots(figsize=(7, 4.5))
    for name, label in _OURS.items():
        found = [(r.world_size, n.extra / n.result) for r in records for n in r.nodes if n.name == name]
        _line(panel, found, name, label)
        for ranks, times in found:
            panel.annotate(f"{times:.2f}", (ranks, times), (0, 6), textcoords="offset points", ha="center", fontsize=8)
    panel.set_xticks([record.world_size for record in records])
    panel.set_ylim(bottom=0)
    panel.margins(y=0.15)
    panel.set_xlabel("ranks of the node")
    panel.set_ylabel("memory of all ranks / result")
    panel.grid(alpha=0.3)
    panel.legend(frameon=False)
    panel.set_title(f"Memory for the results of concat on one node, {records[0].mpi}", fontsize=10)
    return figure


def against_ranks(records: Sequence[Record]) -> plt.Figure | None:
    """Draw a panel for each size: time against the number of ranks."""
    records = [record for record in records if record.cases]
    if len(records) < 2:
        return None
    sizes = sorted({case.size for record in records for case in record.cases})
    figure, panels = plt.subplots(1, len(sizes), figsize=(5 * len(sizes), 4.8), squeeze=False)
    for panel, size in zip(panels[0], sizes, strict=True):
        for name, label in _LINES.items():
            timings = [(r.world_size, case.timing(name)) for r in records if (case := r.case(size, "even"))]
            _line(panel, [(n, t.seconds.median * 1e3) for n, t in timings if t], name, label)
        panel.set_xscale("log", base=2)
        panel.set_xticks([r.world_size for r in records], [str(r.world_size) for r in records])
        _axes(panel, "ranks of the node", "ms")
        panel.set_title(f"{results.show_size(size)} a rank", fontsize=10)
    cores = records[0].machine.split(",")[1].strip()
    figure.suptitle(f"concat, time of a call by the number of ranks on {cores}, {records[0].mpi}", fontsize=10)
    return figure


def against_gloo(records: Sequence[Record]) -> plt.Figure | None:
    """Draw a panel for each number of ranks: times faster than gloo against size, a line for each collective."""
    records = [record for record in records if backend_tables.points(record)]
    if not records:
        return None
    figure, panels = plt.subplots(1, len(records), figsize=(6 * len(records), 4.8), squeeze=False, sharey=True)
    for panel, record in zip(panels[0], records, strict=True):
        for name, points in backend_tables.points(record).items():
            panel.plot(*zip(*points, strict=True), marker="o", markersize=4, linewidth=2, label=name)
        sizes = sorted({size for points in backend_tables.points(record).values() for size, _ in points})
        panel.set_xscale("log", base=2)
        panel.set_xticks(sizes, [results.show_size(size) for size in sizes], rotation=45, ha="right")
        panel.axhline(1, color="black", linewidth=1)
        _axes(panel, "bytes of the tensor that a rank sends", "times faster than gloo")
        panel.set_title(f"{record.world_size} ranks", fontsize=10)
    figure.suptitle(
        f'torch.distributed on CPU tensors, backend "mpi": above 1 is faster; {records[0].mpi}', fontsize=10
    )
    return figure


def _line(panel: Axes, points: Sequence[tuple[float, float]], name: str, label: str) -> None:
    if points:
        style = {"linewidth": 2.5} if name in _OURS else {"linewidth": 1.2, "linestyle": "--"}
        panel.plot(*zip(*points, strict=True), marker="o", markersize=4, label=label, **style)


def _axes(panel: Axes, x: str, y: str) -> None:
    panel.set_yscale("log")
    panel.set_xlabel(x)
    panel.set_ylabel(y)
    panel.grid(alpha=0.3)
    panel.legend(frameon=False, fontsize=8)
