"""What the commands share: parsing and printing on rank 0, one clear line for bad input, one exit status."""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import IO, NoReturn, TypeVar

import torch
from torch import Tensor

from hpcdist.control import objects
from hpcdist.errors import HpcdistError, RankError
from hpcdist.files.regular import shown
from hpcdist.process import exits
from hpcdist.process.streams import printing
from hpcdist.runtime import world
from hpcdist.runtime.world import World

__all__ = ["Meter", "Parser", "nbytes", "path", "placed", "progress", "run", "show_bytes", "table", "timed"]

T = TypeVar("T")

_LEAST = 1024  # bytes of a window: each piece has a checksum, which is not to be longer than the piece
_SHM = 2**23  # bytes of /dev/shm below which MPI has no place for its messages
BAD_INPUT = 2  # the exit status that argparse has, too


class Parser(argparse.ArgumentParser):
    """An argument parser that prints its help and its errors once, on rank 0 of the job.

    Of an option that is given several times the last one counts: the job scripts put what they are given after their
    own.
    """

    def _print_message(self, message: str, file: IO[str] | None = None) -> None:  # type: ignore[override]
        if _rank() == 0:
            super()._print_message(message, file)

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: error: {shown(message)} (--help tells more)\n")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        if message:
            self._print_message(message, sys.stderr)
        sys.exit(status)


def run(parser: Parser, main: Callable[[World, argparse.Namespace], int]) -> NoReturn:
    """Parse the command line, run `main` on every rank of the job and exit with the status that it returns.

    `main` is collective; what it cannot use it reports as an InputError (or another HpcdistError) on every rank, which
    rank 0 prints in one line. Any other exception on any rank ends the job with its traceback.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # file names may be of any language, or of none
    with printing(parser.prog):
        _look_at_shm(parser.prog)  # before MPI begins, which a bus error ends without a word
        args = parser.parse_args()
        try:
            here = world.init(staging=getattr(args, "staging", None))
            status = main(here, args)
            here.finalize()
        except HpcdistError as error:
            if _rank() == 0:
                print(f"{parser.prog}: error: {_line(error)}", file=sys.stderr, flush=True)
            status = BAD_INPUT
            world.finalize()
        exits.uninstall()  # all ranks have agreed on this status
        sys.exit(status)


def _look_at_shm(name: str) -> None:
    """Warn, on rank 0, where MPI has no memory to share between the ranks of a node."""
    try:
        found = os.statvfs("/dev/shm")
    except OSError:  # there is none
        return
    free = found.f_bavail * found.f_frsize
    if free < _SHM and world.is_first():
        text = f"/dev/shm has {show_bytes(free)} free: MPI may end with a bus error; see python -m hpcdist.doctor"
        print(f"{name}: warning: {text}", file=sys.stderr, flush=True)


def _line(error: HpcdistError) -> str:
    """An error in one line: of a RankError, what is wrong on the lowest rank at fault."""
    if isinstance(error, RankError):
        rank, problem = next(iter(error.problems.items()))
        return shown(problem if len(set(error.problems.values())) == 1 else f"rank {rank}: {problem}")
    return shown(str(error))


def progress(items: Iterable[T], here: World, what: str) -> Iterable[T]:
    """`items`, with a progress bar on rank 0 if its standard error is a terminal."""
    from tqdm import tqdm

    bar: Iterable[T] = tqdm(items, desc=what, disable=here.rank != 0 or not sys.stderr.isatty())
    return bar


def placed(world: World, shard: Tensor, route: str) -> Tensor:
    """The shard where the route is at home: what is read from files is in host memory, and NCCL moves GPU memory."""
    return shard.to(world.device) if route == "nccl" and world.settings.own_gpus else shard


def timed(world: World, step: Callable[[], Tensor | None]) -> tuple[float, Tensor | None]:
    """Run a collective step on all ranks at once; seconds on the slowest rank, and this rank's result."""
    comm = world.team.comm
    comm.Barrier()
    start = time.perf_counter()
    result = step()
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    return max(objects.all_gather_object(comm, time.perf_counter() - start)), result


class Meter:
    """A progress bar of bytes, with their rate and the time that is left, on rank 0 if its standard error is a
    terminal. Ranks do not wait for each other to draw it: it shows rank 0's own share of the work.
    """

    def __init__(self, here: World, what: str, total: int) -> None:
        from tqdm import tqdm

        off = here.rank != 0 or not sys.stderr.isatty()
        what = f"{what} (rank 0 of {here.world_size})" if here.world_size > 1 else what
        self._bar = tqdm(desc=what, total=total, unit="B", unit_scale=True, unit_divisor=1024, disable=off)

    def add(self, nbytes: int) -> None:
        """So many bytes more are done."""
        self._bar.update(nbytes)

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()


def nbytes(text: str) -> int:
    """A number of bytes on the command line: 4096, 64K, 64M, 1G.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    match = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", text, re.IGNORECASE)
    count = 0 if match is None or len(text) > 20 else int(match[1]) << 10 * " KMG".index(match[2].upper() or " ")
    if not _LEAST <= count < 2**63:
        raise argparse.ArgumentTypeError(f"expected a number of bytes such as 64M, {_LEAST} at least, got {text!r}")
    return count


def path(text: str) -> str:
    """The name of a file or folder on the command line.

    Raises:
        argparse.ArgumentTypeError: it is empty, as "$OUT" is where nobody has set it.
    """
    if not text:
        raise argparse.ArgumentTypeError("expected a name, got an empty one")
    return text


def show_bytes(count: float) -> str:
    """A number of bytes as people read it.

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
