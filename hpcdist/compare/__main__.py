"""The command ``mpirun -n N python -m hpcdist.compare``: time a user's calls, by hand and with hpcdist, and report."""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from hpcdist.comm.tuning import fingerprint
from hpcdist.compare.byhand import CONTENDERS, DTYPES, VERBS, Case
from hpcdist.compare.timing import Timing, measure
from hpcdist.control import objects
from hpcdist.errors import InputError
from hpcdist.formats.paths import check_target, file_errors, read_json, write_errors, write_text
from hpcdist.runtime.cli import Table, progress, run, write_page
from hpcdist.runtime.commandline import Parser, path, plural, show_bytes
from hpcdist.runtime.world import World
from hpcdist.tensors import accelerator
from hpcdist.trace import read

FORMAT = "hpcdist compare 1"
_SHAPES = [
    "concat float32 1x64",
    "concat float32 65536x64 4096x64",
    "gather float32 65536x64",
    "split float32 65536x64",
]
_LIKE = {
    "all_gather": "concat",
    "all_gather_single": "concat",
    "concat": "concat",
    "gather": "gather",
    "split": "split",
}
_SUFFIXES = (".json", ".html", ".png")  # of the files
_ROUNDS = 30  # samples of each way, at most
_MOST = 8  # cases of a trace: those that take most time
_KINDS = {"hpcdist": "hpcdist", "mpi4py": "mpi4py by hand", "torch": "torch idioms"}  # first words of the contenders
_COLOURS = {"hpcdist": "#1f5fa8", "mpi4py": "#8d99a8", "torch": "#c3cad3"}
Bar = tuple[str, str, Timing, str]  # label, colour, timing, its text
Group = tuple[str, list[Bar]]  # of the picture: a title, and bars
Report = tuple[list[str], list[Table], list[Group]]  # sentences, a table for each case, and what is drawn


def main(world: World, args: argparse.Namespace) -> int:
    """Time the cases and write the report, or compare two files. Collective.

    Returns:
        The exit status.
    """
    args.output = args.output or ("change" if args.files else "compare")
    if args.files and (len(args.files) != 2 or args.shapes or args.like):
        raise InputError("HD505", "expected two files, without --shapes and --like, or none")
    comm, record = world.comm, dict[str, Any]()
    if not args.files:
        lines = objects.run_on_root(comm, "compare", partial(_asked, args, world.world_size))
        record = _measured(world, args, lines)
    text = objects.run_on_root(comm, "compare", lambda: _reported(args, record))
    if world.rank == 0:
        print(text, flush=True)
    return 0


def _asked(args: argparse.Namespace, size: int) -> list[str]:
    """Return the lines of the cases, which parse() takes."""
    for name in (args.output, *(Path(args.output).with_suffix(suffix) for suffix in _SUFFIXES)):
        check_target(name, 0)
    if args.like:
        return _traced(Path(args.like), size)
    lines = [" ".join(line.split()[: 2 + size]) for line in _SHAPES]
    if args.shapes:
        with file_errors(args.shapes):
            lines = [line.partition("#")[0].strip() for line in Path(args.shapes).read_text().splitlines()]
    for line in (lines := [*filter(None, lines)]):
        parse(line, size)
    if not lines:
        raise InputError("HD505", f"{args.shapes}: has no case")
    return lines


def parse(line: str, size: int) -> tuple[str, str, list[list[int]]]:
    """Parse a case: a verb, a dtype, and the shapes of the ranks' shards; the last shape is that of all other ranks.

    Raises:
        InputError: it is not a case for `size` ranks.
    """
    verb, dtype, *words = [*line.split(), "", ""][: max(2, len(line.split()))]
    shapes = [[int(n) for n in word.split("x")] for word in words if re.fullmatch(r"\d{1,12}(x\d{1,12})*", word)]
    dims = {tuple(shape[1:]) for shape in shapes}
    if verb not in VERBS or dtype not in DTYPES or len(shapes) < len(words) or not words:
        expected = f"{' or '.join(VERBS)}, {' or '.join(DTYPES)}, and shapes such as 1000x64"
        raise InputError("HD505", f"{line!r}: expected {expected}")
    if len(dims) > 1 or len(shapes) > size or (verb == "redistribute" and dims == {()}):
        what = f"up to {plural(size, 'shape')}, which differ in dim 0 only; two dims or more for redistribute"
        raise InputError("HD505", f"{line!r}: expected {what}")
    return verb, dtype, [*shapes, *repeat(shapes[-1], size - len(shapes))]


