"""The command ``python -m hpcdist.gather``: arrays in any number of files become one, on any number of ranks."""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from typing import Any

from torch import Tensor

from hpcdist import layout
from hpcdist.collectives.concat import concat
from hpcdist.collectives.gather import gather
from hpcdist.comm.settings import ROUTES
from hpcdist.comm.team import Team
from hpcdist.commands import inputs, outputs, sources, streaming
from hpcdist.commands.compare import ROUNDS, compare, route_table
from hpcdist.commands.inputs import Inputs, sha256
from hpcdist.control import objects
from hpcdist.errors import InputError
from hpcdist.files.regular import shown
from hpcdist.routes.select import best
from hpcdist.runtime.cli import Parser, nbytes, path, placed, show_bytes, timed
from hpcdist.runtime.world import World
from hpcdist.staging.saving import WINDOW
from hpcdist.tensors.storage import row_major

_NAMES = 4  # inputs that a report lists at the least
MISMATCH = 1  # the exit status if the result is not what one process reads


def main(world: World, args: argparse.Namespace) -> int:
    """Gather the inputs on the ranks of the world; returns the exit status. Collective."""
    args.root = 0 if args.root is None else args.root  # no default in the parser, which could not tell it from --root 0
    if not 0 <= args.root < world.world_size:
        raise InputError(f"--root {args.root}: expected 0 to {world.world_size - 1} with {world.world_size} ranks")
    if args.output and "{" in args.output:
        raise InputError(f"{args.output}: gather writes one file; a pattern is for hpcdist.concat and hpcdist.split")
    data = inputs.find(world, args.input, args.dim, args.output)
    check_output(world, data, args.output, args)
    report = _describe(world, data, args)
    if args.output and not (args.all or args.compare):
        return _finish(world, data, args, report, _stream(world, data, args, report))
    inputs.check_memory(world, data, args.all, args.root)
    shard = data.shard(world)

    def move(x: Tensor, route: str, out: Tensor | None) -> Tensor | None:
        done: Tensor | None
        if args.all:
            done = concat(x, data.dim, route=route, out=out)
        else:
            done = gather(x, data.dim, args.root, route=route, out=out)
        return done

    if args.compare:
        report["routes"], result = compare(world, shard, move, data.nbytes())
    else:
        x = placed(world, shard, args.route)
        report["seconds"], result = timed(world, lambda: move(x, args.route, None))
        report["route"] = best(world.team, x.is_cuda) if args.route == "auto" else args.route
    if args.output:
        steps = [lambda team: _save(team, result, args)] if world.rank == args.root else []
        streaming.each_alone(world, "gather", steps)
    verdict = _verify(world, data, result, args) if args.verify or data.of_stdlib else {}
    return _finish(world, data, args, report, verdict)


def check_output(world: World, data: Inputs, output: str | None, args: argparse.Namespace) -> None:
    """Find on the root what would keep the output from being written. Collective."""
    if args.resume and not (output and output.endswith(".h5")):
        raise InputError("--resume: needs -o with an .h5 file, which keeps a checksum of each piece")
    if args.resume and (getattr(args, "all", False) or args.compare or args.route not in ("auto", "hdf5")):
        raise InputError("--resume: only where every rank writes: without --all, --compare and --route")
    if output:
        specs = [source.spec for source in data.sources]
        root = args.root
        size = 0 if args.resume else data.nbytes()  # some of it may be there already
        objects.broadcast(
            world.team.comm, "output", lambda: sources.check_output(output, data.dtype, size, specs), root
        )


