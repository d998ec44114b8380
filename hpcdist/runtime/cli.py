"""Parse the command line, print on rank 0, and report bad input in one line with one exit status."""

from __future__ import annotations

import argparse
import io
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import IO, Any, NoReturn, TypeVar

import torch
from torch import Tensor

from hpcdist import memory
from hpcdist.control import objects
from hpcdist.errors import HpcdistError, RankError, coded, hint
from hpcdist.files.regular import shown
from hpcdist.process import exits
from hpcdist.process.streams import printing
from hpcdist.runtime import world
from hpcdist.runtime.world import World

__all__ = [
    *("Parser", "meter", "nbytes", "path", "placed", "plural", "progress", "ranks_text", "run", "show_bytes", "table"),
    "timed",
]

T = TypeVar("T")

_MIN_WINDOW = 1024  # bytes: each piece has a checksum, which must not be longer than the piece
_SHM = 2**23  # bytes of /dev/shm below which MPI's messages do not fit
BAD_INPUT = 2  # exit status, the same as argparse's


def _is_rank_0() -> bool:
    from mpi4py import MPI

    return bool(MPI.COMM_WORLD.rank == 0)


class Parser(argparse.ArgumentParser):
    """An argument parser that prints help and errors once, in the process where `prints` is true (default: rank 0).

    If an option is repeated, the last one counts: job scripts append the user's arguments to their own.
    """

    def __init__(self, *args: Any, prints: Callable[[], bool] = _is_rank_0, **options: Any) -> None:
        super().__init__(*args, **options)
        self._prints = prints

    def _print_message(self, message: str, file: IO[str] | None = None) -> None:  # type: ignore[override]
        if self._prints():
            super()._print_message(message, file)

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: error: {shown(message)} (see --help)\n")


def run(parser: Parser, main: Callable[[World, argparse.Namespace], int]) -> NoReturn:
    """Parse the command line, run `main` on every rank of the job and exit with the status it returns.

    `main` is collective. It reports bad input as an InputError (or another HpcdistError) on every rank, which rank 0
    prints in one line. Any other exception on any rank ends the job with its traceback.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # file names may hold any bytes
    with printing(parser.prog):
        _warn_of_small_shm(parser.prog)  # before MPI starts, which a bus error may end without a message
        args = parser.parse_args()
        try:
            here = world.init(staging=getattr(args, "staging", None))
            status = main(here, args)
            here.finalize()
        except HpcdistError as error:
            if _is_rank_0():
                print(f"{parser.prog}: error: {_line(error)}", file=sys.stderr, flush=True)
            status = BAD_INPUT
            world.finalize()
        exits.uninstall()  # all ranks have agreed on this status
        sys.exit(status)


def _warn_of_small_shm(name: str) -> None:
    """Warn, on rank 0, if MPI has too little shared memory for the messages within a node."""
    try:
        found = os.statvfs("/dev/shm")
    except OSError:  # not mounted
        return
    free = found.f_bavail * found.f_frsize
    if free < _SHM and world.is_first():
        text = f"/dev/shm has {show_bytes(free)} free: MPI may end with a bus error; see python -m hpcdist.doctor"
        print(f"{name}: warning: {coded('HD116', text)}", file=sys.stderr, flush=True)


def _line(error: HpcdistError) -> str:
    """Return an error as one line: for a RankError, the problem of the lowest rank that has one."""
    text = str(error)
    if isinstance(error, RankError):
        rank, text = next(iter(error.problems.items()))
        text = text if len(set(error.problems.values())) == 1 else f"rank {rank}: {text}"
    more = hint(text)
    return shown(text if more is None else f"{text} (see {more})")


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


def timed(world: World, step: Callable[[], Tensor | None]) -> tuple[float, Tensor | None]:
    """Run a collective step; return the slowest rank's seconds and this rank's result. Collective."""
    comm = world.team.comm
    comm.Barrier()
    start = time.perf_counter()
    result = step()
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    return max(objects.all_gather_object(comm, time.perf_counter() - start)), result


def nbytes(text: str) -> int:
    """Parse a number of bytes on the command line: 4096, 64K, 64M, 1G.

    Raises:
        argparse.ArgumentTypeError: `text` is not a number of bytes, or too small for a window.
    """
    count = memory.parse(text) or 0
    if not _MIN_WINDOW <= count < 2**63:
        raise argparse.ArgumentTypeError(f"expected a number of bytes such as 64M, {_MIN_WINDOW} or more, got {text!r}")
    return count


def path(text: str) -> str:
    """Return the name of a file or folder on the command line.

    Raises:
        argparse.ArgumentTypeError: it is empty, like "$OUT" in a shell where OUT is not set.
    """
    if not text:
        raise argparse.ArgumentTypeError("expected a name, got an empty one")
    return text


def plural(count: int, what: str) -> str:
    """Return a count with its noun: "1 rank", "2 ranks"."""
    return f"{count} {what}{'s' * (count != 1)}"


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ranks as text.

    Example::

        >>> ranks_text([0, 1, 2, 5])
        'ranks 0-2, 5'
    """
    given = sorted(set(ranks))
    starts = [given[0], *(b for a, b in pairwise(given) if b > a + 1)]
    ends = [*(a for a, b in pairwise(given) if b > a + 1), given[-1]]
    runs = [f"{a}" if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    return f"rank{'s' * (len(given) > 1)} {', '.join(runs)}"


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
