"""The command line, and texts of what commands print, for those that run without torch as well."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import IO, Any, NoReturn

from hpcdist.errors import HpcdistError, RankError, hint
from hpcdist.formats.paths import shown

BAD_INPUT = 2  # exit status, the same as argparse's


def is_rank_0() -> bool:
    """Whether this is rank 0; starts MPI."""
    from mpi4py import MPI

    return bool(MPI.COMM_WORLD.rank == 0)


class Parser(argparse.ArgumentParser):
    """An argument parser that prints help and errors once, in the process where `prints` is true (default: rank 0).

    If an option is repeated, the last one counts: job scripts append the user's arguments to their own.
    """

    def __init__(self, *args: Any, prints: Callable[[], bool] = is_rank_0, **options: Any) -> None:
        super().__init__(*args, **options)
        self._prints = prints

    def _print_message(self, message: str, file: IO[str] | None = None) -> None:  # type: ignore[override]
        if self._prints():
            super()._print_message(message, file)

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: error: {shown(message)} (see --help)\n")


def line(error: HpcdistError) -> str:
    """Return an error as one line, with the command that explains it."""
    text = problem(error)
    more = hint(text)
    return shown(text if more is None else f"{text} (see {more})")


def problem(error: HpcdistError) -> str:
    """Return the message of an error; of a RankError, the problem of the lowest rank that has one."""
    if not isinstance(error, RankError):
        return str(error)
    rank, text = next(iter(error.problems.items()))
    return text if len(set(error.problems.values())) == 1 else f"rank {rank}: {text}"


def path(text: str) -> str:
    """Return the name of a file or folder on the command line.

    Raises:
        argparse.ArgumentTypeError: if it is empty, like "$OUT" in a shell without OUT.
    """
    if not text:
        raise argparse.ArgumentTypeError("expected a name, got an empty one")
    return text


def plural(count: int, what: str) -> str:
    """Return a count with its noun: "1 rank", "2 ranks"."""
    return f"{count} {what}{'s' * (count != 1)}"


def show_bytes(count: float) -> str:
    """Return a number of bytes as text.

    Example::

        >>> show_bytes(3 * 2**20)
        '3.0 MiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
