"""The command ``python -m hpcdist.gather``: join arrays from any number of files, on any number of ranks."""

from __future__ import annotations

import argparse

from hpcdist.commands.formats import names_folder
from hpcdist.commands.join import Join
from hpcdist.commands.options import Options, join_parser
from hpcdist.commands.steps import run
from hpcdist.control import objects
from hpcdist.errors import InputError
from hpcdist.runtime.cli import Parser
from hpcdist.runtime.world import World
from hpcdist.staging.sharded_files import is_sharded


def main(world: World, args: argparse.Namespace) -> int:
    """Gather the inputs on the ranks of the world; return the exit status. Collective."""
    if objects.broadcast(world.team.comm, "gather", lambda: _is_of_a_checkpoint(args)):
        from hpcdist.commands.convert import convert  # which imports torch's DCP and DTensor: as long as all of torch

        return convert(world, args)
    options = Options.of("concat" if args.everywhere else "gather", args)
    if not 0 <= options.root < world.world_size:
        raise InputError(
            "HD508", f"--root {options.root}: expected 0 to {world.world_size - 1} with {world.world_size} ranks"
        )
    if options.output and "{" in options.output:
        raise InputError(
            "HD506", f"{options.output}: gather writes one file; a pattern is for hpcdist.concat and hpcdist.split"
        )
    return run(Join(world, options))


def _is_of_a_checkpoint(args: argparse.Namespace) -> bool:
    """Whether a command line is about all tensors of a checkpoint, and not about arrays to join."""
    folder = args.output is not None and names_folder(args.output)
    return bool(args.tensors or args.max_shard_size or folder or any(map(is_sharded, args.input)))


def parser() -> Parser:
    """Return the parser of python -m hpcdist.gather."""
    p = join_parser(
        "hpcdist.gather",
        "Join arrays from files along one dimension, over the ranks of an MPI job. With -o they are streamed: every "
        "rank reads and writes its share of the result, a window at a time, so nothing has to fit in memory. Without "
        "-o each rank reads its share of the files, in the order given, and they are gathered in memory. Without "
        "INPUT: the source files of Python's standard library. "
        "CHECKPOINTS: if INPUT is a folder (of torch's DCP, or with .safetensors files, with or without an index), all "
        "its tensors are copied under their names to -o FILE.safetensors, FILE.h5 or, if OUT ends with /, a new folder "
        "that torch's dcp.load reads; and back, from one .safetensors or .h5 file. What is not a tensor is left out, "
        "and named; no pickle is run.",
        "examples: mpirun -n 4 python -m hpcdist.gather 'shards/*.npy' -o whole.h5; "
        "mpirun -n 4 python -m hpcdist.gather ckpt_dir -o model.safetensors",
    )
    p.add_argument(
        "--tensors", action="store_true",
        help="copy all tensors of INPUT, one .safetensors or .h5 file; implied by a folder as INPUT or OUT",
    )  # fmt: skip
    p.add_argument(
        "--max-shard-size", metavar="BYTES",
        help="with -o NAME.safetensors: all tensors, in files of so many bytes, such as 5GB, and an index of them, as "
        "Hugging Face's libraries read",
    )  # fmt: skip
    where = p.add_mutually_exclusive_group()
    # SUPPRESS, since argparse takes a value that is the default for one that was not given.
    where.add_argument("--root", type=int, default=argparse.SUPPRESS, help="rank that receives the result (default 0)")
    where.add_argument(
        "--all", dest="everywhere", action="store_true", help="every rank receives the result; rank 0 writes it"
    )
    return p
