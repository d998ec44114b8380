"""The command ``python -m hpcdist.convert``: all tensors of a file or folder, in another format."""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from hpcdist.commands.arrays import shortened, show, speed
from hpcdist.commands.copying import copy, pieces_of
from hpcdist.control import objects
from hpcdist.errors import FileError, InputError, described, reason
from hpcdist.formats import dcp_folder, safetensors
from hpcdist.formats.atomic import check_folder, check_target
from hpcdist.formats.contents import Contents, Dataset, Stored
from hpcdist.formats.paths import shown
from hpcdist.formats.table import FORMATS, describe
from hpcdist.layout import Box
from hpcdist.layout.box_sequences import Listed
from hpcdist.runtime.cli import Parser, meter, nbytes, path, plural, show_bytes
from hpcdist.runtime.world import World
from hpcdist.staging.arguments import check_safetensors, flatten, shard_size
from hpcdist.staging.pieces import check_pieces, check_shape, piece_limit
from hpcdist.staging.reader import OpenFiles, TensorReader
from hpcdist.staging.writer import WINDOW, SaveOptions
from hpcdist.validation.local import WrongError

__all__ = ["main", "parser"]

_VERB = "convert"
_FILES = (safetensors.SUFFIX, ".h5")


def main(world: World, args: argparse.Namespace) -> int:
    """Write all tensors of the input to the output; return the exit status. Collective."""
    comm, started = world.team.comm, time.perf_counter()

    def look() -> tuple[Contents, int | None]:
        if not os.path.isdir(args.input) and Path(args.input).suffix not in (*FORMATS, ".json"):
            expected = f"a folder, {safetensors.INDEX}, {', '.join(FORMATS)}"
            raise InputError("HD501", f"{args.input}: expected a file of tensors or a checkpoint: {expected}")
        contents = describe(args.input)
        contents.require()
        return contents, _check(contents, args)

    contents, limit = objects.broadcast(comm, _VERB, look)
    report: dict[str, Any] = {
        "verb": _VERB, "ranks": world.world_size, "nodes": world.nodes, "input": args.input, "kind": contents.kind,
        "files": len(contents.files), "tensors": len(contents.tensors), "bytes": contents.nbytes(),
        "left_out": list(contents.left_out),
    }  # fmt: skip
    with OpenFiles(contents) as files:
        source = _Source(files, args.window)
        if Path(args.output).suffix in _FILES:
            options = SaveOptions("posix", args.window, args.resume, contents.text, limit)
            pieces, kept = copy(world, world.team, _VERB, args.output, source.datasets, source.read, options)
            report |= {"pieces": pieces, "pieces_kept": kept} if args.resume else {}
            names = [(args.output, 0)] if limit is None else safetensors.divide(args.output, source.datasets, limit)
            report["output_files"] = [name for name, _ in names]
        else:
            report["output_files"] = _write_folder(world, source, args.output)
    report["seconds"] = max(objects.all_gather_object(comm, time.perf_counter() - started))
    report["output"] = args.output
    show(world, report, None if args.json else lambda: _text(report, args.window))
    return 0


def _text(report: dict[str, Any], window: int) -> str:
    of = f" of {plural(report['files'], 'file')}" if report["files"] > 1 else ""
    what = f"{report['kind']} {shown(report['input'])}{of}"
    lines = [f"{_VERB}: {what}: {plural(report['tensors'], 'tensor')}, {report['bytes']:,} bytes"]
    if report["left_out"]:
        count = len(report["left_out"])
        lines.append(f"LEFT OUT, {count} that are no tensors: {shortened(map(shown, report['left_out']))}")
    lines.append(f"ranks: {report['ranks']}, each reads and writes its share, {show_bytes(window)} at a time")
    if "pieces" in report:
        lines.append(f"resumed: {report['pieces_kept']} of {report['pieces']} pieces were there and are kept")
    lines.append(speed("every rank writes", report["seconds"], report["bytes"]))
    count = len(report["output_files"])
    return "\n".join([*lines, f"written: {shown(report['output'])}" + (f" in {count} files" if count > 1 else "")])


