"""The command ``python -m hpcdist.gather``: arrays in any number of files become one, on any number of ranks."""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from typing import Any

from torch import Tensor

from hpcdist import concat, files, gather, inputs
from hpcdist.command import Parser, agreed, run
from hpcdist.errors import InputError
from hpcdist.gather.compare import ROUNDS, compare, placed, route_table, timed
from hpcdist.inputs import Inputs, sha256
from hpcdist.routes import NAMES, best
from hpcdist.world import World

_MISMATCH = 1  # the exit status if the result is not what one process reads


def main(world: World, args: argparse.Namespace) -> int:
    """Gather the inputs on the ranks of the world; returns the exit status. Collective."""
    args.root = 0 if args.root is None else args.root  # no default in the parser, which could not tell it from --root 0
    if not 0 <= args.root < world.world_size:
        raise InputError(f"--root {args.root}: expected 0 to {world.world_size - 1} with {world.world_size} ranks")
    data = inputs.find(world, args.input, args.dim)
    if args.output:
        specs = [source.spec for source in data.sources]
        agreed(world, lambda: files.check_output(args.output, data.dtype, data.nbytes(), specs), args.root)
    shard = data.shard(world)
    report = _describe(world, data, shard, args)

    def move(x: Tensor, route: str, out: Tensor | None) -> Tensor | None:
        if args.all:
            return concat(x, data.dim, route=route, out=out)
        return gather(x, data.dim, args.root, route=route, out=out)

    if args.compare:
        report["routes"], result = compare(world, shard, move, data.nbytes())
    else:
        x = placed(world, shard, args.route)
        report["seconds"], result = timed(world, lambda: move(x, args.route, None))
        report["route"] = best(world.team, x.is_cuda) if args.route == "auto" else args.route
    if args.output:
        agreed(world, lambda: _save(result, args.output), args.root)
        report["output"] = args.output
    if args.verify or data.of_stdlib:
        report |= _verify(world, data, result, args)
    if world.rank == 0:
        print(json.dumps(report) if args.json else _text(report, data, args), flush=True)
    return _MISMATCH if report.get("verified") is False else 0


def _describe(world: World, data: Inputs, shard: Tensor, args: argparse.Namespace) -> dict[str, Any]:
    """What is known before the data move. Nothing is padded, so that every route sends the same bytes. Collective."""
    own: list[int] = world.team.comm.allgather(shard.nbytes)
    return {
        "verb": "concat" if args.all else "gather",
        "ranks": world.world_size,
        "nodes": world.nodes,
        "files": len(data.sources),
        "dim": data.dim,
        "shape": list(data.shape),
        "dtype": str(data.dtype).removeprefix("torch."),
        "bytes": data.nbytes(),
        "bytes_sent": sum(own) * (world.world_size - 1) if args.all else sum(own) - own[args.root],
    }


def _save(result: Tensor | None, path: str) -> None:
    assert result is not None  # the root, which writes, has the result
    files.save(result, path)


def _verify(world: World, data: Inputs, result: Tensor | None, args: argparse.Namespace) -> dict[str, Any]:
    """Compare the root's result, and the output file, with all inputs read there; with --all, the results of the other
    ranks with the root's, by SHA-256. Collective."""

    def check() -> tuple[bool, str | None]:
        assert result is not None
        held = [result.cpu()] + ([files.load(args.output)] if args.output else [])
        return data.verify(held, world)

    ((right, serial),) = agreed(world, check, args.root)
    digests = world.team.comm.allgather(None if result is None else sha256(result))
    own = digests[args.root]
    same = {digest for digest in digests if digest is not None} == {own} and serial in (None, own)
    return {"sha256": own, "serial_sha256": serial, "verified": right and same}


def _text(report: dict[str, Any], data: Inputs, args: argparse.Namespace) -> str:
    size = report["bytes"]
    what = "source files of Python's standard library" if data.of_stdlib else "arrays"
    where = "every rank" if args.all else f"rank {args.root}"
    files_a_rank = [str(end - start) for start, end in pairwise(data.bounds)]
    lines = [
        f"{report['verb']}: {report['files']} {what}, {size:,} bytes of {report['dtype']}, along dim {report['dim']}",
        f"ranks: {report['ranks']} on {report['nodes']} node{'s' * (report['nodes'] > 1)}; "
        f"arrays a rank: {', '.join(files_a_rank[:8])}{', ...' * (len(files_a_rank) > 8)}",
        f"result: shape {tuple(report['shape'])} on {where}; {report['bytes_sent']:,} bytes sent between ranks",
    ]
    if "routes" in report:
        lines += ["", route_table(report["routes"], report["bytes_sent"]), ""]
        lines.append(f"time: median of {ROUNDS} runs in turn, the slowest rank; GB/s: bytes of the result by time")
    else:
        seconds = report["seconds"]
        lines.append(f"route {report['route']}: {seconds * 1e3:.2f} ms, {size / max(seconds, 1e-9) / 1e9:.2f} GB/s")
    if "output" in report:
        lines.append(f"written: {report['output']}")
    if "verified" in report:
        verdict = "equal to" if report["verified"] else "NOT EQUAL to"
        lines.append(f"sha256 {report['sha256']}: {verdict} the inputs read on one process")
    return "\n".join(lines)


def parser() -> Parser:
    """The command line of python -m hpcdist.gather."""
    p = Parser(
        prog="hpcdist.gather",
        description="Join arrays from files along one dimension, over the ranks of an MPI job: each rank reads its "
        "share of the files, in sorted order. Without INPUT: the source files of Python's standard library.",
        epilog="example: mpirun -n 4 python -m hpcdist.gather 'shards/*.npy' -o whole.h5",
    )
    p.add_argument(
        "input", nargs="*", metavar="INPUT",
        help="a file or a quoted pattern: .npy, .npz, .pt, .safetensors, .h5; "
        "FILE:NAME for one array of a file that holds several",
    )  # fmt: skip
    p.add_argument("-o", "--output", metavar="OUT", help="write the result: .npy, .pt, .safetensors or .h5")
    p.add_argument("--dim", type=int, default=0, help="the dimension to join along (default 0)")
    where = p.add_mutually_exclusive_group()
    where.add_argument("--root", type=int, help="the rank that receives the result (default 0)")
    where.add_argument("--all", action="store_true", help="every rank receives the result; rank 0 writes it")
    p.add_argument("--route", choices=NAMES, default="auto", help="how the data travel (default auto)")
    p.add_argument("--compare", action="store_true", help="time every route that can run here, in one table")
    p.add_argument("--verify", action="store_true", help="compare the result with the inputs read on one process")
    p.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return p


if __name__ == "__main__":
    run(parser(), main)
