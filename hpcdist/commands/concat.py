"""The command ``python -m hpcdist.concat``: as hpcdist.gather, with the result on every rank."""

from __future__ import annotations

import argparse
import json
from typing import Any

from hpcdist import layout
from hpcdist.comm.settings import ROUTES
from hpcdist.comm.team import Team
from hpcdist.commands import gather, inputs, sources, streaming
from hpcdist.commands.inputs import Inputs
from hpcdist.commands.patterns import Names
from hpcdist.control import objects
from hpcdist.runtime.cli import Parser, path
from hpcdist.runtime.world import World


def main(world: World, args: argparse.Namespace) -> int:
    """Join the inputs on every rank of the world; returns the exit status. Collective."""
    args.root = 0
    if args.output is None or args.compare:
        args.all = True
        return gather.main(world, args)
    if "{" not in args.output:
        args.all = False  # one file, which all ranks write
        return gather.main(world, args)
    names = Names(args.output, world.world_size)
    data = inputs.find(world, args.input, args.dim, args.output)
    gather.check_output(world, data, names[0], args)
    specs, size = [source.spec for source in data.sources], 0 if args.resume else data.nbytes()
    check = lambda: sources.check_output(names[world.rank], data.dtype, size, specs)  # noqa: E731
    objects.all_gather(world.team.comm, "output", check)  # each in a folder of its own, perhaps
    objects.broadcast(world.team.comm, "output", names.check)
    report = _copies(world, data, names, args)
    if world.rank == 0:
        print(json.dumps(report) if args.json else _text(report), flush=True)
    return gather.MISMATCH if report.get("verified") is False else 0


def _copies(world: World, data: Inputs, names: Names, args: argparse.Namespace) -> dict[str, Any]:
    """Every rank writes a copy of its own. Collective."""
    target, seconds = names[world.rank], []
    resume = data.fingerprint() if args.resume else None
    with streaming.Joined(data, args.window // 2) as joined:

        def write(team: Team) -> None:
            written = streaming.to_file(
                world, team, "concat", joined.read, target, data.shape, data.dtype, args.window, resume
            )
            seconds.append(written.seconds)

        streaming.each_alone(world, "concat", [write])
        report = {
            "verb": "concat",
            "ranks": world.world_size,
            "files": len(data.sources),
            "inputs": data.names(),
            "shape": list(data.shape),
            "dtype": str(data.dtype).removeprefix("torch."),
            "bytes": data.nbytes(),
            "seconds": max(objects.all_gather_object(world.team.comm, seconds[0])),
            "output": args.output,
        }
        if args.verify:
            parts = [(target, layout.whole(data.shape))]
            step = lambda: streaming.verify(data, parts, args.window)  # noqa: E731
            found = objects.all_gather(world.team.comm, "verify", step)
            report |= {"verified": all(right for right, _ in found), "sha256": found[0][1]}
    return report


def _text(report: dict[str, Any]) -> str:
    rate = report["ranks"] * report["bytes"] / max(report["seconds"], 1e-9) / 1e9
    lines = [
        f"concat: {report['files']} arrays, {report['bytes']:,} bytes of {report['dtype']}",
        *gather.order(report),
        f"result: shape {tuple(report['shape'])} in {report['ranks']} files, one a rank",
        f"every rank writes: {report['seconds'] * 1e3:.2f} ms, {rate:.2f} GB/s",
    ]
    return "\n".join([*lines, *gather.outcome(report, ": {} the inputs")])


def parser() -> Parser:
    """The command line of python -m hpcdist.concat."""
    p = Parser(
        prog="hpcdist.concat",
        description="Join arrays from files along one dimension, on every rank of an MPI job: as hpcdist.gather, but "
        "every rank receives the result. With -o NAME one file is written, by all ranks; with -o 'NAME-{rank}' each "
        "rank writes a copy of its own, for folders that the nodes do not share.",
        epilog="example: mpirun -n 2 python -m hpcdist.concat 'shards/*.npy' -o '/local/whole-{rank}.npy'",
    )
    gather.add_inputs(p)
    p.add_argument("-o", "--output", type=path, metavar="OUT", help="write the result: .npy, .pt, .safetensors or .h5")
    p.add_argument("--route", choices=ROUTES, default="auto", help="how the data travel (default auto)")
    p.add_argument("--compare", action="store_true", help="time every route that can run here, in one table")
    gather.add_common(p)
    return p