def _check(contents: Contents, args: argparse.Namespace) -> int | None:
    """Check before any data move that the output can be written; the number of bytes of a file, if there are to be
    several.

    Raises:
        InputError, FileError: it cannot.
    """
    out: str = args.output
    dtypes = {name: stored.dtype for name, stored in contents.tensors.items()}
    try:
        for name, stored in contents.tensors.items():
            try:
                check_shape(stored.shape, stored.dtype.itemsize)
                check_pieces(stored.shape, stored.dtype.itemsize, piece_limit(args.window // 4, stored.dtype.itemsize))
            except WrongError as error:
                raise InputError("HD418", f"{contents.path}: {name} {error}") from error
        if "" in dtypes:
            raise InputError("HD418", f"{contents.path}: holds an array without a name: hpcdist.gather copies it")
        if Path(out).suffix not in _FILES:
            if args.max_shard_size or args.resume:
                raise InputError("HD505", f"{out}: a folder of torch's DCP has no --max-shard-size, and no --resume")
            _check_folder(out, contents.nbytes())
            return None
        limit = shard_size(args.max_shard_size, out)
        if out.endswith(".h5"):
            flatten(dict.fromkeys(dtypes))  # checks the names
        else:
            check_safetensors(dtypes, {}, {})
    except (WrongError, ValueError, TypeError) as error:
        raise InputError("HD418", f"{out}: {error}") from error
    _check_inputs(out, args.input, list(contents.files), limit)
    check_target(out, 0 if args.resume else contents.nbytes())
    return limit


def _check_inputs(out: str, source: str, files: Sequence[str], limit: int | None) -> None:
    """Raise an InputError if an input is also the output, may be one of several, or is the index that the output has
    or removes."""
    index = safetensors.index_of(out)
    places = index, os.path.dirname(index) or "."
    if os.path.exists(index) and any(os.path.samefile(source, place) for place in places):
        raise InputError("HD507", f"{out}: would replace an input, {index}")
    stem = re.escape(os.path.realpath(out.removesuffix(safetensors.SUFFIX)))
    shard = re.compile(rf"{stem}-\d+-of-\d+{re.escape(safetensors.SUFFIX)}")
    for file in files:
        same = os.path.exists(out) and os.path.samefile(out, file)
        if same or (limit is not None and shard.fullmatch(os.path.realpath(file))):
            raise InputError("HD507", f"{out}: would replace an input, {file}")


class _Source:
    """The tensors that are copied, as this rank reads them."""

    def __init__(self, files: OpenFiles, window: int) -> None:
        self._files, self._window = files, window
        self._stored = list(files.contents.tensors.values())
        self._last: tuple[int, TensorReader] | None = None
        self.datasets = [Dataset(s.name, s.shape, s.dtype, self._pieces(s)) for s in self._stored]

    def _pieces(self, stored: Stored) -> Listed:
        """Those of the file, if they are runs of the tensor: each is then read once, with its checksum."""
        boxes, limit = stored.boxes, piece_limit(self._window // 2, stored.dtype.itemsize)
        if len(boxes) and int(boxes.sizes.max()) <= limit and boxes.are_runs:
            return boxes
        return pieces_of(stored.shape, stored.dtype, self._window)

    def read(self, i: int, box: Box, out: Tensor) -> None:
        """Fill a tensor with a box of the i-th tensor; an InputError if it cannot be read."""
        stored = self._stored[i]
        try:
            if self._last is None or self._last[0] != i:
                self._last = i, TensorReader(self._files, stored, verify=True)
            # Plain bytes are read straight into `out`, a piece of any size that fits there at once.
            window = self._window // 2
            self._last[1].read(box, out, window if stored.raw is None else max(window, 2 * out.nbytes))
        except InputError:
            raise
        except FileError as error:
            raise InputError("HD402", str(error)) from error
        except Exception as error:  # each library has errors of its own for a damaged file
            path = self._files.contents.path
            raise InputError("HD402", f"{path}: {stored.name}: cannot be read: {reason(error)}") from error


def _check_folder(out: str, size: int) -> None:
    """Check that a folder can be made, or is empty, or holds what a job of this command left when it was killed.

    Raises:
        FileError: it cannot, or there is something else in it.
    """
    folder, suffix = Path(out), Path(out).suffix
    if not folder.exists():
        if suffix:
            expected = f"{', '.join(_FILES)}, or a name without suffix for a folder of torch's DCP"
            raise InputError("HD501", f"{out}: unknown suffix {suffix!r}; expected {expected}")
        check_folder(Path(os.path.realpath(folder)).parent, size, out)
        return
    if not folder.is_dir():
        raise FileError("HD411", f"{out}: is not a folder")
    names = os.listdir(folder)
    if dcp_folder.NAME in names:
        raise FileError("HD512", f"{out}: holds a checkpoint already, which is not replaced")
    if others := [name for name in names if not re.fullmatch(r"__\d+_\d+\.distcp|\.metadata\.tmp", name)]:
        raise FileError("HD512", f"{out}: is not empty: it holds {min(others)}")
    check_folder(folder, size, out)


def _write_folder(world: World, source: _Source, out: str) -> list[str]:
    """Write a folder with torch's own writer, a file of each rank; return its files. Collective.

    ``.metadata`` comes last: until then it is no checkpoint. After a failure, what was written is removed.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    from hpcdist.commands.dcp_planner import PiecesPlanner  # which imports torch's DCP: as long as all of torch

    comm = world.team.comm
    made = objects.broadcast(comm, _VERB, lambda: _cleared(Path(out)))
    with meter(world, _VERB, sum(d.nbytes() for d in source.datasets) // world.world_size) as bar:
        planner = PiecesPlanner(source.datasets, source.read, world.world_size, world.rank, bar.update)
        try:
            save({}, storage_writer=FileSystemWriter(out), planner=planner)
        except CheckpointException as error:
            objects.broadcast(comm, _VERB, lambda: _remove(Path(out), made))
            problems = {rank: described(failure, "HD410") for rank, (failure, _) in error.failures.items()}
            objects.raise_problems(_VERB, problems)
    return objects.broadcast(comm, _VERB, lambda: sorted(map(str, Path(out).glob("__*.distcp"))))


def _cleared(folder: Path) -> bool:
    """Remove what a killed job has left in a folder; whether there is none."""
    _remove(folder, made=False)
    return not folder.exists()


def _remove(folder: Path, made: bool) -> None:
    for left in folder.glob("__*.distcp"):
        left.unlink(missing_ok=True)
    if made:
        with suppress(OSError):  # something else is in it by now
            folder.rmdir()


def parser() -> Parser:
    """Return the parser of python -m hpcdist.convert."""
    p = Parser(
        prog="hpcdist.convert",
        description="Copy all tensors of a file or folder, under their names, to another format: from a folder of "
        "torch's DCP, .safetensors (one file, or a folder or index of several), .h5, .pt or .npz, to .safetensors, .h5 "
        "or a new folder of torch's DCP. Every rank reads and writes its share, a window at a time. What is not a "
        "tensor is left out, and named; no pickle is run.",
        epilog="example: mpirun -n 4 python -m hpcdist.convert ckpt_dir model.safetensors",
    )
    p.add_argument("input", type=path, metavar="SRC", help="a file or folder of tensors")
    p.add_argument(
        "output",
        type=path,
        metavar="DST",
        help="NAME.safetensors, NAME.h5, or a name without suffix: a folder for dcp.load",
    )
    p.add_argument(
        "--max-shard-size", metavar="BYTES",
        help="with NAME.safetensors: several files of so many bytes, such as 5GB, and an index, for Hugging Face's "
        "libraries",
    )  # fmt: skip
    p.add_argument(
        "--window", type=nbytes, default=WINDOW, metavar="BYTES",
        help="host memory that a rank may use for data, such as 64M (default 256M)",
    )  # fmt: skip
    p.add_argument("--resume", action="store_true", help="resume a killed job: write only what differs from its output")
    p.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return p
