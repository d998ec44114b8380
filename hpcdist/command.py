"""What the commands share: parsing and printing on rank 0, one clear line for bad input, one exit status."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import IO, NoReturn, TypeVar

from hpcdist import abort, world
from hpcdist.errors import HpcdistError, InputError, RankError
from hpcdist.world import World

__all__ = ["Parser", "agreed", "progress", "run", "table"]

T = TypeVar("T")

BAD_INPUT = 2  # the exit status that argparse has, too


class Parser(argparse.ArgumentParser):
    """An argument parser that prints its help and its errors once, on rank 0 of the job."""

    def _print_message(self, message: str, file: IO[str] | None = None) -> None:  # type: ignore[override]
        if _rank() == 0:
            super()._print_message(message, file)

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: error: {message} (--help tells more)\n")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        if message:
            self._print_message(message, sys.stderr)
        sys.exit(status)


def run(parser: Parser, main: Callable[[World, argparse.Namespace], int]) -> NoReturn:
    """Parse the command line, run `main` on every rank of the job and exit with the status that it returns.

    `main` is collective; what it cannot use it reports as an InputError (or another HpcdistError) on every rank, which
    rank 0 prints in one line. Any other exception on any rank ends the job with its traceback.
    """
    args = parser.parse_args()
    try:
        here = world.init()
        status = main(here, args)
        here.finalize()
    except HpcdistError as error:
        if _rank() == 0:
            print(f"{parser.prog}: error: {_line(error)}", file=sys.stderr, flush=True)
        status = BAD_INPUT
        world.finalize()
    abort.disarm()  # all ranks have agreed on this status
    sys.exit(status)


def _line(error: HpcdistError) -> str:
    """An error in one line: of a RankError, what is wrong on the lowest rank at fault."""
    if isinstance(error, RankError):
        rank, problem = next(iter(error.problems.items()))
        return problem if len(set(error.problems.values())) == 1 else f"rank {rank}: {problem}"
    return str(error)


def agreed(here: World, step: Callable[[], T], root: int | None = None) -> list[T]:
    """Run `step` on every rank, or on the root alone; its InputError on any rank is raised on all. Collective.

    Returns:
        On every rank the results of all ranks, in rank order; of the root alone if there is one.
    """
    outcome: tuple[T | None, str | None] = (None, None)
    if root is None or here.rank == root:
        try:
            outcome = (step(), None)
        except InputError as error:
            outcome = (None, str(error))
    comm = here.team.comm
    outcomes: list[tuple[T, str | None]] = [comm.bcast(outcome, root)] if root is not None else comm.allgather(outcome)
    wrong = [error for _, error in outcomes if error is not None]
    if wrong:
        raise InputError(wrong[0])
    return [value for value, _ in outcomes]


def progress(items: Iterable[T], here: World, what: str, total: int | None = None) -> Iterable[T]:
    """`items`, with a progress bar on rank 0 if its standard error is a terminal."""
    from tqdm import tqdm

    bar: Iterable[T] = tqdm(items, desc=what, total=total, disable=here.rank != 0 or not sys.stderr.isatty())
    return bar


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Text in columns: the first to the left, the others to the right.

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


def _rank() -> int:
    from mpi4py import MPI

    return int(MPI.COMM_WORLD.rank)