def _stream(world: World, data: Inputs, args: argparse.Namespace, report: dict[str, Any]) -> dict[str, Any]:
    """From the files to the output, with no more than a window in memory; what --verify finds. Collective."""
    shape, dtype, window = data.shape, data.dtype, args.window
    resume = data.fingerprint() if args.resume else None
    with streaming.Joined(data, window // 2) as joined:
        if args.route in ("auto", "hdf5"):
            report["route"] = "every rank writes"
            written = streaming.to_file(
                world, world.team, "gather", joined.read, args.output, shape, dtype, window, resume
            )
            seconds = written.seconds
            if args.resume:
                report |= {"pieces": written.pieces, "pieces_kept": written.kept}
        else:
            report["route"] = args.route
            seconds = streaming.to_root(world, joined.read, args.output, shape, dtype, window, args.route, args.root)
        report["seconds"] = max(objects.all_gather_object(world.team.comm, seconds))
        if not args.verify:
            return {}
        parts = [(args.output, layout.whole(shape))]
        step = lambda: streaming.verify(data, parts, window)  # noqa: E731
        right, digest = objects.broadcast(world.team.comm, "verify", step, args.root)
        return {"sha256": digest, "verified": right}


def _finish(
    world: World, data: Inputs, args: argparse.Namespace, report: dict[str, Any], verdict: dict[str, Any]
) -> int:
    if args.output:
        report["output"] = args.output
    report |= verdict
    if world.rank == 0:
        print(json.dumps(report) if args.json else _text(report, data, args), flush=True)
    return MISMATCH if report.get("verified") is False else 0


def _describe(world: World, data: Inputs, args: argparse.Namespace) -> dict[str, Any]:
    """What is known before the data move. Nothing is padded, so that every route sends the same bytes."""
    own = data.nbytes_by_rank()
    streamed = args.output and not (args.all or args.compare) and args.route in ("auto", "hdf5")
    return {
        "verb": "concat" if args.all else "gather",
        "ranks": world.world_size,
        "nodes": world.nodes,
        "files": len(data.sources),
        "inputs": data.names(),
        "dim": data.dim,
        "shape": list(data.shape),
        "dtype": str(data.dtype).removeprefix("torch."),
        "bytes": data.nbytes(),
        "bytes_sent": 0 if streamed else sum(own) * (world.world_size - 1) if args.all else sum(own) - own[args.root],
    }


def _save(team: Team, result: Tensor | None, args: argparse.Namespace) -> None:
    assert result is not None  # the root, which writes, has the result
    whole = result.cpu()
    out = outputs.create(team, "gather", args.output, tuple(whole.shape), whole.dtype, args.window)
    for row in out.mine():
        out.put(row, row_major(whole[out.pieces[row].slices()]))
    out.finish()


def _verify(world: World, data: Inputs, result: Tensor | None, args: argparse.Namespace) -> dict[str, Any]:
    """Compare the root's result, and the output file, with all inputs read there; with --all, the results of the other
    ranks with the root's, by SHA-256. Collective."""

    def check() -> tuple[bool, str | None]:
        assert result is not None
        held = [result.cpu()] + ([sources.load(args.output, by_library=True)] if args.output else [])
        return data.verify(held, world)

    right, serial = objects.broadcast(world.team.comm, "verify", check, args.root)
    digests = objects.all_gather_object(world.team.comm, None if result is None else sha256(result))
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
    ]
    lines += order(report)
    if report.get("route") == "every rank writes":
        lines[1] = f"ranks: {report['ranks']}, each reads and writes its share, {show_bytes(args.window)} at a time"
        lines.append(f"result: shape {tuple(report['shape'])} in the file; nothing sent between ranks")
        if "pieces" in report:
            lines.append(f"resumed: {report['pieces_kept']} of {report['pieces']} pieces were there and are kept")
    else:
        sent = f"{report['bytes_sent']:,} bytes sent between ranks"
        lines.append(f"result: shape {tuple(report['shape'])} on {where}; {sent}")
    if "routes" in report:
        lines += ["", route_table(report["routes"], report["bytes_sent"]), ""]
        lines.append(f"time: median of {ROUNDS} runs in turn, the slowest rank; GB/s: bytes of the result by time")
    else:
        seconds = report["seconds"]
        route = report["route"] if report["route"] == "every rank writes" else f"route {report['route']}"
        lines.append(f"{route}: {seconds * 1e3:.2f} ms, {size / max(seconds, 1e-9) / 1e9:.2f} GB/s")
    return "\n".join([*lines, *outcome(report, ": {} the inputs read on one process")])


def order(report: dict[str, Any]) -> list[str]:
    """The line of a report that says in which order the inputs are joined."""
    names = [shown(name) for name in report["inputs"]]
    if len(names) > 2 * _NAMES:
        names[_NAMES:-1] = ["..."]
    return [f"order: {', '.join(names)}"] if names else []


def outcome(report: dict[str, Any], verdict: str) -> list[str]:
    """The last lines of a report: what was written, and what --verify has found, in the place of {} in `verdict`."""
    lines = [f"written: {shown(report['output'])}"] if "output" in report else []
    if "verified" in report:
        found = "equal to" if report["verified"] else "NOT EQUAL to"
        lines.append(f"sha256 {report['sha256']}{verdict.format(found)}")
    return lines


def parser() -> Parser:
    """The command line of python -m hpcdist.gather."""
    p = Parser(
        prog="hpcdist.gather",
        description="Join arrays from files along one dimension, over the ranks of an MPI job. With -o they are "
        "streamed: every rank reads and writes its share of the result, a window at a time, and nothing has to fit in "
        "memory. Without, each rank reads its share of the files, in the order given, and they are gathered in memory. "
        "Without INPUT: the source files of Python's standard library.",
        epilog="example: mpirun -n 4 python -m hpcdist.gather 'shards/*.npy' -o whole.h5",
    )
    add_inputs(p)
    p.add_argument("-o", "--output", type=path, metavar="OUT", help="write the result: .npy, .pt, .safetensors or .h5")
    where = p.add_mutually_exclusive_group()
    where.add_argument("--root", type=int, help="the rank that receives the result (default 0)")
    where.add_argument("--all", action="store_true", help="every rank receives the result; rank 0 writes it")
    p.add_argument(
        "--route", choices=ROUTES, default="auto",
        help="how the data travel (default auto: with -o from file to file, with no detour over a root)",
    )  # fmt: skip
    p.add_argument("--compare", action="store_true", help="time every route that can run here, in one table")
    add_common(p)
    return p


def add_inputs(p: Parser) -> None:
    """The arguments that say what is joined."""
    p.add_argument(
        "input", nargs="*", metavar="INPUT",
        help="a file or a quoted pattern: .npy, .npz, .pt, .safetensors, .h5; "
        "FILE:NAME for one array of a file that holds several",
    )  # fmt: skip
    p.add_argument("--dim", type=int, default=0, help="the dimension to join along (default 0)")


def add_common(p: Parser) -> None:
    """The options that gather, concat and split share."""
    p.add_argument(
        "--window", type=nbytes, default=WINDOW, metavar="BYTES",
        help="host memory for the data that a rank may use, such as 64M (default 256M); with -o",
    )  # fmt: skip
    p.add_argument("--resume", action="store_true", help="go on where a job with --resume has died; .h5 only")
    p.add_argument("--staging", type=path, metavar="DIR", help="the folder of route hdf5, shared by all nodes")
    p.add_argument(
        "--verify",
        action="store_true",
        help="compare the result with the inputs, both read again on one process by the formats' own libraries",
    )
    p.add_argument("--json", action="store_true", help="print one JSON object instead of text")
