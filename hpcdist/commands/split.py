"""The command ``python -m hpcdist.split``: split one array in a file into parts in files of their own."""

from __future__ import annotations

import argparse
import os

from hpcdist import layout
from hpcdist.commands.inputs import Inputs
from hpcdist.commands.options import Options, add_common
from hpcdist.commands.patterns import check_distinct, file_names
from hpcdist.commands.steps import Command, Report, run, shortened, speed
from hpcdist.commands.streaming import Joined
from hpcdist.control import objects
from hpcdist.errors import InputError
from hpcdist.runtime.cli import Parser, path, show_bytes
from hpcdist.runtime.world import World
from hpcdist.staging.pieces import shard_boxes

_MAX_PARTS = 10**6


def main(world: World, args: argparse.Namespace) -> int:
    """Split the input on the ranks of the world; return the exit status. Collective."""
    parts = world.world_size if args.parts is None else args.parts
    if not 1 <= parts <= _MAX_PARTS:
        raise InputError("HD508", f"--parts {parts}: expected 1 to {_MAX_PARTS}")
    return run(Split(world, Options.of("split", args), file_names(args.output, parts)))


class Split(Command):
    """Split the input into files of their own."""

    verdict = " of the parts, one after the other: {} the input"

    def check(self, data: Inputs) -> None:
        given = self.options.input[0]
        if len(data.sources) > 1:
            raise InputError("HD505", f"{given}: matches {len(data.sources)} files, expected one")
        if not data.sources[0].shape:
            raise InputError("HD513", f"{given}: is 0-d: it has no dimension to split along")

        def check() -> None:
            check_distinct(self.names)
            folders: set[str] = set()
            for name in self.names:
                folder = os.path.dirname(name)
                self.check_output(data, name, 0 if folder in folders else data.nbytes())
                folders.add(folder)

        objects.broadcast(self.world.team.comm, "output", check)

    def move(self, data: Inputs) -> Report:
        extents = layout.counts_of(self.options.counts, data.shape[data.dim], len(self.names))
        parts = list(zip(self.names, shard_boxes(data.shape, data.dim, extents), strict=True))
        mine = layout.block_range(len(parts), self.world.world_size, self.world.rank)
        with Joined(data, self.options.window // 2) as joined:
            report = self.writer(data).write_alone(joined.read, [parts[i] for i in mine])
        return report | {"parts": len(parts), "extents": extents} | self.verify(data, parts)

    def text(self, data: Inputs, report: Report) -> list[str]:
        window = show_bytes(self.options.window)
        return [
            f"ranks: {report['ranks']}, each reads and writes its share, {window} at a time",
            f"result: shape {tuple(report['shape'])} in {report['parts']} parts of {shortened(report['extents'])} rows",
            speed("every rank writes", report["seconds"], report["bytes"]),
        ]


def parser() -> Parser:
    """Return the parser of python -m hpcdist.split."""
    p = Parser(
        prog="hpcdist.split",
        description="Split an array in a file along one dimension into parts in files of their own, over the ranks of "
        "an MPI job. Every rank reads and writes its share, a window at a time: nothing has to fit in memory.",
        epilog="example: mpirun -n 4 python -m hpcdist.split whole.h5 -o 'parts/{rank:04d}.npy' --parts 16",
    )
    p.add_argument(
        "input", nargs=1, metavar="INPUT",
        help=".npy, .npz, .pt, .safetensors or .h5; FILE:NAME for one array of several",
    )  # fmt: skip
    p.add_argument(
        "-o", "--output", type=path, metavar="PATTERN", required=True,
        help="names of the parts, with {rank} or {rank:04d} for their number: .npy, .pt, .safetensors or .h5",
    )  # fmt: skip
    p.add_argument("--parts", type=int, help="number of parts (default: one for each rank)")
    p.add_argument("--dim", type=int, default=0, help="dimension to split along (default 0)")
    p.add_argument(
        "--counts", choices=sorted(layout.PARTITIONS), default="block",
        help="block: parts differ by at most one row (default); chunk: like torch.chunk",
    )  # fmt: skip
    add_common(p)
    return p
