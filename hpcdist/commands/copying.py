"""Copy tensors into files, and report it: every rank reads and writes its share, with no more than a window of host
memory."""

from __future__ import annotations

import json
import os
import time
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcdist.comm.team import Team
from hpcdist.commands.inputs import Read
from hpcdist.control import objects
from hpcdist.errors import HpcdistError, InputError
from hpcdist.formats import safetensors
from hpcdist.formats.contents import Dataset
from hpcdist.formats.paths import check_target, shown
from hpcdist.layout import Box
from hpcdist.layout.box import Ints, Listed, grid, summed
from hpcdist.runtime.cli import Parser, meter, nbytes, show_bytes
from hpcdist.runtime.world import World, team_of
from hpcdist.staging.pieces import check_pieces, piece_limit
from hpcdist.staging.writer import WINDOW, FileWriter, SaveOptions
from hpcdist.validation.local import ArgumentError

__all__ = ["Report", "Shares", "add_options", "check_output", "copied", "copy", "finish", "in_pieces"]


Report = dict[str, Any]


def in_pieces(path: str, datasets: Sequence[Dataset], window: int) -> list[Dataset]:
    """Cut tensors for the output `path`, half of the window a piece, since reading one may take as much again.

    Pieces that a tensor has in its file are kept if they fit and are runs of it: each is then read once, with its
    checksum.

    Raises:
        InputError: there are too many pieces.
    """
    found = []
    for d in datasets:
        limit, pieces = piece_limit(window // 2, d.dtype.itemsize), d.pieces
        if pieces is None or not len(pieces) or int(pieces.sizes.max()) > limit or not pieces.are_runs:
            try:
                check_pieces(d.shape, d.dtype.itemsize, limit)
            except ArgumentError as error:
                raise InputError("HD419", f"{path}: {d.name} {error}") from error
            pieces = grid(d.shape, limit)
        found.append(replace(d, pieces=pieces))
    return found


def copy(
    world: World, team: Team, verb: str, path: str, datasets: Sequence[Dataset], read: Read, options: SaveOptions
) -> tuple[int, int]:
    """Write tensors to a file, or to several and an index. Collective over `team`.

    Args:
        datasets: perhaps with the pieces in which they are in a file: see in_pieces().
        read: raises an HpcdistError for what cannot be read.

    Returns:
        How many pieces this rank has, and how many of them another run has left complete.

    Raises:
        RankError: on every rank, if anything failed on one; existing files are then as they were.
    """
    datasets = in_pieces(path, datasets, options.window)
    shares = Shares(datasets, team.size)
    mine = shares.boxes(team.rank)
    if path.endswith(safetensors.SUFFIX):
        options = replace(options, attrs={"format": "pt", **options.attrs})
    with meter(world, verb, sum(d.nbytes() for d in datasets) // team.size) as bar:
        options = replace(options, progress=bar.update)
        with FileWriter(team, verb, path, datasets, options) as file:
            buffer = torch.empty(piece_limit(options.window // 2, 1), dtype=torch.uint8, device="cpu")
            try:
                for (i, row), box in mine.items():
                    if file.problem is not None:
                        break
                    dtype = datasets[i].dtype
                    x: Tensor = buffer[: box.size() * dtype.itemsize].view(dtype).view(box.shape)
                    read(i, box, x)
                    file.put(i, row, x)
            except HpcdistError as error:
                file.fail(error)
    return len(mine), file.kept


class Shares:
    """The share of each of `size` ranks in tensors whose pieces are runs of them, in order.

    A piece belongs to the rank in whose part of all bytes it begins.
    """

    def __init__(self, datasets: Sequence[Dataset], size: int) -> None:
        first = summed([d.nbytes() for d in datasets])
        limits = [int(first[-1]) * rank // size for rank in range(1, size)]
        self._pieces: list[tuple[Listed, Ints]] = []  # of each tensor, and their owners
        for start, d in zip(first[:-1], datasets, strict=True):
            assert d.pieces is not None
            begins = start + d.pieces.starts * d.dtype.itemsize
            self._pieces.append((d.pieces, np.searchsorted(limits, begins, "right")))

    def rows(self, i: int, rank: int) -> range:
        """The pieces of tensor i that a rank reads and writes."""
        return range(*np.searchsorted(self._pieces[i][1], (rank, rank + 1)).tolist())

    def boxes(self, rank: int) -> dict[tuple[int, int], Box]:
        """The boxes of all pieces that a rank reads and writes: (tensor, piece) -> box."""
        return {(i, row): of[row] for i, (of, _) in enumerate(self._pieces) for row in self.rows(i, rank)}


def add_options(p: Parser) -> None:
    """Add the options that all of these commands have."""
    p.add_argument(
        "--window", type=nbytes, default=WINDOW, metavar="BYTES",
        help="host memory that a rank may use for data in transit to files, such as 64M (default 256M)",
    )  # fmt: skip
    p.add_argument("--resume", action="store_true", help="resume a killed job: write only what differs from its output")
    p.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def check_output(name: str, inputs: Iterable[str], nbytes: int) -> None:
    """Check before any data move that a file of `nbytes` can be written, and is none of the inputs.

    Raises:
        InputError, FileError: it cannot: no such folder, not writable, no space, or an input under another name.
    """
    if os.path.exists(name) and any(os.path.samefile(name, path) for path in inputs):
        raise InputError("HD507", f"{name}: is also an input, which it would replace")
    check_target(name, nbytes)


def copied(
    world: World, args: Namespace, report: Report, started: float, done: tuple[int, int], *result: str
) -> list[str]:
    """Complete the report on a copy of all bytes to files; return lines of the report as text. Collective.

    Args:
        done: what copy() returned on this rank.
        result: lines.
    """
    found = objects.all_gather_object(team_of().comm, (time.perf_counter() - started, *done))
    seconds, pieces, kept = zip(*found, strict=True)
    slowest = max(seconds)
    report |= {"seconds": slowest, "output": args.output}
    lines = [
        f"ranks: {world.world_size}, each reads and writes its share, {show_bytes(args.window)} at a time",
        *result,
    ]
    if args.resume:
        report |= {"pieces": sum(pieces), "pieces_kept": sum(kept)}
        lines.append(f"resumed: {sum(kept)} of {sum(pieces)} pieces were there and are kept")
    took = f"every rank writes: {slowest * 1e3:.2f} ms, {report['bytes'] / slowest / 1e9:.2f} GB/s"
    return [*lines, took, f"written: {shown(args.output)}"]


def finish(world: World, args: Namespace, report: Report, lines: Iterable[str]) -> None:
    """Print a report on rank 0: as lines of text, or as JSON."""
    if world.rank == 0:
        print(json.dumps(report) if args.json else "\n".join(lines), flush=True)
