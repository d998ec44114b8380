"""The command ``python -m hpcdist.concat``: join arrays from files, with the result on every rank."""

from __future__ import annotations

import argparse

from hpcdist import layout
from hpcdist.commands.inputs import Inputs
from hpcdist.commands.join import Join
from hpcdist.commands.options import Options, join_parser
from hpcdist.commands.patterns import check_distinct, file_names
from hpcdist.commands.steps import Command, Report, run, speed
from hpcdist.commands.streaming import Joined
from hpcdist.commands.verify import verify_files
from hpcdist.control import objects
from hpcdist.errors import InputError
from hpcdist.runtime.cli import Parser
from hpcdist.runtime.world import World


def main(world: World, args: argparse.Namespace) -> int:
    """Join the inputs on every rank of the world; return the exit status. Collective."""
    options = Options.of("concat", args, everywhere=args.output is None or args.compare)
    if options.output is None or "{" not in options.output:
        return run(Join(world, options))
    if options.compare:
        raise InputError("HD505", f"{options.output}: with --compare one file is written, and not one for each rank")
    return run(ConcatCopies(world, options, file_names(options.output, world.world_size)))


class ConcatCopies(Command):
    """Join the inputs in as many files as there are ranks: every rank writes a copy of its own."""

    verdict = ": {} the inputs"

    def check(self, data: Inputs) -> None:
        comm = self.world.team.comm
        own = self.names[self.world.rank]  # perhaps in a folder that only this node has
        objects.all_gather(comm, "output", lambda: self.check_output(data, own, data.nbytes()))
        objects.broadcast(comm, "output", lambda: check_distinct(self.names))

    def move(self, data: Inputs) -> Report:
        parts = [(self.names[self.world.rank], layout.whole(data.shape))]
        with Joined(data, self.options.window // 2) as joined:
            report = self.writer(data).write_alone(joined.read, parts)
        if self.options.verify:
            step = lambda: verify_files(data, parts, self.options.window)  # noqa: E731
            found = objects.all_gather(self.world.team.comm, "verify", step)
            report |= found[0] | {"verified": all(one["verified"] for one in found)}
        return report

    def text(self, data: Inputs, report: Report) -> list[str]:
        ranks = report["ranks"]
        return [
            f"result: shape {tuple(report['shape'])} in {ranks} files, one a rank",
            speed("every rank writes", report["seconds"], ranks * report["bytes"]),
        ]


def parser() -> Parser:
    """Return the parser of python -m hpcdist.concat."""
    return join_parser(
        "hpcdist.concat",
        "Join arrays from files along one dimension, on every rank of an MPI job: like hpcdist.gather, but every rank "
        "receives the result. With -o NAME all ranks write one file; with -o 'NAME-{rank}' each rank writes a copy of "
        "its own, for folders that the nodes do not share.",
        "example: mpirun -n 2 python -m hpcdist.concat 'shards/*.npy' -o '/local/whole-{rank}.npy'",
    )
