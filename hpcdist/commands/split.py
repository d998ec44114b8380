"""The command ``python -m hpcdist.split``: one array in a file becomes parts in files of their own."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from hpcdist import layout
from hpcdist.comm.team import Team
from hpcdist.commands import gather, inputs, sources, streaming
from hpcdist.commands.inputs import Inputs
from hpcdist.commands.patterns import Names
from hpcdist.commands.streaming import Joined
from hpcdist.control import objects
from hpcdist.errors import InputError
from hpcdist.layout import Box
from hpcdist.runtime.cli import Parser, path, show_bytes
from hpcdist.runtime.world import World
from hpcdist.staging.pieces import shard_boxes

_MOST = 10**6  # files


def main(world: World, args: argparse.Namespace) -> int:
    """Split the input on the ranks of the world; returns the exit status. Collective."""
    data = inputs.find(world, [args.input], args.dim, args.output)
    if len(data.sources) > 1:
        raise InputError(f"{args.input}: matches {len(data.sources)} files, expected one")
    if not data.sources[0].shape:
        raise InputError(f"{args.input}: is 0-d: it has no dimension to split along")
    parts = world.world_size if args.parts is None else args.parts
    if not 1 <= parts <= _MOST:
        raise InputError(f"--parts {parts}: expected 1 to {_MOST}")
    names = Names(args.output, parts)
    if args.resume and not args.output.endswith(".h5"):
        raise InputError("--resume: needs -o with .h5 files, which keep a checksum of each piece")
    _check(world, data, names)
    report = _split(world, data, names, args)
    if world.rank == 0:
        print(json.dumps(report) if args.json else _text(report, args), flush=True)
    return gather.MISMATCH if report.get("verified") is False else 0


def _check(world: World, data: Inputs, names: Names) -> None:
    """Find on rank 0 what would keep the parts from being written. Collective."""

    def check() -> None:
        specs = [data.sources[0].spec]
        names.check()
        for folder in sorted({str(Path(names[i]).parent) for i in range(len(names))}):
            first = next(names[i] for i in range(len(names)) if str(Path(names[i]).parent) == folder)
            sources.check_output(first, data.dtype, data.nbytes(), specs)
        for i in range(len(names)):
            sources.check_output(names[i], data.dtype, 0, specs)

    objects.broadcast(world.team.comm, "output", check)


def _split(world: World, data: Inputs, names: Names, args: argparse.Namespace) -> dict[str, Any]:
    """Each rank writes its share of the parts. Collective."""
    extents = layout.counts_of(args.counts, data.shape[data.dim], len(names))
    boxes = shard_boxes(data.shape, data.dim, extents)
    mine = layout.block_range(len(names), world.world_size, world.rank)
    resume = data.fingerprint() if args.resume else None
    seconds: list[float] = []
    with Joined(data, args.window // 2) as joined:
        steps: list[Callable[[Team], None]] = [
            partial(_write, world, joined, names[i], boxes[i], data, args.window, resume, seconds) for i in mine
        ]
        streaming.each_alone(world, "split", steps)
        report = {
            "verb": "split",
            "ranks": world.world_size,
            "parts": len(names),
            "dim": data.dim,
            "shape": list(data.shape),
            "extents": extents,
            "dtype": str(data.dtype).removeprefix("torch."),
            "bytes": data.nbytes(),
            "seconds": max(objects.all_gather_object(world.team.comm, sum(seconds))),
            "output": args.output,
        }
        if args.verify:
            parts = [(names[i], boxes[i]) for i in range(len(names))]
            step = lambda: streaming.verify(data, parts, args.window)  # noqa: E731
            report["verified"], report["sha256"] = objects.broadcast(world.team.comm, "verify", step)
    return report


def _write(
    world: World, joined: Joined, target: str, part: Box, data: Inputs, window: int, resume: str | None,
    seconds: list[float], team: Team,
) -> None:  # fmt: skip
    """Write one part, a box of the array, on this rank alone."""

    def read(box: Box, out: Any) -> None:
        joined.read(box.shift(part.offset), out)

    written = streaming.to_file(world, team, "split", read, target, part.shape, data.dtype, window, resume)
    seconds.append(written.seconds)


def _text(report: dict[str, Any], args: argparse.Namespace) -> str:
    shown = ", ".join(map(str, report["extents"][:8])) + ", ..." * (len(report["extents"]) > 8)
    rate = report["bytes"] / max(report["seconds"], 1e-9) / 1e9
    lines = [
        f"split: shape {tuple(report['shape'])}, {report['bytes']:,} bytes of {report['dtype']}, along dim "
        f"{report['dim']} into {report['parts']} parts of {shown} rows",
        f"ranks: {report['ranks']}, each reads and writes its share, {show_bytes(args.window)} at a time",
        f"every rank writes: {report['seconds'] * 1e3:.2f} ms, {rate:.2f} GB/s",
    ]
    return "\n".join([*lines, *gather.outcome(report, " of the parts, one after the other: {} the input")])


def parser() -> Parser:
    """The command line of python -m hpcdist.split."""
    p = Parser(
        prog="hpcdist.split",
        description="Cut an array in a file along one dimension into parts in files of their own, over the ranks of "
        "an MPI job. Every rank reads and writes its share, a window at a time: nothing has to fit in memory.",
        epilog="example: mpirun -n 4 python -m hpcdist.split whole.h5 -o 'parts/{rank:04d}.npy' --parts 16",
    )
    p.add_argument(
        "input", metavar="INPUT", help=".npy, .npz, .pt, .safetensors or .h5; FILE:NAME for one array of several"
    )
    p.add_argument(
        "-o", "--output", type=path, metavar="PATTERN", required=True,
        help="the names of the parts, with {rank} or {rank:04d} for their number: .npy, .pt, .safetensors or .h5",
    )  # fmt: skip
    p.add_argument("--parts", type=int, help="how many parts (default: one a rank)")
    p.add_argument("--dim", type=int, default=0, help="the dimension to cut along (default 0)")
    p.add_argument(
        "--counts", choices=sorted(layout.PARTITIONS), default="block",
        help="block: parts differ by at most one row (default); chunk: as torch.chunk does it",
    )  # fmt: skip
    gather.add_common(p)
    return p
