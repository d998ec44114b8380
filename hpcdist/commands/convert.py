"""All tensors of a checkpoint from one layout to another: what ``python -m hpcdist.gather`` does with folders."""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcdist.commands import dcp_output
from hpcdist.commands.checkpoint_inputs import Checkpoint, find
from hpcdist.commands.checkpoint_outputs import Copy
from hpcdist.commands.formats import FORMATS, names_folder
from hpcdist.commands.steps import shortened, show, speed
from hpcdist.control import objects
from hpcdist.errors import InputError
from hpcdist.files import safetensors
from hpcdist.files.commit import check_target
from hpcdist.files.regular import shown
from hpcdist.runtime.cli import plural, show_bytes
from hpcdist.runtime.world import World
from hpcdist.staging.names import flatten
from hpcdist.staging.pieces import PIECE, check_pieces, check_shape
from hpcdist.staging.sharded_files import shard_size
from hpcdist.validation.local import WrongError

__all__ = ["convert"]

_OUTPUTS = (safetensors.SUFFIX, ".h5")


def convert(world: World, args: argparse.Namespace) -> int:
    """Write all tensors of the input to the output; return the exit status. Collective."""
    comm = world.team.comm
    started = time.perf_counter()

    def look() -> tuple[Checkpoint, int | None]:
        _check_options(args)
        held = find(args.input[0])
        return held, _check_output(held, args)

    held, limit = objects.broadcast(comm, "gather", look)
    copy = Copy(world, held, args.output, args.window, args.resume, limit)
    report: dict[str, Any] = {
        "verb": "gather", "ranks": world.world_size, "nodes": world.nodes, "input": args.input[0], "kind": held.kind,
        "files": len(held.files), "tensors": len(held.tensors), "bytes": held.nbytes(), "left_out": held.left_out,
    }  # fmt: skip
    folder = objects.broadcast(comm, "gather", lambda: names_folder(args.output))
    report |= copy.write_folder() if folder else copy.write_files()
    report["seconds"] = max(objects.all_gather_object(comm, time.perf_counter() - started))
    report["output"] = args.output
    show(world, report, None if args.json else lambda: _text(report, args.window))
    return 0


def _text(report: dict[str, Any], window: int) -> str:
    files = f" of {plural(report['files'], 'file')}" if report["kind"].endswith("folder") else ""
    what = f"{report['kind']} {shown(report['input'])}{files}"
    lines = [f"gather: {what}: {plural(report['tensors'], 'tensor')}, {report['bytes']:,} bytes"]
    if report["left_out"]:
        count = len(report["left_out"])
        lines.append(f"LEFT OUT, {count} that are no tensors: {shortened(map(shown, report['left_out']))}")
    lines.append(f"ranks: {report['ranks']}, each reads and writes its share, {show_bytes(window)} at a time")
    if "pieces" in report:
        lines.append(f"resumed: {report['pieces_kept']} of {report['pieces']} pieces were there and are kept")
    lines.append(speed("every rank writes", report["seconds"], report["bytes"]))
    count = len(report["output_files"])
    return "\n".join([*lines, f"written: {shown(report['output'])}" + (f" in {count} files" if count > 1 else "")])


def _check_options(args: argparse.Namespace) -> None:
    """Raise an InputError for options that are about joining arrays."""
    what = "all tensors of a checkpoint are copied"
    if len(args.input) != 1:
        raise InputError(
            "HD505", f"{what}: one INPUT is expected, {len(args.input)} are given: {shortened(args.input)}"
        )
    if args.output is None:
        raise InputError("HD505", f"{args.input[0]}: {what}: -o is missing")
    given = {
        "--dim": args.dim != 0, "--route": args.route != "auto", "--compare": args.compare, "--all": args.everywhere,
        "--root": "root" in args, "--verify": args.verify,
    }  # fmt: skip
    odd = next((option for option, is_given in given.items() if is_given), None)
    if odd is not None:
        raise InputError("HD505", f"{odd}: is for arrays that are joined; {what} as they are")


def _check_output(held: Checkpoint, args: argparse.Namespace) -> int | None:
    """Check before any data move that the output can be written; the number of bytes of a file, if there are to be
    several.

    Raises:
        InputError, FileError: it cannot.
    """
    path: str = args.output
    _check_tensors(held, args.window)
    if names_folder(path):
        if args.max_shard_size or args.resume:
            raise InputError("HD505", f"{path}: a folder of torch's DCP has no --max-shard-size, and no --resume")
        dcp_output.check_output(path, held.nbytes())
        return None
    suffix = Path(path).suffix
    if suffix not in _OUTPUTS:
        outputs = f"{', '.join(_OUTPUTS)} or, for a folder of torch's DCP, a name that ends with /"
        raise InputError(
            "HD501", f"{path}: unknown suffix {suffix!r} for all tensors of a checkpoint; expected {outputs}"
        )
    try:
        limit = shard_size(args.max_shard_size, path)
        names = [x.name for x in held.tensors]
        if suffix == ".h5":
            flatten(dict.fromkeys(names))  # checks the names
        elif safetensors.METADATA in names:
            raise WrongError("HD418", f"{safetensors.METADATA!r} cannot be the name of a tensor")
    except (WrongError, ValueError, TypeError) as error:
        raise InputError("HD418", f"{path}: {error}") from error
    for x in held.tensors:
        if x.dtype not in FORMATS[suffix].dtypes:
            raise InputError("HD418", f"{path}: a {suffix} file cannot hold {x.dtype}, which {x.name} has")
    _check_inputs(path, args.input[0], [file for file, _ in held.files], limit)
    check_target(path, 0 if args.resume else held.nbytes())
    return limit


def _check_tensors(held: Checkpoint, window: int) -> None:
    for x in held.tensors:
        try:
            check_shape(x.shape, x.dtype.itemsize)
            check_pieces(x.shape, x.dtype.itemsize, max(1, min(PIECE, window // 4) // x.dtype.itemsize))
        except WrongError as error:
            raise InputError("HD418", f"{held.path}: {x.name} {error}") from error


def _check_inputs(path: str, source: str, files: Sequence[str], limit: int | None) -> None:
    """Raise an InputError if an input is also the output, may be one of several, or is the index that the output has
    or removes."""
    index = f"{path}.index.json"
    places = index, os.path.dirname(index) or "."
    if os.path.exists(index) and any(os.path.samefile(source, place) for place in places):
        raise InputError("HD507", f"{path}: would replace an input, {index}")
    stem = re.escape(os.path.realpath(path.removesuffix(safetensors.SUFFIX)))
    shard = re.compile(rf"{stem}-\d+-of-\d+{re.escape(safetensors.SUFFIX)}")
    for file in files:
        same = os.path.exists(path) and os.path.samefile(path, file)
        if same or (limit is not None and shard.fullmatch(os.path.realpath(file))):
            raise InputError("HD507", f"{path}: would replace an input, {file}")