def _traced(folder: Path, size: int) -> list[str]:
    """Return the cases of a trace that take most time: the verbs and bytes of its calls."""
    trace = read(folder)
    if (world := trace.headers[0].world_size) != size:
        raise InputError("HD505", f"{folder}: is of {plural(world, 'rank')}; compare on as many")
    names = [re.split(r"\W", call)[0] for call in trace.calls]
    rows = trace.rows[trace.rows.number > 0]
    rows = rows[np.lexsort((rows.rank, rows.number, rows.group))]
    first = np.flatnonzero(np.diff(rows.group, prepend=-1) | np.diff(rows.number, prepend=-1))
    cost = dict[str, int]()
    for i, n in zip(first, np.diff(first, append=len(rows)), strict=True):
        call, counts = rows[i : i + n], rows.payload[i : i + n].tolist()
        verb = _LIKE.get(name := names[call.call[0]])
        if n < size or verb is None or not any(counts):
            continue
        if name != verb:  # the bytes of torch's calls are those of input and output
            counts = [count - sum(counts) // (size + 1) for count in counts]
        if verb == "split":  # the trace has the root's bytes only
            counts = [sum(counts) // size]
        dtype, itemsize = ("int64", 8) if all(count % 8 == 0 for count in counts) else ("uint8", 1)
        words = [str(count // itemsize) for count in counts]
        line = f"{verb} {dtype} {' '.join(words[:1] if len({*words}) == 1 else words)}"
        cost[line] = cost.get(line, 0) + int((call.end - call.begin - call.waited).sum())
    if not cost:
        raise InputError("HD505", f"{folder}: expected calls of {', '.join(_LIKE)} by all ranks")
    return sorted(cost, key=lambda line: -cost[line])[:_MOST]


def _measured(world: World, args: argparse.Namespace, lines: list[str]) -> dict[str, Any]:
    """Time all contenders in all cases. Collective."""
    group = dist.new_group(backend=accelerator.LIBRARY if world.settings.own_gpus else "gloo")
    cases, made = [], list[Case]()
    for line in progress(lines, world, "compare"):
        verb, dtype, shapes = parse(line, world.world_size)

        def make() -> None:
            made.append(Case(world.comm, verb, DTYPES[dtype], shapes, world.device, group))  # noqa: B023

        objects.run_on_all(world.comm, line, make)  # there may be too little memory
        case = made.pop()
        timings = measure(CONTENDERS, case, _ROUNDS, args.seconds / len(lines))
        cases.append({"case": line, "nbytes": sum(case.nbytes), "timings": [asdict(timing) for timing in timings]})
        del case  # frees its memory before the next one is made
    return {"format": FORMAT, "machine": _machine(world), "cases": cases}


def _machine(world: World) -> str:
    own = fingerprint()
    where = f"{plural(world.world_size, 'rank')} on {plural(world.nodes, 'node')}, {world.device.type}"
    return f"{own['mpi']}, torch {own['torch']}, {where}"


def _results(record: dict[str, Any]) -> dict[str, list[Timing]]:
    found = {
        f"{of['case']}: {show_bytes(of['nbytes'])}": [Timing(**timing) for timing in of["timings"]]
        for of in record["cases"]
    }
    return {case: timings for case, timings in found.items() if _best(timings)["hpcdist"]}


def _best(timings: list[Timing]) -> dict[str, Timing]:
    """Return the fastest contender of each kind."""
    ordered = sorted((t for t in timings if t.rounds), key=lambda t: -t.seconds.median)
    best = {re.split(r"\W", timing.name)[0]: timing for timing in ordered}
    return {kind: best[kind] for kind in _KINDS if kind in best}


def _shown(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} us" if seconds < 1e-3 else f"{seconds * 1e3:.4g} ms"


def _times(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return f"{low} times" if low == high else f"{low} to {high} times"


def _alone(record: dict[str, Any]) -> Report:
    """Return the report of a measurement."""
    tables, groups, shares = list[Table](), list[Group](), defaultdict[str, list[float]](list)
    for case, timings in _results(record).items():
        timed = sorted((t for t in timings if t.rounds), key=lambda t: t.seconds.median)
        medians, best = np.array([timing.seconds.median for timing in timed]), _best(timed)
        ours, bars = best["hpcdist"].seconds.median, list[Bar]()
        for kind, timing in best.items():
            times = timing.seconds.median / ours
            shares[kind].append(times)
            text = "" if kind == "hpcdist" else f", {times:.3g} x"
            bars.append((_KINDS[kind], _COLOURS[kind], timing, f"{_shown(timing.seconds.median)}{text}"))
        columns = {
            "": [timing.name for timing in timed],
            "median": map(_shown, medians),
            "hpcdist = 1": medians / ours,
            "quartiles": (f"{_shown(t.seconds.low)} to {_shown(t.seconds.high)}" for t in timed),
        }
        tables.append(Table(case, medians, columns, largest=False))
        groups.append((case, bars))
    others = [kind for kind in reversed(_KINDS) if kind != "hpcdist"]
    long = (f"the fastest of {_KINDS[kind]} takes {_times(shares[kind])} as long" for kind in others)
    line = f"Compared with hpcdist, {'; '.join(long)}"
    return [f"{record['machine']}, {plural(len(tables), 'case')}", line], tables, groups


def _against(names: list[str]) -> Report:
    """Return the report of two files: how the second differs from the first."""
    results = []
    for name in names:
        with file_errors(name):
            results.append(_results(read_json(name, FORMAT)))
    old, new = results
    first, second = (Path(name).stem for name in names) if Path(names[0]).stem != Path(names[1]).stem else names
    tables, groups, verdicts, shares = list[Table](), list[Group](), list[str](), list[float]()
    for case in filter(new.__contains__, old):
        found = {timing.name: timing.seconds for timing in new[case] if timing.rounds}
        pairs = {t.name: (t.seconds, found[t.name]) for t in old[case] if t.rounds and t.name in found}
        ratios = np.array([b.median / a.median for a, b in pairs.values()])
        changes = ["faster" if b.high < a.low else "slower" if b.low > a.high else "" for a, b in pairs.values()]
        columns = {
            "": pairs,
            first: [_shown(a.median) for a, _ in pairs.values()],
            second: [_shown(b.median) for _, b in pairs.values()],
            "ratio": ratios,
            "beyond noise": changes,
        }
        tables.append(Table(case, ratios, columns, largest=False))
        best = {first: _best(old[case]), second: _best(new[case])}
        bars = [(f"{_KINDS[kind]}, {label}", kind, of[kind]) for kind in _KINDS for label, of in best.items()]
        groups.append((case, [(label, _COLOURS[kind], t, _shown(t.seconds.median)) for label, kind, t in bars]))
        shares.append(best[second]["hpcdist"].seconds.median / best[first]["hpcdist"].seconds.median)
        verdicts += changes
    if not tables:
        raise InputError("HD505", f"{' and '.join(names)}: expected files with a case in common")
    line = (
        f"hpcdist takes {_times(shares)} its time in {first}. Beyond the noise (quartiles apart), "
        f"{verdicts.count('faster')} of {len(verdicts)} ways are faster and {verdicts.count('slower')} slower"
    )
    return [f"{second} against {first}: {plural(len(tables), 'case')}", line], tables, groups


def _png(path: Path, title: str, groups: list[Group]) -> str:
    """Draw the picture as PNG; return what to print."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "no PNG: matplotlib is not installed (pip install 'hpcdist[bench]')"
    figure = Figure(figsize=(7, 0.4 + sum(0.5 + 0.22 * len(bars) for _, bars in groups)), layout="constrained")
    figure.suptitle(title, fontsize=9)
    panels = figure.subplots(len(groups), squeeze=False, height_ratios=[1 + len(bars) for _, bars in groups])
    for panel, (case, bars) in zip(panels[:, 0], groups, strict=True):
        labels, colours, timings, texts = zip(*bars, strict=True)
        low, medians, high = np.array([[x.low, x.median, x.high] for x in (t.seconds for t in timings)]).T
        drawn = panel.barh(
            range(len(bars)), medians, color=colours, tick_label=labels, xerr=[medians - low, high - medians]
        )
        panel.bar_label(drawn, texts, padding=3, fontsize=8)
        panel.set_title(case[:90], fontsize=8, loc="left")
        panel.set(xticks=[], frame_on=False, xmargin=0.3)
        panel.invert_yaxis()
    with write_errors(path):
        figure.savefig(path, dpi=150)
    return str(path)


def _reported(args: argparse.Namespace, record: dict[str, Any]) -> str:
    """Write the files, and return the report for a terminal."""
    target = Path(args.output).with_suffix(".json")
    lines, tables, groups = _against(args.files) if args.files else _alone(record)
    written = [str(target.with_suffix(".html"))]
    if not args.files:
        write_text(target, json.dumps(record, indent=1) + "\n")
        written.append(str(target))
    write_page(written[0], lines, tables, Path(__file__).with_name("bars.html.j2"), groups=groups)
    written.append(_png(target.with_suffix(".png"), lines[0], groups))
    return "\n\n".join(["\n".join(lines), *map(str, tables), f"written: {', '.join(written)}"])


def parser() -> Parser:
    """Return the parser of python -m hpcdist.compare."""
    p = Parser(
        prog="hpcdist compare",
        description="Time calls of given shapes, written by hand with mpi4py and torch (gloo, or nccl on GPUs), and "
        "with hpcdist. Runs are interleaved, the slowest rank counts, and each result is checked once. Print a table "
        "for each case, and write it as JSON and as a page with pictures. With two such files, compare them.",
        epilog="example: mpirun -n 4 python -m hpcdist.compare --shapes shapes.txt",
    )
    p.add_argument("files", nargs="*", type=path, metavar="FILE", help="two files to compare, the older one first")
    which = p.add_mutually_exclusive_group()
    which.add_argument(
        "--shapes", type=path, metavar="FILE",
        help="text with one case per line: a verb, a dtype, and the shape of each rank's shard, the last one that of "
        "all further ranks: concat float32 1000x64 10x64",
    )  # fmt: skip
    which.add_argument(
        "--like", type=path, metavar="DIR",
        help=f"traces of a run with HPCDIST_TRACE=DIR: the {_MOST} kinds of calls that took most time, along dim 0",
    )  # fmt: skip
    p.add_argument(
        "-o", "--output", type=path, metavar="NAME",
        help="files to write: NAME.json, NAME.html and, with matplotlib, NAME.png (default compare, or change)",
    )  # fmt: skip
    p.add_argument("--seconds", type=int, default=60, help="target duration (default 60)")
    return p


if __name__ == "__main__":
    run(parser(), main)
