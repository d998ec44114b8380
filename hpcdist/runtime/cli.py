"""Parse the command line, print on rank 0, report bad input in one line with one exit status; tables and pages."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
from torch import Tensor

from hpcdist.control import objects
from hpcdist.errors import HpcdistError, LaunchError
from hpcdist.formats.paths import write_text
from hpcdist.process import machine
from hpcdist.process.streams import escape, printing
from hpcdist.runtime import world
from hpcdist.runtime.commandline import BAD_INPUT, Parser, is_rank_0, line
from hpcdist.runtime.world import World, team_of
from hpcdist.tensors import accelerator

T = TypeVar("T")

_ROWS = 16  # rows of a Table at most
_MIN_WINDOW = 1024  # bytes: each piece has a checksum, which must not be longer than the piece


def run(parser: Parser, main: Callable[[World, argparse.Namespace], int]) -> NoReturn:
    """Parse the command line, run `main` on every rank of the job and exit with the status it returns.

    `main` is collective. It reports bad input as an InputError (or another HpcdistError) on every rank, which rank 0
    prints in one line. Any other exception on any rank ends the job with its traceback.
    """
    escape()  # names of files
    with printing(parser.prog):
        args = parser.parse_args()
        try:
            here = world.init(staging=getattr(args, "staging", None))
            status = main(here, args)
            here.finalize()
        except HpcdistError as error:
            refuse(parser.prog, error)
        sys.exit(status)  # all ranks have agreed on it, and the world has ended


def refuse(name: str, error: HpcdistError) -> NoReturn:
    """Print the error of a command in one line, on rank 0, and exit on every rank."""
    # MPI may fail to start
    if world.is_first() if isinstance(error, LaunchError) else is_rank_0():
        print(f"{name}: error: {line(error)}", file=sys.stderr, flush=True)
    world.finalize()
    sys.exit(BAD_INPUT)


def say(rank: int, text: str) -> None:
    """Print a line on rank 0's standard error."""
    if rank == 0:
        print(f"hpcdist: {text}", file=sys.stderr, flush=True)


def progress(items: Iterable[T], here: World, what: str) -> Iterable[T]:
    """Iterate over `items` with a progress bar on rank 0, if its standard error is a terminal."""
    bar: Iterable[T] = _bar(here, what, iterable=items)
    return bar


def meter(here: World, what: str, total: int) -> Any:
    """Return a tqdm bar of `total` bytes for the share of rank 0, on rank 0 if its standard error is a terminal."""
    what = f"{what} (rank 0 of {here.world_size})" if here.world_size > 1 else what
    return _bar(here, what, total=total, unit="B", unit_scale=True, unit_divisor=1024)


def _bar(here: World, what: str, **options: Any) -> Any:
    from tqdm import tqdm

    return tqdm(desc=what, disable=here.rank != 0 or not sys.stderr.isatty(), **options)


def placed(world: World, shard: Tensor, route: str) -> Tensor:
    """Return the shard in the memory that the route moves: for nccl the GPU's, else the shard itself."""
    return shard.to(world.device) if route == "nccl" and world.settings.own_gpus else shard


def timed(world: World, step: Callable[[], object]) -> float:
    """Run a collective step; return the slowest rank's seconds. Collective."""
    comm = team_of().comm
    comm.Barrier()
    start = time.perf_counter()
    step()
    if world.device.type != "cpu":
        accelerator.synchronize(world.device)
    return float(max(objects.all_gather_object(comm, time.perf_counter() - start)))


def nbytes(text: str) -> int:
    """Parse a number of bytes on the command line: 4096, 64K, 64M, 1G.

    Raises:
        argparse.ArgumentTypeError: if `text` is not a number of bytes, or too small for a window.
    """
    count = machine.parse(text) or 0
    if not _MIN_WINDOW <= count < 2**63:
        raise argparse.ArgumentTypeError(f"expected a number of bytes such as 64M, {_MIN_WINDOW} or more, got {text!r}")
    return count


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ranks as text.

    Example::

        >>> ranks_text([0, 1, 2, 5])
        'ranks 0-2, 5'
    """
    given = sorted(set(ranks))
    gaps = [(a, b) for a, b in pairwise(given) if b > a + 1]
    starts, ends = [given[0], *(b for _, b in gaps)], [*(a for a, _ in gaps), given[-1]]
    runs = [f"{a}" if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    return f"rank{'s' * (len(given) > 1)} {', '.join(runs)}"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return text in columns, the first one left-aligned and the others right-aligned.

    Example::

        >>> print(table(["route", "time (ms)"], [["mpi", 1.25], ["gloo", 10.5]]))
        route  time (ms)
        mpi         1.25
        gloo        10.5
    """
    cells = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]).rstrip()
        for row in cells
    )


class Table:
    """The rows of `columns` with the largest `bars`, or in their own order; the page draws the bars."""

    def __init__(self, title: str, bars: Any, columns: Mapping[str, Iterable[Any]], largest: bool = True) -> None:
        order = np.argsort(-bars if largest else 0 * bars, kind="stable")[:_ROWS]
        rows = [*zip(*columns.values(), strict=True)]
        self.title = f"{title} (the first {_ROWS} of {len(rows)})" if len(rows) > _ROWS else title
        self.head = [*columns]
        self.rows = [[f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in rows[i]] for i in order]
        self.bars = bars[order] / (bars.max(initial=0) or 1)

    def __str__(self) -> str:
        return f"{self.title}\n{table(self.head, self.rows)}"


def write_page(path: str | Path, lines: Sequence[str], tables: Sequence[Table], picture: str, **values: Any) -> str:
    """Write a report as one page in HTML that needs no other file: sentences, a picture, and tables; return the same
    for a terminal, without the picture.

    Args:
        picture: template of jinja2 for the picture, filled in with `values`.

    Raises:
        FileError: it cannot be written.
    """
    import jinja2

    here = Path(__file__).parents[1] / "tools" / "templates"

    def fill(template: str | Path, **values: Any) -> str:
        return str(jinja2.Template((here / template).read_text(), autoescape=True, trim_blocks=True).render(values))

    page = fill("page.html.j2", lines=lines, picture=fill(picture, **values), tables=tables)
    write_text(path, page)
    return "\n\n".join(["\n".join(lines), *map(str, tables)])
