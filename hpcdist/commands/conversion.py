"""The command ``python -m hpcdist convert``: all tensors of a file or folder, in another format."""

from __future__ import annotations

import glob
import os
import re
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from hpcdist import layout
from hpcdist.commands.copying import (
    Read,
    Report,
    add_options,
    check_output,
    copied,
    copy,
    finish,
    in_pieces,
    reading,
    share,
)  # fmt: skip
from hpcdist.control import objects
from hpcdist.errors import FileError, InputError, described, listed
from hpcdist.formats import safetensors
from hpcdist.formats.contents import Contents, Dataset
from hpcdist.formats.known import FORMATS, describe
from hpcdist.formats.paths import check_folder, shown
from hpcdist.runtime.cli import meter, run
from hpcdist.runtime.commandline import Parser, path, plural
from hpcdist.runtime.world import World, team_of
from hpcdist.staging.arguments import check_safetensors, flatten, shard_size
from hpcdist.staging.reader import OpenFiles
from hpcdist.staging.writer import SaveOptions
from hpcdist.validation.local import ArgumentError

_VERB = "convert"
_FILES = (safetensors.SUFFIX, ".h5")


def main(world: World, args: Namespace) -> int:
    """Write all tensors of the input to the output; return the exit status. Collective."""
    started, done = time.perf_counter(), (0, 0)
    contents, limit = objects.run_on_root(team_of().comm, _VERB, lambda: _look(args))
    tensors = contents.tensors.values()
    report: Report = {
        "verb": _VERB, "ranks": world.world_size, "nodes": world.nodes, "input": args.input, "kind": contents.kind,
        "files": len(contents.files), "tensors": len(tensors), "bytes": contents.nbytes(),
        "left_out": list(contents.left_out),
    }  # fmt: skip
    datasets, files = [Dataset(s.name, s.shape, s.dtype, s.boxes) for s in tensors], OpenFiles(contents)
    with reading([(files, of) for of in tensors], args.window, most=1) as read:
        if Path(args.output).suffix in _FILES:
            options = SaveOptions("posix", args.window, args.resume, contents.text, limit)
            done = copy(world, team_of(), _VERB, args.output, datasets, read, options)
        else:
            _write_folder(world, in_pieces(args.output, datasets, args.window), read, args.output)
    copying = copied(world, args, report, started, done)
    size = f"{plural(report['files'], 'file')}, {plural(len(tensors), 'tensor')}, {report['bytes']:,} bytes"
    lines = [f"{_VERB}: {contents.kind} {shown(args.input)}: {size}"]
    if left := contents.left_out:
        lines.append(f"LEFT OUT, {len(left)} that are no tensors: {listed(map(shown, left))}")
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
    if not os.path.isdir(source) and Path(source).suffix not in (*FORMATS, ".json"):
        expected = f"a folder, {safetensors.INDEX}, {', '.join(FORMATS)}"
        raise InputError("HD501", f"{source}: expected a file of tensors or a checkpoint: {expected}")
    contents = describe(source)
    contents.require()
    if "" in contents.tensors:
        raise InputError("HD418", f"{source}: holds an array without a name: hpcdist.gather copies it")
    if Path(out).suffix not in _FILES:
        if args.max_shard_size or args.resume:
            raise InputError("HD505", f"{out}: a folder of torch's DCP has no --max-shard-size, and no --resume")
        _check_folder(out, contents.nbytes())
        return contents, None
    dtypes = {name: stored.dtype for name, stored in contents.tensors.items()}
    try:
        limit = shard_size(args.max_shard_size, out)
        if out.endswith(".h5"):
            flatten(dict.fromkeys(dtypes))  # checks the names
        else:
            check_safetensors(dtypes, {}, {})
    except (ArgumentError, ValueError, TypeError) as error:
        raise InputError("HD418", f"{out}: {error}") from error
    files = [source, *contents.files, *glob.glob(os.path.join(glob.escape(source), "*.json"))]
    datasets = [Dataset(s.name, s.shape, s.dtype) for s in contents.tensors.values()]
    index = filter(os.path.exists, [safetensors.index_of(out)])  # which is replaced, or removed
    folder = os.path.dirname(os.path.abspath(out))
    if not out.endswith(".h5") and os.path.isdir(source) and os.path.realpath(source) == os.path.realpath(folder):
        raise InputError("HD507", f"{out}: would be read as a part of the input, {source}")
    for name in [out, *(name for name, _ in safetensors.divide(out, datasets, limit)), *index]:
        check_output(name, files, 0 if args.resume else contents.nbytes())
    return contents, limit


