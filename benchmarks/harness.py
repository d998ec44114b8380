"""Time several implementations of the same operation, interleaved in one run. For terms, see README.md, Definitions."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import mpi4py
import report
import results
import torch
from mpi4py import MPI
from tqdm import tqdm

import hpcdist as hd
from hpcdist.tools.timing import FEWEST, Contender, measure

ROOT = 0

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True)
class Step:
    """A case to run: a function that makes its data, and its contenders, the baseline first.

    The data are those of hpcdist.tools.timing.Data, with `size`, `skew`, `nbytes` and `what` as in results.Case.
    """

    make: Callable[[MPI.Intracomm], Any]
    contenders: Sequence[Contender]


class Data:
    """What most data of a case have in common; the rest is that of hpcdist.tools.timing.Data."""

    comm: MPI.Intracomm
    size: int

    @property
    def nbytes(self) -> list[int]:
        return [self.size] * self.comm.size

    def once(self, key: object, make: Callable[[], Any]) -> Any:
        """Return the result of `make` from the first call, which is not timed."""
        cache: dict[object, Any] = self.__dict__.setdefault("_cache", {})
        if key not in cache:
            cache[key] = make()
        return cache[key]

    def reset(self) -> None: ...

    def intact(self) -> bool:
        return True


def run(record: results.Record, comm: MPI.Intracomm, steps: Sequence[Step], asked: argparse.Namespace) -> None:
    """Time every step, print on rank 0, write JSON. Collective; `asked` comes from :func:`parser`."""
    root, end = comm.rank == ROOT, time.monotonic() + asked.seconds
    for done, step in enumerate(tqdm(steps, desc=record.verb, unit="case", disable=None if root else True)):
        case = step.make(comm)  # disable=None: tqdm checks whether stderr is a terminal
        now = time.monotonic()
        share = max(0, end - now) / (len(steps) - done)
        chosen = [c for i, c in enumerate(step.contenders) if not i or not any(w in c.name for w in asked.without)]
        timings = measure(chosen, case, asked.rounds, share, asked.budget)
        record.cases.append(results.Case(case.size, case.skew, case.nbytes, timings, case.what))
        if root:
            tqdm.write(report.case_table(record, record.cases[-1]) + "\n")
        if asked.json and root:  # keeps the measurements if the run is interrupted
            results.save(record, asked.json)
        del case  # frees its memory before the next one is made


def start(verb: str, comm: MPI.Intracomm) -> results.Record:
    """Give torch its share of the cores, and create an empty record."""
    cpus = len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, cpus // comm.size))
    return new_record(verb, comm.size, cpus)


def new_record(verb: str, world_size: int, cpus: int) -> results.Record:
    """Create an empty record: the software and the machine."""
    vendor, version = MPI.get_vendor()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return results.Record(
        verb=verb,
        world_size=world_size,
        mpi=f"{vendor} {'.'.join(map(str, version))}",
        versions={
            "hpcdist": hd.__version__,
            "torch": str(torch.__version__),
            "mpi4py": mpi4py.__version__,
            "python": platform.python_version(),
        },
        machine=f"{model}, {cpus} cores, Linux {platform.release().split('-')[0]}",
        threads=torch.get_num_threads(),
        date=date.today().isoformat(),
    )


@contextmanager
def shared_folder(comm: MPI.Intracomm, parent: Path, name: str) -> Iterator[Path]:
    """A context with a new folder in `parent` for the files of all ranks, which is removed at its end. Collective."""
    made = tempfile.mkdtemp(prefix=f"hpcdist-{name}-", dir=parent) if comm.rank == ROOT else None
    folder = Path(comm.bcast(made))
    try:
        yield folder
        comm.Barrier()
    finally:
        if comm.rank == ROOT:
            shutil.rmtree(folder, ignore_errors=True)


def parser(what: str, sizes_: str, seconds: float = 150, budget: float = 12) -> argparse.ArgumentParser:
    """Create the parser of the common command line; `sizes_` are the default sizes."""
    found = argparse.ArgumentParser(description=what, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument(
        "--sizes", type=sizes, default=sizes_, metavar="LIST", help=f"bytes per rank ({sizes_ or 'of the verb'})"
    )
    found.add_argument("--rounds", type=rounds, default=30, help="samples per contender (%(default)s)")
    found.add_argument(
        "--seconds",
        type=float,
        default=seconds,
        help="target duration; slow contenders get fewer rounds (%(default)g)",
    )
    found.add_argument(
        "--budget",
        type=float,
        default=budget,
        metavar="SECONDS",
        help=f"skip a contender, with a note in the table, if {FEWEST} calls take longer (%(default)g)",
    )
    found.add_argument(
        "--without", type=words, default=[], metavar="LIST", help="omit contenders with these words in their name"
    )
    found.add_argument("--json", type=Path, metavar="FILE", help="file for all samples; in a folder: MPI-npN-verb")
    return found


def choice(parser: argparse.ArgumentParser, option: str, known: Iterable[str]) -> None:
    """Add an option that takes a list of known words; the default is all of them."""

    def parse(text: str) -> list[str]:
        found = words(text)
        if not set(found) <= set(known):
            raise argparse.ArgumentTypeError(f"expected some of {','.join(known)}, got {text!r}")
        return found

    parser.add_argument(option, type=parse, default=",".join(known), metavar="LIST", help="%(default)s")


def words(text: str) -> list[str]:
    """Parse a list on the command line."""
    return text.split(",")


def rounds(text: str) -> int:
    """Parse a number of rounds on the command line."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError("expected at least 1")
    return int(text)


def sizes(text: str) -> list[int]:
    """Parse a list of sizes on the command line."""
    try:
        return [int(part.rstrip("KMG")) * _UNITS[part.lstrip("0123456789")] for part in text.upper().split(",") if part]
    except (KeyError, ValueError):
        raise argparse.ArgumentTypeError(f"expected sizes as in 8,64K,16M, got {text!r}") from None
