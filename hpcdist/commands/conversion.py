"""The command ``python -m hpcdist convert``: all tensors of a file or folder, in another format."""

from __future__ import annotations

import glob
import os
import time
from argparse import Namespace
from pathlib import Path

from hpcdist.commands.arrays import Report, add_options, check_output, copied, copy, finish
from hpcdist.commands.inputs import reading
from hpcdist.control import objects
from hpcdist.errors import InputError
from hpcdist.formats import safetensors
from hpcdist.formats.contents import Contents, Dataset
from hpcdist.formats.known import FORMATS, describe
from hpcdist.formats.paths import shown
from hpcdist.runtime.cli import run
from hpcdist.runtime.commandline import Parser, path, plural
from hpcdist.runtime.world import World, team_of
from hpcdist.staging.arguments import check_safetensors, flatten, shard_size
from hpcdist.staging.reader import OpenFiles
from hpcdist.staging.writer import SaveOptions

_VERB = "convert"
_FILES = (safetensors.SUFFIX, ".h5")


def main(world: World, args: Namespace) -> int:
    """Write all tensors of the input to the output; return the exit status. Collective."""
    started = time.perf_counter()
    contents, limit = objects.run_on_root(team_of().comm, _VERB, lambda: _look(args))
    tensors = contents.tensors.values()
    report: Report = {
        "verb": _VERB, "ranks": world.world_size, "nodes": world.nodes, "input": args.input, "kind": contents.kind,
        "files": len(contents.files), "tensors": len(tensors), "bytes": contents.nbytes(),
        "left_out": contents.left_out,
    }  # fmt: skip
    datasets, files = [(Dataset(s.name, s.shape, s.dtype), s.boxes) for s in tensors], OpenFiles(contents)
    with reading([(files, of) for of in tensors], args.window, most=1) as read:
        options = SaveOptions("posix", args.window, args.resume, contents.text, limit)
        done = copy(world, team_of(), _VERB, args.output, datasets, read, options)
    copying = copied(world, args, report, started, done)
    size = f"{plural(report['files'], 'file')}, {plural(len(tensors), 'tensor')}, {report['bytes']:,} bytes"
    lines = [f"{_VERB}: {contents.kind} {shown(args.input)}: {size}"]
    if left := contents.left_out:
        lines.append(f"LEFT OUT, {plural(len(left), 'value')} besides tensors: {contents.others()}")
    finish(world, args, report, [*lines, *copying])
    return 0


def _look(args: Namespace) -> tuple[Contents, int | None]:
    """Describe the input, and check before any data move that the output can be written.

    Returns:
        What the input holds; the number of bytes of a file, if there are to be several.

    Raises:
        InputError, FileError: it cannot be read, or the output cannot be written.
    """
    source, out = args.input, args.output
    if Path(out).suffix not in _FILES:
        dcp = "dcp.load(state, storage_reader=HDF5Reader(...)) reads a .h5 file in place of a folder of torch's DCP"
        raise InputError("HD501", f"{out}: expected a name that ends with {' or '.join(_FILES)}; {dcp}")
    if not os.path.isdir(source) and Path(source).suffix not in (*FORMATS, ".json"):
        expected = f"a folder, {safetensors.INDEX}, {', '.join(FORMATS)}"
        raise InputError("HD501", f"{source}: expected a file of tensors or a checkpoint: {expected}")
    contents = describe(source).with_tables()
    contents.require()
    if "" in contents.tensors:
        raise InputError("HD418", f"{source}: holds an array without a name: hpcdist.gather copies it")
    dtypes = {name: stored.dtype for name, stored in contents.tensors.items()}
    try:
        limit = shard_size(args.max_shard_size, out)
        if out.endswith(".h5"):
            flatten(dict.fromkeys(dtypes))  # checks the names
        else:
            check_safetensors(dtypes, {})
    except (ValueError, TypeError) as error:
        raise InputError("HD418", f"{out}: {error}") from error
    files = [source, *contents.files, *glob.glob(os.path.join(glob.escape(source), "*.json"))]
    sizes = [stored.nbytes() for stored in contents.tensors.values()]
    index = filter(os.path.exists, [safetensors.index_of(out)])  # which is replaced, or removed
    folder = os.path.dirname(os.path.abspath(out))
    if not out.endswith(".h5") and os.path.isdir(source) and os.path.realpath(source) == os.path.realpath(folder):
        raise InputError("HD507", f"{out}: would be read as a part of the input, {source}")
    for name in [out, *(name for name, _ in safetensors.divide(out, sizes, limit)), *index]:
        check_output(name, files, 0 if args.resume else contents.nbytes())
    return contents, limit


def parser() -> Parser:
    """Return the parser of python -m hpcdist convert."""
    p = Parser(
        prog="hpcdist convert",
        description="Copy all tensors of a file or folder, under their names, to another format: from a folder of "
        "torch's DCP, .safetensors (one file, or a folder or index of several), .h5, .pt or .npz, to .safetensors or "
        ".h5. Every rank reads and writes its share, a window at a time. Only tensors are copied; other values are "
        "listed. No pickle is run.",
        epilog="example: mpirun -n 4 python -m hpcdist convert ckpt_dir model.safetensors",
    )
    p.add_argument("input", type=path, metavar="SRC", help="a file or folder of tensors")
    p.add_argument("output", type=path, metavar="DST", help="NAME.safetensors or NAME.h5")
    p.add_argument(
        "--max-shard-size", metavar="BYTES",
        help="with NAME.safetensors: write several files of at most so many bytes, such as 5GB, and an index, for "
        "Hugging Face's libraries",
    )  # fmt: skip
    add_options(p)
    return p


if __name__ == "__main__":
    run(parser(), main)
