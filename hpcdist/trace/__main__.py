"""The command ``python -m hpcdist.trace DIR``: merge the traces of a run's ranks, and report. It starts no MPI."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hpcdist.errors import FileError, coded, reason
from hpcdist.process.streams import escape, printing
from hpcdist.runtime.cli import ranks_text
from hpcdist.runtime.commandline import Parser, path, plural, show_bytes
from hpcdist.runtime.page import Table, render, write
from hpcdist.trace.analysis import Trace, read
from hpcdist.trace.perfetto import merge

_CELLS = 64  # rows and columns of the picture; more ranks share them


def main(words: list[str]) -> None:
    """Print the report, and write it as a page, and the merged trace."""
    p = parser()
    args = p.parse_args(words)
    folder = Path(args.folder)
    try:
        trace = read(folder, args.job)
        left_out = merge(folder, trace)
        text = report(trace, folder / "report.html")
    except FileError as error:
        p.error(str(error))
    except OSError as error:
        p.error(coded("HD410", f"{folder}: cannot be written: {reason(error)}"))
    print("\n".join([text, "", *left_out, f"written: {folder}/report.html, {folder}/perfetto.json.gz"]))


def parser() -> Parser:
    """Return the parser of python -m hpcdist.trace. It runs on login nodes, and does not ask MPI for the rank."""
    p = Parser(
        prog="hpcdist trace",
        description="Report which rank the others waited for, in a run with HPCDIST_TRACE=DIR. Write the same with "
        "pictures to DIR/report.html, and all calls to DIR/perfetto.json.gz, for ui.perfetto.dev and chrome://tracing, "
        "with the profiles of torch.profiler that are in DIR.",
        epilog="example: python -m hpcdist.trace traces",
        prints=lambda: True,
    )
    p.add_argument("folder", type=path, metavar="DIR", help="folder with the traces of all ranks")
    p.add_argument("--job", default="*", metavar="NAME", help="run to report, if DIR has several")
    return p


def report(trace: Trace, page: Path) -> str:
    """Write a page in HTML that needs no other file; return the same for a terminal, without pictures."""
    world, kinds, present, rows = trace.headers[0].world_size, len(trace.calls), len(trace.headers), trace.rows
    of_rank, of_call = (
        partial(np.bincount, rows.rank, minlength=world),
        partial(np.bincount, rows.call, minlength=kinds),
    )
    took, waited, last = (rows.end - rows.begin) / 1e9, rows.waited / 1e9, np.maximum(rows.last, 0)  # -1: no waits
    caused = np.bincount(last * world + rows.rank, waited, world**2).reshape(world, world)
    waits = np.bincount(rows.call * world + last, waited, kinds * world).reshape(kinds, world)
    slowest, final = waits.argmax(1), rows.last == rows.rank
    share = of_call(final & (rows.rank == slowest[rows.call])) / np.maximum(of_call(final), 1)
    power, count = np.unique(np.frexp(np.maximum(rows.payload - 1, 0))[1], return_counts=True)
    by_rank = {
        "rank": range(world),
        "others wait (s)": caused.sum(1),
        "it waits (s)": caused.sum(0),
        "in calls (s)": of_rank(took),
        "data": map(show_bytes, of_rank(rows.payload)),
    }
    by_call = {
        "call": trace.calls,
        "calls": of_call(),
        "s per rank": of_call(took) / present,
        "of it waiting": waits.sum(1) / present,
        "last to arrive": (f"rank {r} in {part:.0%}" if part else "-" for r, part in zip(slowest, share, strict=True)),
        "mean size": map(show_bytes, of_call(rows.payload) / np.maximum(of_call(), 1)),
        "imbalance": of_call(rows.largest) / np.maximum(of_call(rows.payload), 1),
    }
    tables = [
        Table("Time that others waited for each rank", caused.sum(1), by_rank),
        Table("Time in each call", of_call(took), by_call),
        Table("Data that a rank passes to a call", count, {"up to": map(show_bytes, 2.0**power), "calls": count}),
    ]
    lines = _lines(trace, caused.sum(1), waits)
    step = -(-world // _CELLS)
    cells = np.add.reduceat(np.add.reduceat(caused, range(0, world, step), 0), range(0, world, step), 1)
    picture = render(Path(__file__).with_name("squares.html.j2"), cells=cells, step=step, world=world)
    write(page, lines, picture, tables)
    return "\n\n".join(["\n".join(lines), *map(str, tables)])


def _lines(trace: Trace, caused: Any, waits: Any) -> list[str]:
    """Return sentences: the run, the rank for which the others waited most, and the gaps in the trace."""
    headers, one, hosts = trace.headers, trace.headers[0], {header.host for header in trace.headers}
    span = (trace.rows.end.max() - trace.rows.begin.min()) / 1e9
    error = max(header.error_ns for header in headers) / 1e3
    lines = [
        f"{' '.join(one.program)}: {plural(one.world_size, 'rank')} on {plural(len(hosts), 'node')}, {span:.3f} s, "
        f"run {one.job}; clocks agree within {error:.1f} us"
    ]
    worst = int(caused.argmax())
    site = int(waits[:, worst].argmax())
    if caused[worst]:
        lines.append(
            f"The others wait most for rank {worst}: {caused[worst]:.3f} of {caused.sum():.3f} s of waiting, "
            f"{waits[site, worst]:.3f} s of it in {trace.calls[site]}"
        )
    lacks = {
        "killed before it could write": {*range(one.world_size)} - {header.rank for header in headers},
        "the oldest calls were dropped": {header.rank for header in headers if header.dropped},
        "ended early, see the job's message": {header.rank for header in headers if not header.finished},
    }
    return lines + [f"{ranks_text(ranks)}: {what}" for what, ranks in lacks.items() if ranks]


if __name__ == "__main__":
    escape()  # names of files and hosts
    with printing("hpcdist trace"):
        main(sys.argv[1:])