def _check_folder(out: str, size: int) -> None:
    """Check that a folder can be made, or is empty, or holds what a job of this command left when it was killed.

    Raises:
        FileError, InputError: it cannot, or there is something else in it.
    """
    folder, suffix = Path(out), Path(out).suffix
    if suffix and not folder.is_dir():
        expected = f"{', '.join(_FILES)}, or a name without suffix for a folder of torch's DCP"
        raise InputError("HD501", f"{out}: unknown suffix {suffix!r}; expected {expected}")
    check_folder(folder if folder.exists() else Path(os.path.realpath(folder)).parent, size, out)
    names = os.listdir(folder) if folder.exists() else []
    if others := [name for name in names if not re.fullmatch(r"__\d+_\d+\.distcp|\.metadata\.tmp", name)]:
        raise FileError("HD507", f"{out}: is not empty: it holds {min(others)}")


def _write_folder(world: World, datasets: Sequence[Dataset], read: Read, out: str) -> None:
    """Write a folder with torch's own writer, a file of each rank. Collective.

    ``.metadata`` comes last: until then it is no checkpoint. After a failure, what was written is removed.
    """
    # The import takes as long as that of all of torch.
    from torch.distributed.checkpoint import api, default_planner, filesystem, metadata, planner, state_dict_saver

    comm, folder = team_of().comm, Path(out)
    boxes = [(i, box) for i, _, box in share(datasets, world.rank, world.world_size)]
    if world.rank == 0:
        boxes += [(i, layout.whole(d.shape)) for i, d in enumerate(datasets) if not d.nbytes()]
    mine = {metadata.MetadataIndex(datasets[i].name, torch.Size(box.offset)): (datasets[i], i, box) for i, box in boxes}

    class Planner(default_planner.DefaultSavePlanner):
        """Each rank writes its share of the pieces, each of which is read when it is written."""

        def create_local_plan(self) -> planner.SavePlan:
            items = []
            for index, (d, _, box) in mine.items():
                chunk = metadata.ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape))
                properties = metadata.TensorProperties(dtype=d.dtype)
                data = planner.TensorWriteData(chunk, properties, torch.Size(d.shape))
                items.append(planner.WriteItem(index, planner.WriteItemType.SHARD, tensor_data=data))
            return planner.SavePlan(items, planner_data={index.fqn: (index.fqn,) for index in mine})

        def resolve_data(self, write_item: planner.WriteItem) -> Tensor:
            d, i, box = mine[write_item.index]
            x = torch.empty(box.shape, dtype=d.dtype, device="cpu")
            read(i, box, x)
            bar.update(x.nbytes)
            return x

    made = objects.run_on_root(comm, _VERB, lambda: _clear(folder, made=False))
    with meter(world, _VERB, sum(d.nbytes() for d in datasets) // world.world_size) as bar:
        try:
            state_dict_saver.save({}, storage_writer=filesystem.FileSystemWriter(out), planner=Planner())
        except api.CheckpointException as error:
            objects.run_on_root(comm, _VERB, lambda: _clear(folder, made))
            problems = {rank: described(failure, "HD410") for rank, (failure, _) in error.failures.items()}
            objects.raise_problems(_VERB, problems)


def _clear(folder: Path, made: bool) -> bool:
    """Remove what a job has left in a folder, and the folder, if it was `made`; whether there is none."""
    for left in folder.glob("__*.distcp"):
        left.unlink(missing_ok=True)
    if made:
        with suppress(OSError):  # something else is in it by now
            folder.rmdir()
    return not folder.exists()


def parser() -> Parser:
    """Return the parser of python -m hpcdist convert."""
    p = Parser(
        prog="hpcdist convert",
        description="Copy all tensors of a file or folder, under their names, to another format: from a folder of "
        "torch's DCP, .safetensors (one file, or a folder or index of several), .h5, .pt or .npz, to .safetensors, .h5 "
        "or a new folder of torch's DCP. Every rank reads and writes its share, a window at a time. Only tensors are "
        "copied; other values are listed. No pickle is run.",
        epilog="example: mpirun -n 4 python -m hpcdist convert ckpt_dir model.safetensors",
    )
    p.add_argument("input", type=path, metavar="SRC", help="a file or folder of tensors")
    p.add_argument(
        "output", type=path, metavar="DST",
        help="NAME.safetensors, NAME.h5, or a name without suffix: a folder for dcp.load",
    )  # fmt: skip
    p.add_argument(
        "--max-shard-size", metavar="BYTES",
        help="with NAME.safetensors: write several files of at most so many bytes, such as 5GB, and an index, for "
        "Hugging Face's libraries",
    )  # fmt: skip
    add_options(p)
    return p


if __name__ == "__main__":
    run(parser(), main)
