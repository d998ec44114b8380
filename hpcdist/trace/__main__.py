"""The command ``python -m hpcdist.trace DIR``: merge the traces of a run's ranks, and report. It starts no MPI."""

from __future__ import annotations

import sys
from pathlib import Path

from hpcdist.errors import FileError, coded, reason
from hpcdist.process.streams import escape, printing
from hpcdist.runtime.commandline import Parser, path
from hpcdist.trace.analysis import read
from hpcdist.trace.perfetto import merge
from hpcdist.trace.report import report


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


if __name__ == "__main__":
    escape()  # names of files and hosts
    with printing("hpcdist trace"):
        main(sys.argv[1:])
