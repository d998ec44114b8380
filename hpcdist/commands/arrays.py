"""The commands gather, concat and split: join arrays from files, and cut one into several. And what convert shares:
copy tensors into files.

Every rank reads and writes its share, with no more than a window of host memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from hpcdist import layout
from hpcdist.collectives.join import concat, gather
from hpcdist.comm.team import Team
from hpcdist.commands.inputs import Inputs, Read, described, find, joined
from hpcdist.control import objects
from hpcdist.errors import HpcdistError, InputError, RankError, listed
from hpcdist.formats.contents import Dataset, Slices
from hpcdist.formats.known import FORMATS
from hpcdist.formats.paths import check_target, shown
from hpcdist.layout import Box
from hpcdist.layout.box import Listed, Shards, grid, summed
from hpcdist.process import machine
from hpcdist.runtime.cli import meter, nbytes, placed, progress, table, timed
from hpcdist.runtime.commandline import Parser, path, plural, problem, show_bytes
from hpcdist.runtime.world import World, team_of
from hpcdist.staging.pieces import check_pieces, piece_limit
from hpcdist.staging.writer import WINDOW, FileWriter, SaveOptions
from hpcdist.tensors.storage import as_bytes, bits, row_major
from hpcdist.validation.local import ArgumentError

OUTPUTS = tuple(suffix for suffix, of in FORMATS.items() if of.dtypes)
_MAX_PARTS = 10**6
_NUMBER = re.compile(r"\{rank(:0?\d{0,2}d?)?\}")
_ROUTES = ("mpi", "gloo", "hdf5", "nccl")
_ROUNDS = 5  # timed runs of each route, after a warm-up that is not counted

NO_PIECES = Listed.of([], ())
File = tuple[str, Box]  # a file to be written, and the box of the joined array that it holds
Move = Callable[..., Tensor | None]  # (shard, route=, out=) -> result
Fill = Callable[[Box, Tensor], object]  # fills a tensor with a box of the joined array
Report = dict[str, Any]


def copy(
    world: World,
    team: Team,
    verb: str,
    path: str,
    datasets: Sequence[tuple[Dataset, Listed]],
    read: Read,
    options: SaveOptions,
) -> tuple[int, int]:
    """Write tensors to a file, or to several and an index. Collective over `team`.

    Args:
        datasets: each with the pieces in which it is in a file, if it has some.
        read: raises an HpcdistError for what cannot be read.

    Returns:
        How many pieces this rank has, and how many of them another run has left complete.

    Raises:
        RankError: on every rank, if anything failed on one; existing files are then as they were.
    """
    listed = [_in_pieces(path, d, held, options.window) for d, held in datasets]
    cut = [replace(d, count=len(boxes)) for (d, _), boxes in zip(datasets, listed, strict=True)]
    pieces = [(i, row, box) for i, boxes in enumerate(listed) for row, box in enumerate(boxes)]
    sizes = [box.size() * cut[i].dtype.itemsize for i, _, box in pieces]
    bounds = summed(layout.balance(sizes, team.size))
    mine = pieces[bounds[team.rank] : bounds[team.rank + 1]]
    with meter(world, verb, sum(sizes) // team.size) as bar:
        options = replace(options, progress=bar.update)
        with FileWriter(team, verb, path, cut, options) as file:
            buffer = torch.empty(piece_limit(options.window // 2, 1), dtype=torch.uint8, device="cpu")
            try:
                for i, row, box in mine:
                    if file.problem is not None:
                        break
                    dtype = cut[i].dtype
                    x: Tensor = buffer[: box.size() * dtype.itemsize].view(dtype).view(box.shape)
                    read(i, box, x)
                    file.put(i, row, box, x)
            except HpcdistError as error:
                file.fail(error)
    return len(mine), file.kept


def _in_pieces(path: str, d: Dataset, held: Listed, window: int) -> Listed:
    """Cut a tensor for the output `path`, half of the window a piece, since reading one may take as much again.

    Pieces that it has in its file are kept if they fit and are runs of it: each is then read once, with its checksum.

    Raises:
        InputError: there are too many pieces.
    """
    limit = piece_limit(window // 2, d.dtype.itemsize)
    if len(held) and int(held.sizes.max()) <= limit and held.are_runs:
        return held
    try:
        check_pieces(d.shape, d.dtype.itemsize, limit)
    except ArgumentError as error:
        raise InputError("HD419", f"{path}: {d.name} {error}") from error
    return grid(d.shape, limit)


def add_options(p: Parser) -> None:
    """Add the options that all of these commands have."""
    p.add_argument(
        "--window", type=nbytes, default=WINDOW, metavar="BYTES",
        help="memory for a piece of the output file, such as 64M (default 256M); a rank uses twice this at most",
    )  # fmt: skip
    p.add_argument("--resume", action="store_true", help="resume a killed job: write only what differs from its output")
    p.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def check_output(name: str, inputs: Iterable[str], nbytes: int) -> None:
    """Check before any data move that a file of `nbytes` can be written, and is none of the inputs.

    Raises:
        InputError, FileError: it cannot: no such folder, not writable, no space, or an input under another name.
    """
    if os.path.exists(name) and any(os.path.samefile(name, path) for path in inputs):
        raise InputError("HD507", f"{name}: is also an input, which it would replace")
    check_target(name, nbytes)


def copied(
    world: World, args: Namespace, report: Report, started: float, done: tuple[int, int], *result: str
) -> list[str]:
    """Complete the report on a copy of all bytes to files; return lines of the report as text. Collective.

    Args:
        done: what copy() returned on this rank.
        result: lines.
    """
    found = objects.all_gather_object(team_of().comm, (time.perf_counter() - started, *done))
    seconds, pieces, kept = zip(*found, strict=True)
    slowest = max(seconds)
    report |= {"seconds": slowest, "output": args.output}
    lines = [
        f"ranks: {world.world_size}, each reads and writes its share, {show_bytes(args.window)} at a time",
        *result,
    ]
    if args.resume:
        report |= {"pieces": sum(pieces), "pieces_kept": sum(kept)}
        lines.append(f"resumed: {sum(kept)} of {sum(pieces)} pieces were there and are kept")
    took = f"every rank writes: {slowest * 1e3:.2f} ms, {report['bytes'] / slowest / 1e9:.2f} GB/s"
    return [*lines, took, f"written: {shown(args.output)}"]


def finish(world: World, args: Namespace, report: Report, lines: Iterable[str]) -> None:
    """Print a report on rank 0: as lines of text, or as JSON."""
    if world.rank == 0:
        print(json.dumps(report) if args.json else "\n".join(lines), flush=True)


def join_main(world: World, args: Namespace) -> int:
    """Join the inputs: with -o in a file, or in a copy for each rank; else in memory, on the root, or on every rank.

    Collective.

    Returns:
        The exit status.
    """
    if args.root is not None and not 0 <= args.root < world.world_size:
        expected = f"expected 0 to {world.world_size - 1} with {world.world_size} ranks"
        raise InputError("HD505", f"--root {args.root}: {expected}")
    copies = "{" in (args.output or "")
    if args.output is None or args.route or args.compare:
        if args.resume or copies:
            raise InputError("HD505", "--resume, and names with {rank}, need -o without --route and --compare")
        return _join_in_memory(world, args)
    names = _file_names(args.output, world.world_size if copies else 1)
    data, report = _found(world, args)
    files = [(name, layout.whole(data.shape)) for name in names]
    if not copies:
        return _stream(world, args, data, report, "the file; nothing sent between ranks", files)
    mine = [files[world.rank]]  # perhaps in a folder that only this node has
    return _stream(world, args, data, report, f"{len(names)} files, one per rank", files, mine, copies)


def split_main(world: World, args: Namespace) -> int:
    """Split the inputs, joined, on the ranks of the world; return the exit status. Collective."""
    count = world.world_size if args.parts is None else args.parts
    if not 1 <= count <= _MAX_PARTS:
        raise InputError("HD505", f"--parts {count}: expected 1 to {_MAX_PARTS}")
    names = _file_names(args.output, count)
    data, report = _found(world, args)
    extents = layout.block(data.shape[data.dim], count)
    report |= {"parts": count, "extents": extents}
    files = list(zip(names, Shards(data.shape, data.dim, summed(extents)), strict=True))
    mine = [files[i] for i in layout.block_range(count, world.world_size, world.rank)]
    return _stream(world, args, data, report, f"{count} parts of {listed(extents)} rows", files, mine)


def _found(world: World, args: Namespace) -> tuple[Inputs, Report]:
    """Find the inputs, and begin the report. Collective."""
    if args.output and not args.input:  # an empty variable of a script must not fill a file
        raise InputError("HD505", f"{args.output}: no INPUT is given, and without one nothing is written")
    data = find(world, args.input, args.dim)
    return data, {
        "verb": args.prog, "ranks": world.world_size, "nodes": world.nodes, "files": len(data.sources),
        "inputs": [source.spec for source in data.sources], "dim": data.dim, "shape": list(data.shape),
        "dtype": str(data.dtype).removeprefix("torch."), "bytes": data.nbytes(), "bytes_sent": 0,
    }  # fmt: skip


def _stream(
    world: World,
    args: Namespace,
    data: Inputs,
    report: Report,
    result: str,
    files: Sequence[File],
    mine: Sequence[File] | None = None,
    copies: bool = False,
) -> int:
    """Write files straight from the inputs; return the exit status. Collective.

    Args:
        result: what is written, for the report.
        mine: the files that this rank writes, alone; None: all ranks write all files together.
        copies: whether each file is a copy of the whole, and not a part.
    """
    started, comm = time.perf_counter(), team_of().comm
    written = files if mine is None else mine
    objects.run_on_all(comm, "output", lambda: _check_outputs(args, data, written, () if world.rank else files))

    with data.reading(args.window) as read:
        write = partial(_write, world, args, data, written, partial(data.join, read))
        if mine is None:
            done = write(team_of())
        else:
            done = objects.run_on_all(comm, args.prog, lambda: _alone(write))[world.rank]
    result = f"result: shape {data.shape} in {result}"
    lines = copied(world, args, report, started, done, result)
    held = written if copies else files if world.rank == (args.root or 0) else ()
    return _finish(world, args, data, report, lines, [name for name, _ in held])


def _write(
    world: World,
    args: Namespace,
    data: Inputs,
    files: Iterable[File],
    fill: Fill,
    team: Team,
) -> tuple[int, int]:
    """Write files, as copy() does. Collective over `team`."""
    pieces = kept = 0
    for name, whole in files:
        dataset, options = Dataset("data", whole.shape, data.dtype), SaveOptions("posix", args.window, args.resume)

        def read(i: int, box: Box, out: Tensor, at: Sequence[int] = whole.offset) -> None:
            fill(box.shift(at), out)

        done = copy(world, team, args.prog, name, [(dataset, NO_PIECES)], read, options)
        pieces, kept = pieces + done[0], kept + done[1]
    return pieces, kept


def _alone(write: Callable[[Team], tuple[int, int]]) -> tuple[int, int]:
    """Write on this rank alone."""
    from mpi4py import MPI

    try:
        return write(team_of(MPI.COMM_SELF))
    except RankError as error:  # of one rank, which the other ranks learn of in a line
        raise InputError(problem(error)) from error


def _check_outputs(args: Namespace, data: Inputs, written: Iterable[File], files: Iterable[File]) -> None:
    """Check before any data move that files can be written, and that all files differ.

    Raises:
        InputError, FileError: one cannot: unknown suffix, no such folder, not writable, no space, a format without this
            dtype, one of the inputs; or two names are of one file, through links or "..".
    """
    for name, _ in written:
        suffix = Path(name).suffix
        if suffix not in OUTPUTS:
            raise InputError("HD501", f"{name}: {suffix!r} is not written; expected one of {', '.join(OUTPUTS)}")
        if data.dtype not in FORMATS[suffix].dtypes:
            others = ", ".join(other for other in OUTPUTS if data.dtype in FORMATS[other].dtypes)
            raise InputError("HD418", f"{name}: a {suffix} file cannot hold {data.dtype}; use one of {others}")
        check_output(name, [of.contents.path for of in data.sources], 0 if args.resume else data.nbytes())
    seen: dict[str, str] = {}
    for name, _ in files:
        if (other := seen.setdefault(os.path.realpath(name), name)) != name:
            raise InputError("HD507", f"{name}: is the same file as {other}")


def _join_in_memory(world: World, args: Namespace) -> int:
    """Gather the inputs in memory, on the root, or on every rank without one; return the exit status. Collective."""
    data, report = _found(world, args)
    own, kept = (data.share(world, rank) for rank in (world.rank, args.root or 0))
    whole = data.nbytes() if args.root in (None, world.rank) else 0
    _check_memory(world, own.size() * data.dtype.itemsize + whole)
    comm, writes = team_of().comm, args.output is not None and world.rank == (args.root or 0)
    files = [(args.output, layout.whole(data.shape))] if writes else []
    objects.run_on_all(comm, "output", lambda: _check_outputs(args, data, files, ()))
    shard = torch.empty(own.shape, dtype=data.dtype, device="cpu")
    with data.reading(WINDOW) as read:
        objects.run_on_all(comm, "read", lambda: data.join(read, own, shard))
    move: Move = partial(gather, dim=data.dim, root=args.root)
    where, sent = f"rank {args.root}", data.nbytes() - kept.size() * data.dtype.itemsize
    if args.root is None:
        move = partial(concat, dim=data.dim)
        where, sent = "every rank", data.nbytes() * (world.world_size - 1)
    report["bytes_sent"] = sent
    result, times = _time_routes(world, args, report, shard, move)
    counts = listed(layout.block(len(data.sources), world.world_size))
    lines = [
        f"ranks: {world.world_size} on {plural(world.nodes, 'node')}; arrays per rank: {counts}",
        f"result: shape {data.shape} on {where}; {sent:,} bytes sent between ranks",
        *times,
    ]
    held: Slices | None = None if result is None else lambda box: result[box.slices()]
    if args.output is None:
        return _finish(world, args, data, report, lines, held)

    def fill(box: Box, out: Tensor) -> None:
        assert held is not None
        bits(out).copy_(bits(held(box)))

    objects.run_on_all(comm, args.prog, lambda: _alone(partial(_write, world, args, data, files, fill)))
    report["output"] = args.output
    lines.append(f"written: {shown(args.output)}")
    return _finish(world, args, data, report, lines, [args.output] if writes else held)


def _check_memory(world: World, nbytes: int) -> None:
    """Check before anything is read that each node has memory for its ranks' inputs and results. Collective.

    Raises:
        InputError: on all ranks, if one has not.
    """
    ranks = objects.all_gather_object(team_of().comm, (world.node, nbytes, machine.available()))
    for node in range(world.nodes):
        needs, free = zip(*((need, left) for where, need, left in ranks if where == node), strict=True)
        if sum(needs) > min(free):
            where = f"node {node}" if world.nodes > 1 else "this host"
            raise InputError(
                "HD310",
                f"the inputs and the result need {sum(needs):,} bytes of memory on {where}, and {min(free):,} are "
                "available: with -o FILE they are streamed through a window of it",
            )


def _time_routes(
    world: World, args: Namespace, report: Report, shard: Tensor, move: Move
) -> tuple[Tensor | None, list[str]]:
    """Time `move` on one route, or to compare on each in turn, with results in existing memory. Collective.

    Returns:
        The result of the first route, with which those of others are compared; and a table as lines of text.
    """
    refused: list[Report] = []
    results: dict[str, tuple[Tensor, Tensor | None]] = {}
    for route in _ROUTES if args.compare else [args.route or "mpi"]:
        x = placed(world, shard, route)
        try:
            results[route] = x, move(x, route=route)
        except RankError as error:
            if not results:
                raise
            refused.append({"route": route, "refused": next(iter(error.problems.values()))})
    times: dict[str, list[float]] = {route: [] for route in results}
    for _ in progress(range(_ROUNDS), world, "move"):
        for route, (x, out) in results.items():
            times[route].append(timed(world, partial(move, x, route=route, out=out)))
    held = [None if result is None else result.cpu() for _, result in results.values()]
    rows: list[Report] = []
    cells = []
    for route, result in zip(results, held, strict=True):
        same = result is None or held[0] is None or torch.equal(_bytes_of(result), _bytes_of(held[0]))
        right, seconds = all(objects.all_gather_object(team_of().comm, same)), median(times[route])
        rows.append({"route": route, "seconds": seconds, "same_result": right})
        numbers = f"{seconds * 1e3:.2f}", f"{report['bytes'] / seconds / 1e9:.2f}"
        cells.append([route, *numbers, "yes" if right else "NO"])
    report["routes"] = rows + refused
    return held[0], [
        "", table(["route", "time (ms)", "GB/s", "same result"], cells),
        *(f"{row['route']}: not run: {row['refused']}" for row in refused),
        "", f"time: median of {_ROUNDS} rounds, the slowest rank; GB/s: bytes of the result per time",
    ]  # fmt: skip


def _finish(
    world: World,
    args: Namespace,
    data: Inputs,
    report: Report,
    lines: list[str],
    held: Slices | Sequence[str] | None,
) -> int:
    """Verify, if it is asked for or without INPUT; print the report; return the exit status. Collective.

    Args:
        held: this rank's copy of the result, in memory or in files.
    """
    kind = plural(report["files"], "array" if args.input else "source file")
    head = f"{args.prog}: {kind}, {report['bytes']:,} bytes of {report['dtype']}, along dim {data.dim}"
    order = [f"order: {listed(map(shown, report['inputs']))}"] if args.input else []
    lines = [head, *order, *lines]
    if args.verify or not args.input:
        report |= _verify(world, args, data, held)
        equals = "equal to" if report["verified"] else "NOT EQUAL to"
        lines.append(f"sha256 {report['sha256']}: {equals} the inputs read on one process")
    finish(world, args, report, lines)
    return 0 if report.get("verified", True) else 1  # the result differs from the inputs


def _verify(world: World, args: Namespace, data: Inputs, held: Slices | Sequence[str] | None) -> Report:
    """Compare the root's copy of the joined array with the inputs, bit by bit, and the copies of other ranks with it by
    their checksums. Inputs and files are read by the libraries of their formats, and not as the commands read, within a
    window. Collective.

    Args:
        held: this rank's copy, in memory or in files that are joined.

    Returns:
        "verified", and the "sha256" of the bytes of the joined array.
    """

    def verify() -> tuple[bool, str] | None:
        if not held:
            return None
        if callable(held):
            copy = held
        else:
            files = joined([described(name) for name in held], data.dim)
            if (files.shape, files.dtype) != (data.shape, data.dtype):
                return False, ""
            copy = files.by_library()
        right, digest, wanted = True, hashlib.sha256(), data.by_library()
        for part in layout.boxes(layout.whole(data.shape), max(1, args.window // 8 // data.dtype.itemsize)):
            got = _bytes_of(copy(part))
            digest.update(got.numpy().data)
            right = right and (world.rank != (args.root or 0) or torch.equal(got, _bytes_of(wanted(part))))
        return right, digest.hexdigest()

    found = filter(None, objects.run_on_all(team_of().comm, "verify", verify))
    rights, digests = zip(*found, strict=True)
    return {"verified": all(rights) and len(set(digests)) == 1, "sha256": digests[0]}


def _bytes_of(x: Tensor) -> Tensor:
    return as_bytes(row_major(x))


def _file_names(pattern: str, count: int) -> list[str]:
    """Return the name of each of `count` parts.

    Raises:
        InputError: `pattern` is not a pattern, or gives two parts the same name.

    Example::

        >>> _file_names("parts/{rank:04d}.npy", 3)[2]
        'parts/0002.npy'
    """
    advice = "write {rank} or {rank:04d} for the number of a part"
    if re.search("[{}]", _NUMBER.sub("", pattern)):
        raise InputError("HD505", f"{pattern}: cannot be a pattern (unsupported field); {advice}")
    names = [pattern.format(rank=i) for i in range(count)]
    if len(set(names)) < count:
        raise InputError("HD505", f"{pattern}: gives parts the same name; {advice}")
    return names


_HELP = {  # description, what -o is for, and an example
    "gather": (
        "Join arrays from files along one dimension, over the ranks of an MPI job. With -o every rank reads and writes "
        "its share, a window at a time, so the arrays need not fit in memory. Without -o the ranks read the files in "
        "the order given, and gather them in the memory of one rank. Without INPUT they gather the source files of "
        "Python's standard library. To copy all tensors of a checkpoint, use hpcdist convert.",
        "write the result",
        "mpirun -n 4 python -m hpcdist.gather 'shards/*.npy' -o whole.h5",
    ),
    "concat": (
        "Join arrays from files along one dimension, like hpcdist.gather, but on every rank of an MPI job. With -o "
        "NAME all ranks write one file. With -o 'NAME-{rank}' each rank writes its own copy, for folders that the "
        "nodes do not share.",
        "write the result, or with {rank} in the name a copy for each rank",
        "mpirun -n 2 python -m hpcdist.concat 'shards/*.npy' -o '/local/whole-{rank}.npy'",
    ),
    "split": (
        "Split an array, or several joined ones, along one dimension into one file per part, over the ranks of an MPI "
        "job. Every rank reads and writes its share, a window at a time, so the arrays need not fit in memory.",
        "names of the parts, with {rank} or {rank:04d} for their number",
        "mpirun -n 4 python -m hpcdist.split whole.h5 -o 'parts/{rank:04d}.npy' --parts 16",
    ),
}


def parser(what: str) -> Parser:
    """Return the parser of python -m hpcdist.gather, concat or split."""
    description, output, example = _HELP[what]
    p = Parser(prog=f"hpcdist {what}", description=description, epilog=f"example: {example}")
    p.set_defaults(prog=what, root=None)
    p.add_argument(
        "input", nargs="*", metavar="INPUT",
        help="a file or a quoted pattern: .npy, .npz, .pt, .safetensors, .h5; "
        "FILE:NAME for one array of a file that holds several",
    )  # fmt: skip
    p.add_argument(
        "-o", "--output", type=path, metavar="OUT", required=what == "split",
        help=f"{output}: .npy, .safetensors or .h5",
    )  # fmt: skip
    p.add_argument("--dim", type=int, default=0, help="dimension to join or split along (default 0)")
    p.add_argument(
        "--verify", action="store_true",
        help="read inputs and result again on one process, with the libraries of their formats, and compare them",
    )  # fmt: skip
    if what == "gather":
        p.add_argument("--root", type=int, default=0, help="without -o: rank that receives the result (default 0)")
    if what == "split":
        p.add_argument("--parts", type=int, help="number of parts (default: one for each rank)")
    else:
        p.add_argument("--route", choices=_ROUTES, help="gather in memory, by this route (default mpi)")
        p.add_argument("--compare", action="store_true", help="gather in memory, by every route that can run here")
    add_options(p)
    return p
